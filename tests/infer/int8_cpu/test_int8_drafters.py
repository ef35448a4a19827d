"""Drafters in 8-bit integers: against torch's own rounding and float arithmetic, and the target's
texts."""

import pytest
import torch

from infer import generate, load_drafter, save_drafter
from infer.config import HeadConfig
from infer.drafters.base import target_head
from infer.formats.compatibility import check_folder
from infer.int8_cpu.loading import quantise_drafter
from infer.int8_cpu.modules import Int8Linear
from infer.int8_cpu.recording import RecordedDecoder
from infer.targets.lean import LeanDecoder

KINDS = {
    "convolutions": {"conv_kernel_size": 2},
    "fusion": {"layer_fusion": True},
    "window": {"sliding_window": 6, "block_size": 4},
    "part": {"draft_vocab_size": 40, "head": HeadConfig("selector", rank=6)},
    "dart": {"family": "dart", "head": HeadConfig("gru", rank=6, hidden_size=10)},
}


def in_codes(make_tiny, kind: str):
    """A target, a drafter in codes, and one of the numbers that torch's own codes with these scales
    stand for."""
    (target, ours), (_, theirs) = (make_tiny(**{"block_size": 5} | KINDS[kind]) for _ in range(2))
    ours.requires_grad_(False), theirs.requires_grad_(False)
    quantise_drafter(ours)
    for name, part in ours.named_modules():
        if type(part) is Int8Linear:
            layer = theirs.get_submodule(name)
            zeros = torch.zeros(len(part.scales)).long()
            codes = torch.quantize_per_channel(
                layer.weight, part.scales.double(), zeros, 0, torch.qint8
            )
            assert torch.equal(codes.int_repr(), part.codes)
            layer.weight.data = codes.dequantize()
    return target, ours, theirs


def drafted(target, drafter) -> torch.Tensor:
    """The log-probabilities (1, L, R) of a block behind random context."""
    generator = torch.Generator().manual_seed(4)
    state = drafter.state(1, 40)
    features = torch.randn(1, 20, len(drafter.layer_ids) * 32, generator=generator)
    tokens = torch.randint(97, (1, 21), generator=generator)
    with state.add(1) as row:
        drafter.update_context(target, features, tokens[:, :20], [20], row)
    return drafter.draft_block(target, tokens[0, 20:], state).marginals


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_the_rounded_weights_in_floats_and_texts_the_targets(make_tiny, kind):
    """But for activations, which are rounded as well, and for the head's rows."""
    target, ours, theirs = in_codes(make_tiny, kind)
    found = drafted(target, ours)
    expected = drafted(target, theirs)
    assert found.shape == expected.shape and not torch.equal(found, expected)
    assert (expected.exp() * (expected - found)).sum(-1).mean() < 0.02
    assert type(ours.lm_head or target_head(ours, target)) is Int8Linear
    for method, temperature in (("chain", 0.0), ("ddtree", 0.0), ("ddtree", 1.0)):
        options = {"max_new_tokens": 24, "temperature": temperature, "seed": 2, "ignore_eos": True}
        plain = generate(target, None, [[3, 1, 4], [1, 5, 9, 2, 6]], method="plain", **options)
        texts = generate(
            target, ours, [[3, 1, 4], [1, 5, 9, 2, 6]], method=method, budget=8, **options
        )
        assert [text.ids for text in texts] == [text.ids for text in plain]


@pytest.mark.parametrize("kind", ["fusion", "window", "part"])
def test_a_recorded_block_is_the_block_layer_by_layer(make_tiny, kind, monkeypatch):
    target, ours, _ = in_codes(make_tiny, kind)
    assert type(ours.state(1, 40).decoder) is RecordedDecoder
    recorded = drafted(target, ours)
    monkeypatch.setattr(RecordedDecoder, "run", LeanDecoder.run)
    assert torch.equal(recorded, drafted(target, ours))


def test_codes_are_a_folder_that_every_command_reads(tmp_path, make_tiny):
    _, ours, theirs = in_codes(make_tiny, "part")
    save_drafter(ours.config, ours.state_dict(), tmp_path)
    read = load_drafter(tmp_path)
    assert all(map(torch.equal, read.parameters(), theirs.parameters()))
    assert load_drafter(tmp_path, quantization="int8").quantised
    assert "fc.weight codes" in str(check_folder(tmp_path)[0])
    save_drafter(ours.config, ours.state_dict() | {"fc.scales": torch.ones(1)}, tmp_path)
    with pytest.raises(
        ValueError, match=r"missing tensors: fc\.weight; unknown tensors: fc\.codes, fc\.scales"
    ):
        load_drafter(tmp_path)


def test_it_is_refused_before_anything_is_read(tmp_path):
    for other in ({"device": "cuda"}, {"dtype": torch.bfloat16}):
        with pytest.raises(ValueError, match=r"drafter\.quantization=int8 is for"):
            load_drafter(tmp_path / "gone", quantization="int8", **other)

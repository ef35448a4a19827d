"""Drafters in int8: against PyTorch's own quantisation in float arithmetic, and lossless decoding.

L drafted positions, R vocabulary of the drafter.
"""

import pytest
import torch

from infer import generate, load_drafter, save_drafter
from infer.config import HeadConfig
from infer.drafters.base import get_target_head
from infer.formats.compatibility import check_engines
from infer.int8_cpu.loading import quantise_drafter
from infer.int8_cpu.modules import Int8Linear
from infer.int8_cpu.recording import RecordingDecoder
from infer.targets.kernel_decoder import KernelDecoder

DRAFTER_KINDS = {
    "conv_kernel_size": {"conv_kernel_size": 2},
    "fusion": {"layer_fusion": True},
    "window": {"sliding_window": 6, "block_size": 4},
    "small vocabulary": {"draft_vocab_size": 40, "head": HeadConfig("selector", rank=6)},
    "dart": {"family": "dart", "head": HeadConfig("gru", rank=6, hidden_size=10)},
}
DRAFTER_PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6]]


def make_drafters(make_tiny, kind: str):
    """Return a target, a drafter in int8, and a float drafter with the dequantised weights, as
    PyTorch quantises them with the same scales."""
    options = {"block_size": 5} | DRAFTER_KINDS[kind]
    target, int8_drafter = make_tiny(**options)
    _, float_drafter = make_tiny(**options)
    int8_drafter.requires_grad_(False)
    float_drafter.requires_grad_(False)
    quantise_drafter(int8_drafter)
    for name, module in int8_drafter.named_modules():
        if type(module) is Int8Linear:
            layer = float_drafter.get_submodule(name)
            zero_points = torch.zeros(len(module.scales)).long()
            codes = torch.quantize_per_channel(
                layer.weight, module.scales.double(), zero_points, 0, torch.qint8
            )
            assert torch.equal(codes.int_repr(), module.codes)
            layer.weight.data = codes.dequantize()
    return target, int8_drafter, float_drafter


def draft_marginals(target, drafter) -> torch.Tensor:
    """Return the log-probabilities (1, L, R) of a block after a random context."""
    generator = torch.Generator().manual_seed(4)
    state = drafter.allocate_state(1, 40)
    features = torch.randn(1, 20, len(drafter.layer_ids) * 32, generator=generator)
    tokens = torch.randint(97, (1, 21), generator=generator)
    with state.add(1) as row:
        drafter.update_context(target, features, tokens[:, :20], [20], row)
    return drafter.draft_block(target, tokens[0, 20:], state).marginals


@pytest.mark.parametrize("kind", DRAFTER_KINDS)
def test_blocks_are_those_of_dequantised_weights_and_outputs_those_of_the_target(make_tiny, kind):
    """Blocks differ only by the rounding of activations and of the head's weights."""
    target, int8_drafter, float_drafter = make_drafters(make_tiny, kind)
    actual = draft_marginals(target, int8_drafter)
    expected = draft_marginals(target, float_drafter)
    assert actual.shape == expected.shape
    assert not torch.equal(actual, expected)
    assert (expected.exp() * (expected - actual)).sum(-1).mean() < 0.02
    assert type(int8_drafter.lm_head or get_target_head(int8_drafter, target)) is Int8Linear
    for method, temperature in (("chain", 0.0), ("ddtree", 0.0), ("ddtree", 1.0)):
        options = {"max_new_tokens": 24, "temperature": temperature, "seed": 2, "ignore_eos": True}
        baseline = generate(target, None, DRAFTER_PROMPTS, method="plain", **options)
        outputs = generate(
            target, int8_drafter, DRAFTER_PROMPTS, method=method, budget=8, **options
        )
        assert [output.ids for output in outputs] == [output.ids for output in baseline]


@pytest.mark.parametrize("kind", ["fusion", "window", "small vocabulary"])
def test_a_recorded_block_is_the_block_layer_by_layer(make_tiny, kind, monkeypatch):
    target, drafter, _ = make_drafters(make_tiny, kind)
    assert type(drafter.allocate_state(1, 40).decoder) is RecordingDecoder
    recorded = draft_marginals(target, drafter)
    monkeypatch.setattr(RecordingDecoder, "run", KernelDecoder.run)
    assert torch.equal(recorded, draft_marginals(target, drafter))


def test_an_int8_drafter_is_saved_as_a_folder_that_every_command_loads(tmp_path, make_tiny):
    _, int8_drafter, float_drafter = make_drafters(make_tiny, "small vocabulary")
    state_dict = int8_drafter.state_dict()
    save_drafter(int8_drafter.config, state_dict, tmp_path)
    loaded = load_drafter(tmp_path)
    assert all(map(torch.equal, loaded.parameters(), float_drafter.parameters()))
    assert load_drafter(tmp_path, quantization="int8").quantised
    assert "fc.weight codes" in str(check_engines(tmp_path)[0])

    incomplete = state_dict | {"fc.scales": torch.ones(1)}
    save_drafter(int8_drafter.config, incomplete, tmp_path)
    with pytest.raises(ValueError, match=r"fc\.weight.* fc\.codes, fc\.scales"):
        load_drafter(tmp_path)


def test_other_devices_and_dtypes_are_refused_before_the_folder_is_read(tmp_path):
    for options in ({"device": "cuda"}, {"dtype": torch.bfloat16}):
        with pytest.raises(ValueError, match=r"drafter\.quantization=int8"):
            load_drafter(tmp_path / "missing", quantization="int8", **options)

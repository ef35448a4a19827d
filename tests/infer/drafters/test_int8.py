"""Drafters in 8-bit integers: against torch's own rounding and float arithmetic, and the target's texts."""

import pytest
import torch
from safetensors.torch import load_file

from infer import generate, load_drafter, save_drafter
from infer.config import HeadConfig, LoadedConfig
from infer.drafters.base import target_head
from infer.drafters.int8 import quantise, rounded
from infer.formats.compatibility import check_folder
from infer.targets.int8 import Int8Linear

KINDS = {
    "dflash": {},
    "convolutions": {"convolutions": 2},
    "window": {"window": 6, "block_size": 4},
    "part": {"vocabulary": 40, "head": HeadConfig("selector", rank=6)},
    "dart": {"family": "dart", "head": HeadConfig("gru", rank=6, hidden=10)},
}


def trio(make_tiny, kind: str):
    """A target, a drafter in codes and one of the numbers that torch's own codes with these scales stand for."""
    target, drafter = make_tiny(**{"block_size": 5} | KINDS[kind])
    drafters = [drafter, make_tiny(**{"block_size": 5} | KINDS[kind])[1]]
    for one in drafters:
        one.load_state_dict(drafter.state_dict())
        if one.d2t is not None:
            one.d2t.copy_(torch.arange(40) * 2 - torch.arange(40))
        one.eval().requires_grad_(False)
    quantise(drafters[0])
    codes = {name: part for name, part in drafters[0].named_modules() if type(part) is Int8Linear}
    for name, part in codes.items():
        layer = drafters[1].get_submodule(name)
        zeros = torch.zeros(len(part.scales)).long()
        theirs = torch.quantize_per_channel(layer.weight, part.scales.double(), zeros, 0, torch.qint8)
        assert torch.equal(theirs.int_repr(), part.codes)
        layer.weight.data = theirs.dequantize()
    return target, *drafters, codes


def drafted(target, drafter) -> torch.Tensor:
    """The states (1, W, D) of a block behind random context."""
    generator, state = torch.Generator().manual_seed(4), drafter.state(1, 40)
    features = torch.randn(1, 20, len(drafter.layer_ids) * 32, generator=generator)
    tokens = torch.randint(97, (1, 21), generator=generator)
    with state.add(1) as row:
        drafter.update_context(target, features, tokens[:, :20], [20], row)
    return drafter.draft_block(target, tokens[0, 20:], state).marginals


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_those_of_the_rounded_weights_in_floats(make_tiny, kind):
    """But for activations, that are rounded as well, and for the head's rows."""
    target, ours, theirs, codes = trio(make_tiny, kind)
    assert len(codes) >= 7 and all("head" not in name or name == "lm_head" for name in codes)
    found, expected = drafted(target, ours), drafted(target, theirs)
    assert not torch.equal(found, expected)
    assert (expected.exp() * (expected - found)).sum(-1).mean() < 0.02
    head = ours.lm_head or target_head(ours, target)
    assert type(head) is Int8Linear and head is (ours.lm_head or target_head(ours, target))
    assert len(head.codes) == found.shape[-1] == expected.shape[-1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_the_targets_own(make_tiny, kind, temperature):
    target, drafter, _, _ = trio(make_tiny, kind)
    options = {"max_new_tokens": 24, "temperature": temperature, "top_k": 20, "seed": 2, "ignore_eos": True}
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6]]
    expected = [text.ids for text in generate(target, None, prompts, method="plain", **options)]
    for method in ("chain", "ddtree"):
        assert [text.ids for text in generate(target, drafter, prompts, method=method, budget=8, **options)] == expected


def test_an_int8_head_stays_the_targets_own(make_tiny):
    target, drafter = make_tiny(vocabulary=40)
    target.model.set_output_embeddings(rounded(target.model.get_output_embeddings()))
    drafter.requires_grad_(False)
    quantise(drafter)
    part, whole = target_head(drafter, target), target.model.get_output_embeddings()
    assert torch.equal(part.codes, whole.codes[:40]) and torch.equal(part.scales, whole.scales[:40])


def test_codes_are_a_folder_that_any_command_reads(tmp_path, make_tiny):
    _, ours, theirs, _ = trio(make_tiny, "part")
    save_drafter(ours.config, ours.state_dict(), tmp_path)
    read = load_drafter(tmp_path)
    assert all(map(torch.equal, read.parameters(), theirs.parameters())) and not read.quantised
    assert load_drafter(tmp_path, quantization="int8").quantised
    assert all("wrong type" in str(verdict) for verdict in check_folder(tmp_path) if "vLLM" in str(verdict))
    weights = load_file(tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_size < 0.5 * 4 * sum(map(torch.numel, theirs.parameters()))
    save_drafter(ours.config, weights | {"fc.scales": torch.ones(1)}, tmp_path)
    with pytest.raises(ValueError, match=r"missing tensors: fc\.weight; unknown tensors: fc\.codes, fc\.scales"):
        load_drafter(tmp_path)


def test_it_is_loaded_in_codes_or_refused_before_anything_is_read(tmp_path):
    assert load_drafter("embedded", quantization="int8").quantised
    for other in ({"device": "cuda"}, {"dtype": torch.bfloat16}):
        with pytest.raises(ValueError, match=r"drafter\.quantization=int8 is for"):
            load_drafter(tmp_path / "gone", quantization="int8", **other)
    with pytest.raises(ValueError, match=r"drafter\.quantization=int4"):
        LoadedConfig("int4").check()

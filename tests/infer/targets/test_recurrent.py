"""Recurrent layers: long chains in pieces, packed documents, sampled texts, and other caches than
ours."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from infer.api import decode
from infer.config import DecodeOptions
from infer.engine import scheduler
from infer.targets.recurrent import SEGMENT, Segment, recur
from infer.targets.target import Target
from infer.trees.tree import root_only

V = 61
SMALL = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
SMALL |= {
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "max_position_embeddings": 512,
}
TWO = ["linear_attention", "full_attention"]
KINDS = {
    "gated delta rule": (
        "qwen3_5_text",
        {"layer_types": TWO, "head_dim": 8, "linear_num_key_heads": 1},
    ),
    "kda": (
        "kimi_linear",
        {"layer_types": TWO, "linear_num_heads": 2, "linear_head_dim": 6, "num_experts": 2},
    ),
    "mamba 2": (
        "granitemoehybrid",
        {"layer_types": TWO, "mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_state": 5},
    ),
    "short convolution": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
}
KINDS["gated delta rule"][1].update(
    linear_num_value_heads=2, linear_key_head_dim=6, linear_value_head_dim=8
)
KINDS["kda"][1].update(
    kv_lora_rank=12, q_lora_rank=None, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=6
)
KINDS["kda"][1].update(num_experts_per_token=1, moe_intermediate_size=16, num_shared_experts=1)
KINDS["mamba 2"][1].update(mamba_n_groups=1, num_local_experts=0, shared_intermediate_size=16)


@pytest.fixture(scope="module", params=KINDS)
def target(random_target, request) -> Target:
    kind, options = KINDS[request.param]
    known = type(AutoConfig.for_model(kind))
    sizes = {
        key: value
        for key, value in (SMALL | {"num_hidden_layers": 2}).items()
        if hasattr(known, key)
    }
    return random_target(known(**sizes | options))


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, V, (length,), generator=generator).tolist() for length in lengths]


def own_logits(target: Target, text: list[int]) -> torch.Tensor:
    """Logits (T, V) of a text alone, by transformers."""
    with torch.no_grad():
        return target.model(torch.tensor([text])).logits[0]


def near(ours: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether logits are equal but for rounding: transformers' own two forms differ as much."""
    return bool((ours - own).abs().max() < 1e-4 * max(1, own.abs().max()))


def test_the_triangular_system_is_the_recurrence():
    """Against one node after the other, with a state for each, in float64; decays of a head and of
    every entry."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    parents = [0] + [int(torch.randint(i, (), generator=generator)) for i in range(1, 30)]
    ancestors = torch.eye(30, dtype=torch.bool)
    for node in range(1, 30):
        ancestors[node] |= ancestors[parents[node]]
    segment = Segment(slice(None), ancestors[None, None], None)
    for decays, delta in ((1, True), (5, True), (1, False)):
        queries = draw(1, 2, 30, 5)
        keys = draw(1, 2, 30, 5)
        values = draw(1, 2, 30, 4)
        state = draw(1, 2, 5, 4)
        decay = -draw(1, 2, 30, decays).abs()
        beta = draw(1, 2, 30, 1).sigmoid()
        done = recur(queries, keys, values, decay, beta if delta else None, state, segment)
        states = []
        for t in range(30):
            before = (states[parents[t]] if t else state) * decay[:, :, t, :, None].exp()
            key = keys[:, :, t, :, None]
            value = values[:, :, t, None]
            write = beta[:, :, t, None] * (value - key.mT @ before) if delta else value
            states.append(before + key @ write)
            assert torch.allclose(
                done.outputs[:, :, t], (queries[:, :, t, None] @ states[t])[:, :, 0]
            )
            assert torch.allclose(done.state_after(state, torch.tensor([t]), segment), states[t])


def test_long_prompts_of_unlike_lengths_in_pieces(target):
    """Prompts that end in different pieces, the second half behind the first, and a token after
    each."""
    texts = prompts(2 * SEGMENT + 21, 9, SEGMENT + 1)
    ends = (SEGMENT + 30, 4, SEGMENT)
    cache = target.cache(4, 200)
    with torch.no_grad(), cache.add(3) as part:
        first = target.extend([text[:end] for text, end in zip(texts, ends, strict=True)], part, ())
        rest = [text[end:] for text, end in zip(texts, ends, strict=True)]
        second = target.extend(rest, part, ())
    with torch.no_grad():
        tree = root_only(torch.tensor([5, 6, 7]))
        third = target.head(target.verify(tree, tree.ancestors(), cache).last)
    for row, (text, end) in enumerate(zip(texts, ends, strict=True)):
        own = own_logits(target, [*text, 5 + row])
        assert near(target.head(first.last[row, :end]), own[:end])
        assert near(target.head(second.last[row, : len(text) - end]), own[end:-1])
        assert near(third[row, 0], own[-1])


def test_packed_documents_do_not_see_each_others_states(target):
    """Documents end inside a piece, at its end, and cover several. A state that ran on over a
    border would be seen."""
    lengths = (SEGMENT + 7, SEGMENT - 7, 5, 2 * SEGMENT + 1)
    ids = torch.tensor([sum(prompts(*lengths), [])])
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    documents = torch.cat([torch.full((length,), i) for i, length in enumerate(lengths)])[None]
    logits = target.head(target.packed_features(ids, positions, documents, ()).last)[0]
    for part, part_ids in zip(logits.split(lengths), ids[0].split(lengths), strict=True):
        assert near(part, own_logits(target, part_ids.tolist()))


@pytest.mark.parametrize(
    ("temperature", "methods"), [(0.8, ("chain", "ddtree")), (0.0, ("chain", "static"))]
)
def test_texts_are_plain_ones(target, scripted_drafter, temperature, methods, monkeypatch):
    monkeypatch.setattr(scheduler, "PREFILL_CHUNK", 20)  # prompts enter over several passes
    texts = prompts(47, 12, 30)
    options = DecodeOptions(
        20, temperature=temperature, seed=3, method="plain", max_num_seqs=2, ignore_eos=True
    )
    plain = [text.ids for text in decode(target, None, texts, options)]
    whole = [[*text, *ids] for text, ids in zip(texts, plain, strict=True)]
    for method in methods:
        drafter = scripted_drafter(whole, 5, V)
        written = decode(target, drafter, texts, replace(options, method=method, budget=8))
        assert [text.ids for text in written] == plain
        assert sum(text.stats.tau for text in written) > 3.3, method


def test_with_other_caches_layers_do_what_they_did(target):
    """A copy too, which computes with its own weights."""
    text = prompts(12)[0]
    other = copy.deepcopy(target.model)
    expected = own_logits(target, text)
    for parameter in other.parameters():
        parameter.data *= 1.1
    copied = Target(other)
    changed = own_logits(copied, text)
    assert not near(changed, expected)
    with torch.no_grad(), copied.cache(1, 20).add(1) as part:
        assert near(copied.head(copied.extend([text], part, ()).last[0]), changed)
    assert torch.equal(own_logits(target, text), expected)

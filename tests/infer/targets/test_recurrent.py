"""Recurrent layers: long chains in pieces, packed documents, sampled texts, and other caches than
ours."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from infer import Engine
from infer.api import decode_prompts
from infer.config import DecodeOptions, DrafterConfig, EngineConfig, SamplingOptions
from infer.drafters.build import create_drafter
from infer.engine import scheduler
from infer.targets.predecessors import RECURRENCE_SEGMENT_POSITIONS, RecurrenceSegment
from infer.targets.recurrent import compute_recurrence_segment
from infer.targets.target import Target
from infer.trees.tree import make_root_trees

V = 61
SMALL_CONFIG = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
SMALL_CONFIG |= {
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "max_position_embeddings": 512,
}
TWO_LAYER_TYPES = ["linear_attention", "full_attention"]
RECURRENT_MODELS = {
    "gated delta rule": (
        "qwen3_5_text",
        {"layer_types": TWO_LAYER_TYPES, "head_dim": 8, "linear_num_key_heads": 1},
    ),
    "kda": (
        "kimi_linear",
        {
            "layer_types": TWO_LAYER_TYPES,
            "linear_num_heads": 2,
            "linear_head_dim": 6,
            "num_experts": 2,
        },
    ),
    "mamba 2": (
        "granitemoehybrid",
        {
            "layer_types": TWO_LAYER_TYPES,
            "mamba_n_heads": 2,
            "mamba_d_head": 16,
            "mamba_d_state": 5,
        },
    ),
    "short convolution": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
}
RECURRENT_MODELS["gated delta rule"][1].update(
    linear_num_value_heads=2, linear_key_head_dim=6, linear_value_head_dim=8
)
RECURRENT_MODELS["kda"][1].update(
    kv_lora_rank=12, q_lora_rank=None, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=6
)
RECURRENT_MODELS["kda"][1].update(
    num_experts_per_token=1, moe_intermediate_size=16, num_shared_experts=1
)
RECURRENT_MODELS["mamba 2"][1].update(
    mamba_n_groups=1, num_local_experts=0, shared_intermediate_size=16
)


@pytest.fixture(scope="module", params=RECURRENT_MODELS)
def target(random_target, request) -> Target:
    kind, options = RECURRENT_MODELS[request.param]
    config_class = type(AutoConfig.for_model(kind))
    sizes = {
        key: value
        for key, value in (SMALL_CONFIG | {"num_hidden_layers": 2}).items()
        if hasattr(config_class, key)
    }
    return random_target(config_class(**sizes | options))


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, V, (length,), generator=generator).tolist() for length in lengths]


def transformers_logits(target: Target, text: list[int]) -> torch.Tensor:
    """Logits (T, V) of a text alone, by transformers."""
    with torch.no_grad():
        return target.model(torch.tensor([text])).logits[0]


def equals_up_to_rounding(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether logits are equal but for rounding: transformers' own two forms differ as much."""
    return bool((actual - expected).abs().max() < 1e-4 * max(1, expected.abs().max()))


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
    segment = RecurrenceSegment(slice(None), ancestors[None, None], None)
    for decays, delta in ((1, True), (5, True), (1, False)):
        queries = draw(1, 2, 30, 5)
        keys = draw(1, 2, 30, 5)
        values = draw(1, 2, 30, 4)
        state = draw(1, 2, 5, 4)
        decay = -draw(1, 2, 30, decays).abs()
        beta = draw(1, 2, 30, 1).sigmoid()
        result = compute_recurrence_segment(
            queries, keys, values, decay, beta if delta else None, state, segment
        )
        states = []
        for t in range(30):
            before = (states[parents[t]] if t else state) * decay[:, :, t, :, None].exp()
            key = keys[:, :, t, :, None]
            value = values[:, :, t, None]
            write = beta[:, :, t, None] * (value - key.mT @ before) if delta else value
            states.append(before + key @ write)
            assert torch.allclose(
                result.outputs[:, :, t], (queries[:, :, t, None] @ states[t])[:, :, 0]
            )
            assert torch.allclose(result.state_after(state, torch.tensor([t]), segment), states[t])


def test_long_prompts_of_unlike_lengths_in_pieces(target):
    """Prompts that end in different pieces, the second half behind the first, and a token after
    each."""
    texts = prompts(2 * RECURRENCE_SEGMENT_POSITIONS + 21, 9, RECURRENCE_SEGMENT_POSITIONS + 1)
    ends = (RECURRENCE_SEGMENT_POSITIONS + 30, 4, RECURRENCE_SEGMENT_POSITIONS)
    cache = target.allocate_cache(4, 200)
    with torch.no_grad(), cache.add_rows(3) as new_rows:
        first = target.extend_cache(
            [text[:end] for text, end in zip(texts, ends, strict=True)], new_rows, ()
        )
        remaining = [text[end:] for text, end in zip(texts, ends, strict=True)]
        second = target.extend_cache(remaining, new_rows, ())
    with torch.no_grad():
        tree = make_root_trees(torch.tensor([5, 6, 7]))
        third = target.compute_logits(
            target.verify(tree, tree.build_ancestor_mask(), cache).last_hidden_states
        )
    for row, (text, end) in enumerate(zip(texts, ends, strict=True)):
        expected = transformers_logits(target, [*text, 5 + row])
        assert equals_up_to_rounding(
            target.compute_logits(first.last_hidden_states[row, :end]), expected[:end]
        )
        assert equals_up_to_rounding(
            target.compute_logits(second.last_hidden_states[row, : len(text) - end]),
            expected[end:-1],
        )
        assert equals_up_to_rounding(third[row, 0], expected[-1])


def test_packed_documents_do_not_see_each_others_states(target):
    """Documents end inside a piece, at its end, and cover several. A state that ran on over a
    border would be seen."""
    lengths = (
        RECURRENCE_SEGMENT_POSITIONS + 7,
        RECURRENCE_SEGMENT_POSITIONS - 7,
        5,
        2 * RECURRENCE_SEGMENT_POSITIONS + 1,
    )
    ids = torch.tensor([sum(prompts(*lengths), [])])
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    documents = torch.cat([torch.full((length,), i) for i, length in enumerate(lengths)])[None]
    logits = target.compute_logits(
        target.compute_packed_features(ids, positions, documents, ()).last_hidden_states
    )[0]
    for new_rows, part_ids in zip(logits.split(lengths), ids[0].split(lengths), strict=True):
        assert equals_up_to_rounding(new_rows, transformers_logits(target, part_ids.tolist()))


@pytest.mark.parametrize(
    ("temperature", "methods"), [(0.8, ("chain", "ddtree")), (0.0, ("chain", "static"))]
)
def test_texts_are_plain_ones(target, scripted_drafter, temperature, methods, monkeypatch):
    monkeypatch.setattr(
        scheduler, "MAX_PREFILL_CHUNK_TOKENS", 20
    )  # prompts enter over several passes
    texts = prompts(47, 12, 30)
    options = DecodeOptions(
        20, temperature=temperature, seed=3, method="plain", max_num_seqs=2, ignore_eos=True
    )
    plain = [text.ids for text in decode_prompts(target, None, texts, options)]
    full_sequences = [[*text, *ids] for text, ids in zip(texts, plain, strict=True)]
    for method in methods:
        drafter = scripted_drafter(full_sequences, 5, V)
        generations = decode_prompts(
            target, drafter, texts, replace(options, method=method, budget=8)
        )
        assert [text.ids for text in generations] == plain
        assert sum(text.stats.tau for text in generations) > 3.3, method


def test_rounds_recorded_as_graphs_decode_the_same(target, graphs):
    """Replayed rounds update the recurrent states in place. Sequences of several lengths come and
    go."""
    drafter = create_drafter(DrafterConfig(layers=1, block_size=5, mask_token_id=1), target)
    drafter.init_weights(torch.Generator().manual_seed(0))
    outputs = {}
    for method, captures in (("plain", False), ("plain", True), ("ddtree", True)):
        options = EngineConfig(method, 7, max_num_seqs=2)
        engine = Engine(target, None if method == "plain" else drafter, options, 80)
        engine.runner.uses_cuda_graphs = captures
        sequences = [
            engine.submit(prompt, SamplingOptions(max_new_tokens=12 + i, ignore_eos=True))
            for i, prompt in enumerate(prompts(9, 14, 30))
        ]
        while engine.has_unfinished_sequences:
            engine.step()
        outputs[method, captures] = [sequence.ids for sequence in sequences]
        if captures:
            assert engine.runner.graphs.is_enabled
            assert engine.runner.graphs.replays > 5
    assert outputs["plain", True] == outputs["plain", False]
    assert outputs["ddtree", True] == outputs["plain", False]


def test_with_other_caches_layers_do_what_they_did(target):
    """A copy too, which computes with its own weights."""
    text = prompts(12)[0]
    other = copy.deepcopy(target.model)
    expected = transformers_logits(target, text)
    for parameter in other.parameters():
        parameter.data *= 1.1
    copied = Target(other)
    changed = transformers_logits(copied, text)
    assert not equals_up_to_rounding(changed, expected)
    with torch.no_grad(), copied.allocate_cache(1, 20).add_rows(1) as new_rows:
        assert equals_up_to_rounding(
            copied.compute_logits(copied.extend_cache([text], new_rows, ()).last_hidden_states[0]),
            changed,
        )
    assert torch.equal(transformers_logits(target, text), expected)

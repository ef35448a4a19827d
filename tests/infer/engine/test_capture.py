"""Captured rounds: recorded on the CPU operation by operation, and replayed on the same memory, as
CUDA graphs are (the fixture `graphs`)."""

import random

import numpy as np
import pytest
import torch

from infer import Engine
from infer.config import EngineConfig, HeadConfig, SamplingOptions
from infer.engine import round as round_module
from infer.engine.sequence import Sequence
from infer.engine.warm_up import record_common_rounds
from infer.targets.kernel_decoder import KernelDecoder

GREEDY_OPTIONS = [{}]
MIXED_OPTIONS = [
    {"temperature": 0.9, "seed": 3},
    {"repetition_penalty": 1.3, "logprobs": 0},
    {"temperature": 1.0, "top_k": 5, "repetition_penalty": 0.8, "seed": 4},
    {"logprobs": 3},
    {"temperature": 0.8, "top_p": 0.7, "min_p": 0.02, "seed": 5},
]


@pytest.mark.parametrize(
    ("method", "budget", "family", "head", "options"),
    [
        ("chain", 5, "dflash", "none", GREEDY_OPTIONS),
        ("ddtree", 9, "dflash", "none", GREEDY_OPTIONS),
        ("ddtree", 9, "sliding", "none", GREEDY_OPTIONS),
        ("ddtree", 70, "dflash", "selector", GREEDY_OPTIONS),
        ("static", 6, "dart", "none", GREEDY_OPTIONS),
        ("ddtree", "auto", "dart", "none", GREEDY_OPTIONS),
        ("plain", 1, "dflash", "none", MIXED_OPTIONS),
        pytest.param(
            "ddtree", 9, "dflash", "selector", MIXED_OPTIONS, marks=pytest.mark.robustness
        ),
        pytest.param("static", 6, "dflash", "none", MIXED_OPTIONS, marks=pytest.mark.robustness),
    ],
)
def test_replayed_rounds_decode_the_same_as_eager_rounds(
    make_tiny, graphs, monkeypatch, method, budget, family, head, options
):
    """Sequences of several lengths come and go. A graph serves all lengths; there is one for each
    bucket of rows, and for each kind of sampling in it."""
    # Make a sliding cache drop positions of these sequences.
    monkeypatch.setattr("infer.drafters.state.MAX_POSITIONS_WRITTEN_TO_SLIDING_CACHE", 6)
    kind = {"sliding_window": 7} if family == "sliding" else {"family": family}
    target, drafter = make_tiny(seed=3, block_size=6, head=HeadConfig(name=head), **kind)
    dice = random.Random(1)
    prompts = [[dice.randrange(90) for _ in range(dice.randrange(2, 30))] for _ in range(5)]
    # With the automatic budget the number of rounds depends on measured times, so the outputs are
    # longer.
    length_factor = 2 if budget == "auto" else 1
    sequences = {}
    for compile in (False, True):
        config = EngineConfig(
            method, budget, max_num_seqs=3, max_num_batched_tokens=None, compile=compile
        )
        engine = Engine(target, drafter, config, 90)
        engine.runner.uses_cuda_graphs = compile
        sequences[compile] = []
        for i, prompt in enumerate(prompts):
            max_new_tokens = length_factor * (8 + 3 * i)
            text_options = SamplingOptions(
                max_new_tokens=max_new_tokens, **options[i % len(options)]
            )
            sequences[compile].append(engine.submit(prompt, text_options))
            engine.step()
        while engine.has_unfinished_sequences:
            engine.step()
    for eager, replayed in zip(*sequences.values(), strict=True):
        assert budget == "auto" or eager.commits == replayed.commits
        assert eager.ids == replayed.ids and len(eager.logprobs) == len(replayed.logprobs)
        for actual, expected in zip(replayed.logprobs, eager.logprobs, strict=True):
            assert [id for id, _ in actual.top] == [id for id, _ in expected.top]
            assert actual.logprob == pytest.approx(expected.logprob, abs=1e-4)
    used_keys = set(engine.runner.graphs.graphs)
    assert engine.runner.graphs.replays > 10 and engine.runner.graphs.is_enabled
    assert {key.rows for key in used_keys} == {1, 2, 3}
    assert budget == "auto" or options is MIXED_OPTIONS or len(used_keys) == 3
    assert options is GREEDY_OPTIONS or len({key.kind for key in used_keys}) > 3


def test_graphs_keep_the_weights_alive_that_they_read(make_tiny, graphs):
    """A graph stores addresses, and parameters may be moved to other memory while it is in use."""
    target, drafter = make_tiny(seed=3)
    engine = Engine(target, drafter, EngineConfig("ddtree", 6), 90)
    engine.runner.uses_cuda_graphs = True
    sequence = engine.submit(list(range(9)), SamplingOptions(max_new_tokens=12, ignore_eos=True))
    while sequence.finish_reason is None:
        engine.step()
    weights = [*target.model.parameters(), *drafter.parameters()]
    addresses = {weight.data_ptr() for weight in weights} | {
        target.kernel_decoder.layers[0].qk_norm.weight.data_ptr()
    }
    for weight in weights:
        weight.data = weight.data.clone()
    graphs_by_key = engine.runner.graphs.graphs
    captured = [graph for graph in graphs_by_key.values() if graph is not None]
    assert captured
    for graph in captured:
        tensors = [entry for entry in graph.references if isinstance(entry, torch.Tensor)]
        decoder = next(entry for entry in graph.references if isinstance(entry, KernelDecoder))
        referenced_addresses = {tensor.data_ptr() for tensor in tensors}
        referenced_addresses |= {layer.qk_norm.weight.data_ptr() for layer in decoder.layers}
        assert addresses <= referenced_addresses


@pytest.mark.parametrize("method", ["plain", "ddtree"])
def test_common_rounds_are_recorded_before_the_first_request(make_tiny, graphs, method):
    target, drafter = make_tiny(seed=3, block_size=6)
    engine = Engine(target, drafter, EngineConfig(method, 7, max_num_seqs=3), 90)
    engine.runner.uses_cuda_graphs = True
    steps = []
    record_common_rounds(engine, steps.append)
    recorded = {key for key, graph in engine.runner.graphs.graphs.items() if graph is not None}
    assert {key.rows for key in recorded} == {1, 2, 3}
    assert len(steps) == 3

    for temperature in (0.0, 0.8):
        options = SamplingOptions(max_new_tokens=20, temperature=temperature, ignore_eos=True)
        for _ in range(3):
            engine.submit([5, 6, 7], options)
        while engine.has_unfinished_sequences:
            engine.step()
    new_keys = {key for key, graph in engine.runner.graphs.graphs.items() if graph is not None}
    assert {(key.rows, key.kind) for key in new_keys} == {(key.rows, key.kind) for key in recorded}


def test_without_cuda_graphs_nothing_is_recorded(make_tiny):
    target, drafter = make_tiny(seed=3)
    engine = Engine(target, drafter, EngineConfig("ddtree", 7), 90)
    record_common_rounds(engine, pytest.fail)
    assert engine.seconds["verify"] == 0


class FakeGrammar:
    """Replaces a grammar: only tokens that are congruent modulo 3 may follow each other."""

    failed = False

    def compute_allowed_draft_mask(self, ids: list[int], path: list[int]) -> np.ndarray:
        return np.arange(97) % 3 == [0, *ids, *path][-1] % 3

    def forced_tokens(self, ids: list[int]) -> list[int]:
        return []

    def mask_scores(self, scores: torch.Tensor, ids: list[int], path: list[int]) -> torch.Tensor:
        allowed = torch.from_numpy(self.compute_allowed_draft_mask(ids, path))
        return scores.masked_fill(~allowed, -torch.inf)


def no_repeats(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A logits processor that depends on the prefix: no token of the last ten may follow."""
    return scores.index_fill(1, ids[0, -10:], -torch.inf)


@pytest.mark.parametrize(
    ("method", "budget", "head", "options"),
    [
        ("ddtree", 9, "none", GREEDY_OPTIONS),
        ("chain", 5, "selector", GREEDY_OPTIONS),
        ("ddtree", "auto", "none", GREEDY_OPTIONS),
        ("plain", 1, "none", MIXED_OPTIONS),
        ("ddtree", 9, "selector", MIXED_OPTIONS),
    ],
)
def test_a_batch_with_a_grammar_stays_captured(
    make_tiny, graphs, monkeypatch, method, budget, head, options
):
    """A batch has sequences with a grammar, with logits processors and with neither. All are
    decoded by graphs and equal baseline decoding of each sequence alone. Rounds commit as many
    tokens as eager rounds, and draft trees follow the grammar."""
    target, drafter = make_tiny(seed=3, block_size=6, head=HeadConfig(name=head))
    dice = random.Random(1)
    kinds = ["none", "processor", "processor", "grammar", "none", "grammar", "processor"]
    prompts = [[dice.randrange(90) for _ in range(dice.randrange(2, 30))] for _ in kinds]

    def decode(method: str, captures: bool, rows: int, numbers: list[int]) -> list[Sequence]:
        engine = Engine(
            target,
            drafter,
            EngineConfig(method, budget, max_num_seqs=rows, max_num_batched_tokens=None),
            90,
        )
        engine.runner.uses_cuda_graphs = captures
        sequences = []
        for i in numbers:
            processors = [no_repeats] if kinds[i] == "processor" else []
            text_options = SamplingOptions(
                max_new_tokens=20 + i, ignore_eos=True, **options[i % len(options)]
            )
            sequences.append(engine.submit(prompts[i], text_options, processors))
            if kinds[i] == "grammar":
                sequences[-1].grammar = FakeGrammar()
        while engine.has_unfinished_sequences:
            engine.step()
        if captures:
            keys = engine.runner.graphs.graphs
            stages = {key.stage for key, graph in keys.items() if graph is not None}
            assert {"draft", "verify", "commit"} <= stages and engine.runner.graphs.replays > 20
        return sequences

    constrained_nodes = []
    choose_tokens_on_host = round_module.choose_tokens_on_host

    def check_trees(target, tree, ancestors, hidden, sampling, sequences, target_tokens) -> None:
        for row, sequence in sequences.items():
            if sequence.grammar is None:
                continue
            tokens = tree.tokens[row]
            parents = tree.parents[row]
            is_used = torch.isfinite(tree.log_probs[row])
            is_allowed = tokens[1:] % 3 == tokens[parents[1:]] % 3
            assert is_allowed[is_used[1:]].all()
            constrained_nodes.append(int(is_used.sum()) - 1)
        choose_tokens_on_host(target, tree, ancestors, hidden, sampling, sequences, target_tokens)

    monkeypatch.setattr(round_module, "choose_tokens_on_host", check_trees)
    all_numbers = list(range(len(prompts)))
    captured = decode(method, True, 3, all_numbers)
    for i, sequence in enumerate(captured):
        assert sequence.ids == decode("plain", False, 1, [i])[0].ids
    assert method == "plain" or budget == "auto" or max(constrained_nodes) > 1
    if budget != "auto":
        eager = decode(method, False, 3, all_numbers)
        for eager_sequence, sequence in zip(eager, captured, strict=True):
            assert eager_sequence.commits == sequence.commits
            assert eager_sequence.drafted == sequence.drafted


def test_rounds_of_few_nodes_stay_within_their_rows(make_tiny, graphs):
    """A sequence that fills its row verifies fewer nodes than a block has: nothing is written into
    the next row."""
    target, drafter = make_tiny(seed=3, block_size=6)
    outputs = {}
    for method in ("plain", "ddtree"):
        engine = Engine(
            target,
            drafter,
            EngineConfig(method, 1, max_num_seqs=2, max_num_batched_tokens=None),
            40,
        )
        engine.runner.uses_cuda_graphs = True
        sequences = [
            engine.submit(
                list(range(2, 2 + length)),
                SamplingOptions(max_new_tokens=40 - length, ignore_eos=True),
            )
            for length in (28, 5)
        ]
        while engine.has_unfinished_sequences:
            engine.step()
        outputs[method] = [sequence.ids for sequence in sequences]
    assert outputs["plain"] == outputs["ddtree"]

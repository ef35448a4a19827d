"""Rounds as graphs: recorded on the CPU operation by operation, and replayed on the same memory, as
CUDA would."""

import random

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from infer import Engine
from infer.config import EngineConfig, HeadConfig, TextOptions
from infer.engine import engine as engine_module, round as round_module
from infer.engine.capture import Graphs
from infer.engine.sequence import Sequence
from infer.kernels import table
from infer.targets.lean import LeanDecoder


class Recorder(TorchDispatchMode):
    """Notes every operation with its arguments and results. Raises where the host asks for a
    value."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(function), "the host waits for the device"
        found = function(*args, **(kwargs or {}))
        self.steps.append((function, args, kwargs or {}, tree_flatten(found)[0]))
        return found


class RecordedGraphs(Graphs):
    """Graphs whose replay does the recorded operations again and writes their results to where they
    were."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.works = True
        self.replays = 0

    def _capture(self, function):
        with Recorder() as recorder:
            results = function()
        return Recording(self, recorder.steps), results


class Recording:
    """What stands for a CUDA graph."""

    def __init__(self, graphs: RecordedGraphs, steps: list) -> None:
        # recording has done the work once
        self.graphs = graphs
        self.steps = steps
        self.done = True

    def replay(self) -> None:
        self.graphs.replays += 1
        for function, args, kwargs, results in [] if self.done else self.steps:
            for old, new in zip(results, tree_flatten(function(*args, **kwargs))[0], strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        self.done = False


@pytest.fixture
def graphs(monkeypatch):
    """Engines make recorded graphs; operations stay in tensors."""
    monkeypatch.setattr(engine_module, "Graphs", RecordedGraphs)
    monkeypatch.setattr(table, "FAST_VERSIONS", {})


GREEDY = [{}]
MIXED = [
    {"temperature": 0.9, "seed": 3},
    {"repetition_penalty": 1.3, "logprobs": 0},
    {"temperature": 1.0, "top_k": 5, "repetition_penalty": 0.8, "seed": 4},
    {"logprobs": 3},
    {"temperature": 0.8, "top_p": 0.7, "min_p": 0.02, "seed": 5},
]


@pytest.mark.parametrize(
    ("method", "budget", "family", "head", "options"),
    [
        ("chain", 5, "dflash", "none", GREEDY),
        ("ddtree", 9, "dflash", "none", GREEDY),
        ("ddtree", 9, "sliding", "none", GREEDY),
        ("ddtree", 70, "dflash", "selector", GREEDY),
        ("static", 6, "dart", "none", GREEDY),
        ("ddtree", "auto", "dart", "none", GREEDY),
        ("plain", 1, "dflash", "none", MIXED),
        pytest.param("ddtree", 9, "dflash", "selector", MIXED, marks=pytest.mark.robustness),
        pytest.param("static", 6, "dflash", "none", MIXED, marks=pytest.mark.robustness),
    ],
)
def test_replayed_rounds_write_what_launched_rounds_write(
    make_tiny, graphs, monkeypatch, method, budget, family, head, options
):
    """Texts of several lengths come and go; a graph serves all lengths, and one is made for each
    bucket alone, and for each kind of sampling that is beside each other in it."""
    monkeypatch.setattr(
        "infer.drafters.base.WIDEST", 6
    )  # a cache that slides forgets within these texts
    kind = {"sliding_window": 7} if family == "sliding" else {"family": family}
    target, drafter = make_tiny(seed=3, block_size=6, head=HeadConfig(name=head), **kind)
    dice = random.Random(1)
    prompts = [[dice.randrange(90) for _ in range(dice.randrange(2, 30))] for _ in range(5)]
    texts = {}
    for compile in (False, True):
        config = EngineConfig(
            method, budget, max_num_seqs=3, max_num_batched_tokens=None, compile=compile
        )
        engine = Engine(target, drafter, config, 90)
        engine.runner.captures = compile
        texts[compile] = []
        for i, prompt in enumerate(prompts):
            asked = TextOptions(max_new_tokens=8 + 3 * i, **options[i % len(options)])
            texts[compile].append(engine.submit(prompt, asked))
            engine.step()
        while engine.busy:
            engine.step()
    for eager, replayed in zip(*texts.values(), strict=True):
        assert budget == "auto" or eager.commits == replayed.commits
        assert eager.ids == replayed.ids and len(eager.logprobs) == len(replayed.logprobs)
        for ours, theirs in zip(replayed.logprobs, eager.logprobs, strict=True):
            assert [i for i, _ in ours.top] == [i for i, _ in theirs.top]
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    used = set(engine.runner.graphs.graphs)
    assert engine.runner.graphs.replays > 10 and engine.runner.graphs.works
    assert {key.rows for key in used} == {1, 2, 3}
    assert budget == "auto" or options is MIXED or len(used) == 3
    assert options is GREEDY or len({key.kind for key in used}) > 3


def test_graphs_hold_the_weights_that_they_read(make_tiny, graphs):
    """A graph stores addresses, and parameters may be given other memory while it is replayed."""
    target, drafter = make_tiny(seed=3)
    engine = Engine(target, drafter, EngineConfig("ddtree", 6), 90)
    engine.runner.captures = True
    sequence = engine.submit(list(range(9)), TextOptions(max_new_tokens=12, ignore_eos=True))
    while sequence.finish is None:
        engine.step()
    weights = [*target.model.parameters(), *drafter.parameters()]
    addresses = {weight.data_ptr() for weight in weights} | {
        target.lean.layers[0].qk_norm.weight.data_ptr()
    }
    for weight in weights:
        weight.data = weight.data.clone()
    captured = [found for found in engine.runner.graphs.graphs.values() if found is not None]
    assert captured
    for _, _, references in captured:
        held = {tensor.data_ptr() for tensor in references if isinstance(tensor, torch.Tensor)}
        lean = next(found for found in references if isinstance(found, LeanDecoder))
        assert addresses <= held | {layer.qk_norm.weight.data_ptr() for layer in lean.layers}


class EveryThird:
    """Stands for a grammar: only a third of the tokens may follow, which one depends on the token
    before."""

    failed = False

    def drafted(self, ids: list[int], path: list[int]) -> np.ndarray:
        return np.arange(97) % 3 == [0, *ids, *path][-1] % 3

    def forced(self, ids: list[int]) -> list[int]:
        return []

    def mask(self, scores: torch.Tensor, ids: list[int], path: list[int]) -> torch.Tensor:
        return scores.masked_fill(~torch.from_numpy(self.drafted(ids, path)), -torch.inf)


def no_repeats(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A logits processor that looks at the prefix: no token may stand there twice among the last
    ten."""
    return scores.index_fill(1, ids[0, -10:], -torch.inf)


@pytest.mark.parametrize(
    ("method", "budget", "head", "options"),
    [
        ("ddtree", 9, "none", GREEDY),
        ("chain", 5, "selector", GREEDY),
        ("ddtree", "auto", "none", GREEDY),
        ("plain", 1, "none", MIXED),
        ("ddtree", 9, "selector", MIXED),
    ],
)
def test_a_batch_with_a_grammar_stays_captured(
    make_tiny, graphs, monkeypatch, method, budget, head, options
):
    """Texts with a grammar, with logits processors and with neither are written side by side: all
    by graphs, token for token what plain decoding writes alone; the others commit as much in every
    round as without them, and texts with a grammar are drafted by it."""
    target, drafter = make_tiny(seed=3, block_size=6, head=HeadConfig(name=head))
    dice = random.Random(1)
    kinds = ["free", "processor", "processor", "grammar", "free", "grammar", "processor"]
    prompts = [[dice.randrange(90) for _ in range(dice.randrange(2, 30))] for _ in kinds]

    def write(method: str, captures: bool, rows: int, numbers: list[int]) -> list[Sequence]:
        engine = Engine(
            target,
            drafter,
            EngineConfig(method, budget, max_num_seqs=rows, max_num_batched_tokens=None),
            90,
        )
        engine.runner.captures = captures
        texts = []
        for i in numbers:
            processors = [no_repeats] if kinds[i] == "processor" else []
            asked = TextOptions(max_new_tokens=20 + i, ignore_eos=True, **options[i % len(options)])
            texts.append(engine.submit(prompts[i], asked, processors))
            if kinds[i] == "grammar":
                texts[-1].grammar = EveryThird()
        while engine.busy:
            engine.step()
        if captures:
            keys = engine.runner.graphs.graphs
            stages = {key.stage for key, graph in keys.items() if graph is not None}
            assert {"draft", "verify", "commit"} <= stages and engine.runner.graphs.replays > 20
        return texts

    followed = []
    choose_on_host = round_module.choose_on_host

    def check_trees(target, tree, ancestors, last, asked, texts, chosen) -> None:
        for row in [row for row, text in texts.items() if text.grammar is not None]:
            tokens = tree.tokens[row]
            parents = tree.parents[row]
            nodes = torch.isfinite(tree.log_probs[row])  # the others are left over
            assert (tokens[1:] % 3 == tokens[parents[1:]] % 3)[nodes[1:]].all()
            followed.append(int(nodes.sum()) - 1)
        choose_on_host(target, tree, ancestors, last, asked, texts, chosen)

    monkeypatch.setattr(round_module, "choose_on_host", check_trees)
    everything = list(range(len(prompts)))
    mixed = write(method, True, 3, everything)
    for i, text in enumerate(mixed):
        assert text.ids == write("plain", False, 1, [i])[0].ids
    assert method == "plain" or budget == "auto" or max(followed) > 1
    if budget != "auto":
        apart = write(method, False, 3, everything)
        assert [text.commits for text in apart] == [text.commits for text in mixed]
        assert [text.drafted for text in apart] == [text.drafted for text in mixed]


def test_rounds_of_few_nodes_stay_within_their_rows(make_tiny, graphs):
    """A text that fills its row verifies fewer nodes than a block has: nothing is written into the
    row behind it."""
    target, drafter = make_tiny(seed=3, block_size=6)
    written = {}
    for method in ("plain", "ddtree"):
        engine = Engine(
            target,
            drafter,
            EngineConfig(method, 1, max_num_seqs=2, max_num_batched_tokens=None),
            40,
        )
        engine.runner.captures = True
        texts = [
            engine.submit(
                list(range(2, 2 + length)), TextOptions(max_new_tokens=40 - length, ignore_eos=True)
            )
            for length in (28, 5)
        ]
        while engine.busy:
            engine.step()
        written[method] = [text.ids for text in texts]
    assert written["plain"] == written["ddtree"]

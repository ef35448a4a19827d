"""Rounds as graphs: recorded on the CPU operation by operation, and replayed on the same memory, as CUDA would."""

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from infer import Engine
from infer.config import EngineConfig, HeadConfig, TextOptions
from infer.engine import runner
from infer.engine.capture import Graphs
from infer.targets.lean import LeanDecoder
from infer.trees import compiled


class Recorder(TorchDispatchMode):
    """Notes every operation with its arguments and results. Raises where the host asks for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(function), "the host waits for the device"
        found = function(*args, **(kwargs or {}))
        self.steps.append((function, args, kwargs or {}, tree_flatten(found)[0]))
        return found


class RecordedGraphs(Graphs):
    """Graphs whose replay does the recorded operations again and writes their results to where they were."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.works, self.replays = True, 0

    def _capture(self, function):
        with Recorder() as recorder:
            results = function()
        return Recording(self, recorder.steps), results


class Recording:
    """What stands for a CUDA graph."""

    def __init__(self, graphs: RecordedGraphs, steps: list) -> None:
        self.graphs, self.steps, self.done = graphs, steps, True  # recording has done the work once

    def replay(self) -> None:
        self.graphs.replays += 1
        for function, args, kwargs, results in [] if self.done else self.steps:
            for old, new in zip(results, tree_flatten(function(*args, **kwargs))[0], strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        self.done = False


@pytest.fixture
def graphs(monkeypatch):
    """Engines make recorded graphs; tree building stays in tensors."""
    monkeypatch.setattr(runner, "Graphs", RecordedGraphs)
    monkeypatch.setattr(compiled, "available", lambda tensor: False)


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
    """Texts of several lengths come and go; a graph serves all lengths, and one is made for each bucket alone, and for
    each kind of sampling that is beside each other in it."""
    monkeypatch.setattr("infer.drafters.base.WIDEST", 6)  # a cache that slides forgets within these texts
    kind = {"window": 7} if family == "sliding" else {"family": family}
    target, drafter = make_tiny(seed=3, block_size=6, head=HeadConfig(name=head), **kind)
    dice = random.Random(1)
    prompts = [[dice.randrange(90) for _ in range(dice.randrange(2, 30))] for _ in range(5)]
    texts = {}
    for compile in (False, True):
        config = EngineConfig(method, budget, rows=3, positions=None, compile=compile)
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
    assert {rows for rows, *_ in used} == {1, 2, 3}
    assert budget == "auto" or options is MIXED or len(used) == 3
    assert options is GREEDY or len({kind for *_, kind in used}) > 3


def test_graphs_hold_the_weights_that_they_read(make_tiny, graphs):
    """A graph stores addresses, and parameters may be given other memory while it is replayed."""
    target, drafter = make_tiny(seed=3)
    engine = Engine(target, drafter, EngineConfig("ddtree", 6), 90)
    engine.runner.captures = True
    sequence = engine.submit(list(range(9)), TextOptions(max_new_tokens=12, ignore_eos=True))
    while sequence.finish is None:
        engine.step()
    weights = [*target.model.parameters(), *drafter.parameters()]
    addresses = {weight.data_ptr() for weight in weights} | {target.lean.layers[0].qk_norm.weight.data_ptr()}
    for weight in weights:
        weight.data = weight.data.clone()
    captured = [found for found in engine.runner.graphs.graphs.values() if found is not None]
    assert captured
    for _, _, references in captured:
        held = {tensor.data_ptr() for tensor in references if isinstance(tensor, torch.Tensor)}
        lean = next(found for found in references if isinstance(found, LeanDecoder))
        assert addresses <= held | {layer.qk_norm.weight.data_ptr() for layer in lean.layers}

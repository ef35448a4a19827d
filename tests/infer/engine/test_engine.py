"""The engine: continuous batching, the automatic node budget, log-probabilities."""

import gc
import math
import random
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from infer import Engine, Generation, generate
from infer.config import EngineConfig, HeadConfig, SamplingOptions
from infer.drafters.lookup import PromptLookup
from infer.engine.budget import (
    MAX_ROUNDS_BETWEEN_UNMEASURED_MODE_TRIALS,
    WARMUP_ROUNDS,
    AutoNodeBudget,
)
from infer.engine.round_cost import CANDIDATE_DRAFTED_NODE_COUNTS, Calibration, calibrate
from infer.engine.sampling import SamplingTensors, adjust_logits
from infer.engine.sequence import Sequence
from infer.trees.tree import DraftTree


@pytest.fixture(scope="module")
def tiny(make_tiny):
    return make_tiny(seed=11, block_size=6)


def make_prompts(count: int, seed: int = 0) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(90) for _ in range(dice.randrange(2, 30))] for _ in range(count)]


MIXED_TEXT_OPTIONS = [
    SamplingOptions(max_new_tokens=5),
    SamplingOptions(max_new_tokens=33),
    SamplingOptions(max_new_tokens=21, temperature=0.8, seed=4),
    SamplingOptions(max_new_tokens=40, temperature=1.3, top_k=7, top_p=0.8, seed=9),
    SamplingOptions(max_new_tokens=17, temperature=0.6, min_p=0.1, repetition_penalty=1.3, seed=2),
    SamplingOptions(max_new_tokens=28, repetition_penalty=1.5),
]


@pytest.fixture(scope="module")
def baseline_outputs(tiny) -> list[list[int]]:
    """Return the outputs of baseline decoding of twelve prompts, one after the other."""
    engine = Engine(tiny[0], None, EngineConfig("plain", max_num_seqs=1), 80)
    sequences = []
    for i, prompt in enumerate(make_prompts(12)):
        options = MIXED_TEXT_OPTIONS[i % len(MIXED_TEXT_OPTIONS)]
        sequences.append(engine.submit(prompt, options))
        while engine.has_unfinished_sequences:
            engine.step()
    return [sequence.ids for sequence in sequences]


@pytest.mark.parametrize(
    ("method", "captured"), [("chain", False), ("ddtree", False), ("ddtree", True)]
)
def test_outputs_are_those_of_the_baseline_while_sequences_start_and_finish(
    tiny, baseline_outputs, method, captured
):
    """Sequences with different options arrive while others are running, and some are cancelled. At
    the end the engine is empty."""
    target, drafter = tiny
    rows = 4
    prompts = make_prompts(12)
    engine = Engine(target, drafter, EngineConfig(method, 11, max_num_seqs=rows), 80)
    # If captured, greedy rounds have the shapes of CUDA graphs.
    engine.runner.uses_cuda_graphs = captured
    dice = random.Random(1)
    sequences = []
    cancelled = set()
    while len(sequences) < len(prompts) or engine.has_unfinished_sequences:
        for _ in range(dice.randrange(3)):
            index = len(sequences)
            if index < len(prompts):
                options = MIXED_TEXT_OPTIONS[index % len(MIXED_TEXT_OPTIONS)]
                sequences.append(engine.submit(prompts[index], options))
        if sequences and dice.random() < 0.15:
            sequence = dice.choice(sequences)
            if sequence.finish_reason is None:
                sequence.cancelled = True
                cancelled.add(sequence)
        assert len(engine.scheduler.running) <= rows
        engine.step()
    assert cancelled and len(cancelled) < 8
    for sequence, expected_ids in zip(sequences, baseline_outputs, strict=True):
        if sequence in cancelled:
            assert sequence.finish_reason == "cancelled"
            assert sequence.ids == expected_ids[: len(sequence.ids)]
        else:
            assert sequence.finish_reason == "length" and sequence.ids == expected_ids
            assert sum(sequence.commits) == len(sequence.ids) == sequence.stats.tokens
    cache = engine.runner.batch_state.cache
    assert cache.lengths == [] and not cache.device_lengths.any()


def test_last_tokens_are_the_end_of_prompt_and_output(tiny):
    dice = random.Random(0)
    for max_tokens in (3, 6):
        sequence = Sequence([5, 6, 7, 8], SamplingOptions(40))
        while sequence.finish_reason is None:
            expected = (sequence.prompt + sequence.ids)[-max_tokens:]
            assert sequence.last_tokens(max_tokens).tolist() == expected
            sequence.append([dice.randrange(97) for _ in range(dice.randint(1, 9))], tiny[0])
            if dice.random() < 0.5:  # several rounds without a call of last_tokens
                sequence.append([dice.randrange(97)], tiny[0])
        expected = (sequence.prompt + sequence.ids)[-max_tokens:]
        assert sequence.last_tokens(max_tokens).tolist() == expected


@pytest.mark.parametrize("seed", range(4))
def test_filters_equal_hugging_faces(seed):
    """Penalty, temperature, top-k, top-p and min-p of four rows at once, compared with the logits
    processors one by one."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, 3, 50, generator=generator) * 3
    seen = torch.rand(4, 3, 50, generator=generator) < 0.3
    options = [
        SamplingOptions(temperature=0.7, top_k=5),
        SamplingOptions(temperature=1.2, top_p=0.6, repetition_penalty=1.4),
        SamplingOptions(temperature=0.9, min_p=0.2, top_k=20, top_p=0.9),
        SamplingOptions(repetition_penalty=0.8),
    ]
    sampling = SamplingTensors.from_options(options, 50, torch.device("cpu"))
    actual = adjust_logits(logits, sampling, seen)
    for b, row in enumerate(options):
        processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(row.repetition_penalty)])
        if row.temperature:
            processors += [TemperatureLogitsWarper(row.temperature)]
            if row.top_k:
                processors += [TopKLogitsWarper(row.top_k)]
            if row.top_p < 1:
                processors += [TopPLogitsWarper(row.top_p)]
            if row.min_p:
                processors += [MinPLogitsWarper(row.min_p)]
        for q in range(3):
            ids = seen[b, q].nonzero()[:, 0][None]
            expected = processors(ids, logits[b, q][None].clone())[0]
            is_finite = ~expected.isinf()
            assert torch.equal(~actual[b, q].isinf(), is_finite)
            torch.testing.assert_close(
                actual[b, q][is_finite], expected[is_finite], rtol=1e-6, atol=1e-6
            )


@pytest.mark.parametrize("options", MIXED_TEXT_OPTIONS[1:4])
def test_log_probabilities_are_the_targets(tiny, options):
    target, drafter = tiny
    prompt = make_prompts(1, seed=8)[0]
    settings = {
        name: getattr(options, name)
        for name in ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
    }
    answer = generate(target, drafter, prompt, logprobs=3, budget=9, **settings)
    logits = target.model(torch.tensor([prompt + answer.ids])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    assert len(answer.logprobs) == len(answer.ids)
    for token, entry, row in zip(answer.ids, answer.logprobs, expected, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        values = row.topk(3).values.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values, abs=1e-4)


def make_trees(probabilities: torch.Tensor, rows: int, num_nodes: int) -> DraftTree:
    """Return equal trees of all rows with these node probabilities, the root's first."""
    log_probs = probabilities[: num_nodes + 1].double().log().expand(rows, -1)
    zeros = torch.zeros_like(log_probs).long()
    return DraftTree(zeros, zeros, zeros, log_probs, 7)


def simulate_round(
    budget: AutoNodeBudget,
    rows: int,
    max_nodes: int,
    probabilities: torch.Tensor,
    measure_seconds: Callable[[int, int], float],
    draw_path: Callable[[int], list[int]],
) -> int:
    """Simulate a round of the budget with trees of these node probabilities. It takes
    measure_seconds(rows, nodes), and accepts draw_path(nodes) in each row. Return the number of
    verified nodes per row."""
    num_nodes = budget.choose_num_nodes(rows, max_nodes)
    tree = make_trees(probabilities, rows, budget.count_nodes_to_build(rows, num_nodes))
    drafted_counts = budget.prune(tree).drafted_counts if num_nodes else [0] * rows
    num_nodes = sum(drafted_counts) // rows
    paths = [draw_path(count) for count in drafted_counts]
    budget.record_round(measure_seconds(rows, num_nodes), drafted_counts, paths)
    return num_nodes


def make_chain_probabilities(acceptance: float) -> torch.Tensor:
    """Return the node probabilities of a chain of seven nodes, each accepted with that probability,
    followed by many unlikely nodes."""
    chain = [acceptance**depth for depth in range(8)]
    unlikely = [chain[7] / 50] * 248
    return torch.tensor(chain + unlikely)


@pytest.mark.parametrize("ragged", [False, True])
def test_the_budget_follows_the_load(ragged):
    """On a machine that computes 32 positions in the time of one: small trees with one row, none
    with 64. Throughput is within 5 % of the best fixed budget or baseline decoding, although the
    calibration is wrong."""
    dice = random.Random(0)

    def seconds(rows: int, nodes: int) -> float:
        return 1.0 + max(0, rows * (nodes + 1) - 32) / 32 + (0.2 if nodes else 0)

    def commits(nodes: int) -> float:
        return sum(0.7**i for i in range(min(nodes, 7) + 1))

    def path(nodes: int) -> list[int]:
        accepted = []
        while len(accepted) < min(nodes, 7) and dice.random() <= 0.7:
            accepted.append(len(accepted) + 1)
        return accepted

    calibration = Calibration(
        positions=(1, 9, 65, 257), pass_seconds=(1.0, 1.0, 5.0, 20.0), draft_seconds=2.0
    )
    budget = AutoNodeBudget(calibration, 64, ragged)
    for rows in (1, 64, 8, 2, 64, 1):
        total_seconds = 0.0
        total_tokens = 0.0
        for round_index in range(500):
            nodes = simulate_round(budget, rows, 64, make_chain_probabilities(0.7), seconds, path)
            if round_index >= 100:
                total_seconds += seconds(rows, nodes)
                total_tokens += rows * commits(nodes)
        best = max(
            rows * commits(size) / seconds(rows, size)
            for size in (0, *CANDIDATE_DRAFTED_NODE_COUNTS)
        )
        assert total_tokens / total_seconds > 0.95 * best
        assert (budget.choose_num_nodes(rows, 64) == 0) == (rows == 64)


def test_a_slow_and_rejected_first_round_does_not_stop_drafting():
    """The first round compiles kernels, and its unlikely tree is rejected. Drafting, 1.4 times as
    fast as baseline decoding, goes on."""
    dice = random.Random(0)
    calibration = Calibration(
        positions=(1, 9, 65, 257), pass_seconds=(1.0, 1.3, 3.0, 9.0), draft_seconds=0.4
    )
    budget = AutoNodeBudget(calibration, 64)
    total_seconds = 0.0
    total_tokens = 0.0
    for round_index in range(150):
        slowdown = 1 if round_index else 4
        path = []

        def draw(nodes: int, is_later: bool = round_index > 0, path: list[int] = path) -> list[int]:
            while is_later and len(path) < min(nodes, 7) and dice.random() < 0.6:
                path.append(len(path) + 1)
            return path

        def seconds(rows: int, nodes: int, slowdown: int = slowdown) -> float:
            return slowdown * calibration.estimate_round_seconds(nodes + 1, nodes > 0)

        probabilities = make_chain_probabilities(0.6 if round_index else 0.1)
        nodes = simulate_round(budget, 1, 64, probabilities, seconds, draw)
        if round_index >= 20:
            total_seconds += seconds(1, nodes)
            total_tokens += 1 + len(path)
    assert total_tokens / total_seconds > 1.25


@pytest.mark.parametrize("acceptance_factor", [1.2, 0.4])
def test_the_best_budget_is_chosen_despite_noise(acceptance_factor):
    """One row on a machine with noisy timings, as measured on the embedded target. Nodes are
    accepted `acceptance_factor` times as often as the drafter says, and trees differ between
    rounds. From round 50 on, throughput is at least 0.97 of the best fixed budget or baseline."""
    dice = random.Random(1)
    sizes = (0, *CANDIDATE_DRAFTED_NODE_COUNTS)
    measured_ms = np.interp(sizes, (0, 1, 8, 16, 64, 255), (7.4, 10.3, 12.4, 14.6, 27, 90))
    times = dict(zip(sizes, measured_ms, strict=True))
    average_probabilities = torch.tensor([1.0, *(0.5 / size for size in range(1, 256))])
    budget = AutoNodeBudget(Calibration((1, 9, 17, 65), (7.0, 10.0, 11.7, 24.7), 2.4), 64)
    total_seconds = 0.0
    total_tokens = 0.0

    def round_time(nodes: int) -> float:
        return times[max(size for size in sizes if size <= nodes)]

    def expected_tokens(probabilities: torch.Tensor, nodes: int) -> float:
        return 1 + acceptance_factor * float(probabilities[1 : nodes + 1].sum())

    for round_index in range(1000):
        scale = dice.choice([0.4, 1.0, 1.6])  # of the drafter's probabilities in this round
        probabilities = average_probabilities * torch.tensor([1.0] + [scale] * 255)

        def path(nodes: int, probabilities: torch.Tensor = probabilities) -> list[int]:
            return [
                node
                for node in range(1, nodes + 1)
                if dice.random() < acceptance_factor * probabilities[node]
            ]

        def seconds(rows: int, nodes: int) -> float:
            outlier = 3 if dice.random() < 0.01 else 1
            return round_time(nodes) * dice.gauss(1, 0.08) * outlier

        nodes = simulate_round(budget, 1, 64, probabilities, seconds, path)
        if round_index >= 50:
            total_seconds += round_time(nodes)
            total_tokens += expected_tokens(probabilities, nodes)
    best = max(expected_tokens(average_probabilities, size) / times[size] for size in sizes)
    assert total_tokens / total_seconds > 0.97 * best


def test_probabilities_are_calibrated_and_confident_rounds_have_more_nodes():
    """The drafter underestimates likely nodes and overestimates unlikely ones. The calibrated
    probabilities are within 0.05 of the acceptance rate, in each of ten bins, and rounds verify
    more nodes the more confident the drafter is."""
    calibration = Calibration((1, 65), (1.0, 8.0), 0.5)
    dice = np.random.default_rng(0)
    expected = []
    accepted = []
    budget = AutoNodeBudget(calibration, 64)
    sizes = defaultdict(list)
    for round_index in range(1500):
        confidence = dice.choice([0.3, 0.6, 0.9])
        acceptance = confidence ** (0.5 if confidence > 0.5 else 1.5)
        is_accepted = np.zeros(0, bool)
        log_probs = torch.arange(256.0) * math.log(confidence)

        def path(nodes: int, acceptance: float = acceptance) -> list[int]:
            nonlocal is_accepted
            is_accepted = np.cumprod(dice.random(nodes) < acceptance) > 0
            return [*np.flatnonzero(is_accepted) + 1]

        calibrated = budget.acceptance.estimate_acceptance_probs(log_probs[1:].double().numpy())
        nodes = simulate_round(
            budget,
            1,
            64,
            log_probs.exp(),
            lambda rows, nodes: calibration.estimate_round_seconds(nodes + 1, nodes > 0),
            path,
        )
        if round_index >= 200:
            expected.append(calibrated[:nodes])
            accepted.append(is_accepted[:nodes])
            sizes[confidence].append(nodes)
    expected = np.concatenate(expected)
    accepted = np.concatenate(accepted)
    bins = (10 * expected).astype(int).clip(max=9)
    error = abs(np.bincount(bins, expected, 10) - np.bincount(bins, accepted, 10)).sum()
    assert error < 0.05 * len(expected)
    assert np.mean(sizes[0.3]) < np.mean(sizes[0.6]) < np.mean(sizes[0.9])


def test_prompts_use_the_positions_that_small_trees_leave(tiny):
    """While the automatic budget drafts few nodes or none, rows are filled as fast as with a fixed
    budget of that size."""
    steps = {}
    for budget, nodes in ((2, 2), ("auto", 2), ("auto", 0)):
        engine = Engine(
            *tiny, EngineConfig("ddtree", budget, max_num_seqs=8, max_num_batched_tokens=60), 200
        )
        if budget == "auto":

            def choose_num_nodes(rows: int, max_nodes: int, nodes: int = nodes) -> int:
                return min(nodes, max_nodes)

            engine.runner.budget.choose_num_nodes = choose_num_nodes
            engine.runner.budget._count_paying_nodes = choose_num_nodes
        options = SamplingOptions(max_new_tokens=160, ignore_eos=True)
        engine.submit([2] * 24, options)
        engine.step()
        for i in range(1, 8):  # these arrive while the first sequence is running
            engine.submit([2 + i] * 24, options)
        num_steps = 0
        while len(engine.scheduler.running) < 8:
            engine.step()
            num_steps += 1
        steps[budget, nodes] = num_steps
    assert steps["auto", 0] <= steps["auto", 2] == steps[2, 2]


def test_a_small_tree_is_not_drafted_because_a_large_one_would_pay_off():
    """During a prefill a round may have only one or two nodes. Baseline decoding, which was not
    measured yet, is soon explored."""
    calibration = Calibration(
        positions=(1, 9, 65, 257), pass_seconds=(1.0, 1.0, 1.0, 1.0), draft_seconds=0.5
    )
    budget = AutoNodeBudget(calibration, 64)
    budget.mean_token_gains[1:5] = [0.1, 0.1, 0.6, 0.7]
    budget.gain_rows += 1
    budget.num_rounds = WARMUP_ROUNDS
    assert budget.choose_num_nodes(4, 64) >= 5 and budget.choose_num_nodes(4, 2) == 0
    assert [
        budget.choose_num_nodes(4, 64) for _ in range(MAX_ROUNDS_BETWEEN_UNMEASURED_MODE_TRIALS)
    ].count(0) == 1


@pytest.mark.parametrize("family", ["dflash", "dart"])
def test_rounds_without_drafting_change_no_output(make_tiny, family, monkeypatch):
    """Sequences start and finish while drafting stops and resumes. The drafter's cache is brought
    up to date."""
    monkeypatch.setattr("infer.engine.batch_state.MAX_ROUNDS_MISSING_IN_DRAFTER_CACHE", 5)
    family_options = {"family": "dart", "layers": 1} if family == "dart" else {}
    target, drafter = make_tiny(seed=11, block_size=6, **family_options)
    options = [SamplingOptions(max_new_tokens=length) for length in (40, 12, 33, 25)]
    draft_caches = []
    dice = random.Random(2)
    for auto in (False, True):
        engine = Engine(
            target, drafter, EngineConfig("ddtree", "auto" if auto else 9, max_num_seqs=2), 80
        )
        if auto:
            monkeypatch.setattr(
                engine.runner.budget, "choose_num_nodes", lambda *_: dice.choice([0, 0, 0, 0, 9])
            )
        sequences = [
            engine.submit(prompt, prompt_options)
            for prompt, prompt_options in zip(make_prompts(4), options, strict=True)
        ]
        first = sequences[0]
        while engine.has_unfinished_sequences:
            engine.step()
            if len(first.ids) >= 20 and len(draft_caches) == auto:
                state = engine.runner.batch_state
                with torch.inference_mode():
                    state.flush_to_drafter()
                length = len(first.prompt) + 15
                draft_caches.append(state.draft_state.cache.buffer[:, :length].clone())
        if not auto:
            expected = [sequence.ids for sequence in sequences]
    assert [sequence.ids for sequence in sequences] == expected
    assert torch.allclose(*draft_caches, atol=1e-4)
    assert 0 in first.drafted and any(first.drafted)


def test_calibration_stops_at_expensive_passes(tiny, monkeypatch):
    target, drafter = tiny
    verify = target.verify
    now = 0.0

    def slow_verify(tree, *arguments):
        nonlocal now
        now += 1 + 0.1 * tree.tokens.numel()
        return verify(tree, *arguments)

    monkeypatch.setattr(target, "verify", slow_verify)
    calibration = calibrate(target, drafter, lambda: now, repeats=1)
    assert (
        calibration.positions[-1] == 48
    )  # 5.8 seconds, more than four times the 1.1 of one position
    for positions in (1, 3, 9, 90):
        assert calibration.estimate_round_seconds(positions) == pytest.approx(1 + 0.1 * positions)


def test_the_auto_budget_is_lossless(tiny):
    target, drafter = tiny
    calibration = calibrate(target, drafter, time.perf_counter, repeats=2)
    assert calibration.positions[0] == 1
    assert list(calibration.pass_seconds) == sorted(calibration.pass_seconds)
    assert calibration.draft_seconds > 0
    prompt = make_prompts(1, seed=3)[0]
    answer = generate(target, drafter, prompt, budget="auto", max_new_tokens=30)
    assert answer.ids == generate(target, None, prompt, method="plain", max_new_tokens=30).ids


def test_a_target_and_a_drafter_are_calibrated_once(make_tiny, monkeypatch):
    target, drafter = make_tiny()
    calibrate_mock = Mock(return_value=Calibration((1, 9), (1.0, 2.0), 1.0))
    monkeypatch.setattr("infer.engine.round_cost.calibrate", calibrate_mock)
    for rows in (1, 2):
        Engine(target, drafter, EngineConfig("ddtree", "auto", max_num_seqs=rows), 80)
    assert calibrate_mock.call_count == 1
    calibrate_mock.reset_mock()
    del drafter
    gc.collect()
    assert not target.cost_calibrations


@pytest.mark.parametrize("head", ["none", "markov", "selector", "gru"])
def test_calibration_measures_no_size_twice(make_tiny, head):
    """A block of two tokens has fewer trees than there are node counts."""
    target, drafter = make_tiny(block_size=2, head=HeadConfig(head))
    calibration = calibrate(target, drafter, lambda: 0.0, repeats=1)
    assert list(calibration.positions) == sorted(set(calibration.positions))
    assert calibration.estimate_round_seconds(500) == 0


def test_drafters_without_a_network_have_an_auto_budget(make_tiny):
    target = make_tiny()[0]
    prompt = [5, 6, 7, 8] * 4
    expected = generate(target, None, prompt, method="plain", max_new_tokens=30).ids
    assert (
        generate(target, PromptLookup(), prompt, budget="auto", max_new_tokens=30).ids == expected
    )


@pytest.mark.robustness
def test_a_drafter_with_the_targets_noise_accepts_more(embedded):
    """At temperature 1, conditioning the drafter on the noise raises the acceptance length, and the
    output is the same."""
    from infer.config import DrafterConfig
    from infer.drafters.build import create_drafter

    drafter = create_drafter(DrafterConfig(layers=2, block_size=6), embedded)
    drafter.init_weights(torch.Generator().manual_seed(0))
    drafter.warm_start(embedded)
    settings = {"temperature": 1.0, "max_new_tokens": 32, "budget": 12, "seed": 1}
    texts = ["import os\n", "class A:\n    def ", "def main("]
    with_noise = generate(embedded, drafter, texts, **settings)
    with patch(
        "infer.engine.proposals.apply_sampling_to_marginals", lambda marginals, *_: marginals
    ):
        without_noise = generate(embedded, drafter, texts, **settings)
    assert [output.ids for output in with_noise] == [output.ids for output in without_noise]
    assert count_rounds(with_noise) < count_rounds(without_noise)


def count_rounds(outputs: list[Generation]) -> int:
    return sum(output.stats.rounds for output in outputs)


def test_a_deleted_engine_frees_its_memory_at_once(make_tiny):
    """There is no reference cycle. The garbage collector runs late if objects are few and large,
    and would keep the caches of every call of `generate`."""
    target, drafter = make_tiny()
    gc.collect()
    gc.disable()
    try:
        engine = Engine(target, drafter, EngineConfig(budget=6), 64)
        engine.submit(list(range(9)), SamplingOptions(max_new_tokens=6))
        while engine.has_unfinished_sequences:
            engine.step()
        state = weakref.ref(engine.runner.batch_state)
        del engine
        assert state() is None
    finally:
        gc.enable()

"""The engine: rows that come and go, budgets that fit the machine, log-probabilities and
streams."""

import gc
import math
import random
import time
import weakref
from collections import defaultdict

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

from infer import Engine, generate
from infer.config import EngineConfig, HeadConfig, TextOptions
from infer.drafters.lookup import Lookup
from infer.engine.budget import (
    SIZES,
    UNMEASURED_EXPLORE_INTERVAL,
    WARMUP_ROUNDS,
    AutoBudget,
    Calibration,
    calibrate,
)
from infer.engine.sampling import Sampling, adjust
from infer.engine.sequence import Sequence
from infer.trees.tree import DraftTree


@pytest.fixture(scope="module")
def tiny(make_tiny):
    return make_tiny(seed=11, block_size=6)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(90) for _ in range(dice.randrange(2, 30))] for _ in range(count)]


OPTIONS = [
    TextOptions(max_new_tokens=5),
    TextOptions(max_new_tokens=33),
    TextOptions(max_new_tokens=21, temperature=0.8, seed=4),
    TextOptions(max_new_tokens=40, temperature=1.3, top_k=7, top_p=0.8, seed=9),
    TextOptions(max_new_tokens=17, temperature=0.6, min_p=0.1, repetition_penalty=1.3, seed=2),
    TextOptions(max_new_tokens=28, repetition_penalty=1.5),
]


@pytest.fixture(scope="module")
def written_alone(tiny) -> list[list[int]]:
    """What plain decoding writes for twelve prompts, one after the other."""
    alone = Engine(tiny[0], None, EngineConfig("plain", max_num_seqs=1), 80)
    texts = []
    for i, prompt in enumerate(prompts(12)):
        texts.append(alone.submit(prompt, OPTIONS[i % len(OPTIONS)]))
        while alone.busy:
            alone.step()
    return [text.ids for text in texts]


@pytest.mark.parametrize(
    ("method", "captured"), [("chain", False), ("ddtree", False), ("ddtree", True)]
)
def test_rows_come_and_go_and_every_text_is_its_own(tiny, written_alone, method, captured):
    """Texts of all kinds arrive while others are being written; some are given up. Each is what
    plain decoding writes for it alone, and the engine is empty in the end."""
    target, drafter = tiny
    rows = 4
    everything = prompts(12)
    engine = Engine(target, drafter, EngineConfig(method, 11, max_num_seqs=rows), 80)
    engine.runner.captures = captured  # rounds of greedy texts have the shapes of CUDA graphs
    dice = random.Random(1)
    texts = []
    given_up = set()
    while len(texts) < len(everything) or engine.busy:
        for _ in range(dice.randrange(3)):
            if len(texts) < len(everything):
                texts.append(
                    engine.submit(everything[len(texts)], OPTIONS[len(texts) % len(OPTIONS)])
                )
        if texts and dice.random() < 0.15:
            chosen = dice.choice(texts)
            if chosen.finish is None:
                chosen.cancelled = True
                given_up.add(chosen)
        assert len(engine.scheduler.writing) <= rows
        engine.step()
    assert given_up and len(given_up) < 8
    for text, ids in zip(texts, written_alone, strict=True):
        if text in given_up:
            assert text.finish == "cancelled" and text.ids == ids[: len(text.ids)]
        else:
            assert text.finish == "length" and text.ids == ids
            assert sum(text.commits) == len(text.ids) == text.stats.tokens
    assert engine.runner.memory.cache.lengths == [] and not engine.runner.memory.cache.ends.any()


def test_trees_search_the_end_of_a_text(tiny):
    """Prompt and answer as one array, however they grow, and no more than is asked for."""
    dice = random.Random(0)
    for most in (3, 6):
        text = Sequence([5, 6, 7, 8], TextOptions(40))
        while text.finish is None:
            assert text.end(most).tolist() == (text.prompt + text.ids)[-most:]
            text.append([dice.randrange(97) for _ in range(dice.randint(1, 9))], tiny[0])
            if dice.random() < 0.5:  # rounds that build no tree do not ask
                text.append([dice.randrange(97)], tiny[0])
        assert text.end(most).tolist() == (text.prompt + text.ids)[-most:]


@pytest.mark.parametrize("seed", range(4))
def test_filters_are_hugging_faces(seed):
    """Penalty, temperature, top-k, top-p and min-p of four different rows at once, and the
    processors one by one."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, 3, 50, generator=generator) * 3
    seen = torch.rand(4, 3, 50, generator=generator) < 0.3
    rows = [
        TextOptions(temperature=0.7, top_k=5),
        TextOptions(temperature=1.2, top_p=0.6, repetition_penalty=1.4),
        TextOptions(temperature=0.9, min_p=0.2, top_k=20, top_p=0.9),
        TextOptions(repetition_penalty=0.8),
    ]
    ours = adjust(logits, Sampling.of(rows, 50, torch.device("cpu")), seen)
    for b, row in enumerate(rows):
        processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(row.repetition_penalty)])
        if row.temperature:
            processors += [TemperatureLogitsWarper(row.temperature)]
            processors += [TopKLogitsWarper(row.top_k)] if row.top_k else []
            processors += [TopPLogitsWarper(row.top_p)] if row.top_p < 1 else []
            processors += [MinPLogitsWarper(row.min_p)] if row.min_p else []
        for q in range(3):
            ids = seen[b, q].nonzero()[:, 0][None]
            expected = processors(ids, logits[b, q][None].clone())[0]
            assert torch.equal(ours[b, q].isinf(), expected.isinf())
            kept = ~expected.isinf()
            torch.testing.assert_close(ours[b, q][kept], expected[kept], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", OPTIONS[1:4])
def test_log_probabilities_are_the_targets(tiny, options):
    target, drafter = tiny
    prompt = prompts(1, seed=8)[0]
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


def trees_of(chances: torch.Tensor, rows: int, nodes: int) -> DraftTree:
    """Trees of nodes with these probabilities, the root's first, the same in every row."""
    log_probs = chances[: nodes + 1].double().log().expand(rows, -1)
    return DraftTree(*[torch.zeros_like(log_probs).long()] * 3, log_probs, 7)


def play_round(
    budget: AutoBudget, rows: int, most: int, chances: torch.Tensor, seconds, path
) -> int:
    """Let the budget choose in a round whose trees have nodes with these probabilities, that takes
    seconds(rows, nodes) and accepts path(nodes) in a row; return how many nodes a row has verified
    on average."""
    nodes = budget.choose_nodes(rows, most)
    found = budget.nodes_to_find(rows, nodes)
    tree = trees_of(chances, rows, found)
    drafted = budget.cut(tree).budgets if nodes else [0] * rows
    nodes = sum(drafted) // rows
    budget.note(seconds(rows, nodes), drafted, [path(count) for count in drafted])
    return nodes


def chain_chances(likely: float) -> torch.Tensor:
    """A chain of seven nodes, each accepted so often, and many unlikely ones behind."""
    return torch.tensor([1.0, *(likely ** min(i, 7) / (1 if i < 8 else 50) for i in range(1, 256))])


@pytest.mark.parametrize("ragged", [False, True])
def test_the_budget_follows_the_load(ragged):
    """A machine that computes 32 positions for the price of one: small trees at one row, none at
    64, and back; always within 5% of the best of all fixed budgets, plain decoding among them,
    wherever the calibration is wrong."""
    dice = random.Random(0)

    def seconds(rows: int, nodes: int) -> float:
        return 1.0 + max(0, rows * (nodes + 1) - 32) / 32 + (0.2 if nodes else 0)

    def commits(nodes: int) -> float:
        return sum(0.7**i for i in range(min(nodes, 7) + 1))

    def path(nodes: int) -> list[int]:
        return list(
            range(
                1, 1 + next((i for i in range(min(nodes, 7)) if dice.random() > 0.7), min(nodes, 7))
            )
        )

    calibration = Calibration(positions=(1, 9, 65, 257), seconds=(1.0, 1.0, 5.0, 20.0), draft=2.0)
    budget = AutoBudget(calibration, 64, ragged)
    for rows in (1, 64, 8, 2, 64, 1):
        spent = tokens = 0.0
        for turn in range(500):
            nodes = play_round(budget, rows, 64, chain_chances(0.7), seconds, path)
            if turn >= 100:
                spent += seconds(rows, nodes)
                tokens += rows * commits(nodes)
        best = max(rows * commits(size) / seconds(rows, size) for size in (0, *SIZES))
        assert tokens / spent > 0.95 * best
        assert (budget.choose_nodes(rows, 64) == 0) == (rows == 64)


def test_an_unlucky_first_round_is_soon_forgotten():
    """The first round waits for what is made once, and nothing of its unlikely tree is accepted:
    drafting, worth 1.4 times plain rounds, is not given up for it."""
    dice = random.Random(0)
    calibration = Calibration(positions=(1, 9, 65, 257), seconds=(1.0, 1.3, 3.0, 9.0), draft=0.4)
    budget = AutoBudget(calibration, 64)
    spent = tokens = 0.0
    for turn in range(150):
        slow = 1 if turn else 4
        path = []

        def draw(nodes: int, turn: int = turn, path: list[int] = path) -> list[int]:
            while turn and len(path) < min(nodes, 7) and dice.random() < 0.6:
                path.append(len(path) + 1)
            return path

        def seconds(rows: int, nodes: int, slow: int = slow) -> float:
            return slow * calibration.cost(nodes + 1, nodes > 0)

        nodes = play_round(budget, 1, 64, chain_chances(0.6 if turn else 0.1), seconds, draw)
        if turn >= 20:
            spent += seconds(1, nodes)
            tokens += 1 + len(path)
    assert tokens / spent > 1.25


@pytest.mark.parametrize("kept", [1.2, 0.4])
def test_noise_hides_neither_the_best_size_nor_plain_decoding(kept):
    """One row on a machine whose times scatter, with a drafter that is right `kept` times as often
    as it says and whose trees differ from round to round, as measured on the embedded target: from
    the 50th round on at least 0.97 of what the best fixed size or plain decoding would do."""
    dice = random.Random(1)
    sizes = (0, *SIZES)
    times = dict(
        zip(
            sizes,
            np.interp(sizes, (0, 1, 8, 16, 64, 255), (7.4, 10.3, 12.4, 14.6, 27, 90)),
            strict=True,
        )
    )
    chances = torch.tensor([1.0, *(0.5 / size for size in range(1, 256))])
    budget = AutoBudget(Calibration((1, 9, 17, 65), (7.0, 10.0, 11.7, 24.7), 2.4), 64)
    spent = tokens = 0.0
    for turn in range(1000):
        hard = dice.choice([0.4, 1.0, 1.6])  # how much of its usual promise the drafter makes
        likely = chances * torch.tensor([1.0] + [hard] * 255)

        def path(nodes: int, likely: torch.Tensor = likely) -> list[int]:
            return [i for i in range(1, nodes + 1) if dice.random() < kept * likely[i]]

        def seconds(rows: int, nodes: int) -> float:
            return (
                times[max(size for size in sizes if size <= nodes)]
                * dice.gauss(1, 0.08)
                * (3 if dice.random() < 0.01 else 1)
            )

        nodes = play_round(budget, 1, 64, likely, seconds, path)
        if turn >= 50:
            spent += times[max(size for size in sizes if size <= nodes)]
            tokens += 1 + kept * float(likely[1 : nodes + 1].sum())
    best = max((1 + kept * float(chances[1 : size + 1].sum())) / times[size] for size in sizes)
    assert tokens / spent > 0.97 * best


def test_probabilities_are_calibrated_and_a_round_that_promises_more_has_more_nodes():
    """A drafter that says too little of what is likely and too much of what is not: what is made of
    its probabilities is within 0.05 of what is accepted, in every tenth of them, and rounds verify
    more the surer they are."""
    calibration = Calibration((1, 65), (1.0, 8.0), 0.5)
    dice = np.random.default_rng(0)
    expected = []
    accepted = []
    budget = AutoBudget(calibration, 64)
    sizes = defaultdict(list)
    for turn in range(1500):
        sure = dice.choice([0.3, 0.6, 0.9])
        kept = np.zeros(0, bool)
        log_probs = torch.arange(256.0) * math.log(sure)

        def path(nodes: int, sure: float = sure) -> list[int]:
            nonlocal kept
            kept = np.cumprod(dice.random(nodes) < sure ** (0.5 if sure > 0.5 else 1.5)) > 0
            return [*np.flatnonzero(kept) + 1]

        before = budget.acceptance.calibrate(log_probs[1:].double().numpy())
        nodes = play_round(
            budget,
            1,
            64,
            log_probs.exp(),
            lambda rows, nodes: calibration.cost(nodes + 1, nodes > 0),
            path,
        )
        if turn >= 200:
            expected.append(before[:nodes])
            accepted.append(kept[:nodes])
            sizes[sure].append(nodes)
    expected = np.concatenate(expected)
    accepted = np.concatenate(accepted)
    tenths = (10 * expected).astype(int).clip(max=9)
    error = abs(np.bincount(tenths, expected, 10) - np.bincount(tenths, accepted, 10)).sum()
    assert error < 0.05 * len(expected)
    assert np.mean(sizes[0.3]) < np.mean(sizes[0.6]) < np.mean(sizes[0.9])


def test_prompts_enter_beside_the_trees_that_are_drafted(tiny):
    """While nothing is drafted, or little, prompts have the room that trees leave: rows fill as
    fast as with a fixed budget of that size."""
    steps = {}
    for budget, nodes in ((2, 2), ("auto", 2), ("auto", 0)):
        engine = Engine(
            *tiny, EngineConfig("ddtree", budget, max_num_seqs=8, max_num_batched_tokens=60), 200
        )
        if budget == "auto":
            engine.runner.budget.choose_nodes = lambda rows, most, nodes=nodes: min(nodes, most)
            engine.runner.budget._paying_nodes = lambda rows, most, nodes=nodes: min(nodes, most)
        for i in range(8):
            engine.submit([2 + i] * 24, TextOptions(max_new_tokens=160, ignore_eos=True))
            engine.step() if not i else None  # the others join one that is being written
        steps[budget, nodes] = next(
            step for step in range(50) if engine.step() and len(engine.scheduler.writing) == 8
        )
    assert steps["auto", 0] <= steps["auto", 2] == steps[2, 2]


def test_a_small_tree_is_not_drafted_for_what_a_large_one_is_worth():
    """Where prompts enter beside many rows, a round has room for a node or two alone; plain rounds,
    of which nothing is known yet, are soon tried."""
    calibration = Calibration(positions=(1, 9, 65, 257), seconds=(1.0, 1.0, 1.0, 1.0), draft=0.5)
    budget = AutoBudget(calibration, 64)
    budget.promised[1:5] = [0.1, 0.1, 0.6, 0.7]
    budget.promised_rows += 1
    budget.rounds = WARMUP_ROUNDS
    assert budget.choose_nodes(4, 64) >= 5 and budget.choose_nodes(4, 2) == 0
    assert [budget.choose_nodes(4, 64) for _ in range(UNMEASURED_EXPLORE_INTERVAL)].count(0) == 1


@pytest.mark.parametrize("family", ["dflash", "dart"])
def test_rounds_that_draft_nothing_change_no_text(make_tiny, family, monkeypatch):
    """Rows come and go while drafting stops and begins again: the drafter is given what it
    missed."""
    monkeypatch.setattr("infer.engine.memory.MAX_PENDING_ROUNDS", 5)
    target, drafter = make_tiny(
        seed=11, block_size=6, **({"family": "dart", "layers": 1} if family == "dart" else {})
    )
    texts = [TextOptions(max_new_tokens=length) for length in (40, 12, 33, 25)]
    contexts = []
    dice = random.Random(2)
    for auto in (False, True):
        engine = Engine(
            target, drafter, EngineConfig("ddtree", "auto" if auto else 9, max_num_seqs=2), 80
        )
        if auto:
            monkeypatch.setattr(
                engine.runner.budget, "choose_nodes", lambda *_: dice.choice([0, 0, 0, 0, 9])
            )
        written = [
            engine.submit(prompt, options)
            for prompt, options in zip(prompts(4), texts, strict=True)
        ]
        while engine.busy:
            engine.step()
            if len(written[0].ids) >= 20 and len(contexts) == auto:
                with torch.inference_mode():
                    engine.runner.memory.tell_drafter()
                length = len(written[0].prompt) + 15
                contexts.append(engine.runner.memory.state.cache.buffer[:, :length].clone())
        if not auto:
            expected = [text.ids for text in written]
    assert [text.ids for text in written] == expected
    assert torch.allclose(*contexts, atol=1e-4)
    assert 0 in written[0].drafted and any(written[0].drafted)


def test_calibration_ends_where_passes_are_dear(tiny, monkeypatch):
    target, drafter = tiny
    verify = target.verify
    now = 0.0

    def slow_verify(tree, *rest):
        nonlocal now
        now += 1 + 0.1 * tree.tokens.numel()
        return verify(tree, *rest)

    monkeypatch.setattr(target, "verify", slow_verify)
    calibration = calibrate(target, drafter, lambda: now, repeats=1)
    assert calibration.positions[-1] == 48  # 5.8 seconds, more than four times 1.1
    for positions in (1, 3, 9, 90):
        assert calibration.cost(positions) == pytest.approx(1 + 0.1 * positions)


def test_auto_budget_measures_and_writes_the_same(tiny):
    target, drafter = tiny
    calibration = calibrate(target, drafter, time.perf_counter, repeats=2)
    assert (
        calibration.positions[0] == 1
        and list(calibration.seconds) == sorted(calibration.seconds)
        and calibration.draft > 0
    )
    prompt = prompts(1, seed=3)[0]
    answer = generate(target, drafter, prompt, budget="auto", max_new_tokens=30)
    assert answer.ids == generate(target, None, prompt, method="plain", max_new_tokens=30).ids


def test_a_target_and_a_drafter_are_measured_once(make_tiny, monkeypatch):
    (target, drafter), measured = make_tiny(), []
    calibration = Calibration((1, 9), (1.0, 2.0), 1.0)
    monkeypatch.setattr(
        "infer.engine.budget.calibrate", lambda *asked: measured.append(asked) or calibration
    )
    for rows in (1, 2):
        Engine(target, drafter, EngineConfig("ddtree", "auto", max_num_seqs=rows), 80)
    assert len(measured) == 1
    measured.clear()
    del drafter
    gc.collect()
    assert not target.calibrations


@pytest.mark.parametrize("head", ["none", "markov", "selector", "gru"])
def test_blocks_of_two_have_fewer_trees_than_sizes(make_tiny, head):
    """Calibration measures no size twice."""
    target, drafter = make_tiny(block_size=2, head=HeadConfig(head))
    calibration = calibrate(target, drafter, lambda: 0.0, repeats=1)
    assert (
        list(calibration.positions) == sorted(set(calibration.positions))
        and calibration.cost(500) == 0
    )


def test_drafters_without_a_network_have_a_budget_too(make_tiny):
    target = make_tiny()[0]
    prompt = [5, 6, 7, 8] * 4
    plain = generate(target, None, prompt, method="plain", max_new_tokens=30).ids
    assert generate(target, Lookup(), prompt, budget="auto", max_new_tokens=30).ids == plain


@pytest.mark.robustness
def test_noise_that_steers_the_tree_is_worth_it(embedded):
    """At temperature 1 a drafter that knows the noise accepts more than one that does not, and the
    text is the same."""
    from unittest.mock import patch

    from infer.config import DrafterConfig
    from infer.drafters.base import new_drafter

    drafter = new_drafter(DrafterConfig(layers=2, block_size=6), embedded)
    drafter.init_weights(torch.Generator().manual_seed(0))
    drafter.warm_start(embedded)
    settings = {"temperature": 1.0, "max_new_tokens": 32, "budget": 12, "seed": 1}
    texts = ["import os\n", "class A:\n    def ", "def main("]
    with_noise = generate(embedded, drafter, texts, **settings)
    with patch("infer.engine.runner.condition_on_noise", lambda marginals, *_: marginals):
        without = generate(embedded, drafter, texts, **settings)
    assert [answer.ids for answer in with_noise] == [answer.ids for answer in without]
    rounds = [sum(answer.stats.rounds for answer in answers) for answers in (with_noise, without)]
    assert rounds[0] < rounds[1]


def test_an_engine_that_is_given_up_frees_its_memory_at_once(make_tiny):
    """Without the garbage collector, which comes late where objects are few and large: a cycle of
    references would keep the caches of every call of `generate`."""
    target, drafter = make_tiny()
    gc.collect()
    gc.disable()
    try:
        engine = Engine(target, drafter, EngineConfig(budget=6), 64)
        engine.submit(list(range(9)), TextOptions(max_new_tokens=6))
        while engine.busy:
            engine.step()
        memory = weakref.ref(engine.runner.memory)
        del engine
        assert memory() is None
    finally:
        gc.enable()

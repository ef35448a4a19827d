"""Prompts enter between rounds, in pieces: texts in work go on, and every text is its own."""

import random

import pytest

from infer import Engine
from infer.config import EngineConfig, TextOptions


@pytest.fixture(scope="module", params=["dflash", "dart"])
def tiny(request, make_tiny):
    return make_tiny(seed=5, block_size=4, family=request.param)


@pytest.fixture
def costs(monkeypatch):
    """(engine) -> a list to which every pass over prompts and trees adds what it costs, padding
    included: a position behind `context_reach` others counts twice."""

    def watch(engine: Engine) -> list[float]:
        counted = []
        extend = engine.target.extend
        verify = engine.target.verify

        def counting(parts, cache, layers):
            width = max(map(len, parts))
            counted.append(
                len(parts)
                * width
                * (1 + (max(cache.lengths) + width) / engine.target.context_reach)
            )
            return extend(parts, cache, layers)

        def verifying(tree, ancestors, cache, layers):
            counted.append(
                tree.tokens.numel() * (1 + max(cache.lengths) / engine.target.context_reach)
            )
            return verify(tree, ancestors, cache, layers)

        monkeypatch.setattr(engine.target, "extend", counting)
        monkeypatch.setattr(engine.target, "verify", verifying)
        return counted

    return watch


def alone(target, prompt: list[int], options: TextOptions) -> list[int]:
    engine = Engine(
        target, None, EngineConfig("plain", max_num_seqs=1), len(prompt) + options.max_new_tokens
    )
    text = engine.submit(prompt, options)
    while engine.busy:
        engine.step()
    return text.ids


def test_a_stream_waits_for_few_positions(tiny, costs):
    """Eight prompts of 150 tokens, and short ones behind them, arrive while a text is written: it
    grows in every step, for which the target computes no more than 32 positions without a context
    (3 a row or one tree behind the longest context, when that is more), to within the quarter that
    weights are rounded by, and every text is its own. By default these are a few of its own
    trees."""
    assert EngineConfig().max_num_batched_tokens < 2.5 * (EngineConfig().budget + 1)
    target, drafter = tiny
    dice = random.Random(0)
    engine = Engine(
        target, drafter, EngineConfig("ddtree", 7, max_num_seqs=16, max_num_batched_tokens=32), 320
    )
    stream = engine.submit([1, 2, 3], TextOptions(max_new_tokens=300))
    engine.step()
    counted = costs(engine)
    lengths = [150] * 8 + [3, 9, 4, 31, 2]
    prompts = [[dice.randrange(90) for _ in range(length)] for length in lengths]
    options = [
        TextOptions(max_new_tokens=4, temperature=0.8 * (i % 2), seed=i)
        for i in range(len(prompts))
    ]
    texts = [engine.submit(prompt, each) for prompt, each in zip(prompts, options, strict=True)]
    together = 0
    while any(text.finish is None for text in texts):
        counted.clear()
        before = [text for text in texts if not text.ids]
        grown = engine.step()
        assert stream in grown and stream.finish is None
        weight = (
            1
            + max(len(text.known) for text in (*engine.scheduler.writing, *grown))
            / target.context_reach
        )
        assert sum(counted) <= 1.25 * max(
            32, 3 * weight * len({*engine.scheduler.writing, *grown}), 8 * weight
        )
        together = max(together, len([text for text in before if text.ids]))
    assert together >= 2  # short prompts enter together
    for text, prompt, each in zip(texts, prompts, options, strict=True):
        assert text.ids == alone(target, prompt, each)
    assert stream.ids == alone(target, [1, 2, 3], TextOptions(max_new_tokens=len(stream.ids)))


def test_nobody_in_work_and_all_prompts_enter_at_once(tiny, costs):
    target, drafter = tiny
    engine = Engine(
        target, drafter, EngineConfig("ddtree", 7, max_num_seqs=4, max_num_batched_tokens=16), 128
    )
    counted = costs(engine)
    texts = [engine.submit([5] * length, TextOptions(max_new_tokens=3)) for length in (40, 30, 20)]
    engine.step()
    assert counted[0] == 120 * (1 + 40 / target.context_reach) and all(text.ids for text in texts)


def test_a_text_that_is_given_up_while_it_enters_leaves_nothing(tiny):
    """Its row, half filled, is another's afterwards, while rows in work come and go."""
    target, drafter = tiny
    engine = Engine(
        target, drafter, EngineConfig("ddtree", 7, max_num_seqs=2, max_num_batched_tokens=16), 128
    )
    writing = engine.submit([1, 2, 3], TextOptions(max_new_tokens=60))
    engine.step()
    entering = engine.submit(list(range(60)), TextOptions(max_new_tokens=9))
    engine.step()
    assert engine.scheduler.entering == [entering] and not entering.ids
    entering.cancelled = True
    assert (
        entering in engine.step()
        and entering.finish == "cancelled"
        and not engine.scheduler.entering
    )
    prompts = [list(range(20, 60)), list(range(10, 33))]
    texts = [engine.submit(prompt, TextOptions(max_new_tokens=12)) for prompt in prompts]
    while engine.busy:
        engine.step()
        writing.cancelled = len(writing.ids) > 20  # the row below the entering one is given up
    for text, prompt in zip(texts, prompts, strict=True):
        assert text.ids == alone(target, prompt, TextOptions(max_new_tokens=12))
    assert engine.runner.memory.cache.lengths == []


def test_who_enters_beside_a_text_that_is_given_up_is_written(tiny):
    """Two prompts enter together, over several rounds as each is long; one is given up in
    between."""
    target, drafter = tiny
    engine = Engine(
        target, drafter, EngineConfig("ddtree", 7, max_num_seqs=4, max_num_batched_tokens=144), 128
    )
    engine.submit([1, 2, 3], TextOptions(max_new_tokens=60))
    engine.step()
    prompts = [[7] * 45, list(range(44))]
    given_up, text = (engine.submit(prompt, TextOptions(max_new_tokens=9)) for prompt in prompts)
    engine.step()
    assert engine.scheduler.entering == [given_up, text] and not text.ids
    given_up.cancelled = True
    while engine.busy:
        engine.step()
    assert given_up.finish == "cancelled"
    assert text.ids == alone(target, prompts[1], TextOptions(max_new_tokens=9))


def test_an_engine_that_starts_again_keeps_what_waits(tiny):
    target, drafter = tiny
    engine = Engine(
        target, drafter, EngineConfig("ddtree", 7, max_num_seqs=2, max_num_batched_tokens=16), 128
    )
    engine.submit([1, 2, 3], TextOptions(max_new_tokens=60))
    engine.step()
    engine.submit(list(range(60)), TextOptions(max_new_tokens=9))
    waiting = engine.submit([7, 8], TextOptions(max_new_tokens=9))
    engine.step()
    engine.reset()
    assert (
        list(engine.scheduler.waiting) == [waiting]
        and not engine.scheduler.entering
        and not engine.scheduler.writing
    )
    while engine.busy:
        engine.step()
    assert waiting.ids == alone(target, [7, 8], TextOptions(max_new_tokens=9))


def test_a_step_that_raised_costs_the_text_that_cannot_fit(tiny):
    """A greedy row takes 1 of a room of 3, a sampled one 3, one with log-probabilities 9, which
    never fits. All others are written, whatever fails beside them and how often, and at the end all
    rows are in use again."""
    target, drafter = tiny
    options = [
        TextOptions(
            max_new_tokens=12,
            temperature=0.9 * (i % 4 == 1),
            logprobs=2 if i % 7 == 3 else None,
            seed=i,
        )
        for i in range(16)
    ]

    def cost(text) -> int:
        return 9 if text.options.logprobs is not None else 3 if text.options.temperature else 1

    engine = Engine(target, drafter, EngineConfig("ddtree", 7, max_num_seqs=4), 40)
    to_host = engine.runner._to_host
    failures = 0
    given_up = []

    def tight(*args):
        if sum(map(cost, engine.scheduler.writing)) > 3:
            raise RuntimeError("out of memory")
        return to_host(*args)

    engine.runner._to_host = tight
    texts = [engine.submit([i + 1, 2], each) for i, each in enumerate(options)]
    while engine.busy:
        try:
            engine.step()
        except RuntimeError:
            failures += 1
            given_up.append(engine.scheduler.retry())
            engine.reset()
    assert {text for text in given_up if text} == {text for text in texts if cost(text) == 9}
    assert failures < 40
    for i, (text, each) in enumerate(zip(texts, options, strict=True)):
        if cost(text) < 9:
            assert text.ids == alone(target, [i + 1, 2], each) and sum(text.commits) == len(
                text.ids
            )
            assert sum(text.stats.histogram) == text.stats.rounds
    assert engine.scheduler.most == 4


def test_rows_share_what_the_target_computes(tiny):
    """Trees grow smaller with every row and behind longer texts, a lone text's and those of an
    evaluation have the budget, whatever it is."""
    target, drafter = tiny

    def widest(rows: int, limit: int | None, prompt: int = 2) -> int:
        engine = Engine(
            target,
            drafter,
            EngineConfig("ddtree", 14, max_num_seqs=rows, max_num_batched_tokens=limit),
            prompt + 62,
        )
        texts = [
            engine.submit([i, *[5] * (prompt - 1)], TextOptions(max_new_tokens=9))
            for i in range(rows)
        ]
        engine.step()
        engine.step()
        return max(text.drafted[-1] for text in texts) + 1

    assert [widest(rows, 32) for rows in (1, 2, 3, 4, 5, 8, 16, 40)] == [15, 15, 8, 8, 4, 4, 2, 2]
    assert widest(1, 4) == widest(8, None) == 15
    assert target.context_reach == (4 * 32 * 32 - 2 * 32 * 16 + 3 * 32 * 48) / (
        4 * 2 * 8
    )  # a layer's weights, heads
    assert [widest(rows, 32, prompt=114) for rows in (1, 2, 3, 5)] == [
        15,
        8,
        4,
        2,
    ]  # as if twice as many wrote
    assert widest(3, 32, prompt=260) == 3  # behind twice that context
    assert widest(1, 4, prompt=260) == widest(3, None, prompt=260) == 15


def test_where_prompts_take_long_texts_wait_for_others_to_enter_with(tiny, monkeypatch):
    """Where a pass over prompts takes as long as some rounds, texts enter together, none waits for
    more than some dozen rounds, and each is its own; where nothing is written, they enter at
    once."""
    target, _ = tiny
    dice = random.Random(0)
    prompts = [[dice.randrange(90) for _ in range(dice.randrange(3, 20))] for _ in range(60)]
    options = [TextOptions(max_new_tokens=dice.randrange(10, 40), ignore_eos=True) for _ in prompts]
    passes = []
    extend = target.extend
    monkeypatch.setattr(
        target,
        "extend",
        lambda parts, *asked: (passes.append(len(parts)), extend(parts, *asked))[1],
    )
    found = {}
    for patience in (0, 4):
        engine = Engine(
            target, None, EngineConfig("plain", max_num_seqs=8, max_num_batched_tokens=None), 64
        )
        engine.runner.patience = patience
        passes.clear()
        texts = [engine.submit(prompt, each) for prompt, each in zip(prompts, options, strict=True)]
        engine.step()
        assert passes == [8]
        waited = longest = 0
        while engine.busy:
            waited = waited + 1 if engine.scheduler.free else 0
            longest = max(longest, waited)
            engine.step()
        found[patience] = len(passes), longest, [text.ids for text in texts]
    assert found[4][2] == found[0][2]
    assert found[4][0] < 0.6 * found[0][0]
    assert found[4][1] <= 4 * 8 + 1

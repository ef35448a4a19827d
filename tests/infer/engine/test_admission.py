"""Prompts enter between rounds, in pieces: texts in work go on, and every text is its own."""

import random

import pytest

from infer import Engine
from infer.config import EngineConfig, TextOptions


@pytest.fixture(scope="module", params=["dflash", "dart"])
def tiny(request, make_tiny):
    return make_tiny(seed=5, block_size=4, family=request.param)


@pytest.fixture
def positions(monkeypatch):
    """(engine) -> a list to which every pass over prompts adds its positions, padding included."""

    def watch(engine: Engine) -> list[int]:
        counted, extend = [], engine.target.extend

        def counting(parts, cache, layers):
            counted.append(len(parts) * max(map(len, parts)))
            return extend(parts, cache, layers)

        monkeypatch.setattr(engine.target, "extend", counting)
        return counted

    return watch


def alone(target, prompt: list[int], options: TextOptions) -> list[int]:
    engine = Engine(target, None, EngineConfig("plain", rows=1), len(prompt) + options.max_new_tokens)
    text = engine.submit(prompt, options)
    while engine.busy:
        engine.step()
    return text.ids


def test_a_stream_waits_for_one_piece_at_most(tiny, positions):
    """Fifteen prompts of 150 tokens, and short ones behind them, arrive while a text is written with pieces of 32: it
    grows in every step, with no more than 32 positions of prompts between two rounds (4 for each row in work, when
    that is more), and every text is its own. At the default options a piece and a round are less than 5 rounds."""
    assert EngineConfig().prefill + EngineConfig().budget + 1 < 5 * (EngineConfig().budget + 1)
    target, drafter = tiny
    dice = random.Random(0)
    engine = Engine(target, drafter, EngineConfig("ddtree", 7, rows=16, prefill=32), 320)
    stream = engine.submit([1, 2, 3], TextOptions(max_new_tokens=300))
    engine.step()
    counted = positions(engine)
    lengths = [150] * 15 + [3, 9, 4, 31, 2]
    prompts = [[dice.randrange(90) for _ in range(length)] for length in lengths]
    options = [TextOptions(max_new_tokens=4, temperature=0.8 * (i % 2), seed=i) for i in range(len(prompts))]
    texts = [engine.submit(prompt, each) for prompt, each in zip(prompts, options, strict=True)]
    together = 0
    while any(text.finish is None for text in texts):
        counted.clear()
        allowed = max(32, 4 * len(engine.writing))
        before = [text for text in texts if not text.ids]
        grown = engine.step()
        assert stream in grown and stream.finish is None
        assert sum(counted) <= allowed
        together = max(together, len([text for text in before if text.ids]))
    assert together >= 2  # short prompts enter together
    for text, prompt, each in zip(texts, prompts, options, strict=True):
        assert text.ids == alone(target, prompt, each)
    assert stream.ids == alone(target, [1, 2, 3], TextOptions(max_new_tokens=len(stream.ids)))


def test_nobody_in_work_and_all_prompts_enter_at_once(tiny, positions):
    target, drafter = tiny
    engine = Engine(target, drafter, EngineConfig("ddtree", 7, rows=4, prefill=8), 128)
    counted = positions(engine)
    texts = [engine.submit([5] * length, TextOptions(max_new_tokens=3)) for length in (40, 30, 20)]
    engine.step()
    assert counted == [120] and all(text.ids for text in texts)


def test_a_text_that_is_given_up_while_it_enters_leaves_nothing(tiny):
    """Its row, half filled, is another's afterwards, while rows in work come and go."""
    target, drafter = tiny
    engine = Engine(target, drafter, EngineConfig("ddtree", 7, rows=2, prefill=8), 128)
    writing = engine.submit([1, 2, 3], TextOptions(max_new_tokens=60))
    engine.step()
    entering = engine.submit(list(range(60)), TextOptions(max_new_tokens=9))
    engine.step()
    assert engine.entering == [entering] and not entering.ids
    entering.cancelled = True
    assert entering in engine.step() and entering.finish == "cancelled" and not engine.entering
    prompts = [list(range(20, 60)), list(range(10, 33))]
    texts = [engine.submit(prompt, TextOptions(max_new_tokens=12)) for prompt in prompts]
    while engine.busy:
        engine.step()
        writing.cancelled = len(writing.ids) > 20  # the row below the entering one is given up
    for text, prompt in zip(texts, prompts, strict=True):
        assert text.ids == alone(target, prompt, TextOptions(max_new_tokens=12))
    assert engine.cache.lengths == [] and not engine._began


def test_an_engine_that_starts_again_keeps_what_waits(tiny):
    target, drafter = tiny
    engine = Engine(target, drafter, EngineConfig("ddtree", 7, rows=2, prefill=8), 128)
    engine.submit([1, 2, 3], TextOptions(max_new_tokens=60))
    engine.step()
    engine.submit(list(range(60)), TextOptions(max_new_tokens=9))
    waiting = engine.submit([7, 8], TextOptions(max_new_tokens=9))
    engine.step()
    engine.reset()
    assert list(engine.waiting) == [waiting] and not engine.entering and not engine.writing
    while engine.busy:
        engine.step()
    assert waiting.ids == alone(target, [7, 8], TextOptions(max_new_tokens=9))


def test_a_piece_has_a_position():
    with pytest.raises(ValueError, match="prefill=0"):
        EngineConfig(prefill=0).check()

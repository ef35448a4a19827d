"""Texts that repeat themselves end in the same place, whatever decodes them."""

import random
from dataclasses import replace

import pytest

from infer import generate
from infer.config import DecodeOptions
from infer.engine.loops import LONGEST_PERIOD, TIMES, loop_period


def find_loop(ids: list[int], longest: int = LONGEST_PERIOD) -> int | None:
    """Where a text is in a loop for the first time, as a length; None if it never is."""
    return next((end for end in range(TIMES, len(ids) + 1) if loop_period(ids, end, longest)), None)


def looped(ids: list[int], longest: int) -> int | None:
    """Where a period has come TIMES times: every end, every period, one by one."""
    for end in range(1, len(ids) + 1):
        for period in range(1, longest + 1):
            tail = ids[max(0, end - TIMES * period) : end]
            if len(tail) == TIMES * period and tail == tail[:period] * TIMES:
                return end
    return None


def test_a_loop_is_a_period_that_has_come_four_times():
    assert find_loop([7, 7, 7, 7]) == 4 and find_loop([7, 7, 7]) is None
    assert find_loop([1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 9]) == 12
    assert find_loop([*range(64)] * 4) == 256 and find_loop([*range(65)] * 8) is None
    assert loop_period([5, 1, 2, 1, 2, 1, 2, 1, 2], 9, 64) == 2
    dice = random.Random(0)
    texts = [[dice.randrange(2 + i % 3) for _ in range(60)] for i in range(60)]
    texts += [text[:9] + text[9 : 9 + i % 13] * 6 for i, text in enumerate(texts)]
    for longest in (1, 3, 12):
        assert [find_loop(text, longest) for text in texts] == [
            looped(text, longest) for text in texts
        ]


@pytest.mark.parametrize("method", ["plain", "chain", "ddtree"])
def test_a_text_ends_in_its_loop_by_every_method(embedded, make_tiny, method):
    """A greedy text of random weights runs into a loop; it then ends where the whole text first
    shows it."""
    target, drafter = make_tiny()
    options = DecodeOptions(method=method, budget=9, max_new_tokens=200)
    whole = generate(target, drafter, [3, 1, 4], options)
    end = find_loop(whole.ids)
    assert end is not None and end < 200
    text = generate(target, drafter, [3, 1, 4], replace(options, loop_period=64))
    assert (text.ids, text.finish_reason) == (whole.ids[:end], "loop")
    assert sum(text.commits) == end == text.stats.tokens

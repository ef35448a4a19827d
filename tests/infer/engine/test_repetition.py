"""Outputs that repeat themselves end at the same token with every method."""

import random
from dataclasses import replace

import pytest

from infer import generate
from infer.config import DecodeOptions
from infer.engine.repetition import MAX_LOOP_PERIOD_TOKENS, MIN_LOOP_REPEATS, find_loop_period


def find_loop_end(ids: list[int], max_period: int = MAX_LOOP_PERIOD_TOKENS) -> int | None:
    """Return the length of the shortest beginning that ends with a loop, or None."""
    for end in range(MIN_LOOP_REPEATS, len(ids) + 1):
        if find_loop_period(ids, end, max_period):
            return end
    return None


def find_loop_end_by_definition(ids: list[int], max_period: int) -> int | None:
    """Return the same by comparing every period at every end."""
    for end in range(1, len(ids) + 1):
        for period in range(1, max_period + 1):
            tail = ids[max(0, end - MIN_LOOP_REPEATS * period) : end]
            if len(tail) == MIN_LOOP_REPEATS * period and tail == tail[:period] * MIN_LOOP_REPEATS:
                return end
    return None


def test_a_loop_is_a_period_that_is_repeated_four_times():
    assert find_loop_end([7, 7, 7, 7]) == 4 and find_loop_end([7, 7, 7]) is None
    assert find_loop_end([1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 9]) == 12
    assert find_loop_end([*range(64)] * 4) == 256 and find_loop_end([*range(65)] * 8) is None
    assert find_loop_period([5, 1, 2, 1, 2, 1, 2, 1, 2], 9, 64) == 2
    dice = random.Random(0)
    texts = [[dice.randrange(2 + i % 3) for _ in range(60)] for i in range(60)]
    texts += [text[:9] + text[9 : 9 + i % 13] * 6 for i, text in enumerate(texts)]
    for max_period in (1, 3, 12):
        for text in texts:
            expected = find_loop_end_by_definition(text, max_period)
            assert find_loop_end(text, max_period) == expected


@pytest.mark.parametrize("method", ["plain", "chain", "ddtree"])
def test_an_output_ends_at_its_loop_with_every_method(embedded, make_tiny, method):
    """A greedy output of random weights runs into a loop. With loop_period it ends at the first
    token at which the endless output has a loop."""
    target, drafter = make_tiny()
    options = DecodeOptions(method=method, budget=9, max_new_tokens=200)
    endless = generate(target, drafter, [3, 1, 4], options)
    end = find_loop_end(endless.ids)
    assert end is not None and end < 200
    output = generate(target, drafter, [3, 1, 4], replace(options, loop_period=64))
    assert (output.ids, output.finish_reason) == (endless.ids[:end], "loop")
    assert sum(output.commits) == end == output.stats.tokens

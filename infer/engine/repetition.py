"""Detection of outputs that end in an endless loop. This module does not import torch."""

from collections.abc import Sequence

MIN_LOOP_REPEATS = 4  # a group of tokens that occurs this many times in a row is a loop
MAX_LOOP_PERIOD_TOKENS = 64  # length of the longest loop that evaluations look for


def find_loop_period(ids: Sequence[int], end: int, max_period: int) -> int:
    """Return the number of tokens in the loop that ids[:end] ends with, or 0 if there is no loop.

    A loop of p tokens means that the last p tokens occur MIN_LOOP_REPEATS times in a row. The
    result is the smallest such p, and at most `max_period`.
    """
    last = ids[end - 1]
    for period in range(1, min(max_period, end // MIN_LOOP_REPEATS) + 1):
        if ids[end - 1 - period] == last:
            first = end - MIN_LOOP_REPEATS * period
            if ids[first : end - period] == ids[first + period : end]:
                return period
    return 0

"""Detection of outputs that repeat themselves endlessly. It imports no torch."""

from collections.abc import Sequence

MIN_LOOP_REPEATS = 4  # a period that was repeated so often is a loop
MAX_LOOP_PERIOD_TOKENS = 64  # the longest period that evaluations look for


def find_loop_period(ids: Sequence[int], end: int, max_period: int) -> int:
    """Return the period in tokens of the loop that ids[:end] ends with, 0 if there is none.

    It is the shortest period of at most `max_period` tokens that the last tokens repeat
    MIN_LOOP_REPEATS times in a row.
    """
    last = ids[end - 1]
    for period in range(1, min(max_period, end // MIN_LOOP_REPEATS) + 1):
        if ids[end - 1 - period] == last:
            first = end - MIN_LOOP_REPEATS * period
            if ids[first : end - period] == ids[first + period : end]:
                return period
    return 0

"""Texts that repeat themselves. No torch here."""

from collections.abc import Sequence

TIMES = 4  # a period that has come so often is a loop
LONGEST_PERIOD = 64  # tokens; what evaluations look for


def loop_period(ids: Sequence[int], end: int, longest: int) -> int:
    """Return the period of the loop that the tokens before `end` are in, at most `longest` tokens:
    the shortest one that has just come TIMES times in a row. 0 if there is none."""
    last = ids[end - 1]
    for period in range(1, min(longest, end // TIMES) + 1):
        if ids[end - 1 - period] == last:
            first = end - TIMES * period
            if ids[first : end - period] == ids[first + period : end]:
                return period
    return 0

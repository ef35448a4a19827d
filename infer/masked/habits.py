"""Statistics of a text so far: which token follows which, and where the next one is written.

A draft of a masked model does not depend on the tokens that are written before it in the same
round, so it is an average over what they may be. Neighbours decide much of a token: what followed
the same few tokens earlier in the text often follows them again. Trees of drafts
(`infer.masked.drafting.guided_states`) mix both, and weigh them by how often each was right so far.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

CONTEXT = 3  # tokens of a context at most, on the left


@dataclass
class Rate:
    """How often a prediction held, with one hit and one miss counted in advance."""

    hits: int = 1
    tries: int = 2

    def count(self, hit: bool) -> None:
        self.hits += hit
        self.tries += 1

    @property
    def value(self) -> float:
        return self.hits / self.tries


@dataclass
class TextHabits:
    """The habits of one text. `row` maps positions to tokens: the prompt at first."""

    row: dict[int, int]
    follows_last: Rate = field(
        default_factory=Rate
    )  # the next write stands right behind the last one
    # by length of the context
    right: list[Rate] = field(default_factory=lambda: [Rate() for _ in range(CONTEXT + 1)])
    _after: dict[tuple[int, ...], int] = field(
        default_factory=dict
    )  # the token last seen behind some tokens
    last: int | None = None  # the position of the newest token

    def __post_init__(self) -> None:
        for position in self.row:
            self._learn(position)

    def wrote(self, writes: Iterable[tuple[int, int]]) -> None:
        """Count the writes of a round, in order."""
        for position, token in writes:
            length, expected = self.expects(position, {})
            if length:
                self.right[length].count(expected == token)
            if self.last is not None and self.last + 1 not in self.row:
                self.follows_last.count(position == self.last + 1)
            self.row[position], self.last = token, position
            for near in range(position, position + CONTEXT + 1):
                self._learn(near)

    def expects(self, position: int, written: dict[int, int]) -> tuple[int, int]:
        """Return the length of the longest context of a position that was seen before, and the
        token that followed it; 0, 0 where there is none. `written` are tokens besides the row's
        own."""
        left = self._left(position, written)
        for length in range(len(left), 0, -1):
            token = self._after.get(left[-length:])
            if token is not None:
                return length, token
        return 0, 0

    def _left(self, position: int, written: dict[int, int]) -> tuple[int, ...]:
        left = []
        for place in range(position - 1, position - 1 - CONTEXT, -1):
            token = written.get(place, self.row.get(place))
            if token is None:
                break
            left.append(token)
        return tuple(reversed(left))

    def _learn(self, position: int) -> None:
        """Note that the token at a position followed the tokens before it."""
        if position in self.row:
            left = self._left(position, {})
            for length in range(1, len(left) + 1):
                self._after[left[-length:]] = self.row[position]

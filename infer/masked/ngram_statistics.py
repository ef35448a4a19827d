"""Statistics of a sequence so far: which token follows which, and where the next token is written.

A masked model predicts each position without knowing the other tokens of the same round, so its
prediction is an average over what they may be. Adjacent tokens determine much of a token: what
followed the same few tokens earlier in the sequence often follows them again. Guided draft trees
(`infer.masked.drafting.search_guided_states`) combine both, weighted by how often each was right.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

MAX_NGRAM_LEFT_CONTEXT_TOKENS = 3  # tokens to the left of a position


@dataclass
class HitRate:
    """How often a prediction was right, starting with one hit and one miss."""

    hits: int = 1
    tries: int = 2

    def record(self, hit: bool) -> None:
        """Record a prediction."""
        self.hits += hit
        self.tries += 1

    @property
    def value(self) -> float:
        """The share of right predictions."""
        return self.hits / self.tries


def make_context_hit_rates() -> list[HitRate]:
    """Return an initial hit rate for each context length, 0 to MAX_NGRAM_LEFT_CONTEXT_TOKENS."""
    return [HitRate() for _ in range(MAX_NGRAM_LEFT_CONTEXT_TOKENS + 1)]


@dataclass
class SequenceStatistics:
    """Token statistics of one sequence."""

    tokens: dict[int, int]  # position -> token; at first the prompt
    # How often a token was written directly to the right of the one before.
    adjacent_rate: HitRate = field(default_factory=HitRate)
    # By context length: how often the predicted token was right.
    context_rates: list[HitRate] = field(default_factory=make_context_hit_rates)
    last_position: int | None = None  # of the token that was written last
    # Context -> the token that followed it last.
    _next_token: dict[tuple[int, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for position in self.tokens:
            self._learn(position)

    def record_writes(self, writes: Iterable[tuple[int, int]]) -> None:
        """Record the writes of a round in order, each (position, token)."""
        for position, token in writes:
            context_length, predicted_token = self.predict(position, {})
            if context_length:
                self.context_rates[context_length].record(predicted_token == token)
            if self.last_position is not None and self.last_position + 1 not in self.tokens:
                self.adjacent_rate.record(position == self.last_position + 1)

            self.tokens[position] = token
            self.last_position = position
            for affected_position in range(position, position + MAX_NGRAM_LEFT_CONTEXT_TOKENS + 1):
                self._learn(affected_position)

    def predict(self, position: int, drafted: dict[int, int]) -> tuple[int, int]:
        """Predict the token at a position: return the length of the longest context that occurred
        before, and the token that followed it; (0, 0) if there is none. `drafted` maps further
        positions to tokens."""
        context = self._get_context(position, drafted)
        for length in range(len(context), 0, -1):
            token = self._next_token.get(context[-length:])
            if token is not None:
                return length, token
        return 0, 0

    def _get_context(self, position: int, drafted: dict[int, int]) -> tuple[int, ...]:
        """Return the known tokens directly to the left of a position, at most
        MAX_NGRAM_LEFT_CONTEXT_TOKENS."""
        context = []
        for left_position in range(position - 1, position - 1 - MAX_NGRAM_LEFT_CONTEXT_TOKENS, -1):
            token = drafted.get(left_position, self.tokens.get(left_position))
            if token is None:
                break
            context.append(token)
        return tuple(reversed(context))

    def _learn(self, position: int) -> None:
        """Record that the token at a position followed the tokens before it."""
        if position in self.tokens:
            context = self._get_context(position, {})
            for length in range(1, len(context) + 1):
                self._next_token[context[-length:]] = self.tokens[position]

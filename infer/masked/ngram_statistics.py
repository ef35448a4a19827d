"""Statistics of a sequence so far: which tokens followed which, and in which order positions were
written.

A masked model predicts each position without knowing the other tokens of the same round. Its
prediction is therefore an average over all tokens that the other positions may get. Neighbouring
tokens say much about a token: a token that followed the same few tokens earlier in the sequence
often follows them again. Guided drafts (`infer.masked.drafting.search_guided_states`) therefore
combine the model's predictions with predictions from these statistics. The more often the
statistics were right, the more weight their predictions have.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

# A token is predicted from at most this many tokens to the left of it.
MAX_NGRAM_LEFT_CONTEXT_TOKENS = 3


@dataclass
class HitRate:
    """Counts how often predictions of one kind were right. The counts start with one hit and one
    miss."""

    hits: int = 1
    tries: int = 2

    def record(self, hit: bool) -> None:
        """Count one prediction. `hit` is true if it was right."""
        self.hits += hit
        self.tries += 1

    @property
    def value(self) -> float:
        """The share of predictions that were right, between 0 and 1."""
        return self.hits / self.tries


def make_context_hit_rates() -> list[HitRate]:
    """Return initial hit rates, one for each context length from 0 to MAX_NGRAM_LEFT_CONTEXT_TOKENS
    tokens."""
    return [HitRate() for _ in range(MAX_NGRAM_LEFT_CONTEXT_TOKENS + 1)]


@dataclass
class SequenceStatistics:
    """The statistics of one sequence, which predict the next tokens and the positions where they
    are written."""

    tokens: dict[int, int]  # known tokens by position; at first only the prompt
    # How often a write came directly to the right of the previous write.
    right_neighbour_rate: HitRate = field(default_factory=HitRate)
    # Entry n: how often predictions from n context tokens were right.
    context_rates: list[HitRate] = field(default_factory=make_context_hit_rates)
    last_position: int | None = None  # the position that was written last
    # Keys are one or more consecutive tokens, values are the token that last followed them.
    _next_token: dict[tuple[int, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for position in self.tokens:
            self._record_ngrams(position)

    def record_writes(self, writes: Iterable[tuple[int, int]]) -> None:
        """Add the tokens of a decoding round to the statistics.

        writes: (position, token) pairs in the order in which they were written
        """
        for position, token in writes:
            context_length, predicted_token = self.predict_token(position, {})
            if context_length:
                self.context_rates[context_length].record(predicted_token == token)
            if self.last_position is not None and self.last_position + 1 not in self.tokens:
                self.right_neighbour_rate.record(position == self.last_position + 1)

            self.tokens[position] = token
            self.last_position = position
            for affected_position in range(position, position + MAX_NGRAM_LEFT_CONTEXT_TOKENS + 1):
                self._record_ngrams(affected_position)

    def predict_token(self, position: int, drafted: dict[int, int]) -> tuple[int, int]:
        """Predict the token at a position from the tokens to the left of it (the context).

        drafted: drafted tokens, as a dictionary from position to token

        Returns the length of the longest context that has occurred before in the sequence, and the
        token that followed it then. Returns (0, 0) if no context has occurred before.
        """
        context = self._get_context(position, drafted)
        for length in range(len(context), 0, -1):
            token = self._next_token.get(context[-length:])
            if token is not None:
                return length, token
        return 0, 0

    def _get_context(self, position: int, drafted: dict[int, int]) -> tuple[int, ...]:
        """Return the known tokens directly to the left of a position, at most
        MAX_NGRAM_LEFT_CONTEXT_TOKENS of them.

        drafted: drafted tokens, as a dictionary from position to token
        """
        context = []
        for left_position in range(position - 1, position - 1 - MAX_NGRAM_LEFT_CONTEXT_TOKENS, -1):
            token = drafted.get(left_position, self.tokens.get(left_position))
            if token is None:
                break
            context.append(token)
        return tuple(reversed(context))

    def _record_ngrams(self, position: int) -> None:
        """Store that the token at a position followed the tokens to the left of it. Do nothing if
        the token is not known yet."""
        if position in self.tokens:
            context = self._get_context(position, {})
            for length in range(1, len(context) + 1):
                self._next_token[context[-length:]] = self.tokens[position]

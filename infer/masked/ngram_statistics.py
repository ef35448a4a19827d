"""Statistics of a sequence so far: which token followed which tokens, and at which positions tokens
were written.

A masked model predicts each position without knowing the other tokens of the same round. Its
prediction is therefore an average over all possible other tokens. Adjacent tokens say much about a
token: a token that followed the same few tokens earlier in the sequence often follows them again.
Guided drafts (`infer.masked.drafting.search_guided_states`) combine the model's prediction with
this one, weighted by how often such predictions were right.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

MAX_NGRAM_LEFT_CONTEXT_TOKENS = (
    3  # a token is predicted from at most so many tokens to the left of it
)


@dataclass
class HitRate:
    """How often predictions of one kind were right. The counts start with one hit and one miss."""

    hits: int = 1
    tries: int = 2

    def record(self, hit: bool) -> None:
        """Record one prediction; `hit` tells whether it was right."""
        self.hits += hit
        self.tries += 1

    @property
    def value(self) -> float:
        """The share of predictions that were right."""
        return self.hits / self.tries


def make_context_hit_rates() -> list[HitRate]:
    """Return a list of initial hit rates, one for each context length from 0 to
    MAX_NGRAM_LEFT_CONTEXT_TOKENS."""
    return [HitRate() for _ in range(MAX_NGRAM_LEFT_CONTEXT_TOKENS + 1)]


@dataclass
class SequenceStatistics:
    """The statistics of one sequence, from which the next writes are predicted."""

    tokens: dict[int, int]  # position -> token; contains only the prompt at first
    # How often a token was written directly to the right of the token that was written before it.
    adjacent_rate: HitRate = field(default_factory=HitRate)
    # Index: number of context tokens. Value: how often the predicted token was right.
    context_rates: list[HitRate] = field(default_factory=make_context_hit_rates)
    last_position: int | None = None  # position of the token that was written last
    # Key: context tokens. Value: the token that followed this context most recently.
    _next_token: dict[tuple[int, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for position in self.tokens:
            self._learn(position)

    def record_writes(self, writes: Iterable[tuple[int, int]]) -> None:
        """Record the writes of a round. Each write is (position, token), in the order of steps."""
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
        """Predict the token at a position from the tokens to the left of it.

        Look for the longest context that has occurred before in the sequence. Return the context's
        length in tokens, and the token that followed it. Return (0, 0) if no context has occurred
        before. `drafted` maps positions of drafted tokens to these tokens.
        """
        context = self._get_context(position, drafted)
        for length in range(len(context), 0, -1):
            token = self._next_token.get(context[-length:])
            if token is not None:
                return length, token
        return 0, 0

    def _get_context(self, position: int, drafted: dict[int, int]) -> tuple[int, ...]:
        """Return the known tokens directly to the left of a position, at most
        MAX_NGRAM_LEFT_CONTEXT_TOKENS tokens."""
        context = []
        for left_position in range(position - 1, position - 1 - MAX_NGRAM_LEFT_CONTEXT_TOKENS, -1):
            token = drafted.get(left_position, self.tokens.get(left_position))
            if token is None:
                break
            context.append(token)
        return tuple(reversed(context))

    def _learn(self, position: int) -> None:
        """Record which tokens are to the left of a position's token, if the token is known."""
        if position in self.tokens:
            context = self._get_context(position, {})
            for length in range(1, len(context) + 1):
                self._next_token[context[-length:]] = self.tokens[position]

"""Drafts of a masked diffusion model for itself (self speculative decoding, SSD, section 3.2):
states of the sequence that decoding is likely to reach.

A *write* puts a token at a position. A *state* is a set of writes that are applied to the current
sequence. The empty state is the current sequence itself. Step-by-step decoding goes from state to
state, one write at a time. A round of SSD picks states that are likely to be reached, and computes
all of them in one forward pass. It then takes the same steps as step-by-step decoding, as long as
the reached state was computed. The output therefore does not depend on which states were picked.

Chains of drafts are those of the paper's section 3.2, and swapped drafts those of its section 5.2.
Guided trees are our addition. States are sets: writing b and then a leads to the same state as
writing a and then b, and this state is computed once.

P masked positions of all states, K likeliest tokens of a position, V vocabulary size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

import torch

from infer.masked.config import MaskedConfig
from infer.masked.ngram_statistics import SequenceStatistics

Write = tuple[int, int]  # (position, token)
State = frozenset[Write]

CANDIDATE_TOKENS_PER_MASKED_POSITION = (
    2  # K: so many of the likeliest tokens of each position are considered
)
PROBABILITY_FLOOR_BEFORE_LOGARITHM = (
    1e-300  # lower probabilities are raised to this, which avoids log(0)
)


@dataclass(frozen=True)
class Prediction:
    """The model's prediction at one masked position."""

    # The K likeliest tokens in descending order. If the sequence is sampled, noise is included.
    tokens: list[int]
    log_probs: list[float]  # log-probabilities of `tokens`
    confidence: float  # log-odds of the first token


Predictions = dict[int, Prediction]  # key: position


@dataclass(frozen=True)
class DraftPlan:
    """The masked positions of a sequence, and the limits of a round's drafts."""

    masked: Sequence[int]  # positions that contain a mask, ascending
    start: int  # first position of the first block: the prompt's length
    block_length: int
    max_writes: int  # maximum number of writes of a state

    def open_positions(self, state: State) -> list[int]:
        """Return the positions among which the next step after `state` chooses: the masked
        positions of the first unfinished block."""
        written = {position for position, _ in state}
        open_positions: list[int] = []
        for position in self.masked:
            if open_positions and self.block_index(position) != self.block_index(open_positions[0]):
                break
            if position not in written:
                open_positions.append(position)
        return open_positions

    def block_index(self, position: int) -> int:
        """Return the index of the block that contains a position. The first block after the prompt
        has index 0."""
        return (position - self.start) // self.block_length


def summarise_logits(
    logits: torch.Tensor, temperature: float, noise: torch.Tensor | None
) -> torch.Tensor:
    """Reduce the logits (P, V) of masked positions to the values that the host needs.

    `noise` (P, V) is the Gumbel noise of a sampled sequence, or None. The result is (P, 1 + 2 K)
    float64 on the device. Its columns are the confidence of the likeliest token, the
    log-probabilities of the K likeliest tokens, and the ids of these tokens. `parse_predictions`
    reads the columns.

    The confidence is the probability before temperature, as in LLaDA's decoding. It is stored as
    log-odds, which have the same order. Unlike probabilities, log-odds stay distinct close to
    probability 1, and rounding errors of the logits are not amplified.
    """
    logits = logits.double()
    scores = logits if noise is None else logits / temperature + noise
    top_scores, tokens = scores.topk(CANDIDATE_TOKENS_PER_MASKED_POSITION, dim=-1)  # (P, K)
    log_probs = top_scores - scores.logsumexp(-1, keepdim=True)
    first_token = tokens[:, :1]
    other_mass = logits.scatter(-1, first_token, -math.inf).logsumexp(-1, keepdim=True)
    confidence = logits.gather(-1, first_token) - other_mass  # (P, 1)
    return torch.cat([confidence, log_probs, tokens.double()], -1)


def parse_predictions(rows: Sequence[Sequence[float]], positions: Sequence[int]) -> Predictions:
    """Convert rows of the result of `summarise_logits` to predictions. Row i belongs to
    positions[i]."""
    predictions = {}
    for position, row in zip(positions, rows, strict=True):
        tokens = [int(token) for token in row[1 + CANDIDATE_TOKENS_PER_MASKED_POSITION :]]
        log_probs = list(row[1 : 1 + CANDIDATE_TOKENS_PER_MASKED_POSITION])
        predictions[position] = Prediction(tokens, log_probs, confidence=row[0])
    return predictions


def choose_chain_writes(predictions: Predictions, plan: DraftPlan, length: int) -> list[Write]:
    """Return the `length` likeliest writes, in the order in which steps would make them: block by
    block, and by confidence within a block (SSD section 3.2.2)."""
    positions = [position for position in plan.masked if position in predictions]
    positions.sort(
        key=lambda position: (
            plan.block_index(position),
            -predictions[position].confidence,
            position,
        )
    )
    count = min(length, plan.max_writes)
    return [(position, predictions[position].tokens[0]) for position in positions[:count]]


def make_chain_states(writes: Sequence[Write]) -> list[State]:
    """Return the states of a chain: the current sequence, and then a state for each write, which
    consists of this write and all writes before (SSD section 3.2.3)."""
    return [frozenset(writes[:size]) for size in range(len(writes) + 1)]


def make_mixed_states(writes: Sequence[Write], plan: DraftPlan) -> list[State]:
    """Return the states of a chain and the states with swapped writes (SSD section 5.2).

    For each state of the chain there is one more state that skips the next write and makes the
    write after it. There are at most twice as many states as writes, since writes of two different
    blocks are not swapped.
    """
    states = make_chain_states(writes)
    for size, (write, next_write) in enumerate(zip(writes, writes[1:], strict=False)):
        if plan.block_index(write[0]) == plan.block_index(next_write[0]):
            states.append(frozenset([*writes[:size], next_write]))
    return states


def search_guided_states(
    predictions: Predictions,
    plan: DraftPlan,
    length: int,
    num_states: int,
    statistics: SequenceStatistics,
) -> list[State]:
    """Return the `num_states` likeliest states, likeliest first. The search is the best-first
    search of DDTree's algorithm 1, with states instead of prefixes.

    The probability of a write is the probability that its position is written next, times the
    probability of its token. At each position the search considers the model's likeliest tokens and
    the token that the statistics predict. A state has at most `length` writes.

    The probability of a state is the product of the probabilities of its writes, in the likeliest
    order of these writes. A state is at most as probable as the state before its last write. The
    search therefore finds the likeliest states. It also finds, for each of them, the states that
    its likeliest order passes through.
    """
    max_writes = min(length, plan.max_writes)
    tie_breaker = count()
    # Entries: negative log-probability, tie breaker, state, position of the state's last write.
    heap: list[tuple[float, int, State, int | None]] = []
    heappush(heap, (0.0, next(tie_breaker), frozenset(), statistics.last_position))
    states: dict[State, None] = {}  # the keys are an ordered set
    while heap and len(states) < num_states:
        cost, _, state, last_position = heappop(heap)
        if state in states:
            continue
        states[state] = None
        if len(state) == max_writes:
            continue

        positions = estimate_position_probabilities(
            predictions, plan.open_positions(state), last_position, statistics
        )
        for position, position_probability in positions:
            tokens = estimate_token_probabilities(
                predictions[position], position, dict(state), statistics
            )
            for token, token_probability in tokens:
                probability = max(
                    position_probability * token_probability, PROBABILITY_FLOOR_BEFORE_LOGARITHM
                )
                new_state = state | {(position, token)}
                new_cost = cost - math.log(probability)
                heappush(heap, (new_cost, next(tie_breaker), new_state, position))
    return list(states)


def estimate_position_probabilities(
    predictions: Predictions,
    open_positions: Sequence[int],
    last_position: int | None,
    statistics: SequenceStatistics,
) -> list[tuple[int, float]]:
    """Return for each open position the probability that it is written next.

    The probability is proportional to the exponential of the confidence. It is mixed with the
    sequence's rate of writes that were directly to the right of the write before.
    """
    positions = [position for position in open_positions if position in predictions]
    if not positions:
        return []
    max_confidence = max(predictions[position].confidence for position in positions)
    weights = {
        position: math.exp(predictions[position].confidence - max_confidence)
        for position in positions
    }
    adjacent_probability = 0.0
    if last_position is not None and last_position + 1 in weights:
        adjacent_probability = statistics.adjacent_rate.value
    scale = (1 - adjacent_probability) / sum(weights.values())
    return [
        (position, scale * weight + adjacent_probability * (position - 1 == last_position))
        for position, weight in weights.items()
    ]


def estimate_token_probabilities(
    prediction: Prediction, position: int, written: dict[int, int], statistics: SequenceStatistics
) -> list[tuple[int, float]]:
    """Return the likeliest tokens of a position and their probabilities.

    The model's probabilities are mixed with the token that the statistics predict. The weight of
    the predicted token is the hit rate of such predictions. `written` are the writes of the state,
    from position to token.
    """
    probabilities = {
        token: math.exp(log_prob)
        for token, log_prob in zip(prediction.tokens, prediction.log_probs, strict=True)
    }
    context_length, predicted_token = statistics.predict(position, written)
    if context_length:
        hit_rate = statistics.context_rates[context_length].value
        for token in probabilities:
            probabilities[token] *= 1 - hit_rate
        probabilities[predicted_token] = probabilities.get(predicted_token, 0.0) + hit_rate
    return list(probabilities.items())


def pick_states(
    predictions: Predictions, plan: DraftPlan, options: MaskedConfig, statistics: SequenceStatistics
) -> list[State]:
    """Return the states that a round computes. The first state is the current sequence."""
    if options.method == "guided":
        return search_guided_states(
            predictions, plan, options.draft_length, options.budget, statistics
        )
    if options.method == "steps":
        return make_chain_states([])
    writes = choose_chain_writes(predictions, plan, options.draft_length)
    if options.method == "mixed":
        return make_mixed_states(writes, plan)
    return make_chain_states(writes)


def take_steps(
    states: Sequence[State], predictions: Sequence[Predictions], plan: DraftPlan
) -> tuple[list[Write], int]:
    """Take decoding steps as long as the reached state is one of the computed `states`.

    `predictions` has one entry per state. Return the writes in order, and the index of the state
    from which the last write was chosen. The last write leads to a state that was not computed; it
    is the extra token of SSD's Algorithm 1.
    """
    index_of_state = {state: index for index, state in enumerate(states)}
    index: int | None = index_of_state[frozenset()]
    last_index = index
    writes = []
    while index is not None:
        last_index = index
        state_predictions = predictions[index]
        position = max(
            plan.open_positions(states[index]),
            # If two positions have the same confidence, the lower position comes first.
            key=lambda position: (state_predictions[position].confidence, -position),
        )
        write = (position, state_predictions[position].tokens[0])
        writes.append(write)
        index = index_of_state.get(states[index] | {write})
    return writes, last_index

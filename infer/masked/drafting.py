"""Drafts that a masked diffusion model makes for itself (self speculative decoding, SSD, section
3.2).

A *write* puts a token at a masked position. A *state* is the set of writes that turn the current
sequence into a less masked copy of it. The empty state is the current sequence itself.

Step-by-step decoding makes one write after the other, each after a forward pass over the current
state. A round of SSD guesses which states decoding will reach, and computes all of them in one
forward pass. It then takes the same steps as step-by-step decoding, until a step leads to a state
that was not computed. The output therefore does not depend on the guesses.

Chains of drafts are from section 3.2 of the SSD paper. Drafts with two writes in exchanged order
are from its section 5.2. Guided drafts are our addition. A state is a set because the order of
writes does not matter: "b and then a" and "a and then b" lead to the same state, which is computed
once.
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

# At each masked position, only this many of the model's likeliest tokens may be drafted.
CANDIDATE_TOKENS_PER_MASKED_POSITION = 2
PROBABILITY_FLOOR_BEFORE_LOGARITHM = 1e-300  # smaller values are raised to this to avoid log(0)


@dataclass(frozen=True)
class Prediction:
    """The model's prediction of the token at one masked position."""

    # The likeliest tokens in descending order. For a sampled sequence, Gumbel noise is first added
    # to the logits.
    tokens: list[int]
    log_probs: list[float]  # log-probabilities of `tokens`, noise included
    confidence: float  # log-odds of the first token, before temperature and noise


Predictions = dict[int, Prediction]  # keys are positions in the sequence


@dataclass(frozen=True)
class DraftPlan:
    """The masked positions of a sequence, and the limits for the tokens that one round may
    draft."""

    masked_positions: Sequence[int]  # masked positions, ascending
    output_start: int  # first position after the prompt, where the first block starts
    block_length: int
    max_writes: int  # maximum number of drafted tokens

    def open_positions(self, state: State) -> list[int]:
        """Return the positions that the next decoding step after `state` may write: the masked
        positions of the first block that still has masks.

        state: set of drafted (position, token) pairs
        """
        written = {position for position, _ in state}
        open_positions: list[int] = []
        for position in self.masked_positions:
            if open_positions and self.block_index(position) != self.block_index(open_positions[0]):
                break
            if position not in written:
                open_positions.append(position)
        return open_positions

    def block_index(self, position: int) -> int:
        """Return the index of the block that contains a position. The first block after the prompt
        has index 0."""
        return (position - self.output_start) // self.block_length


def summarise_logits(
    logits: torch.Tensor, temperature: float, noise: torch.Tensor | None
) -> torch.Tensor:
    """Reduce the logits of masked positions to the values that the host needs.

    logits: (num_positions, vocab_size)
    noise: Gumbel noise of the same shape for a sampled sequence, None for greedy decoding

    Returns a float64 tensor (num_positions, 1 + 2 * K) on the device, where K is
    CANDIDATE_TOKENS_PER_MASKED_POSITION. Its columns are the confidence of the likeliest token, the
    log-probabilities of the K likeliest tokens, and the ids of these tokens. `parse_predictions`
    reads them.

    The confidence is the probability before temperature, as in LLaDA's decoding. It is stored as
    log-odds, which have the same order as probabilities. Log-odds stay distinct close to
    probability 1, and do not amplify rounding errors of the logits.
    """
    logits = logits.double()
    scores = logits if noise is None else logits / temperature + noise
    # (num_positions, num_candidates)
    top_scores, tokens = scores.topk(CANDIDATE_TOKENS_PER_MASKED_POSITION, dim=-1)
    log_probs = top_scores - scores.logsumexp(-1, keepdim=True)
    first_token = tokens[:, :1]
    other_mass = logits.scatter(-1, first_token, -math.inf).logsumexp(-1, keepdim=True)
    confidence = logits.gather(-1, first_token) - other_mass  # (num_positions, 1)
    return torch.cat([confidence, log_probs, tokens.double()], -1)


def parse_predictions(rows: Sequence[Sequence[float]], positions: Sequence[int]) -> Predictions:
    """Convert rows of the tensor from `summarise_logits` to a dictionary from position to
    prediction. Row i belongs to positions[i]."""
    predictions = {}
    for position, row in zip(positions, rows, strict=True):
        tokens = [int(token) for token in row[1 + CANDIDATE_TOKENS_PER_MASKED_POSITION :]]
        log_probs = list(row[1 : 1 + CANDIDATE_TOKENS_PER_MASKED_POSITION])
        predictions[position] = Prediction(tokens, log_probs, confidence=row[0])
    return predictions


def draft_likeliest_writes(predictions: Predictions, plan: DraftPlan, length: int) -> list[Write]:
    """Return the `length` likeliest drafted tokens, as (position, token) pairs. They are in the
    order in which decoding would write them: block by block, and by descending confidence within a
    block (SSD section 3.2.2)."""
    positions = [position for position in plan.masked_positions if position in predictions]
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
    """Return the copies of the sequence that a round computes for a chain of drafts (SSD section
    3.2.3): without drafted tokens, with the first drafted token, with the first two, and so on.

    Each copy, called a state, is given as the set of its drafted tokens. `writes` are all drafted
    tokens, as (position, token) pairs in the order of the chain.
    """
    return [frozenset(writes[:size]) for size in range(len(writes) + 1)]


def make_chain_and_swapped_states(writes: Sequence[Write], plan: DraftPlan) -> list[State]:
    """Return the states of a chain of drafts, and the states that are reached if two consecutive
    tokens of the chain are written in the opposite order (SSD section 5.2). A state is a copy of
    the sequence, given as the set of its drafted (position, token) pairs.

    For each state of the chain, one more state lacks the next token of the chain and has the token
    after it. The order is not changed between tokens of different blocks. There are therefore at
    most twice as many states as drafted tokens.
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
    """Return the `num_states` likeliest states, likeliest first. A state is a copy of the sequence,
    given as the set of its drafted (position, token) pairs, at most `length` of them. The search is
    the best-first search of DDTree's algorithm 1, with states instead of prefixes.

    The probability of a drafted pair is the probability that its position is written next, times
    the probability of its token there. At each position the search considers the model's likeliest
    tokens, and the token that the statistics of the sequence predict.

    The probability of a state is the product of the probabilities of its pairs, written in their
    most probable order. It is at most the probability of the state without its last pair. A
    best-first search therefore finds the likeliest states. It finds a state only after the state
    without the last pair.
    """
    max_writes = min(length, plan.max_writes)
    tie_breaker = count()
    # Entries are (negative log-probability, tie breaker, state as a set of writes, position of the
    # last write).
    heap: list[tuple[float, int, State, int | None]] = []
    heappush(heap, (0.0, next(tie_breaker), frozenset(), statistics.last_position))
    states: dict[State, None] = {}  # the keys are an ordered set; the values are unused
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
    """Return a pair (position, probability that it is written next) for each open position with a
    prediction.

    predictions: the model's predictions, by position
    open_positions: the positions that the next decoding step may write
    last_position: the position that was written last

    The probabilities are the softmax of the predictions' confidences. They are then changed if the
    position directly to the right of `last_position` is open: all are multiplied by 1 - p, and p is
    added to the probability of this position. Here p is the share of the tokens of this sequence
    that were written directly to the right of the token written before them.
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
        adjacent_probability = statistics.right_neighbour_rate.value
    scale = (1 - adjacent_probability) / sum(weights.values())
    return [
        (position, scale * weight + adjacent_probability * (position - 1 == last_position))
        for position, weight in weights.items()
    ]


def estimate_token_probabilities(
    prediction: Prediction, position: int, written: dict[int, int], statistics: SequenceStatistics
) -> list[tuple[int, float]]:
    """Return the likeliest tokens at a position as (token, probability) pairs.

    prediction: the model's prediction at this position
    written: tokens that are drafted at other positions, by position

    The model's probabilities are averaged with the prediction of the sequence's statistics, which
    is a single token. The weight of this token is the share of earlier predictions of the
    statistics that were right.
    """
    probabilities = {
        token: math.exp(log_prob)
        for token, log_prob in zip(prediction.tokens, prediction.log_probs, strict=True)
    }
    context_length, predicted_token = statistics.predict_token(position, written)
    if context_length:
        hit_rate = statistics.context_rates[context_length].value
        for token in probabilities:
            probabilities[token] *= 1 - hit_rate
        probabilities[predicted_token] = probabilities.get(predicted_token, 0.0) + hit_rate
    return list(probabilities.items())


def draft_states(
    predictions: Predictions, plan: DraftPlan, options: MaskedConfig, statistics: SequenceStatistics
) -> list[State]:
    """Choose the drafted copies of a sequence that a round computes, with the method
    `options.method`. Each copy is given as the set of its drafted (position, token) pairs. The
    first set is empty: it stands for the sequence itself."""
    if options.method == "guided":
        return search_guided_states(
            predictions, plan, options.draft_length, options.budget, statistics
        )
    if options.method == "steps":
        return make_chain_states([])
    writes = draft_likeliest_writes(predictions, plan, options.draft_length)
    if options.method == "mixed":
        return make_chain_and_swapped_states(writes, plan)
    return make_chain_states(writes)


def accept_writes(
    states: Sequence[State], predictions: Sequence[Predictions], plan: DraftPlan
) -> tuple[list[Write], int]:
    """Take decoding steps with the predictions of the computed states, until a step leads to a
    state that is not in `states`. Return the (position, token) pairs that these steps write, in
    order, and the index of the state that predicted the last pair.

    states: sets of writes, each a (position, token) pair
    predictions: for each state, the model's predictions by position

    The last pair is the extra token of SSD's algorithm 1: it is accepted without having been
    drafted.
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
            # On equal confidence, take the lower position.
            key=lambda position: (state_predictions[position].confidence, -position),
        )
        write = (position, state_predictions[position].tokens[0])
        writes.append(write)
        index = index_of_state.get(states[index] | {write})
    return writes, last_index

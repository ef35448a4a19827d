"""Drafts of a masked diffusion model for itself: states of the text that its own steps may lead to
(SSD section 3.2).

A *write* puts a token at a position. A *state* is a set of writes on top of the current text; the
empty state is the text itself. Step-by-step decoding goes from state to state, one write at a time.
A round of SSD picks some states that are likely to come, computes all of them in one pass, and then
steps as step-by-step decoding would, for as long as the state that it reaches was computed. So the
text does not depend on which states are picked.

A chain of drafts is the paper's section 3.2; swapped drafts are its section 5.2; the guided tree is
ours. States are sets: "b, then a" leads to the state of "a, then b", which is computed once.

P masked positions, in any states; K likeliest tokens of a position, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

import torch

from infer.masked.config import MaskedConfig
from infer.masked.habits import TextHabits

Write = tuple[int, int]  # position in the row, token
State = frozenset[Write]

RANKS = 2  # likeliest tokens of every position that are considered


@dataclass(frozen=True)
class Guess:
    """The model's prediction at one masked position."""

    tokens: list[int]  # the K likeliest, likeliest first, under the noise of a sampled text
    log_shares: list[float]  # log-probability of each of them
    confidence: float  # of the first, as log-odds


Guesses = dict[int, Guess]  # by position


@dataclass(frozen=True)
class Plan:
    """The masked positions of a text, and how far a round may draft."""

    masked: Sequence[int]  # ascending
    start: int  # of the first block: the prompt's length
    block_length: int
    longest: int  # writes of a state at most

    def open(self, state: State) -> list[int]:
        """Return the positions that the next step chooses from: the masks of the first unfinished
        block."""
        filled = {position for position, _ in state}
        left = []
        for position in self.masked:
            if left and self.block(position) != self.block(left[0]):
                break
            if position not in filled:
                left.append(position)
        return left

    def block(self, position: int) -> int:
        return (position - self.start) // self.block_length


def summarize(logits: torch.Tensor, temperature: float, noise: torch.Tensor | None) -> torch.Tensor:
    """Summarize logits (P, V), with the noise (P, V) of a sampled text: (P, 1 + 2 K) float64 on the
    device: confidence, log-probabilities of the likeliest tokens, and the tokens. `as_guesses`
        reads
    the columns.

    Confidence is the probability before temperature, as in LLaDA's decoding, kept as log-odds: the
    same order, but probabilities near 1 stay distinct, and rounding errors of the logits are not
    magnified.
    """
    logits = logits.double()
    scores = logits if noise is None else logits / temperature + noise
    top, tokens = scores.topk(RANKS, dim=-1)  # (P, K)
    shares = top - scores.logsumexp(-1, keepdim=True)
    first = tokens[:, :1]
    others = logits.scatter(-1, first, -math.inf).logsumexp(-1, keepdim=True)
    confidence = logits.gather(-1, first) - others  # (P, 1)
    return torch.cat([confidence, shares, tokens.double()], -1)


def as_guesses(rows: Sequence[Sequence[float]], positions: Sequence[int]) -> Guesses:
    """Return rows of `summarize`, on the host, as guesses of these positions."""
    return {
        position: Guess([int(token) for token in row[1 + RANKS :]], row[1 : 1 + RANKS], row[0])
        for position, row in zip(positions, rows, strict=True)
    }


def drafts(guesses: Guesses, plan: Plan, length: int) -> list[Write]:
    """Return the `length` likeliest writes in the order in which steps would make them, block by
    block, by confidence (section 3.2.2)."""
    known = [position for position in plan.masked if position in guesses]
    known.sort(key=lambda position: (plan.block(position), -guesses[position].confidence, position))
    return [
        (position, guesses[position].tokens[0]) for position in known[: min(length, plan.longest)]
    ]


def chain_states(writes: Sequence[Write]) -> list[State]:
    """Return the text, then states with one draft more each: length + 1 states (section 3.2.3)."""
    return [frozenset(writes[:size]) for size in range(len(writes) + 1)]


def mixed_states(writes: Sequence[Write], plan: Plan) -> list[State]:
    """Return the chain, and for every state also the one that takes the draft after the next first:
    2 * length states (section 5.2). Drafts of two blocks never swap."""
    swapped = [
        frozenset([*writes[:size], later])
        for size, (sooner, later) in enumerate(zip(writes, writes[1:], strict=False))
        if plan.block(sooner[0]) == plan.block(later[0])
    ]
    return chain_states(writes) + swapped


def guided_states(
    guesses: Guesses, plan: Plan, length: int, nodes: int, habits: TextHabits
) -> list[State]:
    """Return the `nodes` likeliest states, best first, as DDTree picks prefixes (its algorithm 1):
    a write's probability is that of its position being next times its token's, one of the likeliest
    or the one that habits expect.

    A state's probability is that of its likeliest order of writes. It is at most that of the state
    before, so the best-first search finds the likeliest states, and for each also the states of its
    likeliest order.
    """
    ties = count()
    heap = [(0.0, next(ties), frozenset(), habits.last)]
    found: dict[State, None] = {}
    while heap and len(found) < nodes:
        cost, _, state, last = heappop(heap)
        if state in found:
            continue
        found[state] = None
        if len(state) == min(length, plan.longest):
            continue
        for position, next_here in order_shares(guesses, plan.open(state), last, habits):
            for token, share in token_shares(guesses[position], position, dict(state), habits):
                gain = math.log(max(next_here * share, 1e-300))
                heappush(heap, (cost - gain, next(ties), state | {(position, token)}, position))
    return list(found)


def order_shares(
    guesses: Guesses, open_: Sequence[int], last: int | None, habits: TextHabits
) -> list[tuple[int, float]]:
    """Return the probability of every open position to be written next: by confidence, mixed with
    the habit of writing right behind the last write."""
    choices = [position for position in open_ if position in guesses]
    if not choices:
        return []
    surest = max(guesses[position].confidence for position in choices)
    weights = {position: math.exp(guesses[position].confidence - surest) for position in choices}
    beside = habits.follows_last.value if last is not None and last + 1 in weights else 0.0
    rest = (1 - beside) / sum(weights.values())
    return [
        (position, rest * weight + beside * (position - 1 == last))
        for position, weight in weights.items()
    ]


def token_shares(
    guess: Guess, position: int, written: dict[int, int], habits: TextHabits
) -> list[tuple[int, float]]:
    """Return the probability of a position's likeliest tokens: the model's, mixed with the habit by
    its hit rate."""
    shares = {
        token: math.exp(share) for token, share in zip(guess.tokens, guess.log_shares, strict=True)
    }
    length, expected = habits.expects(position, written)
    if length:
        trust = habits.right[length].value
        shares = {token: (1 - trust) * share for token, share in shares.items()}
        shares[expected] = shares.get(expected, 0.0) + trust
    return list(shares.items())


def pick_states(
    guesses: Guesses, plan: Plan, options: MaskedConfig, habits: TextHabits
) -> list[State]:
    """Return the states of a round, the current text first."""
    if options.method == "guided":
        return guided_states(guesses, plan, options.draft_length, options.budget, habits)
    writes = [] if options.method == "steps" else drafts(guesses, plan, options.draft_length)
    return mixed_states(writes, plan) if options.method == "mixed" else chain_states(writes)


def follow_steps(
    states: Sequence[State], guesses: Sequence[Guesses], plan: Plan
) -> tuple[list[Write], int]:
    """Take steps as long as the state that they lead to was computed. Return the writes, in order,
    and the index of the state that the last one was chosen in, by the model beyond the drafts
    (Algorithm 1's extra token)."""
    index = {state: at for at, state in enumerate(states)}
    at = index[frozenset()]
    writes = []
    while at is not None:
        last = at
        guess = guesses[at]
        places = plan.open(states[at])
        place = max(
            places, key=lambda place: (guess[place].confidence, -place)
        )  # the lower one of two equals
        writes.append((place, guess[place].tokens[0]))
        at = index.get(states[at] | {writes[-1]})
    return writes, last

"""Drafts of a masked diffusion model for itself: states of the text that its own steps may lead to (SSD section 3.2).

A *write* puts a token at a position. A *state* is a set of writes on top of the current text; the empty state is the
text itself. Step-by-step decoding goes from state to state, one write at a time. A round of SSD picks some states that
are likely to come, computes all of them in one pass, and then steps as step-by-step decoding would, for as long as the
state that it reaches was computed. So the text does not depend on which states are picked.

A chain of drafts is the paper's section 3.2; swapped drafts are its section 5.2. States are sets: "b, then a" leads to
the state of "a, then b", which is computed once.

P masked positions, in any states; V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

Write = tuple[int, int]  # position in the row, token
State = frozenset[Write]


class Guess(NamedTuple):
    """The model's prediction at one masked position."""

    token: int  # the likeliest, under the noise of a sampled text
    confidence: float  # as log-odds


Guesses = dict[int, Guess]  # by position


@dataclass(frozen=True)
class Plan:
    """The masked positions of a text, and how far a round may draft."""

    masked: Sequence[int]  # ascending
    start: int  # of the first block: the prompt's length
    block_length: int
    longest: int  # writes of a state at most

    def open(self, state: State) -> list[int]:
        """Return the positions that the next step chooses from: the masks of the first unfinished block."""
        filled, left = {position for position, _ in state}, []
        for position in self.masked:
            if left and self.block(position) != self.block(left[0]):
                break
            if position not in filled:
                left.append(position)
        return left

    def block(self, position: int) -> int:
        return (position - self.start) // self.block_length


def guess(logits: torch.Tensor, temperature: float, noise: torch.Tensor | None) -> torch.Tensor:
    """Return the likeliest tokens of logits (P, V), under the noise (P, V) of a sampled text, and their confidence:
    (P, 2) float64 on the device.

    Confidence is the probability before temperature, as in LLaDA's decoding, kept as log-odds: the same order, but
    probabilities near 1 stay distinct, and rounding errors of the logits are not magnified.
    """
    logits = logits.double()
    scores = logits if noise is None else logits / temperature + noise
    tokens = scores.argmax(-1, keepdim=True)  # (P, 1)
    others = logits.scatter(-1, tokens, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([tokens.double(), logits.gather(-1, tokens) - others], -1)


def next_write(guesses: Guesses, choices: Sequence[int]) -> Write:
    """Return the write of one step: the most confident position, the lower one of two equals."""
    position = max(choices, key=lambda position: (guesses[position].confidence, -position))
    return position, guesses[position].token


def drafts(guesses: Guesses, plan: Plan, length: int) -> list[Write]:
    """Return the `length` likeliest writes in the order in which steps would make them, block by block, by confidence
    (section 3.2.2)."""
    known = [position for position in plan.masked if position in guesses]
    known.sort(key=lambda position: (plan.block(position), -guesses[position].confidence, position))
    return [(position, guesses[position].token) for position in known[: min(length, plan.longest)]]


def chain_states(writes: Sequence[Write]) -> list[State]:
    """Return the text, then states with one draft more each: length + 1 states (section 3.2.3)."""
    return [frozenset(writes[:size]) for size in range(len(writes) + 1)]


def mixed_states(writes: Sequence[Write], plan: Plan) -> list[State]:
    """Return the chain, and for every state also the one that takes the draft after the next first: 2 * length states
    (section 5.2). Drafts of two blocks never swap."""
    swapped = [
        frozenset([*writes[:size], later])
        for size, (sooner, later) in enumerate(zip(writes, writes[1:], strict=False))
        if plan.block(sooner[0]) == plan.block(later[0])
    ]
    return chain_states(writes) + swapped


def pick_states(guesses: Guesses, plan: Plan, order: str, length: int) -> list[State]:
    """Return the states of a round, the current text first."""
    writes = drafts(guesses, plan, length)
    return chain_states(writes) if order == "greedy" else mixed_states(writes, plan)


def follow_steps(states: Sequence[State], guesses: Sequence[Guesses], plan: Plan) -> tuple[list[Write], int]:
    """Take steps as long as the state that they lead to was computed. Return the writes, in order, and the index of the
    state that the last one was chosen in, by the model beyond the drafts (Algorithm 1's extra token)."""
    index = {state: at for at, state in enumerate(states)}
    at, writes = index[frozenset()], []
    while at is not None:
        last = at
        writes.append(next_write(guesses[at], plan.open(states[at])))
        at = index.get(states[at] | {writes[-1]})
    return writes, last

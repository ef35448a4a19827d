"""A drafted block whose tokens depend on each other: the conditional distributions that trees and
chains ask for.

B rows, L drafted positions, M candidates a position, R tokens that the drafter knows, D hidden
size, P prefixes, c queries, S entries of a recurrent head's memory. Scores have a column for each
of the R; tokens are ids (`Vocabulary`).

A query is a slot and a token before it. A candidate is one of the M likeliest tokens of a slot by
the scores without corrections; its log-probability behind a token is exact: the normaliser goes
over the whole vocabulary, or over the tokens that the head itself chooses among. What lies outside
the candidates keeps its probability.
"""

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch
from torch.nn import functional as F

from infer.drafters.base import DraftedBlock, Drafter, DraftState
from infer.drafters.heads.base import Conditioned, Ends
from infer.targets.target import Target
from infer.trees.tree import Proposal

CHUNK = 1 << 24  # scores that are in memory at a time

# scores (B, c, R), their slots (c,) -> scores: a text's temperature and filters, and the target's
# noise
Judge = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class PairTable(NamedTuple):
    """Log-probabilities of every candidate behind every candidate of the slot before."""

    first: torch.Tensor  # (B, M) of slot 0, behind the bonus token
    steps: torch.Tensor  # (B, L - 1, M, M) of slots 1 .. L - 1: [candidate before, candidate]


class ConditionalDraft:
    """The conditional distributions of drafted blocks behind bonus tokens (B,), of M = `candidates`
    a position.

    `drafter` has a conditional head. `judge` is what the texts' options and the target's noise make
    of scores; without one they count as they are.
    """

    def __init__(
        self,
        drafter: Drafter,
        target: Target,
        bonus: torch.Tensor,
        block: DraftedBlock,
        judge: Judge | None = None,
        candidates: int = 32,
    ) -> None:
        marginals, self.all_states = block
        self.drafter = drafter
        self.target = target
        self.bonus = bonus
        self.judge = judge
        self.head = drafter.conditional_head
        self.ends = ends_of(drafter, target)
        self.recurrent = self.head.recurrent
        states = self.all_states[:, -marginals.shape[1] :]  # (B, L, D)
        self.states = states
        self.unary = marginals
        self.vocabulary = drafter.vocabulary
        # (B, L, k) columns that the head chooses among, likeliest first
        self.choices: torch.Tensor | None = None
        if self.head.top_k:
            self.choices = marginals.topk(self.head.top_k, dim=-1).indices
            self.unary = torch.full_like(marginals, -torch.inf).scatter(
                2, self.choices, marginals.gather(2, self.choices)
            )
        self.length, known = self.unary.shape[1:]
        room = CHUNK if judge is None else CHUNK // 2  # a judge makes copies
        self.at_once = max(1, room // (len(bonus) * known))  # queries whose scores are in memory
        self.count = min(candidates, self.head.top_k or candidates, known)  # M
        if judge is None:
            self.columns = self.unary.topk(self.count, dim=-1).indices  # (B, L, M)
        else:
            slots = torch.arange(self.length, device=states.device).split(self.at_once)
            parts = zip(self.unary.split(self.at_once, dim=1), slots, strict=True)
            self.columns = torch.cat(
                [judge(*part).topk(self.count, dim=-1).indices for part in parts], 1
            )
        self.tokens = self.vocabulary.ids(self.columns)

    def scores(
        self, slots: torch.Tensor, before: torch.Tensor, memory: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the scores (B, c, R) of queries at slots (c,) behind tokens (B, c), not
        normalised, and a recurrent head's memory behind these tokens; `memory` (B, c, S) is that
        before them."""
        answer = self.head.condition(self.ends, self.states[:, slots], before, slots, memory)
        scores = self.corrected(self.unary[:, slots], answer)
        return (scores if self.judge is None else self.judge(scores, slots)), answer.memory

    def corrected(self, unary: torch.Tensor, answer: Conditioned) -> torch.Tensor:
        """Return the scores (..., R) that an answer makes of those without corrections,
        broadcast."""
        if answer.correction is None:
            return self.drafter.logits(self.target, answer.read)
        return (
            F.linear(answer.correction.to(self.head.out.dtype), self.head.out).float().add_(unary)
        )

    def among_candidates(
        self, slots: torch.Tensor, before: torch.Tensor, memory: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the log-probabilities (B, c, M) of the slots' candidates, and the memory;
        arguments as in `scores`."""
        found = []
        memories = []
        for start in range(0, len(slots), self.at_once):
            part = slice(start, start + self.at_once)
            scores, after = self.scores(
                slots[part], before[:, part], None if memory is None else memory[:, part]
            )
            found.append(scores.log_softmax(-1).gather(2, self.columns[:, slots[part]]))
            memories.append(after)
        return torch.cat(found, 1), None if memories[0] is None else torch.cat(memories, 1)

    @cached_property
    def table(self) -> PairTable:
        """The log-probabilities of all candidates behind all candidates, of a head that is not
        recurrent."""
        first = self._behind(slice(0, 1), self.bonus[:, None, None])  # (B, 1, 1, M)
        at_once = (
            self.length * self.count
            if self.choices is not None and self.judge is None
            else self.at_once
        )
        steps = []
        for start in range(
            1, self.length, at_once
        ):  # as many slots as there is room for; of these, candidates
            slots = slice(start, min(start + at_once, self.length))
            before = self.tokens[:, start - 1 : slots.stop - 1]  # (B, s, M)
            parts = before.split(max(1, at_once // before.shape[1]), dim=2)
            steps.append(torch.cat([self._behind(slots, part) for part in parts], 2))
        return PairTable(first[:, 0, 0], torch.cat(steps, 1) if steps else first[:, 1:])

    def _behind(self, slots: slice, before: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities (B, s, m, M) of the candidates of s slots, each behind m
        tokens (B, s, m)."""
        number = torch.arange(self.length, device=before.device)[slots, None]  # (s, 1)
        answer = self.head.condition(self.ends, self.states[:, slots, None], before, number, None)
        # no scores of the vocabulary: candidates are among these
        if self.choices is not None and self.judge is None:
            # (B, s, k)
            choices = self.choices[:, slots]
            out = self.head.out
            correction = answer.correction.to(out.dtype) @ out[choices].transpose(2, 3)
            scores = self.unary[:, slots].gather(2, choices)[:, :, None] + correction
            return scores.float().log_softmax(-1)[..., : self.count]
        scores = self.corrected(self.unary[:, slots, None], answer)  # (B, s, m, R)
        if self.judge is not None:
            flat = number.expand(-1, before.shape[2]).flatten()  # (s m,)
            scores = self.judge(scores.flatten(1, 2), flat).view_as(scores)
        return scores.log_softmax(-1).gather(
            3, self.columns[:, slots, None].expand(-1, -1, before.shape[2], -1)
        )

    def begin(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the log-probabilities (B, 1, M) of slot 0's candidates, and the memory behind the
        bonus token."""
        if not self.recurrent:
            return self.table.first[:, None], None
        slots = torch.zeros(1, dtype=torch.long, device=self.bonus.device)
        return self.among_candidates(
            slots, self.bonus[:, None], self.head.memory(self.bonus, self.all_states)
        )

    def extend(
        self, slot: int, which: torch.Tensor, memory: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the log-probabilities (B, P, M) of a slot's candidates behind prefixes that end
        with candidates `which` (B, P) of the slot before, and the memory behind them; `memory` (B,
        P, S) is that before their last token."""
        if not self.recurrent:
            rows = which[..., None].expand(-1, -1, self.tokens.shape[-1])
            return self.table.steps[:, slot - 1].gather(1, rows), None
        before = self.tokens[:, slot - 1].gather(1, which)
        return self.among_candidates(torch.full_like(which[0], slot), before, memory)

    def chain(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the chain of each slot's likeliest token behind the ones before, (B, length), over
        the whole vocabulary, and the log-probability of each behind the tokens before it."""
        if (
            self.choices is not None
            and not self.recurrent
            and self.tokens.shape[2] == self.head.top_k
        ):
            return self._chain_of_table(length)
        before = self.bonus[:, None]
        along = []
        best = []
        memory = self.head.memory(self.bonus, self.all_states)
        for slot in range(length):
            scores, memory = self.scores(
                torch.full_like(before[0], slot), before, memory
            )  # (B, 1, R)
            highest, column = scores.max(-1)  # (B, 1)
            along.append(scores)
            before = self.vocabulary.ids(column)
            best.append((before, highest))
        tokens, highest = (torch.cat(part, 1) for part in zip(*best, strict=True))
        # the normalisers of all at once
        return tokens, (highest - torch.cat(along, 1).logsumexp(-1)).clamp(max=0)

    def _chain_of_table(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Do as `chain` does, where the candidates are all that the head chooses among."""
        # (B, M)
        log_q = self.table.first
        steps = []
        picked = []
        for slot in range(length):
            best, which = log_q.max(-1)  # (B,)
            steps.append(best)
            picked.append(which)
            if slot + 1 < length:
                log_q = self.table.steps[:, slot].gather(
                    1, which[:, None, None].expand(-1, 1, log_q.shape[1])
                )[:, 0]
        tokens = self.tokens[:, :length].gather(2, torch.stack(picked, 1)[..., None])[..., 0]
        return tokens, torch.stack(steps, 1)


def propose(
    drafter: Drafter, target: Target, bonus: torch.Tensor, state: DraftState, nodes: int
) -> Proposal:
    """Draft behind bonus tokens (B,) for greedy trees of so many nodes."""
    block = drafter.draft_block(target, bonus, state)
    steps = None if drafter.head_row is None else ConditionalDraft(drafter, target, bonus, block)
    return Proposal(bonus, block.marginals, nodes, steps=steps, vocabulary=drafter.vocabulary)


def ends_of(drafter: Drafter, target: Target) -> Ends:
    """Return what a conditional head may ask of its drafter."""
    return Ends(lambda ids: drafter.embed(target, ids), drafter.last_norm)


def teach(
    drafter: Drafter, target: Target, states: torch.Tensor, before: torch.Tensor
) -> Conditioned:
    """Return what the conditional head answers for blocks with states (G, W, D) behind the true
    tokens before their last L slots (G, L)."""
    return drafter.conditional_head.teach(ends_of(drafter, target), states, before)


def behind(
    drafter: Drafter, target: Target, block: DraftedBlock, before: torch.Tensor
) -> torch.Tensor:
    """Return the log-probabilities (B, L, R) of a drafted block behind the true tokens before its
    slots (B, L)."""
    draft = ConditionalDraft(drafter, target, before[:, 0], block, candidates=1)
    answer = teach(drafter, target, block.states, before)
    return draft.corrected(draft.unary, answer).log_softmax(-1)

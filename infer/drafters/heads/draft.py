"""A drafted block whose tokens depend on each other: the conditional distributions from which draft
trees and chains are built.

B batch rows, L drafted positions, W slots of a block, M candidates per position, R tokens of the
draft vocabulary, D hidden size, P prefixes, Q queries, S entries of a head's recurrent state.
Scores have one column for each of the R tokens; `DraftVocabulary` maps columns to token ids.

A query is a slot and the token before it. The candidates of a slot are the M likeliest tokens by
the scores without the head. A candidate's log-probability is exact: it is normalised over all R
tokens, or over those that the head chooses among. Tokens that are no candidates keep their
probability.
"""

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch
from torch.nn import functional as F

from infer.drafters.base import DraftedBlock, Drafter
from infer.drafters.heads.base import EmbedAndNorm, Head, HeadOutput
from infer.drafters.state import DrafterState
from infer.targets.target import Target
from infer.trees.tree import Proposal

MAX_HEAD_SCORE_TENSOR_ELEMENTS = 1 << 24  # elements of the largest tensor of scores

# scores (B, Q, R) and their slots (Q,) -> scores after a sequence's temperature, filters and the
# target's noise
ScoreTransform = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class CandidateLogProbs(NamedTuple):
    """Log-probabilities of every candidate after every candidate of the slot before."""

    first_slot: torch.Tensor  # (B, M) of slot 0, after the bonus token
    later_slots: torch.Tensor  # (B, L - 1, M, M) of slots 1 .. L - 1: [previous, candidate]


class ConditionalDraft:
    """The conditional distributions of blocks drafted after bonus tokens (B,) int64.

    `drafter` has a conditional head. `transform` changes scores before they are normalised: it
    applies sampling options and the target's noise. `candidates` is M.
    """

    def __init__(
        self,
        drafter: Drafter,
        target: Target,
        bonus: torch.Tensor,
        block: DraftedBlock,
        transform: ScoreTransform | None = None,
        candidates: int = 32,
    ) -> None:
        assert block.states is not None
        marginals = block.marginals
        self.drafter = drafter
        self.target = target
        self.bonus = bonus
        self.transform = transform
        self.head = get_conditional_head(drafter)
        self.embed_and_norm = get_embed_and_norm(drafter, target)
        self.recurrent = self.head.recurrent
        self.all_states = block.states  # (B, W, D)
        self.states = self.all_states[:, -marginals.shape[1] :]  # (B, L, D)
        self.vocabulary = drafter.vocabulary

        # (B, L, k) columns that the head chooses among, likeliest first; None: among all
        self.choice_columns: torch.Tensor | None = None
        self.base_scores = marginals  # (B, L, R) without the head
        if self.head.top_k:
            self.choice_columns = marginals.topk(self.head.top_k, dim=-1).indices
            self.base_scores = torch.full_like(marginals, -torch.inf).scatter(
                2, self.choice_columns, marginals.gather(2, self.choice_columns)
            )

        self.length, vocabulary_size = self.base_scores.shape[1:]
        max_scores = MAX_HEAD_SCORE_TENSOR_ELEMENTS
        if transform is not None:
            max_scores //= 2  # a transform copies the scores
        # queries whose scores are in memory at a time
        self.max_queries = max(1, max_scores // (len(bonus) * vocabulary_size))
        self.num_candidates = min(candidates, self.head.top_k or candidates, vocabulary_size)  # M
        self.columns = self._choose_candidates()  # (B, L, M)
        self.tokens = self.vocabulary.columns_to_ids(self.columns)

    def _choose_candidates(self) -> torch.Tensor:
        """Return the columns (B, L, M) of the likeliest tokens of each slot without the head."""
        if self.transform is None:
            return self.base_scores.topk(self.num_candidates, dim=-1).indices

        slots = torch.arange(self.length, device=self.states.device).split(self.max_queries)
        chunks = zip(self.base_scores.split(self.max_queries, dim=1), slots, strict=True)
        columns = [
            self.transform(scores, slots_of_chunk).topk(self.num_candidates, dim=-1).indices
            for scores, slots_of_chunk in chunks
        ]
        return torch.cat(columns, 1)

    def score_queries(
        self,
        slots: torch.Tensor,
        previous_tokens: torch.Tensor,
        recurrent_state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return unnormalised scores (B, Q, R) and the recurrent state after the previous tokens.

        `slots` (Q,) and `previous_tokens` (B, Q) are the queries. `recurrent_state` (B, Q, S) is
        the state before the previous tokens; both states are None for heads without one.
        """
        output = self.head.condition(
            self.embed_and_norm, self.states[:, slots], previous_tokens, slots, recurrent_state
        )
        scores = self.apply_head_output(self.base_scores[:, slots], output)
        if self.transform is not None:
            scores = self.transform(scores, slots)
        return scores, output.recurrent_state

    def apply_head_output(self, base_scores: torch.Tensor, output: HeadOutput) -> torch.Tensor:
        """Return the scores (..., R) after the head, from those without it, which are broadcast."""
        if output.correction is None:
            return self.drafter.compute_logits(self.target, output.head_input)
        matrix = self.head.correction_matrix
        assert matrix is not None
        return F.linear(output.correction.to(matrix.dtype), matrix).float().add_(base_scores)

    def score_candidates(
        self,
        slots: torch.Tensor,
        previous_tokens: torch.Tensor,
        recurrent_state: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the log-probabilities (B, Q, M) of the candidates of the slots, and the recurrent
        state; arguments as in `score_queries`."""
        log_probs = []
        next_states = []
        for start in range(0, len(slots), self.max_queries):
            chunk = slice(start, start + self.max_queries)
            state_chunk = None
            if recurrent_state is not None:
                state_chunk = recurrent_state[:, chunk]
            scores, next_state = self.score_queries(
                slots[chunk], previous_tokens[:, chunk], state_chunk
            )
            log_probs.append(scores.log_softmax(-1).gather(2, self.columns[:, slots[chunk]]))
            if next_state is not None:
                next_states.append(next_state)
        joined_state = None
        if next_states:
            joined_state = torch.cat(next_states, 1)
        return torch.cat(log_probs, 1), joined_state

    @cached_property
    def table(self) -> CandidateLogProbs:
        """The log-probabilities of all candidates after all candidates of the slot before, for a
        head that is not recurrent."""
        first_slot = self._score_slots(slice(0, 1), self.bonus[:, None, None])  # (B, 1, 1, M)
        max_queries = self.max_queries
        if self.choice_columns is not None and self.transform is None:
            max_queries = self.length * self.num_candidates  # no scores of the whole vocabulary

        later_slots = []
        # Each step scores as many slots as fit, each after as many candidates as fit.
        for start in range(1, self.length, max_queries):
            slots = slice(start, min(start + max_queries, self.length))
            previous_tokens = self.tokens[:, start - 1 : slots.stop - 1]  # (B, s, M)
            chunk_size = max(1, max_queries // previous_tokens.shape[1])
            chunks = previous_tokens.split(chunk_size, dim=2)
            later_slots.append(torch.cat([self._score_slots(slots, chunk) for chunk in chunks], 2))

        if not later_slots:
            return CandidateLogProbs(first_slot[:, 0, 0], first_slot[:, 1:])
        return CandidateLogProbs(first_slot[:, 0, 0], torch.cat(later_slots, 1))

    def _score_slots(self, slots: slice, previous_tokens: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities (B, s, m, M) of the candidates of s slots, each after m
        previous tokens (B, s, m)."""
        device = previous_tokens.device
        slot_numbers = torch.arange(self.length, device=device)[slots, None]  # (s, 1)
        output = self.head.condition(
            self.embed_and_norm, self.states[:, slots, None], previous_tokens, slot_numbers, None
        )
        if self.choice_columns is not None and self.transform is None:
            # The candidates are the first choices: scores of the whole vocabulary are not needed.
            choices = self.choice_columns[:, slots]  # (B, s, k)
            matrix = self.head.correction_matrix
            assert matrix is not None and output.correction is not None
            correction = output.correction.to(matrix.dtype) @ matrix[choices].transpose(2, 3)
            scores = self.base_scores[:, slots].gather(2, choices)[:, :, None] + correction
            return scores.float().log_softmax(-1)[..., : self.num_candidates]

        scores = self.apply_head_output(self.base_scores[:, slots, None], output)  # (B, s, m, R)
        num_previous = previous_tokens.shape[2]
        if self.transform is not None:
            slots_of_queries = slot_numbers.expand(-1, num_previous).flatten()  # (s m,)
            scores = self.transform(scores.flatten(1, 2), slots_of_queries).view_as(scores)
        columns = self.columns[:, slots, None].expand(-1, -1, num_previous, -1)
        return scores.log_softmax(-1).gather(3, columns)

    def begin(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the log-probabilities (B, 1, M) of slot 0's candidates, and the recurrent state
        after the bonus token."""
        if not self.recurrent:
            return self.table.first_slot[:, None], None
        slots = torch.zeros(1, dtype=torch.long, device=self.bonus.device)
        initial_state = self.head.initial_state(self.bonus, self.all_states)
        return self.score_candidates(slots, self.bonus[:, None], initial_state)

    def extend(
        self, slot: int, which: torch.Tensor, memory: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the log-probabilities (B, P, M) of a slot's candidates after P prefixes, and the
        recurrent state after the prefixes.

        `which` (B, P) int64 are the last tokens of the prefixes, as indices of candidates of the
        slot before; `memory` (B, P, S) is the recurrent state before these tokens, None for heads
        without one.
        """
        if not self.recurrent:
            indices = which[..., None].expand(-1, -1, self.tokens.shape[-1])
            return self.table.later_slots[:, slot - 1].gather(1, indices), None
        previous_tokens = self.tokens[:, slot - 1].gather(1, which)
        return self.score_candidates(torch.full_like(which[0], slot), previous_tokens, memory)

    def chain(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the greedy chain: each slot's likeliest token after the tokens before it.

        Returns tokens (B, length), chosen from the whole draft vocabulary, and the log-probability
        (B, length) of each after the tokens before it.
        """
        chooses_candidates = self.tokens.shape[2] == self.head.top_k
        if self.choice_columns is not None and not self.recurrent and chooses_candidates:
            return self._chain_from_table(length)

        previous_tokens = self.bonus[:, None]
        all_scores = []
        tokens = []
        best_scores = []
        recurrent_state = self.head.initial_state(self.bonus, self.all_states)
        for slot in range(length):
            slots = torch.full_like(previous_tokens[0], slot)
            scores, recurrent_state = self.score_queries(slots, previous_tokens, recurrent_state)
            best_score, column = scores.max(-1)  # (B, 1)
            previous_tokens = self.vocabulary.columns_to_ids(column)
            all_scores.append(scores)  # (B, 1, R)
            tokens.append(previous_tokens)
            best_scores.append(best_score)

        # One normalisation of all slots takes fewer kernel launches than one per slot.
        normalizers = torch.cat(all_scores, 1).logsumexp(-1)
        log_probs = (torch.cat(best_scores, 1) - normalizers).clamp(max=0)
        return torch.cat(tokens, 1), log_probs

    def _chain_from_table(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute `chain` from `table`, where the head chooses among the candidates alone."""
        log_probs = self.table.first_slot  # (B, M)
        best_log_probs = []
        best_indices = []
        for slot in range(length):
            best_log_prob, index = log_probs.max(-1)  # (B,)
            best_log_probs.append(best_log_prob)
            best_indices.append(index)
            if slot + 1 < length:
                indices = index[:, None, None].expand(-1, 1, log_probs.shape[1])
                log_probs = self.table.later_slots[:, slot].gather(1, indices)[:, 0]
        indices = torch.stack(best_indices, 1)[..., None]  # (B, length, 1)
        tokens = self.tokens[:, :length].gather(2, indices)[..., 0]
        return tokens, torch.stack(best_log_probs, 1)


def draft_proposal(
    drafter: Drafter, target: Target, bonus: torch.Tensor, state: DrafterState, budget: int
) -> Proposal:
    """Draft a block after bonus tokens (B,) for greedy trees of at most `budget` drafted nodes."""
    block = drafter.draft_block(target, bonus, state)
    steps = None
    if drafter.head_spec is not None:
        steps = ConditionalDraft(drafter, target, bonus, block)
    return Proposal(
        bonus, block.marginals, budget, conditionals=steps, vocabulary=drafter.vocabulary
    )


def get_conditional_head(drafter: Drafter) -> Head:
    """Return the conditional head of a drafter that has one."""
    head = drafter.conditional_head
    assert head is not None, "the drafter has no conditional head"
    return head


def get_embed_and_norm(drafter: Drafter, target: Target) -> EmbedAndNorm:
    """Return the functions of a drafter that its conditional head may call."""
    return EmbedAndNorm(lambda ids: drafter.embed(target, ids), drafter.apply_final_norm)


def teacher_force_head(
    drafter: Drafter, target: Target, states: torch.Tensor, previous_tokens: torch.Tensor
) -> HeadOutput:
    """Return the conditional head's outputs for blocks after the true tokens.

    `states` (G, W, D) are those of all slots, `previous_tokens` (G, L) int64 the true tokens before
    the last L slots.
    """
    head = get_conditional_head(drafter)
    return head.teacher_force(get_embed_and_norm(drafter, target), states, previous_tokens)


def teacher_forced_log_probs(
    drafter: Drafter, target: Target, block: DraftedBlock, previous_tokens: torch.Tensor
) -> torch.Tensor:
    """Return the log-probabilities (B, L, R) of a drafted block after the true tokens before its
    slots, `previous_tokens` (B, L) int64."""
    assert block.states is not None
    draft = ConditionalDraft(drafter, target, previous_tokens[:, 0], block, candidates=1)
    output = teacher_force_head(drafter, target, block.states, previous_tokens)
    return draft.apply_head_output(draft.base_scores, output).log_softmax(-1)

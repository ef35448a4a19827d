"""Draft a block with a conditional head: compute the conditional distributions of the drafted
tokens, from which draft trees and chains are built.

B batch rows, L drafted positions, W slots of a block, M candidates per slot, R tokens of the draft
vocabulary, D hidden size, G blocks, P prefixes of a draft tree, Q queries, S entries of the state
of a recurrent head, s slots of a chunk, m previous tokens of a chunk. Scores have one column for
each of the R draft tokens; `DraftVocabulary` maps columns to token ids. Slots are numbered from 0,
the first drafted slot.

A query is a pair of a slot and a token before the slot. The candidates of a slot are the M
likeliest tokens by the scores without the head. The log-probability of a candidate is exact: it is
normalised over all R tokens, or over the `top_k` tokens among which the head chooses. The
log-probabilities of a slot's candidates therefore need not add up to probability 1.
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

MAX_HEAD_SCORE_TENSOR_ELEMENTS = 1 << 24  # maximum number of elements of a tensor of scores

# Takes scores (B, Q, R) and their slots (Q,). Returns the scores after each sequence's temperature
# and filters were applied and the Gumbel noise was added with which the target samples.
ScoreTransform = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class CandidateLogProbs(NamedTuple):
    """The log-probabilities of each slot's candidates after every candidate of the previous
    slot."""

    first_slot: torch.Tensor  # (B, M) candidates of slot 0, after the bonus token
    # (B, L - 1, M, M) candidates of slots 1 .. L - 1, indexed
    # [batch row, slot - 1, candidate of the previous slot, candidate]
    later_slots: torch.Tensor


class ConditionalDraft:
    """The conditional distributions of one drafted block per batch row.

    `drafter` must have a conditional head. `bonus` (B,) int64 are the bonus tokens. `block` is the
    result of `Drafter.draft_block`. `transform` changes scores before they are normalised, see
    `ScoreTransform`. `candidates` is M, the number of candidates per slot.
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

        # (B, L, top_k) the columns among which the head chooses, likeliest first; None means all
        self.choice_columns: torch.Tensor | None = None
        self.base_scores = marginals  # (B, L, R) scores without the head
        if self.head.top_k:
            self.choice_columns = marginals.topk(self.head.top_k, dim=-1).indices
            self.base_scores = torch.full_like(marginals, -torch.inf).scatter(
                2, self.choice_columns, marginals.gather(2, self.choice_columns)
            )

        self.length, vocabulary_size = self.base_scores.shape[1:]
        max_scores = MAX_HEAD_SCORE_TENSOR_ELEMENTS
        if transform is not None:
            max_scores //= 2  # because a transform copies the scores
        # the number of queries whose scores fit in memory at the same time
        self.max_queries = max(1, max_scores // (len(bonus) * vocabulary_size))
        self.num_candidates = min(candidates, self.head.top_k or candidates, vocabulary_size)  # M
        self.columns = self._choose_candidates()  # (B, L, M)
        self.tokens = self.vocabulary.columns_to_ids(self.columns)

    def _choose_candidates(self) -> torch.Tensor:
        """Return the columns (B, L, M) of the candidates: the likeliest tokens of each slot by the
        scores without the head."""
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
        """Return the unnormalised scores (B, Q, R) of queries, and the recurrent state (B, Q, S)
        after the previous tokens.

        `slots` (Q,) and `previous_tokens` (B, Q) are the queries. `recurrent_state` (B, Q, S) is
        the state before the previous tokens. Both states are None if the head is not recurrent.
        """
        output = self.head.condition(
            self.embed_and_norm, self.states[:, slots], previous_tokens, slots, recurrent_state
        )
        scores = self.apply_head_output(self.base_scores[:, slots], output)
        if self.transform is not None:
            scores = self.transform(scores, slots)
        return scores, output.recurrent_state

    def apply_head_output(self, base_scores: torch.Tensor, output: HeadOutput) -> torch.Tensor:
        """Return the scores (..., R) with the head.

        `base_scores` are the scores without the head; they are broadcast to the shape of the
        result. `output` is the head's output.
        """
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
        """Return the log-probabilities (B, Q, M) of the candidates of each query's slot, and the
        recurrent state after the previous tokens. The arguments are described in
        `score_queries`."""
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
        """The log-probabilities of each slot's candidates after every candidate of the previous
        slot. Only for a head that is not recurrent."""
        first_slot = self._score_slots(slice(0, 1), self.bonus[:, None, None])  # (B, 1, 1, M)
        max_queries = self.max_queries
        if self.choice_columns is not None and self.transform is None:
            # Everything fits at once: there are scores for `top_k` tokens per query, not for all R.
            max_queries = self.length * self.num_candidates

        later_slots = []
        # Each iteration scores as many slots as fit in memory. If even one slot after all
        # candidates does not fit, the candidates are split into chunks.
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
        """Return the log-probabilities (B, s, m, M) of the candidates of s slots.

        `slots` are the s slots. Each is scored after m alternative tokens, given in
        `previous_tokens` (B, s, m).
        """
        device = previous_tokens.device
        slot_numbers = torch.arange(self.length, device=device)[slots, None]  # (s, 1)
        output = self.head.condition(
            self.embed_and_norm, self.states[:, slots, None], previous_tokens, slot_numbers, None
        )
        if self.choice_columns is not None and self.transform is None:
            # The candidates are the first of `choice_columns`, so it suffices to score the `top_k`
            # tokens of `choice_columns`.
            choices = self.choice_columns[:, slots]  # (B, s, top_k)
            matrix = self.head.correction_matrix
            assert matrix is not None and output.correction is not None
            correction = output.correction.to(matrix.dtype) @ matrix[choices].transpose(2, 3)
            scores = self.base_scores[:, slots].gather(2, choices)[:, :, None] + correction
            return scores.float().log_softmax(-1)[..., : self.num_candidates]

        scores = self.apply_head_output(self.base_scores[:, slots, None], output)  # (B, s, m, R)
        num_previous = previous_tokens.shape[2]
        if self.transform is not None:
            slots_of_queries = slot_numbers.expand(-1, num_previous).flatten()  # (s * m,)
            scores = self.transform(scores.flatten(1, 2), slots_of_queries).view_as(scores)
        columns = self.columns[:, slots, None].expand(-1, -1, num_previous, -1)
        return scores.log_softmax(-1).gather(3, columns)

    def begin(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the log-probabilities (B, 1, M) of the candidates of slot 0, and the recurrent
        state (B, 1, S) after the bonus token, None if the head is not recurrent."""
        if not self.recurrent:
            return self.table.first_slot[:, None], None
        slots = torch.zeros(1, dtype=torch.long, device=self.bonus.device)
        initial_state = self.head.initial_state(self.bonus, self.all_states)
        return self.score_candidates(slots, self.bonus[:, None], initial_state)

    def extend(
        self, slot: int, which: torch.Tensor, memory: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the log-probabilities (B, P, M) of the candidates of `slot` after each of P
        prefixes, and the recurrent state (B, P, S) after the prefixes.

        `which` (B, P) int64 gives the last token of each prefix, as an index into the candidates of
        the previous slot. `memory` (B, P, S) is the recurrent state before these tokens. Both
        states are None if the head is not recurrent.
        """
        if not self.recurrent:
            indices = which[..., None].expand(-1, -1, self.tokens.shape[-1])
            return self.table.later_slots[:, slot - 1].gather(1, indices), None
        previous_tokens = self.tokens[:, slot - 1].gather(1, which)
        return self.score_candidates(torch.full_like(which[0], slot), previous_tokens, memory)

    def chain(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft a greedy chain of `length` tokens: in each slot, take the likeliest token after the
        chain so far.

        Returns the tokens (B, length), chosen from the whole draft vocabulary, and the
        log-probability (B, length) of each token given the chain before it.
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

        # Normalising all slots together takes fewer kernel launches than normalising each slot.
        normalizers = torch.cat(all_scores, 1).logsumexp(-1)
        log_probs = (torch.cat(best_scores, 1) - normalizers).clamp(max=0)
        return torch.cat(tokens, 1), log_probs

    def _chain_from_table(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `chain` describes, computed from `table`. This is possible if the candidates
        are all tokens among which the head chooses."""
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
    """Draft a block for every batch row after the bonus tokens (B,). Return a proposal for draft
    trees of at most `budget` drafted nodes under greedy decoding."""
    block = drafter.draft_block(target, bonus, state)
    steps = None
    if drafter.head_spec is not None:
        steps = ConditionalDraft(drafter, target, bonus, block)
    return Proposal(
        bonus, block.marginals, budget, conditionals=steps, vocabulary=drafter.vocabulary
    )


def get_conditional_head(drafter: Drafter) -> Head:
    """Return the drafter's conditional head. The drafter must have one."""
    head = drafter.conditional_head
    assert head is not None, "the drafter has no conditional head"
    return head


def get_embed_and_norm(drafter: Drafter, target: Target) -> EmbedAndNorm:
    """Return the functions of `drafter` that its conditional head may call."""
    return EmbedAndNorm(lambda ids: drafter.embed(target, ids), drafter.apply_final_norm)


def teacher_force_head(
    drafter: Drafter, target: Target, states: torch.Tensor, previous_tokens: torch.Tensor
) -> HeadOutput:
    """Return the conditional head's outputs (G, L, ...) for the last L slots of G blocks, where the
    token before each slot is the true token of the training text.

    `states` (G, W, D) are the states of all slots. `previous_tokens` (G, L) int64 are the true
    tokens before the last L slots.
    """
    head = get_conditional_head(drafter)
    return head.teacher_force(get_embed_and_norm(drafter, target), states, previous_tokens)


def teacher_forced_log_probs(
    drafter: Drafter, target: Target, block: DraftedBlock, previous_tokens: torch.Tensor
) -> torch.Tensor:
    """Return the log-probabilities (B, L, R) of all draft tokens in each slot of a drafted block,
    where the token before each slot is the true one, given in `previous_tokens` (B, L) int64."""
    assert block.states is not None
    draft = ConditionalDraft(drafter, target, previous_tokens[:, 0], block, candidates=1)
    output = teacher_force_head(drafter, target, block.states, previous_tokens)
    return draft.apply_head_output(draft.base_scores, output).log_softmax(-1)

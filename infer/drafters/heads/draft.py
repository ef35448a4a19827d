"""Draft a block with a conditional head: compute the conditional distributions of the drafted
tokens, from which draft trees and chains are built.

Slots are the drafted positions of a block, numbered from 0. A query is a pair of a slot and a token
before the slot. Base scores are the drafter's scores before the conditional head changes them. The
candidates of a slot are the tokens with the highest base scores. The log-probability of a candidate
is exact: it is normalised over all tokens that the drafter can propose, or over the `top_k` tokens
among which the head chooses. Therefore, the probabilities of a slot's candidates may add up to less
than one. Scores have one column for each token that the drafter can propose; `DraftVocabulary` maps
columns to token ids.

B batch rows, L slots, R tokens that the drafter can propose, D hidden size.
"""

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch
from torch.nn import functional as F

from infer.drafters.base import DraftedBlock, Drafter
from infer.drafters.heads.base import ConditionalHead, EmbedAndNorm, HeadOutput
from infer.drafters.state import DrafterState
from infer.targets.target import Target
from infer.trees.tree import Proposal

# Maximum number of elements of one tensor of scores. If the scores of all queries (drafted
# positions with a token before them) have more elements, the queries are scored in chunks.
MAX_HEAD_SCORE_TENSOR_ELEMENTS = 1 << 24

# Arguments: scores (B, queries, tokens), and the drafted position (queries,) of each query. Returns
# the scores after applying each sequence's temperature and sampling filters and adding the same
# Gumbel noise with which the target samples. A query is a drafted position with a token before it.
ScoreTransform = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class CandidateLogProbs(NamedTuple):
    """The log-probabilities of the candidates (likeliest tokens) of each drafted position, given
    each possible candidate at the previous position."""

    # (B, candidates): at the first drafted position, after the bonus token
    first_slot: torch.Tensor
    # (B, drafted positions - 1, candidates of the previous position, candidates): at the drafted
    # positions after the first
    later_slots: torch.Tensor


class ConditionalDraft:
    """The distributions of the tokens of one drafted block per batch row, conditioned on the
    drafted tokens before them.

    `drafter` must have a conditional head. `bonus` (B,) int64 are the bonus tokens. `block` is the
    result of `Drafter.draft_block`. `transform`, if given, changes scores before they are
    normalised, see `ScoreTransform`. `candidates` is the number of candidate tokens of each drafted
    position.
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
        self.all_states = block.states  # (B, input positions of the block, hidden size)
        # (B, drafted positions, hidden size)
        self.states = self.all_states[:, -marginals.shape[1] :]
        self.vocabulary = drafter.vocabulary

        # (B, drafted positions, top_k): the columns of the scores (tokens) among which the head
        # chooses, likeliest first; None means all columns
        self.choice_columns: torch.Tensor | None = None
        # (B, drafted positions, tokens): scores before the conditional head changes them
        self.base_scores = marginals
        if self.head.top_k:
            self.choice_columns = marginals.topk(self.head.top_k, dim=-1).indices
            self.base_scores = torch.full_like(marginals, -torch.inf).scatter(
                2, self.choice_columns, marginals.gather(2, self.choice_columns)
            )

        self.length, vocabulary_size = self.base_scores.shape[1:]
        max_scores = MAX_HEAD_SCORE_TENSOR_ELEMENTS
        if transform is not None:
            max_scores //= 2  # a transform copies the scores, which doubles their memory
        # number of queries per batch row whose scores are computed in one tensor
        self.max_queries = max(1, max_scores // (len(bonus) * vocabulary_size))
        # number of candidate tokens per drafted position
        self.num_candidates = min(candidates, self.head.top_k or candidates, vocabulary_size)
        self.columns = self._choose_candidate_columns()  # (B, drafted positions, candidates)
        self.tokens = self.vocabulary.columns_to_ids(self.columns)

    def _choose_candidate_columns(self) -> torch.Tensor:
        """Return the candidates of each drafted position, (B, drafted positions, num_candidates),
        as column indices of the scores.

        The candidates are the likeliest tokens by the drafter's scores before the conditional head
        changes them. `transform` is applied to these scores.
        """
        if self.transform is None:
            return self.base_scores.topk(self.num_candidates, dim=-1).indices

        slots = torch.arange(self.length, device=self.states.device).split(self.max_queries)
        chunks = zip(self.base_scores.split(self.max_queries, dim=1), slots, strict=True)
        columns = [
            self.transform(scores, slots_of_chunk).topk(self.num_candidates, dim=-1).indices
            for scores, slots_of_chunk in chunks
        ]
        return torch.cat(columns, 1)

    def score_all_tokens_after(
        self,
        slots: torch.Tensor,
        previous_tokens: torch.Tensor,
        recurrent_state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the conditional head's scores of all tokens for Q queries per batch row. A query
        asks for the scores at a drafted position, given the token before this position.

        `slots` (Q,) are the numbers of the drafted positions. `previous_tokens` (B, Q) are the
        tokens before them. `recurrent_state` (B, Q, state_size) is the state of a recurrent head
        before it reads these tokens; None for other heads.

        Returns the unnormalised scores (B, Q, draft_vocab_size), and the recurrent state after
        these tokens (None if the head is not recurrent).
        """
        output = self.head.condition(
            self.embed_and_norm, self.states[:, slots], previous_tokens, slots, recurrent_state
        )
        scores = self.apply_head_output(self.base_scores[:, slots], output)
        if self.transform is not None:
            scores = self.transform(scores, slots)
        return scores, output.recurrent_state

    def apply_head_output(self, base_scores: torch.Tensor, output: HeadOutput) -> torch.Tensor:
        """Combine the drafter's scores with the output of the conditional head. Return the new
        scores (..., draft_vocab_size).

        `base_scores` are the drafter's scores before the conditional head changes them, broadcast
        to the result's shape. They are ignored if the head does not correct logits but changes the
        input of the language model head.
        """
        if output.low_rank_correction is None:
            return self.drafter.compute_logits(self.target, output.head_input)
        matrix = self.head.correction_matrix
        assert matrix is not None
        return (
            F.linear(output.low_rank_correction.to(matrix.dtype), matrix).float().add_(base_scores)
        )

    def compute_candidate_log_probs(
        self,
        slots: torch.Tensor,
        previous_tokens: torch.Tensor,
        recurrent_state: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the log-probabilities (B, Q, num_candidates) of the candidates for Q queries, and
        the recurrent state after the previous tokens (None if the head is not recurrent).

        A query is a drafted position with a token before it. The arguments are explained in
        `score_all_tokens_after`.
        """
        log_probs = []
        next_states = []
        for start in range(0, len(slots), self.max_queries):
            chunk = slice(start, start + self.max_queries)
            state_chunk = None
            if recurrent_state is not None:
                state_chunk = recurrent_state[:, chunk]
            scores, next_state = self.score_all_tokens_after(
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
    def candidate_log_probs(self) -> CandidateLogProbs:
        """The log-probabilities of the candidates (likeliest tokens) of each drafted position,
        given each possible candidate at the previous position.

        Not available for recurrent heads.
        """
        # (B, 1, 1, candidates)
        first_slot = self._compute_slot_log_probs(slice(0, 1), self.bonus[:, None, None])
        max_queries = self.max_queries
        if self.choice_columns is not None and self.transform is None:
            # Only `top_k` tokens per query are scored, so the scores of all queries fit into one
            # tensor.
            max_queries = self.length * self.num_candidates

        later_slots = []
        # Each iteration scores as many drafted positions as fit into one tensor. If not even one
        # position fits, the candidates of the position before it are split into chunks.
        for start in range(1, self.length, max_queries):
            slots = slice(start, min(start + max_queries, self.length))
            # (B, positions of this iteration, candidates)
            previous_tokens = self.tokens[:, start - 1 : slots.stop - 1]
            chunk_size = max(1, max_queries // previous_tokens.shape[1])
            chunks = previous_tokens.split(chunk_size, dim=2)
            later_slots.append(
                torch.cat([self._compute_slot_log_probs(slots, chunk) for chunk in chunks], 2)
            )

        if not later_slots:
            return CandidateLogProbs(first_slot[:, 0, 0], first_slot[:, 1:])
        return CandidateLogProbs(first_slot[:, 0, 0], torch.cat(later_slots, 1))

    def _compute_slot_log_probs(self, slots: slice, previous_tokens: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of the candidates of several drafted positions, given each
        of several tokens before the position.

        `slots` is the range of the positions. `previous_tokens` (B, positions, alternatives) are
        the alternative tokens before each position. The result has the shape (B, positions,
        alternatives, num_candidates).
        """
        device = previous_tokens.device
        slot_numbers = torch.arange(self.length, device=device)[slots, None]  # (positions, 1)
        output = self.head.condition(
            self.embed_and_norm, self.states[:, slots, None], previous_tokens, slot_numbers, None
        )
        if self.choice_columns is not None and self.transform is None:
            # The head chooses only among the `top_k` tokens in `choice_columns`, so no other tokens
            # need scores. The candidates come first in `choice_columns`.
            choices = self.choice_columns[:, slots]  # (B, positions, top_k)
            matrix = self.head.correction_matrix
            assert matrix is not None and output.low_rank_correction is not None
            correction = output.low_rank_correction.to(matrix.dtype) @ matrix[choices].transpose(
                2, 3
            )
            scores = self.base_scores[:, slots].gather(2, choices)[:, :, None] + correction
            return scores.float().log_softmax(-1)[..., : self.num_candidates]

        # (B, positions, previous tokens, tokens)
        scores = self.apply_head_output(self.base_scores[:, slots, None], output)
        num_previous = previous_tokens.shape[2]
        if self.transform is not None:
            # (positions * previous tokens,)
            slots_of_queries = slot_numbers.expand(-1, num_previous).flatten()
            scores = self.transform(scores.flatten(1, 2), slots_of_queries).view_as(scores)
        columns = self.columns[:, slots, None].expand(-1, -1, num_previous, -1)
        return scores.log_softmax(-1).gather(3, columns)

    def compute_first_log_probs(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the log-probabilities (B, 1, num_candidates) of the first drafted position's
        candidates, and the recurrent state (B, 1, state_size) after the bonus token (None if the
        head is not recurrent)."""
        if not self.recurrent:
            return self.candidate_log_probs.first_slot[:, None], None
        slots = torch.zeros(1, dtype=torch.long, device=self.bonus.device)
        initial_state = self.head.initial_state(self.bonus, self.all_states)
        return self.compute_candidate_log_probs(slots, self.bonus[:, None], initial_state)

    def compute_next_log_probs(
        self, slot: int, last_candidate_indices: torch.Tensor, recurrent_state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the log-probabilities (B, P, num_candidates) of the candidates of the drafted
        position `slot` after each of P prefixes (paths of a draft tree), and the recurrent state
        after each prefix.

        `last_candidate_indices` (B, P) int64 is the last token of each prefix, as an index into the
        candidates of the previous position. `recurrent_state` (B, P, state_size) is the recurrent
        state before these tokens. If the head is not recurrent, this state and the returned state
        are None.
        """
        if not self.recurrent:
            indices = last_candidate_indices[..., None].expand(-1, -1, self.tokens.shape[-1])
            return self.candidate_log_probs.later_slots[:, slot - 1].gather(1, indices), None
        previous_tokens = self.tokens[:, slot - 1].gather(1, last_candidate_indices)
        return self.compute_candidate_log_probs(
            torch.full_like(last_candidate_indices[0], slot), previous_tokens, recurrent_state
        )

    def draft_greedy_chain(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft a greedy chain of `length` tokens: at each position, the likeliest token after the
        previous tokens of the chain.

        Returns the tokens (B, length), chosen among all tokens that the drafter can propose, and
        their log-probabilities (B, length) given the tokens before them.
        """
        chooses_candidates = self.tokens.shape[2] == self.head.top_k
        if self.choice_columns is not None and not self.recurrent and chooses_candidates:
            return self._read_greedy_chain_from_table(length)

        previous_tokens = self.bonus[:, None]
        all_scores = []
        tokens = []
        best_scores = []
        recurrent_state = self.head.initial_state(self.bonus, self.all_states)
        for slot in range(length):
            slots = torch.full_like(previous_tokens[0], slot)
            scores, recurrent_state = self.score_all_tokens_after(
                slots, previous_tokens, recurrent_state
            )
            best_score, column = scores.max(-1)  # (B, 1)
            previous_tokens = self.vocabulary.columns_to_ids(column)
            all_scores.append(scores)  # (B, 1, tokens)
            tokens.append(previous_tokens)
            best_scores.append(best_score)

        # Normalising all positions together takes fewer kernel launches than one position at a
        # time.
        normalizers = torch.cat(all_scores, 1).logsumexp(-1)
        log_probs = (torch.cat(best_scores, 1) - normalizers).clamp(max=0)
        return torch.cat(tokens, 1), log_probs

    def _read_greedy_chain_from_table(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result of `draft_greedy_chain`, computed from `candidate_log_probs`.

        This is only correct if the conditional head chooses no tokens that are not candidates.
        """
        log_probs = self.candidate_log_probs.first_slot  # (B, candidates)
        best_log_probs = []
        best_indices = []
        for slot in range(length):
            best_log_prob, index = log_probs.max(-1)  # (B,)
            best_log_probs.append(best_log_prob)
            best_indices.append(index)
            if slot + 1 < length:
                indices = index[:, None, None].expand(-1, 1, log_probs.shape[1])
                log_probs = self.candidate_log_probs.later_slots[:, slot].gather(1, indices)[:, 0]
        indices = torch.stack(best_indices, 1)[..., None]  # (B, length, 1)
        tokens = self.tokens[:, :length].gather(2, indices)[..., 0]
        return tokens, torch.stack(best_log_probs, 1)


def draft_proposal(
    drafter: Drafter, target: Target, bonus: torch.Tensor, state: DrafterState, max_nodes: int
) -> Proposal:
    """Draft a block for every batch row, for greedy decoding. Return a `Proposal`: the
    distributions of the drafted tokens, from which draft trees are built.

    `bonus` (B,) are the bonus tokens, after which the blocks are drafted. `state` is the drafter's
    decoding state. `max_nodes` is the maximum number of drafted nodes of a tree.
    """
    block = drafter.draft_block(target, bonus, state)
    steps = None
    if drafter.head_spec is not None:
        steps = ConditionalDraft(drafter, target, bonus, block)
    return Proposal(
        bonus, block.marginals, max_nodes, conditionals=steps, vocabulary=drafter.vocabulary
    )


def get_conditional_head(drafter: Drafter) -> ConditionalHead:
    """Return the drafter's conditional head. The drafter must have one."""
    head = drafter.conditional_head
    assert head is not None, "the drafter has no conditional head"
    return head


def get_embed_and_norm(drafter: Drafter, target: Target) -> EmbedAndNorm:
    """Return the functions of `drafter` that its conditional head may call: embedding lookup and
    final norm."""
    return EmbedAndNorm(lambda ids: drafter.embed(target, ids), drafter.apply_final_norm)


def teacher_force_head(
    drafter: Drafter, target: Target, states: torch.Tensor, previous_tokens: torch.Tensor
) -> HeadOutput:
    """Return the outputs of the drafter's conditional head for all drafted positions of some
    blocks, given the true tokens of the training text.

    `states` (num_blocks, num_slots, hidden_size) are the hidden states at all input positions of
    the blocks. The last L input positions of a block are the drafted ones. `previous_tokens`
    (num_blocks, L) int64 are the true tokens before the drafted positions. The outputs have the
    shape (num_blocks, L, ...).
    """
    head = get_conditional_head(drafter)
    return head.teacher_force(get_embed_and_norm(drafter, target), states, previous_tokens)


def teacher_forced_log_probs(
    drafter: Drafter, target: Target, block: DraftedBlock, previous_tokens: torch.Tensor
) -> torch.Tensor:
    """Return the log-probabilities (B, L, draft_vocab_size) of all tokens that the drafter can
    propose at the L drafted positions of a block, given the true tokens before each position.

    `previous_tokens` (B, L) int64 are the true tokens.
    """
    assert block.states is not None
    draft = ConditionalDraft(drafter, target, previous_tokens[:, 0], block, candidates=1)
    output = teacher_force_head(drafter, target, block.states, previous_tokens)
    return draft.apply_head_output(draft.base_scores, output).log_softmax(-1)

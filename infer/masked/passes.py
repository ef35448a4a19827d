"""Forward passes of a masked diffusion model over the states of sequences. A state is a copy of a
sequence in which some mask tokens are replaced by drafted tokens. Without a KV cache, a pass
computes whole sequences; with a KV cache, only the current block of each state.

The output must not depend on how many decoding steps a round takes, so the input of a step must not
depend on it either. With Fast-dLLM's `cache="dual"`, the first step of a block is a *full* step,
which computes the whole sequence. All other steps of the block compute only the block; outside the
block they attend to the keys and values of the full step. No round drafts tokens beyond the next
full step; the paper of Fast-dLLM does not specify this.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from infer.attention.masks import to_additive_mask
from infer.masked.config import MAX_MASKED_DRAFT_LENGTH, MaskedConfig
from infer.masked.drafting import DraftPlan, State
from infer.masked.model import MaskedModel
from infer.masked.sequence import MaskedSequence


@dataclass(frozen=True)
class SequenceTask:
    """What one round computes for one sequence: its states (copies with some drafted tokens), and
    the positions to predict in each state."""

    sequence: MaskedSequence
    plan: DraftPlan
    states: Sequence[State]  # sets of drafted (position, token) pairs; the first set is empty
    positions_to_predict: Sequence[Sequence[int]]  # for each state, the positions to predict


def make_state_rows(row: torch.Tensor | None, states: Sequence[State]) -> torch.Tensor:
    """Return the token ids (num_states, length) of all states: the token ids of the sequence, in
    which the drafted tokens of the state replace mask tokens.

    row: (length,), token ids of the sequence, mask tokens included
    states: sets of writes, each a (position, token) pair
    """
    assert row is not None
    rows = row.repeat(len(states), 1)
    writes = [
        (index, position, token) for index, state in enumerate(states) for position, token in state
    ]
    if writes:
        indices, positions, tokens = torch.tensor(writes, device=row.device).T
        rows[indices, positions] = tokens
    return rows


def pad_token_rows(tasks: Sequence[SequenceTask]) -> torch.Tensor:
    """Return the current token ids of the tasks' sequences, (num_sequences, max_length), padded
    with 0 on the right."""
    rows = [task.sequence.token_row for task in tasks if task.sequence.token_row is not None]
    return pad_sequence(rows, batch_first=True)


class FullRowPasses:
    """Forward passes without a KV cache, which compute all positions of each state (copy of a
    sequence with drafted tokens). Predictions are exact (with a KV cache they are approximations),
    and every masked model is supported."""

    def __init__(self, model: MaskedModel, options: MaskedConfig) -> None:
        self.model = model
        self.block_length = options.block_length

    def make_plan(self, sequence: MaskedSequence) -> DraftPlan:
        """Return the limits for the tokens that a round may draft. They may be in later blocks too.
        At least one mask token is left, because the token of the round's last step is never
        drafted."""
        max_writes = min(MAX_MASKED_DRAFT_LENGTH, len(sequence.masked_positions) - 1)
        return sequence.make_plan(self.block_length, max_writes)

    def list_positions_to_predict(
        self, sequence: MaskedSequence, plan: DraftPlan, states: Sequence[State]
    ) -> list[list[int]]:
        """Return the positions to predict, a list for each state (copy of the sequence with drafted
        tokens). They are all positions that this round or the next round may write."""
        reachable = plan.masked_positions[: 2 * (MAX_MASKED_DRAFT_LENGTH + 1)]
        last_block = plan.block_index(reachable[-1])
        positions = [
            position
            for position in plan.masked_positions
            if plan.block_index(position) <= last_block
        ]
        return [positions] * len(states)

    def get_pass_group(self, sequence: MaskedSequence) -> int:
        """Return a number that is equal for sequences that can share a forward pass. If the model
        supports padding, all sequences can share a pass. Otherwise only sequences of the same
        length can."""
        if self.model.supports_masks_and_cache:
            return 0
        assert sequence.token_row is not None
        return len(sequence.token_row)

    def compute_logits(self, tasks: Sequence[SequenceTask]) -> torch.Tensor:
        """Run one forward pass for all tasks. Return the logits (num_predicted, vocab_size) of all
        positions to predict, in the order of tasks, states and positions."""
        rows = []
        row_positions: list[tuple[int, int]] = []
        for task in tasks:
            state_rows = make_state_rows(task.sequence.token_row, task.states)
            for row, positions in zip(state_rows, task.positions_to_predict, strict=True):
                row_positions += [(len(rows), position) for position in positions]
                rows.append(row)

        ids = pad_sequence(rows, batch_first=True)  # (num_states, max_length)
        lengths = torch.tensor([len(row) for row in rows], device=ids.device)
        is_token = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        index = torch.tensor(row_positions, device=ids.device)
        return self.model.compute_logits(ids, is_token, (index[:, 0], index[:, 1]))


@dataclass(frozen=True)
class DualCacheView:
    """The KV cache as one forward pass sees it. Hugging Face's attention layers call `update`.

    A full pass computes whole sequences. It replaces the cached keys and values of its sequences,
    and attends to the new ones. Any other pass attends to the cached keys and values, followed by
    those of its own positions.
    """

    buffer: torch.Tensor  # (2 * num_layers, rows, capacity, num_heads, head_size)
    cache_rows: torch.Tensor  # (B,), the row of each sequence in `buffer`
    length: int  # number of positions of the longest sequence
    # whether the pass computes all positions of the sequences, not only their current blocks
    is_full: bool

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the keys and values of the pass's positions in one layer, (B, num_heads, length,
        head_size) each. Return the keys and values to attend to, (B, num_heads, num_keys,
        head_size) each."""
        if self.is_full:
            self._write_full_plane(2 * layer, keys)
            self._write_full_plane(2 * layer + 1, values)
            return keys, values
        cached_keys = self._read(2 * layer)
        cached_values = self._read(2 * layer + 1)
        return torch.cat([cached_keys, keys], 2), torch.cat([cached_values, values], 2)

    def _write_full_plane(self, plane: int, new: torch.Tensor) -> None:
        """Write the keys or values of a full pass into the cache.

        plane: index on the buffer's first axis, which selects the keys or the values of one layer
        new: (B, num_heads, length, head_size), keys or values; only the positions of the whole
            sequences, which come first, are written
        """
        new = new[:, :, : self.length].transpose(1, 2)
        self.buffer[plane, self.cache_rows, : self.length] = new

    def _read(self, plane: int) -> torch.Tensor:
        """Return the cached keys or values, (B, num_heads, max_length, head_size).

        plane: index on the buffer's first axis, which selects the keys or the values of one layer
        """
        return self.buffer[plane, self.cache_rows, : self.length].transpose(1, 2)

    def get_seq_length(self, layer: int = 0) -> int:
        """Return the number of cached positions that the pass attends to. It is the same in all
        layers."""
        return 0 if self.is_full else self.length


class DualCachePasses:
    """Forward passes with a KV cache, which compute only the current block of each state (copy of a
    sequence with drafted tokens). The cache contains the keys and values of each sequence's last
    full step, which computed the whole sequence.

    The blocks of all states of a sequence are concatenated. Each block attends to itself, and to
    the cached positions outside the block. If a round begins with a full step, one pass computes
    the whole sequence in its current state, and the blocks of the other states. These blocks attend
    to the keys and values that the same pass computes for the whole sequence.
    """

    def __init__(self, model: MaskedModel, options: MaskedConfig, capacity: int) -> None:
        self.model = model
        self.block_length = options.block_length
        # Number of computed positions per block. A shifted model predicts the token at the next
        # position, so its computed positions start one before the block.
        self.width = self.block_length + int(model.shifted)
        self.buffer = model.allocate_cache(options.max_num_seqs, capacity)

    def make_plan(self, sequence: MaskedSequence) -> DraftPlan:
        """Return the limits of a round's drafts, which end before the next step that computes the
        whole sequence. Also set `sequence.is_full_step`: whether the round's first step computes
        the whole sequence."""
        open_positions = sequence.make_plan(self.block_length, 0).open_positions(frozenset())
        num_open = len(open_positions)
        sequence.is_full_step = num_open == self.block_length
        max_writes = min(MAX_MASKED_DRAFT_LENGTH, num_open - 1)
        return sequence.make_plan(self.block_length, max_writes)

    def list_positions_to_predict(
        self, sequence: MaskedSequence, plan: DraftPlan, states: Sequence[State]
    ) -> list[list[int]]:
        """Return the positions to predict, a list for each state (copy of the sequence with drafted
        tokens). They are the masked positions of the current block. If the round's first step
        computes the whole sequence, the first state also predicts the masked positions of the next
        block."""
        positions = plan.open_positions(frozenset())
        first_positions = positions
        if sequence.is_full_step:
            next_block = plan.block_index(positions[0]) + 1
            next_positions = [
                position
                for position in plan.masked_positions
                if plan.block_index(position) == next_block
            ]
            first_positions = positions + next_positions
        return [first_positions, *([positions] * (len(states) - 1))]

    def get_pass_group(self, sequence: MaskedSequence) -> bool:
        """Return a value that is equal for sequences that can share a forward pass. The value tells
        whether the round's first step computes the whole sequence or only a block. A pass with both
        would pad blocks to whole sequences, which would cost as much as the cache saves."""
        return sequence.is_full_step

    def compute_logits(self, tasks: Sequence[SequenceTask]) -> torch.Tensor:
        """Run one forward pass for all tasks. Return the logits (num_predicted, vocab_size) of all
        positions to predict, in the order of tasks, states and positions."""
        is_full = tasks[0].sequence.is_full_step
        device = self.model.device
        starts = [self._block_start(task) for task in tasks]
        rows = pad_token_rows(tasks)  # (B, max_length)
        length = rows.shape[1]
        ids = self._gather_state_blocks(tasks, starts, is_full)  # (B, num_states * self.width)
        blocks_length = ids.shape[1]

        block_starts = torch.tensor(starts, device=device)[:, None]  # (B, 1)
        offsets = torch.arange(self.width, device=device).repeat(blocks_length // self.width)
        positions = block_starts + offsets
        row_lengths = [count_row_tokens(task) for task in tasks]
        mask = self._build_mask(row_lengths, block_starts, length, blocks_length, is_full)
        if is_full:
            row_positions = torch.arange(length, device=device).expand(len(tasks), -1)
            ids = torch.cat([rows, ids], 1)
            positions = torch.cat([row_positions, positions], 1)

        cache_rows = torch.tensor([task.sequence.cache_row for task in tasks], device=device)
        cache = DualCacheView(self.buffer, cache_rows, length, is_full)
        # (B, num_positions, hidden_size)
        hidden = self.model.compute_hidden(ids, positions, mask, cache)
        outputs = torch.tensor(
            self._list_output_indices(tasks, starts, length, is_full), device=device
        )
        return self.model.compute_head_logits(hidden[outputs[:, 0], outputs[:, 1]])

    def _block_start(self, task: SequenceTask) -> int:
        """Return the first position that is computed for the current block. With a shifted model
        this is the position before the block, whose output predicts the block's first token."""
        block = task.plan.block_index(task.positions_to_predict[0][0])
        return task.plan.output_start + (block + 1) * task.plan.block_length - self.width

    def _gather_state_blocks(
        self, tasks: Sequence[SequenceTask], starts: Sequence[int], skips_first_state: bool
    ) -> torch.Tensor:
        """Return the token ids of the current block in all states (copies of a sequence with
        drafted tokens). They are concatenated per sequence: (num_sequences, num_states *
        block_width). In a full pass the first state is computed as a whole sequence, so it has no
        block.

        starts: the first computed position of each sequence's block
        skips_first_state: whether the pass computes all positions of the sequences, not only blocks
        """
        blocks = []
        for task, start in zip(tasks, starts, strict=True):
            states = task.states[1:] if skips_first_state else task.states
            state_rows = make_state_rows(task.sequence.token_row, states)
            blocks.append(state_rows[:, start : start + self.width].flatten())
        return pad_sequence(blocks, batch_first=True)

    def _list_output_indices(
        self, tasks: Sequence[SequenceTask], starts: Sequence[int], length: int, is_full: bool
    ) -> list[tuple[int, int]]:
        """Return (batch row, column) of the output that predicts each position, in the order of
        tasks, states and positions.

        starts: the first computed position of each sequence's block
        length: number of columns of a whole sequence; they come before the blocks in a full pass
        is_full: whether the pass computes all positions of the sequences, not only blocks
        """
        shift = int(self.model.shifted)
        outputs = []
        for row, (task, start) in enumerate(zip(tasks, starts, strict=True)):
            for state, positions in enumerate(task.positions_to_predict):
                if not is_full:
                    first_column = state * self.width - start
                elif state == 0:
                    first_column = 0
                else:
                    first_column = length + (state - 1) * self.width - start
                outputs += [(row, first_column + position - shift) for position in positions]
        return outputs

    def _build_mask(
        self,
        row_lengths: Sequence[int],
        block_starts: torch.Tensor,
        length: int,
        blocks_length: int,
        is_full: bool,
    ) -> torch.Tensor:
        """Return the additive attention mask (B, 1, num_queries, num_keys) of a pass.

        The keys are the positions of the whole sequences, then the positions of the blocks. In a
        full pass the queries are the same positions. Otherwise they are only the positions of the
        blocks.

        row_lengths: number of tokens of each sequence
        block_starts: (B, 1), the first computed position of each sequence's block
        length: number of key positions for a whole sequence
        blocks_length: number of key positions for all blocks of a sequence
        is_full: whether the pass computes all positions of the sequences, not only blocks
        """
        key = torch.arange(length + blocks_length, device=block_starts.device)  # (num_keys,)
        is_row = key < length
        lengths = torch.tensor(row_lengths, device=block_starts.device)[:, None]
        is_token = is_row & (key < lengths)  # (B, num_keys)
        is_outside = (key < block_starts) | (key >= block_starts + self.width)

        key_block = torch.where(is_row, -1, (key - length) // self.width)
        query_block = key_block if is_full else key_block[length:]  # (num_queries,)
        is_same_block = (key_block == query_block[:, None]) & ~is_row  # (num_queries, num_keys)
        row_sees = is_token[:, None]
        block_sees = (is_token & is_outside)[:, None] | is_same_block
        # (B, num_queries, num_keys)
        allowed = torch.where((query_block < 0)[:, None], row_sees, block_sees)
        return to_additive_mask(allowed[:, None], self.model.dtype)


def count_row_tokens(task: SequenceTask) -> int:
    """Return the number of tokens of the task's sequence, mask tokens included."""
    assert task.sequence.token_row is not None
    return len(task.sequence.token_row)

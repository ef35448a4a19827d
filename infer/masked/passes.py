"""Forward passes of a masked model over the states of sequences. A pass computes whole rows, or
with a KV cache only the current block of each state.

The output must not depend on how steps are grouped into rounds, so the input of a step must not
depend on it either. With Fast-dLLM's `cache="dual"`, the first step of a block is therefore a
*full* step, which computes the whole row. Every other step of the block computes only the block.
Outside the block it attends to the keys and values of the full step. Drafts do not go beyond the
next full step; Fast-dLLM's paper does not specify this.

B sequences of a pass, T positions of the longest, N states, K computed positions of a block, Q
queries or predicted positions, S keys, H key/value heads, E head size, V vocabulary size.
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
    """What one round has to compute for one sequence: its states, and the positions to predict."""

    sequence: MaskedSequence
    plan: DraftPlan
    states: Sequence[State]  # the first state is the current sequence
    positions: Sequence[Sequence[int]]  # for each state: the masked positions to predict


def make_state_rows(row: torch.Tensor | None, states: Sequence[State]) -> torch.Tensor:
    """Return the rows (N, T) of all states. A state's row is the sequence's row (T,) with the
    writes of the state."""
    assert row is not None
    rows = row.repeat(len(states), 1)
    writes = [
        (index, position, token) for index, state in enumerate(states) for position, token in state
    ]
    if writes:
        indices, positions, tokens = torch.tensor(writes, device=row.device).T
        rows[indices, positions] = tokens
    return rows


def pad_rows(tasks: Sequence[SequenceTask]) -> torch.Tensor:
    """Return the current rows (B, T) of the tasks' sequences, padded to one length."""
    rows = [task.sequence.row for task in tasks if task.sequence.row is not None]
    return pad_sequence(rows, batch_first=True)


class FullRowPasses:
    """Computes each state as a whole row, without a KV cache. This is exact, and works with any
    model."""

    def __init__(self, model: MaskedModel, options: MaskedConfig) -> None:
        self.model = model
        self.block_length = options.block_length

    def make_plan(self, sequence: MaskedSequence) -> DraftPlan:
        """Return the plan of a round. Drafts may reach into later blocks. They leave at least one
        mask, which the last step fills."""
        max_writes = min(MAX_MASKED_DRAFT_LENGTH, len(sequence.masked) - 1)
        return sequence.make_plan(self.block_length, max_writes)

    def list_positions_to_predict(
        self, sequence: MaskedSequence, plan: DraftPlan, states: Sequence[State]
    ) -> list[list[int]]:
        """Return for each state the positions to predict: those that this round or the next round
        may write."""
        reachable = plan.masked[: 2 * (MAX_MASKED_DRAFT_LENGTH + 1)]
        last_block = plan.block_index(reachable[-1])
        positions = [
            position for position in plan.masked if plan.block_index(position) <= last_block
        ]
        return [positions] * len(states)

    def get_pass_group(self, sequence: MaskedSequence) -> int:
        """Return a number that is equal for sequences that can share a forward pass. If the model
        does not support padding, these are sequences whose rows have the same length. Otherwise all
        sequences can share a pass."""
        if self.model.takes_attention_masks:
            return 0
        assert sequence.row is not None
        return len(sequence.row)

    def compute_logits(self, tasks: Sequence[SequenceTask]) -> torch.Tensor:
        """Return the logits (Q, V) of all positions to predict, in the order of tasks, states and
        positions."""
        rows = []
        row_positions: list[tuple[int, int]] = []
        for task in tasks:
            state_rows = make_state_rows(task.sequence.row, task.states)
            for row, positions in zip(state_rows, task.positions, strict=True):
                row_positions += [(len(rows), position) for position in positions]
                rows.append(row)

        ids = pad_sequence(rows, batch_first=True)  # (rows, T)
        lengths = torch.tensor([len(row) for row in rows], device=ids.device)
        is_token = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        index = torch.tensor(row_positions, device=ids.device)
        return self.model.logits(ids, is_token, (index[:, 0], index[:, 1]))


@dataclass(frozen=True)
class DualCacheView:
    """The view of the KV cache that one forward pass has. Hugging Face's attention layers call
    `update`.

    A full pass replaces the cached keys and values of its sequences, and attends to the new keys
    and values. Any other pass attends to the cached keys and values, followed by the keys and
    values of its own positions.
    """

    buffer: torch.Tensor  # (2 * layers, rows, capacity, H, E)
    cache_rows: torch.Tensor  # (B,) the sequences' rows in `buffer`
    length: int  # T, the positions of the longest row
    is_full: bool  # whether the pass computes whole rows

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the keys and values (B, H, Q, E) of the pass's positions in one layer. Return the
        keys and the values to attend to, each (B, H, S, E)."""
        if self.is_full:
            self._write_full_plane(2 * layer, keys)
            self._write_full_plane(2 * layer + 1, values)
            return keys, values
        cached_keys = self._read(2 * layer)
        cached_values = self._read(2 * layer + 1)
        return torch.cat([cached_keys, keys], 2), torch.cat([cached_values, values], 2)

    def _write_full_plane(self, plane: int, new: torch.Tensor) -> None:
        """Write the first T positions of keys or values (B, H, Q, E) into the buffer. `plane` is
        the index on the buffer's first axis."""
        new = new[:, :, : self.length].transpose(1, 2)
        self.buffer[plane, self.cache_rows, : self.length] = new

    def _read(self, plane: int) -> torch.Tensor:
        """Return the cached keys or values (B, H, T, E). `plane` is the index on the buffer's first
        axis."""
        return self.buffer[plane, self.cache_rows, : self.length].transpose(1, 2)

    def get_seq_length(self, layer: int = 0) -> int:
        """Return the number of cached positions that the pass attends to. All layers have the
        same."""
        return 0 if self.is_full else self.length


class DualCachePasses:
    """Computes only the current block of each state. The KV cache contains the keys and values of
    each sequence's last full step.

    The blocks of a sequence's states are concatenated. Each block attends to itself, and to the
    cached positions outside the block. If a round begins with a full step, one pass computes the
    whole row of the first state and the blocks of the other states. In every layer these blocks
    attend to the new keys and values of the row.
    """

    def __init__(self, model: MaskedModel, options: MaskedConfig, capacity: int) -> None:
        self.model = model
        self.block_length = options.block_length
        # K: the outputs that a shifted model needs start one position before the block.
        self.width = self.block_length + int(model.shifted)
        self.buffer = model.allocate_cache(options.max_num_seqs, capacity)

    def make_plan(self, sequence: MaskedSequence) -> DraftPlan:
        """Return the plan of a round whose drafts do not reach the next full step. Also set
        `sequence.is_full_step`: whether the next step is a full step."""
        open_positions = sequence.make_plan(self.block_length, 0).open_positions(frozenset())
        num_open = len(open_positions)
        sequence.is_full_step = num_open == self.block_length
        max_writes = min(MAX_MASKED_DRAFT_LENGTH, num_open - 1)
        return sequence.make_plan(self.block_length, max_writes)

    def list_positions_to_predict(
        self, sequence: MaskedSequence, plan: DraftPlan, states: Sequence[State]
    ) -> list[list[int]]:
        """Return for each state the positions to predict: the masked positions of the current
        block. A full step also predicts the masked positions of the next block."""
        positions = plan.open_positions(frozenset())
        first_positions = positions
        if sequence.is_full_step:
            next_block = plan.block_index(positions[0]) + 1
            next_positions = [
                position for position in plan.masked if plan.block_index(position) == next_block
            ]
            first_positions = positions + next_positions
        return [first_positions, *([positions] * (len(states) - 1))]

    def get_pass_group(self, sequence: MaskedSequence) -> bool:
        """Return a value that is equal for sequences that can share a forward pass. Sequences whose
        next step is a full step share a pass, and so do all other sequences. A pass with both would
        pad blocks to whole rows, which would cost as much as the cache saves."""
        return sequence.is_full_step

    def compute_logits(self, tasks: Sequence[SequenceTask]) -> torch.Tensor:
        """Return the logits (Q, V) of all positions to predict, in the order of tasks, states and
        positions."""
        is_full = tasks[0].sequence.is_full_step
        device = self.model.device
        starts = [self._block_start(task) for task in tasks]
        rows = pad_rows(tasks)  # (B, T)
        length = rows.shape[1]
        ids = self._concatenate_state_blocks(tasks, starts, is_full)  # (B, N * K)
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
        hidden = self.model.compute_hidden(ids, positions, mask, cache)  # (B, Q, D)
        outputs = torch.tensor(self._list_outputs(tasks, starts, length, is_full), device=device)
        return self.model.head(hidden[outputs[:, 0], outputs[:, 1]])

    def _block_start(self, task: SequenceTask) -> int:
        """Return the first position of the current block that is computed. With a shifted model
        this is the position before the block."""
        block = task.plan.block_index(task.positions[0][0])
        return task.plan.start + (block + 1) * task.plan.block_length - self.width

    def _concatenate_state_blocks(
        self, tasks: Sequence[SequenceTask], starts: Sequence[int], is_full: bool
    ) -> torch.Tensor:
        """Return the tokens (B, N * K) of the blocks of all states. `starts` are the first computed
        positions of the blocks. In a full pass the first state is computed as a whole row, so it
        has no block."""
        blocks = []
        for task, start in zip(tasks, starts, strict=True):
            states = task.states[1:] if is_full else task.states
            state_rows = make_state_rows(task.sequence.row, states)
            blocks.append(state_rows[:, start : start + self.width].flatten())
        return pad_sequence(blocks, batch_first=True)

    def _list_outputs(
        self, tasks: Sequence[SequenceTask], starts: Sequence[int], length: int, is_full: bool
    ) -> list[tuple[int, int]]:
        """Return for each position to predict the batch row and the column of the pass whose output
        predicts the position."""
        shift = int(self.model.shifted)
        outputs = []
        for row, (task, start) in enumerate(zip(tasks, starts, strict=True)):
            for state, positions in enumerate(task.positions):
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
        """Return the additive attention mask (B, 1, Q, S).

        The keys are the `length` positions of the rows, followed by the `blocks_length` positions
        of the blocks. In a full pass the queries are the same positions; otherwise they are only
        the positions of the blocks. `block_starts` (B, 1) are the first computed positions of the
        blocks.
        """
        key = torch.arange(length + blocks_length, device=block_starts.device)  # (S,)
        is_row = key < length
        lengths = torch.tensor(row_lengths, device=block_starts.device)[:, None]
        is_token = is_row & (key < lengths)  # (B, S)
        is_outside = (key < block_starts) | (key >= block_starts + self.width)

        key_block = torch.where(is_row, -1, (key - length) // self.width)
        query_block = key_block if is_full else key_block[length:]  # (Q,)
        is_same_block = (key_block == query_block[:, None]) & ~is_row  # (Q, S)
        row_sees = is_token[:, None]
        block_sees = (is_token & is_outside)[:, None] | is_same_block
        allowed = torch.where((query_block < 0)[:, None], row_sees, block_sees)  # (B, Q, S)
        return to_additive_mask(allowed[:, None], self.model.dtype)


def count_row_tokens(task: SequenceTask) -> int:
    """Return the length of the row of the task's sequence."""
    assert task.sequence.row is not None
    return len(task.sequence.row)

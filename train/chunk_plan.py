"""The division of the training loss into chunks of rows, which limits the memory of the logits.

A row is one drafted position of one block. Its teacher row is the index of the target's hidden
state that the row is compared with. Several rows can have the same teacher row.
"""

from typing import NamedTuple

import torch


class ChunkBounds(NamedTuple):
    """One chunk of a `ChunkPlan`: its range of drafted positions and its range of the target's
    hidden states. The ends are exclusive."""

    row_start: int  # the chunk's drafted positions are ChunkPlan.rows[row_start:row_end]
    row_end: int
    # the target's hidden states for the chunk are ChunkPlan.teacher_rows[teacher_start:teacher_end]
    teacher_start: int
    teacher_end: int


class ChunkPlan(NamedTuple):
    """The rows (drafted positions) with a positive weight in the loss, and their division into
    chunks.

    The rows are sorted by their teacher row, the index of the target's hidden state that the row is
    compared with. The plan is computed on the host together with the blocks. The host therefore
    need not wait for a GPU to know the sizes of the chunks.
    """

    # (num_rows,) int64 indices of the drafted positions that have a positive weight in the loss
    rows: torch.Tensor
    # int64 indices of the target's hidden states that `rows` are compared with, without duplicates
    teacher_rows: torch.Tensor
    # (num_rows,) int64: for each entry of `rows`, the index of its hidden state in `teacher_rows`
    teacher_indices: torch.Tensor
    chunks: list[ChunkBounds]


def plan_chunks(
    teacher_rows: torch.Tensor, position_weights: torch.Tensor, max_chunk_rows: int
) -> ChunkPlan:
    """Divide the rows (drafted positions) of a batch into chunks of at most `max_chunk_rows` rows.

    teacher_rows: for each row, the index of the target's hidden state that the row is compared
    with. position_weights: the weight of each row in the loss; rows of weight 0 are left out.

    Both tensors have the same shape, with one entry per row. They should be on the CPU: with
    tensors on a GPU, the host waits for the GPU twice.
    """
    flat_teacher_rows = teacher_rows.flatten()
    rows = position_weights.flatten().nonzero()[:, 0]
    rows = rows[flat_teacher_rows[rows].argsort(stable=True)]
    unique_teacher_rows, teacher_indices = flat_teacher_rows[rows].unique_consecutive(
        return_inverse=True
    )

    ranges = []
    boundary_rows = []  # for every chunk, the indices of its first and its last row
    for start in range(0, len(rows), max_chunk_rows):
        end = min(start + max_chunk_rows, len(rows))
        ranges.append((start, end))
        boundary_rows += [start, end - 1]
    boundary_teachers = teacher_indices[boundary_rows].tolist()

    chunks = []
    for i, (start, end) in enumerate(ranges):
        first_teacher = boundary_teachers[2 * i]
        last_teacher = boundary_teachers[2 * i + 1]
        chunks.append(ChunkBounds(start, end, first_teacher, last_teacher + 1))
    return ChunkPlan(rows, unique_teacher_rows, teacher_indices, chunks)

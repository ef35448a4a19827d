"""The division of the objective's rows into chunks, which limits the memory of the logits.

A row is one drafted position of one block. Its teacher row is the index of the target's hidden
state that the row is compared with; several rows can have the same teacher row.

Shapes: G blocks of L drafted positions, R = G * L rows, n rows of positive weight, m distinct
teacher rows.
"""

from typing import NamedTuple

import torch


class ChunkBounds(NamedTuple):
    """The part of a `ChunkPlan` that one chunk covers, as half-open ranges of indices."""

    row_start: int  # the range row_start:row_end of ChunkPlan.rows
    row_end: int
    teacher_start: int  # the range teacher_start:teacher_end of ChunkPlan.teacher_rows
    teacher_end: int


class ChunkPlan(NamedTuple):
    """The rows of positive weight, sorted by teacher row, and their division into chunks.

    The plan is computed on the host together with the blocks. The sizes of the chunks therefore
    need not be copied from the device.
    """

    rows: torch.Tensor  # (n,) int64 indices of the rows of positive weight
    teacher_rows: torch.Tensor  # (m,) int64 the teacher rows of `rows`, without duplicates
    teacher_indices: torch.Tensor  # (n,) int64 index of each row's teacher row in `teacher_rows`
    chunks: list[ChunkBounds]


def plan_chunks(
    teacher_rows: torch.Tensor, position_weights: torch.Tensor, max_chunk_rows: int
) -> ChunkPlan:
    """Divide the rows of a batch into chunks of at most `max_chunk_rows` rows.

    teacher_rows, position_weights: the teacher row and the weight of each row, (R,) or (G, L). If
    they are on a GPU, the host waits for the GPU twice.
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

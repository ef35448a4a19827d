"""The division of the objective's rows into chunks.

Shapes: G blocks of L drafted positions, R = G * L rows (one for each drafted position).
"""

from typing import NamedTuple

import torch


class ChunkBounds(NamedTuple):
    """The part of a `ChunkPlan` that one chunk covers, as half-open ranges."""

    row_start: int  # index into ChunkPlan.rows
    row_end: int
    teacher_start: int  # index into ChunkPlan.teacher_rows
    teacher_end: int


class ChunkPlan(NamedTuple):
    """The rows of positive weight, sorted by teacher row, and their division into chunks.

    It is computed on the host together with the blocks, so that no size has to be read from the
    device.
    """

    rows: torch.Tensor  # (n,) int64 row indices
    teacher_rows: torch.Tensor  # (m,) int64 their teacher rows, without duplicates
    teacher_indices: torch.Tensor  # (n,) int64 index of each row's teacher row in `teacher_rows`
    chunks: list[ChunkBounds]


def plan_chunks(
    teacher_rows: torch.Tensor, position_weights: torch.Tensor, max_chunk_rows: int
) -> ChunkPlan:
    """Divide the rows of a batch into chunks.

    teacher_rows, weights: (R,) or (G, L). On CUDA this synchronises with the device twice.
    """
    flat_teacher_rows = teacher_rows.flatten()
    rows = position_weights.flatten().nonzero()[:, 0]
    rows = rows[flat_teacher_rows[rows].argsort(stable=True)]
    unique_teacher_rows, teacher_indices = flat_teacher_rows[rows].unique_consecutive(
        return_inverse=True
    )

    ranges = []
    boundary_rows = []  # the first and the last row of every chunk
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

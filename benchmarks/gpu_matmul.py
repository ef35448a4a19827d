"""A matmul for few positions in Triton: a candidate for `linear`, timed by gpu_kernels.py.

A pass over a few positions reads all weights and computes little, so it should take as long as
reading the weights. A program computes a tile of outputs for all positions over a part of the
inputs. The parts are added in a fixed order by the program that finishes last. Tiles depend on the
weights only, so that the results of a position do not depend on how many others are beside it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class MatmulTile(NamedTuple):
    """How the work is divided, and how a program is compiled."""

    outputs: int
    inputs: int  # inputs of a step
    splits: int  # parts of the inputs
    warps: int
    stages: int  # steps that are loaded ahead


@triton.jit
def _matmul_few_rows(
    states, weight, out, partial_out, finished_counts, num_rows,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    split = tl.program_id(1)
    output = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = tl.arange(0, BLOCK_ROWS)
    input_index = tl.arange(0, BLOCK_IN)
    steps: tl.constexpr = (INPUTS + BLOCK_IN - 1) // BLOCK_IN
    steps_per_split: tl.constexpr = (steps + SPLITS - 1) // SPLITS
    first_step = split * steps_per_split
    last_step = tl.minimum(first_step + steps_per_split, steps)
    is_row = (row < num_rows)[None]
    is_output = (output < OUTPUTS)[:, None]
    weight_pointers = weight + output[:, None].to(tl.int64) * INPUTS + input_index[None]
    state_pointers = states + row[None] * INPUTS + input_index[:, None]

    accumulator = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    for step in tl.range(first_step, last_step, num_stages=STAGES):
        is_input = step * BLOCK_IN + input_index < INPUTS
        weights = tl.load(
            weight_pointers + step * BLOCK_IN,
            mask=is_output & is_input[None],
            other=0.0,
            eviction_policy="evict_first",
        )
        inputs = tl.load(
            state_pointers + step * BLOCK_IN, mask=is_row & is_input[:, None], other=0.0
        )
        accumulator = tl.dot(weights, inputs, accumulator)

    offsets = row[None] * OUTPUTS + output[:, None]
    mask = is_row & is_output
    if SPLITS == 1:
        tl.store(out + offsets, accumulator.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(partial_out + split * num_rows * OUTPUTS + offsets, accumulator, mask=mask)
        tl.debug_barrier()
        finished = tl.atomic_add(finished_counts + tile, 1, sem="acq_rel")
        if finished == SPLITS - 1:
            total = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
            for part in range(SPLITS):
                part_pointers = partial_out + part * num_rows * OUTPUTS + offsets
                total += tl.load(part_pointers, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(out + offsets, total.to(out.dtype.element_ty), mask=mask)
            tl.store(finished_counts + tile, 0)


def matmul_few_rows(
    states: torch.Tensor,
    weight: torch.Tensor,
    tile: MatmulTile,
    partial_out: torch.Tensor,
    finished_counts: torch.Tensor,
) -> torch.Tensor:
    """Return states @ weight.T, (rows, outputs).

    states: (rows, inputs); weight: (outputs, inputs); both contiguous
    partial_out: float32 memory for splits * rows * outputs values
    finished_counts: int32 zeros, one for every tile of outputs; zeros again after the call
    """
    rows, inputs = states.shape
    outputs = len(weight)
    out = states.new_empty(rows, outputs)
    _matmul_few_rows[(triton.cdiv(outputs, tile.outputs), tile.splits)](
        states, weight, out, partial_out, finished_counts, rows, INPUTS=inputs, OUTPUTS=outputs,
        BLOCK_ROWS=max(16, triton.next_power_of_2(rows)), BLOCK_OUT=tile.outputs,
        BLOCK_IN=tile.inputs, SPLITS=tile.splits, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return out

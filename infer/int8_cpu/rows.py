"""Rows of activations to int8 codes, and sums of products of codes back to float32.

N positions, D inputs, O outputs of a linear layer. Activations have one digit or two: the second
one has codes of what the first rounds off. Its rows follow all rows of the first.
"""

import numpy as np
import torch
from numba import carray, types

from infer.int8_cpu.attention import ordered_bits
from infer.int8_cpu.weights import Int8Weights
from infer.kernels.cpu import ROUNDING_SHIFT, as_bits, as_float
from infer.kernels.launch import (
    ADDRESS,
    INTEGER,
    Arguments,
    claim_part,
    empty,
    float_pointer,
    int64_pointer,
    launch,
    pointer,
    reader,
)
from infer.utils.jit import njit

RESIDUAL_SCALE = 254  # how much finer the second digit of an activation is than the first
ARGMAX_TILE = 1024  # float32 values of a row at a time: they fit into the nearest cache
int8_pointer = pointer(types.int8)
int32_pointer = pointer(types.int32)


class QuantiseArguments(Arguments):
    """Arguments of `quantise_rows`."""

    _fields_ = [
        ("states", ADDRESS),  # (N, D)
        ("smooth", ADDRESS),  # (D,) that activations are multiplied by
        ("codes", ADDRESS),  # (digits N, D) int8
        ("steps", ADDRESS),  # (N,): a state is steps * (first code + second code / RESIDUAL_SCALE)
        ("rows", INTEGER),  # N
        ("width", INTEGER),  # D
        ("digits", INTEGER),
    ]


quantise_arguments = reader(QuantiseArguments)


@njit
def quantise_rows(address):
    """Round every row to codes from -127 to 127 and a step."""
    a = quantise_arguments(address)
    width = a.width
    row = np.empty(width, np.float32)
    smooth = carray(float_pointer(a.smooth), width)
    steps = float_pointer(a.steps)
    n = claim_part(address)
    while n < a.rows:
        states = carray(float_pointer(a.states + 4 * n * width), width)
        largest = np.int32(0)
        for d in range(width):
            row[d] = states[d] * smooth[d]
            magnitude = np.int32(
                as_bits(row[d]) & np.int32(0x7FFFFFFF)
            )  # in the same order as the floats
            largest = magnitude if magnitude > largest else largest
        top = max(as_float(largest), np.float32(1e-30))
        factor = np.float32(127) / top
        codes = carray(int8_pointer(a.codes + n * width), width)
        for d in range(width):
            row[d] *= factor
            codes[d] = np.int8(as_bits(row[d] + ROUNDING_SHIFT))
        if a.digits == 2:
            finer_codes = carray(int8_pointer(a.codes + (a.rows + n) * width), width)
            for d in range(width):
                rounded = (row[d] + ROUNDING_SHIFT) - ROUNDING_SHIFT
                left = (row[d] - rounded) * np.float32(RESIDUAL_SCALE)
                finer_codes[d] = np.int8(as_bits(left + ROUNDING_SHIFT))
        steps[n] = top / np.float32(127)
        n = claim_part(address)


class SumsArguments(Arguments):
    """Arguments of `dequantise_rows` and `argmax_rows`."""

    _fields_ = [
        ("sums", ADDRESS),  # (digits N, O) int32
        ("steps", ADDRESS),  # (N,) of the activations' codes
        ("scales", ADDRESS),  # (O,) of the weights' codes
        ("bias", ADDRESS),  # (O,); 0: none
        ("out", ADDRESS),  # (N, O) float32; or (N,) int64 which output is the largest
        ("rows", INTEGER),  # N
        ("width", INTEGER),  # O
        ("digits", INTEGER),
    ]


sums_arguments = reader(SumsArguments)


@njit
def dequantise(a, n, begin, out):
    """Fill out (T,) with what the sums of row n from output `begin` on stand for."""
    size = len(out)
    offset = n * a.width + begin
    sums = carray(int32_pointer(a.sums + 4 * offset), size)
    scales = carray(float_pointer(a.scales + 4 * begin), size)
    step = float_pointer(a.steps)[n]
    if a.digits == 2:
        finer_sums = carray(int32_pointer(a.sums + 4 * (a.rows * a.width + offset)), size)
        for o in range(size):
            total = np.float32(sums[o]) + np.float32(finer_sums[o]) / np.float32(RESIDUAL_SCALE)
            out[o] = total * (step * scales[o])
    else:
        for o in range(size):
            out[o] = np.float32(sums[o]) * (step * scales[o])
    if a.bias != 0:
        bias = carray(float_pointer(a.bias + 4 * begin), size)
        for o in range(size):
            out[o] += bias[o]


@njit
def dequantise_rows(address):
    """Write every row of outputs."""
    a = sums_arguments(address)
    n = claim_part(address)
    while n < a.rows:
        dequantise(a, n, 0, carray(float_pointer(a.out + 4 * n * a.width), a.width))
        n = claim_part(address)


@njit
def argmax_rows(address):
    """Write the first of the largest outputs of every row, ARGMAX_TILE outputs at a time."""
    a = sums_arguments(address)
    tile = np.empty(ARGMAX_TILE, np.float32)
    n = claim_part(address)
    while n < a.rows:
        best = np.int64(0)
        top = np.int32(-(2**31))
        for begin in range(0, a.width, ARGMAX_TILE):
            values = tile[: min(ARGMAX_TILE, a.width - begin)]
            dequantise(a, n, begin, values)
            before = top
            for o in range(len(values)):
                value = ordered_bits(as_bits(values[o]))
                top = value if value > top else top
            if top > before:
                o = 0
                while ordered_bits(as_bits(values[o])) != top:
                    o += 1
                best = begin + o
        int64_pointer(a.out)[n] = best
        n = claim_part(address)


def quantise(
    states: torch.Tensor, smooth: torch.Tensor, digits: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes (rows, D) int8 and steps (N,) of states (N, D) times smooth (D,). There are at
    least digits * N rows; what is in further ones is not defined."""
    states = states.contiguous()
    count, width = states.shape
    codes = empty((rows, width), torch.int8, scratch="codes")
    steps = empty((count,), scratch="steps")
    arguments = QuantiseArguments(
        states=states,
        smooth=smooth,
        codes=codes,
        steps=steps,
        rows=count,
        width=width,
        digits=digits,
    )
    launch(quantise_rows, arguments, count, count * width)
    return codes, steps


def sums_of(
    sums: torch.Tensor, steps: torch.Tensor, weights: Int8Weights, out: torch.Tensor
) -> SumsArguments:
    """Return the arguments of `dequantise_rows` and `argmax_rows`."""
    return SumsArguments(
        sums=sums,
        steps=steps,
        scales=weights.scales,
        bias=weights.bias,
        out=out,
        rows=len(steps),
        width=sums.shape[1],
        digits=weights.digits,
    )


def dequantise_sums(sums: torch.Tensor, steps: torch.Tensor, weights: Int8Weights) -> torch.Tensor:
    """Return the outputs (N, O) float32 that sums (digits N, O) int32 of codes with steps (N,)
    stand for."""
    out = empty((len(steps), sums.shape[1]))
    launch(dequantise_rows, sums_of(sums, steps, weights, out), len(steps), sums.numel())
    return out


def argmax_of_sums(sums: torch.Tensor, steps: torch.Tensor, weights: Int8Weights) -> torch.Tensor:
    """Return which output is the largest, (N,) int64; no float of them is written."""
    out = empty((len(steps),), torch.int64)
    launch(argmax_rows, sums_of(sums, steps, weights, out), len(steps), sums.numel())
    return out

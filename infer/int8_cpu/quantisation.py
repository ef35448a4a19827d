"""Quantise activations to int8 codes, and dequantise the int32 accumulators of their matmuls.

Dimensions: N positions, D inputs and O outputs of a linear layer, C codes per activation (1 or 2).

With two codes per activation, the second code is the quantised rounding error of the first code. A
tensor of C * N rows has the first codes of all N positions, and then the second codes of all N
positions. Each kernel divides its work into work items, which several threads claim
(infer/kernels/launch.py).
"""

import numpy as np
import torch
from numba import carray, types

from infer.int8_cpu.weights import Int8Weights
from infer.kernels.cpu import (
    FLOAT32_ROUND_TO_INTEGER_ADDEND,
    bits_to_float,
    float_to_bits,
    order_preserving_bits,
)
from infer.kernels.launch import (
    KERNEL_ARGUMENT_ADDRESS_TYPE,
    KERNEL_ARGUMENT_INTEGER_TYPE,
    KernelArguments,
    allocate_tensor,
    claim_work_item,
    float_pointer,
    int64_pointer,
    launch_kernel,
    make_argument_reader,
    make_pointer_cast,
)
from infer.utils.jit import njit

SECOND_ACTIVATION_CODE_SCALE = (
    254  # one step of the first code is this many steps of the second code
)
ARGMAX_TILE_OUTPUTS = 1024  # float32 outputs of a tile, which fits in the L1 cache
int8_pointer = make_pointer_cast(types.int8)
int32_pointer = make_pointer_cast(types.int32)


class QuantiseArguments(KernelArguments):
    """Arguments of `quantise_kernel`."""

    _fields_ = [
        ("states", KERNEL_ARGUMENT_ADDRESS_TYPE),  # (N, D)
        (
            "smoothing",
            KERNEL_ARGUMENT_ADDRESS_TYPE,
        ),  # (D,), factors by which the states are multiplied
        ("codes", KERNEL_ARGUMENT_ADDRESS_TYPE),  # (C * N, D) int8, output
        # (N,), output. A smoothed state is scale * (first code + second code /
        # SECOND_ACTIVATION_CODE_SCALE).
        ("scales", KERNEL_ARGUMENT_ADDRESS_TYPE),
        ("num_rows", KERNEL_ARGUMENT_INTEGER_TYPE),  # number of rows, N in shapes
        ("row_size", KERNEL_ARGUMENT_INTEGER_TYPE),  # size of a row, D in shapes
        ("codes_per_activation", KERNEL_ARGUMENT_INTEGER_TYPE),  # codes per activation, C in shapes
    ]


read_quantise_arguments = make_argument_reader(QuantiseArguments)


@njit
def quantise_kernel(address: int) -> None:
    """Multiply hidden states by smoothing factors, and quantise each row.

    The result for a row is a scale, and codes from -127 to 127. A work item is a row.
    """
    args = read_quantise_arguments(address)
    row_size = args.row_size
    row = np.empty(row_size, np.float32)
    smoothing = carray(float_pointer(args.smoothing), row_size)
    scales = float_pointer(args.scales)
    n = claim_work_item(address)
    while n < args.num_rows:
        states = carray(float_pointer(args.states + 4 * n * row_size), row_size)
        max_magnitude = np.int32(0)
        for d in range(row_size):
            row[d] = states[d] * smoothing[d]
            # The bits of floats without the sign bit, read as integers, have the same order as the
            # magnitudes of the floats.
            magnitude = np.int32(float_to_bits(row[d]) & np.int32(0x7FFFFFFF))
            max_magnitude = magnitude if magnitude > max_magnitude else max_magnitude
        max_value = max(bits_to_float(max_magnitude), np.float32(1e-30))
        factor = np.float32(127) / max_value
        codes = carray(int8_pointer(args.codes + n * row_size), row_size)
        for d in range(row_size):
            row[d] *= factor
            codes[d] = np.int8(float_to_bits(row[d] + FLOAT32_ROUND_TO_INTEGER_ADDEND))
        if args.codes_per_activation == 2:
            second_codes = carray(
                int8_pointer(args.codes + (args.num_rows + n) * row_size), row_size
            )
            for d in range(row_size):
                rounded = (
                    row[d] + FLOAT32_ROUND_TO_INTEGER_ADDEND
                ) - FLOAT32_ROUND_TO_INTEGER_ADDEND
                residual = (row[d] - rounded) * np.float32(SECOND_ACTIVATION_CODE_SCALE)
                second_codes[d] = np.int8(float_to_bits(residual + FLOAT32_ROUND_TO_INTEGER_ADDEND))
        scales[n] = max_value / np.float32(127)
        n = claim_work_item(address)


class DequantiseArguments(KernelArguments):
    """Arguments of `dequantise_kernel` and `argmax_kernel`."""

    _fields_ = [
        ("accumulators", KERNEL_ARGUMENT_ADDRESS_TYPE),  # (C * N, O) int32
        ("activation_scales", KERNEL_ARGUMENT_ADDRESS_TYPE),  # (N,)
        ("weight_scales", KERNEL_ARGUMENT_ADDRESS_TYPE),  # (O,)
        ("bias", KERNEL_ARGUMENT_ADDRESS_TYPE),  # (O,); the address is 0 if there is no bias
        # Output: (N, O) float32 for `dequantise_kernel`, (N,) int64 for `argmax_kernel`.
        ("out", KERNEL_ARGUMENT_ADDRESS_TYPE),
        ("num_rows", KERNEL_ARGUMENT_INTEGER_TYPE),  # number of rows, N in shapes
        ("row_size", KERNEL_ARGUMENT_INTEGER_TYPE),  # size of a row, O in shapes
        ("codes_per_activation", KERNEL_ARGUMENT_INTEGER_TYPE),  # codes per activation, C in shapes
    ]


read_dequantise_arguments = make_argument_reader(DequantiseArguments)


@njit
def dequantise_row(args: DequantiseArguments, n: int, start: int, out: np.ndarray) -> None:
    """Dequantise consecutive outputs of row `n`, and write them to `out`.

    The first output is number `start`; the length of `out` is the number of outputs.
    """
    size = len(out)
    offset = n * args.row_size + start
    accumulators = carray(int32_pointer(args.accumulators + 4 * offset), size)
    weight_scales = carray(float_pointer(args.weight_scales + 4 * start), size)
    activation_scale = float_pointer(args.activation_scales)[n]
    if args.codes_per_activation == 2:
        second_offset = args.num_rows * args.row_size + offset
        second_accumulators = carray(int32_pointer(args.accumulators + 4 * second_offset), size)
        for o in range(size):
            residual = np.float32(second_accumulators[o]) / np.float32(SECOND_ACTIVATION_CODE_SCALE)
            total = np.float32(accumulators[o]) + residual
            out[o] = total * (activation_scale * weight_scales[o])
    else:
        for o in range(size):
            out[o] = np.float32(accumulators[o]) * (activation_scale * weight_scales[o])
    if args.bias != 0:
        bias = carray(float_pointer(args.bias + 4 * start), size)
        for o in range(size):
            out[o] += bias[o]


@njit
def dequantise_kernel(address: int) -> None:
    """Dequantise accumulators to float32 outputs. A work item is a row."""
    args = read_dequantise_arguments(address)
    n = claim_work_item(address)
    while n < args.num_rows:
        dequantise_row(
            args, n, 0, carray(float_pointer(args.out + 4 * n * args.row_size), args.row_size)
        )
        n = claim_work_item(address)


@njit
def argmax_kernel(address: int) -> None:
    """Write the index of the largest output of each row.

    Of several largest outputs, the index of the first one is written. The outputs are dequantised
    ARGMAX_TILE_OUTPUTS at a time and are not stored. A work item is a row.
    """
    args = read_dequantise_arguments(address)
    tile = np.empty(ARGMAX_TILE_OUTPUTS, np.float32)
    n = claim_work_item(address)
    while n < args.num_rows:
        best_index = np.int64(0)
        highest = np.int32(-(2**31))
        for start in range(0, args.row_size, ARGMAX_TILE_OUTPUTS):
            outputs = tile[: min(ARGMAX_TILE_OUTPUTS, args.row_size - start)]
            dequantise_row(args, n, start, outputs)
            previous_highest = highest
            for o in range(len(outputs)):
                value = order_preserving_bits(float_to_bits(outputs[o]))
                highest = value if value > highest else highest
            if highest > previous_highest:
                o = 0
                while order_preserving_bits(float_to_bits(outputs[o])) != highest:
                    o += 1
                best_index = start + o
        int64_pointer(args.out)[n] = best_index
        n = claim_work_item(address)


def quantise_activations(
    states: torch.Tensor, smoothing: torch.Tensor, codes_per_activation: int, padded_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply hidden states (N, D) by smoothing factors (D,), and quantise them.

    Returns int8 codes (padded_rows, D) and scales (N,). The first codes_per_activation * N rows
    have codes; further rows are padding and are not initialised.
    """
    states = states.contiguous()
    num_rows, row_size = states.shape
    codes = allocate_tensor((padded_rows, row_size), torch.int8, scratch="codes")
    scales = allocate_tensor((num_rows,), scratch="activation scales")
    arguments = QuantiseArguments(
        states=states,
        smoothing=smoothing,
        codes=codes,
        scales=scales,
        num_rows=num_rows,
        row_size=row_size,
        codes_per_activation=codes_per_activation,
    )
    launch_kernel(quantise_kernel, arguments, num_rows, num_rows * row_size)
    return codes, scales


def make_dequantise_arguments(
    accumulators: torch.Tensor,
    activation_scales: torch.Tensor,
    weights: Int8Weights,
    out: torch.Tensor,
) -> DequantiseArguments:
    """Return the arguments with which to launch `dequantise_kernel` or `argmax_kernel`."""
    return DequantiseArguments(
        accumulators=accumulators,
        activation_scales=activation_scales,
        weight_scales=weights.scales,
        bias=weights.bias,
        out=out,
        num_rows=len(activation_scales),
        row_size=accumulators.shape[1],
        codes_per_activation=weights.codes_per_activation,
    )


def dequantise_outputs(
    accumulators: torch.Tensor, activation_scales: torch.Tensor, weights: Int8Weights
) -> torch.Tensor:
    """Dequantise int32 accumulators (C * N, O) with activation scales (N,).

    Returns the outputs (N, O) of the linear layer in float32, with its bias added.
    """
    num_rows = len(activation_scales)
    out = allocate_tensor((num_rows, accumulators.shape[1]))
    arguments = make_dequantise_arguments(accumulators, activation_scales, weights, out)
    launch_kernel(dequantise_kernel, arguments, num_rows, accumulators.numel())
    return out


def argmax_outputs(
    accumulators: torch.Tensor, activation_scales: torch.Tensor, weights: Int8Weights
) -> torch.Tensor:
    """Return the index of the largest output at each position, (N,) int64.

    accumulators: (C * N, O) int32
    activation_scales: (N,)

    The outputs themselves are not stored.
    """
    num_rows = len(activation_scales)
    out = allocate_tensor((num_rows,), torch.int64)
    arguments = make_dequantise_arguments(accumulators, activation_scales, weights, out)
    launch_kernel(argmax_kernel, arguments, num_rows, accumulators.numel())
    return out

"""Quantise activations to int8 codes, and dequantise the int32 results of their matmuls.

An activation has one or two codes. The second code is the quantised rounding error of the first
code. With two codes, a tensor of codes has (2 * positions) rows; the first codes of all positions
come before the second codes. An accumulator is a sum of products of codes, a value of the int32
result. Each kernel divides its work into work items, and several threads share the work items
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

# The scale of the second code of an activation is the scale of the first code divided by this
# number.
SECOND_ACTIVATION_CODE_SCALE = 254
# Number of outputs that `argmax_kernel` dequantises together. As float32 they fit in the L1 cache.
ARGMAX_TILE_OUTPUTS = 1024
int8_pointer = make_pointer_cast(types.int8)
int32_pointer = make_pointer_cast(types.int32)


class QuantiseArguments(KernelArguments):
    """Arguments of `quantise_kernel`."""

    _fields_ = [
        ("states", KERNEL_ARGUMENT_ADDRESS_TYPE),  # hidden states (num_rows, row_size)
        # (row_size,): factors by which the hidden states are multiplied.
        ("smoothing", KERNEL_ARGUMENT_ADDRESS_TYPE),
        # Output: (codes_per_activation * num_rows, row_size) int8.
        ("codes", KERNEL_ARGUMENT_ADDRESS_TYPE),
        # Output: (num_rows,). A hidden state times its smoothing factor is approximately
        # scale * (first code + second code / SECOND_ACTIVATION_CODE_SCALE).
        ("scales", KERNEL_ARGUMENT_ADDRESS_TYPE),
        ("num_rows", KERNEL_ARGUMENT_INTEGER_TYPE),  # number of positions
        ("row_size", KERNEL_ARGUMENT_INTEGER_TYPE),  # number of inputs of the layer
        ("codes_per_activation", KERNEL_ARGUMENT_INTEGER_TYPE),  # number of int8 codes: 1 or 2
    ]


read_quantise_arguments = make_argument_reader(QuantiseArguments)


@njit
def quantise_kernel(address: int) -> None:
    """Multiply hidden states by smoothing factors, and quantise the row of each position.

    The result for a row is a scale, and codes from -127 to 127. Each work item is a row.
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
            # Without the sign bit, the bits of two floats compare as integers in the same way as
            # the magnitudes of the floats.
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
        # (codes_per_activation * num_rows, row_size) int32: results of the matmul of codes.
        ("accumulators", KERNEL_ARGUMENT_ADDRESS_TYPE),
        ("activation_scales", KERNEL_ARGUMENT_ADDRESS_TYPE),  # (num_rows,), one per position
        ("weight_scales", KERNEL_ARGUMENT_ADDRESS_TYPE),  # (row_size,), one per output
        ("bias", KERNEL_ARGUMENT_ADDRESS_TYPE),  # (row_size,); the address 0 means no bias
        # Output: (num_rows, row_size) float32 outputs of the layer for `dequantise_kernel`, or
        # (num_rows,) int64 indices for `argmax_kernel`.
        ("out", KERNEL_ARGUMENT_ADDRESS_TYPE),
        ("num_rows", KERNEL_ARGUMENT_INTEGER_TYPE),  # number of positions
        ("row_size", KERNEL_ARGUMENT_INTEGER_TYPE),  # number of outputs of the layer
        ("codes_per_activation", KERNEL_ARGUMENT_INTEGER_TYPE),  # number of int8 codes: 1 or 2
    ]


read_dequantise_arguments = make_argument_reader(DequantiseArguments)


@njit
def dequantise_row(args: DequantiseArguments, n: int, start: int, out: np.ndarray) -> None:
    """Dequantise some consecutive outputs of a linear layer at one position.

    n: index of the position
    start: index of the first output
    out: float32 array for the outputs; its length is the number of outputs
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
    """Dequantise the int32 results of a matmul of codes to the float32 outputs of a linear layer.

    Each work item is the row of one position.
    """
    args = read_dequantise_arguments(address)
    n = claim_work_item(address)
    while n < args.num_rows:
        dequantise_row(
            args, n, 0, carray(float_pointer(args.out + 4 * n * args.row_size), args.row_size)
        )
        n = claim_work_item(address)


@njit
def argmax_kernel(address: int) -> None:
    """Write the index of the largest output of a linear layer at each position.

    Of equal outputs, the first one is chosen. ARGMAX_TILE_OUTPUTS outputs are dequantised together,
    and they are not stored. Each work item is the row of one position.
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
    """Multiply hidden states by smoothing factors, and quantise them.

    states: (positions, inputs)
    smoothing: (inputs,)
    codes_per_activation: 1 or 2
    padded_rows: number of rows to allocate for the codes, at least codes_per_activation * positions

    Returns int8 codes (padded_rows, inputs) and scales (positions,). The padding rows are at the
    end and are not initialised.
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
    """Return the arguments of a launch of `dequantise_kernel` or `argmax_kernel`.

    accumulators: (codes per activation * positions, outputs) int32, results of the matmul of codes
    activation_scales: (positions,)
    out: the tensor to which the kernel writes its result
    """
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
    """Return the outputs of a linear layer, (positions, outputs) float32, with its bias added.

    accumulators: (codes per activation * positions, outputs) int32, results of the matmul of codes
    activation_scales: (positions,)
    """
    num_rows = len(activation_scales)
    out = allocate_tensor((num_rows, accumulators.shape[1]))
    arguments = make_dequantise_arguments(accumulators, activation_scales, weights, out)
    launch_kernel(dequantise_kernel, arguments, num_rows, accumulators.numel())
    return out


def argmax_outputs(
    accumulators: torch.Tensor, activation_scales: torch.Tensor, weights: Int8Weights
) -> torch.Tensor:
    """Return the index of the largest output of a linear layer at each position.

    accumulators: (codes per activation * positions, outputs) int32, results of the matmul of codes
    activation_scales: (positions,)

    Returns (positions,) int64. The outputs themselves are not stored.
    """
    num_rows = len(activation_scales)
    out = allocate_tensor((num_rows,), torch.int64)
    arguments = make_dequantise_arguments(accumulators, activation_scales, weights, out)
    launch_kernel(argmax_kernel, arguments, num_rows, accumulators.numel())
    return out

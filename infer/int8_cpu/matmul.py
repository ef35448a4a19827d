"""Multiply the int8 codes of activations and weights. The results are int32.

On an x86 CPU with AVX2 and without VNNI, `avx2_matmul_kernel` computes the matmuls. On all other
CPUs, PyTorch calls oneDNN. Each kernel divides its work into work items, and several threads share
the work items (infer/kernels/launch.py).

On a CPU with AMX, matmuls of few rows are transposed: instead of codes @ weights.T, the transpose
weights @ codes.T is computed, and the result is transposed back. This is faster, because oneDNN
packs the right operand before it multiplies, and the codes are smaller than the weights.
"""

from functools import cache, partial
from itertools import product

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils

from infer.int8_cpu.float_matmul import FLOATS_PER_CPU_VECTOR, int64_constant, load_value, transpose
from infer.int8_cpu.quantisation import int32_pointer
from infer.kernels.launch import (
    KERNEL_ARGUMENT_ADDRESS_TYPE,
    KERNEL_ARGUMENT_INTEGER_TYPE,
    KernelArguments,
    allocate_tensor,
    claim_work_item,
    launch_kernel,
    llvm_intrinsic,
    make_argument_reader,
    run_and_record,
)
from infer.utils.jit import njit

# Maximum number of rows of activation codes for a transposed matmul (see the module docstring).
# With more rows, it is not faster than an ordinary matmul.
MAX_TRANSPOSED_MATMUL_ROWS = 64
# A transposed matmul is used only if its result has at most this many values. More values would
# leave the CPU cache before they are transposed back.
MAX_TRANSPOSED_MATMUL_OUTPUT_VALUES = 2**20
# Rows that do not fill a vector register are transposed back value by value if there are at most
# this many of them. Otherwise they are padded to a full register.
MAX_ROWS_TRANSPOSED_ONE_BY_ONE = 4

CODES_PER_REGISTER = 16  # number of int8 codes that fill an AVX2 register as 16-bit integers
# Estimated multiply-accumulates per CPU cycle of `avx2_matmul_kernel`.
ESTIMATED_INT8_MATMUL_MACS_PER_CYCLE = 24
# Size of a tile of the result. It is so small that the sums of a tile stay in registers.
INT8_MATMUL_TILE_OUTPUTS = 4
INT8_MATMUL_TILE_ROWS = 2
MATMUL_OUTPUTS_PER_WORK_ITEM = 32
TRANSPOSE_OUTPUTS_PER_WORK_ITEM = 1024


@cache
def uses_avx2_kernel(inputs: int) -> bool:
    """Return whether `avx2_matmul_kernel` computes matmuls with this number of inputs.

    It is used on CPUs with AVX2 and without VNNI, because oneDNN has no fast int8 matmul for them.
    The number of inputs must be a multiple of CODES_PER_REGISTER.
    """
    capabilities = torch.cpu.get_capabilities()
    has_vnni = capabilities["avx512_vnni"] or capabilities["avx_vnni"]
    has_avx2 = capabilities.get("avx2", False)
    return has_avx2 and not has_vnni and inputs % CODES_PER_REGISTER == 0


@cache
def pad_rows_for_transposed_matmul(rows: int, outputs: int) -> int:
    """Return how many rows of activation codes a transposed matmul (see the module docstring)
    should have, including padding rows. Return 0 if the matmul should not be transposed.

    rows: number of rows without padding
    outputs: number of outputs of the layer

    The rows are padded to a multiple of FLOATS_PER_CPU_VECTOR, because full vectors are transposed
    back faster. They are not padded if at most MAX_ROWS_TRANSPOSED_ONE_BY_ONE rows remain after the
    last full vector.
    """
    if not torch.cpu.get_capabilities().get("amx_int8"):
        return 0
    if rows > MAX_TRANSPOSED_MATMUL_ROWS or rows * outputs > MAX_TRANSPOSED_MATMUL_OUTPUT_VALUES:
        return 0
    if rows % FLOATS_PER_CPU_VECTOR <= MAX_ROWS_TRANSPOSED_ONE_BY_ONE:
        return rows
    return -(-rows // FLOATS_PER_CPU_VECTOR) * FLOATS_PER_CPU_VECTOR


def count_padded_rows(rows: int, weights: torch.Tensor) -> int:
    """Return the number of rows, with padding, that the codes passed to `matmul` must have.

    rows: number of rows without padding
    weights: (outputs, inputs) int8
    """
    outputs, inputs = weights.shape
    if uses_avx2_kernel(inputs):
        return rows
    return max(rows, pad_rows_for_transposed_matmul(rows, outputs))


@llvm_intrinsic
def compute_pairwise_dot_products(typing, left, right, count, prefetch_distance):
    """Return the dot product of each vector of `left` with each vector of `right`.

    left, right: tuples of addresses of vectors, of `count` * CODES_PER_REGISTER int8 codes each
    prefetch_distance: distance in bytes between a vector of `left` and the vector that is
        prefetched into the CPU cache while it is read

    The dot products are returned in row-major order, with a row for each vector of `left`. They are
    exact, because AVX2 multiplies 16-bit integers and adds in 32 bits.
    """
    sums_type = types.UniTuple(types.int32, left.count * right.count)

    def generate(context, builder, signature, values):
        byte = ir.IntType(8)
        int32 = ir.IntType(32)
        code_vector = ir.VectorType(byte, CODES_PER_REGISTER)
        wide_vector = ir.VectorType(ir.IntType(16), CODES_PER_REGISTER)
        sum_vector = ir.VectorType(int32, CODES_PER_REGISTER // 2)
        declare = partial(cgutils.get_or_insert_function, builder.module)
        multiply_add = declare(
            ir.FunctionType(sum_vector, [wide_vector] * 2), "llvm.x86.avx2.pmadd.wd"
        )
        reduce_add = declare(
            ir.FunctionType(int32, [sum_vector]),
            f"llvm.vector.reduce.add.v{CODES_PER_REGISTER // 2}i32",
        )
        prefetch = declare(
            ir.FunctionType(ir.VoidType(), [byte.as_pointer(), *[int32] * 3]), "llvm.prefetch.p0"
        )
        # The prefetch options mean: read access, highest locality, data cache.
        prefetch_options = [ir.Constant(int32, option) for option in (0, 3, 1)]
        accumulators = [
            cgutils.alloca_once_value(builder, ir.Constant(sum_vector, None))
            for _ in range(sums_type.count)
        ]
        left_addresses = cgutils.unpack_tuple(builder, values[0])
        right_addresses = cgutils.unpack_tuple(builder, values[1])

        def load_codes(addresses):
            vectors = [load_value(builder, address, code_vector) for address in addresses]
            return [builder.sext(vector, wide_vector) for vector in vectors]

        with cgutils.for_range(builder, values[2]) as loop:
            offset = builder.mul(loop.index, int64_constant(CODES_PER_REGISTER))
            lefts = [builder.add(address, offset) for address in left_addresses]
            rights = [builder.add(address, offset) for address in right_addresses]
            for address in lefts:
                next_address = builder.add(address, values[3])
                next_codes = builder.inttoptr(next_address, byte.as_pointer())
                builder.call(prefetch, [next_codes, *prefetch_options])
            pairs = product(load_codes(lefts), load_codes(rights))
            for accumulator, pair in zip(accumulators, pairs, strict=True):
                products = builder.call(multiply_add, pair)
                builder.store(builder.add(builder.load(accumulator), products), accumulator)

        sums = [builder.call(reduce_add, [builder.load(total)]) for total in accumulators]
        return context.make_tuple(builder, sums_type, sums)

    return sums_type(left, right, count, prefetch_distance), generate


class MatmulArguments(KernelArguments):
    """Arguments of `avx2_matmul_kernel`."""

    _fields_ = [
        ("codes", KERNEL_ARGUMENT_ADDRESS_TYPE),  # (num_rows, inputs) int8
        ("weights", KERNEL_ARGUMENT_ADDRESS_TYPE),  # (outputs, inputs) int8
        ("accumulators", KERNEL_ARGUMENT_ADDRESS_TYPE),  # output: (num_rows, outputs) int32
        ("num_rows", KERNEL_ARGUMENT_INTEGER_TYPE),  # number of rows of activation codes
        ("outputs", KERNEL_ARGUMENT_INTEGER_TYPE),  # number of outputs of the layer
        ("inputs", KERNEL_ARGUMENT_INTEGER_TYPE),  # number of inputs of the layer
    ]


read_matmul_arguments = make_argument_reader(MatmulArguments)


@njit
def avx2_matmul_kernel(address: int) -> None:
    """Multiply activation codes by weight codes, with AVX2 instructions.

    Each work item is a part of the result: MATMUL_OUTPUTS_PER_WORK_ITEM outputs for all rows. It is
    computed in tiles of INT8_MATMUL_TILE_OUTPUTS outputs and INT8_MATMUL_TILE_ROWS rows. In a tile
    at the edge of the result, the last output or row is computed several times.
    """
    args = read_matmul_arguments(address)
    item = claim_work_item(address)
    while item * MATMUL_OUTPUTS_PER_WORK_ITEM < args.outputs:
        first_output = item * MATMUL_OUTPUTS_PER_WORK_ITEM
        end_output = min(args.outputs, (item + 1) * MATMUL_OUTPUTS_PER_WORK_ITEM)
        for o in range(first_output, end_output, INT8_MATMUL_TILE_OUTPUTS):
            o1 = min(o + 1, args.outputs - 1)
            o2 = min(o + 2, args.outputs - 1)
            o3 = min(o + 3, args.outputs - 1)
            weight_rows = (
                args.weights + o * args.inputs,
                args.weights + o1 * args.inputs,
                args.weights + o2 * args.inputs,
                args.weights + o3 * args.inputs,
            )
            for n in range(0, args.num_rows, INT8_MATMUL_TILE_ROWS):
                n1 = min(n + 1, args.num_rows - 1)
                code_rows = args.codes + n * args.inputs, args.codes + n1 * args.inputs
                sums = compute_pairwise_dot_products(
                    weight_rows,
                    code_rows,
                    args.inputs // CODES_PER_REGISTER,
                    INT8_MATMUL_TILE_OUTPUTS * args.inputs,
                )
                row = int32_pointer(args.accumulators + 4 * n * args.outputs)
                next_row = int32_pointer(args.accumulators + 4 * n1 * args.outputs)
                row[o], row[o1], row[o2], row[o3] = sums[::2]
                next_row[o], next_row[o1], next_row[o2], next_row[o3] = sums[1::2]
        item = claim_work_item(address)


class TransposeArguments(KernelArguments):
    """Arguments of `transpose_kernel`."""

    _fields_ = [
        ("transposed", KERNEL_ARGUMENT_ADDRESS_TYPE),  # (outputs, num_rows) int32
        ("accumulators", KERNEL_ARGUMENT_ADDRESS_TYPE),  # output: (num_rows, outputs) int32
        ("outputs", KERNEL_ARGUMENT_INTEGER_TYPE),  # number of outputs of the layer
        ("num_rows", KERNEL_ARGUMENT_INTEGER_TYPE),  # number of rows of activation codes
    ]


read_transpose_arguments = make_argument_reader(TransposeArguments)


@njit
def transpose_kernel(address: int) -> None:
    """Transpose the result of a transposed matmul, from (outputs, rows) to (rows, outputs).

    Each work item is a part of the result: TRANSPOSE_OUTPUTS_PER_WORK_ITEM outputs for all rows.
    """
    args = read_transpose_arguments(address)
    item = claim_work_item(address)
    while item * TRANSPOSE_OUTPUTS_PER_WORK_ITEM < args.outputs:
        first_output = item * TRANSPOSE_OUTPUTS_PER_WORK_ITEM
        count = min(TRANSPOSE_OUTPUTS_PER_WORK_ITEM, args.outputs - first_output)
        transpose(
            args.transposed + 4 * first_output * args.num_rows,
            4 * args.num_rows,
            count,
            args.num_rows,
            args.accumulators + 4 * first_output,
            4 * args.outputs,
        )
        item = claim_work_item(address)


def matmul(codes: torch.Tensor, weights: torch.Tensor, rows: int) -> torch.Tensor:
    """Multiply activation codes by weight codes. Return the int32 result, (rows, outputs).

    codes: (padded rows, inputs) int8, from -127 to 127; `count_padded_rows` returns the number of
        padded rows
    weights: (outputs, inputs) int8
    rows: number of rows without padding
    """
    outputs, inputs = weights.shape
    if uses_avx2_kernel(inputs):
        return multiply_with_avx2(codes, weights, rows)
    if not pad_rows_for_transposed_matmul(rows, outputs):
        accumulators = allocate_tensor((rows, outputs), torch.int32, scratch="accumulators")
        run_and_record(
            partial(torch._int_mm, codes, weights.t(), out=accumulators),
            [codes, weights, accumulators],
        )
        return accumulators
    return multiply_transposed(codes, weights)[:rows]


def multiply_with_avx2(codes: torch.Tensor, weights: torch.Tensor, rows: int) -> torch.Tensor:
    """Implement `matmul` with `avx2_matmul_kernel`, for codes without padding rows."""
    outputs, inputs = weights.shape
    accumulators = allocate_tensor((rows, outputs), torch.int32, scratch="accumulators")
    arguments = MatmulArguments(
        codes=codes,
        weights=weights,
        accumulators=accumulators,
        num_rows=rows,
        outputs=outputs,
        inputs=inputs,
    )
    # Reading the weights from memory takes about as long as multiplying them by
    # INT8_MATMUL_TILE_ROWS rows of codes, so this number of rows is added.
    cycles = (
        (rows + INT8_MATMUL_TILE_ROWS) * inputs * outputs // ESTIMATED_INT8_MATMUL_MACS_PER_CYCLE
    )
    work_items = -(-outputs // MATMUL_OUTPUTS_PER_WORK_ITEM)
    launch_kernel(avx2_matmul_kernel, arguments, work_items, cycles)
    return accumulators


def multiply_transposed(codes: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute weights @ codes.T, and transpose the result back.

    codes: (padded rows, inputs) int8
    weights: (outputs, inputs) int8

    Returns the int32 result, (padded rows, outputs).
    """
    padded_rows = len(codes)
    outputs = len(weights)
    transposed = allocate_tensor(
        (outputs, padded_rows), torch.int32, scratch="transposed accumulators"
    )
    run_and_record(
        partial(torch._int_mm, weights, codes.t(), out=transposed), [codes, weights, transposed]
    )
    if padded_rows == 1:
        return transposed.view(1, -1)
    accumulators = allocate_tensor((padded_rows, outputs), torch.int32, scratch="accumulators")
    arguments = TransposeArguments(
        transposed=transposed, accumulators=accumulators, outputs=outputs, num_rows=padded_rows
    )
    work_items = -(-outputs // TRANSPOSE_OUTPUTS_PER_WORK_ITEM)
    launch_kernel(transpose_kernel, arguments, work_items, accumulators.numel())
    return accumulators

"""Transposes and matmuls of float32 matrices with a fixed summation order.

The inner loops are generated as LLVM code, so that they use vector registers.
"""

from itertools import chain
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils

from infer.kernels.launch import float_pointer, llvm_intrinsic
from infer.utils.jit import njit

# Number of float32 values in a vector register (AVX-512, otherwise AVX2).
FLOATS_PER_CPU_VECTOR = 16 if torch.cpu.get_capabilities().get("avx512_f") else 8
BYTES_PER_CPU_VECTOR = 4 * FLOATS_PER_CPU_VECTOR
# Number of columns of a matmul's result that are computed together, in two vector registers.
FLOAT_TILE_COLUMNS = 2 * FLOATS_PER_CPU_VECTOR
LLVM_FLOAT32_VECTOR_TYPE = ir.VectorType(ir.FloatType(), FLOATS_PER_CPU_VECTOR)


def int64_constant(number: int) -> ir.Constant:
    """Return an LLVM constant of type int64."""
    return ir.Constant(ir.IntType(64), number)


def load_value(builder: ir.IRBuilder, address: ir.Value, value_type: ir.Type) -> ir.Value:
    """Generate LLVM code that loads a value from an address, which need not be aligned.

    Returns the LLVM value that is loaded.
    """
    return builder.load(builder.inttoptr(address, value_type.as_pointer()), align=1)


def load_accumulators(builder: Any, addresses: list) -> list:
    """Generate LLVM code that loads a vector of sums from each address. Return one LLVM variable
    for each vector."""
    loaded_sums = [load_value(builder, address, LLVM_FLOAT32_VECTOR_TYPE) for address in addresses]
    return [cgutils.alloca_once_value(builder, loaded) for loaded in loaded_sums]


@llvm_intrinsic
def accumulate_vector_matrix_products(typing, factors, count, matrix, row_bytes, sums):
    """Multiply several vectors by the same matrix, and add the results to sums in memory.

    factors: tuple of the addresses of the vectors, of `count` float32 values each
    matrix: address of a matrix (count, FLOAT_TILE_COLUMNS)
    row_bytes: distance in bytes between two rows of the matrix
    sums: tuple of the addresses of the sums, FLOAT_TILE_COLUMNS float32 values for each vector

    Each sum adds the products in the order of the matrix rows, with fused multiply-adds.
    """

    def generate(context, builder, signature, values):
        count, matrix, row_bytes = values[1:4]
        factor_addresses = cgutils.unpack_tuple(builder, values[0])
        sum_addresses = cgutils.unpack_tuple(builder, values[4])
        offsets = [
            int64_constant(offset)
            for offset in range(0, 4 * FLOAT_TILE_COLUMNS, BYTES_PER_CPU_VECTOR)
        ]
        vector_addresses = []  # for each vector, the addresses of its sums, one per register
        accumulators = []
        for sum_address in sum_addresses:
            addresses = [builder.add(sum_address, offset) for offset in offsets]
            vector_addresses.append(addresses)
            accumulators.append(load_accumulators(builder, addresses))
        fma_type = ir.FunctionType(LLVM_FLOAT32_VECTOR_TYPE, [LLVM_FLOAT32_VECTOR_TYPE] * 3)
        fma = cgutils.get_or_insert_function(
            builder.module, fma_type, f"llvm.fma.v{FLOATS_PER_CPU_VECTOR}f32"
        )
        broadcast_mask = ir.Constant(ir.VectorType(ir.IntType(32), FLOATS_PER_CPU_VECTOR), None)
        undefined_vector = ir.Constant(LLVM_FLOAT32_VECTOR_TYPE, ir.Undefined)

        with cgutils.for_range(builder, count) as loop:
            row = builder.add(matrix, builder.mul(loop.index, row_bytes))
            row_vectors = [
                load_value(builder, builder.add(row, offset), LLVM_FLOAT32_VECTOR_TYPE)
                for offset in offsets
            ]
            factor_offset = builder.mul(loop.index, int64_constant(4))
            for address, row_accumulators in zip(factor_addresses, accumulators, strict=True):
                factor_address = builder.add(address, factor_offset)
                factor = load_value(builder, factor_address, ir.FloatType())
                vector = builder.insert_element(undefined_vector, factor, int64_constant(0))
                vector = builder.shuffle_vector(vector, vector, broadcast_mask)
                for accumulator, row_vector in zip(row_accumulators, row_vectors, strict=True):
                    total = builder.call(fma, [vector, row_vector, builder.load(accumulator)])
                    builder.store(total, accumulator)

        for address, accumulator in zip(
            chain(*vector_addresses), chain(*accumulators), strict=True
        ):
            pointer = builder.inttoptr(address, LLVM_FLOAT32_VECTOR_TYPE.as_pointer())
            builder.store(builder.load(accumulator), pointer, align=4)
        return context.get_dummy_value()

    addresses = types.UniTuple(types.intp, len(factors))
    return types.none(addresses, types.intp, types.intp, types.intp, addresses), generate


@llvm_intrinsic
def transpose_tile(typing, source, source_row_bytes, destination, destination_row_bytes):
    """Write the transpose of a square matrix to another address.

    source, destination: addresses of the matrix and of the transpose. Both have
        FLOATS_PER_CPU_VECTOR rows and columns of 4-byte values.
    source_row_bytes, destination_row_bytes: distances in bytes between two rows

    The matrix is divided into 2 x 2 blocks, and the two off-diagonal blocks are swapped. This is
    repeated within each block, down to blocks of single values.
    """

    def generate(context, builder, signature, values):
        source, source_row_bytes, destination, destination_row_bytes = values
        indices = [int64_constant(n) for n in range(FLOATS_PER_CPU_VECTOR)]
        addresses = [builder.add(source, builder.mul(source_row_bytes, n)) for n in indices]
        rows = [load_value(builder, address, LLVM_FLOAT32_VECTOR_TYPE) for address in addresses]
        shuffle_type = ir.VectorType(ir.IntType(32), FLOATS_PER_CPU_VECTOR)
        block = FLOATS_PER_CPU_VECTOR // 2
        while block:
            low = [
                n + FLOATS_PER_CPU_VECTOR - block if n & block else n
                for n in range(FLOATS_PER_CPU_VECTOR)
            ]
            high = [
                n + FLOATS_PER_CPU_VECTOR if n & block else n + block
                for n in range(FLOATS_PER_CPU_VECTOR)
            ]
            for i in range(FLOATS_PER_CPU_VECTOR):
                if i & block:
                    continue
                pair = rows[i], rows[i + block]
                rows[i] = builder.shuffle_vector(*pair, ir.Constant(shuffle_type, low))
                rows[i + block] = builder.shuffle_vector(*pair, ir.Constant(shuffle_type, high))
            block //= 2
        for row, n in zip(rows, indices, strict=True):
            address = builder.add(destination, builder.mul(destination_row_bytes, n))
            builder.store(
                row, builder.inttoptr(address, LLVM_FLOAT32_VECTOR_TYPE.as_pointer()), align=4
            )
        return context.get_dummy_value()

    return types.none(types.intp, types.intp, types.intp, types.intp), generate


@njit
def transpose(
    source: int,
    source_row_bytes: int,
    rows: int,
    columns: int,
    destination: int,
    destination_row_bytes: int,
) -> None:
    """Write the transpose of a matrix (rows, columns) of 4-byte values to another address.

    source, destination: addresses of the matrix and of the transpose
    source_row_bytes, destination_row_bytes: distances in bytes between two rows
    """
    for row in range(0, rows, FLOATS_PER_CPU_VECTOR):
        is_full = row + FLOATS_PER_CPU_VECTOR <= rows
        tiled_columns = columns // FLOATS_PER_CPU_VECTOR * FLOATS_PER_CPU_VECTOR if is_full else 0
        for column in range(0, tiled_columns, FLOATS_PER_CPU_VECTOR):
            transpose_tile(
                source + row * source_row_bytes + 4 * column,
                source_row_bytes,
                destination + column * destination_row_bytes + 4 * row,
                destination_row_bytes,
            )
        for r in range(row, min(row + FLOATS_PER_CPU_VECTOR, rows)):
            for column in range(tiled_columns, columns):
                source_row = float_pointer(source + r * source_row_bytes)
                destination_row = float_pointer(destination + column * destination_row_bytes)
                destination_row[r] = source_row[column]


@njit
def add_matmul(
    left: int,
    left_row_bytes: int,
    rows: int,
    count: int,
    right: int,
    right_row_bytes: int,
    columns: int,
    out: int,
    out_row_bytes: int,
) -> None:
    """Add the matrix product of `left` (rows, count) and `right` (count, columns) to `out`.

    Each matrix is given by its address and the distance in bytes between two rows. Each sum adds
    its `count` products in order. The allocated rows of `right` and `out` must have a multiple of
    FLOAT_TILE_COLUMNS columns, because this many columns are computed together. Four rows are
    computed together. If fewer than four are left, the last row is computed several times.
    """
    for r in range(0, rows, 4):
        r1 = min(r + 1, rows - 1)
        r2 = min(r + 2, rows - 1)
        r3 = min(r + 3, rows - 1)
        left_rows = (
            left + r * left_row_bytes,
            left + r1 * left_row_bytes,
            left + r2 * left_row_bytes,
            left + r3 * left_row_bytes,
        )
        for column_offset in range(0, 4 * columns, 4 * FLOAT_TILE_COLUMNS):
            sums = (
                out + column_offset + r * out_row_bytes,
                out + column_offset + r1 * out_row_bytes,
                out + column_offset + r2 * out_row_bytes,
                out + column_offset + r3 * out_row_bytes,
            )
            accumulate_vector_matrix_products(
                left_rows, count, right + column_offset, right_row_bytes, sums
            )

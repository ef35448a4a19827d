"""Matmuls of int8 codes with int32 sums: oneDNN's where it has fast ones; our loop on an x86 with
AVX2 and no VNNI.

N rows of codes of activations, D inputs, O outputs.
"""

from functools import cache, partial
from itertools import product

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from infer.int8_cpu.attention import VECTOR_WIDTH, int64_constant, load, transpose
from infer.int8_cpu.rows import int32_pointer
from infer.kernels.launch import (
    ADDRESS,
    INTEGER,
    Arguments,
    claim_part,
    empty,
    launch,
    reader,
    run_and_record,
)
from infer.utils.jit import njit

MAX_SWAPPED_ROWS = 64  # more rows are as fast the ordinary way round
MAX_SWAPPED_SUMS = 2**20  # more sums leave the cache before they are transposed
MAX_LOOSE_ROWS = 4  # rows behind whole blocks of VECTOR_WIDTH that are transposed one by one
CODES_PER_REGISTER = 16  # of AVX2, widened to 16 bits
MACS_PER_CYCLE = 24
OUTPUT_TILE = 4  # outputs, and rows, whose sums stay in registers
ROW_TILE = 2
PART_OUTPUTS = 32  # outputs that a thread claims
TRANSPOSE_OUTPUTS = 1024  # outputs that a thread transposes


@cache
def uses_avx2_loop(inputs: int) -> bool:
    """Return whether matmuls over so many inputs run in `multiply_codes`: oneDNN has fast ones with
    VNNI only."""
    able = torch.cpu.get_capabilities()
    has_vnni = able["avx512_vnni"] or able["avx_vnni"]
    return able.get("avx2", False) and not has_vnni and inputs % CODES_PER_REGISTER == 0


@cache
def swapped_rows(rows: int, outputs: int) -> int:
    """Return as how many rows so many are multiplied the other way round, weights (O, D) by rows
    transposed (D, N), 0 for not: with AMX, whose kernels pack the right side before they begin,
    which should be the smaller one. More than MAX_LOOSE_ROWS behind whole blocks are filled up to
    one more block, which is transposed back at once."""
    if not torch.cpu.get_capabilities().get("amx_int8"):
        return 0
    if rows > MAX_SWAPPED_ROWS or rows * outputs > MAX_SWAPPED_SUMS:
        return 0
    if rows % VECTOR_WIDTH <= MAX_LOOSE_ROWS:
        return rows
    return -(-rows // VECTOR_WIDTH) * VECTOR_WIDTH


def padded_rows(rows: int, weights: torch.Tensor) -> int:
    """Return how many rows of codes `matmul` wants for so many: some more where they are multiplied
    the other way round in whole blocks."""
    outputs, inputs = weights.shape
    return rows if uses_avx2_loop(inputs) else max(rows, swapped_rows(rows, outputs))


@intrinsic
def dot_products(typing, left, right, count, ahead):
    """Return the sums of products of codes at each address of `left` with those at each of `right`.

    There are `count` times CODES_PER_REGISTER of them: AVX2's products of 16 bits, added two by two
    in 32, which are exact. What lies `ahead` bytes behind those at `left` is prefetched."""
    sums_type = types.UniTuple(types.int32, left.count * right.count)

    def generate(context, builder, signature, values):
        byte = ir.IntType(8)
        word = ir.IntType(32)
        codes = ir.VectorType(byte, CODES_PER_REGISTER)
        wide = ir.VectorType(ir.IntType(16), CODES_PER_REGISTER)
        sums = ir.VectorType(word, CODES_PER_REGISTER // 2)
        declare = partial(cgutils.get_or_insert_function, builder.module)
        multiply = declare(ir.FunctionType(sums, [wide] * 2), "llvm.x86.avx2.pmadd.wd")
        add_up = declare(
            ir.FunctionType(word, [sums]), f"llvm.vector.reduce.add.v{CODES_PER_REGISTER // 2}i32"
        )
        prefetch = declare(
            ir.FunctionType(ir.VoidType(), [byte.as_pointer(), *[word] * 3]), "llvm.prefetch.p0"
        )
        totals = [
            cgutils.alloca_once_value(builder, ir.Constant(sums, None))
            for _ in range(sums_type.count)
        ]
        sides = [cgutils.unpack_tuple(builder, side) for side in values[:2]]
        with cgutils.for_range(builder, values[2]) as loop:
            offset = builder.mul(loop.index, int64_constant(CODES_PER_REGISTER))
            places = [[builder.add(address, offset) for address in side] for side in sides]
            for place in places[0]:
                next_codes = builder.inttoptr(builder.add(place, values[3]), byte.as_pointer())
                builder.call(
                    prefetch, [next_codes, *(ir.Constant(word, n) for n in (0, 3, 1))]
                )  # read, keep near
            numbers = [
                [builder.sext(load(builder, place, codes), wide) for place in side]
                for side in places
            ]
            for total, pair in zip(totals, product(*numbers), strict=True):
                builder.store(builder.add(builder.load(total), builder.call(multiply, pair)), total)
        return context.make_tuple(
            builder, sums_type, [builder.call(add_up, [builder.load(t)]) for t in totals]
        )

    return sums_type(left, right, count, ahead), generate


class MatmulArguments(Arguments):
    """Arguments of `multiply_codes`."""

    _fields_ = [
        ("codes", ADDRESS),  # (N, D) int8
        ("weights", ADDRESS),  # (O, D) int8
        ("sums", ADDRESS),  # (N, O) int32
        ("rows", INTEGER),  # N
        ("outputs", INTEGER),  # O
        ("inputs", INTEGER),  # D
    ]


matmul_arguments = reader(MatmulArguments)


@njit
def multiply_codes(address):
    """Multiply PART_OUTPUTS outputs at a time with all rows: OUTPUT_TILE of them with ROW_TILE
    rows, the last ones again where there are less."""
    a = matmul_arguments(address)
    part = claim_part(address)
    while part * PART_OUTPUTS < a.outputs:
        for o in range(part * PART_OUTPUTS, min(a.outputs, (part + 1) * PART_OUTPUTS), OUTPUT_TILE):
            o1 = min(o + 1, a.outputs - 1)
            o2 = min(o + 2, a.outputs - 1)
            o3 = min(o + 3, a.outputs - 1)
            lefts = (
                a.weights + o * a.inputs,
                a.weights + o1 * a.inputs,
                a.weights + o2 * a.inputs,
                a.weights + o3 * a.inputs,
            )
            for n in range(0, a.rows, ROW_TILE):
                n1 = min(n + 1, a.rows - 1)
                rights = a.codes + n * a.inputs, a.codes + n1 * a.inputs
                products = dot_products(
                    lefts, rights, a.inputs // CODES_PER_REGISTER, OUTPUT_TILE * a.inputs
                )
                row = int32_pointer(a.sums + 4 * n * a.outputs)
                other = int32_pointer(a.sums + 4 * n1 * a.outputs)
                row[o], row[o1], row[o2], row[o3] = products[::2]
                other[o], other[o1], other[o2], other[o3] = products[1::2]
        part = claim_part(address)


class TransposeArguments(Arguments):
    """Arguments of `transpose_sums`."""

    _fields_ = [
        ("sums", ADDRESS),  # (O, N) int32
        ("out", ADDRESS),  # (N, O)
        ("outputs", INTEGER),  # O
        ("rows", INTEGER),  # N
    ]


transpose_arguments = reader(TransposeArguments)


@njit
def transpose_sums(address):
    """Transpose TRANSPOSE_OUTPUTS outputs at a time."""
    a = transpose_arguments(address)
    part = claim_part(address)
    while part * TRANSPOSE_OUTPUTS < a.outputs:
        begin = part * TRANSPOSE_OUTPUTS
        count = min(TRANSPOSE_OUTPUTS, a.outputs - begin)
        transpose(
            a.sums + 4 * begin * a.rows, 4 * a.rows, count, a.rows, a.out + 4 * begin, 4 * a.outputs
        )
        part = claim_part(address)


def matmul(codes: torch.Tensor, weights: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the product (N, O) int32 of the first N = `rows` codes (M, D) from -127 to 127, int8,
    with weights (O, D) int8; M is `padded_rows` of N."""
    outputs, inputs = weights.shape
    if uses_avx2_loop(inputs):
        sums = empty((rows, outputs), torch.int32, scratch="sums")
        arguments = MatmulArguments(
            codes=codes, weights=weights, sums=sums, rows=rows, outputs=outputs, inputs=inputs
        )
        # one row of weights is read as long as ROW_TILE others are multiplied
        cycles = (rows + ROW_TILE) * inputs * outputs // MACS_PER_CYCLE
        launch(multiply_codes, arguments, -(-outputs // PART_OUTPUTS), cycles)
        return sums
    if not swapped_rows(rows, outputs):
        sums = empty((rows, outputs), torch.int32, scratch="sums")
        run_and_record(partial(torch._int_mm, codes, weights.t(), out=sums), [codes, weights, sums])
        return sums
    swapped = empty((outputs, len(codes)), torch.int32, scratch="swapped sums")
    run_and_record(
        partial(torch._int_mm, weights, codes.t(), out=swapped), [codes, weights, swapped]
    )
    if len(codes) == 1:
        return swapped.view(1, -1)
    sums = empty((len(codes), outputs), torch.int32, scratch="sums")
    arguments = TransposeArguments(sums=swapped, out=sums, outputs=outputs, rows=len(codes))
    launch(transpose_sums, arguments, -(-outputs // TRANSPOSE_OUTPUTS), sums.numel())
    return sums[:rows]

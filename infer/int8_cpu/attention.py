"""Attention in float32 whose sums go from the first cached position to the last, one by one, and to
which a hidden position adds 0. So a query's result follows from what it sees alone, wherever that
lies and whatever lies between: it is the same to the last bit alone, in a draft tree and beside
other sequences.

N new positions of B batch rows, Q each, K key heads, G query heads of each, E head size, S visible
positions.
"""

from itertools import chain

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from infer.attention.kv_cache import LayerWindow, PackedLayer
from infer.attention.masks import Mask
from infer.kernels import reference
from infer.kernels.cpu import as_bits, as_float, copy_floats, exp
from infer.kernels.launch import (
    ADDRESS,
    FLOAT,
    INTEGER,
    MIN_PARALLEL_CYCLES,
    Arguments,
    claim_part,
    empty,
    float_pointer,
    int64_pointer,
    launch,
    reader,
)
from infer.utils.jit import IN_ORDER, njit

# float32 values of a vector register: the sums of a tile fill 16 registers of AVX2, or of AVX-512
VECTOR_WIDTH = 16 if torch.cpu.get_capabilities().get("avx512_f") else 8
VECTOR_BYTES = 4 * VECTOR_WIDTH
TILE_COLUMNS = 2 * VECTOR_WIDTH
QUERY_TILE = 16  # queries of a batch row that are computed together
KEY_TILE = (
    128  # cached positions at a time: they stay in the nearest cache until they are read again
)
VECTOR = ir.VectorType(ir.FloatType(), VECTOR_WIDTH)


def int64_constant(number: int) -> ir.Constant:
    return ir.Constant(ir.IntType(64), number)


def load(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    """Return code that loads a value from an address, which need not be aligned."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


@intrinsic
def accumulate_products(typing, factors, count, matrix, row_bytes, sums):
    """Add to the TILE_COLUMNS numbers at each address of `sums` the product of the `count` numbers
    at its address of `factors` with a matrix, `count` rows `row_bytes` apart: row by row, each
    product and sum rounded once."""

    def generate(context, builder, signature, values):
        count, matrix, row_bytes = values[1:4]
        factor_addresses = cgutils.unpack_tuple(builder, values[0])
        sum_addresses = cgutils.unpack_tuple(builder, values[4])
        shifts = [int64_constant(shift) for shift in range(0, 4 * TILE_COLUMNS, VECTOR_BYTES)]
        places = [[builder.add(address, shift) for shift in shifts] for address in sum_addresses]
        totals = [
            [cgutils.alloca_once_value(builder, load(builder, x, VECTOR)) for x in row]
            for row in places
        ]
        fma_type = ir.FunctionType(VECTOR, [VECTOR] * 3)
        fma = cgutils.get_or_insert_function(
            builder.module, fma_type, f"llvm.fma.v{VECTOR_WIDTH}f32"
        )
        broadcast = ir.Constant(ir.VectorType(ir.IntType(32), VECTOR_WIDTH), None)
        with cgutils.for_range(builder, count) as loop:
            row = builder.add(matrix, builder.mul(loop.index, row_bytes))
            lanes = [load(builder, builder.add(row, shift), VECTOR) for shift in shifts]
            offset = builder.mul(loop.index, int64_constant(4))
            for address, row_totals in zip(factor_addresses, totals, strict=True):
                factor = load(builder, builder.add(address, offset), ir.FloatType())
                vector = builder.insert_element(
                    ir.Constant(VECTOR, ir.Undefined), factor, int64_constant(0)
                )
                vector = builder.shuffle_vector(vector, vector, broadcast)
                for total, numbers in zip(row_totals, lanes, strict=True):
                    builder.store(builder.call(fma, [vector, numbers, builder.load(total)]), total)
        for place, total in zip(chain(*places), chain(*totals), strict=True):
            builder.store(
                builder.load(total), builder.inttoptr(place, VECTOR.as_pointer()), align=4
            )
        return context.get_dummy_value()

    addresses = types.UniTuple(types.intp, len(factors))
    return types.none(addresses, types.intp, types.intp, types.intp, addresses), generate


@intrinsic
def transpose_tile(typing, source, source_bytes, to, to_bytes):
    """Write a matrix of VECTOR_WIDTH rows and columns, whose rows are `source_bytes` apart,
    transposed to another
    place: blocks of half the size change places, then those of a quarter, and so on."""

    def generate(context, builder, signature, values):
        source, source_bytes, to, to_bytes = values
        numbers = [int64_constant(n) for n in range(VECTOR_WIDTH)]
        addresses = [builder.add(source, builder.mul(source_bytes, n)) for n in numbers]
        rows = [load(builder, address, VECTOR) for address in addresses]
        indices = ir.VectorType(ir.IntType(32), VECTOR_WIDTH)
        block = VECTOR_WIDTH // 2
        while block:
            low = [n + VECTOR_WIDTH - block if n & block else n for n in range(VECTOR_WIDTH)]
            high = [n + VECTOR_WIDTH if n & block else n + block for n in range(VECTOR_WIDTH)]
            for i in range(VECTOR_WIDTH):
                if i & block:
                    continue
                pair = rows[i], rows[i + block]
                rows[i] = builder.shuffle_vector(*pair, ir.Constant(indices, low))
                rows[i + block] = builder.shuffle_vector(*pair, ir.Constant(indices, high))
            block //= 2
        for row, n in zip(rows, numbers, strict=True):
            address = builder.add(to, builder.mul(to_bytes, n))
            builder.store(row, builder.inttoptr(address, VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.none(types.intp, types.intp, types.intp, types.intp), generate


@njit
def transpose(source, source_bytes, rows, columns, to, to_bytes):
    """Write a matrix (rows, columns) of 4-byte numbers, transposed, to another place."""
    for row in range(0, rows, VECTOR_WIDTH):
        in_tiles = columns // VECTOR_WIDTH * VECTOR_WIDTH if row + VECTOR_WIDTH <= rows else 0
        for column in range(0, in_tiles, VECTOR_WIDTH):
            transpose_tile(
                source + row * source_bytes + 4 * column,
                source_bytes,
                to + column * to_bytes + 4 * row,
                to_bytes,
            )
        for r in range(row, min(row + VECTOR_WIDTH, rows)):
            for column in range(in_tiles, columns):
                float_pointer(to + column * to_bytes)[r] = float_pointer(source + r * source_bytes)[
                    column
                ]


@njit
def add_matmul(left, left_bytes, rows, count, right, right_bytes, columns, out, out_bytes):
    """Add the product of matrices left (rows, count) and right (count, columns) to out, whose rows
    are that many bytes apart. Sums go from the first number to the last. Columns are taken by
    TILE_COLUMNS, rows by fours, the last one again where there are less."""
    for r in range(0, rows, 4):
        r1 = min(r + 1, rows - 1)
        r2 = min(r + 2, rows - 1)
        r3 = min(r + 3, rows - 1)
        lefts = (
            left + r * left_bytes,
            left + r1 * left_bytes,
            left + r2 * left_bytes,
            left + r3 * left_bytes,
        )
        for c in range(0, 4 * columns, 4 * TILE_COLUMNS):
            sums = (
                out + c + r * out_bytes,
                out + c + r1 * out_bytes,
                out + c + r2 * out_bytes,
                out + c + r3 * out_bytes,
            )
            accumulate_products(lefts, count, right + c, right_bytes, sums)


@numba.njit(inline="always")
def ordered_bits(bits):
    """Return the bits of a float32 as a whole number in the same order, or back."""
    return np.int32(bits ^ (np.int32(bits >> 31) & np.int32(0x7FFFFFFF)))


@njit(fast=IN_ORDER)
def exponentiate_scores(scores, mask, sees_all, scale, count):
    """Replace the first `count` scores (S,), scaled and under an additive mask (S,) unless the
    query sees all of them, by e^(score - largest), and those behind by 0."""
    largest = np.int32(-(2**31))
    for j in range(count):
        scores[j] *= scale
    if not sees_all:
        for j in range(count):
            scores[j] += mask[j]
    for j in range(count):
        value = ordered_bits(as_bits(scores[j]))
        largest = value if value > largest else largest
    top = as_float(ordered_bits(largest))
    for j in range(count):
        scores[j] = exp(scores[j] - top)
    for j in range(count, len(scores)):
        scores[j] = 0


@njit
def last_seen(mask):
    """Return how many positions there are up to the last one that a query sees under a mask (S,),
    at least 1."""
    count = len(mask)
    while count > 1 and mask[count - 1] < 0:
        count -= 1
    return count


@njit
def largest_of(numbers, count):
    """Return the largest of the first numbers, at least 0."""
    largest = 0
    for i in range(count):
        largest = max(largest, numbers[i])
    return largest


@njit
def gather_queries(source, first, positions, key_heads, head, groups, queries):
    """Copy the queries of one key head at positions from `first` on, (N, K, G, E) in memory, to
    queries (R, E)."""
    size = queries.shape[1]
    for i in range(positions):
        query = ((first + i) * key_heads + head) * groups
        copy_floats(source + 4 * size * query, queries[i * groups].ctypes.data, groups * size)


@njit
def write_averages(mixed, totals, count, groups, out, head):
    """Write sums of weighted values (R, ..), divided by the totals of their weights (R, ..), to out
    (N, K, G, E)."""
    size = out.shape[3]
    for r in range(count):
        position = r // groups
        group = r % groups
        for e in range(size):
            out[position, head, group, e] = mixed[r, e] / totals[r, 0]


@njit
def multiply_keys(queries, keys, position_bytes, count, key_columns, scores):
    """Add the products of queries (R, E) with the first `count` cached keys to scores (R, S),
    KEY_TILE keys at a time; key_columns (E, KEY_TILE + ..) is their memory."""
    rows, size = queries.shape
    for position in range(0, count, KEY_TILE):
        near = min(KEY_TILE, count - position)
        source = keys + position * position_bytes
        transpose(
            source, position_bytes, near, size, key_columns.ctypes.data, 4 * key_columns.shape[1]
        )
        add_matmul(
            queries.ctypes.data, 4 * size, rows, size, key_columns.ctypes.data, 4 * key_columns.shape[1], near,
            scores.ctypes.data + 4 * position, 4 * scores.shape[1],
        )  # fmt: skip


@njit
def sum_rows(weights, count, totals):
    """Add the first `count` weights of every row (R, S) to its first total (R, TILE_COLUMNS), in
    their order: a matmul with ones, four rows at a time."""
    ones = np.ones(TILE_COLUMNS, np.float32)
    add_matmul(
        weights.ctypes.data, 4 * weights.shape[1], len(weights), count, ones.ctypes.data, 0, TILE_COLUMNS,
        totals.ctypes.data, 4 * TILE_COLUMNS,
    )  # fmt: skip


@njit
def mix_values(weights, values, position_bytes, count, size, padded_values, mixed):
    """Add the first `count` cached values, times weights (R, S), to mixed (R, padded size);
    padded_values (KEY_TILE, padded size) is memory for values whose size is not whole tiles."""
    rows = len(weights)
    padded_size = mixed.shape[1]
    for position in range(0, count, KEY_TILE):
        near = min(KEY_TILE, count - position)
        source = values + position * position_bytes
        source_bytes = position_bytes
        if padded_size != size:
            for j in range(near):
                copy_floats(source + j * position_bytes, padded_values[j].ctypes.data, size)
            source = padded_values.ctypes.data
            source_bytes = 4 * padded_size
        add_matmul(
            weights.ctypes.data + 4 * position, 4 * weights.shape[1], rows, near, source, source_bytes, padded_size,
            mixed.ctypes.data, 4 * padded_size,
        )  # fmt: skip


class AttentionArguments(Arguments):
    """Arguments of `attend_rows`."""

    _fields_ = [
        ("queries", ADDRESS),  # (N, K, G, E)
        ("out", ADDRESS),  # (N, K, G, E)
        ("keys", ADDRESS),  # (B, capacity, K, E), from the first visible position on
        ("values", ADDRESS),
        ("mask", ADDRESS),  # (B, Q, S) additive; 0: every query sees all S positions
        (
            "row_ends",
            ADDRESS,
        ),  # (B,) int64: behind which of the N each batch row ends; 0: each has Q of them
        ("rows", INTEGER),  # B
        ("key_heads", INTEGER),  # K
        ("groups", INTEGER),  # G
        ("head_size", INTEGER),  # E
        ("capacity", INTEGER),  # positions of a batch row in the cache
        ("visible", INTEGER),  # S
        ("width", INTEGER),  # Q
        ("scale", FLOAT),
    ]


attention_arguments = reader(AttentionArguments)


@njit(fast=IN_ORDER)
def attend_rows(address):
    """Compute attention: a part of the work is some queries of a batch row and a key head, which
    are multiplied with KEY_TILE cached positions at a time."""
    a = attention_arguments(address)
    # locals: the compiler must assume that what is written to memory changes the structure's fields
    rows = a.rows
    key_heads = a.key_heads
    groups = a.groups
    size = a.head_size
    capacity = a.capacity
    visible = a.visible
    width = a.width
    key_memory = a.keys
    value_memory = a.values
    row_ends = a.row_ends
    query_tiles = (width + QUERY_TILE - 1) // QUERY_TILE
    tile_queries = (width + query_tiles - 1) // query_tiles
    sees_all = a.mask == 0
    mask = carray(float_pointer(a.mask), (rows, width, visible))
    out = carray(float_pointer(a.out), (rows * width, key_heads, groups, size))
    padded_size = (size + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS
    padded_visible = (visible + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS
    # VECTOR_WIDTH more columns: so rows do not all begin in the same lines of a cache
    key_columns = np.zeros((size, KEY_TILE + VECTOR_WIDTH), np.float32)
    padded_values = np.zeros((KEY_TILE, padded_size), np.float32)
    queries = np.empty((groups * tile_queries, size), np.float32)
    weights = np.empty((groups * tile_queries, padded_visible), np.float32)
    mixed = np.empty((groups * tile_queries, padded_size), np.float32)
    totals = np.empty((groups * tile_queries, TILE_COLUMNS), np.float32)
    seen = np.empty(tile_queries, np.int64)  # positions up to the last one that a query sees
    position_bytes = 4 * key_heads * size
    part = claim_part(address)
    while part < rows * key_heads * query_tiles:
        row = part // (key_heads * query_tiles)
        head = part // query_tiles % key_heads
        begin = part % query_tiles * tile_queries
        first = row * width
        end = width
        if row_ends != 0:
            first = int64_pointer(row_ends)[row - 1] if row > 0 else 0
            end = int64_pointer(row_ends)[row] - first
        positions = max(0, min(tile_queries, end - begin))
        count = positions * groups
        for i in range(positions):
            seen[i] = visible if sees_all else last_seen(mask[row, begin + i])
        gather_queries(a.queries, first + begin, positions, key_heads, head, groups, queries)
        most_seen = largest_of(seen, positions)
        weights[:count] = 0
        mixed[:count] = 0
        totals[:count] = 0
        row_offset = 4 * (row * capacity * key_heads + head) * size
        multiply_keys(
            queries[:count],
            key_memory + row_offset,
            position_bytes,
            most_seen,
            key_columns,
            weights,
        )
        for r in range(count):
            row_mask = queries[0] if sees_all else mask[row, begin + r // groups]
            scores = weights[r, : (most_seen + VECTOR_WIDTH - 1) // VECTOR_WIDTH * VECTOR_WIDTH]
            exponentiate_scores(scores, row_mask, sees_all, a.scale, seen[r // groups])
        sum_rows(weights[:count], most_seen, totals)
        mix_values(
            weights[:count],
            value_memory + row_offset,
            position_bytes,
            most_seen,
            size,
            padded_values,
            mixed,
        )
        write_averages(mixed, totals, count, groups, out[first + begin :], head)
        part = claim_part(address)


def attend(
    queries: torch.Tensor, memory: LayerWindow | PackedLayer, mask: Mask, scale: float
) -> torch.Tensor:
    """See `infer.kernels.reference.attend`."""
    if not isinstance(memory, LayerWindow):
        return reference.attend(queries, memory, mask, scale)
    queries = queries.contiguous()
    out = empty((len(queries), queries.shape[1] * queries.shape[2]))
    rows, key_heads, visible, size = memory.keys.shape
    arguments = AttentionArguments(
        queries=queries,
        out=out,
        rows=rows,
        key_heads=key_heads,
        groups=queries.shape[1] // key_heads,
        head_size=size,
        scale=scale,
    )

    def bind(memory: LayerWindow, mask: Mask) -> None:
        additive = mask.for_packed(1, torch.float32)
        keys = memory.keys
        arguments.keys = keys.data_ptr()
        arguments.values = memory.values.data_ptr()
        arguments.mask = 0 if additive is None else additive.data_ptr()
        arguments.row_ends = 0 if memory.stops is None else memory.stops.data_ptr()
        arguments.capacity = keys.stride(0) // keys.stride(2)
        arguments.visible = keys.shape[2]
        arguments.width = memory.width

    bind(memory, mask)
    parts = rows * key_heads * -(-memory.width // QUERY_TILE)
    cycles = max(queries.numel() * visible // 2, MIN_PARALLEL_CYCLES + 1)
    launch(attend_rows, arguments, parts, cycles, bind, (memory, mask))
    return out

"""Attention in float32 with a fixed summation order.

Each sum adds one cached position after the other, from the first to the last, and a masked position
adds exactly 0. The result for a query therefore depends only on the positions that the query
attends to. It does not depend on where these positions are in the cache, or on masked positions
between them. The result is bit-identical for a sequence alone, in a draft tree and in a batch.

Dimensions: N new positions of all batch rows, B batch rows, Q new positions per batch row, K
key/value heads, G query heads per key head, E head size, S cached positions up to the last one that
any query attends to, R queries of a tile, which are (positions of the tile) * G.
"""

import numpy as np
import torch
from numba import carray

from infer.attention.kv_cache import LayerCacheView, PackedLayerView
from infer.attention.masks import AttentionMask
from infer.int8_cpu.float_matmul import (
    FLOAT_TILE_COLUMNS,
    FLOATS_PER_CPU_VECTOR,
    add_matmul,
    transpose,
)
from infer.kernels import reference
from infer.kernels.cpu import bits_to_float, copy_floats, exp, float_to_bits, order_preserving_bits
from infer.kernels.launch import (
    KERNEL_ARGUMENT_ADDRESS_TYPE,
    KERNEL_ARGUMENT_FLOAT_TYPE,
    KERNEL_ARGUMENT_INTEGER_TYPE,
    MIN_CYCLES_FOR_PARALLEL_CPU_KERNEL,
    KernelArguments,
    allocate_tensor,
    claim_work_item,
    float_pointer,
    int64_pointer,
    launch_kernel,
    make_argument_reader,
)
from infer.utils.jit import FASTMATH_KEEP_ORDER, njit

QUERY_TILE_POSITIONS = 16  # new positions of a batch row that are computed together
# Cached positions that are computed together. Their keys stay in the L1 cache, where all queries of
# a tile read them.
KEY_TILE_POSITIONS = 128


@njit(fastmath=FASTMATH_KEEP_ORDER)
def exponentiate_scores(
    scores: np.ndarray, mask: np.ndarray, sees_all: bool, scale: float, count: int
) -> None:
    """Scale and mask scores (S,), then replace each score by e^(score - highest score), in place.

    Only the first `count` scores are visible to the query; the other scores are replaced by 0. The
    additive mask (S,) is added to the scores after scaling, unless `sees_all` is set.
    """
    highest = np.int32(-(2**31))
    for j in range(count):
        scores[j] *= scale
    if not sees_all:
        for j in range(count):
            scores[j] += mask[j]
    for j in range(count):
        value = order_preserving_bits(float_to_bits(scores[j]))
        highest = value if value > highest else highest
    max_score = bits_to_float(order_preserving_bits(highest))
    for j in range(count):
        scores[j] = exp(scores[j] - max_score)
    for j in range(count, len(scores)):
        scores[j] = 0


@njit
def count_visible(mask: np.ndarray) -> int:
    """Return the number of positions up to the last one that an additive mask (S,) allows.

    The number is at least 1.
    """
    count = len(mask)
    while count > 1 and mask[count - 1] < 0:
        count -= 1
    return count


@njit
def round_up(number: int, multiple: int) -> int:
    """Round a number up to a multiple of `multiple`."""
    return (number + multiple - 1) // multiple * multiple


@njit
def fill_visible_lengths(
    mask: np.ndarray, sees_all: bool, positions: int, visible_counts: np.ndarray
) -> int:
    """Fill `visible_counts` (Q,) for the first `positions` new positions; return the largest count.

    A visible count is the number of cached positions up to the last one that the additive mask
    (Q, S) allows, or S if `sees_all` is set. Returns 0 if there are no new positions.
    """
    maximum = 0
    for i in range(positions):
        visible_counts[i] = mask.shape[1] if sees_all else count_visible(mask[i])
        maximum = max(maximum, visible_counts[i])
    return maximum


@njit
def find_row_range(row_ends: int, row: int, width: int) -> tuple[int, int]:
    """Return where the new positions of a batch row start among the N positions, and their number.

    row_ends: address of (B,) int64, the end of each batch row among the N positions; 0 if each
        batch row has `width` new positions
    """
    if row_ends == 0:
        return row * width, width
    first = int64_pointer(row_ends)[row - 1] if row > 0 else 0
    return first, int64_pointer(row_ends)[row] - first


@njit
def gather_queries(
    source: int,
    first: int,
    positions: int,
    key_heads: int,
    key_head: int,
    groups: int,
    queries: np.ndarray,
) -> None:
    """Copy the queries of one key head at consecutive new positions to `queries` (R, E).

    source: address of the queries of all heads, (N, K, G, E)
    first, positions: the first position to copy, and the number of positions
    """
    size = queries.shape[1]
    for i in range(positions):
        row = ((first + i) * key_heads + key_head) * groups
        copy_floats(source + 4 * size * row, queries[i * groups].ctypes.data, groups * size)


@njit
def write_averages(
    weighted_values: np.ndarray,
    weight_sums: np.ndarray,
    count: int,
    groups: int,
    out: np.ndarray,
    key_head: int,
) -> None:
    """Divide sums of weighted values by sums of weights; write the averages to `out` (N, K, G, E).

    weighted_values: (R, at least E), of which the first `count` rows are used
    weight_sums: (R, FLOAT_TILE_COLUMNS), of which the first column is used
    key_head: index of the key head in `out`
    """
    size = out.shape[3]
    for r in range(count):
        position = r // groups
        group = r % groups
        for e in range(size):
            out[position, key_head, group, e] = weighted_values[r, e] / weight_sums[r, 0]


@njit
def add_query_key_products(
    queries: np.ndarray,
    keys: int,
    position_bytes: int,
    count: int,
    transposed_keys: np.ndarray,
    scores: np.ndarray,
) -> None:
    """Add the dot products of queries (R, E) with the first `count` cached keys to scores (R, S).

    keys: address of the first key
    position_bytes: distance in bytes between the keys of two positions
    transposed_keys: scratch memory for KEY_TILE_POSITIONS transposed keys, with E rows of at least
        KEY_TILE_POSITIONS columns
    """
    rows, size = queries.shape
    tile_address = transposed_keys.ctypes.data
    tile_row_bytes = 4 * transposed_keys.shape[1]
    for position in range(0, count, KEY_TILE_POSITIONS):
        tile_keys = min(KEY_TILE_POSITIONS, count - position)
        source = keys + position * position_bytes
        transpose(source, position_bytes, tile_keys, size, tile_address, tile_row_bytes)
        add_matmul(
            queries.ctypes.data, 4 * size, rows, size,
            tile_address, tile_row_bytes, tile_keys,
            scores.ctypes.data + 4 * position, 4 * scores.shape[1],
        )  # fmt: skip


@njit
def add_row_sums(weights: np.ndarray, count: int, weight_sums: np.ndarray) -> None:
    """Add the first `count` weights of each row (R, S), in order, to its sum.

    weight_sums: (R, FLOAT_TILE_COLUMNS), output; all columns of a row have the same sum

    The sums are computed as a matmul with ones, which sums four rows at a time.
    """
    ones = np.ones(FLOAT_TILE_COLUMNS, np.float32)
    add_matmul(
        weights.ctypes.data, 4 * weights.shape[1], len(weights), count,
        ones.ctypes.data, 0, FLOAT_TILE_COLUMNS,
        weight_sums.ctypes.data, 4 * FLOAT_TILE_COLUMNS,
    )  # fmt: skip


@njit
def add_weighted_values(
    weights: np.ndarray,
    values: int,
    position_bytes: int,
    count: int,
    size: int,
    padded_values: np.ndarray,
    weighted_values: np.ndarray,
) -> None:
    """Multiply weights (R, S) by the first `count` cached values; add to weighted_values.

    values: address of the first value
    position_bytes: distance in bytes between the values of two positions
    size: head size
    padded_values: scratch memory (KEY_TILE_POSITIONS, padded head size), used if the head size is
        not a multiple of FLOAT_TILE_COLUMNS
    weighted_values: (R, padded head size), output
    """
    rows = len(weights)
    padded_size = weighted_values.shape[1]
    for position in range(0, count, KEY_TILE_POSITIONS):
        tile_positions = min(KEY_TILE_POSITIONS, count - position)
        source = values + position * position_bytes
        source_row_bytes = position_bytes
        if padded_size != size:
            for j in range(tile_positions):
                copy_floats(source + j * position_bytes, padded_values[j].ctypes.data, size)
            source = padded_values.ctypes.data
            source_row_bytes = 4 * padded_size
        add_matmul(
            weights.ctypes.data + 4 * position, 4 * weights.shape[1], rows, tile_positions,
            source, source_row_bytes, padded_size,
            weighted_values.ctypes.data, 4 * padded_size,
        )  # fmt: skip


class AttentionArguments(KernelArguments):
    """Arguments of `attention_kernel`."""

    _fields_ = [
        ("queries", KERNEL_ARGUMENT_ADDRESS_TYPE),  # (N, K, G, E)
        ("out", KERNEL_ARGUMENT_ADDRESS_TYPE),  # (N, K, G, E)
        # (B, capacity, K, E). The address is that of the first visible position.
        ("keys", KERNEL_ARGUMENT_ADDRESS_TYPE),
        ("values", KERNEL_ARGUMENT_ADDRESS_TYPE),  # like `keys`
        # (B, Q, S), added to the scores. 0 means that every query attends to all S positions.
        ("mask", KERNEL_ARGUMENT_ADDRESS_TYPE),
        # (B,) int64, the end of each batch row among the N positions. 0 means that each batch row
        # has Q positions.
        ("row_ends", KERNEL_ARGUMENT_ADDRESS_TYPE),
        ("batch_rows", KERNEL_ARGUMENT_INTEGER_TYPE),  # number of batch rows, B in shapes
        ("key_heads", KERNEL_ARGUMENT_INTEGER_TYPE),  # number of key/value heads, K in shapes
        ("groups", KERNEL_ARGUMENT_INTEGER_TYPE),  # query heads per key head, G in shapes
        ("head_size", KERNEL_ARGUMENT_INTEGER_TYPE),  # head size, E in shapes
        (
            "capacity",
            KERNEL_ARGUMENT_INTEGER_TYPE,
        ),  # positions that the cache has for each batch row
        ("visible", KERNEL_ARGUMENT_INTEGER_TYPE),  # number of visible positions, S in shapes
        ("width", KERNEL_ARGUMENT_INTEGER_TYPE),  # new positions per batch row, Q in shapes
        ("scale", KERNEL_ARGUMENT_FLOAT_TYPE),  # factor of the scores
    ]


read_attention_arguments = make_argument_reader(AttentionArguments)


@njit
def clear_rows(
    count: int, weights: np.ndarray, weighted_values: np.ndarray, weight_sums: np.ndarray
) -> None:
    """Set the first `count` rows of the scratch memory of a tile to 0."""
    weights[:count] = 0
    weighted_values[:count] = 0
    weight_sums[:count] = 0


@njit(fastmath=FASTMATH_KEEP_ORDER)
def attention_kernel(address: int) -> None:
    """Compute the attention of new positions over a cache. A work item is a tile: up to
    QUERY_TILE_POSITIONS positions of a batch row, with the query heads of one key head."""
    args = read_attention_arguments(address)
    # The fields are copied to variables, because the compiler must assume that every write to
    # memory can change the structure.
    batch_rows = args.batch_rows
    key_heads = args.key_heads
    groups = args.groups
    size = args.head_size
    capacity = args.capacity
    visible = args.visible
    width = args.width
    key_memory = args.keys
    value_memory = args.values
    row_ends = args.row_ends
    query_tiles = (width + QUERY_TILE_POSITIONS - 1) // QUERY_TILE_POSITIONS
    tile_queries = (width + query_tiles - 1) // query_tiles
    tile_rows = groups * tile_queries
    sees_all = args.mask == 0
    mask = carray(float_pointer(args.mask), (batch_rows, width, visible))
    out = carray(float_pointer(args.out), (batch_rows * width, key_heads, groups, size))
    padded_size = round_up(size, FLOAT_TILE_COLUMNS)
    # The rows have FLOATS_PER_CPU_VECTOR more columns than needed. Rows whose length is a power of
    # two would all start in the same few sets of the CPU cache.
    transposed_keys = np.zeros((size, KEY_TILE_POSITIONS + FLOATS_PER_CPU_VECTOR), np.float32)
    padded_values = np.zeros((KEY_TILE_POSITIONS, padded_size), np.float32)
    queries = np.empty((tile_rows, size), np.float32)
    weights = np.empty((tile_rows, round_up(visible, FLOAT_TILE_COLUMNS)), np.float32)
    weighted_values = np.empty((tile_rows, padded_size), np.float32)
    weight_sums = np.empty((tile_rows, FLOAT_TILE_COLUMNS), np.float32)
    visible_counts = np.empty(tile_queries, np.int64)  # see `fill_visible_lengths`
    position_bytes = 4 * key_heads * size
    item = claim_work_item(address)
    while item < batch_rows * key_heads * query_tiles:
        row = item // (key_heads * query_tiles)
        key_head = item // query_tiles % key_heads
        start = item % query_tiles * tile_queries
        first, row_width = find_row_range(row_ends, row, width)
        positions = max(0, min(tile_queries, row_width - start))
        count = positions * groups
        max_visible = fill_visible_lengths(mask[row, start:], sees_all, positions, visible_counts)
        gather_queries(args.queries, first + start, positions, key_heads, key_head, groups, queries)
        clear_rows(count, weights, weighted_values, weight_sums)
        row_offset = 4 * (row * capacity * key_heads + key_head) * size
        add_query_key_products(
            queries[:count], key_memory + row_offset, position_bytes, max_visible,
            transposed_keys, weights,
        )  # fmt: skip
        for r in range(count):
            row_mask = queries[0] if sees_all else mask[row, start + r // groups]
            scores = weights[r, : round_up(max_visible, FLOATS_PER_CPU_VECTOR)]
            exponentiate_scores(scores, row_mask, sees_all, args.scale, visible_counts[r // groups])
        add_row_sums(weights[:count], max_visible, weight_sums)
        add_weighted_values(
            weights[:count], value_memory + row_offset, position_bytes, max_visible, size,
            padded_values, weighted_values,
        )  # fmt: skip
        write_averages(weighted_values, weight_sums, count, groups, out[first + start :], key_head)
        item = claim_work_item(address)


def attend(
    queries: torch.Tensor,
    layer_cache: LayerCacheView | PackedLayerView,
    mask: AttentionMask,
    scale: float,
) -> torch.Tensor:
    """Implement `infer.kernels.reference.attend` with `attention_kernel`."""
    if not isinstance(layer_cache, LayerCacheView):
        return reference.attend(queries, layer_cache, mask, scale)
    queries = queries.contiguous()
    out = allocate_tensor((len(queries), queries.shape[1] * queries.shape[2]))
    batch_rows, key_heads, visible, head_size = layer_cache.keys.shape
    arguments = AttentionArguments(
        queries=queries,
        out=out,
        batch_rows=batch_rows,
        key_heads=key_heads,
        groups=queries.shape[1] // key_heads,
        head_size=head_size,
        scale=scale,
    )

    def bind(layer_cache: LayerCacheView, mask: AttentionMask) -> None:
        additive_mask = mask.for_grouped_heads(1, torch.float32)
        row_ends = layer_cache.cu_seqlens
        keys = layer_cache.keys
        arguments.keys = keys.data_ptr()
        arguments.values = layer_cache.values.data_ptr()
        arguments.mask = 0 if additive_mask is None else additive_mask.data_ptr()
        arguments.row_ends = 0 if row_ends is None else row_ends.data_ptr()
        arguments.capacity = keys.stride(0) // keys.stride(2)
        arguments.visible = keys.shape[2]
        arguments.width = layer_cache.query_length

    bind(layer_cache, mask)
    work_items = batch_rows * key_heads * -(-layer_cache.query_length // QUERY_TILE_POSITIONS)
    # More than MIN_CYCLES_FOR_PARALLEL_CPU_KERNEL, so that attention always runs on several
    # threads.
    cycles = max(queries.numel() * visible // 2, MIN_CYCLES_FOR_PARALLEL_CPU_KERNEL + 1)
    launch_kernel(attention_kernel, arguments, work_items, cycles, bind, (layer_cache, mask))
    return out

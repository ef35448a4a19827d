"""Attention in float32 with a fixed summation order.

Each sum adds one cached position after the other, from the first to the last. A masked position
adds exactly 0. The result for a query therefore depends only on the positions that the query
attends to, not on masked positions between them. The result for a token is bit-identical, whether
its sequence is processed alone, in a batch, or as a path of a draft tree.

Attention is computed in tiles of queries. A tile contains some new positions of a batch row, and
for each position the query heads that share one key head.
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

QUERY_TILE_POSITIONS = 16  # maximum number of new positions of a tile
# Number of cached keys that are transposed together. They fit in the L1 cache of the CPU, from
# which all queries of a tile read them.
KEY_TILE_POSITIONS = 128


@njit(fastmath=FASTMATH_KEEP_ORDER)
def exponentiate_scores(
    scores: np.ndarray, mask: np.ndarray, sees_all: bool, scale: float, count: int
) -> None:
    """Compute the attention weights of a query from its scores, in place, without normalisation.

    A weight is e^(score - highest score). Scores are first multiplied by `scale`. Then the additive
    mask is added to them, unless `sees_all` is true. Only the first `count` scores are used; the
    weights after them are set to 0.
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
def get_visible_length(mask: np.ndarray) -> int:
    """Return 1 + the index of the last position that an additive mask allows, at least 1."""
    count = len(mask)
    while count > 1 and mask[count - 1] < 0:
        count -= 1
    return count


@njit
def round_up(number: int, multiple: int) -> int:
    """Round a number up to the next multiple of `multiple`."""
    return (number + multiple - 1) // multiple * multiple


@njit
def fill_visible_lengths(
    mask: np.ndarray, sees_all: bool, positions: int, visible_lengths: np.ndarray
) -> int:
    """Compute how many cached positions each new position must read; return the largest number.

    mask: additive mask (new positions, cached positions)
    sees_all: whether the mask is ignored, so that each new position reads all cached positions
    positions: number of new positions, 0 or more
    visible_lengths: output: for each new position, 1 + the index of the last cached position that
        its mask allows
    """
    maximum = 0
    for i in range(positions):
        visible_lengths[i] = mask.shape[1] if sees_all else get_visible_length(mask[i])
        maximum = max(maximum, visible_lengths[i])
    return maximum


@njit
def find_row_start_and_length(row_ends: int, row: int, width: int) -> tuple[int, int]:
    """Return where the new positions of a batch row start, and how many there are.

    The start is an index into the new positions of all batch rows, one batch row after the other.

    row_ends: address of (batch rows,) int64, the index after the last position of each batch row; 0
        if each batch row has `width` new positions
    """
    if row_ends == 0:
        return row * width, width
    first = int64_pointer(row_ends)[row - 1] if row > 0 else 0
    return first, int64_pointer(row_ends)[row] - first


@njit
def gather_queries(
    source: int,
    first: int,
    num_positions: int,
    key_heads: int,
    key_head: int,
    groups: int,
    queries: np.ndarray,
) -> None:
    """Copy the queries of consecutive new positions for one key head to `queries`.

    source: address of all queries, (new positions, key_heads, groups, head size)
    first, num_positions: index of the first position, and number of positions
    groups: number of query heads per key head
    queries: output, (at least positions * groups, head size)
    """
    size = queries.shape[1]
    for i in range(num_positions):
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
    """Divide the sums of weighted values of a tile (some queries) by the sums of the attention
    weights, and write the result to `out`.

    weighted_values: (queries, at least head size)
    weight_sums: (queries, columns); all columns are equal
    count: number of queries of the tile
    groups: number of query heads per key head
    out: (new positions, key heads, groups, head size), starting with the tile's first position
    key_head: index of the tile's key head
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
    """Add the dot products of queries with the first `count` cached keys to `scores`.

    queries: (queries, head size)
    keys: address of the first key
    position_bytes: distance in bytes between the keys of two positions
    transposed_keys: scratch memory (head size, at least KEY_TILE_POSITIONS)
    scores: (queries, at least count), output
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
    """Add the first `count` weights of each row of `weights` to the row's sum, in order.

    weights: (queries, at least count)
    weight_sums: (queries, FLOAT_TILE_COLUMNS), output; all columns have the same sums

    A matmul with ones computes the sums of four rows at a time.
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
    """Multiply attention weights by the first `count` cached values; add to `weighted_values`.

    weights: (queries, at least count)
    values: address of the first value
    position_bytes: distance in bytes between the values of two positions
    size: head size
    padded_values: scratch memory (KEY_TILE_POSITIONS, padded head size), used if the head size is
        not a multiple of FLOAT_TILE_COLUMNS
    weighted_values: (queries, padded head size), output
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
        # (new positions, key_heads, groups, head_size)
        ("queries", KERNEL_ARGUMENT_ADDRESS_TYPE),
        ("out", KERNEL_ARGUMENT_ADDRESS_TYPE),  # output, in the shape of `queries`
        # (batch_rows, capacity, key_heads, head_size): the cached keys, from the first position on
        # that a query may attend to.
        ("keys", KERNEL_ARGUMENT_ADDRESS_TYPE),
        ("values", KERNEL_ARGUMENT_ADDRESS_TYPE),  # the cached values, in the shape of `keys`
        # (batch_rows, width, visible), added to the scores. The address 0 means no mask.
        ("mask", KERNEL_ARGUMENT_ADDRESS_TYPE),
        # (batch_rows,) int64: the index after the last new position of each batch row, counted over
        # all batch rows. The address 0 means that each batch row has `width` new positions.
        ("row_ends", KERNEL_ARGUMENT_ADDRESS_TYPE),
        ("batch_rows", KERNEL_ARGUMENT_INTEGER_TYPE),  # number of batch rows
        ("key_heads", KERNEL_ARGUMENT_INTEGER_TYPE),  # number of key/value heads
        ("groups", KERNEL_ARGUMENT_INTEGER_TYPE),  # number of query heads per key head
        ("head_size", KERNEL_ARGUMENT_INTEGER_TYPE),  # number of features of a head
        ("capacity", KERNEL_ARGUMENT_INTEGER_TYPE),  # number of cache slots of each batch row
        # number of positions in the cache, including the new ones
        ("visible", KERNEL_ARGUMENT_INTEGER_TYPE),
        ("width", KERNEL_ARGUMENT_INTEGER_TYPE),  # maximum number of new positions per batch row
        ("scale", KERNEL_ARGUMENT_FLOAT_TYPE),  # factor by which the scores are multiplied
    ]


read_attention_arguments = make_argument_reader(AttentionArguments)


@njit
def clear_rows(
    count: int, weights: np.ndarray, weighted_values: np.ndarray, weight_sums: np.ndarray
) -> None:
    """Set the first `count` rows of three arrays to 0. Each row belongs to a query."""
    weights[:count] = 0
    weighted_values[:count] = 0
    weight_sums[:count] = 0


@njit(fastmath=FASTMATH_KEEP_ORDER)
def attention_kernel(address: int) -> None:
    """Compute the attention of new positions over a KV cache. Each work item is a tile of queries,
    which the module docstring explains."""
    args = read_attention_arguments(address)
    # The fields are copied to variables. Otherwise the compiler would read them again after every
    # write to memory, because it cannot exclude that the write changes the structure.
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
    # The rows have FLOATS_PER_CPU_VECTOR more columns than needed, because rows whose length is a
    # power of two would compete for the same sets of the CPU cache.
    transposed_keys = np.zeros((size, KEY_TILE_POSITIONS + FLOATS_PER_CPU_VECTOR), np.float32)
    padded_values = np.zeros((KEY_TILE_POSITIONS, padded_size), np.float32)
    queries = np.empty((tile_rows, size), np.float32)
    weights = np.empty((tile_rows, round_up(visible, FLOAT_TILE_COLUMNS)), np.float32)
    weighted_values = np.empty((tile_rows, padded_size), np.float32)
    weight_sums = np.empty((tile_rows, FLOAT_TILE_COLUMNS), np.float32)
    visible_counts = np.empty(tile_queries, np.int64)
    position_bytes = 4 * key_heads * size
    item = claim_work_item(address)
    while item < batch_rows * key_heads * query_tiles:
        row = item // (key_heads * query_tiles)
        key_head = item // query_tiles % key_heads
        start = item % query_tiles * tile_queries
        first, row_width = find_row_start_and_length(row_ends, row, width)
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
    """Implement `infer.kernels.reference.attend`: with `attention_kernel` if `layer_cache` is a
    layer of a KV cache, otherwise (packed sequences) in PyTorch."""
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
    # The minimum is so large that attention always runs on several threads.
    cycles = max(queries.numel() * visible // 2, MIN_CYCLES_FOR_PARALLEL_CPU_KERNEL + 1)
    launch_kernel(attention_kernel, arguments, work_items, cycles, bind, (layer_cache, mask))
    return out

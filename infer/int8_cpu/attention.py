"""Attention in float32 with a fixed summation order.

Sums run from the first cached position to the last, one by one, and a masked position adds exactly
0. So a query's result depends only on the positions that it sees, not on where these are in the
cache or what is between them: it is bit-identical for a sequence alone, in a draft tree and in a
batch.

N new positions of B batch rows, Q new positions per batch row, K key/value heads, G query heads per
key head, E head size, S visible positions, R = (positions of a tile) * G.
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
from infer.kernels.cpu import (
    bits_to_float,
    copy_floats,
    exp,
    float_to_bits,
    order_preserving_bits,
)
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

QUERY_TILE_POSITIONS = 16  # positions of a batch row whose queries are computed together
# Cached positions that are computed together: their keys stay in the L1 cache until the second use.
KEY_TILE_POSITIONS = 128


@njit(fastmath=FASTMATH_KEEP_ORDER)
def exponentiate_scores(
    scores: np.ndarray, mask: np.ndarray, sees_all: bool, scale: float, count: int
) -> None:
    """Replace the first `count` scores (S,) by e^(score - maximum), and the others by 0.

    Scores are scaled first; unless `sees_all`, an additive mask (S,) is added.
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
    """Return the number of positions up to the last one that an additive mask (S,) allows, at least
    1."""
    count = len(mask)
    while count > 1 and mask[count - 1] < 0:
        count -= 1
    return count


@njit
def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `number`."""
    return (number + multiple - 1) // multiple * multiple


@njit
def fill_visible_lengths(
    mask: np.ndarray, sees_all: bool, positions: int, visible_counts: np.ndarray
) -> int:
    """Fill visible_counts (Q,) for the first `positions` queries under an additive mask (Q, S):
    the number of positions up to the last one that a query sees. Return the maximum, at least 0."""
    maximum = 0
    for i in range(positions):
        visible_counts[i] = mask.shape[1] if sees_all else count_visible(mask[i])
        maximum = max(maximum, visible_counts[i])
    return maximum


@njit
def find_row_range(row_ends: int, row: int, width: int) -> tuple[int, int]:
    """Return the first of the N positions that belongs to a batch row, and the number of its
    positions. row_ends: address of (B,) int64, 0 if each row has `width` positions."""
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
    """Copy the queries of one key head at positions first .. first + positions - 1 from (N, K, G,
    E) at the address `source` to queries (R, E)."""
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
    """Write the first `count` rows of weighted_values (R, ..), divided by weight_sums (R, ..), to
    out (N, K, G, E)."""
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

    keys: address of the first key; position_bytes: distance between keys. transposed_keys (E,
    KEY_TILE_POSITIONS + ..) is scratch memory for KEY_TILE_POSITIONS keys at a time.
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
    """Add the first `count` weights of each row (R, S), in order, to weight_sums (R, FLOAT_TILE_COLUMNS).

    It is a matmul with ones, so that four rows are summed at a time.
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
    """Add the first `count` cached values (E,), times weights (R, S), to weighted_values (R, padded
    E).

    values: address of the first value; position_bytes: distance between values. padded_values
    (KEY_TILE_POSITIONS, padded E) is scratch memory for values whose size is not a multiple of
    FLOAT_TILE_COLUMNS.
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
        (
            "keys",
            KERNEL_ARGUMENT_ADDRESS_TYPE,
        ),  # (B, capacity, K, E), from the first visible position on
        ("values", KERNEL_ARGUMENT_ADDRESS_TYPE),
        (
            "mask",
            KERNEL_ARGUMENT_ADDRESS_TYPE,
        ),  # (B, Q, S) additive; 0: every query sees all S positions
        # (B,) int64: end of each batch row among the N positions; 0: each has Q positions
        ("row_ends", KERNEL_ARGUMENT_ADDRESS_TYPE),
        ("batch_rows", KERNEL_ARGUMENT_INTEGER_TYPE),  # B
        ("key_heads", KERNEL_ARGUMENT_INTEGER_TYPE),  # K
        ("groups", KERNEL_ARGUMENT_INTEGER_TYPE),  # G
        ("head_size", KERNEL_ARGUMENT_INTEGER_TYPE),  # E
        ("capacity", KERNEL_ARGUMENT_INTEGER_TYPE),  # positions of a batch row in the cache
        ("visible", KERNEL_ARGUMENT_INTEGER_TYPE),  # S
        ("width", KERNEL_ARGUMENT_INTEGER_TYPE),  # Q
        ("scale", KERNEL_ARGUMENT_FLOAT_TYPE),
    ]


read_attention_arguments = make_argument_reader(AttentionArguments)


@njit(fastmath=FASTMATH_KEEP_ORDER)
def attention_kernel(address: int) -> None:
    """Compute attention. A work item is up to QUERY_TILE_POSITIONS positions of a batch row and the
    query heads of one key head."""
    args = read_attention_arguments(address)
    # Copies of the fields: the compiler must assume that a write to memory changes the structure.
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
    # The padding of FLOATS_PER_CPU_VECTOR columns spreads the starts of rows over the sets of the CPU cache.
    transposed_keys = np.zeros((size, KEY_TILE_POSITIONS + FLOATS_PER_CPU_VECTOR), np.float32)
    padded_values = np.zeros((KEY_TILE_POSITIONS, padded_size), np.float32)
    queries = np.empty((tile_rows, size), np.float32)
    weights = np.empty((tile_rows, round_up(visible, FLOAT_TILE_COLUMNS)), np.float32)
    weighted_values = np.empty((tile_rows, padded_size), np.float32)
    weight_sums = np.empty((tile_rows, FLOAT_TILE_COLUMNS), np.float32)
    visible_counts = np.empty(tile_queries, np.int64)  # up to the last position a query sees
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
        weights[:count] = 0
        weighted_values[:count] = 0
        weight_sums[:count] = 0
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
    """Implement `infer.kernels.reference.attend`."""
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
    # Attention always runs on several threads.
    cycles = max(queries.numel() * visible // 2, MIN_CYCLES_FOR_PARALLEL_CPU_KERNEL + 1)
    launch_kernel(attention_kernel, arguments, work_items, cycles, bind, (layer_cache, mask))
    return out

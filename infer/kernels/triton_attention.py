"""Triton kernels for the attention of draft-tree nodes over a KV cache.

Queries are read and results are written in the layout of a layer's matmuls, position by position.
Keys and values are read once for all query heads that share them. For each batch row, they are read
only up to the last node. The number of cached positions of a batch row is read from GPU memory. The
mask between the nodes is stored in memory. The mask of the cached positions is computed from the
first position that each query attends to.

As in FlashDecoding, the keys are divided into splits. A program of the first kernel computes a tile
of queries over one split. The second kernel combines the results of the splits. Launch grids do not
depend on the number of cached positions, so both kernels can be recorded in a CUDA graph.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from infer.attention.masks import AttentionMask

# The keys are divided into splits until there are about this many programs: two for each of the 132
# multiprocessors of an H200.
WANTED_TRITON_ATTENTION_PROGRAMS = 264
MAX_TRITON_ATTENTION_KEY_SPLITS = 32
# Larger tiles of keys do not fit in shared memory.
MAX_TRITON_ATTENTION_KEY_TILE_BYTES = 2**15


class AttentionTile(NamedTuple):
    """The queries and keys that a program computes together, and how it is compiled."""

    queries: int
    keys: int
    warps: int
    stages: int  # number of tiles of keys that are loaded ahead


# These tiles were the fastest on an H200 (docs/results/gpu.md).
FEW_QUERIES_TILE = AttentionTile(queries=16, keys=64, warps=4, stages=3)
MANY_QUERIES_TILE = AttentionTile(queries=32, keys=64, warps=4, stages=3)


@triton.jit
def _find_query_row(head, query_index, num_nodes, num_queries, key_heads):
    # A position's query heads are adjacent, first those of the first key head.
    position = head // key_heads * num_nodes + query_index % num_nodes
    key_head_row = position * key_heads + head % key_heads
    query_row = key_head_row * (num_queries // num_nodes) + query_index // num_nodes
    return query_row.to(tl.int64)


@triton.jit(do_not_specialize=["num_nodes", "num_queries", "key_splits", "tree_mask_stride"])
def _attend_split(
    query, key, value, cache_lengths, tree_mask, first_visible, partial_out, partial_stats,
    scale, num_nodes, num_queries, key_splits, key_heads,
    row_stride, head_stride, slot_stride, tree_mask_stride, E: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # `head` is the index of a key head among the key heads of all batch rows.
    head = tl.program_id(0)
    split = tl.program_id(2)
    row = head // key_heads
    query_index = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    node = query_index % num_nodes
    feature = tl.arange(0, BLOCK_E)
    is_query = query_index < num_queries
    is_feature = feature < E
    query_row = _find_query_row(head, query_index, num_nodes, num_queries, key_heads)
    q_mask = is_query[:, None] & is_feature
    q = tl.load(query + query_row[:, None] * E + feature, mask=q_mask, other=0.0)
    cache_length = tl.load(cache_lengths + row)
    first_slot = tl.load(first_visible + row * num_nodes + node, mask=is_query, other=cache_length)
    key_start = tl.maximum(tl.minimum(tl.min(first_slot, 0), cache_length), 0) // BLOCK_K * BLOCK_K
    key_end = cache_length + num_nodes
    split_keys = tl.cdiv(tl.cdiv(key_end - key_start, key_splits), BLOCK_K) * BLOCK_K
    key_start += split * split_keys
    key_end = tl.minimum(key_start + split_keys, key_end)
    head_offset = row.to(tl.int64) * row_stride + (head % key_heads) * head_stride

    running_max = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_Q], tl.float32)
    accumulator = tl.zeros([BLOCK_Q, BLOCK_E], tl.float32)
    for tile_start in range(key_start, key_end, BLOCK_K):
        slot = tile_start + tl.arange(0, BLOCK_K)
        is_key = slot < key_end
        key_node = slot - cache_length  # the draft-tree node of a key; negative if cached earlier
        offset = head_offset + slot[:, None] * slot_stride + feature
        k = tl.load(key + offset, mask=is_key[:, None] & is_feature, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        visible = is_key & (key_node < 0) & (slot >= first_slot[:, None])
        if tile_start + BLOCK_K > cache_length:  # the tile contains keys of draft-tree nodes
            is_node_pair = is_query[:, None] & is_key & (key_node >= 0)
            pair_pointers = (
                tree_mask + row * tree_mask_stride + node[:, None] * num_nodes + key_node
            )
            tree_visible = tl.load(pair_pointers, mask=is_node_pair, other=0)
            visible = visible | (tree_visible != 0)
        scores = tl.where(visible, scores, -float("inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        finite_max = tl.where(new_max == -float("inf"), 0.0, new_max)
        weights = tl.exp(scores - finite_max[:, None])
        rescale = tl.exp(running_max - finite_max)
        v = tl.load(value + offset, mask=is_key[:, None] & is_feature, other=0.0)
        accumulator = accumulator * rescale[:, None] + tl.dot(
            weights.to(v.dtype), v, input_precision=PRECISION
        )
        running_sum = running_sum * rescale + tl.sum(weights, 1)
        running_max = new_max
    out_row = (head * key_splits + split) * num_queries + query_index
    tl.store(partial_out + out_row[:, None] * E + feature, accumulator, mask=q_mask)
    tl.store(partial_stats + out_row * 2, running_max, mask=is_query)
    tl.store(partial_stats + out_row * 2 + 1, running_sum, mask=is_query)


@triton.jit(do_not_specialize=["num_nodes", "num_queries", "key_splits"])
def _combine_splits(
    partial_out, partial_stats, out, num_nodes, num_queries, key_splits, key_heads,
    E: tl.constexpr, BLOCK_E: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    query_index = tl.program_id(0)
    head = tl.program_id(1)
    out_row = _find_query_row(head, query_index, num_nodes, num_queries, key_heads)
    split = tl.arange(0, MAX_SPLITS)
    feature = tl.arange(0, BLOCK_E)
    is_split = split < key_splits
    partial_row = (head * key_splits + split) * num_queries + query_index
    split_max = tl.load(partial_stats + partial_row * 2, mask=is_split, other=-float("inf"))
    weight = tl.exp(split_max - tl.max(split_max, 0))
    split_sum = tl.load(partial_stats + partial_row * 2 + 1, mask=is_split, other=0.0)
    total = tl.sum(weight * split_sum, 0)
    split_out = tl.load(
        partial_out + partial_row[:, None] * E + feature,
        mask=is_split[:, None] & (feature < E),
        other=0.0,
    )
    tl.store(
        out + out_row * E + feature,
        tl.sum(split_out * weight[:, None], 0) / total,
        mask=feature < E,
    )


def tree_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: AttentionMask,
    scale: float,
) -> torch.Tensor:
    """Return the attention of draft-tree nodes over a KV cache, (B * nodes, heads * head size).

    queries: (B * nodes, heads, head size), contiguous
    keys, values: (B, key heads, cache capacity, head size), views of a cache
    mask: a mask from `infer.attention.masks.build_tree_mask`
    """
    positions, query_heads, head_size = queries.shape
    rows, heads = keys.shape[:2]
    tree_mask = mask.new_key_mask
    assert tree_mask is not None
    num_nodes = tree_mask.shape[-1]
    num_queries = query_heads // heads * num_nodes
    assert keys.stride() == values.stride() and keys.stride(-1) == 1
    assert tree_mask.stride()[1:] == (num_nodes, 1)
    assert queries.is_contiguous()

    tile = FEW_QUERIES_TILE if num_queries <= FEW_QUERIES_TILE.queries else MANY_QUERIES_TILE
    block_e = max(16, triton.next_power_of_2(head_size))
    max_keys = MAX_TRITON_ATTENTION_KEY_TILE_BYTES // (block_e * queries.element_size())
    block_k = min(tile.keys, max_keys)

    query_tiles = triton.cdiv(num_queries, tile.queries)
    key_tiles = triton.cdiv(keys.shape[2], block_k)
    wanted_splits = WANTED_TRITON_ATTENTION_PROGRAMS // (rows * heads * query_tiles)
    key_splits = max(1, min(MAX_TRITON_ATTENTION_KEY_SPLITS, wanted_splits, key_tiles))

    split_shape = (rows * heads, key_splits, num_queries)
    partial_out = queries.new_empty(*split_shape, head_size, dtype=torch.float32)
    # For each split and query: the maximum score, and the sum of e^(score - maximum score).
    partial_stats = queries.new_empty(*split_shape, 2, dtype=torch.float32)
    tree_mask_stride = tree_mask.stride(0) if len(tree_mask) > 1 else 0
    precision = "ieee" if queries.dtype == torch.float32 else "tf32"
    _attend_split[rows * heads, query_tiles, key_splits](
        queries, keys, values, mask.cached_lengths, tree_mask.view(torch.uint8),
        mask.key_ranges[0][0].contiguous(), partial_out, partial_stats,
        scale, num_nodes, num_queries, key_splits, heads, *keys.stride()[:3], tree_mask_stride,
        E=head_size, BLOCK_E=block_e, BLOCK_Q=tile.queries, BLOCK_K=block_k, PRECISION=precision,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    out = queries.new_empty(positions, query_heads * head_size)
    _combine_splits[num_queries, rows * heads](
        partial_out, partial_stats, out, num_nodes, num_queries, key_splits, heads,
        E=head_size, BLOCK_E=block_e, MAX_SPLITS=triton.next_power_of_2(key_splits), num_warps=1,
    )  # fmt: skip
    return out

"""Attention of new positions over a cache whose lengths only the device knows, in Triton: the
kernel of `tree_mask`.

Keys and values are read once for all the query heads that share them, never repeated, and no
further than a row's length. Of a mask only what the new positions see of each other is in memory.
One program takes a tile of queries and a part of the keys (as in FlashDecoding); a second kernel
joins the parts. No shape, and so no program and no plan, depends on a length.

B rows, K key heads, G query heads of each, Q new positions, S capacity, E head size.
"""

import torch
import triton
import triton.language as tl

from infer.attention.masks import Mask

PROGRAMS = 264  # two for each of an H200's multiprocessors
PARTS = 32  # of the keys, at most


@triton.jit(do_not_specialize=["nodes", "queries", "parts", "inside_stride"])
def _attend(
    query, key, value, ends, inside, nearest, out, stats,
    scale, nodes, queries, parts, key_heads, row_stride, head_stride, slot_stride, inside_stride,
    E: tl.constexpr, WIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # head: row * K + key head
    head = tl.program_id(0)
    part = tl.program_id(2)
    row = head // key_heads
    at = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    node = at % nodes
    entry = tl.arange(0, WIDE)
    ours = at < queries
    real = entry < E
    q = tl.load(
        query + (head * queries + at[:, None]) * E + entry, mask=ours[:, None] & real, other=0.0
    )
    end = tl.load(ends + row)
    low = tl.load(nearest + row * nodes + node, mask=ours, other=end)
    first = tl.maximum(tl.minimum(tl.min(low, 0), end), 0) // KEYS * KEYS
    total = end + nodes
    share = tl.cdiv(tl.cdiv(total - first, parts), KEYS) * KEYS
    first += part * share
    last = tl.minimum(first + share, total)
    cached = row.to(tl.int64) * row_stride + (head % key_heads) * head_stride

    highest = tl.full([QUERIES], -float("inf"), tl.float32)
    total_weight = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, WIDE], tl.float32)
    for begin in range(first, last, KEYS):
        slot = begin + tl.arange(0, KEYS)
        there = slot < last
        new = slot - end
        offset = cached + slot[:, None] * slot_stride + entry
        k = tl.load(key + offset, mask=there[:, None] & real, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        seen = there & (new < 0) & (slot >= low[:, None])
        if begin + KEYS > end:  # new positions among them
            among = ours[:, None] & there & (new >= 0)
            told = tl.load(
                inside + row * inside_stride + node[:, None] * nodes + new, mask=among, other=0
            )
            seen = seen | (told != 0)
        scores = tl.where(seen, scores, -float("inf"))
        now = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(now == -float("inf"), 0.0, now)
        weights = tl.exp(scores - base[:, None])
        fade = tl.exp(highest - base)
        v = tl.load(value + offset, mask=there[:, None] & real, other=0.0)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        total_weight = total_weight * fade + tl.sum(weights, 1)
        highest = now
    to = (head * parts + part) * queries + at
    tl.store(out + to[:, None] * E + entry, mixed, mask=ours[:, None] & real)
    tl.store(stats + to * 2, highest, mask=ours)
    tl.store(stats + to * 2 + 1, total_weight, mask=ours)


@triton.jit(do_not_specialize=["queries", "parts"])
def _join(
    partial, stats, out, queries, parts, E: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr
):
    at = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.arange(0, PARTS)
    entry = tl.arange(0, WIDE)
    there = part < parts
    place = (head * parts + part) * queries + at
    highest = tl.load(stats + place * 2, mask=there, other=-float("inf"))
    weight = tl.exp(highest - tl.max(highest, 0))
    total = tl.sum(weight * tl.load(stats + place * 2 + 1, mask=there, other=0.0), 0)
    mixed = tl.load(
        partial + place[:, None] * E + entry, mask=there[:, None] & (entry < E), other=0.0
    )
    tl.store(
        out + (head * queries + at) * E + entry,
        tl.sum(mixed * weight[:, None], 0) / total,
        mask=entry < E,
    )


def tree_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: Mask, scale: float
) -> torch.Tensor:
    """Return the attention (B, K, G Q, E) of packed queries (B, K, G Q, E) over keys and values (B,
    K, S, E), views of a cache, under a mask of Q new positions."""
    rows, heads, count, size = queries.shape
    nodes = mask.inside.shape[-1]
    assert (
        keys.stride() == values.stride()
        and keys.stride(-1) == 1
        and mask.inside.stride()[1:] == (nodes, 1)
    )
    queries = queries.contiguous()
    # queries and keys that a program looks at together: what an H200 is fastest with
    # (docs/results/gpu.md)
    tile, together, warps, stages = (16, 64, 4, 3) if count <= 16 else (64, 128, 8, 2)
    wide = max(16, triton.next_power_of_2(size))
    together = min(
        together, 2**15 // (wide * queries.element_size())
    )  # keys of 32 KB: shared memory holds no more
    tiles = triton.cdiv(count, tile)
    parts = max(
        1, min(PARTS, PROGRAMS // (rows * heads * tiles), triton.cdiv(keys.shape[2], together))
    )
    partial = queries.new_empty(rows * heads, parts, count, size, dtype=torch.float32)
    stats = queries.new_empty(rows * heads, parts, count, 2, dtype=torch.float32)
    _attend[rows * heads, tiles, parts](
        queries, keys, values, mask.ends, mask.inside.view(torch.uint8), mask.ranges[0][0].contiguous(), partial, stats,
        scale, nodes, count, parts, heads, *keys.stride()[:3],
        mask.inside.stride(0) if len(mask.inside) > 1 else 0,
        E=size, WIDE=wide, QUERIES=tile, KEYS=together, PRECISION="ieee" if queries.dtype == torch.float32 else "tf32",
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    out = torch.empty_like(queries)
    _join[count, rows * heads](partial, stats, out, count, parts, E=size, WIDE=wide, PARTS=PARTS)
    return out

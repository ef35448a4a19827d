"""Attention masks of training, of packed rows and of decoding with a cache, in one representation.

B batch rows, N anchors, W queries per block, T packed context length, Q queries, S keys, H query
heads, H' key heads, G = H / H', E head size.

A query can attend to the keys in some ranges (`AttentionMask.key_ranges`) and, in decoding, to
those new positions that `AttentionMask.new_key_mask` allows.

- Training (`build_training_mask`): the queries of a packed row are N blocks of W positions, and the
  keys are [T context positions | N * W block positions]. A query attends to one range of the
  context and to one range of its own block. This is the prefix-shared mask of DART, section 3.2 and
  figure 4, applied to DFlash blocks: the context features strictly before the anchor, and the
  block.
- Packed documents (`build_packed_mask`): a position attends to one range.
- Decoding (`build_tree_mask`, `build_draft_mask`): a position attends to one range of the cache and
  to its ancestors in the tree, or to other positions of its block.

`attention` in `infer.kernels` selects how a mask is evaluated: by chunks of queries, densely, by
FlexAttention or in Triton.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

QUERIES_PER_MASK_CHUNK = 64  # queries of a `MaskChunk`
FLEX_TILE_SIZE = 128  # queries, and keys, of a tile of FlexAttention's block masks
# The keys from `start` up to, but not including, `end` of every query: (B, Q) int64 each.
KeyRange = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class MaskChunk:
    """Consecutive queries of one row, and the mask of the keys that at least one of them attends
    to."""

    batch_row: int
    query_slice: slice
    key_slices: list[slice]  # together they contain all keys that the queries attend to
    additive_mask: torch.Tensor  # (queries, keys in key_slices) float32, see `to_additive_mask`

    def gather(self, states: torch.Tensor) -> torch.Tensor:
        """Select the chunk's keys, or values, from those of all rows: (B, H', S, E) -> (H', keys in
        key_slices, E)."""
        slices = [states[self.batch_row, :, key_slice] for key_slice in self.key_slices]
        if len(slices) == 1:
            return slices[0]
        return torch.cat(slices, dim=1)

    def scatter_add(self, states: torch.Tensor, update: torch.Tensor) -> None:
        """Add update (H', keys in key_slices, E) in place to the chunk's keys of states (B, H', S,
        E)."""
        sizes = [key_slice.stop - key_slice.start for key_slice in self.key_slices]
        updates = update.split(sizes, dim=1)
        for key_slice, slice_update in zip(self.key_slices, updates, strict=True):
            states[self.batch_row, :, key_slice] += slice_update


@dataclass(frozen=True)
class AttentionMask:
    """Which of `num_keys` keys Q queries of every row attend to: those in one of their ranges, and
    those new positions that `new_key_mask` allows. In decoding the queries are the new positions,
    and their keys follow the first `cached_lengths` keys of the row. Each form of the mask is
    computed once, on first use."""

    num_keys: int  # S
    key_ranges: Sequence[KeyRange]  # one or two
    cached_lengths: torch.Tensor | None = None  # (B,) int64
    new_key_mask: torch.Tensor | None = None  # (B or 1, Q, Q) bool
    sees_all_keys: bool = False  # known on the host: every query attends to every key
    grouped_masks: dict[tuple[int, torch.dtype], torch.Tensor] = field(
        default_factory=dict
    )  # cache of `for_grouped_heads`

    @cached_property
    def dense(self) -> torch.Tensor:
        """Return the mask as (B, 1, Q, S) bool. All other forms are tested against it."""
        range_start = self.key_ranges[0][0]
        allowed = keys_in_ranges(
            self.key_ranges, torch.arange(self.num_keys, device=range_start.device)
        )
        if self.new_key_mask is not None and self.cached_lengths is not None:
            count = self.new_key_mask.shape[-1]
            offsets = torch.arange(count, device=self.cached_lengths.device)
            new_keys = self.cached_lengths[:, None] + offsets  # (B, Q)
            allowed.scatter_(
                2,
                new_keys[:, None].expand(-1, count, -1),
                self.new_key_mask.expand(len(new_keys), -1, -1),
            )
        return allowed[:, None]

    def for_grouped_heads(self, groups: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the additive mask for queries packed by key head: the queries of G = `groups`
        heads are concatenated, (B, 1, G Q, S). None if every query attends to every key."""
        if self.sees_all_keys:
            return None
        key = (groups, dtype)
        if key not in self.grouped_masks:
            mask = to_additive_mask(self.dense, dtype)
            self.grouped_masks[key] = torch.cat([mask] * groups, 2)
        return self.grouped_masks[key]

    @cached_property
    def chunks(self) -> list[MaskChunk]:
        """Return the mask by chunks of queries, without the keys that no query of a chunk attends
        to, which are most keys."""
        chunks = []
        rows, queries = self.key_ranges[0][0].shape
        for row, first in product(range(rows), range(0, queries, QUERIES_PER_MASK_CHUNK)):
            query_slice = slice(first, min(first + QUERIES_PER_MASK_CHUNK, queries))
            ranges = [
                (starts[row : row + 1, query_slice], ends[row : row + 1, query_slice])
                for starts, ends in self.key_ranges
            ]
            edges = [(int(starts.min()), int(ends.max())) for starts, ends in ranges]
            key_slices = [slice(start, end) for start, end in edges if start < end]
            device = ranges[0][0].device
            keys = torch.cat(
                [
                    torch.arange(key_slice.start, key_slice.stop, device=device)
                    for key_slice in key_slices
                ]
            )
            mask = to_additive_mask(keys_in_ranges(ranges, keys)[0], torch.float32)
            chunks.append(MaskChunk(row, query_slice, key_slices, mask))
        return chunks

    @cached_property
    def flex_block_mask(self) -> "BlockMask":
        """Return the ranges as FlexAttention's block mask: which tiles of queries and keys it
        computes, and in which of them every query attends to every key.

        It is derived from the ends of the ranges. No (Q, S) mask is evaluated, and no program is
        compiled for it.
        """
        from torch.nn.attention.flex_attention import BlockMask

        ranges = self.key_ranges
        partial_tiles = []
        full_tiles = []
        for starts, ends in ranges:
            partial, full = _find_partial_and_full_tiles(starts, ends, self.num_keys)
            partial_tiles.append(partial)
            full_tiles.append(full)
        full = torch.stack(full_tiles).any(0)[:, None]  # (B, 1, query tiles, key tiles)
        partial = torch.stack(partial_tiles).any(0)[:, None] & ~full

        def mask_mod(
            b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
        ) -> torch.Tensor:
            allowed = [(starts[b, q] <= kv) & (kv < ends[b, q]) for starts, ends in ranges]
            return allowed[0] if len(allowed) == 1 else allowed[0] | allowed[1]

        kv_num_blocks, kv_indices = _build_tile_table(partial)
        full_kv_num_blocks, full_kv_indices = _build_tile_table(full)
        q_num_blocks, q_indices = _build_tile_table(partial.transpose(-1, -2))
        full_q_num_blocks, full_q_indices = _build_tile_table(full.transpose(-1, -2))
        return BlockMask(
            seq_lengths=(ranges[0][0].shape[1], self.num_keys),
            kv_num_blocks=kv_num_blocks,
            kv_indices=kv_indices,
            full_kv_num_blocks=full_kv_num_blocks,
            full_kv_indices=full_kv_indices,
            q_num_blocks=q_num_blocks,
            q_indices=q_indices,
            full_q_num_blocks=full_q_num_blocks,
            full_q_indices=full_q_indices,
            BLOCK_SIZE=(FLEX_TILE_SIZE, FLEX_TILE_SIZE),
            mask_mod=mask_mod,
        )


def keys_in_ranges(ranges: Sequence[KeyRange], keys: torch.Tensor) -> torch.Tensor:
    """Return whether each key (S,) lies in one of the ranges of every query, (B, Q, S) bool."""
    allowed = [(starts[..., None] <= keys) & (keys < ends[..., None]) for starts, ends in ranges]
    return allowed[0] if len(allowed) == 1 else allowed[0] | allowed[1]


def _find_partial_and_full_tiles(
    starts: torch.Tensor, ends: torch.Tensor, num_keys: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which tiles contain a key in the range of one of their queries, and which tiles lie
    completely in the ranges of all their queries, (B, query tiles, key tiles) bool each.

    starts, ends: (B, Q), the range of every query.
    """
    num_queries = starts.shape[1]
    tile_starts = torch.arange(0, num_keys, FLEX_TILE_SIZE, device=starts.device)
    padded_queries = -(-num_queries // FLEX_TILE_SIZE) * FLEX_TILE_SIZE
    queries = torch.arange(padded_queries, device=starts.device).clamp(max=num_queries - 1)
    starts = starts[:, queries].unflatten(1, (-1, FLEX_TILE_SIZE))  # (B, query tiles, tile size)
    ends = ends[:, queries].unflatten(1, (-1, FLEX_TILE_SIZE))
    starts_early = starts.amin(-1, True) < tile_starts + FLEX_TILE_SIZE
    ends_late = ends.amax(-1, True) > tile_starts
    covers_start = starts.amax(-1, True) <= tile_starts
    covers_end = ends.amin(-1, True) >= tile_starts + FLEX_TILE_SIZE
    tiles = torch.arange(starts.shape[1], device=starts.device)
    without_padding = tiles < num_queries // FLEX_TILE_SIZE
    return starts_early & ends_late, covers_start & covers_end & without_padding[:, None]


def _build_tile_table(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return FlexAttention's table for tiles (B, 1, rows, columns) bool: how many columns are true
    in each row, (B, 1, rows) int32, and the column numbers, true ones first, (B, 1, rows, columns)
    int32."""
    order = tiles.byte().argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32), order.int()


def find_document_starts(documents: torch.Tensor) -> torch.Tensor:
    """Return the index at which the document of every position begins, (B, T) int64.

    documents: (B, T) int64 document numbers; the positions of a document are contiguous.
    """
    is_start = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    indices = torch.arange(documents.shape[1], device=documents.device)
    return torch.where(is_start, indices, 0).cummax(1).values


def build_training_mask(
    starts: torch.Tensor,
    documents: torch.Tensor,
    width: int,
    causal: bool = False,
    window: int | None = None,
) -> AttentionMask:
    """Return the mask of the training queries, N blocks of `width` positions per row, over T + N *
    width keys: one range of the context and one range of the query's own block.

    starts: (B, N) int64, the positions at which the blocks begin. These are the bonus tokens, for
        DART the positions before them. An unused block may have any position: it attends to
        something and carries no loss.
    documents: (B, T) int64, document number of every context position, -1 on padding.
    causal: a position of a block attends to itself and those before it (DART), otherwise to the
        whole block (DFlash).
    window: attend only to positions, of context and block, that are less than this many positions
        away (sliding window attention).
    """
    context_length = documents.shape[1]
    offsets = torch.arange(width, device=starts.device)
    context_ends = starts[..., None].expand(-1, -1, width)  # (B, N, W)
    context_starts = find_document_starts(documents).gather(1, starts)[..., None]
    block_numbers = torch.arange(starts.shape[1], device=starts.device)
    first_keys = context_length + width * block_numbers[:, None]  # (N, 1), of every block
    block_starts = first_keys
    block_ends = first_keys + (offsets + 1 if causal else width)
    if window is not None:
        context_starts = torch.maximum(context_starts, context_ends + offsets - window + 1)
        block_starts = first_keys + (offsets - window + 1).clamp(min=0)
        block_ends = torch.minimum(block_ends, first_keys + offsets + window)

    def per_query(edges: torch.Tensor) -> torch.Tensor:
        return edges.expand_as(context_ends).flatten(1)  # (B, N * W)

    ranges = [
        (per_query(context_starts), per_query(context_ends)),
        (per_query(block_starts), per_query(block_ends)),
    ]
    return AttentionMask(context_length + starts.shape[1] * width, ranges)


def first_visible_position(
    positions: torch.Tensor, window: int | None, chunked: bool = False
) -> torch.Tensor:
    """Return the first position that queries at `positions` (B, Q) may attend to, (B, Q).

    window: number of positions of the sliding window, the query's own included; with `chunked` the
        size of an attention chunk, outside of which a query sees nothing (Llama 4). None: no limit.
    """
    if window is None:
        return torch.zeros_like(positions)
    if chunked:
        return positions - positions % window
    return positions - window + 1


def build_packed_mask(
    positions: torch.Tensor,
    documents: torch.Tensor,
    window: int | None = None,
    chunked: bool = False,
) -> AttentionMask:
    """Return the causal mask of packed documents, one range of keys per query.

    positions: (B, T) int64, within the document. documents: (B, T) int64 document numbers. window,
        chunked: see `first_visible_position`.
    """
    starts = find_document_starts(documents)
    indices = torch.arange(documents.shape[1], device=documents.device)
    if window is not None:
        first_positions = first_visible_position(positions, window, chunked)
        starts = torch.maximum(starts, indices - positions + first_positions)
    return AttentionMask(documents.shape[1], [(starts, (indices + 1).expand_as(starts))])


def build_tree_mask(
    cached_lengths: torch.Tensor,
    positions: torch.Tensor,
    new_key_mask: torch.Tensor,
    num_keys: int,
    window: int | None = None,
    chunked: bool = False,
    sees_all_keys: bool = False,
) -> AttentionMask:
    """Return the mask of new positions over a cache (tree attention, DDTree section 4.4).

    cached_lengths: (B,) int64, cached positions of every row, all of which are visible.
    positions: (B, Q) int64, absolute positions of the new tokens.
    new_key_mask: (B or 1, Q, Q) bool, which new positions [b, :, k] the new position q attends to.
    num_keys: keys per row that attention reads.
    window, chunked: see `first_visible_position`. Distances are between positions, not between
        cache indices, because siblings in a tree have the same position.
    sees_all_keys: known on the host: without a window, every query attends to every key.
    """
    first_positions = first_visible_position(positions, window, chunked)  # (B, Q)
    if window is not None:
        new_key_mask = new_key_mask & (positions[:, None] >= first_positions[..., None])
    cached_range = (first_positions, cached_lengths[:, None].expand_as(first_positions))
    return AttentionMask(
        num_keys, [cached_range], cached_lengths, new_key_mask, sees_all_keys and window is None
    )


def build_draft_mask(
    cached_lengths: torch.Tensor,
    width: int,
    num_keys: int,
    causal: bool,
    window: int | None,
    sees_all_keys: bool = False,
) -> AttentionMask:
    """Return the mask of a drafter's block of `width` queries after `cached_lengths` (B,) cached
    positions: each query attends to the cache and to the block, or with `causal` to the block's
    positions up to its own.

    num_keys: keys per row that attention reads. window: see `build_training_mask`. sees_all_keys:
    known on the host: all rows have the same length.
    """
    offsets = torch.arange(width, device=cached_lengths.device)
    block_mask = (offsets <= offsets[:, None]) | (not causal)
    if window is not None:
        block_mask = block_mask & ((offsets[:, None] - offsets).abs() < window)
    return build_tree_mask(
        cached_lengths,
        cached_lengths[:, None] + offsets,
        block_mask[None],
        num_keys,
        window,
        sees_all_keys=sees_all_keys and not causal,
    )


def to_additive_mask(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask that is added to attention scores: 0 where `allowed` is true, else the lowest
    finite value of the dtype. Hugging Face's eager attention adds its mask, so a boolean mask would
    be silently wrong there."""
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)

"""Attention masks for training, for packed documents and for decoding with a cache, all in one
representation.

A query can attend to the keys in one or two ranges (`AttentionMask.key_ranges`). In decoding it can
also attend to those new positions that `AttentionMask.new_key_mask` allows.

- Training (`build_training_mask`): the keys are the positions of a training row (the context),
  followed by the positions of all training blocks. The queries are the block positions. A query
  attends to the context of its document before its block, and to its own block. This is the
  prefix-shared mask of DART (section 3.2 and figure 4), which is used for DFlash blocks too.
- Packed documents (`build_packed_mask`): a query attends to one range, which lies in its document.
- Decoding (`build_tree_mask`, `build_draft_mask`): a query attends to one range of the cache. In
  addition it attends to its ancestors in the draft tree, or to positions of the drafter's block.

`attention` in `infer.kernels` selects how a mask is evaluated: by chunks of queries, as a dense
mask, by FlexAttention or in Triton.

In shapes, B is the number of batch rows.
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

QUERIES_PER_MASK_CHUNK = 64  # number of queries in a `MaskChunk`
# FlexAttention computes attention in tiles of this many queries by this many keys.
FLEX_TILE_SIZE = 128
# (starts, ends), each (B, num_queries) int64: a query attends to the keys from its start up to, but
# not including, its end.
KeyRange = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class MaskChunk:
    """Some consecutive queries of one batch row, the keys that at least one of them attends to, and
    the mask for these queries and keys."""

    batch_row: int
    query_slice: slice
    # slices of the keys; together they contain all keys that the queries attend to
    key_slices: list[slice]
    # (queries, keys in key_slices) float32: 0 or a very negative number, added to attention scores
    additive_mask: torch.Tensor

    def gather_keys(self, states: torch.Tensor) -> torch.Tensor:
        """Select the chunk's keys from the keys of all batch rows. The same works for values.

        states: (B, num_key_heads, num_keys, head_size), all keys or all values

        Returns (num_key_heads, number of keys in key_slices, head_size).
        """
        slices = [states[self.batch_row, :, key_slice] for key_slice in self.key_slices]
        if len(slices) == 1:
            return slices[0]
        return torch.cat(slices, dim=1)

    def scatter_add_to_keys(self, states: torch.Tensor, update: torch.Tensor) -> None:
        """Add `update` in place at the chunk's keys.

        states: (B, num_key_heads, num_keys, head_size), changed in place
        update: (num_key_heads, number of keys in key_slices, head_size)
        """
        sizes = [key_slice.stop - key_slice.start for key_slice in self.key_slices]
        updates = update.split(sizes, dim=1)
        for key_slice, slice_update in zip(self.key_slices, updates, strict=True):
            states[self.batch_row, :, key_slice] += slice_update


@dataclass(frozen=True)
class AttentionMask:
    """Which of `num_keys` keys each query of every batch row attends to: the keys in the query's
    ranges, and the new positions that `new_key_mask` allows.

    In decoding, the queries are the new positions. In each row, the keys of the new positions
    follow the first `cached_lengths` keys. The properties convert the mask to the forms
    that attention kernels need. Each form is computed once, on first use.
    """

    num_keys: int  # number of keys per batch row
    key_ranges: Sequence[KeyRange]  # one or two ranges of keys for each query
    # (B,) int64: number of keys before the new positions
    cached_lengths: torch.Tensor | None = None
    # (B or 1, num_queries, num_queries) bool: [b, q, k] is true if new position q attends to new
    # position k
    new_key_mask: torch.Tensor | None = None
    sees_all_keys: bool = False  # whether the host knows that every query attends to every key
    grouped_masks: dict[tuple[int, torch.dtype], torch.Tensor] = field(
        default_factory=dict
    )  # results of `for_grouped_heads`; keys are (groups, dtype)

    @cached_property
    def dense(self) -> torch.Tensor:
        """Return the mask as (B, 1, num_queries, num_keys) bool. Tests compare all other forms of
        the mask with this one."""
        range_start = self.key_ranges[0][0]
        allowed = keys_in_ranges(
            self.key_ranges, torch.arange(self.num_keys, device=range_start.device)
        )
        if self.new_key_mask is not None and self.cached_lengths is not None:
            count = self.new_key_mask.shape[-1]
            offsets = torch.arange(count, device=self.cached_lengths.device)
            new_keys = self.cached_lengths[:, None] + offsets  # (B, num_queries)
            allowed.scatter_(
                2,
                new_keys[:, None].expand(-1, count, -1),
                self.new_key_mask.expand(len(new_keys), -1, -1),
            )
        return allowed[:, None]

    def for_grouped_heads(self, groups: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the additive mask (B, 1, groups * num_queries, num_keys) for grouped-query
        attention, in which `groups` query heads share a key head. The queries of these heads are
        concatenated, so the mask is repeated `groups` times along the query axis. Return None if
        every query attends to every key."""
        if self.sees_all_keys:
            return None
        key = (groups, dtype)
        if key not in self.grouped_masks:
            mask = to_additive_mask(self.dense, dtype)
            self.grouped_masks[key] = torch.cat([mask] * groups, 2)
        return self.grouped_masks[key]

    @cached_property
    def chunks(self) -> list[MaskChunk]:
        """Return the mask as chunks of QUERIES_PER_MASK_CHUNK queries. A chunk leaves out all keys
        to which none of its queries attends; these are most keys."""
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
        """Return the mask's ranges as FlexAttention's block mask. A tile is FLEX_TILE_SIZE queries
        by FLEX_TILE_SIZE keys. The block mask lists the tiles that attention computes, and those of
        them in which every query attends to every key.

        The block mask is computed directly from the ends of the ranges, without evaluating a dense
        mask or compiling a kernel for it.
        """
        from torch.nn.attention.flex_attention import BlockMask

        ranges = self.key_ranges
        partial_tiles = []
        full_tiles = []
        for starts, ends in ranges:
            partial, full = _find_touched_and_full_tiles(starts, ends, self.num_keys)
            partial_tiles.append(partial)
            full_tiles.append(full)
        full = torch.stack(full_tiles).any(0)[:, None]  # (B, 1, query tiles, key tiles)
        partial = torch.stack(partial_tiles).any(0)[:, None] & ~full

        def mask_mod(
            b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
        ) -> torch.Tensor:
            allowed = [(starts[b, q] <= kv) & (kv < ends[b, q]) for starts, ends in ranges]
            return allowed[0] if len(allowed) == 1 else allowed[0] | allowed[1]

        kv_num_blocks, kv_indices = _count_and_order_tiles(partial)
        full_kv_num_blocks, full_kv_indices = _count_and_order_tiles(full)
        q_num_blocks, q_indices = _count_and_order_tiles(partial.transpose(-1, -2))
        full_q_num_blocks, full_q_indices = _count_and_order_tiles(full.transpose(-1, -2))
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
    """Return whether each key lies in one of the ranges of each query, (B, num_queries, num_keys)
    bool. `keys` (num_keys,) are indices of keys."""
    allowed = [(starts[..., None] <= keys) & (keys < ends[..., None]) for starts, ends in ranges]
    return allowed[0] if len(allowed) == 1 else allowed[0] | allowed[1]


def _find_touched_and_full_tiles(
    starts: torch.Tensor, ends: torch.Tensor, num_keys: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the tiles of FLEX_TILE_SIZE queries by FLEX_TILE_SIZE keys that attention must compute.

    starts, ends: (B, num_queries) int64, the range of keys of every query

    Returns two tensors (B, query tiles, key tiles) bool. The first is true for tiles in which at
    least one query attends to at least one key. The second is true for tiles in which every query
    attends to every key.
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


def _count_and_order_tiles(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert `tiles` (B, 1, tile rows, tile columns) bool, which is true for the tiles to compute,
    to the form that FlexAttention's BlockMask takes.

    The result is two tensors: the number of true tiles in each tile row, (B, 1, tile rows) int32,
    and the column indices of the row's tiles, true ones first, (B, 1, tile rows, tile columns)
    int32.
    """
    order = tiles.byte().argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32), order.int()


def find_document_starts(documents: torch.Tensor) -> torch.Tensor:
    """Return for every position the index of the first position of its document, (B, length) int64.

    documents: (B, length) int64, document number of every position; the positions of a document are
        contiguous
    """
    is_start = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    indices = torch.arange(documents.shape[1], device=documents.device)
    return torch.where(is_start, indices, 0).cummax(1).values


def build_training_mask(
    block_start_positions: torch.Tensor,
    documents: torch.Tensor,
    block_size: int,
    causal: bool = False,
    window: int | None = None,
) -> AttentionMask:
    """Return the attention mask of a drafter's training blocks. A block is the input of the drafter
    for drafting after one position of the context. The queries are the positions of N blocks of
    `block_size` positions each. The keys are the T positions of the context, then the N *
    block_size positions of the blocks.

    block_start_positions: (B, N) int64, the position at which each block begins. For DFlash a block
        begins at the bonus token, for DART at the position before the bonus token. The start of an
        unused block does not matter, because the loss ignores the block.
    documents: (B, T) int64, document number of every context position, -1 on padding
    causal: whether a position of a block attends only to itself and the block's positions before it
        (DART); otherwise it attends to the whole block (DFlash)
    window: size of the sliding window. A query attends only to positions of context and block whose
        distance from it is less than `window`. None means that there is no window.
    """
    context_length = documents.shape[1]
    device = documents.device
    offsets = torch.arange(block_size, device=device)
    # (B, num_blocks, block_size)
    context_ends = block_start_positions[..., None].expand(-1, -1, block_size)
    context_starts = find_document_starts(documents).gather(1, block_start_positions)[..., None]
    block_numbers = torch.arange(block_start_positions.shape[1], device=device)
    # (num_blocks, 1): the first key of every block
    first_keys = context_length + block_size * block_numbers[:, None]
    block_starts = first_keys
    block_ends = first_keys + (offsets + 1 if causal else block_size)
    if window is not None:
        context_starts = torch.maximum(context_starts, context_ends + offsets - window + 1)
        block_starts = first_keys + (offsets - window + 1).clamp(min=0)
        block_ends = torch.minimum(block_ends, first_keys + offsets + window)

    def per_query(edges: torch.Tensor) -> torch.Tensor:
        return edges.expand_as(context_ends).flatten(1)  # (B, num_blocks * block_size)

    ranges = [
        (per_query(context_starts), per_query(context_ends)),
        (per_query(block_starts), per_query(block_ends)),
    ]
    return AttentionMask(context_length + block_start_positions.shape[1] * block_size, ranges)


def first_visible_position(
    positions: torch.Tensor, window: int | None, chunked: bool = False
) -> torch.Tensor:
    """Return the first position that each query may attend to, (B, num_queries) int64.

    positions: (B, num_queries) int64, positions of the queries
    window: number of positions in the sliding window, the query's own included; with `chunked`, the
        number of positions in an attention chunk; None means that there is no limit
    chunked: whether a query attends only to positions of its own attention chunk (Llama 4)
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
    """Return the causal attention mask of packed documents: every query attends only to its own
    document.

    positions: (B, length) int64, position of every token within its document
    documents: (B, length) int64, document number of every token
    window, chunked: see `first_visible_position`
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
    """Return the attention mask of new positions after cached positions, for example of a draft
    tree (tree attention, DDTree section 4.4).

    cached_lengths: (B,) int64, number of cached positions of every batch row, which all queries may
        attend to unless `window` excludes them
    positions: (B, num_queries) int64, absolute positions of the new tokens
    new_key_mask: (B or 1, num_queries, num_queries) bool; entry [b, q, k] is true if the new
        position q attends to the new position k
    num_keys: number of keys per batch row that attention reads
    window, chunked: see `first_visible_position`. Distances are between positions, not between
        cache indices, because siblings in a tree have the same position.
    sees_all_keys: whether the host knows that every query attends to every key if there is no
        window
    """
    first_positions = first_visible_position(positions, window, chunked)  # (B, num_queries)
    if window is not None:
        new_key_mask = new_key_mask & (positions[:, None] >= first_positions[..., None])
    cached_range = (first_positions, cached_lengths[:, None].expand_as(first_positions))
    return AttentionMask(
        num_keys, [cached_range], cached_lengths, new_key_mask, sees_all_keys and window is None
    )


def build_draft_mask(
    cached_lengths: torch.Tensor,
    block_size: int,
    num_keys: int,
    causal: bool,
    window: int | None,
    sees_all_keys: bool = False,
) -> AttentionMask:
    """Return the attention mask of a drafter's block of `block_size` queries after cached
    positions. Each query attends to all cached positions and to the whole block, unless `causal` or
    `window` excludes some of these positions.

    cached_lengths: (B,) int64, number of cached positions of every batch row
    num_keys: number of keys per batch row that attention reads
    causal: whether a query attends only to the block's positions up to its own
    window: size of the sliding window, see `build_training_mask`
    sees_all_keys: whether the host knows that all batch rows have the same length. Then every query
        attends to every key, unless `causal` or `window` excludes some.
    """
    offsets = torch.arange(block_size, device=cached_lengths.device)
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
    """Return a mask that is added to attention scores: 0 where `allowed` is true, otherwise the
    lowest finite value of the dtype.

    Hugging Face's eager attention adds its mask to the scores, so a boolean mask would give wrong
    results without an error.
    """
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)

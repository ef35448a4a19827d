"""Attention masks: one predicate for training, and its dense counterparts for decoding.

B rows, N anchors, K block size, T packed context length, Q new positions, M tree nodes.

Training lays the queries of one packed row out as N blocks of K positions, and the keys as
[T context positions | N * K block positions]. `block_mask_mod` defines the mask of this layout; `grouped_mask` has it
in pieces for SDPA, `block_ranges` as ranges of keys for FlexAttention on CUDA (torch has no backward of FlexAttention
on the CPU), `dense` evaluates it everywhere. It is the prefix-shared mask of DART section 3.2 and figure 4, for DFlash
blocks: a block sees the context features strictly before its anchor, and itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

GROUP = 64  # queries of a piece of the training mask
TILE = 128  # queries, and keys, of a tile of FlexAttention's masks
Range = tuple[torch.Tensor, torch.Tensor]  # the first key that every query sees and the one behind the last, (B, Q)
MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def block_mask_mod(
    anchors: torch.Tensor, documents: torch.Tensor, block_size: int, causal: bool = False, window: int | None = None
) -> MaskMod:
    """Return the predicate of the prefix-shared training mask.

    anchors (B, N) int64 positions where the blocks begin: those of the bonus tokens, for DART the ones before (an
    unused slot may hold any position: its block attends to something and carries no loss); documents (B, T) int64
    document number of every context position, -1 for padding. `causal` makes positions inside a block see only those
    before them (DART), otherwise all (DFlash). With a `window` they see only what is less than that many positions
    away, context and block alike (sliding attention)."""
    length = documents.shape[1]

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        block, slot = q // block_size, q % block_size
        anchor = anchors[b, block]
        is_context = kv < length
        context = torch.where(is_context, kv, 0)
        before_anchor = context < anchor
        same_document = documents[b, context] == documents[b, anchor]
        inside = (kv - length) // block_size == block
        before = slot - (kv - length) % block_size
        if causal:
            inside = inside & (before >= 0)
        if window is not None:
            before_anchor = before_anchor & (anchor + slot - context < window)
            inside = inside & (before.abs() < window)
        return torch.where(is_context, before_anchor & same_document, inside)

    return mask_mod


def packed_causal_mod(documents: torch.Tensor) -> MaskMod:
    """Return the predicate of causal attention inside each document of a packed row; documents (B, T), padding (-1)
    sees padding."""

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return (documents[b, q] == documents[b, kv]) & (kv <= q)

    return mask_mod


def dense(mask_mod: MaskMod, rows: int, queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """Evaluate a predicate everywhere: (rows, 1, queries, keys) bool."""
    b = torch.arange(rows, device=device).view(-1, 1, 1, 1)
    q = torch.arange(queries, device=device).view(1, 1, -1, 1)
    kv = torch.arange(keys, device=device).view(1, 1, 1, -1)
    return mask_mod(b, torch.zeros_like(b), q, kv).expand(rows, 1, queries, keys)


def opens(documents: torch.Tensor) -> torch.Tensor:
    """Return where the document of every position begins, (B, T); documents (B, T), each in one piece."""
    changes = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    places = torch.arange(documents.shape[1], device=documents.device)
    return torch.where(changes, places, 0).cummax(1).values


def block_ranges(
    starts: torch.Tensor, documents: torch.Tensor, width: int, causal: bool = False, window: int | None = None
) -> list[Range]:
    """Return what `block_mask_mod` lets the queries of blocks of `width` see, as ranges of keys (B, N * width): one of
    the context, one of their own block."""
    length, steps = documents.shape[1], torch.arange(width, device=starts.device)
    ends = starts[..., None].expand(-1, -1, width)  # (B, N, W)
    begins = opens(documents).gather(1, starts)[..., None]
    own = length + width * torch.arange(starts.shape[1], device=starts.device)[:, None]  # (N, 1)
    first, last = own, own + (steps + 1 if causal else width)
    if window is not None:
        begins = torch.maximum(begins, ends + steps - window + 1)
        first, last = own + (steps - window + 1).clamp(min=0), torch.minimum(last, own + steps + window)
    both = ((begins, ends), (first, last))
    return [tuple(edge.expand_as(ends).flatten(1) for edge in edges) for edges in both]


def packed_ranges(
    positions: torch.Tensor, documents: torch.Tensor, width: int | None = None, chunked: bool = False
) -> list[Range]:
    """Return what positions (B, T) of packed rows see, as one range of keys: what is before them in their document
    (B, T); with a `width`, of that the last so many positions, or those in the same chunk of so many."""
    begins, places = opens(documents), torch.arange(documents.shape[1], device=documents.device)
    if width is not None:
        near = places - positions % width if chunked else places - width + 1
        begins = torch.maximum(begins, near)
    return [(begins, (places + 1).expand_as(begins))]


def range_mask(ranges: list[Range], keys: int) -> "BlockMask":
    """Return the mask of queries that see ranges of `keys` keys, for FlexAttention: which tiles of queries and keys it
    looks into, and which it need not ask. They follow from the ranges' edges: no mask of queries x keys is evaluated,
    and no program compiled for it."""
    from torch.nn.attention.flex_attention import BlockMask

    found = zip(*(_tiles(*edges, keys) for edges in ranges), strict=True)
    some, whole = (torch.stack(tiles).any(0)[:, None] for tiles in found)
    some &= ~whole  # (B, 1, tiles of queries, tiles of keys)

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        seen = [(low[b, q] <= kv) & (kv < high[b, q]) for low, high in ranges]
        return seen[0] if len(seen) == 1 else seen[0] | seen[1]

    tables = zip(
        ("kv", "full_kv", "q", "full_q"), (some, whole, some.transpose(-1, -2), whole.transpose(-1, -2)), strict=True
    )
    parts = {f"{name}_{part}": table for name, tiles in tables for part, table in _listed(tiles).items()}
    lengths = ranges[0][0].shape[1], keys
    return BlockMask(seq_lengths=lengths, **parts, BLOCK_SIZE=(TILE, TILE), mask_mod=mask_mod)


def _tiles(low: torch.Tensor, high: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which tiles of keys hold something that a tile of queries may see, and which all its queries see whole,
    (B, tiles of queries, tiles of keys) bool; low, high (B, Q) are a range."""
    queries, begins = low.shape[1], torch.arange(0, keys, TILE, device=low.device)
    places = torch.arange(-(-queries // TILE) * TILE, device=low.device).clamp(max=queries - 1)
    low, high = (edge[:, places].unflatten(1, (-1, TILE)) for edge in (low, high))
    some = (low.amin(-1, True) < begins + TILE) & (high.amax(-1, True) > begins)
    whole = (low.amax(-1, True) <= begins) & (high.amin(-1, True) >= begins + TILE)
    complete = torch.arange(low.shape[1], device=low.device) < queries // TILE
    return some, whole & complete[:, None]


def _listed(tiles: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return how many tiles of each row are meant, and their numbers before those of the others, as FlexAttention
    reads them."""
    order = tiles.byte().argsort(dim=-1, descending=True, stable=True)
    return {"num_blocks": tiles.sum(-1, dtype=torch.int32), "indices": order.int()}


@cache
def _flex():
    """FlexAttention, compiled once per shape."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


@dataclass(frozen=True)
class GroupedMask:
    """The training mask in pieces, for SDPA: some blocks of a row at a time, which see the part of the context that
    lies before them in their documents, and each other. Most of the whole mask hides what no block sees."""

    length: int  # T
    groups: list[list[tuple[int, int, int, int, torch.Tensor]]]  # of each row: first query and the one behind the
    # last, the same of the context, and what they see of context and of their own keys, additive (1, 1, q, keys)

    def pieces(self) -> Iterator[tuple[int, tuple[int, int, int, int, torch.Tensor]]]:
        """Yield every piece with its row's number."""
        return ((row, piece) for row, groups in enumerate(self.groups) for piece in groups)


def grouped_mask(
    mask_mod: MaskMod, starts: torch.Tensor, documents: torch.Tensor, width: int, dtype: torch.dtype
) -> GroupedMask:
    """Evaluate the training predicate piece by piece; starts (B, N) where blocks of `width` begin, documents (B, T)."""
    length, slots = documents.shape[1], starts.shape[1]
    size = max(1, GROUP // width)  # blocks
    places = torch.arange(length)
    begins = opens(documents).gather(1, starts)  # (B, N)
    groups: list[list[tuple[int, int, int, int, torch.Tensor]]] = []
    for row in range(len(starts)):
        groups.append([])
        for first in range(0, slots, size):
            last = min(first + size, slots)
            begin, end = int(begins[row, first:last].min()), int(starts[row, first:last].max())
            queries = torch.arange(first * width, last * width)
            keys = torch.cat([places[begin:end], length + queries])
            seen = mask_mod(torch.tensor(row), None, queries[:, None], keys)
            groups[-1].append((first * width, last * width, begin, end, additive(seen, dtype)[None, None]))
    return GroupedMask(length, groups)


def _seen_by(
    states: torch.Tensor, row: int, piece: tuple[int, int, int, int, torch.Tensor], length: int
) -> torch.Tensor:
    """Return the keys or values that a piece of a row sees, (1, H', keys, E), of those of all rows."""
    first, last, begin, end, _ = piece
    parts = states[row : row + 1, :, begin:end], states[row : row + 1, :, length + first : length + last]
    return torch.cat(parts, dim=2)


class _GroupedAttention(torch.autograd.Function):
    """Attention under a mask in pieces. What a piece sees is put together twice, before its forward and before its
    backward pass, so that it need not be kept; gradients are added up in place."""

    @staticmethod
    def forward(ctx, q, k, v, mask: GroupedMask):
        mixed, sums, attend = torch.empty_like(q), [], torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        for row, piece in mask.pieces():
            keys, values = (_seen_by(states, row, piece, mask.length) for states in (k, v))
            queries = slice(row, row + 1), slice(None), slice(*piece[:2])
            mixed[queries], logsumexp = attend(q[queries], keys, values, attn_mask=piece[-1].to(q.dtype))
            sums.append(logsumexp)
        ctx.save_for_backward(q, k, v, mixed, *sums)
        ctx.mask = mask
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        q, k, v, mixed, *sums = ctx.saved_tensors
        of_q, of_both, length = torch.empty_like(q), (torch.zeros_like(k), torch.zeros_like(v)), ctx.mask.length
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        for (row, piece), logsumexp in zip(ctx.mask.pieces(), sums, strict=True):
            first, last, begin, end, seen = piece
            keys, values = (_seen_by(states, row, piece, length) for states in (k, v))
            queries = slice(row, row + 1), slice(None), slice(first, last)
            known = upstream[queries], q[queries], keys, values, mixed[queries], logsumexp
            of_q[queries], *found = attend(*known, 0.0, False, attn_mask=seen.to(q.dtype))
            for whole, part in zip(of_both, found, strict=True):
                whole[row : row + 1, :, begin:end] += part[:, :, : end - begin]
                whole[row : row + 1, :, length + first : length + last] = part[:, :, end - begin :]
        gradients = of_q, *of_both
        return *gradients, None


def masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: "torch.Tensor | BlockMask | GroupedMask | None"
) -> torch.Tensor:
    """Attention of queries (B, H, Q, E) over keys and values (B, H', S, E), grouped heads included: FlexAttention for
    its own masks, SDPA for dense ones, (B, 1, Q, S) bool or additive, and for those in pieces."""
    if isinstance(mask, GroupedMask):
        return _GroupedAttention.apply(q.to(v.dtype), k.to(v.dtype), v, mask)
    if mask is None or isinstance(mask, torch.Tensor):
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(q.dtype)  # SDPA on the CPU silently misreads a mask of another dtype
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    # autocast leaves queries and keys, which come out of norms, in float32, and does not cast for FlexAttention
    return flex_attention(q.to(v.dtype), k.to(v.dtype), v, mask)


def flex_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: "BlockMask", scale: float | None = None
) -> torch.Tensor:
    """FlexAttention of queries (B, H, Q, E) over keys and values (B, H', S, E) in one dtype, grouped heads included."""
    return _flex()(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)


def additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return 0 where allowed and the dtype's lowest value elsewhere. Hugging Face's eager attention adds its mask, so a
    boolean one would be silently wrong there."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)


def cached(ends: torch.Tensor, inside: torch.Tensor, extent: int) -> torch.Tensor:
    """Return the decoding mask (B, 1, Q, extent) bool: a query sees its row's `ends` (B,) cached positions, and of the
    Q new ones behind them those that `inside` (B, Q, Q) allows (tree attention, DDTree section 4.4)."""
    rows, width, _ = inside.shape
    before = torch.arange(extent, device=ends.device) < ends[:, None]  # (B, extent)
    new = ends[:, None] + torch.arange(width, device=ends.device)  # (B, Q)
    allowed = before[:, None].expand(-1, width, -1).scatter(2, new[:, None].expand(-1, width, -1), inside)
    return allowed[:, None]


@dataclass(frozen=True)
class TreeMask:
    """What Q new positions see of a cache whose lengths only the device knows, for `infer.attention.tree_kernel`: their
    row's cached positions, and of each other what `inside` allows; with a `window`, of both only what lies less than so
    many positions before them, or behind."""

    ends: torch.Tensor  # (B,) int64 cached positions
    inside: torch.Tensor  # (B or 1, Q, Q) bool
    positions: torch.Tensor  # (B, Q) int64
    window: int | None = None

    def dense(self, extent: int) -> torch.Tensor:
        """Return the same as a mask (B, 1, Q, extent) bool: the reference of the kernel."""
        allowed = cached(self.ends, self.inside.expand(len(self.ends), -1, -1), extent)
        return allowed if self.window is None else allowed & nearby(self.positions, self.ends, extent, self.window)


def block_mask(ends: torch.Tensor, width: int, causal: bool, window: int | None) -> TreeMask:
    """Return what blocks of `width` queries behind `ends` (B,) cached positions see: all that is cached and the block,
    or less of it."""
    steps = torch.arange(width, device=ends.device)
    inside = (steps <= steps[:, None]) | (not causal)
    if window is not None:
        inside = inside & ((steps[:, None] - steps).abs() < window)
    return TreeMask(ends, inside[None], ends[:, None] + steps, window)


@dataclass(frozen=True)
class DocumentMask:
    """Causal attention inside the documents of packed rows, on the host: attention goes through document by document,
    so that no mask of T x T exists."""

    spans: list[tuple[int, int, int]]  # row, begin and end of every document, padding included
    near: list[torch.Tensor | None]  # additive (1, 1, n, n): documents that a window does not hold; None: causal


def document_mask(
    positions: torch.Tensor, documents: torch.Tensor, width: int | None, chunked: bool, dtype: torch.dtype
) -> "DocumentMask | BlockMask":
    """Return what positions (B, T) of packed rows see: what is before them in their document (B, T); with a `width`,
    of that the last so many positions, or those in the same chunk of so many."""
    if documents.device.type == "cuda":
        return range_mask(packed_ranges(positions, documents, width, chunked), documents.shape[1])
    spans, near = [], []
    for row, numbers in enumerate(documents):
        sizes = numbers.unique_consecutive(return_counts=True)[1].tolist()
        ends = list(accumulate(sizes))
        spans += [(row, end - size, end) for size, end in zip(sizes, ends, strict=True)]
    for row, begin, end in spans:
        here = positions[row : row + 1, begin:end]
        if width is None or (end - begin <= width and not chunked):
            near.append(None)
            continue
        seen = (same_chunk if chunked else nearby)(here, None, end - begin, width)
        near.append(additive(seen & torch.ones_like(seen).tril(), dtype))
    return DocumentMask(spans, near)


def nearby(positions: torch.Tensor, ends: torch.Tensor | None, extent: int, window: int) -> torch.Tensor:
    """Return which keys lie less than `window` positions before queries at `positions` (B, Q), or after them:
    (B, 1, Q, extent) bool. Distances are between positions, not slots of the cache: siblings in a tree have the same
    position. The keys are the queries, or, with `ends` (B,), a row's cached positions and the queries behind them."""
    return (key_positions(positions, ends, extent) > positions[..., None] - window)[:, None]


def same_chunk(positions: torch.Tensor, ends: torch.Tensor | None, extent: int, size: int) -> torch.Tensor:
    """Return which keys lie in the same chunk of `size` positions as queries at `positions` (B, Q): `nearby` for
    chunks, (B, 1, Q, extent) bool."""
    return (key_positions(positions, ends, extent) // size == positions[..., None] // size)[:, None]


def key_positions(positions: torch.Tensor, ends: torch.Tensor | None, extent: int) -> torch.Tensor:
    """Return the keys' positions, (B, 1, extent)."""
    keys = positions
    if ends is not None:
        new = ends[:, None] + torch.arange(positions.shape[1], device=ends.device)  # (B, Q)
        keys = torch.arange(extent, device=ends.device).expand(len(ends), -1).scatter(1, new, positions)
    return keys[:, None]

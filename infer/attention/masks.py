"""Attention masks: what training and packed rows see, as ranges of keys, and masks of caches for decoding.

B rows, N anchors, K block size, T packed context length, Q new positions, M tree nodes, H query heads, H' key heads,
G = H / H', E head size.

Training lays the queries of one packed row out as N blocks of K positions, and the keys as
[T context positions | N * K block positions]. What a query sees is one range of the context and one of its own block
(`block_ranges`): the prefix-shared mask of DART section 3.2 and figure 4, for DFlash blocks: a block sees the context
features strictly before its anchor, and itself. What a position of packed documents sees is one range
(`packed_ranges`). `range_mask` makes FlexAttention's mask of them on CUDA, and elsewhere pieces of some queries each
(torch has no backward of FlexAttention on the CPU).
"""

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

GROUP = 64  # queries of a piece of a mask
TILE = 128  # queries, and keys, of a tile of FlexAttention's masks
Range = tuple[torch.Tensor, torch.Tensor]  # the first key that every query sees and the one behind the last, (B, Q)


def dense(ranges: list[Range], keys: int | torch.Tensor) -> torch.Tensor:
    """Return which keys lie in one of the ranges of every query, (B, 1, Q, S) bool; keys: how many, or their places
    (S,)."""
    places = keys if isinstance(keys, torch.Tensor) else torch.arange(keys, device=ranges[0][0].device)
    seen = [(low[..., None] <= places) & (places < high[..., None]) for low, high in ranges]
    return (seen[0] if len(seen) == 1 else seen[0] | seen[1])[:, None]


def opens(documents: torch.Tensor) -> torch.Tensor:
    """Return where the document of every position begins, (B, T); documents (B, T), each in one piece."""
    changes = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    places = torch.arange(documents.shape[1], device=documents.device)
    return torch.where(changes, places, 0).cummax(1).values


def block_ranges(
    starts: torch.Tensor, documents: torch.Tensor, width: int, causal: bool = False, window: int | None = None
) -> list[Range]:
    """Return what the queries of blocks of `width` see, as ranges of keys (B, N * width): one of the context, one of
    their own block.

    starts (B, N) int64 positions where the blocks begin: those of the bonus tokens, for DART the ones before (an
    unused slot may hold any position: its block attends to something and carries no loss); documents (B, T) int64
    document number of every context position, -1 for padding. `causal` makes positions inside a block see only those
    before them (DART), otherwise all (DFlash). With a `window` they see only what is less than that many positions
    away, context and block alike (sliding attention)."""
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


def range_mask(ranges: list[Range], keys: int) -> "PieceMask | BlockMask":
    """Return the mask of queries that see ranges of `keys` keys, for the device that they are on."""
    return flex_mask(ranges, keys) if ranges[0][0].device.type == "cuda" else piece_mask(ranges)


def flex_mask(ranges: list[Range], keys: int) -> "BlockMask":
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
class Piece:
    """Some queries of a row, and what they see."""

    row: int
    queries: slice
    spans: list[slice]  # of the keys: all that one of the queries sees lies there
    mask: torch.Tensor  # (queries, keys of the spans) additive, float32

    def seen(self, states: torch.Tensor) -> torch.Tensor:
        """Return what the piece sees of keys or values (B, H', S, E), (H', keys, E)."""
        parts = [states[self.row, :, span] for span in self.spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def add(self, states: torch.Tensor, part: torch.Tensor) -> None:
        """Add a part (H', keys, E) to what the piece sees of states (B, H', S, E)."""
        sizes = [span.stop - span.start for span in self.spans]
        for span, one in zip(self.spans, part.split(sizes, dim=1), strict=True):
            states[self.row, :, span] += one


@dataclass(frozen=True)
class PieceMask:
    """A mask in pieces: most of the whole one hides what no query sees."""

    pieces: list[Piece]


def piece_mask(ranges: list[Range]) -> PieceMask:
    """Return the mask of queries that see ranges of keys, in pieces."""
    pieces, (rows, width) = [], ranges[0][0].shape
    for row, first in product(range(rows), range(0, width, GROUP)):
        queries = slice(first, min(first + GROUP, width))
        here = [(low[row : row + 1, queries], high[row : row + 1, queries]) for low, high in ranges]
        edges = [(int(low.min()), int(high.max())) for low, high in here]
        spans = [slice(begin, end) for begin, end in edges if begin < end]
        keys = torch.cat([torch.arange(span.start, span.stop, device=ranges[0][0].device) for span in spans])
        pieces.append(Piece(row, queries, spans, additive(dense(here, keys)[0, 0], torch.float32)))
    return PieceMask(pieces)


class _PieceAttention(torch.autograd.Function):
    """Attention under a mask in pieces. Nothing is kept of a piece: its backward pass computes its weights again."""

    @staticmethod
    def forward(ctx, q, k, v, mask: PieceMask, scale: float):
        mixed = torch.empty_like(q)  # (B, H, Q, E)
        for piece in mask.pieces:
            here = slice(piece.row, piece.row + 1), slice(None), piece.queries
            both = (piece.seen(states)[None] for states in (k, v))
            mixed[here] = F.scaled_dot_product_attention(
                q[here], *both, attn_mask=piece.mask.to(q.dtype), scale=scale, enable_gqa=True
            )
        ctx.save_for_backward(q, k, v, mixed)
        ctx.mask, ctx.scale = mask, scale
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        q, k, v, mixed = ctx.saved_tensors
        of_q, of_k, of_v = (torch.zeros_like(states) for states in (q, k, v))
        inner, heads = (upstream * mixed).sum(-1, keepdim=True), (k.shape[1], -1)
        for piece in ctx.mask.pieces:
            keys, values = piece.seen(k), piece.seen(v)  # (H', keys, E)
            packed = (
                states[piece.row, :, piece.queries].unflatten(0, heads).flatten(1, 2) for states in (q, upstream, inner)
            )
            queries, above, mean = packed  # (H', G n, E), the same, (H', G n, 1)
            scores = (queries @ keys.mT).mul_(ctx.scale)  # (H', G n, keys)
            scores.unflatten(1, (-1, len(piece.mask))).add_(piece.mask)
            weights = torch.softmax(scores, -1, out=scores)
            change = (above @ values.mT).sub_(mean).mul_(weights)  # with respect to the scores
            piece.add(of_v, weights.mT @ above)
            piece.add(of_k, change.mT @ queries)
            of_q[piece.row, :, piece.queries] = (change @ keys).unflatten(1, (-1, len(piece.mask))).flatten(0, 1)
        gradients = of_q.mul_(ctx.scale), of_k.mul_(ctx.scale), of_v, None, None
        return gradients


def attend_pieces(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: PieceMask, scale: float | None = None
) -> torch.Tensor:
    """Attention of queries (B, H, Q, E) over keys and values (B, H', S, E), grouped heads included; in float32 where
    these are less, which takes no longer on a CPU. The result has the values' dtype."""
    wide = (states.to(torch.promote_types(states.dtype, torch.float32)) for states in (q, k, v))
    return _PieceAttention.apply(*wide, mask, q.shape[-1] ** -0.5 if scale is None else scale).to(v.dtype)


def masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: "torch.Tensor | BlockMask | PieceMask | None"
) -> torch.Tensor:
    """Attention of queries (B, H, Q, E) over keys and values (B, H', S, E), grouped heads included: FlexAttention for
    its own masks, SDPA for dense ones, (B, 1, Q, S) bool or additive, and for those in pieces."""
    if isinstance(mask, PieceMask):
        return attend_pieces(q, k, v, mask)
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

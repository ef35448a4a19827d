"""Attention masks: one value for what queries see, in training, in packed rows and in caches.

B rows, N anchors, K block size, T packed context length, Q queries, S keys, H query heads, H' key
heads, G = H / H', E head size.

What a query sees is ranges of keys (`Mask.ranges`), and of new positions in a cache what
`Mask.inside` allows. Training lays the queries of one packed row out as N blocks of K positions,
and the keys as [T context positions | N * K block positions]: a query sees one range of the context
and one of its own block (`block_mask`), the prefix-shared mask of DART section 3.2 and figure 4,
for DFlash blocks: the context features strictly before the anchor, and the block. What a position
of packed documents sees is one range (`packed_mask`). While decoding, it is one range of the cache,
and ancestors in a tree or the rest of a block (`tree_mask`, `cached_blocks`).

`attention` in `infer.kernels` chooses how a mask is evaluated: in pieces, densely, by FlexAttention
or in Triton.
"""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

GROUP = 64  # queries of a piece of a mask
TILE = 128  # queries, and keys, of a tile of FlexAttention's masks
# the first key that every query sees and the one behind the last, (B, Q)
Range = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class MaskPiece:
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
class Mask:
    """What Q queries of every row see of `keys` keys: those in one of their ranges; and of the
    queries themselves, new positions behind the first `ends` of a cache, those that `inside`
    allows. Each form is made once, on first use."""

    keys: int  # S
    ranges: list[Range]
    ends: torch.Tensor | None = None  # (B,) int64
    inside: torch.Tensor | None = None  # (B or 1, Q, Q) bool
    whole: bool = False  # the host knows that every query sees every key
    packed: dict[tuple[int, torch.dtype], torch.Tensor] = field(
        default_factory=dict
    )  # see `for_packed`

    @cached_property
    def dense(self) -> torch.Tensor:
        """The mask as (B, 1, Q, S) bool: the reference of all other forms."""
        seen = within(self.ranges, torch.arange(self.keys, device=self.ranges[0][0].device))
        if self.inside is not None:
            width = self.inside.shape[-1]
            new = self.ends[:, None] + torch.arange(width, device=self.ends.device)  # (B, Q)
            seen.scatter_(
                2, new[:, None].expand(-1, width, -1), self.inside.expand(len(new), -1, -1)
            )
        return seen[:, None]

    def for_packed(self, groups: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the mask, additive, of the queries of `groups` = G heads one after the other, (B,
        1, G Q, S); None where all is seen."""
        if self.whole:
            return None
        if (groups, dtype) not in self.packed:
            self.packed[groups, dtype] = torch.cat([additive(self.dense, dtype)] * groups, 2)
        return self.packed[groups, dtype]

    @cached_property
    def pieces(self) -> list[MaskPiece]:
        """The ranges of some queries each: most of the whole mask hides what no query sees."""
        pieces, (rows, width) = [], self.ranges[0][0].shape
        for row, first in product(range(rows), range(0, width, GROUP)):
            queries = slice(first, min(first + GROUP, width))
            here = [
                (low[row : row + 1, queries], high[row : row + 1, queries])
                for low, high in self.ranges
            ]
            edges = [(int(low.min()), int(high.max())) for low, high in here]
            spans = [slice(begin, end) for begin, end in edges if begin < end]
            keys = torch.cat(
                [torch.arange(span.start, span.stop, device=here[0][0].device) for span in spans]
            )
            pieces.append(
                MaskPiece(row, queries, spans, additive(within(here, keys)[0], torch.float32))
            )
        return pieces

    @cached_property
    def tiles(self) -> "BlockMask":
        """The ranges for FlexAttention: which tiles of queries and keys it looks into, and which it
        need not ask. They follow from the ranges' edges: no mask of queries x keys is evaluated,
        and no program compiled for it."""
        from torch.nn.attention.flex_attention import BlockMask

        ranges = self.ranges
        found = zip(*(_tiles(*edges, self.keys) for edges in ranges), strict=True)
        some, whole = (torch.stack(tiles).any(0)[:, None] for tiles in found)
        some &= ~whole  # (B, 1, tiles of queries, tiles of keys)

        def mask_mod(
            b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
        ) -> torch.Tensor:
            seen = [(low[b, q] <= kv) & (kv < high[b, q]) for low, high in ranges]
            return seen[0] if len(seen) == 1 else seen[0] | seen[1]

        by_query = (some, whole)
        by_key = (some.transpose(-1, -2), whole.transpose(-1, -2))
        tables = zip(("kv", "full_kv", "q", "full_q"), (*by_query, *by_key), strict=True)
        parts = {
            f"{name}_{part}": table
            for name, tiles in tables
            for part, table in _listed(tiles).items()
        }
        lengths = ranges[0][0].shape[1], self.keys
        return BlockMask(seq_lengths=lengths, **parts, BLOCK_SIZE=(TILE, TILE), mask_mod=mask_mod)


def within(ranges: list[Range], places: torch.Tensor) -> torch.Tensor:
    """Return which keys at `places` (S,) lie in one of the ranges of every query, (B, Q, S)
    bool."""
    seen = [(low[..., None] <= places) & (places < high[..., None]) for low, high in ranges]
    return seen[0] if len(seen) == 1 else seen[0] | seen[1]


def _tiles(low: torch.Tensor, high: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which tiles of keys hold something that a tile of queries may see, and which all its
    queries see whole, (B, tiles of queries, tiles of keys) bool; low, high (B, Q) are a range."""
    queries = low.shape[1]
    begins = torch.arange(0, keys, TILE, device=low.device)
    places = torch.arange(-(-queries // TILE) * TILE, device=low.device).clamp(max=queries - 1)
    low, high = (edge[:, places].unflatten(1, (-1, TILE)) for edge in (low, high))
    some = (low.amin(-1, True) < begins + TILE) & (high.amax(-1, True) > begins)
    whole = (low.amax(-1, True) <= begins) & (high.amin(-1, True) >= begins + TILE)
    complete = torch.arange(low.shape[1], device=low.device) < queries // TILE
    return some, whole & complete[:, None]


def _listed(tiles: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return how many tiles of each row are meant, and their numbers before those of the others, as
    FlexAttention reads them."""
    order = tiles.byte().argsort(dim=-1, descending=True, stable=True)
    return {"num_blocks": tiles.sum(-1, dtype=torch.int32), "indices": order.int()}


def opens(documents: torch.Tensor) -> torch.Tensor:
    """Return where the document of every position begins, (B, T); documents (B, T), each in one
    piece."""
    changes = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    places = torch.arange(documents.shape[1], device=documents.device)
    return torch.where(changes, places, 0).cummax(1).values


def block_mask(
    starts: torch.Tensor,
    documents: torch.Tensor,
    width: int,
    causal: bool = False,
    window: int | None = None,
) -> Mask:
    """Return what the queries of blocks of `width` see in training, (B, N * width), of T + N *
    width
    keys: one range of the context, one of their own block.

    starts (B, N) int64 positions where the blocks begin: those of the bonus tokens, for DART the
    ones before (an unused slot may hold any position: its block attends to something and carries no
    loss); documents (B, T) int64 document number of every context position, -1 for padding.
    `causal` makes positions inside a block see only those before them (DART), otherwise all
    (DFlash). With a `window` they see only what is less than that many positions away, context and
    block alike (sliding attention)."""
    length = documents.shape[1]
    steps = torch.arange(width, device=starts.device)
    ends = starts[..., None].expand(-1, -1, width)  # (B, N, W)
    begins = opens(documents).gather(1, starts)[..., None]
    own = length + width * torch.arange(starts.shape[1], device=starts.device)[:, None]  # (N, 1)
    first = own
    last = own + (steps + 1 if causal else width)
    if window is not None:
        begins = torch.maximum(begins, ends + steps - window + 1)
        first = own + (steps - window + 1).clamp(min=0)
        last = torch.minimum(last, own + steps + window)
    both = ((begins, ends), (first, last))
    ranges = [tuple(edge.expand_as(ends).flatten(1) for edge in edges) for edges in both]
    return Mask(length + starts.shape[1] * width, ranges)


def first_near(positions: torch.Tensor, width: int | None, chunked: bool = False) -> torch.Tensor:
    """Return the first position that queries at `positions` (B, Q) may see: of the last `width`
    ones, their own included, or of those in the same chunk of so many; `width` None: the first of
    all."""
    if width is None:
        return torch.zeros_like(positions)
    return positions - positions % width if chunked else positions - width + 1


def packed_mask(
    positions: torch.Tensor,
    documents: torch.Tensor,
    width: int | None = None,
    chunked: bool = False,
) -> Mask:
    """Return what positions (B, T) of packed rows see, as one range of keys: what is before them in
    their document (B, T); with a `width`, of that the last so many positions, or those in the same
    chunk of so many."""
    begins = opens(documents)
    places = torch.arange(documents.shape[1], device=documents.device)
    if width is not None:
        begins = torch.maximum(begins, places - positions + first_near(positions, width, chunked))
    return Mask(documents.shape[1], [(begins, (places + 1).expand_as(begins))])


def tree_mask(
    ends: torch.Tensor,
    positions: torch.Tensor,
    inside: torch.Tensor,
    keys: int,
    width: int | None = None,
    chunked: bool = False,
    whole: bool = False,
) -> Mask:
    """Return what new positions (B, Q) of a cache see of its first `keys` places: their row's
    `ends` (B,) cached positions, and of each other what `inside` (B, Q, Q) allows (tree attention,
    DDTree section 4.4); with a `width`, of both the last so many positions, or those in the same
    chunk. Distances are between positions, not places in the cache: siblings in a tree have the
    same position."""
    near = first_near(positions, width, chunked)  # (B, Q)
    if width is not None:
        inside = inside & (positions[:, None] >= near[..., None])
    return Mask(
        keys, [(near, ends[:, None].expand_as(near))], ends, inside, whole and width is None
    )


def cached_blocks(
    ends: torch.Tensor, width: int, keys: int, causal: bool, window: int | None, whole: bool = False
) -> Mask:
    """Return what blocks of `width` queries behind `ends` (B,) cached positions see: all that is
    cached and the block, or less of it; `whole`: the host knows that all rows have the same
    length."""
    steps = torch.arange(width, device=ends.device)
    inside = (steps <= steps[:, None]) | (not causal)
    if window is not None:
        inside = inside & ((steps[:, None] - steps).abs() < window)
    whole = whole and not causal
    return tree_mask(ends, ends[:, None] + steps, inside[None], keys, window, whole=whole)


def additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return 0 where allowed and the dtype's lowest value elsewhere. Hugging Face's eager attention
    adds its mask, so a boolean one would be silently wrong there."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(
        ~allowed, torch.finfo(dtype).min
    )

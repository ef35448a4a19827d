"""Attention under one kind of mask (`infer.attention.masks.Mask`), by what suits the device and the
mask.

B rows, H query heads, K key heads, G = H / K, Q queries, S keys, E head size.
"""

import warnings
from functools import cache
from importlib.util import find_spec

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from infer.attention.masks import Mask, MaskPiece, tree_mask


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: Mask | torch.Tensor | None,
    scale: float | None = None,
) -> torch.Tensor:
    """Return the attention (B, H, Q, E) of queries over keys and values (B, K, S, E), grouped heads
    included. Queries may also be packed by the key head they share, (B, K, G Q, E): the same numbers in
    the same order.

    A mask of ranges alone goes through FlexAttention on CUDA and in pieces elsewhere (torch has no
    backward of FlexAttention on the CPU); one of a cache through a Triton kernel on CUDA and densely
    elsewhere. A tensor (B, 1, Q, S), bool or additive, goes to SDPA as it is."""
    if not isinstance(mask, Mask):
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(queries.dtype)  # SDPA on the CPU silently misreads a mask of another dtype
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
    rows, heads, _, size = keys.shape
    scale = size**-0.5 if scale is None else scale
    if mask.inside is None:
        apart = queries.reshape(rows, -1, mask.ranges[0][0].shape[1], size)  # (B, H, Q, E)
        run = attend_tiles if queries.device.type == "cuda" else attend_pieces
        return run(apart, keys, values, mask, scale).reshape(queries.shape)
    packed = queries.reshape(rows, heads, -1, size)  # (B, K, G Q, E)
    if has_kernel(queries.device):
        from infer.attention.tree_kernel import tree_attention

        return tree_attention(packed, keys, values, mask, scale).view(queries.shape)
    seen = mask.for_packed(packed.shape[2] // mask.inside.shape[-1], queries.dtype)
    return F.scaled_dot_product_attention(packed, keys, values, attn_mask=seen, scale=scale).reshape(queries.shape)


class _PieceAttention(torch.autograd.Function):
    """Attention under a mask in pieces. Nothing is kept of a piece: its backward pass computes its
    weights again."""

    @staticmethod
    def forward(ctx, q, k, v, pieces: list[MaskPiece], scale: float):
        mixed = torch.empty_like(q)  # (B, H, Q, E)
        for piece in pieces:
            here = slice(piece.row, piece.row + 1), slice(None), piece.queries
            both = (piece.seen(states)[None] for states in (k, v))
            mixed[here] = F.scaled_dot_product_attention(
                q[here], *both, attn_mask=piece.mask.to(q.dtype), scale=scale, enable_gqa=True
            )
        ctx.save_for_backward(q, k, v, mixed)
        ctx.pieces, ctx.scale = pieces, scale
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        q, k, v, mixed = ctx.saved_tensors
        of_q, of_k, of_v = (torch.zeros_like(states) for states in (q, k, v))
        inner, heads = (upstream * mixed).sum(-1, keepdim=True), (k.shape[1], -1)
        for piece in ctx.pieces:
            keys, values = piece.seen(k), piece.seen(v)  # (K, keys, E)
            packed = (
                states[piece.row, :, piece.queries].unflatten(0, heads).flatten(1, 2) for states in (q, upstream, inner)
            )
            queries, above, mean = packed  # (K, G n, E), the same, (K, G n, 1)
            scores = (queries @ keys.mT).mul_(ctx.scale)  # (K, G n, keys)
            scores.unflatten(1, (-1, len(piece.mask))).add_(piece.mask)
            weights = torch.softmax(scores, -1, out=scores)
            change = (above @ values.mT).sub_(mean).mul_(weights)  # with respect to the scores
            piece.add(of_v, weights.mT @ above)
            piece.add(of_k, change.mT @ queries)
            of_q[piece.row, :, piece.queries] = (change @ keys).unflatten(1, (-1, len(piece.mask))).flatten(0, 1)
        gradients = of_q.mul_(ctx.scale), of_k.mul_(ctx.scale), of_v, None, None
        return gradients


def attend_pieces(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float) -> torch.Tensor:
    """Attention of queries (B, H, Q, E) piece by piece; in float32 where these are less, which takes no
    longer on a CPU. The result has the values' dtype."""
    wide = (states.to(torch.promote_types(states.dtype, torch.float32)) for states in (q, k, v))
    return _PieceAttention.apply(*wide, mask.pieces, scale).to(v.dtype)


def attend_tiles(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float) -> torch.Tensor:
    """Attention of queries (B, H, Q, E) by FlexAttention. Autocast leaves queries and keys, which come
    out of norms, in float32, and does not cast for it."""
    return _flex()(q.to(v.dtype), k.to(v.dtype), v, block_mask=mask.tiles, scale=scale, enable_gqa=True)


@cache
def _flex():
    """FlexAttention, compiled once per shape."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


@cache
def has_kernel(device: torch.device) -> bool:
    """Return whether there is the Triton kernel on a device: CUDA with Triton, whose kernel is compared
    with the reference first."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    try:
        right = kernel_error(device) < 1e-2
        reason = "other results than SDPA"
    except Exception as error:  # no C compiler, a device that Triton does not know, ...
        right, reason = False, str(error)
    if not right:
        warnings.warn(f"attention goes without its Triton kernel, and takes longer: {reason}", stacklevel=2)
    return right


def kernel_error(device: torch.device, dtype: torch.dtype = torch.float32, window: int | None = 9) -> float:
    """Return the greatest difference between the kernel and its reference over a small cache of random
    numbers."""
    from infer.attention.tree_kernel import tree_attention

    generator = torch.Generator().manual_seed(0)
    queries, both = (
        torch.randn(shape, generator=generator).to(device, dtype) for shape in ((2, 2, 18, 24), (2, 2, 2, 90, 24))
    )
    inside = torch.eye(6, dtype=torch.bool).logical_or(torch.rand(2, 6, 6, generator=generator) < 0.5).tril().to(device)
    ends = torch.tensor([75, 3], device=device)
    mask = tree_mask(ends, ends[:, None] + torch.tensor([0, 1, 1, 2, 3, 3], device=device), inside, 90, window)
    expected = F.scaled_dot_product_attention(queries, *both, attn_mask=mask.for_packed(3, dtype), scale=0.2)
    return float((tree_attention(queries, *both, mask, 0.2) - expected).abs().max())

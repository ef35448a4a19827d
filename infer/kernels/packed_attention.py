"""Attention of packed sequences in pieces of a mask, with a backward pass: torch has none of
FlexAttention on the CPU.

B batch rows, H query heads, K key heads, G = H / K, Q queries, S keys, E head size.
"""

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from infer.attention.masks import Mask, MaskPiece


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
        ctx.pieces = pieces
        ctx.scale = scale
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        q, k, v, mixed = ctx.saved_tensors
        of_q, of_k, of_v = (torch.zeros_like(states) for states in (q, k, v))
        inner = (upstream * mixed).sum(-1, keepdim=True)
        heads = (k.shape[1], -1)
        for piece in ctx.pieces:
            # (K, keys, E)
            keys = piece.seen(k)
            values = piece.seen(v)
            packed = (
                states[piece.row, :, piece.queries].unflatten(0, heads).flatten(1, 2)
                for states in (q, upstream, inner)
            )
            queries, above, mean = packed  # (K, G n, E), the same, (K, G n, 1)
            scores = (queries @ keys.mT).mul_(ctx.scale)  # (K, G n, keys)
            scores.unflatten(1, (-1, len(piece.mask))).add_(piece.mask)
            weights = torch.softmax(scores, -1, out=scores)
            change = (above @ values.mT).sub_(mean).mul_(weights)  # with respect to the scores
            piece.add(of_v, weights.mT @ above)
            piece.add(of_k, change.mT @ queries)
            of_q[piece.row, :, piece.queries] = (
                (change @ keys).unflatten(1, (-1, len(piece.mask))).flatten(0, 1)
            )
        gradients = of_q.mul_(ctx.scale), of_k.mul_(ctx.scale), of_v, None, None
        return gradients


def attend_pieces(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float
) -> torch.Tensor:
    """Attention of queries (B, H, Q, E) piece by piece; in float32 where these are less, which
    takes no longer on a CPU. The result has the values' dtype."""
    wide = (states.to(torch.promote_types(states.dtype, torch.float32)) for states in (q, k, v))
    return _PieceAttention.apply(*wide, mask.pieces, scale).to(v.dtype)

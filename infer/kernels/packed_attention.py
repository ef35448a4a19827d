"""Attention of packed sequences on the CPU, with a backward pass, for training.

FlexAttention has no backward pass on the CPU. This module divides the mask into pieces
(`MaskChunk`). A piece consists of consecutive queries and the keys that at least one of these
queries attends to. Attention is computed for one piece after the other.
"""

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from infer.attention.masks import AttentionMask, MaskChunk


class _PieceAttention(torch.autograd.Function):
    """Attention with a mask that is divided into pieces.

    A piece consists of consecutive queries and the keys that they attend to. The attention weights
    are not stored between the forward and the backward pass, to save memory. The backward pass
    computes them again for each piece.
    """

    @staticmethod
    def forward(ctx, q, k, v, pieces: list[MaskChunk], scale: float):
        out = torch.empty_like(q)  # (batch rows, query heads, queries, head size)
        for piece in pieces:
            piece_index = (
                slice(piece.batch_row, piece.batch_row + 1),
                slice(None),
                piece.query_slice,
            )
            visible_keys = piece.gather_keys(k)[None]
            visible_values = piece.gather_keys(v)[None]
            out[piece_index] = F.scaled_dot_product_attention(
                q[piece_index],
                visible_keys,
                visible_values,
                attn_mask=piece.additive_mask.to(q.dtype),
                scale=scale,
                enable_gqa=True,
            )
        ctx.save_for_backward(q, k, v, out)
        ctx.pieces = pieces
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        q, k, v, out = ctx.saved_tensors
        grad_q = torch.zeros_like(q)
        grad_k = torch.zeros_like(k)
        grad_v = torch.zeros_like(v)
        # (batch rows, query heads, queries, 1): the sum of weights * grad_weights, as in
        # FlashAttention.
        delta = (grad_out * out).sum(-1, keepdim=True)
        grouped_heads = (k.shape[1], -1)

        for piece in ctx.pieces:
            keys = piece.gather_keys(k)  # (key heads, keys, head size)
            values = piece.gather_keys(v)
            packed = (
                states[piece.batch_row, :, piece.query_slice]
                .unflatten(0, grouped_heads)
                .flatten(1, 2)
                for states in (q, grad_out, delta)
            )
            # The second axis has the queries of all query heads that share a key head.
            queries, piece_grad_out, piece_delta = packed

            # (key heads, query heads per key head * queries, keys)
            scores = (queries @ keys.mT).mul_(ctx.scale)
            scores.unflatten(1, (-1, len(piece.additive_mask))).add_(piece.additive_mask)
            weights = torch.softmax(scores, -1, out=scores)
            grad_scores = (piece_grad_out @ values.mT).sub_(piece_delta).mul_(weights)

            piece.scatter_add_to_keys(grad_v, weights.mT @ piece_grad_out)
            piece.scatter_add_to_keys(grad_k, grad_scores.mT @ queries)
            piece_grad_q = (grad_scores @ keys).unflatten(1, (-1, len(piece.additive_mask)))
            grad_q[piece.batch_row, :, piece.query_slice] = piece_grad_q.flatten(0, 1)

        gradients = grad_q.mul_(ctx.scale), grad_k.mul_(ctx.scale), grad_v, None, None
        return gradients


def attend_pieces(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask, scale: float
) -> torch.Tensor:
    """Compute attention for one piece of the mask after the other.

    q: queries (batch rows, query heads, queries, head size)
    k, v: keys and values (batch rows, key heads, keys, head size)

    Inputs in a lower precision are converted to float32, which does not make attention slower on a
    CPU. The result has the shape of the queries and the dtype of the values.
    """
    upcast = (states.to(torch.promote_types(states.dtype, torch.float32)) for states in (q, k, v))
    return _PieceAttention.apply(*upcast, mask.chunks, scale).to(v.dtype)

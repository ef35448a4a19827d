"""The reference of every operation, in torch: what fast versions are validated against, and what
runs where there is none.

N positions of B batch rows, Q each, D hidden size, I inner size, V vocabulary, L layers, H query
heads, K key heads, G = H / K, E head size, R of its features rotated, S cached positions.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from infer.attention.kv_cache import LayerWindow, PackedLayer
from infer.attention.masks import Mask
from infer.kernels.operands import Activation, Linear, Norm
from infer.kernels.packed_attention import attend_pieces

Rotation = tuple[
    torch.Tensor, torch.Tensor
]  # cosines and sines (N, 1, R), the sign of the rotation in the sines


def rms_norm(states: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Return the RMS norm of states (..., D); for a weight (L, heads, E) that of heads (N, L,
    heads, E)."""
    if norm.weight.ndim == 1 and norm.weight.dtype == states.dtype:
        return F.rms_norm(states, norm.weight.shape, norm.weight, norm.eps)
    normed = (
        F.rms_norm(states.to(norm.weight.dtype), states.shape[-1:], None, norm.eps) * norm.weight
    )
    return normed.to(states.dtype)


def add_rms_norm(
    states: torch.Tensor, change: torch.Tensor, norm: Norm, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return states + scale * change, (N, D), and the RMS norm of that."""
    summed = states + (change if scale == 1 else change * scale)
    return summed, rms_norm(summed, norm)


def linear(states: torch.Tensor, weights: Linear) -> torch.Tensor:
    """Return the outputs (N, O) of a linear layer for states (N, D)."""
    if weights.bias is None:
        return states @ weights.weight
    return torch.addmm(weights.bias, states, weights.weight)


def gated_activation(both: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return activation(gate) * up, (N, I), of gates and ups side by side, (N, 2 I)."""
    gate, up = both.chunk(2, dim=-1)
    return activation.function(gate).mul_(up)


def qk_norm_rope_write(
    projected: torch.Tensor,
    key_heads: int,
    qk_norm: Norm | None,
    rotation: Rotation | None,
    memory: LayerWindow | PackedLayer,
) -> torch.Tensor:
    """Norm and rotate queries and keys of projected heads (N, L, H + 2 K, E), in place, write keys
    and values to the L layers that begin with `memory`'s, and return the queries (N, L H, E).
    Several layers have no queries: they are a drafter's, which read the same context."""
    heads = projected.shape[2] - 2 * key_heads
    turning = projected[:, :, : heads + key_heads]
    normed = turning
    if qk_norm is not None:
        normed = rms_norm(turning, qk_norm)
    if rotation is not None:
        cosines, sines = rotation
        rotate_into(normed, cosines[:, None], sines[:, None], out=turning)
    elif qk_norm is not None:
        turning.copy_(normed)
    memory.write(projected[:, :, heads:])
    return projected[:, :, :heads].flatten(1, 2)


def rotate_into(
    states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, out: torch.Tensor
) -> None:
    """Write heads (N, L, heads, E), the first R features rotated by angles (N, 1, 1, R), to
    `out`."""
    size = cosines.shape[-1]
    if size < states.shape[-1]:
        out[..., size:] = states[..., size:]
    states = states[..., :size]
    out[..., :size] = torch.addcmul(states * cosines, states.roll(size // 2, -1), sines)


def attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: Mask | torch.Tensor | None,
    scale: float | None = None,
) -> torch.Tensor:
    """Return the attention (B, H, Q, E) of queries over keys and values (B, K, S, E), grouped heads
    included. Queries may also be packed by the key head they share, (B, K, G Q, E): the same
    numbers in the same order.

    A mask of ranges alone is evaluated in pieces (`infer.kernels.packed_attention`), one of a cache
    densely. A tensor (B, 1, Q, S), bool or additive, goes to SDPA as it is."""
    if not isinstance(mask, Mask):
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(
                queries.dtype
            )  # SDPA on the CPU silently misreads a mask of another dtype
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
        )
    scale = keys.shape[-1] ** -0.5 if scale is None else scale
    if mask.inside is None:
        apart = split_heads(queries, mask)
        return attend_pieces(apart, keys, values, mask, scale).reshape(queries.shape)
    packed = pack_heads(queries, keys)
    additive = mask.for_packed(packed.shape[2] // mask.inside.shape[-1], queries.dtype)
    mixed = F.scaled_dot_product_attention(packed, keys, values, attn_mask=additive, scale=scale)
    return mixed.reshape(queries.shape)


def split_heads(queries: torch.Tensor, mask: Mask) -> torch.Tensor:
    """Return queries, packed or not, as (B, H, Q, E)."""
    return queries.reshape(len(queries), -1, mask.ranges[0][0].shape[1], queries.shape[-1])


def pack_heads(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return queries, packed or not, as (B, K, G Q, E)."""
    rows, key_heads, _, size = keys.shape
    return queries.reshape(rows, key_heads, -1, size)


def attend(
    queries: torch.Tensor, memory: LayerWindow | PackedLayer, mask: Mask, scale: float
) -> torch.Tensor:
    """Return the attention (N, H E) of new positions' queries (N, H, E) over a layer of a cache."""
    return attend_by(attention, queries, memory, mask, scale)


def attend_by(
    attention: Callable,
    queries: torch.Tensor,
    memory: LayerWindow | PackedLayer,
    mask: Mask,
    scale: float,
) -> torch.Tensor:
    """Return the same by an implementation of `attention`."""
    shape = memory.rows, memory.width, memory.keys.shape[1], -1, queries.shape[-1]
    queries = queries.view(shape).permute(0, 2, 3, 1, 4)  # (B, K, G, Q, E)
    mixed = attention(queries.flatten(2, 3), memory.keys, memory.values, mask, scale).view(
        queries.shape
    )
    return mixed.permute(0, 3, 1, 2, 4).reshape(memory.rows * memory.width, -1)


def argmax_head(states: torch.Tensor, head: nn.Module) -> torch.Tensor:
    """Return the token with the largest logit, (...), after final states (..., D)."""
    return head(states.contiguous()).argmax(-1)

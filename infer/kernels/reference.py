"""The PyTorch reference implementation of every operation.

Fast versions are validated against these functions. If a device has no fast version of an
operation, the reference is used.

Dimensions: N positions of all batch rows, B batch rows, Q new positions per batch row, D hidden
size, I MLP size, O output size, L layers, H query heads, K key/value heads, G query heads per key
head (H / K), E head size, R rotated features of a head, S cached positions.
"""

from collections.abc import Callable

import torch
from torch.nn import functional as F

from infer.attention.kv_cache import LayerCacheView, PackedLayerView
from infer.attention.masks import AttentionMask
from infer.kernels.operands import Activation, LinearWeights, RMSNormWeights
from infer.kernels.packed_attention import attend_pieces

# Cosines and sines of the rotary angles, (N, 1, R) each. The first half of the sines is negated, so
# that transformers' `rotate_half` becomes a roll without a change of sign.
Rotation = tuple[torch.Tensor, torch.Tensor]


def rms_norm(states: torch.Tensor, norm: RMSNormWeights) -> torch.Tensor:
    """Return the RMS norm of hidden states or of heads.

    The weight of the norm has the shape (D,) for hidden states (..., D), and the shape
    (L, heads, E) for heads (N, L, heads, E).
    """
    if norm.weight.ndim == 1 and norm.weight.dtype == states.dtype:
        return F.rms_norm(states, norm.weight.shape, norm.weight, norm.eps)
    states_in_weight_dtype = states.to(norm.weight.dtype)
    normed = F.rms_norm(states_in_weight_dtype, states.shape[-1:], None, norm.eps) * norm.weight
    return normed.to(states.dtype)


def add_rms_norm(
    states: torch.Tensor, sublayer_output: torch.Tensor, norm: RMSNormWeights, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum `states + scale * sublayer_output` (N, D), and the RMS norm of the sum."""
    if scale != 1:
        sublayer_output = sublayer_output * scale
    summed = states + sublayer_output
    return summed, rms_norm(summed, norm)


def linear(states: torch.Tensor, weights: LinearWeights) -> torch.Tensor:
    """Return the outputs (N, O) of a linear layer for hidden states (N, D)."""
    if weights.bias is None:
        return states @ weights.weight
    return torch.addmm(weights.bias, states, weights.weight)


def gated_activation(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return activation(gate) * up, (N, I).

    gate_up: (N, 2 * I), `gate` and `up` concatenated
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return activation.function(gate).mul_(up)


def qk_norm_rope_write(
    projected: torch.Tensor,
    key_heads: int,
    qk_norm: RMSNormWeights | None,
    rotation: Rotation | None,
    layer_cache: LayerCacheView | PackedLayerView,
) -> torch.Tensor:
    """Normalise and rotate queries and keys, and write keys and values to the cache.

    projected: (N, L, H + 2 * K, E), queries, keys and values of all heads; changed in place
    qk_norm: norm of the query and key heads; None for no norm
    rotation: rotary angles; None for no rotation
    layer_cache: the cache of the first of L layers; the caches of the other layers follow it

    Returns the queries (N, L * H, E). L is 1, except for the context features of a drafter, whose
    keys and values are written for all layers of the drafter at once. Context features have no
    queries (H is 0).
    """
    query_heads = projected.shape[2] - 2 * key_heads
    queries_keys = projected[:, :, : query_heads + key_heads]
    normed = queries_keys
    if qk_norm is not None:
        normed = rms_norm(queries_keys, qk_norm)

    if rotation is not None:
        cosines, sines = rotation
        rotate_heads(normed, cosines[:, None], sines[:, None], out=queries_keys)
    elif qk_norm is not None:
        queries_keys.copy_(normed)

    layer_cache.write(projected[:, :, query_heads:])
    return projected[:, :, :query_heads].flatten(1, 2)


def rotate_heads(
    states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, out: torch.Tensor
) -> None:
    """Rotate the first R features of heads (N, L, heads, E), and write all features to `out`.

    cosines, sines: (N, 1, 1, R), see `Rotation`
    """
    rotated_size = cosines.shape[-1]
    if rotated_size < states.shape[-1]:
        out[..., rotated_size:] = states[..., rotated_size:]
    states = states[..., :rotated_size]
    half_rotated = states.roll(rotated_size // 2, -1)
    out[..., :rotated_size] = torch.addcmul(states * cosines, half_rotated, sines)


def attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: AttentionMask | torch.Tensor | None,
    scale: float | None = None,
) -> torch.Tensor:
    """Return the attention of queries over keys and values (B, K, S, E).

    queries: (B, H, Q, E), or packed by key head, (B, K, G * Q, E). Both have the same numbers in
        the same order. The result has the shape of the queries.
    mask: an AttentionMask or a tensor (B, 1, Q, S). An AttentionMask that only consists of ranges
        of keys (training) is evaluated in pieces (`infer.kernels.packed_attention`). An
        AttentionMask over a cache (decoding) is converted to a tensor. A tensor, boolean or
        additive, is passed to PyTorch's `scaled_dot_product_attention`.
    scale: factor of the scores; None for 1 / sqrt(E)
    """
    if not isinstance(mask, AttentionMask):
        if mask is not None and mask.dtype != torch.bool:
            # On the CPU, scaled_dot_product_attention silently computes a wrong result if an
            # additive mask has another dtype than the queries.
            mask = mask.to(queries.dtype)
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
        )

    if scale is None:
        scale = keys.shape[-1] ** -0.5
    tree_mask = mask.new_key_mask
    if tree_mask is None:
        unpacked = unpack_queries(queries, mask)
        return attend_pieces(unpacked, keys, values, mask, scale).reshape(queries.shape)

    packed = pack_queries(queries, keys)
    groups = packed.shape[2] // tree_mask.shape[-1]
    additive = mask.for_grouped_heads(groups, queries.dtype)
    attended = F.scaled_dot_product_attention(packed, keys, values, attn_mask=additive, scale=scale)
    return attended.reshape(queries.shape)


def unpack_queries(queries: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
    """Reshape queries to (B, H, Q, E), whether or not they are packed by key head."""
    new_positions = mask.key_ranges[0][0].shape[1]
    return queries.reshape(len(queries), -1, new_positions, queries.shape[-1])


def pack_queries(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Reshape queries to (B, K, G * Q, E), whether or not they are packed by key head.

    keys: (B, K, S, E)
    """
    batch_rows, key_heads, _, head_size = keys.shape
    return queries.reshape(batch_rows, key_heads, -1, head_size)


def attend(
    queries: torch.Tensor,
    layer_cache: LayerCacheView | PackedLayerView,
    mask: AttentionMask,
    scale: float,
) -> torch.Tensor:
    """Return the attention (N, H * E) of new positions over a layer of a cache.

    queries: (N, H, E)
    """
    return attend_with(attention, queries, layer_cache, mask, scale)


def attend_with(
    attention_function: Callable,
    queries: torch.Tensor,
    layer_cache: LayerCacheView | PackedLayerView,
    mask: AttentionMask,
    scale: float,
) -> torch.Tensor:
    """Implement `attend` with the given implementation of `attention`."""
    rows = layer_cache.batch_size
    width = layer_cache.query_length
    keys = layer_cache.keys
    values = layer_cache.values
    assert keys is not None
    assert values is not None
    grouped = queries.view(rows, width, keys.shape[1], -1, queries.shape[-1])
    grouped = grouped.permute(0, 2, 3, 1, 4)  # (B, K, G, Q, E)
    packed = grouped.flatten(2, 3)  # (B, K, G * Q, E)
    attended = attention_function(packed, keys, values, mask, scale).view(grouped.shape)
    return attended.permute(0, 3, 1, 2, 4).reshape(rows * width, -1)


def argmax_head(states: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return the token ids (...) with the largest logit, for final hidden states (..., D)."""
    return head(states.contiguous()).argmax(-1)

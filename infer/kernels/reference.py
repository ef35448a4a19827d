"""The PyTorch reference implementation of every operation.

Fast versions are validated against these functions. If a device has no fast version of an
operation, the function in this module is used.
"""

from collections.abc import Callable

import torch
from torch.nn import functional as F

from infer.attention.kv_cache import LayerCacheView, PackedLayerView
from infer.attention.masks import AttentionMask
from infer.kernels.operands import Activation, LinearWeights, RMSNormWeights
from infer.kernels.packed_attention import attend_pieces

# Cosines and sines of the rotary (RoPE) angles, each of shape (positions, 1, rotated features of a
# head). The first half of the sines is negated; transformers negates half of the features instead
# (`rotate_half`).
Rotation = tuple[torch.Tensor, torch.Tensor]


def rms_norm(states: torch.Tensor, norm: RMSNormWeights) -> torch.Tensor:
    """Return the RMS norm of hidden states, or of query and key heads.

    states: (..., hidden size), or (positions, layers, heads, head size)
    norm: its weight has the shape (hidden size,), or (layers, heads, head size)
    """
    if norm.weight.ndim == 1 and norm.weight.dtype == states.dtype:
        return F.rms_norm(states, norm.weight.shape, norm.weight, norm.eps)
    states_in_weight_dtype = states.to(norm.weight.dtype)
    normed = F.rms_norm(states_in_weight_dtype, states.shape[-1:], None, norm.eps) * norm.weight
    return normed.to(states.dtype)


def add_rms_norm(
    states: torch.Tensor, sublayer_output: torch.Tensor, norm: RMSNormWeights, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum `states + scale * sublayer_output`, and the RMS norm of the sum.

    The shapes are (positions, hidden size).
    """
    if scale != 1:
        sublayer_output = sublayer_output * scale
    summed = states + sublayer_output
    return summed, rms_norm(summed, norm)


def linear(states: torch.Tensor, weights: LinearWeights) -> torch.Tensor:
    """Return the outputs of a linear layer, (positions, outputs).

    states: (positions, inputs)
    """
    if weights.bias is None:
        return states @ weights.transposed_weight
    return torch.addmm(weights.bias, states, weights.transposed_weight)


def gated_activation(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return activation(gate) * up of a gated MLP, (positions, MLP size).

    gate_up: (positions, 2 * MLP size), `gate` and `up` concatenated
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
    """Normalise and rotate (RoPE) queries and keys, and write keys and values to the KV cache.

    projected: (positions, layers, query heads + 2 * key heads, head size), the projected queries,
        keys and values; changed in place
    qk_norm: norm of the query and key heads; None for no norm
    rotation: cosines and sines of the rotary angles; None for no rotation
    layer_cache: the cache of the first layer; the caches of the other layers follow it in memory

    Returns the queries (positions, layers * query heads, head size). In a forward pass, the number
    of layers is 1. It is larger when the keys and values of a drafter's context (the target's
    hidden states) are written for all layers of the drafter at once; then there are no query heads.
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
    """Apply rotary embeddings (RoPE) to heads, and write the result to `out`.

    states, out: (positions, layers, heads, head size)
    cosines, sines: (positions, 1, 1, rotated features), see `Rotation`

    Features after the rotated features are copied.
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
    """Return the attention of queries over keys and values, in the shape of the queries.

    queries: (B, query heads, new positions, head size); or packed by key head, (B, key heads, query
        heads per key head * new positions, head size). Both have the same memory layout.
    keys, values: (B, key heads, keys, head size)
    mask: an AttentionMask; or a tensor (B, 1, new positions, keys), boolean or additive; or None
    scale: factor by which the scores are multiplied; None for 1 / sqrt(head size)

    In decoding, an AttentionMask over a cache is converted to a tensor. In training, an
    AttentionMask allows ranges of keys, and attention is computed in pieces
    (`infer.kernels.packed_attention`).
    """
    if not isinstance(mask, AttentionMask):
        if mask is not None and mask.dtype != torch.bool:
            # If an additive mask does not have the dtype of the queries,
            # scaled_dot_product_attention on the CPU returns a wrong result without an error.
            mask = mask.to(queries.dtype)
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
        )

    if scale is None:
        scale = keys.shape[-1] ** -0.5
    tree_mask = mask.new_key_mask
    if tree_mask is None:
        unpacked = ungroup_query_heads(queries, mask)
        return attend_pieces(unpacked, keys, values, mask, scale).reshape(queries.shape)

    packed = group_query_heads(queries, keys)
    groups = packed.shape[2] // tree_mask.shape[-1]
    additive = mask.for_grouped_heads(groups, queries.dtype)
    attended = F.scaled_dot_product_attention(packed, keys, values, attn_mask=additive, scale=scale)
    return attended.reshape(queries.shape)


def ungroup_query_heads(queries: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
    """Reshape queries, packed by key head or not, to (B, query heads, new positions, head size)."""
    new_positions = mask.key_ranges[0][0].shape[1]
    return queries.reshape(len(queries), -1, new_positions, queries.shape[-1])


def group_query_heads(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Pack queries by key head, unless they are packed already.

    keys: (B, key heads, keys, head size)

    Returns (B, key heads, query heads per key head * new positions, head size).
    """
    batch_rows, key_heads, _, head_size = keys.shape
    return queries.reshape(batch_rows, key_heads, -1, head_size)


def attend(
    queries: torch.Tensor,
    layer_cache: LayerCacheView | PackedLayerView,
    mask: AttentionMask,
    scale: float,
) -> torch.Tensor:
    """Return the attention of new positions over the keys and values of one layer in `layer_cache`.

    queries: (positions, query heads, head size)

    Returns (positions, query heads * head size).
    """
    return attend_with(attention, queries, layer_cache, mask, scale)


def attend_with(
    attention_function: Callable,
    queries: torch.Tensor,
    layer_cache: LayerCacheView | PackedLayerView,
    mask: AttentionMask,
    scale: float,
) -> torch.Tensor:
    """Compute attention over the keys and values in `layer_cache`, as the function `attend` does,
    but by calling `attention_function`. It must have the arguments of the function `attention`,
    which takes keys and values as tensors."""
    rows = layer_cache.batch_size
    width = layer_cache.query_length
    keys = layer_cache.keys
    values = layer_cache.values
    assert keys is not None
    assert values is not None
    grouped = queries.view(rows, width, keys.shape[1], -1, queries.shape[-1])
    # (batch rows, key heads, query heads per key head, new positions, head size)
    grouped = grouped.permute(0, 2, 3, 1, 4)
    packed = grouped.flatten(2, 3)
    attended = attention_function(packed, keys, values, mask, scale).view(grouped.shape)
    return attended.permute(0, 3, 1, 2, 4).reshape(rows * width, -1)


def argmax_head(states: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return the token id with the largest logit for each position.

    states: final hidden states (..., hidden size)
    head: function that returns the logits (..., vocabulary size)
    """
    return head(states.contiguous()).argmax(-1)

"""Triton kernels for the operations of a decoder layer between its matmuls: norms, rotary
embeddings, cache writes and the activation of the MLP.

One program computes one position, or some heads or features of it. The tile sizes depend only on
the model's sizes. The results of a position therefore do not depend on how many other positions are
computed in the same call. All values are computed in float32 and rounded when they are stored.

In shapes, N is the number of positions, D the hidden size, H the number of query heads, K the
number of key heads, E the head size and R the number of rotated features of a head.
"""

import torch
import triton
import triton.language as tl

from infer.attention.kv_cache import LayerCacheView, PackedLayerView
from infer.kernels import reference
from infer.kernels.operands import Activation, RMSNormWeights
from infer.kernels.reference import Rotation

# These kernels compute in float32, which would lose precision for float64.
FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NORM_FEATURES_PER_WARP = 512
MAX_NORM_WARPS = 16
# A program of `_qk_norm_rope_write` computes at most this many heads and features.
MAX_HEADS_PER_PROGRAM = 8
MAX_HEAD_FEATURES_PER_PROGRAM = 1024
HEAD_FEATURES_PER_WARP = 256
GATED_FEATURES_PER_PROGRAM = 1024


@triton.jit
def _add_rms_norm(
    states, sublayer_output, weight, summed, normed, scale, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    feature = tl.arange(0, BLOCK_D)
    is_feature = feature < D
    offset = tl.program_id(0).to(tl.int64) * D + feature
    total = tl.load(states + offset, mask=is_feature, other=0.0).to(tl.float32)
    if ADDS:
        change = tl.load(sublayer_output + offset, mask=is_feature, other=0.0).to(tl.float32)
        rounded_total = (total + scale * change).to(summed.dtype.element_ty)
        tl.store(summed + offset, rounded_total, mask=is_feature)
        total = rounded_total.to(tl.float32)
    mean_square = tl.sum(total * total, 0) / D
    norm_weight = tl.load(weight + feature, mask=is_feature, other=0.0).to(tl.float32)
    result = total * tl.rsqrt(mean_square + eps) * norm_weight
    tl.store(normed + offset, result.to(normed.dtype.element_ty), mask=is_feature)


def rms_norm(states: torch.Tensor, norm: RMSNormWeights) -> torch.Tensor:
    """Implement `infer.kernels.reference.rms_norm`. Norms of heads, whose weight has several axes,
    are computed by the reference."""
    if norm.weight.ndim > 1 or states.dtype not in FUSED_DTYPES:
        return reference.rms_norm(states, norm)
    rows = states.reshape(-1, states.shape[-1]).contiguous()
    _, normed = _launch_add_rms_norm(rows, None, norm, 1.0)
    return normed.view(states.shape)


def add_rms_norm(
    states: torch.Tensor, sublayer_output: torch.Tensor, norm: RMSNormWeights, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `infer.kernels.reference.add_rms_norm` as one kernel."""
    if states.dtype not in FUSED_DTYPES:
        return reference.add_rms_norm(states, sublayer_output, norm, scale)
    return _launch_add_rms_norm(states.contiguous(), sublayer_output.contiguous(), norm, scale)


def _launch_add_rms_norm(
    states: torch.Tensor, sublayer_output: torch.Tensor | None, norm: RMSNormWeights, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum and its norm, both (N, D), for `states` and `sublayer_output` (N, D). Without
    a `sublayer_output`, the sum is `states`."""
    positions, hidden_size = states.shape
    summed = states if sublayer_output is None else torch.empty_like(states)
    normed = torch.empty_like(states)
    block_d = triton.next_power_of_2(hidden_size)
    num_warps = min(MAX_NORM_WARPS, max(1, block_d // NORM_FEATURES_PER_WARP))
    _add_rms_norm[(positions,)](
        states, states if sublayer_output is None else sublayer_output, norm.weight, summed, normed,
        scale, norm.eps, D=hidden_size, BLOCK_D=block_d, ADDS=sublayer_output is not None,
        num_warps=num_warps,
    )  # fmt: skip
    return summed, normed


@triton.jit
def _gated_activation(
    gate_up, out, linear_coefficient, cubic_coefficient,
    MLP_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    is_feature = feature < MLP_SIZE
    pointers = gate_up + position * 2 * MLP_SIZE + feature
    gate = tl.load(pointers, mask=is_feature, other=0.0).to(tl.float32)
    up = tl.load(pointers + MLP_SIZE, mask=is_feature, other=0.0).to(tl.float32)
    exponent = gate * (linear_coefficient + cubic_coefficient * gate * gate)
    result = gate * tl.sigmoid(exponent) * up
    tl.store(out + position * MLP_SIZE + feature, result.to(out.dtype.element_ty), mask=is_feature)


def gated_activation(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Implement `infer.kernels.reference.gated_activation` as one kernel, for activations of the
    form x * sigmoid(a x + b x^3)."""
    if activation.coefficients is None or gate_up.dtype not in FUSED_DTYPES:
        return reference.gated_activation(gate_up, activation)
    positions, double_size = gate_up.shape
    mlp_size = double_size // 2
    out = gate_up.new_empty(positions, mlp_size)
    grid = (positions, triton.cdiv(mlp_size, GATED_FEATURES_PER_PROGRAM))
    _gated_activation[grid](
        gate_up.contiguous(), out, *activation.coefficients,
        MLP_SIZE=mlp_size, BLOCK_SIZE=GATED_FEATURES_PER_PROGRAM, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _qk_norm_rope_write(
    projected, weight, cosines, sines, queries, cache, slot_mapping, eps,
    position_stride, layer_stride, plane_stride, num_layers,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, R: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_E: tl.constexpr, NORMALIZES: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    # Heads are numbered in the order queries, keys, values.
    head = tl.program_id(2) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    feature = tl.arange(0, BLOCK_E)[None]
    is_value = (head < H + 2 * K) & (feature < E)
    is_query_or_key = is_value & (head < H + K)
    source = projected + position * position_stride + layer * layer_stride + head * E
    unrotated = tl.load(source + feature, mask=is_value, other=0.0).to(tl.float32)
    result = unrotated

    # The feature that each feature is combined with in the rotation
    partner = tl.where(feature < R // 2, feature + R // 2, feature - R // 2)
    is_rotated = is_query_or_key & (feature < R)
    partner_value = tl.load(source + partner, mask=is_rotated, other=0.0).to(tl.float32)
    if NORMALIZES:
        mean_square = tl.sum(unrotated * unrotated, 1) / E
        inverse_norm = tl.rsqrt(mean_square + eps)[:, None]
        head_weight = weight + layer * (H + K) * E + head * E
        own_weight = tl.load(head_weight + feature, mask=is_query_or_key, other=0.0)
        partner_weight = tl.load(head_weight + partner, mask=is_rotated, other=0.0)
        result = result * inverse_norm * own_weight.to(tl.float32)
        partner_value = partner_value * inverse_norm * partner_weight.to(tl.float32)
    if R > 0:
        is_angle = feature < R
        cosine = tl.load(cosines + position * R + feature, mask=is_angle, other=1.0).to(tl.float32)
        sine = tl.load(sines + position * R + feature, mask=is_angle, other=0.0).to(tl.float32)
        result = result * cosine + partner_value * sine
    result = tl.where(is_query_or_key, result, unrotated).to(queries.dtype.element_ty)

    query_row = (position * num_layers + layer) * H
    tl.store(queries + (query_row + head) * E + feature, result, mask=is_value & (head < H))
    cache_head = head - H
    plane = 2 * layer + cache_head // K
    slot = tl.load(slot_mapping + position)
    destination = plane * plane_stride + slot * (K * E) + (cache_head % K) * E + feature
    tl.store(cache + destination, result, mask=is_value & (head >= H))


def qk_norm_rope_write(
    projected: torch.Tensor,
    key_heads: int,
    qk_norm: RMSNormWeights | None,
    rotation: Rotation | None,
    layer_cache: LayerCacheView | PackedLayerView,
) -> torch.Tensor:
    """Implement `infer.kernels.reference.qk_norm_rope_write` as one kernel. Unlike the reference,
    it does not change `projected`. Packed sequences, which are not written to a cache, are computed
    by the reference."""
    if isinstance(layer_cache, PackedLayerView) or projected.dtype not in FUSED_DTYPES:
        return reference.qk_norm_rope_write(projected, key_heads, qk_norm, rotation, layer_cache)
    projected = projected.contiguous()
    positions, layers, heads, head_size = projected.shape
    query_heads = heads - 2 * key_heads
    queries = projected.new_empty(positions, layers * query_heads, head_size)
    planes = layer_cache.buffer[2 * layer_cache.layer_index :]
    weight = projected
    eps = 0.0
    if qk_norm is not None:
        weight = qk_norm.weight.contiguous()
        eps = qk_norm.eps
    cosines = sines = projected
    rotated_size = 0
    if rotation is not None:
        cosines, sines = (angles.contiguous() for angles in rotation)
        rotated_size = cosines.shape[-1]

    block_e = triton.next_power_of_2(head_size)
    block_heads = max(1, min(MAX_HEADS_PER_PROGRAM, MAX_HEAD_FEATURES_PER_PROGRAM // block_e))
    _qk_norm_rope_write[(positions, layers, triton.cdiv(heads, block_heads))](
        projected, weight, cosines, sines, queries, planes, layer_cache.slot_mapping, eps,
        projected.stride(0), projected.stride(1), planes.stride(0), layers,
        H=query_heads, K=key_heads, E=head_size, R=rotated_size, BLOCK_HEADS=block_heads,
        BLOCK_E=block_e, NORMALIZES=qk_norm is not None,
        num_warps=max(1, block_heads * block_e // HEAD_FEATURES_PER_WARP),
    )  # fmt: skip
    return queries

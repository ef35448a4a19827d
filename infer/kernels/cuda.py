"""Fast versions of operations on NVIDIA GPUs.

Decoding uses Triton kernels: those of `infer.kernels.triton_rows` between the matmuls of a layer,
and those of `infer.kernels.triton_attention` and `infer.kernels.triton_search`. Training uses
FlexAttention.
"""

from collections.abc import Callable
from functools import cache
from typing import cast

import torch

from infer.attention.kv_cache import LayerCacheView, PackedLayerView
from infer.attention.masks import AttentionMask
from infer.kernels import reference, triton_rows
from infer.kernels.table import FastKernels
from infer.kernels.triton_attention import tree_attention
from infer.kernels.triton_search import best_first_search


def attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: AttentionMask | torch.Tensor | None,
    scale: float | None = None,
) -> torch.Tensor:
    """Implement `infer.kernels.reference.attention` on a GPU.

    FlexAttention is used in training, where the mask allows ranges of keys for each query. The
    Triton kernel is used in decoding, where the keys are in a cache and the mask includes the mask
    between draft-tree nodes. If the mask is a tensor, the reference implementation is used.
    """
    if not isinstance(mask, AttentionMask):
        return reference.attention(queries, keys, values, mask, scale)
    if scale is None:
        scale = keys.shape[-1] ** -0.5
    if mask.new_key_mask is None:
        unpacked = reference.ungroup_query_heads(queries, mask)
        return flex_attention(unpacked, keys, values, mask, scale).reshape(queries.shape)
    new_positions = mask.new_key_mask.shape[-1]
    rows, _, _, head_size = keys.shape
    by_position = queries.reshape(rows, -1, new_positions, head_size).transpose(1, 2)
    attended = tree_attention(by_position.flatten(0, 1).contiguous(), keys, values, mask, scale)
    by_head = attended.view(rows, new_positions, -1, head_size).transpose(1, 2)
    return by_head.reshape(queries.shape)


def attend(
    queries: torch.Tensor,
    layer_cache: LayerCacheView | PackedLayerView,
    mask: AttentionMask,
    scale: float,
) -> torch.Tensor:
    """Implement `infer.kernels.reference.attend` on a GPU. In decoding, queries and results are not
    rearranged."""
    if mask.new_key_mask is None:
        return reference.attend_with(attention, queries, layer_cache, mask, scale)
    assert layer_cache.keys is not None
    assert layer_cache.values is not None
    return tree_attention(queries.contiguous(), layer_cache.keys, layer_cache.values, mask, scale)


def flex_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: AttentionMask,
    scale: float,
) -> torch.Tensor:
    """Compute attention with FlexAttention.

    queries: (batch rows, heads, positions, head size)

    Queries and keys are cast to the dtype of the values. This is necessary under autocast: norms
    then return queries and keys in float32, and autocast does not cast the inputs of FlexAttention.
    """
    queries = queries.to(values.dtype)
    keys = keys.to(values.dtype)
    return compile_flex_attention()(
        queries, keys, values, block_mask=mask.flex_block_mask, scale=scale, enable_gqa=True
    )


@cache
def compile_flex_attention() -> Callable[..., torch.Tensor]:
    """Return FlexAttention, compiled with torch.compile on its first call for each shape."""
    from torch.nn.attention import flex_attention

    compiled = torch.compile(flex_attention.flex_attention)
    return cast(Callable[..., torch.Tensor], compiled)


CUDA_FUNCTIONS_BY_OPERATION = {
    "rms_norm": triton_rows.rms_norm,
    "add_rms_norm": triton_rows.add_rms_norm,
    "qk_norm_rope_write": triton_rows.qk_norm_rope_write,
    "gated_activation": triton_rows.gated_activation,
    "attention": attention,
    "attend": attend,
    "best_first_search": best_first_search,
}
CUDA_FAST_KERNELS = FastKernels(CUDA_FUNCTIONS_BY_OPERATION)

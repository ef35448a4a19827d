"""Fast versions of operations on NVIDIA GPUs: attention, and the search for draft-tree nodes.

Attention uses a Triton kernel for decoding and FlexAttention for training. The search is one Triton
kernel.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import cast

import torch

from infer.attention.masks import AttentionMask
from infer.kernels import reference
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
    packed = reference.group_query_heads(queries, keys)
    return tree_attention(packed, keys, values, mask, scale).view(queries.shape)


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
    "attention": attention,
    "attend": partial(reference.attend_with, attention),
    "best_first_search": best_first_search,
}
CUDA_FAST_KERNELS = FastKernels(CUDA_FUNCTIONS_BY_OPERATION)

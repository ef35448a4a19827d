"""Fast versions of operations on CUDA: attention and best-first search.

Attention uses a Triton kernel or FlexAttention, and the best-first search is one Triton kernel.
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
    """Implement `infer.kernels.reference.attention`.

    A mask that only consists of ranges of keys (training) is evaluated by FlexAttention, and a mask
    over a cache (decoding) by the Triton kernel.
    """
    if not isinstance(mask, AttentionMask):
        return reference.attention(queries, keys, values, mask, scale)
    if scale is None:
        scale = keys.shape[-1] ** -0.5
    if mask.new_key_mask is None:
        unpacked = reference.unpack_queries(queries, mask)
        return flex_attention(unpacked, keys, values, mask, scale).reshape(queries.shape)
    packed = reference.pack_queries(queries, keys)
    return tree_attention(packed, keys, values, mask, scale).view(queries.shape)


def flex_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: AttentionMask,
    scale: float,
) -> torch.Tensor:
    """Compute attention with FlexAttention. queries: (batch rows, heads, positions, head size).

    Under autocast, norms return queries and keys in float32, and the inputs of FlexAttention are
    not cast automatically. So queries and keys are cast to the dtype of the values.
    """
    queries = queries.to(values.dtype)
    keys = keys.to(values.dtype)
    return compile_flex_attention()(
        queries, keys, values, block_mask=mask.flex_block_mask, scale=scale, enable_gqa=True
    )


@cache
def compile_flex_attention() -> Callable[..., torch.Tensor]:
    """Compile FlexAttention. torch.compile specialises the compiled function for each shape."""
    from torch.nn.attention import flex_attention

    compiled = torch.compile(flex_attention.flex_attention)
    return cast(Callable[..., torch.Tensor], compiled)


CUDA_OPERATIONS = {
    "attention": attention,
    "attend": partial(reference.attend_with, attention),
    "best_first_search": best_first_search,
}
CUDA_FAST_KERNEL_TABLE = FastKernels(CUDA_OPERATIONS)

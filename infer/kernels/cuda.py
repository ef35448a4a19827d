"""Operations on CUDA: attention by Triton and by FlexAttention, and the best-first search in one
kernel."""

from functools import cache, partial

import torch

from infer.attention.masks import Mask
from infer.kernels import reference
from infer.kernels.triton_attention import tree_attention
from infer.kernels.triton_search import best_first_search


def attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: Mask | torch.Tensor | None,
    scale: float | None = None,
) -> torch.Tensor:
    """See `infer.kernels.reference.attention`. A mask of ranges alone goes through FlexAttention,
    one of a cache through the Triton kernel."""
    if not isinstance(mask, Mask):
        return reference.attention(queries, keys, values, mask, scale)
    scale = keys.shape[-1] ** -0.5 if scale is None else scale
    if mask.inside is None:
        return flex_attention(
            reference.split_heads(queries, mask), keys, values, mask, scale
        ).reshape(queries.shape)
    return tree_attention(reference.pack_heads(queries, keys), keys, values, mask, scale).view(
        queries.shape
    )


def flex_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: Mask, scale: float
) -> torch.Tensor:
    """Return the attention of queries (B, H, Q, E) by FlexAttention. Autocast leaves queries and
    keys, which come out of norms, in float32, and does not cast for it."""
    queries = queries.to(values.dtype)
    keys = keys.to(values.dtype)
    return compiled_flex_attention()(
        queries, keys, values, block_mask=mask.tiles, scale=scale, enable_gqa=True
    )


@cache
def compiled_flex_attention():
    """Return FlexAttention, compiled once per shape."""
    from torch.nn.attention import flex_attention

    return torch.compile(flex_attention.flex_attention)


OPERATIONS = {
    "attention": attention,
    "attend": partial(reference.attend_by, attention),
    "best_first_search": best_first_search,
}

"""Attention while decoding: by a Triton kernel where there is CUDA, by SDPA elsewhere.

B rows, H query heads, K key heads, G = H / K, Q new positions, S cached positions, E head size.
"""

import warnings
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from infer.attention.masks import PieceMask, TreeMask, attend_pieces, flex_attention

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: "torch.Tensor | TreeMask | PieceMask | BlockMask | None",
    scale: float,
) -> torch.Tensor:
    """Return the attention (B, K, G Q, E) of queries packed by the key head they share over keys and values (B, K, S,
    E), under a mask for them, additive or bool, (B, 1, G Q, S), or one of the Q positions that is evaluated here."""
    if isinstance(mask, TreeMask):
        from infer.attention.tree_kernel import tree_attention

        return tree_attention(queries, keys, values, mask, scale)
    if mask is not None and not isinstance(mask, torch.Tensor):
        return attend_packed(queries, keys, values, mask, scale)
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)


def attend_packed(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: "PieceMask | BlockMask", scale: float
) -> torch.Tensor:
    """Return `attend`'s result for packed rows, S = Q: in pieces, or by FlexAttention."""
    heads = queries.unflatten(2, (-1, keys.shape[2])).flatten(1, 2)  # (B, H, Q, E)
    run = attend_pieces if isinstance(mask, PieceMask) else flex_attention
    return run(heads, keys, values, mask, scale).unflatten(1, (keys.shape[1], -1)).flatten(2, 3)


def attend_grouped(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | TreeMask
) -> torch.Tensor:
    """Return the attention (B, H, Q, E) of query heads that are not packed over keys and values (B, K, S, E), under a
    mask of `attend`'s kinds, dense ones (B, 1, Q, S)."""
    if not isinstance(mask, TreeMask):
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
    packed = queries.unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
    found = attend(packed, keys, values, mask, queries.shape[-1] ** -0.5)
    return found.unflatten(2, (-1, queries.shape[2])).flatten(1, 2)


@cache
def has_kernel(device: torch.device) -> bool:
    """Return whether attention on a device takes a `TreeMask`: CUDA with Triton, whose kernel is compared with the
    reference first."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    try:
        right = kernel_error(device) < 1e-2
        reason = "other results than SDPA"
    except Exception as error:  # no C compiler, a device that Triton does not know, ...
        right, reason = False, str(error)
    if not right:
        warnings.warn(f"attention goes without its Triton kernel, and takes longer: {reason}", stacklevel=2)
    return right


def kernel_error(device: torch.device, dtype: torch.dtype = torch.float32, window: int | None = 9) -> float:
    """Return the greatest difference between the kernel and its reference over a small cache of random numbers."""
    generator = torch.Generator().manual_seed(0)
    queries, both = (
        torch.randn(shape, generator=generator).to(device, dtype) for shape in ((2, 2, 18, 24), (2, 2, 2, 90, 24))
    )
    inside = torch.eye(6, dtype=torch.bool).logical_or(torch.rand(2, 6, 6, generator=generator) < 0.5).tril().to(device)
    ends = torch.tensor([75, 3], device=device)
    mask = TreeMask(ends, inside, ends[:, None] + torch.tensor([0, 1, 1, 2, 3, 3], device=device), window)
    seen = mask.dense(both.shape[3]).repeat(1, 1, 3, 1)
    expected = F.scaled_dot_product_attention(queries, *both, attn_mask=seen, scale=0.2)
    return float((attend(queries, *both, mask, 0.2) - expected).abs().max())

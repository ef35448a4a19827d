"""The attention masks of a target. Layers of different types have different masks, because they
differ in the sliding window or attention chunk.

Dimension letters in this module: B batch rows, M tree nodes.
"""

from collections.abc import Callable
from functools import partial

import torch

from infer.attention.kv_cache import CacheView
from infer.attention.masks import AttentionMask, build_tree_mask
from infer.targets.support import CHUNKED_ATTENTION


def build_masks_by_layer_type(
    windows: dict[str, int | None], make_mask: Callable[..., AttentionMask]
) -> dict[str, AttentionMask]:
    """Return the attention mask of every layer type, made by `make_mask(window=, chunked=)`.

    windows: the sliding window or chunk size of every layer type, see `get_attention_windows`
    """
    return {
        layer_type: make_mask(window=window, chunked=layer_type == CHUNKED_ATTENTION)
        for layer_type, window in windows.items()
    }


def build_tree_masks(
    windows: dict[str, int | None],
    ancestors: torch.Tensor,
    positions: torch.Tensor,
    cached_lengths: torch.Tensor,
    cache_view: CacheView,
) -> dict[str, AttentionMask]:
    """Return by layer type the attention masks for verifying draft trees.

    ancestors: (B, M, M) bool; entry [b, i, j] is true if node j is node i or an ancestor of node i
    positions: (B, M) int64, absolute position of every node
    cached_lengths: (B,) int64, number of cached positions of every batch row

    If all batch rows have the same cached length and every tree consists of its root, every query
    attends to every key, so that no mask is needed. This is the most frequent case.
    """
    sees_all_keys = ancestors.shape[1] == 1 and cache_view.cache.has_uniform_lengths
    make_mask = partial(
        build_tree_mask,
        cached_lengths,
        positions,
        ancestors,
        cache_view.visible_end,
        sees_all_keys=sees_all_keys,
    )
    return build_masks_by_layer_type(windows, make_mask)


def build_causal_mask(rows: int, width: int, device: torch.device) -> torch.Tensor:
    """Return the causal mask of `width` consecutive positions, the same for `rows` batch rows,
    (rows, width, width) bool. An entry is true if the position on axis 1 attends to the position on
    axis 2."""
    mask = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    return mask.expand(rows, -1, -1)

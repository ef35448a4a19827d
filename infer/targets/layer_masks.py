"""The attention masks of a target's layer types, which differ by sliding window or chunk."""

from collections.abc import Callable
from functools import partial

import torch

from infer.attention.kv_cache import CacheView
from infer.attention.masks import AttentionMask, build_tree_mask
from infer.targets.support import CHUNKED_ATTENTION


def build_masks_by_layer_type(
    windows: dict[str, int | None], make_mask: Callable[..., AttentionMask]
) -> dict[str, AttentionMask]:
    """Return `make_mask(window=, chunked=)` for every layer type, given their attention windows."""
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
    """Return by layer type the masks of tree nodes at absolute positions (B, M).

    ancestors: (B, M, M) bool. cached_lengths: (B,). If all rows have the same length and their
    trees are only roots, every query attends to every key. This is the most frequent case, and
    needs no mask.
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
    """Return which positions of a chain attend to which, (rows, width, width) bool."""
    mask = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    return mask.expand(rows, -1, -1)

"""The attention masks of a target, one for each layer type (kind of attention, such as
"sliding_attention"). The masks differ in the size of the sliding window or of the attention chunk
(Llama 4)."""

from collections.abc import Callable
from functools import partial

import torch

from infer.attention.kv_cache import CacheView
from infer.attention.masks import AttentionMask, build_tree_mask
from infer.targets.support import CHUNKED_ATTENTION_LAYER_TYPE


def build_masks_by_layer_type(
    windows: dict[str, int | None], make_mask: Callable[..., AttentionMask]
) -> dict[str, AttentionMask]:
    """Return the attention mask of every layer type, as a dictionary from layer type to mask.

    windows: size of the sliding window or attention chunk of every layer type, in positions; None
        means full attention
    make_mask: returns the mask of one layer type. It is called with the keyword arguments `window`
        (the size) and `chunked` (whether it is the size of an attention chunk)
    """
    return {
        layer_type: make_mask(window=window, chunked=layer_type == CHUNKED_ATTENTION_LAYER_TYPE)
        for layer_type, window in windows.items()
    }


def build_tree_masks(
    windows: dict[str, int | None],
    ancestors: torch.Tensor,
    positions: torch.Tensor,
    cached_lengths: torch.Tensor,
    cache_view: CacheView,
) -> dict[str, AttentionMask]:
    """Return the attention masks for verifying draft trees, as a dictionary from layer type to
    mask.

    windows: size of the sliding window or attention chunk of every layer type, in positions; None
        means full attention
    ancestors: (B, num_nodes, num_nodes) bool; entry [b, i, j] is true if node j is node i or an
        ancestor of node i
    positions: (B, num_nodes) int64, absolute position of every node
    cached_lengths: (B,) int64, number of cached positions of every batch row

    If all batch rows have the same cached length and every tree consists only of its root, every
    query attends to every key. The masks are then marked with `sees_all_keys`, and attention skips
    them.
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
    """Return the causal mask of `width` consecutive positions, repeated for `rows` batch rows. The
    shape is (rows, width, width) bool. An entry is true if the position on axis 1 attends to the
    position on axis 2."""
    mask = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    return mask.expand(rows, -1, -1)

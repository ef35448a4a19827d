"""What a drafter keeps of the sequences that it drafts for: the KV cache of their context.

B batch rows, W slots of a block, E head size.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from transformers import Qwen3Config

from infer.attention.kv_cache import CacheView, KVCache
from infer.attention.masks import AttentionMask, build_draft_mask

# The most positions that one pass writes to a cache that drops what left the sliding window; a
# block may be longer.
MAX_POSITIONS_WRITTEN_TO_SLIDING_CACHE = 64
# Whether a layer is causal within the block, and its sliding window in positions or None.
AttentionPattern = tuple[bool, int | None]


class BlockPosition(NamedTuple):
    """Where the blocks of a batch are drafted: after the context in the KV cache."""

    context_lengths: torch.Tensor  # (B,) int64 cached positions before each block
    rotary: tuple[torch.Tensor, torch.Tensor]  # cos and sin of the blocks' positions, (B, W, E)
    cache_window: CacheView


def build_cached_block_mask(
    position: BlockPosition, num_queries: int, pattern: AttentionPattern
) -> AttentionMask:
    """Return the attention mask of blocks of `num_queries` slots over their cached context."""
    window = position.cache_window
    keys = window.visible_end - window.visible_start
    context_lengths = position.context_lengths - window.visible_start
    return build_draft_mask(
        context_lengths, num_queries, keys, *pattern, sees_all_keys=window.cache.has_uniform_lengths
    )


@dataclass
class DrafterState:
    """The context of the sequences that a drafter drafts for: keys and values, in batch rows that
    are added and removed as in the `KVCache`."""

    cache: KVCache
    # cos and sin of every position, (1, capacity, E) each
    rotary_tables: tuple[torch.Tensor, torch.Tensor]

    @contextmanager
    def add(self, count: int) -> Generator[Self]:
        """Yield a state of `count` new empty batch rows in the same memory, to be filled; they
        become the next rows of this state when the block is left."""
        with self.cache.add_rows(count) as cache:
            yield replace(self, cache=cache)

    def next_rotary(self, rows: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin (rows, count, E) of the `count` positions after the committed ones of
        each batch row."""
        positions = self.cache.next_positions(rows, count)
        cos_table, sin_table = self.rotary_tables
        cos = torch.embedding(cos_table[0], positions)
        sin = torch.embedding(sin_table[0], positions)
        return cos, sin

    def keep(self, order: list[int]) -> None:
        """Replace the batch rows: new row i is the old row order[i]; other rows are removed."""
        self.cache.keep_rows(order)

    def read(self, row: int, start: int, count: int) -> list[torch.Tensor]:
        """Return copies of the cached tensors of `count` positions of a batch row."""
        return self.cache.read_positions(row, start, count)

    def restore(self, row: int, ids: list[int], pieces: list[list[torch.Tensor]]) -> None:
        """Fill an empty batch row with positions that `read` returned, in one or more pieces.

        `ids` are the tokens of these positions.
        """
        self.cache.restore_positions(row, pieces)


def allocate_cache(
    config: Qwen3Config,
    patterns: list[AttentionPattern],
    rows: int,
    capacity: int,
    block_size: int,
    weight: torch.Tensor,
    keep_all: bool,
) -> KVCache:
    """Return an empty cache for `rows` sequences of up to `capacity` positions, blocks included.

    `patterns` are those of the layers. Where all layers slide, the cache drops positions that left
    their window, unless `keep_all`. Dtype and device are those of `weight`.
    """
    windows = [window for _, window in patterns if window is not None]
    max_window = None
    cache_capacity = capacity
    pass_positions = None
    if len(windows) == len(patterns):
        max_window = max(windows)
        if not keep_all:
            pass_positions = max(MAX_POSITIONS_WRITTEN_TO_SLIDING_CACHE, block_size)
            cache_capacity = max_window + max_window // 4 + 2 * pass_positions
    if cache_capacity >= capacity:
        cache_capacity = capacity
        pass_positions = None

    assert config.num_key_value_heads is not None
    heads = (config.num_key_value_heads, config.head_dim)
    layers = dict.fromkeys(range(config.num_hidden_layers), (heads, heads))
    return KVCache(
        layers,
        rows,
        cache_capacity,
        weight.dtype,
        weight.device,
        sliding_window=max_window,
        max_query_length=pass_positions,
    )

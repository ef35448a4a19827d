"""The decoding state of a drafter: the KV cache of the sequences for which the drafter drafts.

B batch rows, W input positions (slots) of a block, E head size.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from transformers import Qwen3Config

from infer.attention.kv_cache import CacheView, KVCache
from infer.attention.masks import AttentionMask, build_draft_mask

# Maximum number of positions that one forward pass writes to a cache that drops positions outside
# the sliding window. If a drafted block is longer, its length is the maximum.
MAX_POSITIONS_WRITTEN_TO_SLIDING_CACHE = 64
# The attention of a layer: whether it is causal within the drafted block, and the length of the
# sliding window in positions (None: full attention).
AttentionPattern = tuple[bool, int | None]


class BlockPosition(NamedTuple):
    """The positions of the drafted blocks of a batch: the length of each batch row's context, the
    rotary embeddings of the blocks, and the KV cache that the blocks attend to."""

    context_lengths: torch.Tensor  # (B,) int64: number of cached positions before each block
    # cos and sin of the blocks' rotary embeddings, (B, positions of a block, head size) each
    rotary: tuple[torch.Tensor, torch.Tensor]
    cache_view: CacheView


def build_cached_block_mask(
    position: BlockPosition, num_queries: int, pattern: AttentionPattern
) -> AttentionMask:
    """Return the attention mask of drafted blocks, which attend to the cached context and to
    themselves.

    `position` describes the blocks. `num_queries` is the number of input positions of a block.
    `pattern` tells whether attention is causal within the block, and the length of the sliding
    window (None: no window).
    """
    window = position.cache_view
    keys = window.visible_end - window.visible_start
    context_lengths = position.context_lengths - window.visible_start
    return build_draft_mask(
        context_lengths, num_queries, keys, *pattern, sees_all_keys=window.cache.has_uniform_lengths
    )


@dataclass
class DrafterState:
    """The decoding state of a drafter: the keys and values of each batch row's committed
    positions."""

    cache: KVCache
    # cos and sin of the rotary embeddings of all positions, (1, positions, head size) each
    rotary_tables: tuple[torch.Tensor, torch.Tensor]

    @contextmanager
    def add(self, count: int) -> Generator[Self]:
        """Yield a state of `count` new empty batch rows, which the caller fills.

        The new state uses this state's memory. When the `with` block ends, the new batch rows are
        appended to this state.
        """
        with self.cache.add_rows(count) as cache:
            yield replace(self, cache=cache)

    def next_rotary(self, rows: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, (rows, count, head_size) each, of the rotary embeddings of the
        `count` positions that follow the committed positions of each batch row."""
        positions = self.cache.next_positions(rows, count)
        cos_table, sin_table = self.rotary_tables
        cos = torch.embedding(cos_table[0], positions)
        sin = torch.embedding(sin_table[0], positions)
        return cos, sin

    def keep(self, order: list[int]) -> None:
        """Select and reorder batch rows: row order[i] becomes row i. Rows that are not in `order`
        are removed."""
        self.cache.keep_rows(order)

    def read_cached_states(self, row: int, start: int, count: int) -> list[torch.Tensor]:
        """Return copies of the cached keys and values of batch row `row` at `count` positions,
        starting with position `start`."""
        return self.cache.copy_keys_values(row, start, count)

    def restore_row(
        self, row: int, ids: list[int], cached_ranges: list[list[torch.Tensor]]
    ) -> None:
        """Fill the empty batch row `row` with cached keys and values.

        `cached_ranges` are results of `read_cached_states` for consecutive ranges of positions.
        `ids` are the tokens at these positions. They are ignored here; the same method of prompt
        lookup uses them.
        """
        self.cache.restore_keys_values(row, cached_ranges)


def allocate_cache(
    config: Qwen3Config,
    patterns: list[AttentionPattern],
    rows: int,
    capacity: int,
    block_size: int,
    weight: torch.Tensor,
    keep_all: bool,
) -> KVCache:
    """Return an empty KV cache for `rows` sequences.

    `capacity` is the maximum number of positions of a sequence, including the drafted block.
    `patterns` are the attention patterns of the layers: (causal within the block, length of the
    sliding window or None). If all layers have a sliding window, the cache drops positions that no
    layer can attend to any more, unless `keep_all` is true. The cache has the dtype and device of
    `weight`.
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

"""The decoding state of a drafter: the KV cache of the sequences for which it drafts.

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

# If a cache drops positions that have left the sliding window, one pass may write at most this many
# positions to the cache, or one block if a block is longer.
MAX_POSITIONS_WRITTEN_TO_SLIDING_CACHE = 64
# The attention pattern of a layer: whether attention is causal within the block, and the length of
# the sliding window in positions, None for full attention.
AttentionPattern = tuple[bool, int | None]


class BlockPosition(NamedTuple):
    """The positions of a batch of blocks, each of which follows its context in the KV cache."""

    context_lengths: torch.Tensor  # (B,) int64 number of cached positions before each block
    # cos and sin of the rotary embeddings of the blocks' positions, (B, W, E) each
    rotary: tuple[torch.Tensor, torch.Tensor]
    cache_window: CacheView


def build_cached_block_mask(
    position: BlockPosition, num_queries: int, pattern: AttentionPattern
) -> AttentionMask:
    """Return the attention mask with which the `num_queries` slots of each block attend to the
    cached context and to the block itself, for layers with the attention pattern `pattern`."""
    window = position.cache_window
    keys = window.visible_end - window.visible_start
    context_lengths = position.context_lengths - window.visible_start
    return build_draft_mask(
        context_lengths, num_queries, keys, *pattern, sees_all_keys=window.cache.has_uniform_lengths
    )


@dataclass
class DrafterState:
    """The keys and values of the context of all sequences. Batch rows are added and removed as in
    the `KVCache`."""

    cache: KVCache
    # cos and sin of the rotary embeddings of every position, (1, capacity, E) each
    rotary_tables: tuple[torch.Tensor, torch.Tensor]

    @contextmanager
    def add(self, count: int) -> Generator[Self]:
        """Yield a state of `count` new empty batch rows, which the caller fills. The new state
        shares this state's memory. On leaving the `with` statement, the new batch rows are appended
        to this state."""
        with self.cache.add_rows(count) as cache:
            yield replace(self, cache=cache)

    def next_rotary(self, rows: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, (rows, count, E) each, of the `count` positions that follow the
        committed positions of each batch row."""
        positions = self.cache.next_positions(rows, count)
        cos_table, sin_table = self.rotary_tables
        cos = torch.embedding(cos_table[0], positions)
        sin = torch.embedding(sin_table[0], positions)
        return cos, sin

    def keep(self, order: list[int]) -> None:
        """Reorder the batch rows: row order[i] becomes row i. Rows that are not in `order` are
        removed."""
        self.cache.keep_rows(order)

    def read(self, row: int, start: int, count: int) -> list[torch.Tensor]:
        """Return copies of the cached tensors of `count` positions of batch row `row`, from
        position `start` on."""
        return self.cache.read_positions(row, start, count)

    def restore(self, row: int, ids: list[int], pieces: list[list[torch.Tensor]]) -> None:
        """Fill the empty batch row `row` with cached positions.

        `pieces` are results of `read` for consecutive ranges of positions. `ids` are the tokens of
        these positions.
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
    """Return an empty KV cache for `rows` sequences of up to `capacity` positions, including the
    drafted block.

    `patterns` are the attention patterns of the layers. If all layers have a sliding window, the
    cache drops positions that have left every window; `keep_all` keeps these positions. The cache
    has the dtype and device of `weight`.
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

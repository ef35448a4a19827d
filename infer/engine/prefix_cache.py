"""The prefix cache: KV cache blocks of earlier sequences. If a prompt begins with the same tokens
as an earlier sequence, only the positions after these tokens are prefilled.

A block contains PREFIX_CACHE_BLOCK_TOKENS positions. It is identified by all tokens before the
block, the tokens of the block, and the token after the block, since a drafter's cache entry may
depend on the next token (`infer.drafters.dart`). Blocks are copies, because batch rows are reused.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch

PREFIX_CACHE_BLOCK_TOKENS = 64

# The number of the previous block, and PREFIX_CACHE_BLOCK_TOKENS + 1 tokens: those of the block and
# the token after it.
BlockKey = tuple[int, tuple[int, ...]]
# One tensor per buffer of a cache, (n, PREFIX_CACHE_BLOCK_TOKENS, width); n and width depend on the
# buffer.
BlockTensors = list[torch.Tensor]


@dataclass(eq=False)
class PrefixCacheBlock:
    """The KV cache entries of PREFIX_CACHE_BLOCK_TOKENS positions, of the target and of the
    drafter."""

    number: int  # unique; the key of the next block contains it
    target: BlockTensors
    drafter: BlockTensors

    @property
    def bytes(self) -> int:
        """The memory of the block in bytes."""
        return sum(tensor.nbytes for tensor in (*self.target, *self.drafter))


class PrefixCache:
    """The cached blocks of earlier sequences, at most `max_bytes` in total. The least recently used
    blocks are evicted first. Within a sequence, later blocks are evicted before earlier blocks."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.num_created = 0
        # The least recently used block comes first. Of one sequence, the last block comes first.
        self.blocks: OrderedDict[BlockKey, PrefixCacheBlock] = OrderedDict()

    def find(self, ids: list[int]) -> tuple[list[PrefixCacheBlock], BlockKey | None]:
        """Return the cached blocks with which a sequence of tokens begins, and the key of the
        sequence's first block that is not cached. The key is None if the sequence has no further
        complete block. At least one token of the sequence comes after the returned blocks."""
        path = self._find_path(ids)
        blocks = [self.blocks[key] for key in path]
        last_number = blocks[-1].number if blocks else 0
        return blocks, make_block_key(ids, len(path), last_number)

    def insert(
        self, ids: list[int], copy_block: Callable[[int], tuple[BlockTensors, BlockTensors]]
    ) -> None:
        """Add the complete blocks of a sequence that are not cached yet, as far as memory allows.

        `copy_block` takes the first position of a block, and returns copies of the block's entries
        in the target's cache and in the drafter's cache.
        """
        path = self._find_path(ids)
        self._mark_as_used(path)

        in_use = set(path)
        number = self.blocks[path[-1]].number if path else 0
        key = make_block_key(ids, len(path), number)
        while key is not None:
            self.num_created += 1
            target, drafter = copy_block(len(path) * PREFIX_CACHE_BLOCK_TOKENS)
            block = PrefixCacheBlock(self.num_created, target, drafter)
            if not self._evict_for(block.bytes, in_use):
                break
            self.blocks[key] = block
            self.bytes += block.bytes
            path.append(key)
            in_use.add(key)
            key = make_block_key(ids, len(path), block.number)
        self._mark_as_used(path)

    def _mark_as_used(self, path: list[BlockKey]) -> None:
        """Move the blocks of a sequence to the end of the eviction order. The sequence's first
        block becomes the very last."""
        for key in reversed(path):
            self.blocks.move_to_end(key)

    def _evict_for(self, size: int, in_use: set[BlockKey]) -> bool:
        """Evict old blocks until `size` more bytes fit, and return True. Return False if blocks in
        `in_use` would have to be evicted."""
        while self.bytes + size > self.max_bytes:
            oldest = next((key for key in self.blocks if key not in in_use), None)
            if oldest is None:
                return False
            self.bytes -= self.blocks.pop(oldest).bytes
        return True

    def _find_path(self, ids: list[int]) -> list[BlockKey]:
        """Return the keys of the cached blocks with which a sequence of tokens begins."""
        path = []
        key = make_block_key(ids, 0, 0)
        while key is not None and key in self.blocks:
            path.append(key)
            key = make_block_key(ids, len(path), self.blocks[key].number)
        return path


def make_block_key(ids: list[int], index: int, previous_number: int) -> BlockKey | None:
    """Return the key of block `index` of a sequence, or None if the sequence is too short for it.

    `previous_number` is the number of the previous block, or 0 for the first block.
    """
    start = index * PREFIX_CACHE_BLOCK_TOKENS
    tokens = tuple(ids[start : start + PREFIX_CACHE_BLOCK_TOKENS + 1])
    if len(tokens) < PREFIX_CACHE_BLOCK_TOKENS + 1:
        return None
    return previous_number, tokens

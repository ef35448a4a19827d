"""The prefix cache: KV cache blocks of earlier sequences. A prompt with the same beginning is
prefilled only from there on.

A block contains PREFIX_CACHE_BLOCK_TOKENS positions. It is identified by all tokens before it, its own
tokens and the token after it, since a drafter's entry may depend on the next token
(`infer.drafters.dart`). Blocks are copies, because batch rows are reused.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch

PREFIX_CACHE_BLOCK_TOKENS = 64

# Number of the block before, and the PREFIX_CACHE_BLOCK_TOKENS + 1 tokens of the block and after it.
BlockKey = tuple[int, tuple[int, ...]]
# One tensor per cache buffer, (n, PREFIX_CACHE_BLOCK_TOKENS, width).
BlockTensors = list[torch.Tensor]


@dataclass(eq=False)
class PrefixCacheBlock:
    """The cache entries of PREFIX_CACHE_BLOCK_TOKENS positions."""

    number: int  # unique; the key of the next block contains it
    target: BlockTensors
    drafter: BlockTensors

    @property
    def bytes(self) -> int:
        """Memory of the block."""
        return sum(tensor.nbytes for tensor in (*self.target, *self.drafter))


class PrefixCache:
    """Blocks of earlier sequences, at most `max_bytes`. The least recently used blocks are evicted
    first, and those at the end of a sequence before those at its beginning."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.num_created = 0
        # In order of use. A block always comes after the blocks that follow it in its sequence.
        self.blocks: OrderedDict[BlockKey, PrefixCacheBlock] = OrderedDict()

    def find(self, ids: list[int]) -> tuple[list[PrefixCacheBlock], BlockKey | None]:
        """Return the cached blocks that a sequence begins with, and the key of its first block that
        is not cached, or None if there is no further complete block. At least one token is left
        after the blocks."""
        path = self._find_path(ids)
        blocks = [self.blocks[key] for key in path]
        last_number = blocks[-1].number if blocks else 0
        return blocks, make_block_key(ids, len(path), last_number)

    def insert(
        self, ids: list[int], copy_block: Callable[[int], tuple[BlockTensors, BlockTensors]]
    ) -> None:
        """Add the complete blocks of a sequence that are not cached yet, as far as memory allows.

        `copy_block` returns copies of the target's and the drafter's entries of the
        PREFIX_CACHE_BLOCK_TOKENS positions from a given position on.
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
        """Move blocks to the end of the eviction order, the first block of the sequence last."""
        for key in reversed(path):
            self.blocks.move_to_end(key)

    def _evict_for(self, size: int, in_use: set[BlockKey]) -> bool:
        """Evict old blocks until `size` more bytes fit. Return False if that would need blocks of
        `in_use`."""
        while self.bytes + size > self.max_bytes:
            oldest = next((key for key in self.blocks if key not in in_use), None)
            if oldest is None:
                return False
            self.bytes -= self.blocks.pop(oldest).bytes
        return True

    def _find_path(self, ids: list[int]) -> list[BlockKey]:
        """Return the keys of the cached blocks that a sequence begins with."""
        path = []
        key = make_block_key(ids, 0, 0)
        while key is not None and key in self.blocks:
            path.append(key)
            key = make_block_key(ids, len(path), self.blocks[key].number)
        return path


def make_block_key(ids: list[int], index: int, previous_number: int) -> BlockKey | None:
    """Return the key of block `index` of a sequence, or None if a token of the key is missing.

    `previous_number` is the number of the block before, 0 for the first block.
    """
    start = index * PREFIX_CACHE_BLOCK_TOKENS
    tokens = tuple(ids[start : start + PREFIX_CACHE_BLOCK_TOKENS + 1])
    if len(tokens) < PREFIX_CACHE_BLOCK_TOKENS + 1:
        return None
    return previous_number, tokens

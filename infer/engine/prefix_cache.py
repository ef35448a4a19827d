"""The prefix cache: copies of KV cache blocks of earlier sequences. If a prompt begins with the
same tokens as an earlier sequence, only the positions after these tokens are prefilled.

A block has PREFIX_CACHE_BLOCK_TOKENS positions. It is identified by the tokens of the block, all
tokens before it, and the one token after it. The token after the block matters because the
drafter's keys and values at a position may depend on the next token (`infer.drafters.dart`). A
block is a copy of a part of a KV cache, because the batch row in the KV cache is reused by later
sequences.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch

PREFIX_CACHE_BLOCK_TOKENS = 64

# Identifies a block: the `block_id` of the previous block (0 for the first block), and
# PREFIX_CACHE_BLOCK_TOKENS + 1 tokens, which are those of the block and the token after it.
BlockKey = tuple[int, tuple[int, ...]]
# The keys and values of a block in one KV cache. For each buffer of the cache there is a tensor
# (planes, PREFIX_CACHE_BLOCK_TOKENS, number of heads * head size). A plane is the keys or the
# values of one layer.
BlockTensors = list[torch.Tensor]


@dataclass(eq=False)
class PrefixCacheBlock:
    """Copies of the target's and the drafter's keys and values at PREFIX_CACHE_BLOCK_TOKENS
    positions."""

    block_id: int  # unique number of the block, which is part of the next block's key
    target_tensors: BlockTensors
    drafter_tensors: BlockTensors

    @property
    def bytes(self) -> int:
        """Return the memory that the block takes, in bytes."""
        return sum(tensor.nbytes for tensor in (*self.target_tensors, *self.drafter_tensors))


class PrefixCache:
    """The cached blocks of earlier sequences, at most `max_bytes` in total. The least recently used
    blocks are evicted first. Within a sequence, later blocks are evicted before earlier blocks."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.num_created = 0
        # In eviction order: the least recently used block comes first. Among the blocks of one
        # sequence, the last block comes first.
        self.blocks: OrderedDict[BlockKey, PrefixCacheBlock] = OrderedDict()

    def find_prefix(self, ids: list[int]) -> tuple[list[PrefixCacheBlock], BlockKey | None]:
        """Return the cached blocks that match the beginning of a sequence, and the key of the first
        block that is not cached.

        The key is None if too few tokens are left for another block. The returned blocks never
        cover the whole sequence: at least its last token must be prefilled.
        """
        path = self._find_path(ids)
        blocks = [self.blocks[key] for key in path]
        last_number = blocks[-1].block_id if blocks else 0
        return blocks, make_block_key(ids, len(path), last_number)

    def insert(
        self, ids: list[int], copy_block: Callable[[int], tuple[BlockTensors, BlockTensors]]
    ) -> None:
        """Add copies of the complete blocks of a sequence that are not cached yet, as far as
        `max_bytes` allows.

        `copy_block(position)` copies the block that begins at this position of the sequence. It
        returns the keys and values from the target's cache, then those from the drafter's cache.
        """
        path = self._find_path(ids)
        self._mark_as_used(path)

        in_use = set(path)
        number = self.blocks[path[-1]].block_id if path else 0
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
            key = make_block_key(ids, len(path), block.block_id)
        self._mark_as_used(path)

    def _mark_as_used(self, path: list[BlockKey]) -> None:
        """Mark the blocks of a sequence as used just now, so that they are evicted after all other
        blocks. Among them, the first block of the sequence is evicted last. `path` has the keys of
        the blocks, in the order of the sequence."""
        for key in reversed(path):
            self.blocks.move_to_end(key)

    def _evict_for(self, size: int, in_use: set[BlockKey]) -> bool:
        """Evict the least recently used blocks until `size` more bytes fit, and return True. Blocks
        with keys in `in_use` are never evicted. Return False if `size` bytes do not fit together
        with the blocks in use."""
        while self.bytes + size > self.max_bytes:
            oldest = next((key for key in self.blocks if key not in in_use), None)
            if oldest is None:
                return False
            self.bytes -= self.blocks.pop(oldest).bytes
        return True

    def _find_path(self, ids: list[int]) -> list[BlockKey]:
        """Return the keys of the cached blocks that match the beginning of a sequence."""
        path = []
        key = make_block_key(ids, 0, 0)
        while key is not None and key in self.blocks:
            path.append(key)
            key = make_block_key(ids, len(path), self.blocks[key].block_id)
        return path


def make_block_key(ids: list[int], index: int, previous_block_id: int) -> BlockKey | None:
    """Return the key of block `index` of a sequence, or None if the sequence has too few tokens for
    this block and the token after it.

    `previous_block_id` is the `block_id` of the previous block, or 0 if there is none.
    """
    start = index * PREFIX_CACHE_BLOCK_TOKENS
    tokens = tuple(ids[start : start + PREFIX_CACHE_BLOCK_TOKENS + 1])
    if len(tokens) < PREFIX_CACHE_BLOCK_TOKENS + 1:
        return None
    return previous_block_id, tokens

"""What target and drafter keep of earlier texts, so that a prompt that begins alike is computed
from there on.

A text is kept in blocks of positions. A block belongs to all tokens before it, and to the one
behind
it: a drafter's item may hold the token after its position (`infer.drafters.dart`). Copies are kept,
    not rows:
rows come and go.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch

BLOCK = 64  # positions

Key = tuple[int, tuple[int, ...]]  # the number of the block before, and BLOCK + 1 tokens
Part = list[torch.Tensor]  # of every buffer, (n, BLOCK, width)


@dataclass(eq=False)
class PrefixBlock:
    """BLOCK positions behind the positions of the blocks before."""

    number: int
    target: Part
    drafter: Part

    @property
    def bytes(self) -> int:
        """Return the memory that it takes."""
        return sum(part.nbytes for part in (*self.target, *self.drafter))


class Prefixes:
    """The blocks of earlier texts, in so many bytes: the least recently used leave first, a text's
    end before its beginning."""

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.bytes = 0
        self.made = 0
        # no block stands behind the one that it follows
        self.blocks: OrderedDict[Key, PrefixBlock] = OrderedDict()

    def find(self, ids: list[int]) -> tuple[list[PrefixBlock], Key | None]:
        """Return the blocks that a text begins with, of which a token at least is left to be
        computed; and the key of the first that is not kept, None where there is no further whole
        one."""
        path = self._path(ids)
        blocks = [self.blocks[key] for key in path]
        return blocks, self._key(ids, len(path), blocks[-1].number if blocks else 0)

    def keep(self, ids: list[int], read: Callable[[int], tuple[Part, Part]]) -> None:
        """Keep the blocks of a text that are not kept yet, as far as the memory goes. `read`
        returns what target and drafter have of BLOCK positions from a position on."""
        path = self._path(ids)
        for key in reversed(path):
            self.blocks.move_to_end(key)
        own = set(path)
        number = self.blocks[path[-1]].number if path else 0
        while (key := self._key(ids, len(path), number)) is not None:
            self.made += 1
            block = PrefixBlock(self.made, *read(len(path) * BLOCK))
            if not self._make_room(block.bytes, own):
                break
            self.blocks[key], number = block, block.number
            self.bytes += block.bytes
            path.append(key)
            own.add(key)
        for key in reversed(path):
            self.blocks.move_to_end(key)

    def _make_room(self, size: int, own: set[Key]) -> bool:
        """Let old blocks go until `size` bytes fit; return whether they do without letting any of
        `own` go."""
        while self.bytes + size > self.memory:
            oldest = next((key for key in self.blocks if key not in own), None)
            if oldest is None:
                return False
            self.bytes -= self.blocks.pop(oldest).bytes
        return True

    def _path(self, ids: list[int]) -> list[Key]:
        """Return the keys of the blocks that a text begins with."""
        path = []
        number = 0
        while (key := self._key(ids, len(path), number)) in self.blocks:
            path.append(key)
            number = self.blocks[key].number
        return path

    @staticmethod
    def _key(ids: list[int], index: int, before: int) -> Key | None:
        """Return the key of a text's block number `index`; None where a token of it is missing."""
        tokens = tuple(ids[index * BLOCK : (index + 1) * BLOCK + 1])
        return (before, tokens) if len(tokens) == BLOCK + 1 else None

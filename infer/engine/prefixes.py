"""What target and drafter keep of earlier texts, so that a prompt that begins alike is computed from there on.

A text is kept in blocks of positions. A block belongs to all tokens before it, and to the one behind it: a drafter's
item may hold the token after its position (`infer.drafters.dart`). Copies are kept, not rows: rows come and go.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

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
    states: Part | None = None  # of a recurrent target's layers behind it

    @property
    def bytes(self) -> int:
        """Return the memory that it takes."""
        return sum(part.nbytes for part in (*self.target, *self.drafter, *(self.states or ())))


class Found(NamedTuple):
    """What is kept of a text."""

    blocks: list[PrefixBlock]
    next_key: Key | None  # of the first block that is not kept; None: it has no further whole one

    def with_states(self) -> list[PrefixBlock]:
        """Return the blocks up to the last that has the states of a recurrent target."""
        ends = [i + 1 for i, block in enumerate(self.blocks) if block.states is not None]
        return self.blocks[: max(ends, default=0)]


class Prefixes:
    """The blocks of earlier texts, in so many bytes: the least recently used leave first, a text's end before its
    beginning."""

    def __init__(self, memory: int) -> None:
        self.memory, self.bytes, self.made = memory, 0, 0
        self.blocks: OrderedDict[Key, PrefixBlock] = OrderedDict()  # no block stands behind the one that it follows

    def find(self, ids: list[int]) -> Found:
        """Return the blocks that a text begins with; a token at least is left to be computed."""
        path = self._path(ids)
        blocks = [self.blocks[key] for key in path]
        return Found(blocks, self._key(ids, len(path), blocks[-1].number if blocks else 0))

    def keep(self, ids: list[int], read: Callable[[int], tuple[Part, Part]], states: dict[int, Part]) -> None:
        """Keep the blocks of a text that are not kept yet, as far as the memory goes. `read` returns what target and
        drafter have of BLOCK positions from a position on; `states` what a recurrent target has behind others."""
        path = self._path(ids)
        for key in reversed(path):
            self.blocks.move_to_end(key)
        own, number = set(path), self.blocks[path[-1]].number if path else 0
        for at, key in enumerate(path):
            self._add_states(self.blocks[key], states.get((at + 1) * BLOCK), own)
        while (key := self._key(ids, len(path), number)) is not None:
            self.made += 1
            block = PrefixBlock(self.made, *read(len(path) * BLOCK), states.get((len(path) + 1) * BLOCK))
            if not self._make_room(block.bytes, own):
                break
            self.blocks[key], number = block, block.number
            self.bytes += block.bytes
            path.append(key)
            own.add(key)
        for key in reversed(path):
            self.blocks.move_to_end(key)

    def _add_states(self, block: PrefixBlock, states: Part | None, own: set[Key]) -> None:
        if block.states is None and states is not None:
            size = sum(part.nbytes for part in states)
            if self._make_room(size, own):
                block.states = states
                self.bytes += size

    def _make_room(self, size: int, own: set[Key]) -> bool:
        """Let old blocks go until `size` bytes fit; return whether they do without letting any of `own` go."""
        while self.bytes + size > self.memory:
            oldest = next((key for key in self.blocks if key not in own), None)
            if oldest is None:
                return False
            self.bytes -= self.blocks.pop(oldest).bytes
        return True

    def _path(self, ids: list[int]) -> list[Key]:
        """Return the keys of the blocks that a text begins with."""
        path, number = [], 0
        while (key := self._key(ids, len(path), number)) in self.blocks:
            path.append(key)
            number = self.blocks[key].number
        return path

    @staticmethod
    def _key(ids: list[int], index: int, before: int) -> Key | None:
        """Return the key of a text's block number `index`; None where a token of it is missing."""
        tokens = tuple(ids[index * BLOCK : (index + 1) * BLOCK + 1])
        return (before, tokens) if len(tokens) == BLOCK + 1 else None

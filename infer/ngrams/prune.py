"""Leaves rare n-grams out of an n-gram file.

An n-gram is never rarer than one that begins with it, so that what is left is a trie. The counts that stay are those of
the corpus: Pr(token | context) is what it was, or 0. (`reduce` of DART's authors keeps the same n-grams, but takes what
it drops off the counts of their beginnings: probabilities add up to 1 again, and beginnings of which nothing is left
have a count of 0, by which it then divides.)
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from infer.ngrams.model import NGram

BLOCK = 1 << 12  # nodes whose children are looked at together


@dataclass(frozen=True)
class Pruned:
    """The levels of a file without the n-grams seen fewer than `threshold` times, for `infer.ngrams.write`. A token of
    the vocabulary that was seen too rarely counts as unseen."""

    model: NGram
    threshold: int

    @property
    def vocabulary(self) -> int:
        return self.model.vocabulary

    @property
    def order(self) -> int:
        return self.model.order

    def nodes(self) -> list[int]:
        """How many there are on each level."""
        return [sum(len(tokens) for tokens, _ in self.counts(level)) for level in range(1, self.order + 1)]

    def counts(self, level: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Tokens uint32 and counts uint64 of a level's nodes, block by block."""
        for first, last in self._blocks(level):
            tokens, counts = self.model.decode(first, last)
            kept = counts >= self.threshold
            if level == 1:
                counts, kept = np.where(kept, counts, 0), slice(None)
            yield tokens[kept].astype(np.uint32), counts[kept].astype(np.uint64)

    def child_starts(self) -> Iterator[np.ndarray]:
        """Where the children of every inner node start, among all nodes, int64; at last the number of nodes."""
        at = self.vocabulary  # nodes before the next block's first child
        for level in range(1, self.order):
            for first, last in self._blocks(level):
                starts = self.model.child_starts(first, last + 1)  # (n + 1,), the last child's end too
                kept = self._kept(starts[0], starts[-1])
                before = at + np.concatenate([[0], np.cumsum(kept)])[starts - starts[0]]
                yield before[:-1] if level == 1 else before[:-1][self._kept(first, last)]
                at = int(before[-1])
        yield np.array([at])

    def _blocks(self, level: int) -> Iterator[tuple[int, int]]:
        """The nodes first .. last - 1 of a level, a block at a time."""
        start, end = sum(self.model.nodes[: level - 1]), sum(self.model.nodes[:level])
        for first in range(start, end, BLOCK):
            yield first, min(first + BLOCK, end)

    def _kept(self, first: int, last: int) -> np.ndarray:
        """(last - first,) bool: which of these nodes stay."""
        return self.model.decode(first, last)[1] >= self.threshold

"""Writes the levels of a trie as one file, as `infer.ngrams.model` describes it."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from infer.ngrams import model as ngram


class Levels(Protocol):
    """A trie, level by level, in pieces that fit in memory. Level 1 has every token of the vocabulary."""

    vocabulary: int
    order: int

    def nodes(self) -> list[int]:
        """How many there are on each level."""

    def counts(self, level: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Tokens uint32 and counts uint64 of a level's nodes."""

    def child_starts(self) -> Iterator[np.ndarray]:
        """Where the children of every inner node start, among all nodes, int64; at last the number of nodes."""


def write_levels(path: Path, levels: Levels, tokens: int, digest: str) -> None:
    """Write the file, and wait until it is on the disk. tokens: counted, in all. digest: the tokenizer's."""
    with path.open("w+b") as file:
        overflow = _write_entries(file, levels)
        bases = _write_starts(file, levels)
        for array in (bases, *overflow):
            file.write(np.asarray(array).astype("<i8"))
            _align(file)
        ngram.seal(file, levels.order, levels.vocabulary, tokens, digest, levels.nodes(), len(overflow[0]))
        file.flush()
        os.fsync(file.fileno())


def _write_entries(file: BinaryIO, levels: Levels) -> tuple[np.ndarray, np.ndarray]:
    """Write a place for the header, and all nodes; return those whose counts do not fit, and these counts."""
    count_bits = ngram.count_bits(levels.vocabulary)
    largest = (1 << count_bits) - 1
    overflow_nodes, overflow_counts, at = [], [], 0
    file.write(bytes(ngram.HEADER.itemsize))
    for level in range(1, levels.order + 1):
        for ids, counts in levels.counts(level):
            codes = np.minimum(counts, np.uint64(largest)).astype(np.uint32)
            file.write((ids << np.uint32(count_bits) | codes).astype("<u4"))
            large = np.flatnonzero(codes == largest)
            overflow_nodes.append(large + at)
            overflow_counts.append(counts[large])
            at += len(ids)
    _align(file)
    return np.concatenate(overflow_nodes), np.concatenate(overflow_counts)


def _write_starts(file: BinaryIO, levels: Levels) -> list[int]:
    """Write where children start, relative to their groups' first ones; return these."""
    bases = []
    for group in _grouped(levels.child_starts(), 1 << ngram.GROUP_BITS):
        if group[-1] - group[0] >= 1 << 32:
            raise ValueError(
                f"{len(group)} neighbouring n-grams have more than {1 << 32} continuations, too many for this format: "
                "count less text or a lower order"
            )
        bases.append(group[0])
        file.write((group - group[0]).astype("<u4"))
    _align(file)
    return bases


def _align(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % ngram.ALIGNMENT))


def _grouped(arrays: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """The same numbers in arrays of `size`, the last one shorter."""
    rest = np.empty(0, np.int64)
    for array in arrays:
        rest = np.concatenate([rest, array])
        whole = len(rest) // size * size
        yield from rest[:whole].reshape(-1, size)
        rest = rest[whole:]
    if len(rest):
        yield rest

"""Writes sorted keys as one n-gram file, as `infer.ngrams.model` describes it, out of core.

Runs of keys are merged by ranges of keys. A sorted list of distinct keys with counts holds the nodes of all levels, as
their prefixes; a range holds all keys of its first tokens, so that the levels of the file are those of the ranges, one
behind the other. Rare n-grams are left out on the way: one is never rarer than those that begin with it. The counts
that stay are those of the corpus: Pr(token | context) is what it was, or 0.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from infer.ngrams import model as ngram
from infer.utils.files import sync


class Run(NamedTuple):
    """Keys of a part of a corpus."""

    keys: np.ndarray  # (n,) uint64, distinct, ascending
    counts: np.ndarray  # (n,) how often each was seen, below 2^32
    positions: int  # counted in all


@dataclass(frozen=True)
class Shape:
    """What a file of n-grams is to be, and in which chunks it is made; ValueError for an order that does not fit."""

    vocabulary: int
    order: int
    digest: str  # of the tokenizer, 64 hexadecimal digits
    threshold: int = 1  # n-grams seen fewer times are left out
    chunk_tokens: int = 8_000_000  # below 2^32

    def __post_init__(self) -> None:
        if not 1 <= self.order <= 64 // self.bits:
            raise ValueError(
                f"n-grams of order {self.order} over {self.vocabulary} ids: {64 // self.bits} is the largest order "
                f"possible for this vocabulary, whose ids take {self.bits} of 64 bits each, and 1 the smallest"
            )

    @property
    def bits(self) -> int:
        """How many bits of a key a token takes."""
        return self.vocabulary.bit_length()


@dataclass
class Level:
    """The nodes of a level that are written so far, in two files."""

    entries: Path  # uint32 each
    starts: Path  # int64 each: where a node's children start in the next level
    nodes: int = 0
    overflow: list[np.ndarray] = field(default_factory=list)  # (2, n): nodes whose counts do not fit, and these counts

    def add(self, tokens: np.ndarray, counts: np.ndarray, starts: np.ndarray | None, count_bits: int) -> None:
        """Add nodes (n,): tokens and counts uint64, starts int64, None for leaves."""
        codes = np.minimum(counts, np.uint64((1 << count_bits) - 1))
        large = np.flatnonzero(codes == (1 << count_bits) - 1)
        self.overflow.append(np.stack([large + self.nodes, counts[large].astype(np.int64)]))
        self.nodes += len(tokens)
        with self.entries.open("ab") as file:
            file.write((tokens << np.uint64(count_bits) | codes).astype("<u4"))
        if starts is not None:
            with self.starts.open("ab") as file:
                file.write(starts.astype("<i8"))


def build(
    out: Path, shape: Shape, runs: Iterable[Run], progress: Callable[[int], None] = lambda tokens: None
) -> ngram.NGram:
    """Make an n-gram file from runs, and open it. It appears whole or not at all; progress is told how many positions
    were counted. Raises ValueError if there are none."""
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as name:
        folder, tokens, count = Path(name), 0, 0
        for count, run in enumerate(runs, 1):
            np.save(folder / f"keys-{count - 1}.npy", run.keys)
            np.save(folder / f"counts-{count - 1}.npy", run.counts.astype(np.uint32))
            tokens += run.positions
            progress(tokens)
        if not tokens:
            raise ValueError("there is nothing to count: no document has a token")
        levels = [Level(folder / f"entries-{level}", folder / f"starts-{level}") for level in range(shape.order)]
        cuts = _cuts(folder, count, shape)
        for low, end in zip(cuts, [*cuts[1:], None], strict=True):
            _add_range(levels, *_merged(folder, count, low, end), shape)
        _write(folder / "whole", levels, tokens, shape)
        (folder / "whole").replace(out)
    sync(out.parent)
    return ngram.NGram.open(out)


def first_of_each(values: np.ndarray) -> np.ndarray:
    """Return where each distinct value starts in a sorted, non-empty array."""
    return np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))


def _cuts(folder: Path, runs: int, shape: Shape) -> list[int]:
    """Return the lowest key of every range, such that a range holds about half a chunk of keys from all runs together
    (merging takes twice the memory of sorting), or all of one token. From every stride-th key of each run: off by at
    most runs x stride."""
    target = max(shape.chunk_tokens // 2, 1)
    stride = max(target // (4 * runs), 1)
    keys = [np.array(np.load(folder / f"keys-{run}.npy", mmap_mode="r")[::stride]) for run in range(runs)]
    samples = np.sort(np.concatenate(keys))[:: target // stride]
    shift = np.uint64(shape.bits * (shape.order - 1))
    return np.unique(samples >> shift << shift).tolist()


def _merged(folder: Path, runs: int, low: int, end: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct keys (n,) uint64 from `low` to below `end`, and their counts (n,) uint64 over all runs."""
    keys, counts = [], []
    for run in range(runs):
        run_keys = np.load(folder / f"keys-{run}.npy", mmap_mode="r")
        start = np.searchsorted(run_keys, np.uint64(low))
        stop = len(run_keys) if end is None else np.searchsorted(run_keys, np.uint64(end))
        keys.append(np.array(run_keys[start:stop]))  # a copy: more runs than the limit of open files are possible
        counts.append(np.array(np.load(folder / f"counts-{run}.npy", mmap_mode="r")[start:stop]))
    keys, counts = np.concatenate(keys), np.concatenate(counts)
    place = np.argsort(keys, kind="stable")  # a merge of sorted parts
    keys, counts = keys[place], counts[place].astype(np.uint64)
    first = first_of_each(keys)
    return keys[first], np.add.reduceat(counts, first)


def _add_range(levels: list[Level], keys: np.ndarray, counts: np.ndarray, shape: Shape) -> None:
    """Add the nodes of a range of keys (n,) with counts (n,) to every level, the last one first."""
    bits, starts = np.uint64(shape.bits), None
    for level in reversed(levels):
        tokens = keys & np.uint64((1 << shape.bits) - 1)
        kept = (tokens > 0) & (counts >= shape.threshold)  # no token: the n-gram would end behind its document
        before = level.nodes + np.cumsum(kept) - kept
        children = None if starts is None else starts[kept]
        level.add(tokens[kept] - np.uint64(1), counts[kept], children, ngram.count_bits(shape.vocabulary))
        keys = keys >> bits  # of the parents
        first = first_of_each(keys)
        keys, counts, starts = keys[first], np.add.reduceat(counts, first), before[first]


def _write(path: Path, levels: list[Level], tokens: int, shape: Shape) -> None:
    """Write the file, and wait until it is on the disk. tokens: counted, in all."""
    count_bits, vocabulary = ngram.count_bits(shape.vocabulary), shape.vocabulary
    nodes = [vocabulary, *(level.nodes for level in levels[1:])]
    seen = np.fromfile(levels[0].entries, "<u4")
    ids = (seen >> np.uint32(count_bits)).astype(np.int64)
    entries = np.arange(vocabulary, dtype=np.uint32) << np.uint32(count_bits)
    entries[ids] = seen
    for part in levels[0].overflow:
        part[0] = ids[part[0]]
    overflow = np.concatenate(
        [part + [[sum(nodes[:at])], [0]] for at, level in enumerate(levels) for part in level.overflow], 1
    )
    with path.open("w+b") as file:
        file.write(bytes(ngram.HEADER.itemsize))
        file.write(entries.astype("<u4"))
        for level in levels[1:]:
            with level.entries.open("rb") as part:
                shutil.copyfileobj(part, file)
        _align(file)
        bases = _write_starts(file, levels, nodes, ids)
        for array in (bases, *overflow):
            file.write(np.asarray(array).astype("<i8"))
            _align(file)
        ngram.seal(file, shape.order, vocabulary, tokens, shape.digest, nodes, overflow.shape[1])
        file.flush()
        os.fsync(file.fileno())


def _write_starts(file: BinaryIO, levels: list[Level], nodes: list[int], ids: np.ndarray) -> np.ndarray:
    """Write where the children of every inner node start among all nodes, and at last the number of nodes, relative to
    their groups' first ones; return these. ids: the tokens that were seen, in level 1."""
    size, inner = 1 << ngram.GROUP_BITS, sum(nodes[:-1])
    starts = np.memmap(levels[-1].starts, "<i8", "w+", shape=inner + 1)
    starts[inner], at = sum(nodes), 0
    for level, count in zip(levels[:-1], nodes, strict=False):
        found = np.fromfile(level.starts, "<i8")
        if level is levels[0]:  # an unseen token's: where the next one's are
            dense = np.full(count, nodes[1])
            dense[ids] = found
            found = np.minimum.accumulate(dense[::-1])[::-1]
        starts[at : at + count] = found + at + count
        at += count
    for group in (starts[first : first + size] for first in range(0, inner + 1, size)):
        if group[-1] - group[0] >= 1 << 32:
            raise ValueError(
                f"{len(group)} neighbouring n-grams have more than {1 << 32} continuations, too many for this format: "
                "count less text or a lower order"
            )
        file.write((group - group[0]).astype("<u4"))
    _align(file)
    return np.array(starts[::size])


def _align(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % ngram.ALIGNMENT))

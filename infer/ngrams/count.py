"""Count the n-grams of a corpus, out of core and on all cores, into a file for `infer.ngrams.model`.

Every position of a document gives one key of 64 bits: its token and the order - 1 next ones, each plus 1, the first in
the highest bits; positions behind the document's end are 0. Chunks of keys are sorted and written as runs, which are
then merged by ranges of keys: a sorted list of distinct keys with counts holds the nodes of all levels, as their
prefixes. A range may begin within the children of a node; counts that it shares with the range before are added when
the levels are written."""

import os
import re
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from infer.utils.files import sync

if TYPE_CHECKING:
    from infer.ngrams.model import NGram


def usual_order(vocabulary: int) -> int:
    """Return the order that is counted unless another is asked for: the tokens that a 64-bit key holds, at most 6."""
    return min(6, 64 // vocabulary.bit_length())


def count_ngrams(
    documents: Iterable[Sequence[int]],
    vocabulary: int,
    order: int,
    out: Path,
    digest: str,
    workers: int | None = None,
    chunk_tokens: int = 8_000_000,
    progress: Callable[[int], None] = lambda tokens: None,
    threshold: int = 1,
) -> "NGram":
    """Count all n-grams of 1 to `order` ids within the documents into the file `out`, and open it.

    documents: sequences of ids below `vocabulary`, read once, each of them in memory only for its turn. digest: of the
    tokenizer, 64 hexadecimal digits. workers: processes, one for each core by default; with 1 everything happens in
    this one (others are spawned: a script needs its `if __name__ == "__main__"`). chunk_tokens: positions that a worker
    sorts at once, some 40 bytes each. progress is told how many tokens are counted. threshold: n-grams seen fewer times
    are left out at the end (`infer.ngrams.prune`).

    `out` appears whole or not at all. Temporary files are in a hidden folder beside it, gone at the end: at most 12
    bytes for each position of the corpus and 20 for each node. Raises ValueError for an order that does not fit, ids
    outside the vocabulary, and a corpus without tokens.
    """
    shape = Shape(vocabulary, order, digest, threshold, chunk_tokens)

    def jobs(folder: Path) -> Iterator[tuple]:
        for run, chunk in enumerate(_chunks(documents, vocabulary, order, chunk_tokens)):
            yield folder, run, *chunk, order, shape.bits

    return build(out, shape, _write_run, jobs, workers, progress)


@dataclass(frozen=True)
class Shape:
    """What a file of n-grams is to be, and in which chunks it is made; ValueError for what cannot be."""

    vocabulary: int
    order: int
    digest: str
    threshold: int = 1
    chunk_tokens: int = 8_000_000

    def __post_init__(self) -> None:
        if not 1 <= self.vocabulary <= 1 << 31:
            raise ValueError(f"a vocabulary of {self.vocabulary} ids: between 1 and {1 << 31} can be counted")
        if not 1 <= self.order <= 64 // self.bits:
            raise ValueError(
                f"n-grams of order {self.order} over {self.vocabulary} ids: {64 // self.bits} is the largest order "
                f"possible for this vocabulary, whose ids take {self.bits} of 64 bits each, and 1 the smallest"
            )
        if not re.fullmatch("[0-9a-f]{64}", self.digest):
            raise ValueError(f"the tokenizer's digest is {self.digest!r} and not 64 hexadecimal digits")
        if not 1 <= self.chunk_tokens < 1 << 32:
            raise ValueError(f"chunk_tokens is {self.chunk_tokens}: take one between 1 and {(1 << 32) - 1}")
        if self.threshold < 1:
            raise ValueError(
                f"threshold is {self.threshold}: 1 leaves all n-grams in, larger ones leave rarer ones out"
            )

    @property
    def bits(self) -> int:
        """How many bits of a key a token takes."""
        return self.vocabulary.bit_length()


def build(
    out: Path,
    shape: Shape,
    write_run: Callable[..., int],
    jobs: Callable[[Path], Iterable[tuple]],
    workers: int | None,
    progress: Callable[[int], None],
) -> "NGram":
    """Make an n-gram file from runs, and open it. jobs: folder -> the arguments of each call of write_run, which writes
    one run into that folder, files as `save_run` names them, and returns how many positions it stands for."""
    # Imported here because it loads numba, which worker processes do not need.
    from infer.ngrams.model import NGram
    from infer.ngrams.prune import Pruned
    from infer.ngrams.write import write_levels

    out, workers = Path(out), workers or _cores()
    out.parent.mkdir(parents=True, exist_ok=True)
    pool = nullcontext() if workers == 1 else ProcessPoolExecutor(workers, get_context("spawn"))
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as name, pool as executor:
        folder = Path(name)
        tokens = runs = 0
        for counted in _spread(write_run, jobs(folder), executor, workers):
            tokens, runs = tokens + counted, runs + 1
            progress(tokens)
        if not tokens:
            raise ValueError("there is nothing to count: no document has a token")
        cuts = _cuts(folder, runs, shape.chunk_tokens)
        merges = (
            (folder, runs, *cut, shape.order, shape.bits)
            for cut in zip(range(len(cuts)), cuts, [*cuts[1:], None], strict=True)
        )
        ranges = list(_spread(_merge_range, merges, executor, workers))
        fresh = folder / "whole"
        write_levels(fresh, _Merged(folder, ranges, shape.vocabulary, shape.order), tokens, shape.digest)
        if shape.threshold > 1:
            whole, fresh = fresh, folder / "pruned"
            write_levels(fresh, Pruned(NGram.open(whole), shape.threshold), tokens, shape.digest)
        fresh.replace(out)
    sync(out.parent)
    return NGram.open(out)


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _spread(function: Callable, jobs: Iterable[tuple], executor: Executor | None, workers: int) -> Iterator:
    """Yield results of the jobs in their order, from the executor's processes or from this one. Takes new jobs only as
    old ones end, so that few are in memory."""
    waiting = deque()
    for job in jobs:
        if executor is None:
            yield function(*job)
            continue
        waiting.append(executor.submit(function, *job))
        if len(waiting) > workers:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _chunks(
    documents: Iterable[Sequence[int]], vocabulary: int, order: int, chunk_tokens: int
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Cut the corpus into chunks: tokens (n,) uint32 of whole documents, long ones cut; the documents' lengths; how
    many positions are the chunk's own: up to order - 1 tokens behind a cut belong to the next chunk."""
    pieces, own = [], 0
    for number, document in enumerate(documents):
        tokens = _ids(document, number, vocabulary)
        position = 0
        while position < len(tokens):
            taken = min(chunk_tokens - own, len(tokens) - position)
            pieces.append(tokens[position : position + taken + order - 1])
            own += taken
            position += taken
            if own == chunk_tokens:
                yield np.concatenate(pieces), np.array([len(piece) for piece in pieces]), own
                pieces, own = [], 0
    if pieces:
        yield np.concatenate(pieces), np.array([len(piece) for piece in pieces]), own


def _ids(document: Sequence[int], number: int, vocabulary: int) -> np.ndarray:
    """Return a document as uint32. Raises ValueError if it is no sequence of ids of the vocabulary."""
    tokens = np.asarray(document)
    if tokens.size == 0:
        return np.empty(0, np.uint32)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(f"document {number} is no list of token ids: shape {tokens.shape}, type {tokens.dtype}")
    for token in (int(tokens.min()), int(tokens.max())):
        if not 0 <= token < vocabulary:
            raise ValueError(f"document {number} has token id {token}, outside the vocabulary of {vocabulary} ids")
    return tokens.astype(np.uint32)


def _write_run(folder: Path, run: int, tokens: np.ndarray, lengths: np.ndarray, own: int, order: int, bits: int) -> int:
    """Sort and count the keys of one chunk's own positions into two files; return how many positions there were."""
    codes = tokens.astype(np.uint64) + np.uint64(1)
    keys = codes.copy()
    for j in range(1, order):
        keys <<= np.uint64(bits)
        keys[: max(len(keys) - j, 0)] |= codes[j:]
    ends = np.cumsum(lengths)
    for j in range(1, order):  # positions with j tokens left: clear what the next document filled in
        keys[(ends - j)[lengths >= j]] &= np.uint64(((1 << 64) - 1) << (order - j) * bits & ((1 << 64) - 1))
    del codes
    keys = keys[:own]
    keys.sort()
    first = first_of_each(keys)
    save_run(folder, run, keys[first], np.diff(first, append=own))
    return own


def save_run(folder: Path, run: int, keys: np.ndarray, counts: np.ndarray) -> None:
    """Write a run: distinct keys (n,) uint64, ascending, and how often each was seen (n,), below 2^32."""
    np.save(folder / f"run-{run}-keys.npy", keys)
    np.save(folder / f"run-{run}-counts.npy", counts.astype(np.uint32))


def first_of_each(values: np.ndarray) -> np.ndarray:
    """Return where each distinct value starts in a sorted, non-empty array."""
    return np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))


def _cuts(folder: Path, runs: int, chunk_tokens: int) -> list[int]:
    """Return the lowest key of every range, such that a range holds about half a chunk of keys from all runs together
    (merging takes twice the memory of sorting). From every stride-th key of each run: off by at most runs x stride."""
    target = max(chunk_tokens // 2, 1)
    stride = max(target // (4 * runs), 1)
    keys = [np.array(np.load(folder / f"run-{run}-keys.npy", mmap_mode="r")[::stride]) for run in range(runs)]
    samples = np.sort(np.concatenate(keys))
    return np.unique(samples[:: target // stride]).tolist()


@dataclass(frozen=True)
class _Range:
    """The result of merging one range; the nodes themselves are in files."""

    low: int  # its first and last key
    high: int
    sizes: list[int]  # nodes of level 1 .. order


def _merge_range(folder: Path, runs: int, number: int, low: int, end: int | None, order: int, bits: int) -> _Range:
    """Add up the counts of the keys from `low` to below `end` over all runs, and write the nodes of every level to
    files: tokens uint32, counts uint64, and, of inner levels, where their children start in the next level."""
    keys, counts = [], []
    for run in range(runs):
        run_keys = np.load(folder / f"run-{run}-keys.npy", mmap_mode="r")
        start = np.searchsorted(run_keys, np.uint64(low))
        stop = len(run_keys) if end is None else np.searchsorted(run_keys, np.uint64(end))
        keys.append(np.array(run_keys[start:stop]))  # a copy: more runs than the limit of open files are possible
        counts.append(np.array(np.load(folder / f"run-{run}-counts.npy", mmap_mode="r")[start:stop]))
    keys, counts = np.concatenate(keys), np.concatenate(counts)
    place = np.argsort(keys, kind="stable")  # a merge of sorted parts
    keys, counts = keys[place], counts[place].astype(np.uint64)
    first = first_of_each(keys)
    keys, counts = keys[first], np.add.reduceat(counts, first)
    ends, sizes, starts = (int(keys[0]), int(keys[-1])), [], None
    for level in range(order, 0, -1):
        codes = keys & np.uint64((1 << bits) - 1)
        real = codes > 0  # else the n-gram would end behind its document
        np.save(_level(folder, number, level, "tokens"), (codes[real] - np.uint64(1)).astype(np.uint32))
        np.save(_level(folder, number, level, "counts"), counts[real])
        if starts is not None:
            np.save(_level(folder, number, level, "starts"), starts[real])
        sizes.insert(0, int(real.sum()))
        keys = keys >> np.uint64(bits)  # of the parents
        first = first_of_each(keys)
        starts = (np.cumsum(real) - real)[first]
        keys, counts = keys[first], np.add.reduceat(counts, first)
    return _Range(*ends, sizes)


def _level(folder: Path, number: int, level: int, what: str) -> Path:
    return folder / f"range-{number}-level-{level}-{what}.npy"


@dataclass(frozen=True)
class _Merged:
    """The levels of the whole model, read from the files of the merged ranges."""

    folder: Path
    ranges: list[_Range]
    vocabulary: int
    order: int

    def shared(self, number: int, level: int) -> int:
        """Return 1 if a range's first node of a level is also the last node of the range before, else 0."""
        if not 0 < number < len(self.ranges):
            return 0
        shift = self.vocabulary.bit_length() * (self.order - level)
        return int(self.ranges[number - 1].high >> shift == self.ranges[number].low >> shift)

    def nodes(self) -> list[int]:
        """Return the number of nodes on each level."""
        above = (
            sum(found.sizes[level - 1] - self.shared(number, level) for number, found in enumerate(self.ranges))
            for level in range(2, self.order + 1)
        )
        return [self.vocabulary, *above]

    def counts(self, level: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield tokens uint32 and counts uint64 of a level's nodes, range by range."""
        total = np.zeros(self.vocabulary if level == 1 else 0, np.uint64)
        carried = np.uint64(0)
        for number in range(len(self.ranges)):
            tokens, counts = (np.load(_level(self.folder, number, level, what)) for what in ("tokens", "counts"))
            if level == 1:
                total[tokens] += counts
                continue
            if self.shared(number, level):
                counts[0] += carried
            if self.shared(number + 1, level):
                carried = counts[-1]
                tokens, counts = tokens[:-1], counts[:-1]
            yield tokens, counts
        if level == 1:
            yield np.arange(self.vocabulary, dtype=np.uint32), total

    def child_starts(self) -> Iterator[np.ndarray]:
        """Yield where the children of every inner node start, among all nodes, int64; at the end the number of
        nodes."""
        nodes = self.nodes()
        for level in range(1, self.order):
            at, firsts = sum(nodes[:level]), []  # the place of each range's first node of the next level
            for number, found in enumerate(self.ranges):
                firsts.append(at - self.shared(number, level + 1))
                at = firsts[-1] + found.sizes[level]
            starts = np.full(self.vocabulary if level == 1 else 0, at)
            for number in reversed(range(len(self.ranges))) if level == 1 else range(len(self.ranges)):
                found = np.load(_level(self.folder, number, level, "starts")) + firsts[number]
                if level == 1:  # backwards: the first range of a shared node decides
                    starts[np.load(_level(self.folder, number, 1, "tokens"))] = found
                else:
                    yield found[self.shared(number, level) :]
            if level == 1:
                yield np.minimum.accumulate(starts[::-1])[::-1]  # an unseen token's: where the next one's are
        yield np.array([sum(nodes)])

"""Reads the n-gram files of DART's authors (`.trie`) into ours.

Such a file is little endian and without gaps: its order and the number of its nodes, both uint64; then every node, a
parent before its children: token int32, parent uint64, count int32, the number of its children uint64, and these:
(token int32, node uint64) each. Node 0 is the root, the empty n-gram. It does not say which tokenizer it belongs to.

A node's count is how often its n-gram was seen, at the end of a text too, as ours is. What a node was seen more often
than all its children together is how often a text ended there. So a node gives one key of `infer.ngrams.count` with
that number, and the keys are merged as those of a corpus are. N nodes.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from infer.ngrams.count import Shape, build, first_of_each, save_run
from infer.utils.jit import njit

if TYPE_CHECKING:
    from infer.ngrams.model import NGram

HEAD, NODE, CHILD = 16, 24, 12  # bytes of the file's beginning, of a node, of one child in its list
LONGEST = 64  # no order is larger
FAULTS = {
    1: "the parent of node {node} does not stand before it",
    2: "node {node} is a token outside the vocabulary of {vocabulary} ids; it is another target's, or damaged",
    3: "node {node} is deeper than its order of {order}",
    4: "the list of children of node {node} goes beyond its end",
    5: "node {node} was seen less often than its children together",
    6: "its nodes name other parents than its lists of children do",
}


def convert_trie(
    path: Path,
    vocabulary: int,
    out: Path,
    digest: str,
    order: int | None = None,
    workers: int | None = None,
    chunk_tokens: int = 8_000_000,
    progress: Callable[[int], None] = lambda tokens: None,
    threshold: int = 1,
) -> "NGram":
    """Write the n-grams of a `.trie` file into the file `out`, and open it; arguments as of `count_ngrams`.

    order: the longest n-grams taken over; the file's own by default. The file is mapped; 17 bytes a node are in memory
    (it has 36 of each). Raises FileNotFoundError, and ValueError, naming the file, if it is none, or damaged.
    """
    path = Path(path)
    data = _open(path)
    longest, nodes = (int(number) for number in data[:HEAD].view("<u8"))
    order = longest if order is None else order
    if order > longest:
        raise ValueError(f"order={order}: {path} has n-grams of up to {longest}")
    if order > (most := 64 // max(vocabulary.bit_length(), 1)):
        raise ValueError(
            f"{path}: n-grams of {order} ids, of which {most} at most fit into 64 bits for a vocabulary of "
            f"{vocabulary}; order={most} takes over the shorter ones alone"
        )
    shape = Shape(vocabulary, order, digest, threshold, chunk_tokens)
    keys, own, depths = np.zeros(nodes, np.uint64), np.zeros(nodes, np.int64), np.zeros(nodes, np.uint8)
    fault, node = read(data, longest, order, vocabulary, shape.bits, keys, own, depths)
    if fault:
        raise ValueError(f"{path}: {FAULTS[fault].format(node=node, vocabulary=vocabulary, order=longest)}")
    if not (own[1:] > 0).any():
        raise ValueError(f"{path}: it holds no n-grams")

    def jobs(folder: Path) -> Iterator[tuple]:
        for run, start in enumerate(range(0, nodes, chunk_tokens)):
            part = slice(start, start + chunk_tokens)
            taken = np.flatnonzero((own[part] > 0) & (depths[part] > 0)) + start
            yield folder, run, keys[taken], own[taken]

    return build(out, shape, write_run, jobs, workers, progress)


def write_run(folder: Path, run: int, keys: np.ndarray, counts: np.ndarray) -> int:
    """Write keys (n,), in any order, with their counts; return how many positions these are."""
    place = np.argsort(keys)
    keys, counts = keys[place], counts[place]
    if len(keys):  # a token twice among siblings is no fault that its authors' reader would notice
        first = first_of_each(keys)
        keys, counts = keys[first], np.add.reduceat(counts, first)
    save_run(folder, run, keys, counts)
    return int(counts.sum())


def _open(path: Path) -> np.ndarray:
    """The file's bytes, mapped, if its size is that of its nodes: (size,) uint8."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such .trie file")
    size = path.stat().st_size
    data = np.memmap(path, np.uint8, "r") if size else np.empty(0, np.uint8)
    order, nodes = (int(number) for number in data[:HEAD].view("<u8")) if size >= HEAD else (0, 0)
    if not 1 <= order <= LONGEST or not 1 <= nodes <= size:
        raise ValueError(f"{path}: not a .trie file of DART's, or its first bytes are damaged")
    expected = HEAD + nodes * NODE + (nodes - 1) * CHILD  # every node but the root is somebody's child
    if size != expected:
        wrong = "truncated" if size < expected else "too long"
        raise ValueError(f"{path}: {wrong}, {size} bytes instead of {expected} for {nodes} nodes; copy it again")
    return data


@njit
def _number(data, at, size):
    """The little-endian number of so many bytes, 4 (signed) or 8 (negative if it is 2^63 or more)."""
    value = np.int64(0)
    for i in range(size):
        value |= np.int64(data[at + i]) << np.int64(8 * i)
    return value - (np.int64(1) << np.int64(32)) if size == 4 and value >> np.int64(31) else value


@njit
def _link(parent, token, child):
    """A number for "child continues parent by token", small enough to add up billions of them."""
    return ((parent * 1000003 + token) & 0xFFFFFFF) * (child % 268435399) & 0xFFFFFFF


@njit
def read(data, longest, order, vocabulary, bits, keys, own, depths):
    """Reads the nodes of a file (size,) uint8: fills keys (N,) uint64; own (N,) int64, how often a text ended at each
    n-gram or it was cut there for its length; depths (N,) uint8, 0 of what is longer than `order`. Returns which of
    FAULTS there is, or 0, and at which node. The links that nodes and lists name are compared by sums over all."""
    at, nodes, links = HEAD, len(keys), np.int64(0)
    levels = np.zeros(nodes, np.uint8)
    for node in range(nodes):
        if at + NODE > len(data):
            return 4, node
        token, parent, count = _number(data, at, 4), _number(data, at + 4, 8), _number(data, at + 12, 4)
        children = _number(data, at + 16, 8)
        at += NODE
        if not 0 <= children <= (len(data) - at) // CHILD:
            return 4, node
        for _ in range(children):
            continuation = _number(data, at + 4, 8)
            if not node < continuation < nodes:
                return 6, node
            links += _link(node, _number(data, at, 4), continuation)
            at += CHILD
        if node == 0:
            continue
        if not 0 <= parent < node:
            return 1, node
        if not 0 <= token < vocabulary:
            return 2, node
        depth = int(levels[parent]) + 1
        if depth > longest:
            return 3, node
        links -= _link(parent, token, node)
        levels[node] = depth
        if depth <= order:
            depths[node] = depth
            keys[node] = keys[parent] | np.uint64(token + 1) << np.uint64(bits * (order - depth))
            own[node] += count
            if parent > 0:
                own[parent] -= count
    for node in range(1, nodes):
        if own[node] < 0:
            return 5, node
    return (6, 0) if links != 0 or at != len(data) else (0, 0)

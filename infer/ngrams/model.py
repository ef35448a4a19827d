"""An n-gram model of token ids: a trie in one memory-mapped file (DART appendix C), 4 bytes a leaf,
8 an inner node.

A node is an n-gram, and the nodes stand breadth first. Level 1 has one node for each of the V token
ids, seen or not, so that there a node's number is its token; level k, for k = 2 .. order, has the
k-grams that were seen, siblings sorted by token. Node numbers run over all levels. The file, little
endian, sections aligned to 64 bytes:

    header           HEADER: what the file is, where its sections are, its own CRC32
    entries          uint32 a node: token << count_bits | code; a code is the node's count, or the
                     largest code
    low, base        uint32 an inner node and one more, int64 for each 65,536 of these: the children of
                     node i are child(i) .. child(i + 1) - 1, child(i) = base[i >> GROUP_BITS] +
                     low[i]
    overflow_nodes   int64, sorted: the nodes whose counts do not fit a code, all with the largest code
    overflow_counts  int64: these counts

Files of earlier versions end in a table of CRC32s, which nothing reads.

`infer.ngrams.count` makes such files of text. V tokens of vocabulary, N nodes.
"""

import mmap
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from infer.utils.files import replacing
from infer.utils.jit import njit

# a transfer in text mode changes the line ending
MAGIC = b"ngrams\r\n"
VERSION = 1
ALIGNMENT = 64  # bytes, of sections
GROUP_BITS = 16
MAX_ORDER = 64
HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("order", "<u4"),
        ("vocabulary", "<u8"),
        ("tokens", "<u8"),
        ("digest", "S64"),
        ("nodes", "<u8", MAX_ORDER),
        (
            "sections",
            "<u8",
            (6, 2),
        ),  # offset and bytes of entries, low, base, ..., and of what follows them
        ("padding", "V60"),
        ("checksum", "<u4"),
    ]
)
DTYPES = ("<u4", "<u4", "<i8", "<i8", "<i8")  # of the sections


class Arrays(NamedTuple):
    """The model for compiled code. A damaged file may hold any numbers: tokens that it names can be
    V or larger."""

    entries: np.ndarray  # (N,) uint32
    low: np.ndarray  # (inner + 1,) uint32
    base: np.ndarray  # ((inner >> GROUP_BITS) + 1,) int64
    overflow_nodes: np.ndarray  # (O,) int64
    overflow_counts: np.ndarray  # (O,) int64
    count_bits: int
    vocabulary: int
    inner: int  # nodes of all levels but the last, which come first


def count_bits(vocabulary: int) -> int:
    """Return how many bits of an entry a vocabulary's ids leave for the count."""
    return 32 - max((vocabulary - 1).bit_length(), 1)


def layout(nodes: Sequence[int], overflow: int) -> np.ndarray:
    """Return (6, 2) uint64: offset and bytes of every section, for the nodes of each level and the
    overflowing ones."""
    inner = sum(nodes[:-1])
    sizes = [
        4 * sum(nodes),
        4 * (inner + 1),
        8 * ((inner >> GROUP_BITS) + 1),
        8 * overflow,
        8 * overflow,
    ]
    sections = []
    offset = HEADER.itemsize
    for size in sizes:
        sections.append((offset, size))
        offset = -(-(offset + size) // ALIGNMENT) * ALIGNMENT
    return np.array([*sections, (offset, 0)], np.uint64)


def header_checksum(header: np.void) -> int:
    """Return the CRC32 of a header up to its last field."""
    return zlib.crc32(header.tobytes()[: HEADER.fields["checksum"][1]])


def write(
    out: Path,
    tokens: np.ndarray,
    counts: np.ndarray,
    starts: np.ndarray,
    nodes: list[int],
    counted: int,
    digest: str,
) -> None:
    """Write the file of nodes (N,) uint64, of which there are so many in each level, whole or not
    at
    all: `starts` (inner + 1,) says where the children of the inner nodes start, and at last how
        many
    nodes there are."""
    vocabulary = nodes[0]
    size = 1 << GROUP_BITS
    largest = (1 << count_bits(vocabulary)) - 1
    overflow = np.flatnonzero(counts >= largest)
    base = starts[::size]
    entries = tokens << np.uint64(count_bits(vocabulary)) | np.minimum(counts, np.uint64(largest))
    low = starts - np.repeat(base, size)[: len(starts)]
    assert low.max() < 1 << 32, "too many continuations of neighbouring n-grams for this format"
    sections = layout(nodes, len(overflow))
    body = np.zeros(int(sections[-1, 0]) - HEADER.itemsize, np.uint8)
    for (at, length), part, dtype in zip(
        sections[:-1].astype(np.int64) - [HEADER.itemsize, 0],
        (entries, low, base, overflow, counts[overflow]),
        DTYPES,
        strict=False,
    ):
        body[at : at + length] = part.astype(dtype).view(np.uint8)
    header = np.zeros((), HEADER)
    header["magic"], header["version"], header["order"] = MAGIC, VERSION, len(nodes)
    header["vocabulary"], header["tokens"], header["digest"] = vocabulary, counted, digest
    header["nodes"][: len(nodes)], header["sections"] = nodes, sections
    header["checksum"] = header_checksum(header)
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as fresh, fresh.open("wb") as file:
        file.write(header.tobytes())
        file.write(body)


def _read_header(path: Path, file: BinaryIO) -> np.void:
    """Read a file's header; ValueError where it contradicts itself, its checksum or the file's
    size."""
    start = file.read(HEADER.itemsize)
    if start[: len(MAGIC)] != MAGIC or len(start) < HEADER.itemsize:
        raise ValueError(f"{path}: not an n-gram file of this program")
    header = np.frombuffer(start, HEADER)[0]
    if header["version"] != VERSION:
        raise ValueError(
            f"{path}: version {header['version']} of the n-gram format, this program reads {VERSION}"
        )
    nodes = [int(count) for count in header["nodes"][: header["order"]]]
    sections = header["sections"]
    whole = (
        header["checksum"] == header_checksum(header)
        and 1 <= header["order"] <= MAX_ORDER
        and nodes[0] == header["vocabulary"]
        and np.array_equal(sections[:-1], layout(nodes, int(sections[3, 1]) // 8)[:-1])
    )
    if not whole:
        raise ValueError(f"{path}: its header is altered or damaged; copy it or count it again")
    size = file.seek(0, os.SEEK_END)
    expected = int(sections[-1].sum())
    if size != expected:
        raise ValueError(f"{path}: {size} bytes instead of {expected}; copy it or count it again")
    return header


@dataclass(frozen=True, eq=False)
class NGram:
    """An n-gram model over token ids. Ids outside the vocabulary count as never seen. Its memory is
    the mapped file, shared by every process that opens it; the file must not be written while it is
    open (replacing it is safe)."""

    path: Path
    order: int  # the longest n-grams counted
    vocabulary: int
    tokens: int  # counted, in all
    nodes: tuple[int, ...]  # of level 1 .. order
    digest: str  # of the tokenizer
    size_bytes: int
    arrays: Arrays

    @classmethod
    def open(cls, path: Path | str, digest: str | None = None) -> "NGram":
        """Map a file that `infer.ngrams.count` wrote, in milliseconds; entries are read when they
        are looked up.

        `digest`: the tokenizer's, which must be the one that the file was counted with. Raises
        FileNotFoundError, and ValueError, naming the file, if it is another kind of file, of
        another version or tokenizer, truncated, too long, or its header altered; lookups in a
        damaged body are wrong and do no harm.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: there is no such n-gram file")
        with path.open("rb") as file:
            header = _read_header(path, file)
            counted = header["digest"].decode(errors="replace")
            sections = header["sections"][:-1].astype(np.int64)
            if digest not in (None, counted):
                raise ValueError(
                    f"{path}: counted with another tokenizer ({counted[:12]}..., this one is {digest[:12]}...); "
                    "count it again with this tokenizer"
                )
            memory = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
            views = [
                memory[at : at + size].view(dtype)
                for (at, size), dtype in zip(sections, DTYPES, strict=True)
            ]
        vocabulary = int(header["vocabulary"])
        nodes = tuple(map(int, header["nodes"][: header["order"]]))
        arrays = Arrays(*views, count_bits(vocabulary), vocabulary, sum(nodes[:-1]))
        tokens = int(header["tokens"])
        return cls(path, len(nodes), vocabulary, tokens, nodes, counted, len(memory), arrays)

    @classmethod
    def uniform(cls, vocabulary: int) -> "NGram":
        """Return a model that saw every token once, and none behind another."""
        bits = count_bits(vocabulary)
        entries = (np.arange(vocabulary, dtype=np.int64) << bits | 1).astype(np.uint32)
        parts = (
            entries,
            *(np.zeros(size, dtype) for size, dtype in zip((1, 1, 0, 0), DTYPES[1:], strict=False)),
        )
        for part in parts:
            part.setflags(write=False)  # as a file's are: compiled code is made for one kind
        arrays = Arrays(*parts, bits, vocabulary, 0)
        return cls(Path(), 1, vocabulary, vocabulary, (vocabulary,), "", entries.nbytes, arrays)


# Lookups for compiled code, with an `Arrays`. A damaged file may hold anything: no index goes
# outside the arrays.


@njit
def _child(arrays, node):
    """Return where the children of an inner node (or of the one behind the last) start."""
    total = len(arrays.entries)
    base = min(max(arrays.base[node >> GROUP_BITS], 0), total)
    return min(base + np.int64(arrays.low[node]), total)


@njit
def children(arrays, node):
    """Return (first, last): a node's children are the nodes first .. last - 1; none for node -1 and
    for a leaf."""
    if node < 0 or node >= arrays.inner:
        return 0, 0
    first = _child(arrays, node)
    return first, max(first, _child(arrays, node + 1))


@njit
def token_of(arrays, node):
    return np.int64(arrays.entries[node]) >> arrays.count_bits


@njit
def lower_bound(arrays, first, last, token):
    """Return the first of the siblings first .. last - 1 whose token is not below `token`, or last:
    a binary search."""
    while first < last:
        middle = (first + last) // 2
        if token_of(arrays, middle) < token:
            first = middle + 1
        else:
            last = middle
    return first


@njit
def find(arrays, ids, start, end):
    """Return the node of the n-gram ids[start:end], ids int64, or -1 if it was never seen, is
    empty, or is longer than the order."""
    if start >= end or ids[start] < 0 or ids[start] >= arrays.vocabulary:
        return -1
    node = ids[start]
    for i in range(start + 1, end):
        first, last = children(arrays, node)
        node = lower_bound(arrays, first, last, ids[i])
        if node == last or token_of(arrays, node) != ids[i]:
            return -1
    return node


@njit
def count_of(arrays, node):
    """Return a node's count; 0 for node -1."""
    if node < 0 or node >= len(arrays.entries):
        return 0
    largest = (1 << arrays.count_bits) - 1
    code = np.int64(arrays.entries[node]) & largest
    if code < largest:
        return code
    at = np.searchsorted(arrays.overflow_nodes, node)
    found = at < len(arrays.overflow_nodes) and arrays.overflow_nodes[at] == node
    return max(arrays.overflow_counts[at], 0) if found else code


@njit
def find_children(arrays, node, sorted_tokens, out):
    """Fill out (T,) int64 with the children of a node that are sorted_tokens (T,) int64, ascending:
    -1 where unseen; return how many children the node has in all.

    One traversal (DART appendix C.2): every search starts where the last ended."""
    at, last = children(arrays, node)
    total = last - at
    for i in range(len(sorted_tokens)):
        at = lower_bound(arrays, at, last, sorted_tokens[i])
        out[i] = at if at < last and token_of(arrays, at) == sorted_tokens[i] else -1
    return total


@njit
def begin(arrays, context, suffixes):
    """Fill suffixes (O - 1,) int64 for a text that ends in context (C,) int64: the node of its last
    k + 1 tokens, -1 if they were never seen."""
    for k in range(len(suffixes)):
        start = len(context) - 1 - k
        suffixes[k] = find(arrays, context, start, len(context)) if start >= 0 else -1


@njit
def unigrams(arrays, total, tokens, out):
    """Fill out (K,) with the unigram probabilities of tokens (K,) int64."""
    for i in range(len(tokens)):
        out[i] = count_of(arrays, find(arrays, tokens, i, i + 1)) / max(total, 1)


@njit
def extend(arrays, suffixes, tokens, alone, grown, probabilities):
    """Extend a path by one step: fill probabilities (K,) with Pr(token | path) of tokens (K,)
    int64, ascending, and grown (O, K) with the suffixes of the path behind each of them, and in its
    last row with the n-grams of order O that end there.

    DART section 4: count(context, token) / count(context), from the longest suffix of the context
    in which the token was seen, without a discount for a shorter one; if in none `alone` (K,), its
    share of all tokens or 0."""
    for i in range(len(tokens)):
        probabilities[i] = alone[i]
        grown[0, i] = tokens[i] if tokens[i] < arrays.vocabulary else -1
    for k in range(len(suffixes)):  # a longer context overrides a shorter one
        found = grown[k + 1]
        if find_children(arrays, suffixes[k], tokens, found) == 0:
            continue
        context = count_of(arrays, suffixes[k])
        for i in range(len(tokens)):
            if found[i] >= 0 and context > 0:
                count = count_of(arrays, found[i])
                if count > 0:
                    probabilities[i] = count / context

"""An n-gram model of token ids: a trie in one memory-mapped file (DART appendix C), 4 bytes per
leaf and 8 bytes per inner node.

A node is an n-gram; its children are the n-grams that are one token longer. Nodes are numbered
level by level over all levels. Level 1 has one node for each token id of the vocabulary, so that a
node number of level 1 is a token id. Level k, for k = 2 .. order, has the n-grams of k tokens that
occur in the corpus. Siblings are sorted by their last token. Inner nodes are the nodes of all
levels but the last.

The file is little endian, and its sections are aligned to 64 bytes:

    header           NGRAM_FILE_HEADER_DTYPE: the format, the offsets of the sections, and a CRC32
                     of the header
    entries          uint32 for each node: last token << count_bits | count. A count that does not
                     fit into count_bits bits is stored as the largest value that does.
    child_offsets    uint32 for each inner node, and one more value
    child_bases      int64 for each group of 65,536 values of `child_offsets`. The children of
                     node i are the nodes child(i) .. child(i + 1) - 1, where child(i) =
                     child_bases[i >> LOG2_TRIE_NODES_PER_CHILD_BASE] + child_offsets[i].
    overflow_nodes   int64, sorted: the nodes whose counts do not fit into an entry
    overflow_counts  int64: the counts of these nodes

Files of earlier versions end with a table of CRC32 checksums, which is ignored.
"""

import mmap
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from infer.utils.files import atomic_replace_file
from infer.utils.jit import njit

# First bytes of an n-gram file. They contain \r\n, which a transfer in text mode would change, so
# that the damage is detected.
NGRAM_FILE_MAGIC = b"ngrams\r\n"
NGRAM_FILE_VERSION = 1
NGRAM_FILE_SECTION_ALIGNMENT_BYTES = 64
LOG2_TRIE_NODES_PER_CHILD_BASE = 16
MAX_NGRAM_ORDER = 64
NGRAM_FILE_HEADER_DTYPE = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("order", "<u4"),
        ("vocabulary", "<u8"),
        ("tokens", "<u8"),
        ("digest", "S64"),
        ("nodes", "<u8", MAX_NGRAM_ORDER),
        # (offset, size) in bytes of six sections: entries, child_offsets, child_bases,
        # overflow_nodes, overflow_counts, and a table of checksums that only files of earlier
        # versions have.
        ("sections", "<u8", (6, 2)),
        ("padding", "V60"),
        ("checksum", "<u4"),
    ]
)
NGRAM_FILE_SECTION_DTYPES = ("<u4", "<u4", "<i8", "<i8", "<i8")


# Type of node numbers, token ids and counts. numba compiles both int and np.int64 to a 64-bit
# integer.
Int64 = int | np.int64


class TrieArrays(NamedTuple):
    """The n-gram trie as arrays, in the form that compiled code can use. See the docstring of this
    module for their content.

    The arrays of a damaged file may contain any numbers, such as token ids outside the vocabulary.
    """

    entries: np.ndarray  # (number of nodes,) uint32: last token and count of each node
    # (inner_nodes + 1,) uint32: first child of each inner node, minus the entry of `child_bases`
    # for the node's group of 65,536 nodes
    child_offsets: np.ndarray
    # (number of groups,) int64: first child of the first node of each group of 65,536 nodes
    child_bases: np.ndarray
    overflow_nodes: np.ndarray  # int64, sorted: nodes whose counts do not fit into an entry
    overflow_counts: np.ndarray  # int64: the counts of the nodes in `overflow_nodes`
    count_bits: int  # number of low bits of an entry that hold the count
    vocabulary: int  # number of token ids
    inner_nodes: int  # number of nodes of all levels but the last; these nodes come first


def compute_count_bits(vocabulary: int) -> int:
    """Return how many of the 32 bits of a trie entry remain for the count, after the bits that a
    token id of a vocabulary of this size needs."""
    return 32 - max((vocabulary - 1).bit_length(), 1)


def compute_section_layout(level_nodes: Sequence[int], overflow_count: int) -> np.ndarray:
    """Return the offset and size in bytes of each section of an n-gram file, (6, 2) uint64.

    level_nodes: number of nodes of each level of the trie. overflow_count: number of nodes whose
    counts do not fit into an entry.
    """
    inner_nodes = sum(level_nodes[:-1])
    sizes = [
        4 * sum(level_nodes),
        4 * (inner_nodes + 1),
        8 * ((inner_nodes >> LOG2_TRIE_NODES_PER_CHILD_BASE) + 1),
        8 * overflow_count,
        8 * overflow_count,
    ]
    sections = []
    offset = NGRAM_FILE_HEADER_DTYPE.itemsize
    for size in sizes:
        sections.append((offset, size))
        offset = (
            -(-(offset + size) // NGRAM_FILE_SECTION_ALIGNMENT_BYTES)
            * NGRAM_FILE_SECTION_ALIGNMENT_BYTES
        )
    return np.array([*sections, (offset, 0)], np.uint64)


def compute_header_checksum(header: np.void) -> int:
    """Return the CRC32 of an n-gram file's header, without the header's last field `checksum`."""
    checksum_bytes = np.dtype("<u4").itemsize
    return zlib.crc32(header.tobytes()[:-checksum_bytes])


def write_ngram_file(
    path: Path,
    tokens: np.ndarray,
    counts: np.ndarray,
    child_starts: np.ndarray,
    level_nodes: list[int],
    num_tokens: int,
    digest: str,
) -> None:
    """Write an n-gram file, completely or not at all.

    tokens, counts: (number of nodes,) uint64, the last token and the count of each node, level by
    level. child_starts: (inner nodes + 1,), the first child of each inner node, and then the number
    of all nodes. level_nodes: number of nodes of each level. num_tokens: number of tokens of the
    corpus. digest: digest of the tokenizer.
    """
    vocabulary = level_nodes[0]
    group_size = 1 << LOG2_TRIE_NODES_PER_CHILD_BASE
    count_bits = compute_count_bits(vocabulary)
    largest_code = (1 << count_bits) - 1
    overflow_nodes = np.flatnonzero(counts >= largest_code)
    entries = tokens << np.uint64(count_bits) | np.minimum(counts, np.uint64(largest_code))
    base = child_starts[::group_size]
    low = child_starts - np.repeat(base, group_size)[: len(child_starts)]
    assert low.max() < 1 << 32, "too many continuations of neighbouring n-grams for this format"

    sections = compute_section_layout(level_nodes, len(overflow_nodes))
    body = np.zeros(int(sections[-1, 0]) - NGRAM_FILE_HEADER_DTYPE.itemsize, np.uint8)
    body_sections = sections[:-1].astype(np.int64) - [NGRAM_FILE_HEADER_DTYPE.itemsize, 0]
    arrays = (entries, low, base, overflow_nodes, counts[overflow_nodes])
    for (offset, size), array, dtype in zip(
        body_sections, arrays, NGRAM_FILE_SECTION_DTYPES, strict=True
    ):
        body[offset : offset + size] = array.astype(dtype).view(np.uint8)

    header = np.zeros(1, NGRAM_FILE_HEADER_DTYPE)[0]
    header["magic"] = NGRAM_FILE_MAGIC
    header["version"] = NGRAM_FILE_VERSION
    header["order"] = len(level_nodes)
    header["vocabulary"] = vocabulary
    header["tokens"] = num_tokens
    header["digest"] = digest
    header["nodes"][: len(level_nodes)] = level_nodes
    header["sections"] = sections
    header["checksum"] = compute_header_checksum(header)

    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_replace_file(path) as temporary_path, temporary_path.open("wb") as file:
        file.write(header.tobytes())
        file.write(body.data)


def read_ngram_header(path: Path, file: BinaryIO) -> np.void:
    """Read and check the header of an n-gram file. Return a record of NGRAM_FILE_HEADER_DTYPE.

    Raises ValueError if the file is not an n-gram file, if this program does not read its format
    version, if the header is damaged, or if the size of the file is not the one in the header.
    """
    content = file.read(NGRAM_FILE_HEADER_DTYPE.itemsize)
    if (
        content[: len(NGRAM_FILE_MAGIC)] != NGRAM_FILE_MAGIC
        or len(content) < NGRAM_FILE_HEADER_DTYPE.itemsize
    ):
        raise ValueError(
            f"{path}: this is not an n-gram file of this program; give a file that the n-gram "
            "counter of this program wrote"
        )
    header = np.frombuffer(content, NGRAM_FILE_HEADER_DTYPE)[0]
    if header["version"] != NGRAM_FILE_VERSION:
        raise ValueError(
            f"{path}: this file has version {header['version']} of the n-gram format, but this "
            f"program reads version {NGRAM_FILE_VERSION}; count the n-grams again"
        )

    level_nodes = [int(count) for count in header["nodes"][: header["order"]]]
    sections = header["sections"]
    is_consistent = (
        header["checksum"] == compute_header_checksum(header)
        and 1 <= header["order"] <= MAX_NGRAM_ORDER
        and level_nodes[0] == header["vocabulary"]
        and np.array_equal(
            sections[:-1], compute_section_layout(level_nodes, int(sections[3, 1]) // 8)[:-1]
        )
    )
    if not is_consistent:
        raise ValueError(
            f"{path}: the header is damaged; copy the file again, or count the n-grams again"
        )

    size = file.seek(0, os.SEEK_END)
    expected_size = int(sections[-1].sum())
    if size != expected_size:
        raise ValueError(
            f"{path}: the file has {size} bytes instead of {expected_size}; copy the file again, "
            "or count the n-grams again"
        )
    return header


@dataclass(frozen=True, eq=False)
class NGramModel:
    """The counts of all n-grams of a corpus of token ids, in a memory-mapped file.

    All processes that open the file share its memory. While the file is open, its content must not
    be changed, but another file may be moved to its path. Token ids outside the vocabulary have the
    count 0.
    """

    path: Path
    order: int  # number of tokens of the longest n-grams
    vocabulary: int  # number of token ids
    num_tokens: int  # number of tokens of the corpus
    nodes_per_level: tuple[int, ...]  # number of n-grams of 1, 2, .. order tokens
    digest: str  # digest of the tokenizer that produced the token ids
    size_bytes: int
    trie: TrieArrays

    @classmethod
    def open(cls, path: Path | str, digest: str | None = None) -> "NGramModel":
        """Open a file that `infer.ngrams.count` wrote. This takes milliseconds, because the file is
        memory-mapped and entries are read from disk only when they are looked up.

        digest: the digest of the current tokenizer, which must be the one recorded in the file;
        None means that this is not checked.

        Raises FileNotFoundError if there is no such file. Raises ValueError if `read_ngram_header`
        finds an error, or if the file was counted with another tokenizer than `digest` says. If the
        rest of the file is damaged, lookups return wrong numbers, but never read outside the file.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(
                f"{path}: there is no such n-gram file; check the path, or count the n-grams of a "
                "corpus into this file"
            )
        with path.open("rb") as file:
            header = read_ngram_header(path, file)
            file_digest = header["digest"].decode(errors="replace")
            if digest is not None and digest != file_digest:
                raise ValueError(
                    f"{path}: these n-grams were counted with another tokenizer "
                    f"({file_digest[:12]}..., the target's tokenizer is {digest[:12]}...); count "
                    "them again with the target's tokenizer"
                )
            mapped_file = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        content = np.frombuffer(mapped_file, np.uint8)
        sections = header["sections"][:-1].astype(np.int64)
        arrays = [
            content[offset : offset + size].view(dtype)
            for (offset, size), dtype in zip(sections, NGRAM_FILE_SECTION_DTYPES, strict=True)
        ]
        vocabulary = int(header["vocabulary"])
        nodes = tuple(map(int, header["nodes"][: header["order"]]))
        trie = TrieArrays(*arrays, compute_count_bits(vocabulary), vocabulary, sum(nodes[:-1]))
        num_tokens = int(header["tokens"])
        return cls(path, len(nodes), vocabulary, num_tokens, nodes, file_digest, len(content), trie)

    @classmethod
    def uniform(cls, vocabulary: int) -> "NGramModel":
        """Return a model that gives all tokens the same probability and needs no file: each token
        has the count 1, and there are no n-grams of two or more tokens."""
        count_bits = compute_count_bits(vocabulary)
        entries = (np.arange(vocabulary, dtype=np.int64) << count_bits | 1).astype(np.uint32)
        empty_sizes = (1, 1, 0, 0)
        arrays = [entries]
        for size, dtype in zip(empty_sizes, NGRAM_FILE_SECTION_DTYPES[1:], strict=True):
            arrays.append(np.zeros(size, dtype))
        for array in arrays:
            # The arrays of a memory-mapped file are read-only, and numba compiles a function
            # separately for read-only and for writable arrays. The arrays are made read-only here,
            # too, so that each function is compiled only once.
            array.setflags(write=False)
        trie = TrieArrays(*arrays, count_bits, vocabulary, 0)
        return cls(Path(), 1, vocabulary, vocabulary, (vocabulary,), "", entries.nbytes, trie)


# The functions below look up nodes of the trie. A damaged file may contain any numbers, so they
# clamp every index to the size of the array.


@njit
def get_first_child(trie: TrieArrays, node: Int64) -> Int64:
    """Return the node number of an inner node's first child. If `node` is the number after the last
    inner node, return the number of all nodes."""
    num_nodes = len(trie.entries)
    base = min(max(trie.child_bases[node >> LOG2_TRIE_NODES_PER_CHILD_BASE], 0), num_nodes)
    return min(base + np.int64(trie.child_offsets[node]), num_nodes)


@njit
def get_child_range(trie: TrieArrays, node: Int64) -> tuple[Int64, Int64]:
    """Return (first, end): the children of a node are the nodes first .. end - 1. The range is
    empty for a leaf, and for node -1, which means that an n-gram does not occur in the corpus."""
    if node < 0 or node >= trie.inner_nodes:
        return 0, 0
    first = get_first_child(trie, node)
    return first, max(first, get_first_child(trie, node + 1))


@njit
def get_node_token(trie: TrieArrays, node: Int64) -> Int64:
    """Return the last token of the n-gram that a trie node stands for."""
    return np.int64(trie.entries[node]) >> trie.count_bits


@njit
def find_lower_bound(trie: TrieArrays, first: Int64, end: Int64, token: Int64) -> Int64:
    """Return the first of the sibling nodes first .. end - 1 whose token is at least `token`.
    Return `end` if there is none. The nodes are sorted by token; the search is binary.
    """
    while first < end:
        middle = (first + end) // 2
        if get_node_token(trie, middle) < token:
            first = middle + 1
        else:
            end = middle
    return first


@njit
def find_ngram_node(trie: TrieArrays, ids: np.ndarray, start: Int64, end: Int64) -> Int64:
    """Return the trie node of the n-gram ids[start:end]. Return -1 if the n-gram does not occur in
    the corpus, is empty, or has more tokens than the order of the model. `ids` is int64."""
    if start >= end or ids[start] < 0 or ids[start] >= trie.vocabulary:
        return -1
    node = ids[start]
    for i in range(start + 1, end):
        first, child_end = get_child_range(trie, node)
        node = find_lower_bound(trie, first, child_end, ids[i])
        if node == child_end or get_node_token(trie, node) != ids[i]:
            return -1
    return node


@njit
def get_node_count(trie: TrieArrays, node: Int64) -> Int64:
    """Return how often the n-gram of a trie node occurs in the corpus. For node -1, return 0."""
    if node < 0 or node >= len(trie.entries):
        return 0
    largest_code = (1 << trie.count_bits) - 1
    code = np.int64(trie.entries[node]) & largest_code
    if code < largest_code:
        return code
    i = np.searchsorted(trie.overflow_nodes, node)
    has_count = i < len(trie.overflow_nodes) and trie.overflow_nodes[i] == node
    return max(trie.overflow_counts[i], 0) if has_count else code


@njit
def find_children(
    trie: TrieArrays, node: Int64, sorted_tokens: np.ndarray, out: np.ndarray
) -> Int64:
    """For each given token, find the child of a trie node that extends the node's n-gram by this
    token. Return the number of all children of the node.

    sorted_tokens: (num_tokens,) int64, ascending. out: (num_tokens,) int64, filled with the child
    for each token, or -1 if there is no such child. Each search starts where the previous one
    ended, so the children are traversed only once (DART appendix C.2).
    """
    child, end = get_child_range(trie, node)
    num_children = end - child
    for i in range(len(sorted_tokens)):
        child = find_lower_bound(trie, child, end, sorted_tokens[i])
        is_match = child < end and get_node_token(trie, child) == sorted_tokens[i]
        out[i] = child if is_match else -1
    return num_children


@njit
def find_suffix_nodes(trie: TrieArrays, context: np.ndarray, suffix_nodes: np.ndarray) -> None:
    """Look up every suffix of a context in the trie.

    context: (number of tokens,) int64, the last tokens of a sequence. suffix_nodes: (order - 1,)
    int64, filled: entry k is the node of the last k + 1 tokens, or -1 if this n-gram does not occur
    in the corpus.
    """
    for k in range(len(suffix_nodes)):
        start = len(context) - 1 - k
        suffix_nodes[k] = find_ngram_node(trie, context, start, len(context)) if start >= 0 else -1


@njit
def fill_unigram_probabilities(
    trie: TrieArrays, num_tokens: Int64, tokens: np.ndarray, out: np.ndarray
) -> None:
    """Fill `out` with the relative frequency in the corpus of each token in `tokens`, which is
    int64. Both arrays have the same length. `num_tokens` is the number of tokens of the corpus.
    """
    for i in range(len(tokens)):
        out[i] = get_node_count(trie, find_ngram_node(trie, tokens, i, i + 1)) / max(num_tokens, 1)


@njit
def compute_next_token_probabilities(
    trie: TrieArrays,
    suffix_nodes: np.ndarray,
    tokens: np.ndarray,
    fallback_probabilities: np.ndarray,
    child_suffix_nodes: np.ndarray,
    probabilities: np.ndarray,
) -> None:
    """Compute the n-gram probabilities Pr(token | path) of several tokens after a path of the draft
    tree.

    suffix_nodes: (order - 1,), the trie nodes of the path's suffixes, from `find_suffix_nodes`
    tokens: (K,) int64, the K tokens, ascending
    fallback_probabilities: (K,), the results for those tokens that follow no suffix of the path in
        the corpus
    child_suffix_nodes: (order, K), filled: row k has the trie nodes of the last k + 1 tokens of the
        path extended by each of the K tokens
    probabilities: (K,), filled with the result

    The probability is count(context, token) / count(context) (DART section 4). The context is the
    longest suffix of the path that the token follows in the corpus. There are no back-off weights
    (discounts for shorter contexts).
    """
    for i in range(len(tokens)):
        probabilities[i] = fallback_probabilities[i]
        child_suffix_nodes[0, i] = tokens[i] if tokens[i] < trie.vocabulary else -1
    # A longer suffix overwrites the probability of a shorter one, so the longest suffix decides.
    for k in range(len(suffix_nodes)):
        child_nodes = child_suffix_nodes[k + 1]
        if find_children(trie, suffix_nodes[k], tokens, child_nodes) == 0:
            continue
        context_count = get_node_count(trie, suffix_nodes[k])
        for i in range(len(tokens)):
            if child_nodes[i] >= 0 and context_count > 0:
                count = get_node_count(trie, child_nodes[i])
                if count > 0:
                    probabilities[i] = count / context_count

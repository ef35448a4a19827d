"""Count the n-grams of a corpus, out of core, into a file for `infer.ngrams.model`.

Every position of a document gives one key of 64 bits: its token and the order - 1 next ones, each plus 1, the first in
the highest bits; positions behind the document's end are 0. Chunks of keys are sorted and counted: `infer.ngrams.write`
merges them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from infer.ngrams.model import NGram
from infer.ngrams.write import Run, Shape, build, first_of_each


def usual_order(vocabulary: int) -> int:
    """Return the order that is counted unless another is asked for: the tokens that a 64-bit key holds, at most 6."""
    return min(6, 64 // vocabulary.bit_length())


def count_ngrams(
    documents: Iterable[Sequence[int]],
    vocabulary: int,
    order: int,
    out: Path,
    digest: str,
    chunk_tokens: int = 8_000_000,
    progress: Callable[[int], None] = lambda tokens: None,
    threshold: int = 1,
) -> NGram:
    """Count all n-grams of 1 to `order` ids within the documents into the file `out`, and open it.

    documents: sequences of ids below `vocabulary`, read once, each of them in memory only for its turn. digest: of the
    tokenizer, 64 hexadecimal digits. chunk_tokens: positions that are sorted at once, some 40 bytes each. progress is
    told how many tokens are counted. threshold: n-grams seen fewer times are left out.

    `out` appears whole or not at all. Temporary files are in a hidden folder beside it, gone at the end: at most 12
    bytes for each position of the corpus and 12 for each node. Raises ValueError for an order that does not fit, ids
    outside the vocabulary, and a corpus without tokens.
    """
    shape = Shape(vocabulary, order, digest, threshold, chunk_tokens)
    chunks = _chunks(documents, vocabulary, order, chunk_tokens)
    return build(out, shape, (sorted_run(*chunk, shape) for chunk in chunks), progress)


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
    """Return a document as uint32. Raises ValueError for ids outside the vocabulary."""
    tokens = np.asarray(document)
    if tokens.size == 0:
        return np.empty(0, np.uint32)
    for token in (int(tokens.min()), int(tokens.max())):
        if not 0 <= token < vocabulary:
            raise ValueError(f"document {number} has token id {token}, outside the vocabulary of {vocabulary} ids")
    return tokens.astype(np.uint32)


def sorted_run(tokens: np.ndarray, lengths: np.ndarray, own: int, shape: Shape) -> Run:
    """Sort and count the keys of one chunk's own positions."""
    order, bits = shape.order, shape.bits
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
    return Run(keys[first], np.diff(first, append=own), own)

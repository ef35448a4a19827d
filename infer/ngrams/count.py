"""Count the n-grams of a corpus into a file for `infer.ngrams.model`.

Every position of a document gives one key of 64 bits: its token and the order - 1 next ones, each
plus 1, the first in the highest bits; positions behind the document's end are 0. Sorted distinct
keys with counts hold the nodes of all levels, as their prefixes. Rare n-grams are left out: one is
never rarer than those that begin with it. The counts that stay are those of the corpus: Pr(token |
context) is what it was, or 0. All of it is in memory, some 40 bytes a token.

N nodes, V ids, O order.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from infer.ngrams.model import NGram, write


def usual_order(vocabulary: int) -> int:
    """Return the order that is counted unless another is asked for: the tokens that a 64-bit key
    holds, at most 6."""
    return min(6, 64 // vocabulary.bit_length())


def count_ngrams(
    documents: Iterable[Sequence[int]],
    vocabulary: int,
    order: int,
    out: Path,
    digest: str,
    progress: Callable[[int], None] = lambda tokens: None,
    threshold: int = 1,
) -> NGram:
    """Count all n-grams of 1 to `order` ids within the documents into the file `out`, and open it.

    documents: sequences of ids below `vocabulary`. digest: of the tokenizer, 64 hexadecimal digits.
    progress is told how many tokens were read. threshold: n-grams seen fewer times are left out.

    `out` appears whole or not at all. Raises ValueError for an order that does not fit, ids outside
    the vocabulary, and a corpus without tokens.
    """
    bits = vocabulary.bit_length()
    if not 1 <= order <= 64 // bits:
        raise ValueError(
            f"n-grams of order {order} over {vocabulary} ids: {64 // bits} is the largest order possible for this "
            f"vocabulary, whose ids take {bits} of 64 bits each, and 1 the smallest"
        )
    pieces = []
    total = 0
    for number, document in enumerate(documents):
        pieces.append(document_keys(np.asarray(document, np.int64), number, vocabulary, order))
        total += len(pieces[-1])
        progress(total)
    if not total:
        raise ValueError("there is nothing to count: no document has a token")
    keys = np.concatenate(pieces)
    pieces.clear()
    keys.sort()
    return _build(Path(out), keys, vocabulary, order, digest, threshold)


def document_keys(tokens: np.ndarray, number: int, vocabulary: int, order: int) -> np.ndarray:
    """Return the keys of a document's positions, (n,) uint64. Raises ValueError for ids outside the
    vocabulary."""
    for token in (int(tokens.min()), int(tokens.max())) if tokens.size else ():
        if not 0 <= token < vocabulary:
            raise ValueError(
                f"document {number} has token id {token}, outside the vocabulary of {vocabulary} ids"
            )
    codes = np.pad((tokens + 1).astype(np.uint64), (0, order - 1))
    keys = np.zeros(len(tokens), np.uint64)
    for j in range(order):
        keys = keys << np.uint64(vocabulary.bit_length()) | codes[j : j + len(tokens)]
    return keys


def first_of_each(values: np.ndarray) -> np.ndarray:
    """Return where each distinct value starts in a sorted, non-empty array."""
    return np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))


def _build(
    out: Path, keys: np.ndarray, vocabulary: int, order: int, digest: str, threshold: int
) -> NGram:
    """Write the file of sorted keys, one a position, and open it."""
    bits = np.uint64(vocabulary.bit_length())
    levels = []
    starts = None
    positions = len(keys)
    first = first_of_each(keys)
    keys = keys[first]
    counts = np.diff(first, append=positions).astype(np.uint64)
    for _ in range(order):  # the longest n-grams first
        tokens = keys & ((np.uint64(1) << bits) - np.uint64(1))
        kept = (tokens > 0) & (
            counts >= threshold
        )  # no token: the n-gram would end behind its document
        before = np.cumsum(kept) - kept  # where the parents' children start
        levels.insert(
            0,
            [tokens[kept] - np.uint64(1), counts[kept], starts if starts is None else starts[kept]],
        )
        keys = keys >> bits
        first = first_of_each(keys)
        keys = keys[first]
        counts = np.add.reduceat(counts, first)
        starts = before[first]
    # level 1 has all tokens: an unseen one's children are where the next one's are
    seen, times, starts = levels[0]
    levels[0] = [np.arange(vocabulary, dtype=np.uint64), np.zeros(vocabulary, np.uint64), None]
    levels[0][1][seen.astype(np.int64)] = times
    if starts is not None:
        ahead = np.searchsorted(seen, levels[0][0])
        levels[0][2] = np.append(starts, len(levels[1][0]))[ahead]
    nodes = [len(level[0]) for level in levels]
    ends = np.cumsum(nodes)
    children = [level[2] + end for level, end in zip(levels[:-1], ends, strict=False)]
    tokens, counts = (np.concatenate([level[i] for level in levels]) for i in range(2))
    write(out, tokens, counts, np.concatenate([*children, ends[-1:]]), nodes, positions, digest)
    return NGram.open(out)

"""Count the n-grams of a corpus and write them to a file for `infer.ngrams.model`.

The order is the number of tokens of the longest n-grams. Each position of a document gives one key
of 64 bits, which contains the token at the position and the order - 1 next tokens. The first token
is in the highest bits, and 1 is added to each token id. Positions after the end of the document are
0. The nodes on level k of the trie are the distinct prefixes of k tokens of all keys.

Rare n-grams can be left out. An n-gram is never more frequent than its prefix, so no inner node of
the trie is missing. The remaining counts are those of the corpus, so Pr(token | context) stays the
same or becomes 0. Everything is in memory, which takes some 40 bytes per token.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from infer.ngrams.model import NGramModel, write_ngram_file

NGRAM_KEY_BITS = 64
MAX_DEFAULT_NGRAM_ORDER = 6


def default_ngram_order(vocabulary: int) -> int:
    """Return the default order for a vocabulary of this size: the number of tokens that fit into a
    64-bit key, at most MAX_DEFAULT_NGRAM_ORDER."""
    return min(MAX_DEFAULT_NGRAM_ORDER, NGRAM_KEY_BITS // vocabulary.bit_length())


def count_ngrams(
    documents: Iterable[Sequence[int]],
    vocabulary: int,
    order: int,
    out: Path,
    digest: str,
    progress: Callable[[int], None] = lambda tokens: None,
    min_count: int = 1,
) -> NGramModel:
    """Count all n-grams of 1 to `order` tokens within the documents, write the file `out`, and open
    it.

    documents: sequences of token ids below `vocabulary`. digest: the digest of the tokenizer, 64
    hexadecimal digits. progress: called with the number of tokens read so far. min_count: n-grams
    that were counted fewer times are left out.

    `out` is written completely or not at all. Raises ValueError if `order` tokens do not fit into a
    key, if a token id is outside the vocabulary, or if the corpus has no tokens.
    """
    bits = vocabulary.bit_length()
    if not 1 <= order <= NGRAM_KEY_BITS // bits:
        raise ValueError(
            f"order={order} is not possible for a vocabulary of {vocabulary} token ids; choose an "
            f"order from 1 to {NGRAM_KEY_BITS // bits}, since a token id takes {bits} of the "
            f"{NGRAM_KEY_BITS} bits of an n-gram"
        )
    keys_of_documents = []
    total = 0
    for index, document in enumerate(documents):
        tokens = np.asarray(document, np.int64)
        keys_of_documents.append(make_document_keys(tokens, index, vocabulary, order))
        total += len(keys_of_documents[-1])
        progress(total)
    if not total:
        raise ValueError(
            "there is nothing to count, since no document has a token; give documents with text"
        )
    keys = np.concatenate(keys_of_documents)
    keys_of_documents.clear()  # frees the memory of the separate arrays before sorting
    keys.sort()
    return write_sorted_keys(Path(out), keys, vocabulary, order, digest, min_count)


def make_document_keys(tokens: np.ndarray, index: int, vocabulary: int, order: int) -> np.ndarray:
    """Return the key of each position of a document, uint64. See the module's docstring for keys.

    index: the number of the document, used in error messages. Raises ValueError if a token id is
    outside the vocabulary.
    """
    extremes = (int(tokens.min()), int(tokens.max())) if tokens.size else ()
    for token in extremes:
        if not 0 <= token < vocabulary:
            raise ValueError(
                f"document {index} has token id {token}, outside the vocabulary of {vocabulary} "
                "ids; use documents of this tokenizer"
            )
    codes = np.pad((tokens + 1).astype(np.uint64), (0, order - 1))
    keys = np.zeros(len(tokens), np.uint64)
    for j in range(order):
        keys = keys << np.uint64(vocabulary.bit_length()) | codes[j : j + len(tokens)]
    return keys


def find_group_starts(values: np.ndarray) -> np.ndarray:
    """Return the index of the first occurrence of each distinct value in a sorted, non-empty
    array."""
    return np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))


def write_sorted_keys(
    out: Path, keys: np.ndarray, vocabulary: int, order: int, digest: str, min_count: int
) -> NGramModel:
    """Write the n-gram file, and open it. `keys` are the sorted keys of all positions of the
    corpus. The other arguments are those of `count_ngrams`."""
    bits = np.uint64(vocabulary.bit_length())
    num_tokens = len(keys)
    group_starts = find_group_starts(keys)
    keys = keys[group_starts]
    counts = np.diff(group_starts, append=num_tokens).astype(np.uint64)
    # One entry per level, that of the shortest n-grams first. It has three arrays with one value
    # per n-gram: the last token, the count, and the first child as an index within the next level.
    levels: list[list] = []
    child_starts = None
    for _ in range(order):  # one level per iteration, from the longest n-grams to the shortest
        tokens = keys & ((np.uint64(1) << bits) - np.uint64(1))
        # A token of 0 means that the n-gram would extend past the end of its document.
        selected = (tokens > 0) & (counts >= min_count)
        selected_before = np.cumsum(selected) - selected
        if child_starts is not None:
            child_starts = child_starts[selected]
        levels.insert(0, [tokens[selected] - np.uint64(1), counts[selected], child_starts])
        keys = keys >> bits
        group_starts = find_group_starts(keys)
        keys = keys[group_starts]
        counts = np.add.reduceat(counts, group_starts)
        child_starts = selected_before[group_starts]

    # Level 1 gets a node for each token id. A token that was not seen has no children, so its first
    # child is the first child of the next token that was seen.
    seen_tokens, seen_counts, child_starts = levels[0]
    all_tokens = np.arange(vocabulary, dtype=np.uint64)
    all_counts = np.zeros(vocabulary, np.uint64)
    all_counts[seen_tokens.astype(np.int64)] = seen_counts
    if child_starts is not None:
        next_seen = np.searchsorted(seen_tokens, all_tokens)
        child_starts = np.append(child_starts, len(levels[1][0]))[next_seen]
    levels[0] = [all_tokens, all_counts, child_starts]

    # Convert the first children to node numbers, which are counted over all levels.
    level_nodes = [len(level_tokens) for level_tokens, _, _ in levels]
    level_ends = np.cumsum(level_nodes)
    children = [level[2] + end for level, end in zip(levels[:-1], level_ends, strict=False)]
    children.append(level_ends[-1:])
    tokens = np.concatenate([level[0] for level in levels])
    counts = np.concatenate([level[1] for level in levels])
    write_ngram_file(out, tokens, counts, np.concatenate(children), level_nodes, num_tokens, digest)
    return NGramModel.open(out)

"""Count the n-grams of a corpus and write them to a file for `infer.ngrams.model`.

The order is the number of tokens of the longest n-grams. Each position of a document gives one
64-bit key, which contains the token at this position and the next order - 1 tokens. The first token
is in the highest bits. A token is stored as its id plus 1, and 0 stands for a position after the
end of the document. The keys are sorted. The distinct prefixes of k tokens are then the nodes on
level k of the trie.

Rare n-grams can be left out. A prefix of an n-gram is at least as frequent as the n-gram, so a node
is never kept without its parent. Pr(token | context) becomes 0 for an n-gram that is left out, and
stays the same for all others, because their counts do not change. Counting takes about 40
bytes of memory per token of the corpus, because all keys are in memory.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from infer.ngrams.model import NGramModel, write_ngram_file

NGRAM_KEY_BITS = 64
MAX_DEFAULT_NGRAM_ORDER = 6


def default_ngram_order(vocabulary: int) -> int:
    """Return the default order (number of tokens of the longest n-grams) for a vocabulary of this
    size: as many tokens as fit into a 64-bit key, at most MAX_DEFAULT_NGRAM_ORDER."""
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
    """Count all n-grams of 1 to `order` tokens in the documents, write them to the file `out`, and
    return a model that reads the file.

    documents: sequences of token ids below `vocabulary`. digest: the digest of the tokenizer, 64
    hexadecimal digits. progress: called with the number of tokens read so far. min_count: n-grams
    with a smaller count are left out.

    `out` is written completely or not at all. Raises ValueError if `order` tokens do not fit into
    64 bits, if a token id is outside the vocabulary, or if there are no tokens.
    """
    bits = vocabulary.bit_length()
    if not 1 <= order <= NGRAM_KEY_BITS // bits:
        raise ValueError(
            f"order={order} is not possible for a vocabulary of {vocabulary} token ids; choose an "
            f"order from 1 to {NGRAM_KEY_BITS // bits}, since a token id takes {bits} of the "
            f"{NGRAM_KEY_BITS} bits in which an n-gram is stored"
        )
    keys_of_documents = []
    total = 0
    for index, document in enumerate(documents):
        tokens = np.asarray(document, np.int64)
        keys_of_documents.append(pack_document_ngrams(tokens, index, vocabulary, order))
        total += len(keys_of_documents[-1])
        progress(total)
    if not total:
        raise ValueError(
            "there is nothing to count, since no document has a token; give documents with text"
        )
    keys = np.concatenate(keys_of_documents)
    keys_of_documents.clear()  # the separate arrays are no longer needed; free their memory
    keys.sort()
    return write_trie_of_sorted_keys(Path(out), keys, vocabulary, order, digest, min_count)


def pack_document_ngrams(
    tokens: np.ndarray, document_number: int, vocabulary: int, order: int
) -> np.ndarray:
    """Return a uint64 key for each position of a document, which packs the token at this position
    and the next order - 1 tokens into 64 bits (see the docstring of this module).

    document_number: the number of the document, for error messages. Raises ValueError if a token id
    is outside the vocabulary.
    """
    extremes = (int(tokens.min()), int(tokens.max())) if tokens.size else ()
    for token in extremes:
        if not 0 <= token < vocabulary:
            raise ValueError(
                f"document {document_number} has token id {token}, outside the vocabulary of "
                f"{vocabulary} ids; tokenize the documents with the tokenizer of this vocabulary"
            )
    codes = np.pad((tokens + 1).astype(np.uint64), (0, order - 1))
    keys = np.zeros(len(tokens), np.uint64)
    for j in range(order):
        keys = keys << np.uint64(vocabulary.bit_length()) | codes[j : j + len(tokens)]
    return keys


def find_group_starts(values: np.ndarray) -> np.ndarray:
    """Return the index at which each distinct value of a sorted, non-empty array first occurs."""
    return np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))


def write_trie_of_sorted_keys(
    out: Path, keys: np.ndarray, vocabulary: int, order: int, digest: str, min_count: int
) -> NGramModel:
    """Build the trie from sorted keys, write it to the n-gram file `out`, and return a model that
    reads the file.

    keys: the keys of all positions of the corpus from `pack_document_ngrams`, sorted. The other
    arguments are those of `count_ngrams`.
    """
    bits = np.uint64(vocabulary.bit_length())
    num_tokens = len(keys)
    group_starts = find_group_starts(keys)
    keys = keys[group_starts]
    counts = np.diff(group_starts, append=num_tokens).astype(np.uint64)
    # One entry per level of the trie, the shortest n-grams first. An entry has three arrays with
    # one value per n-gram: its last token, its count, and its first child's index in the next
    # level.
    levels: list[list] = []
    child_starts = None
    for _ in range(order):  # from the level of the longest n-grams to that of single tokens
        tokens = keys & ((np.uint64(1) << bits) - np.uint64(1))
        # A last token of 0 means that the n-gram extends past the end of its document.
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

    # Level 1 gets a node for each token id, also for tokens that do not occur in the corpus. Such a
    # token has no children: its first child equals the first child of the next token.
    seen_tokens, seen_counts, child_starts = levels[0]
    all_tokens = np.arange(vocabulary, dtype=np.uint64)
    all_counts = np.zeros(vocabulary, np.uint64)
    all_counts[seen_tokens.astype(np.int64)] = seen_counts
    if child_starts is not None:
        next_seen = np.searchsorted(seen_tokens, all_tokens)
        child_starts = np.append(child_starts, len(levels[1][0]))[next_seen]
    levels[0] = [all_tokens, all_counts, child_starts]

    # Convert each first child from an index within its level to an index over all levels.
    level_nodes = [len(level_tokens) for level_tokens, _, _ in levels]
    level_ends = np.cumsum(level_nodes)
    children = [level[2] + end for level, end in zip(levels[:-1], level_ends, strict=False)]
    children.append(level_ends[-1:])
    tokens = np.concatenate([level[0] for level in levels])
    counts = np.concatenate([level[1] for level in levels])
    write_ngram_file(out, tokens, counts, np.concatenate(children), level_nodes, num_tokens, digest)
    return NGramModel.open(out)

"""N-gram files: they count as a dictionary does, refuse files of other kinds, and are safe to use
when damaged."""

import random
from collections import Counter

import numpy as np
import pytest

from infer.ngrams.count import count_ngrams
from infer.ngrams.model import (
    NGRAM_FILE_HEADER_DTYPE,
    NGramModel,
    find_ngram_node,
    get_child_range,
    get_node_count,
    get_node_token,
)

NGRAM_TEST_DIGEST = "0123456789abcdef" * 4


def make_skewed_documents(
    num_tokens: int, vocabulary: int, seed: int, max_length: int = 60
) -> list[list[int]]:
    """Return documents of 0 .. max_length tokens, some of which are far more frequent than
    others."""
    generator = np.random.default_rng(seed)
    weights = 1 / np.arange(1, vocabulary + 1) ** 1.3
    permutation = generator.permutation(vocabulary)
    ids = permutation[generator.choice(vocabulary, num_tokens, p=weights / weights.sum())].tolist()
    documents = []
    while ids:
        length = int(generator.integers(max_length + 1))
        documents.append(ids[:length])
        ids = ids[length:]
    return documents


def count_with_dictionary(documents, order: int) -> Counter:
    """Count every n-gram of 0 .. order ids within documents; the empty one counts the tokens."""
    counts = Counter()
    for document in documents:
        for start in range(len(document)):
            for end in range(start, min(start + order, len(document)) + 1):
                counts[tuple(document[start:end])] += 1
    return counts


def get_continuations(model: NGramModel, context) -> list[tuple[int, int]]:
    """Return the tokens counted after a context, ascending, with their counts."""
    trie = model.trie
    ids = np.asarray(context, np.int64)
    first = 0
    end = model.vocabulary
    if len(ids):
        first, end = get_child_range(trie, find_ngram_node(trie, ids, 0, len(ids)))
    codes = trie.entries[first:end] & ((1 << trie.count_bits) - 1)
    return [
        (int(get_node_token(trie, node)), int(get_node_count(trie, node)))
        for node in first + np.flatnonzero(codes)
    ]


def assert_model_counts_documents(model: NGramModel, documents, contexts: int = 100) -> None:
    """Compare a model with a dictionary of the documents: counts, levels, and lookups after some
    contexts."""
    assert_model_has_counts(model, count_with_dictionary(documents, model.order), contexts)
    assert model.num_tokens == sum(map(len, documents))


def assert_model_has_counts(model: NGramModel, counts: Counter, contexts: int) -> None:
    by_length = Counter(map(len, counts))
    assert model.num_tokens == counts[()]
    expected_nodes = [by_length[level] for level in range(2, model.order + 1)]
    assert model.nodes_per_level == (model.vocabulary, *expected_nodes)

    expected_continuations = {}
    for ngram, count in counts.items():
        if ngram:
            expected_continuations.setdefault(ngram[:-1], []).append((ngram[-1], count))
    generator = random.Random(0)
    counted_contexts = [ngram for ngram in counts if len(ngram) < model.order]
    sampled_contexts = generator.sample(counted_contexts, min(contexts, len(counted_contexts)))
    for length in range(model.order):
        for _ in range(4):
            random_context = [generator.randrange(model.vocabulary) for _ in range(length)]
            sampled_contexts.append(tuple(random_context))
    for context in (*sampled_contexts, ()):
        expected = sorted(expected_continuations.get(context, []))
        assert get_continuations(model, context) == expected


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "vocabulary, num_tokens", [(1, 40), (2, 300), (5, 900), (60, 1200), (1000, 600)]
)
def test_counts_are_those_of_a_dictionary(tmp_path, order, vocabulary, num_tokens):
    documents = make_skewed_documents(num_tokens, vocabulary, seed=vocabulary + order)
    progress = []
    out = tmp_path / "folder" / "x.ngram"
    model = count_ngrams(
        iter(documents), vocabulary, order, out, NGRAM_TEST_DIGEST, progress.append
    )
    assert_model_counts_documents(model, documents, contexts=10)
    assert progress[-1] == num_tokens
    assert [path.name for path in out.parent.iterdir()] == ["x.ngram"]


def test_large_counts_are_stored_in_the_overflow_table(tmp_path):
    """A vocabulary of a million leaves 12 bits for a count."""
    vocabulary = 1_000_000
    documents = [
        [7, 999_999] * 2047,
        [7, 999_999] * 5000 + [7, 3],
        np.array([3] * 4095, np.uint32),
        [5] * 4094,
    ]
    model = count_ngrams(documents, vocabulary, 3, tmp_path / "x", NGRAM_TEST_DIGEST)
    assert model.trie.count_bits == 12
    lists = [list(map(int, document)) for document in documents]
    assert_model_counts_documents(model, lists, contexts=10)
    expected = [(3, 4096), (5, 4094), (7, 7048), (999_999, 7047)]
    assert get_continuations(model, []) == expected
    # Unigrams 3, 7 and 999,999; two bigrams and two trigrams of 7 and 999,999.
    assert len(model.trie.overflow_nodes) == 3 + 2 + 2


def test_lookups_among_many_children(tmp_path, probabilities):
    """20,000 children, for few tokens and for many; more than one group of nodes."""
    documents = [[1, 70_000 - 3 * child] for child in range(20_000)] + [[1, 70_000]] * 5
    model = count_ngrams(documents, 70_001, 2, tmp_path / "x", NGRAM_TEST_DIGEST)
    assert len(model.trie.child_bases) == 2
    counts = count_with_dictionary(documents, 2)
    for tokens in ([], [70_000], [0, 10_001, 10_002, 10_003, 70_000, 70_000], range(9_000, 13_000)):
        expected = []
        for token in tokens:
            count = counts[1, token] or counts[token,] * 20_005 / 40_010
            expected.append(count / 20_005)
        assert probabilities(model, [1], tokens) == pytest.approx(expected)
    assert get_continuations(model, [70_000]) == []
    assert get_continuations(model, [2]) == []


@pytest.mark.parametrize("vocabulary, num_tokens", [(1, 40), (5, 900), (60, 1200), (1000, 600)])
def test_a_threshold_leaves_rare_ngrams_out(tmp_path, vocabulary, num_tokens):
    """The other n-grams keep their counts."""
    documents = make_skewed_documents(num_tokens, vocabulary, seed=vocabulary)
    for order, min_count in ((1, 2), (2, 3), (4, 2), (3, 10**6)):
        out = tmp_path / "x.ngram"
        model = count_ngrams(
            documents, vocabulary, order, out, NGRAM_TEST_DIGEST, min_count=min_count
        )
        frequent = Counter()
        for ngram, count in count_with_dictionary(documents, order).items():
            if count >= min_count or not ngram:
                frequent[ngram] = count
        assert_model_has_counts(model, frequent, contexts=10)
        assert model.num_tokens == sum(map(len, documents))
        assert [path.name for path in tmp_path.iterdir()] == ["x.ngram"]


def test_invalid_corpora_are_refused(tmp_path):
    def assert_refused(message, documents=([1, 2],), vocabulary=100, order=2):
        with pytest.raises(ValueError, match=message):
            count_ngrams(documents, vocabulary, order, tmp_path / "x", NGRAM_TEST_DIGEST)
        assert not list(tmp_path.iterdir())

    assert_refused("no document has a token", documents=[])
    assert_refused("no document has a token", documents=[[], []])
    assert_refused(
        "document 1 has token id 100, outside the vocabulary of 100", documents=[[5], [1, 100]]
    )
    assert_refused("document 0 has token id -1", documents=[[-1, 3]])
    assert_refused("choose an order from 1 to 3,", vocabulary=151_936, order=4)
    assert_refused("choose an order from 1 to 9,", order=0)


def test_contexts_longer_than_the_order_are_shortened(tmp_path, probabilities):
    model = count_ngrams([[1, 2, 3, 1, 2]], 4, 2, tmp_path / "x", NGRAM_TEST_DIGEST)
    assert get_continuations(model, [1, 2]) == []
    assert probabilities(model, [9, 9, 9, 1], [2, 3]).tolist() == [1.0, 0.2]


@pytest.fixture
def small_file(tmp_path):
    """The path of a small n-gram file of order 3."""
    documents = make_skewed_documents(400, 12, seed=7)
    return count_ngrams(documents, 12, 3, tmp_path / "small.ngram", NGRAM_TEST_DIGEST).path


def test_invalid_files_are_refused_by_name(small_file, tmp_path):
    content = small_file.read_bytes()

    def assert_refused(new_content: bytes, message: str, **options):
        small_file.write_bytes(new_content)
        with pytest.raises(ValueError, match=f"small.ngram: .*{message}"):
            NGramModel.open(small_file, **options)

    with pytest.raises(FileNotFoundError, match="missing.ngram: there is no such"):
        NGramModel.open(tmp_path / "missing.ngram")
    assert_refused(b"", "not an n-gram file")
    assert_refused(b"GGUF" + content[4:], "not an n-gram file")
    assert_refused(
        content[:8] + b"\2" + content[9:],
        "version 2 of the n-gram format, but this program reads version 1",
    )
    assert_refused(content[:100], "not an n-gram file")
    for size in (NGRAM_FILE_HEADER_DTYPE.itemsize, len(content) // 2, len(content) - 1):
        assert_refused(content[:size], f"{size} bytes instead of {len(content)}")
    assert_refused(content + b"\0", f"{len(content) + 1} bytes instead of {len(content)}")
    assert_refused(content, "counted with another tokenizer", digest="f" * 64)
    small_file.write_bytes(content)
    model = NGramModel.open(str(small_file), NGRAM_TEST_DIGEST)
    assert model.digest == NGRAM_TEST_DIGEST


def test_every_altered_byte_of_the_header_is_noticed(small_file):
    content = small_file.read_bytes()
    for offset in range(0, NGRAM_FILE_HEADER_DTYPE.itemsize, 16):
        altered_byte = bytes([content[offset] ^ (1 << offset % 8)])
        small_file.write_bytes(content[:offset] + altered_byte + content[offset + 1 :])
        with pytest.raises(ValueError, match="small.ngram: "):
            NGramModel.open(small_file)


@pytest.mark.robustness
def test_lookups_in_damaged_files_are_safe(tmp_path, probabilities):
    """Lookups return something for any body. A vocabulary of a million gives overflowing counts."""
    documents = [[5, 6] * 3000, *make_skewed_documents(300, 40, seed=8)]
    path = count_ngrams(documents, 1 << 20, 3, tmp_path / "x", NGRAM_TEST_DIGEST).path
    content = bytearray(path.read_bytes())
    generator = np.random.default_rng(0)
    header = np.frombuffer(
        bytes(content[: NGRAM_FILE_HEADER_DTYPE.itemsize]), NGRAM_FILE_HEADER_DTYPE
    )[0]
    sections = header["sections"].astype(int)
    tokens = [0, 5, 6, 39, (1 << 20) - 1]
    for attempt in range(4):
        damaged = content.copy()
        for offset, size in sections[:5]:
            if attempt < 2:
                damaged[offset : offset + size] = bytes([255 * attempt]) * size
            else:
                tail = min(size, 4000)  # all levels but most of the first
                damaged[offset + size - tail : offset + size] = generator.bytes(tail)
        path.write_bytes(damaged)
        model = NGramModel.open(path, NGRAM_TEST_DIGEST)
        for context in ([], [5], [5, 6], [6, 5], [1, 2], [39, 5]):
            probabilities(model, context, tokens)
            get_continuations(model, context)


def test_several_models_can_share_a_file(small_file):
    first = NGramModel.open(small_file)
    second = NGramModel.open(small_file)
    assert not any(array.flags.writeable for array in first.trie[:5])
    assert all(type(array) is np.ndarray for array in first.trie[:5])
    small_file.unlink()
    assert get_continuations(first, [1]) == get_continuations(second, [1])

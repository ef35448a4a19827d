"""N-gram files: they count as a plain dictionary does, refuse what is not theirs, and survive
damage."""

import random
from collections import Counter

import numpy as np
import pytest

from infer.ngrams.count import count_ngrams
from infer.ngrams.model import HEADER, NGram, children, count_of, find, token_of

DIGEST = "0123456789abcdef" * 4


def skewed(tokens: int, vocabulary: int, seed: int, longest: int = 60) -> list[list[int]]:
    """Documents of 0 .. longest tokens, some of them far more frequent than others."""
    generator = np.random.default_rng(seed)
    weights = 1 / np.arange(1, vocabulary + 1) ** 1.3
    ids = generator.permutation(vocabulary)[
        generator.choice(vocabulary, tokens, p=weights / weights.sum())
    ].tolist()
    documents = []
    while ids:
        length = int(generator.integers(longest + 1))
        documents.append(ids[:length])
        ids = ids[length:]
    return documents


def plain_counts(documents, order: int) -> Counter:
    """Every n-gram of 0 .. order ids, within documents; the empty one counts the tokens."""
    counts = Counter()
    for document in documents:
        for start in range(len(document)):
            for end in range(start, min(start + order, len(document)) + 1):
                counts[tuple(document[start:end])] += 1
    return counts


def continuations(model: NGram, context) -> list[tuple[int, int]]:
    """The tokens that were seen after a context, ascending, and how often."""
    arrays, ids, (first, last) = model.arrays, np.asarray(context, np.int64), (0, model.vocabulary)
    if len(ids):
        first, last = children(arrays, find(arrays, ids, 0, len(ids)))
    codes = arrays.entries[first:last] & ((1 << arrays.count_bits) - 1)
    return [
        (int(token_of(arrays, node)), int(count_of(arrays, node)))
        for node in first + np.flatnonzero(codes)
    ]


def assert_equal(model: NGram, documents, contexts: int = 100) -> None:
    """A model says what a dictionary of the documents says: all counts, levels, and lookups after
    some contexts."""
    assert_is(model, plain_counts(documents, model.order), contexts)
    assert model.tokens == sum(map(len, documents))


def assert_is(model: NGram, counts: Counter, contexts: int) -> None:
    """A model says what these counts say."""
    by_length = Counter(map(len, counts))
    assert model.tokens == counts[()]
    assert model.nodes == (
        model.vocabulary,
        *(by_length[level] for level in range(2, model.order + 1)),
    )
    known = {}
    for gram, seen in counts.items():
        if gram:
            known.setdefault(gram[:-1], []).append((gram[-1], seen))
    generator = random.Random(0)
    shorter = [gram for gram in counts if len(gram) < model.order]
    some = generator.sample(shorter, min(contexts, len(shorter)))
    some += [
        tuple(generator.randrange(model.vocabulary) for _ in range(n))
        for n in range(model.order)
        for _ in "1234"
    ]
    for context in (*some, ()):
        assert continuations(model, context) == sorted(known.get(context, []))


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "vocabulary, tokens", [(1, 40), (2, 300), (5, 900), (60, 1200), (1000, 600)]
)
def test_counts_are_a_dictionarys(tmp_path, order, vocabulary, tokens):
    documents = skewed(tokens, vocabulary, seed=vocabulary + order)
    told = []
    out = tmp_path / "deeper" / "x.ngram"
    assert_equal(
        count_ngrams(iter(documents), vocabulary, order, out, DIGEST, told.append),
        documents,
        contexts=10,
    )
    assert told[-1] == tokens and [path.name for path in out.parent.iterdir()] == ["x.ngram"]


def test_large_counts_overflow_into_a_table(tmp_path):
    """A vocabulary of a million leaves 12 bits for a count."""
    vocabulary = 1_000_000
    documents = [
        [7, 999_999] * 2047,
        [7, 999_999] * 5000 + [7, 3],
        np.array([3] * 4095, np.uint32),
        [5] * 4094,
    ]
    model = count_ngrams(documents, vocabulary, 3, tmp_path / "x", DIGEST)
    assert model.arrays.count_bits == 12
    assert_equal(model, [list(map(int, document)) for document in documents], contexts=10)
    assert continuations(model, []) == [(3, 4096), (5, 4094), (7, 7048), (999_999, 7047)]
    assert (
        len(model.arrays.overflow_nodes) == 3 + 2 + 2
    )  # 3, 7, 999,999; 7 999,999, and the other way; the same with a third


def test_searches_among_many_children(tmp_path, probabilities):
    """A thousand children against few tokens and against many: both ways of gathering; more than
    one group of nodes."""
    documents = [[1, 70_000 - 3 * child] for child in range(20_000)] + [[1, 70_000]] * 5
    model = count_ngrams(documents, 70_001, 2, tmp_path / "x", DIGEST)
    assert len(model.arrays.base) == 2
    counts = plain_counts(documents, 2)
    for tokens in ([], [70_000], [0, 10_001, 10_002, 10_003, 70_000, 70_000], range(9_000, 13_000)):
        wanted = [
            (counts[1, token] or counts[token,] * 20_005 / 40_010) / 20_005 for token in tokens
        ]
        assert probabilities(model, [1], tokens) == pytest.approx(wanted)
    assert continuations(model, [70_000]) == continuations(model, [2]) == []


@pytest.mark.parametrize("vocabulary, tokens", [(1, 40), (5, 900), (60, 1200), (1000, 600)])
def test_a_threshold_leaves_rare_ngrams_out(tmp_path, vocabulary, tokens):
    """All lookups are those of a dictionary from which what was seen too rarely is taken; the rest
    keeps its counts."""
    documents = skewed(tokens, vocabulary, seed=vocabulary)
    for order, threshold in ((1, 2), (2, 3), (4, 2), (3, 10**6)):
        out = tmp_path / "x.ngram"
        model = count_ngrams(documents, vocabulary, order, out, DIGEST, threshold=threshold)
        counts = plain_counts(documents, order)
        assert_is(
            model,
            Counter({gram: seen for gram, seen in counts.items() if seen >= threshold or not gram}),
            10,
        )
        assert model.tokens == sum(map(len, documents))
        assert [path.name for path in tmp_path.iterdir()] == ["x.ngram"]


def test_what_cannot_be_counted_is_refused(tmp_path):
    def refused(message, documents=([1, 2],), vocabulary=100, order=2, **options):
        with pytest.raises(ValueError, match=message):
            count_ngrams(documents, vocabulary, order, tmp_path / "x", DIGEST, **options)
        assert not list(tmp_path.iterdir())

    refused("no document has a token", documents=[])
    refused("no document has a token", documents=[[], []])
    refused("document 1 has token id 100, outside the vocabulary of 100", documents=[[5], [1, 100]])
    refused("document 0 has token id -1", documents=[[-1, 3]])
    refused("3 is the largest order possible", vocabulary=151_936, order=4)
    refused("9 is the largest order possible", order=0)


def test_lookups_of_impossible_lengths(tmp_path, probabilities):
    model = count_ngrams([[1, 2, 3, 1, 2]], 4, 2, tmp_path / "x", DIGEST)
    assert continuations(model, [1, 2]) == []
    assert probabilities(model, [9, 9, 9, 1], [2, 3]).tolist() == [1.0, 0.2]


@pytest.fixture
def small(tmp_path):
    """A small file of three levels."""
    return count_ngrams(skewed(400, 12, seed=7), 12, 3, tmp_path / "small.ngram", DIGEST).path


def test_files_that_are_none_of_ours_are_refused_by_name(small, tmp_path):
    whole = small.read_bytes()

    def refused(content: bytes, message: str, **options):
        small.write_bytes(content)
        with pytest.raises(ValueError, match=f"small.ngram: .*{message}"):
            NGram.open(small, **options)

    with pytest.raises(FileNotFoundError, match="missing.ngram: there is no such"):
        NGram.open(tmp_path / "missing.ngram")
    refused(b"", "not an n-gram file")
    refused(b"GGUF" + whole[4:], "not an n-gram file")
    refused(whole[:8] + b"\2" + whole[9:], "version 2 of the n-gram format, this program reads 1")
    refused(whole[:100], "not an n-gram file")
    for size in (HEADER.itemsize, len(whole) // 2, len(whole) - 1):
        refused(whole[:size], f"{size} bytes instead of {len(whole)}")
    refused(whole + b"\0", f"{len(whole) + 1} bytes instead of {len(whole)}")
    refused(whole, "counted with another tokenizer", digest="f" * 64)
    small.write_bytes(whole)
    assert NGram.open(str(small), DIGEST).digest == DIGEST


def test_every_altered_byte_of_the_header_is_noticed(small):
    whole = small.read_bytes()
    for at in range(0, HEADER.itemsize, 16):
        small.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        with pytest.raises(ValueError, match="small.ngram: "):
            NGram.open(small)


@pytest.mark.robustness
def test_lookups_in_damaged_files_do_no_harm(tmp_path, probabilities):
    """Whatever the body holds, lookups answer something; a vocabulary of a million, so that there
    is an overflow."""
    documents = [[5, 6] * 3000, *skewed(300, 40, seed=8)]
    path = count_ngrams(documents, 1 << 20, 3, tmp_path / "x", DIGEST).path
    whole = bytearray(path.read_bytes())
    generator = np.random.default_rng(0)
    sections = np.frombuffer(bytes(whole[: HEADER.itemsize]), HEADER)[0]["sections"].astype(int)
    tokens = [0, 5, 6, 39, (1 << 20) - 1]
    for attempt in range(4):
        damaged = whole.copy()
        for at, size in sections[:5]:
            if attempt < 2:
                damaged[at : at + size] = bytes([255 * attempt]) * size
            else:
                tail = min(size, 4000)  # the levels behind the first
                damaged[at + size - tail : at + size] = generator.bytes(tail)
        path.write_bytes(damaged)
        model = NGram.open(path, DIGEST)
        for context in ([], [5], [5, 6], [6, 5], [1, 2], [39, 5]):
            probabilities(model, context, tokens)
            continuations(model, context)


def test_two_may_read_one_file(small):
    one = NGram.open(small)
    two = NGram.open(small)
    assert not any(array.flags.writeable for array in one.arrays[:5])
    assert all(type(array) is np.ndarray for array in one.arrays[:5])
    small.unlink()
    assert continuations(one, [1]) == continuations(two, [1])

"""The n-gram files of DART's authors, as a writer of this test makes them, become ours."""

import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from infer.cli.ngram import NgramCommand
from infer.cli.ngram import run as run_ngram
from infer.config import TargetConfig
from infer.ngrams import trie
from infer.ngrams.count import count_ngrams
from infer.ngrams.model import NGram
from infer.ngrams.trie import convert_trie
from infer.utils.jit import AVAILABLE

DIGEST = "0123456789abcdef" * 4


@pytest.fixture(params=["compiled", "plain"])
def reader(request, monkeypatch):
    """The same with numba and without."""
    if not AVAILABLE:
        if request.param == "compiled":
            pytest.skip("numba is not installed")
    elif request.param == "plain":
        for name in ("_number", "_link", "read"):
            monkeypatch.setattr(trie, name, getattr(trie, name).py_func)


def texts(vocabulary: int, seed: int) -> list[list[int]]:
    """30 texts of 0 to 30 tokens, low ones more often."""
    generator = random.Random(seed)
    lengths = [generator.randrange(31) for _ in range(30)]
    return [[int(vocabulary * generator.random() ** 3) for _ in range(length)] for length in lengths]


def nodes_of(documents: list[list[int]], order: int) -> list[list]:
    """[token, parent, count, {token: child}] of every node, in the order of their first appearance, the root first."""
    nodes = [[0, 0, 0, {}]]
    for document in documents:
        for start in range(len(document)):
            at = 0
            nodes[0][2] += 1
            for token in document[start : start + order]:
                if token not in nodes[at][3]:
                    nodes[at][3][token] = len(nodes)
                    nodes.append([token, at, 0, {}])
                at = nodes[at][3][token]
                nodes[at][2] += 1
    return nodes


def written(nodes: list[list], order: int, path: Path) -> Path:
    """Fields one by one, without gaps; children in an order of their own, as a hash table's are."""
    parts = [struct.pack("<QQ", order, len(nodes))]
    for token, parent, count, children in nodes:
        parts.append(struct.pack("<iQiQ", token, parent, count, len(children)))
        listed = random.Random(len(children)).sample(sorted(children.items()), len(children))
        parts += [struct.pack("<iQ", *child) for child in listed]
    path.write_bytes(b"".join(parts))
    return path


@pytest.mark.parametrize("vocabulary, order", [(1, 2), (9, 1), (9, 5), (300, 3), (151_936, 3)])
def test_a_trie_is_what_counting_its_texts_gives(reader, tmp_path, vocabulary, order):
    """The very same bytes, with small chunks and with a threshold too; levels may be left out."""
    documents = texts(vocabulary, vocabulary + order)
    path = written(nodes_of(documents, order), order, tmp_path / "theirs.trie")
    told = []
    for taken, chunk, threshold in ((None, 10**6, 1), (order, 50, 1), (max(order - 1, 1), 10**6, 1), (order, 99, 2)):
        ours = count_ngrams(documents, vocabulary, taken or order, tmp_path / "ours", DIGEST, 1, threshold=threshold)
        made = convert_trie(
            path, vocabulary, tmp_path / "made", DIGEST, taken, 1, chunk, told.append, threshold=threshold
        )
        assert made.path.read_bytes() == ours.path.read_bytes()
        assert told[-1] == sum(map(len, documents))
    NGram.open(tmp_path / "made", DIGEST, check=True)


def test_counts_without_their_dropped_ngrams(tmp_path):
    """What a reduced file holds: counts from which dropped ones are taken, a node of count 0 among them."""
    nodes = [[0, 0, -5, {1: 1, 2: 2}], [1, 0, 4, {2: 3}], [2, 0, 0, {}], [2, 1, 3, {}]]
    model = convert_trie(written(nodes, 2, tmp_path / "x.trie"), 5, tmp_path / "x", DIGEST, workers=1)
    assert model.tokens == model.count([1]) == 4
    assert model.count([1, 2]) == 3 and model.count([2]) == 0


def change(node: int, field: int, value) -> Callable[[list[list]], None]:
    def apply(nodes: list[list]) -> None:
        nodes[node][field] = value

    return apply


def swap_children(nodes: list[list]) -> None:
    """Two lists name each other's children."""
    nodes[1][3], nodes[2][3] = nodes[2][3], nodes[1][3]


@pytest.mark.parametrize(
    "damage, message",
    [
        (change(3, 1, 3), "the parent of node 3 does not stand before it"),
        (change(3, 1, 2**63 + 1), "the parent of node 3 does not stand before it"),
        (change(2, 0, 40), "node 2 is a token outside the vocabulary of 40 ids; it is another target's, or damaged"),
        (change(2, 0, -1), "node 2 is a token outside the vocabulary"),
        (change(1, 2, 0), "node 1 was seen less often than its children together"),
        (change(-1, 2, -3), "seen less often than its children"),
        (change(0, 3, {5: 0}), "bytes instead of"),
        (swap_children, "its nodes name other parents than its lists of children do"),
    ],
)
def test_damage_is_named(reader, tmp_path, damage, message):
    nodes = nodes_of(texts(40, 1), 3)
    damage(nodes)
    path = written(nodes, 3, tmp_path / "x.trie")
    with pytest.raises(ValueError, match=f"x.trie: .*{message}"):
        convert_trie(path, 40, tmp_path / "x", DIGEST, workers=1)
    assert [file.name for file in tmp_path.iterdir()] == ["x.trie"]


def test_what_is_no_such_file_is_refused(reader, tmp_path):
    path = written(nodes_of(texts(40, 1), 3), 3, tmp_path / "x.trie")
    whole = path.read_bytes()

    def refused(content: bytes, message: str, **options) -> None:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            convert_trie(path, 40, tmp_path / "x", DIGEST, workers=1, **options)

    for content in (b"", whole[:10], b"GGUF" * 30, bytes(100)):
        refused(content, "x.trie: not a .trie file")
    refused(whole[:-1], f"x.trie: truncated, {len(whole) - 1} bytes instead of {len(whole)}")
    refused(whole + b"\0", "x.trie: too long")
    refused(struct.pack("<Q", 2) + whole[8:], "is deeper than its order of 2")
    refused(whole[:32] + struct.pack("<Q", 2**40) + whole[40:], "children of node 0 goes beyond its end")
    refused(struct.pack("<Q", 11) + whole[8:], "n-grams of 11 ids, of which 10 at most fit .* order=10 takes over")
    refused(whole, "order=4: .*x.trie has n-grams of up to 3", order=4)
    refused(struct.pack("<QQiQiQ", 3, 1, 0, 0, 0, 0), "x.trie: it holds no n-grams")
    with pytest.raises(FileNotFoundError, match="missing.trie: there is no such"):
        convert_trie(tmp_path / "missing.trie", 40, tmp_path / "x", DIGEST)


def test_no_altered_byte_does_harm(tmp_path):
    """Whatever is changed: a sentence, or a file whose counts are others."""
    path = written(nodes_of(texts(40, 2), 3), 3, tmp_path / "x.trie")
    whole = path.read_bytes()
    generator = random.Random(5)
    for at in [*range(16), *generator.sample(range(16, len(whole)), 150)]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << generator.randrange(8))]) + whole[at + 1 :])
        try:
            convert_trie(path, 40, tmp_path / "x", DIGEST, workers=1)
        except ValueError as error:
            assert "x.trie" in str(error)


def test_the_command_takes_one_over(tmp_path, capsys):
    documents = texts(512, 3)
    path = written(nodes_of(documents, 3), 3, tmp_path / "theirs.trie")
    out = tmp_path / "ours"
    run_ngram(NgramCommand(out=str(out), trie=str(path), workers=1, threshold=2, target=TargetConfig(path="embedded")))
    assert "n-grams of up to 3" in capsys.readouterr().out
    model = NGram.open(out)
    assert model.vocabulary == 512 and model.tokens == sum(map(len, documents))
    with pytest.raises(ValueError, match="threshold=0"):
        NgramCommand(threshold=0).check()

"""The n-grams of training texts: of whole documents, beside the drafter's weights, asked by its
trees."""

from pathlib import Path

import pytest
from datasets import Dataset

from data.packing import best_fit, lay_out
from infer.api import decode, open_engine
from infer.config import DecodeOptions
from infer.formats.checkpoint import NGRAMS, load_drafter, save_drafter
from infer.ngrams.count import count_ngrams
from infer.ngrams.model import NGram
from infer.utils.errors import Stopped
from train.run.folder import count_rows, documents


@pytest.fixture
def rows() -> Dataset:
    """Rows of 8 tokens, of documents of 5, 3, 2, 6 and 4 tokens: padding behind some, none behind
    others."""
    texts = [[5, 6, 7, 8, 9], [5, 6, 7], [1, 2], [3, 1, 4, 1, 5, 9], [5, 6, 7, 3]]
    loss = [[True] * len(text) for text in texts]
    rows = best_fit(map(len, texts), 8)
    return Dataset.from_list(
        [lay_out([texts[i] for i in row], [loss[i] for i in row], 8) for row in rows]
    )


def test_documents_are_the_texts_that_were_packed(rows):
    found = sorted(document.tolist() for document in documents(rows))
    assert found == [[1, 2], [3, 1, 4, 1, 5, 9], [5, 6, 7], [5, 6, 7, 3], [5, 6, 7, 8, 9]]


def test_trees_ask_the_file_beside_the_weights(rows, make_tiny, embedded, tmp_path):
    target, drafter = make_tiny(block_size=6)
    counted = count_ngrams(documents(rows), 97, 4, tmp_path / NGRAMS, "0" * 64)
    assert counted.tokens == 20
    assert load_saved(drafter, tmp_path / "without").ngrams is None

    folder = tmp_path / "with"
    save_drafter(drafter.config, drafter.state_dict(), folder)
    (tmp_path / NGRAMS).rename(folder / NGRAMS)
    drafter = load_drafter(folder)
    methods = {"ddtree": "ddtree+ngrams", "chain": "chain", "plain": "plain"}
    for method, expected in methods.items():
        assert (
            open_engine(target, drafter, DecodeOptions(method=method), 50).runner.method.name
            == expected
        )
    assert (
        open_engine(target, drafter, DecodeOptions(ngrams="none"), 50).runner.method.name
        == "ddtree"
    )
    target.tokenizer = (
        embedded.tokenizer
    )  # with another digest than the file: another template leaves the ids alone
    assert open_engine(target, drafter, DecodeOptions(), 50).runner.method.name == "ddtree+ngrams"
    with pytest.raises(ValueError, match="another tokenizer"):
        open_engine(target, drafter, DecodeOptions(ngrams=str(drafter.ngrams)), 50)
    target.tokenizer = None

    texts = [
        decode(target, drafter, [[5, 6]], DecodeOptions(20, ngrams=file))[0].ids
        for file in (None, "none")
    ]
    assert (
        texts[0]
        == texts[1]
        == decode(target, None, [[5, 6]], DecodeOptions(20, method="plain"))[0].ids
    )


def test_ngrams_that_a_drafter_brings_along_stay(
    rows, make_tiny, shallow_target, tmp_path, monkeypatch
):
    target, _ = make_tiny()
    monkeypatch.setattr(target, "tokenizer", shallow_target.tokenizer)
    earlier = count_ngrams(
        [[9, 8, 7], [9, 8, 6], [5, 6, 7, 3]], 97, 4, tmp_path / "earlier", "0" * 64
    )
    for folder, came_along, tokens in (("new", None, 20), ("on", earlier.path, 10)):
        (tmp_path / folder).mkdir()
        count_rows(rows, target, tmp_path / folder, came_along)
        assert NGram.open(tmp_path / folder / NGRAMS).tokens == tokens
        assert [path.name for path in (tmp_path / folder).iterdir()] == [NGRAMS]


@pytest.mark.parametrize("brought", [False, True], ids=["counted", "copied"])
def test_ngrams_that_do_not_fit_on_the_disk_are_a_sentence_and_leave_nothing(
    rows, make_tiny, shallow_target, tmp_path, monkeypatch, file_size_limit, brought
):
    target, _ = make_tiny()
    monkeypatch.setattr(target, "tokenizer", shallow_target.tokenizer)
    earlier = (
        count_ngrams([[9, 8, 7]], 97, 4, tmp_path / "earlier", "0" * 64).path if brought else None
    )
    run = tmp_path / "run"
    run.mkdir()
    with (
        file_size_limit(500),
        pytest.raises(Stopped, match="run/ngrams could not be written: File too large; what"),
    ):
        count_rows(rows, target, run, earlier)
    assert not [*run.iterdir()]


def load_saved(drafter, folder: Path):
    save_drafter(drafter.config, drafter.state_dict(), folder)
    return load_drafter(folder)

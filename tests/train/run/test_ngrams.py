"""The n-grams of the training data: counted in complete documents, stored beside the drafter's
weights, and used by its trees."""

from pathlib import Path

import pytest
from datasets import Dataset

from data.packing import best_fit_decreasing, pack_segments
from infer.api import decode_prompts, open_engine
from infer.config import DecodeOptions
from infer.formats.checkpoint import NGRAM_FILE_NAME, load_drafter, save_drafter
from infer.ngrams.count import count_ngrams
from infer.ngrams.model import NGramModel
from infer.utils.errors import RunAborted
from train.run.folder import iterate_documents, write_ngrams


@pytest.fixture
def dataset() -> Dataset:
    """Packed sequences of 8 tokens with documents of 5, 3, 2, 6 and 4 tokens; some end with
    padding."""
    texts = [[5, 6, 7, 8, 9], [5, 6, 7], [1, 2], [3, 1, 4, 1, 5, 9], [5, 6, 7, 3]]
    loss = [[True] * len(text) for text in texts]
    sequences = []
    for numbers in best_fit_decreasing(map(len, texts), 8):
        ids = [texts[i] for i in numbers]
        sequences.append(pack_segments(ids, [loss[i] for i in numbers], 8))
    return Dataset.from_list(sequences)


def test_documents_are_the_texts_that_were_packed(dataset):
    documents = sorted(document.tolist() for document in iterate_documents(dataset))
    assert documents == [[1, 2], [3, 1, 4, 1, 5, 9], [5, 6, 7], [5, 6, 7, 3], [5, 6, 7, 8, 9]]


def test_trees_use_the_file_beside_the_weights(dataset, make_tiny, embedded, tmp_path):
    target, drafter = make_tiny(block_size=6)
    counted = count_ngrams(iterate_documents(dataset), 97, 4, tmp_path / NGRAM_FILE_NAME, "0" * 64)
    assert counted.num_tokens == 20
    assert load_saved(drafter, tmp_path / "without").ngram_path is None

    folder = tmp_path / "with"
    save_drafter(drafter.config, drafter.state_dict(), folder)
    (tmp_path / NGRAM_FILE_NAME).rename(folder / NGRAM_FILE_NAME)
    drafter = load_drafter(folder)
    methods = {"ddtree": "ddtree+ngrams", "chain": "chain", "plain": "plain"}
    for method, expected in methods.items():
        engine = open_engine(target, drafter, DecodeOptions(method=method), 50)
        assert engine.runner.method.name == expected
    engine = open_engine(target, drafter, DecodeOptions(ngrams="none"), 50)
    assert engine.runner.method.name == "ddtree"
    # a tokenizer with another digest: its chat template may differ, but not its token ids
    target.tokenizer = embedded.tokenizer
    engine = open_engine(target, drafter, DecodeOptions(), 50)
    assert engine.runner.method.name == "ddtree+ngrams"
    with pytest.raises(ValueError, match="another tokenizer"):
        open_engine(target, drafter, DecodeOptions(ngrams=str(drafter.ngram_path)), 50)
    target.tokenizer = None

    prompts = [[5, 6]]
    expected = decode_prompts(target, None, prompts, DecodeOptions(20, method="plain"))[0].ids
    for continuity in (None, "none"):
        options = DecodeOptions(20, ngrams=continuity)
        assert decode_prompts(target, drafter, prompts, options)[0].ids == expected


def test_ngrams_of_an_existing_drafter_are_copied(
    dataset, make_tiny, shallow_target, tmp_path, monkeypatch
):
    target, _ = make_tiny()
    monkeypatch.setattr(target, "tokenizer", shallow_target.tokenizer)
    documents = [[9, 8, 7], [9, 8, 6], [5, 6, 7, 3]]
    existing = count_ngrams(documents, 97, 4, tmp_path / "existing", "0" * 64)
    for name, initial_ngrams, num_tokens in (("new", None, 20), ("copy", existing.path, 10)):
        run = tmp_path / name
        run.mkdir()
        write_ngrams(dataset, target, run, initial_ngrams)
        assert NGramModel.open(run / NGRAM_FILE_NAME).num_tokens == num_tokens
        assert [path.name for path in run.iterdir()] == [NGRAM_FILE_NAME]


@pytest.mark.parametrize("copied", [False, True], ids=["counted", "copied"])
def test_a_full_disk_while_writing_ngrams_is_one_sentence_and_leaves_nothing(
    dataset, make_tiny, shallow_target, tmp_path, monkeypatch, file_size_limit, copied
):
    target, _ = make_tiny()
    monkeypatch.setattr(target, "tokenizer", shallow_target.tokenizer)
    initial_ngrams = None
    if copied:
        existing = count_ngrams([[9, 8, 7]], 97, 4, tmp_path / "existing", "0" * 64)
        initial_ngrams = existing.path
    run = tmp_path / "run"
    run.mkdir()
    with (
        file_size_limit(500),
        pytest.raises(RunAborted, match="run/ngrams could not be written: File too large; what"),
    ):
        write_ngrams(dataset, target, run, initial_ngrams)
    assert not [*run.iterdir()]


def load_saved(drafter, folder: Path):
    save_drafter(drafter.config, drafter.state_dict(), folder)
    return load_drafter(folder)

"""Rows to packed rows: nothing lost, nothing mixed, prompts without loss; read again only when
something changed."""

import hashlib
import json
import math
from dataclasses import replace
from random import Random

import pytest
import torch

from data.chat import NO_ANSWER
from data.packing import (
    batch,
    best_fit,
    mixed_rows,
    packed_rows,
    pieces_of,
    prepare_rows,
    row_index,
)
from data.rows import FORMAT, DataConfig, DataPart, held_out_rows, source_digest
from infer.targets.target import tokenizer_digest

COLUMNS = ("ids", "positions", "documents", "loss")


@pytest.fixture(scope="module")
def tokenizer(repo):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(repo / "data" / "embedded")


def text_row(prompt: str, text: str, cut: bool = False) -> dict:
    return {"prompt": prompt, "text": text, "cut": cut, "chat": None}


def write(file, rows: list[dict]) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def packed(config: DataConfig, tokenizer) -> dict[str, list]:
    rows = packed_rows(config, tokenizer, tokenizer_digest(tokenizer))
    return {name: rows[name][:].tolist() for name in COLUMNS}


def test_documents_come_back_out_of_packed_rows(tokenizer, tmp_path):
    texts = ["def f(x):\n    return x\n" * n for n in (7, 9, 2, 30, 1, 4)]
    prompts = ["", "", "say: ", "", "", ""]
    rows = [
        {"prompt": prompt, "response": text} for prompt, text in zip(prompts, texts, strict=True)
    ]
    config = DataConfig(source="jsonl", path=write(tmp_path / "a.jsonl", rows), length=64)
    trained = map(text_row, prompts[1:], texts[1:])
    expected = [piece for row in trained for piece in pieces_of(row, tokenizer, 64)]
    found = []
    for ids, positions, documents, loss in zip(*packed(config, tokenizer).values(), strict=True):
        assert len(ids) == len(positions) == len(documents) == len(loss) == 64
        for number in range(max(documents) + 1):
            where = [i for i, document in enumerate(documents) if document == number]
            assert where == list(range(where[0], where[0] + len(where)))
            assert [positions[i] for i in where] == list(range(len(where)))
            found.append(([ids[i] for i in where], [loss[i] for i in where]))
        padding = documents.count(-1)
        assert documents[64 - padding :] == [-1] * padding and not any(loss[64 - padding :])
    assert sorted(found) == sorted(expected)
    joined = [token for ids, _ in expected for token in ids]
    assert tokenizer.decode(joined, skip_special_tokens=True) == texts[1] + "say: " + "".join(
        texts[2:]
    )
    assert joined.count(tokenizer.eos_token_id) == 5 and max(len(ids) for ids, _ in expected) == 64


def test_a_prompt_carries_no_loss(tokenizer):
    [(ids, loss)] = pieces_of(text_row("import os\n", "import sys\n"), tokenizer, 64)
    prompt = len(tokenizer("import os\n")["input_ids"])
    assert (
        loss == [False] * prompt + [True] * (len(ids) - prompt)
        and ids[-1] == tokenizer.eos_token_id
    )
    [(cut, _)] = pieces_of(text_row("import os\n", "import sys\n", True), tokenizer, 64)
    assert cut == ids[:-1]
    long = pieces_of(text_row("import os\n" * 100, "x = 1\n"), tokenizer, 64)
    assert all(any(loss) for _, loss in long)  # pieces without loss are not trained on


def test_draws_are_permutations_and_pure():
    for epoch in range(3):
        draws = [row_index(epoch * 17 + i, 17, seed=5) for i in range(17)]
        assert sorted(draws) == list(range(17))
    assert [row_index(i, 17, 5) for i in range(34)] == [row_index(i, 17, 5) for i in range(34)]
    assert [row_index(i, 17, 5) for i in range(17)] != [row_index(17 + i, 17, 5) for i in range(17)]
    assert [row_index(i, 17, 5) for i in range(17)] != [row_index(i, 17, 6) for i in range(17)]


def test_a_mixture_takes_rows_by_weight(tmp_path):
    """Files and a data set that `datasets` loads, here from a folder."""
    a = write(tmp_path / "a.jsonl", [{"text": f"alpha {i}"} for i in range(100)])
    write(tmp_path / "hub" / "train.jsonl", [{"text": f"beta {i}"} for i in range(400)])
    parts = [DataPart(path=a, weight=1.0), DataPart(path=str(tmp_path / "hub"), weight=2.0)]
    config = DataConfig(source="mixture", datasets=parts, length=32)
    rows = [json.loads(row)["text"] for row in mixed_rows(config).rows["row"]]
    counts = {word: sum(text.startswith(word) for text in rows) for word in ("alpha", "beta")}
    assert counts == {
        "alpha": 90,
        "beta": 180,
    }  # one of ten is held out; the scarcer part is used up
    assert len(set(rows)) == len(rows)
    assert len(mixed_rows(replace(config, max_examples=10)).rows) < 11
    assert not {row["text"] for row in held_out_rows(config)} & set(rows)
    counts = mixed_rows(config).counts
    assert (counts.used, counts.held_out, counts.not_taken, counts.total) == (270, 50, 180, 500)
    (tmp_path / "hub" / "README.md").write_text("A data set of the hub.")
    hub = DataConfig(source="hub", path=str(tmp_path / "hub"), length=32)
    assert hub.source == "hub" and len(mixed_rows(hub).rows) == 360
    with pytest.raises(ValueError, match="split nothere: could not be read"):
        mixed_rows(replace(hub, split="nothere"))


def test_rows_are_read_again_only_when_something_changed(tokenizer, tmp_path, monkeypatch):
    file = write(tmp_path / "a.jsonl", [{"text": f"word {i} and more"} for i in range(60)])
    config = DataConfig(source="jsonl", path=file, length=32)
    first = packed(config, tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr("data.packing.pieces_of", None)
        assert packed(config, tokenizer) == first
    write(tmp_path / "a.jsonl", [{"text": f"word {i} and less"} for i in range(60)])
    assert packed(config, tokenizer) != first


def test_a_change_of_what_rows_come_out_raises_the_format(tokenizer, tmp_path):
    """The cache's key knows FORMAT, and not the code: where this digest changes, raise FORMAT and
    write it anew."""
    chat = [{"role": "user", "content": "why? "}, {"role": "assistant", "content": "because"}]
    rows = [{"text": "def f(x):\n    return x\n" * n} for n in range(1, 9)] + [
        {"prompt": "a = ", "response": "1\n"}
    ]
    file = write(tmp_path / "a.jsonl", [*rows, {"messages": chat}])
    columns = packed(DataConfig(source="jsonl", path=file, length=32), tokenizer)
    digest = hashlib.sha256(json.dumps(columns).encode()).hexdigest()
    assert (FORMAT, digest[:16]) == (6, "300ace5da3ca6e63")


def test_the_key_of_cached_rows_is_what_shapes_them(tmp_path):
    config = DataConfig(source="jsonl", path=write(tmp_path / "a.jsonl", [{"text": "word"}]))
    others = [
        replace(config, max_examples=3),
        DataConfig("hub", "owner/name"),
        DataConfig("stdlib"),
    ]
    for same in (
        replace(config, length=64),
        replace(config, max_invalid_fraction=0.3),
    ):  # of packed rows only; of what is refused
        assert source_digest(same) == source_digest(config)
    assert source_digest(config) not in {source_digest(one) for one in others}


def test_an_unreadable_file_is_named(tokenizer, tmp_path):
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"b\.parquet: damaged or cut off after row 0"):
        packed(DataConfig(source="jsonl", path=str(tmp_path)), tokenizer)


def test_counts_of_cached_rows_are_those_of_rows_just_read(tokenizer, tmp_path):
    """Examples used, excluded and invalid, when read and when tokenised; too many are refused then
    too."""
    chat = [{"role": "user", "content": "why? "}, {"role": "assistant", "content": "because"}]
    thought = [chat[0], chat[1] | {"reasoning_content": "hm"}]
    unknown = [chat[0], chat[1] | {"token_ids": [len(tokenizer)]}]
    rows = [{"messages": [{"role": "system", "content": f"{i}"}, *chat]} for i in range(12)]
    rows += [{"messages": thought}, {"messages": unknown}, {"messages": chat[:1]}, {"text": 3}]
    config = DataConfig(path=write(tmp_path / "a.jsonl", rows), length=64, max_invalid_fraction=0.2)
    first, second = (prepare_rows(config, tokenizer, tokenizer_digest(tokenizer)) for _ in range(2))
    counts = first.counts
    assert counts == second.counts and (counts.used, counts.held_out, counts.total) == (10, 2, 16)
    assert counts.excluded == {"the chat template does not show the thought of an answer": 1} | {
        NO_ANSWER: 1
    }
    assert counts.invalid == {
        "token_ids are outside the vocabulary": 1,
        "text, prompt and response are strings": 1,
    }
    assert "a.jsonl, line 16: text, prompt" in counts.lines()[-1]
    with pytest.raises(
        ValueError,
        match=r"2 of 16 examples are invalid; data.max_invalid_fraction=0.1 allows 1. First: .*line 16",
    ):
        prepare_rows(
            replace(config, max_invalid_fraction=0.1), tokenizer, tokenizer_digest(tokenizer)
        )


@pytest.mark.parametrize("size", [2000, 60_000], ids=["rows", "packed rows"])
def test_a_cache_that_does_not_fit_on_the_disk_is_no_fault_of_the_rows(
    tokenizer, tmp_path, file_size_limit, size
):
    """The rows that are read fit under the larger limit, and the packed ones, which are padded, do
    not."""
    rows = [{"prompt": "", "response": f"x = {i}\n"} for i in range(100)]
    config = DataConfig(source="jsonl", path=write(tmp_path / "a.jsonl", rows), length=20_000)
    with file_size_limit(size), pytest.raises(OSError, match="File too large"):
        packed(config, tokenizer)


@pytest.mark.parametrize("mean", [600, 2000])
def test_rows_are_98_percent_full(mean):
    """Chats whose lengths are log-normal, longer ones split: every piece once, and in rows that
    hold it."""
    length = 3072
    random = Random(mean)
    sizes = []
    for _ in range(20_000):
        left = max(8, int(random.lognormvariate(math.log(mean) - 0.5 * 0.8**2, 0.8)))
        while left > 0:
            sizes.append(min(left, length))
            left -= length
    rows = list(best_fit(sizes, length))
    assert sorted(i for row in rows for i in row) == list(range(len(sizes)))
    assert max(sum(sizes[i] for i in row) for row in rows) <= length
    assert sum(sizes) / (len(rows) * length) > 0.98
    assert list(best_fit(iter(sizes), length)) == rows  # read once, in the same order


def test_windows_and_processes_do_not_change_the_rows(tokenizer, tmp_path, monkeypatch):
    """Two processes and one; and a draw in the middle of a window is the same row when the rows are
    made anew, which is what a resumed run reads."""
    monkeypatch.setattr("data.packing.WINDOW", 64)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    texts = [{"text": f"word {i} " * (1 + i * 7 % 23)} for i in range(700)]
    one = DataConfig(source="jsonl", path=write(tmp_path / "a.jsonl", texts), length=64)
    columns = []
    for many, config in (
        (700, one),
        (100, replace(one, max_examples=699)),
    ):  # another key: nothing is found in the cache
        monkeypatch.setattr("data.packing.MANY", many)
        rows = packed_rows(config, tokenizer, tokenizer_digest(tokenizer))
        columns.append({name: rows[name][:].tolist() for name in COLUMNS})
        drawn = batch(rows, 37, 3, seed=0)
        assert {name: column.shape for name, column in drawn.items()} == dict.fromkeys(
            rows.column_names, (3, 64)
        )
        assert drawn["ids"].dtype == torch.int64 and drawn["loss"].dtype == torch.bool
        assert drawn["ids"][1].tolist() == columns[0]["ids"][row_index(38, len(rows), 0)]
    assert columns[0] == columns[1]
    assert str(rows.features["ids"].feature.dtype) == "int32"

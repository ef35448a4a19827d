"""Documents to packed rows: nothing lost, nothing mixed, prompts without loss, held-out text unseen."""

import gzip
import hashlib
import json
import math
import re
from dataclasses import replace

import pytest
import torch

from data.corpus import is_held_out, stdlib_documents
from data.packing import batch, best_fit, mixed_rows, pack, packed_rows, row_index, tokenize
from data.prompts import few_prompts, held_out_prompts
from data.rows import FORMAT, DataConfig, Part, held_out_rows, read_rows, source_digest
from infer.targets.target import tokenizer_digest


@pytest.fixture(scope="module")
def tokenizer(repo):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(repo / "data" / "embedded")


def test_library_files_are_split_by_a_hash_of_their_path():
    train = {document.name for document in stdlib_documents("train")}
    held = {document.name for document in stdlib_documents("held_out")}
    assert not train & held
    assert len(held) >= 15
    assert len(train) > 10 * len(held)
    assert all(is_held_out(name) for name in held)
    assert is_held_out("chunk.py")  # the same on every machine
    assert not is_held_out("abc.py")


def test_documents_come_back_out_of_packed_rows(tokenizer):
    texts = ["def f(x):\n    return x\n" * n for n in (1, 9, 2, 30, 1)]
    pieces = tokenize(
        {"prompt": ["", "say: ", "", "", ""], "text": texts, "cut": [False] * 5, "chat": [""] * 5}, tokenizer, 64
    )
    rows = pack(pieces, 64)
    found = []
    for ids, positions, documents, loss in zip(*rows.values(), strict=True):
        assert len(ids) == len(positions) == len(documents) == len(loss) == 64
        for number in range(max(documents) + 1):
            where = [i for i, document in enumerate(documents) if document == number]
            assert where == list(range(where[0], where[0] + len(where)))
            assert [positions[i] for i in where] == list(range(len(where)))
            found.append(([ids[i] for i in where], [loss[i] for i in where]))
        padding = documents.count(-1)
        assert documents[64 - padding :] == [-1] * padding
        assert not any(loss[64 - padding :])
    assert sorted(found) == sorted(zip(pieces["ids"], pieces["loss"], strict=True))
    found = list(zip(pieces["ids"], pieces["loss"], strict=True))
    joined = [token for ids, _ in found for token in ids]
    assert tokenizer.decode(joined, skip_special_tokens=True) == "say: ".join(["".join(texts[:1]), "".join(texts[1:])])
    assert joined.count(tokenizer.eos_token_id) == 5
    assert max(map(len, pieces["ids"])) == 64


def test_a_prompt_carries_no_loss(tokenizer):
    none = {"cut": [False], "chat": [""]}
    pieces = tokenize({"prompt": ["import os\n"], "text": ["import sys\n"], **none}, tokenizer, 64)
    prompt = len(tokenizer("import os\n")["input_ids"])
    assert pieces["loss"] == [[False] * prompt + [True] * (len(pieces["ids"][0]) - prompt)]
    long = tokenize({"prompt": ["import os\n" * 100], "text": ["x = 1\n"], **none}, tokenizer, 64)
    assert all(any(loss) for loss in long["loss"])  # pieces without loss are not trained on


def test_draws_are_permutations_and_pure():
    for epoch in range(3):
        draws = [row_index(epoch * 17 + i, 17, seed=5) for i in range(17)]
        assert sorted(draws) == list(range(17))
    assert [row_index(i, 17, 5) for i in range(34)] == [row_index(i, 17, 5) for i in range(34)]
    assert [row_index(i, 17, 5) for i in range(17)] != [row_index(17 + i, 17, 5) for i in range(17)]
    assert [row_index(i, 17, 5) for i in range(17)] != [row_index(i, 17, 6) for i in range(17)]


def test_jsonl_files_become_rows(tokenizer, tmp_path):
    for name, count in (("a.jsonl", 60), ("b.jsonl", 60)):
        lines = [{"prompt": f"{name} {i}: ", "response": "x = 1\n" * 20} for i in range(count)]
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = DataConfig(source="jsonl", path=str(tmp_path), length=128)
    dataset = packed_rows(config, tokenizer, tokenizer_digest(tokenizer))
    columns = batch(dataset, 0, 4, seed=0)
    assert {name: column.shape for name, column in columns.items()} == dict.fromkeys(columns, (4, 128))
    assert columns["loss"].dtype == torch.bool
    assert set(columns) == {"ids", "positions", "documents", "loss"}
    prompts = held_out_prompts(config, tokenizer, 3, 32)
    assert tokenizer.decode(prompts[0]) == "a.jsonl 0: "
    everything = [tokenizer.decode(row["ids"]) for row in dataset]
    assert not any("a.jsonl 0: " in text for text in everything)
    assert any("a.jsonl 1: " in text for text in everything)


@pytest.mark.parametrize("line", ["{not json", '{"prompt": "x"}', '{"text": 3}', "[1]"])
def test_a_bad_line_is_named(tmp_path, line):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2"):
        list(read_rows(DataConfig(source="jsonl", path=str(file), bad_rows=0)))


def test_one_list_in_a_json_file(tmp_path):
    file = tmp_path / "share.json"
    config = DataConfig(source="jsonl", path=str(file))
    file.write_text(json.dumps([{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]))
    assert [row["chat"]["messages"][1]["content"] for row in read_rows(config)] == ["b"]
    for wrong, word in (('{"a": 1}', "one list of rows"), ("[1,", "no JSON")):
        file.write_text(wrong)
        with pytest.raises(ValueError, match=rf"share\.json: .*{word}"):
            list(read_rows(config))


def test_an_empty_corpus_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no rows"):
        list(read_rows(DataConfig(source="jsonl", path=str(tmp_path))))


def test_library_prompts_are_many_different_and_held_out(tokenizer):
    prompts = held_out_prompts(DataConfig(), tokenizer, 64, 48)
    assert len({tuple(prompt) for prompt in prompts}) == 64
    assert {len(prompt) for prompt in prompts} == {48}
    held = "\n".join(document.text for document in stdlib_documents("held_out"))
    assert all(tokenizer.decode(prompt) in held for prompt in prompts)


def write(file, rows: list[dict]) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_a_mixture_takes_rows_by_weight(tokenizer, tmp_path):
    """Files and a data set that `datasets` loads, here from a folder."""
    a = write(tmp_path / "a.jsonl", [{"text": f"alpha {i}"} for i in range(100)])
    write(tmp_path / "hub" / "train.jsonl", [{"text": f"beta {i}"} for i in range(400)])
    parts = [Part(path=a, weight=1.0), Part(path=str(tmp_path / "hub"), weight=2.0)]
    config = DataConfig(source="mixture", parts=parts, length=32)
    rows = mixed_rows(config)["text"]
    counts = {word: sum(text.startswith(word) for text in rows) for word in ("alpha", "beta")}
    assert counts == {"alpha": 90, "beta": 180}  # one of ten is held out; the scarcer part is used up
    assert len(set(rows)) == len(rows)
    assert len(mixed_rows(replace(config, limit=10))) < 11
    held = [row["text"] for row in held_out_rows(config)]
    assert held[:3] == ["alpha 0", "beta 0", "alpha 10"]
    assert not set(held) & set(rows)
    hub = DataConfig(source="hub", path=str(tmp_path / "hub"), length=32)
    assert len(mixed_rows(hub)) == 360
    with pytest.raises(ValueError, match="split nothere: could not be read"):
        mixed_rows(replace(hub, split="nothere"))


def test_rows_are_read_again_only_when_something_changed(tokenizer, tmp_path, monkeypatch):
    from data import packing

    file = write(tmp_path / "a.jsonl", [{"text": f"word {i} and more"} for i in range(60)])
    config = DataConfig(source="jsonl", path=file, length=32)
    first = packed_rows(config, tokenizer, tokenizer_digest(tokenizer))
    calls = []
    monkeypatch.setattr(packing, "tokenize", lambda rows, **_: calls.append(1))
    again = packed_rows(config, tokenizer, tokenizer_digest(tokenizer))
    assert not calls and again["ids"][:].tolist() == first["ids"][:].tolist()
    monkeypatch.undo()
    write(tmp_path / "a.jsonl", [{"text": f"word {i} and less"} for i in range(60)])
    assert packed_rows(config, tokenizer, tokenizer_digest(tokenizer))["ids"][:].tolist() != first["ids"][:].tolist()


def test_a_change_of_what_rows_come_out_raises_the_format(tokenizer, tmp_path):
    """The cache's key knows FORMAT, and not the code: where this digest changes, raise FORMAT and write it anew."""
    chat = [{"role": "user", "content": "why? "}, {"role": "assistant", "content": "because"}]
    rows = [{"text": "def f(x):\n    return x\n" * n} for n in range(1, 9)] + [{"prompt": "a = ", "response": "1\n"}]
    file = write(tmp_path / "a.jsonl", [*rows, {"messages": chat}])
    packed = packed_rows(DataConfig(source="jsonl", path=file, length=32), tokenizer, tokenizer_digest(tokenizer))
    columns = {name: packed[name][:].tolist() for name in ("ids", "positions", "documents", "loss")}
    digest = hashlib.sha256(json.dumps(columns).encode()).hexdigest()
    assert (FORMAT, digest[:16]) == (4, "300ace5da3ca6e63")


def test_the_key_of_cached_rows_is_what_shapes_them(tmp_path):
    config = DataConfig(source="jsonl", path=write(tmp_path / "a.jsonl", [{"text": "word"}]))
    same = [
        replace(config, num_proc=4),
        replace(config, length=64),
        replace(config, long="drop"),
    ]  # of packed rows only
    others = [replace(config, limit=3), replace(config, bad_rows=3), replace(config, source="hub")]
    assert {source_digest(one) for one in same} == {source_digest(config)}
    assert source_digest(config) not in {source_digest(one) for one in others}


@pytest.mark.parametrize("long, tokens", [("split", 100), ("truncate", 32), ("drop", 0)])
def test_long_texts_are_split_truncated_or_dropped(tokenizer, long, tokens):
    ids = tokenizer("x = 1\n" * 200)["input_ids"][:99]
    rows = {"prompt": ["", ""], "text": [tokenizer.decode(ids), "short"], "cut": [False] * 2, "chat": [""] * 2}
    pieces = tokenize(rows, tokenizer, 32, long)
    short = len(tokenizer("short")["input_ids"]) + 1
    assert sum(map(len, pieces["ids"])) in (tokens + short, tokens + short - 1)
    assert all(len(piece) <= 32 for piece in pieces["ids"])


def test_tokenising_in_several_processes_gives_the_same_rows(tokenizer, tmp_path):
    file = write(
        tmp_path / "a.jsonl", [{"prompt": f"p{i}", "response": "some words " * (i % 7 + 1)} for i in range(90)]
    )
    one = DataConfig(source="jsonl", path=file, length=64)
    tokens = []
    for config in (one, replace(one, num_proc=2, bad_rows=99)):  # another key, so nothing is found in the cache
        rows = packed_rows(config, tokenizer, tokenizer_digest(tokenizer))
        columns = zip(rows["ids"][:], rows["documents"][:], strict=True)
        tokens.append(sorted(token for ids, documents in columns for token in ids[documents >= 0].tolist()))
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("damage", ["cut off", "checksum", "block", "no gzip"])
def test_a_damaged_compressed_file_of_a_folder_is_named(tmp_path, damage):
    lines = "".join(json.dumps({"text": hashlib.sha256(str(i).encode()).hexdigest()}) + "\n" for i in range(2000))
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    bad = tmp_path / "b.jsonl.gz"
    content = bytearray(bad.read_bytes())
    if damage == "cut off":
        content = content[: len(content) // 2]
    elif damage == "checksum":
        content[-6] ^= 1
    elif damage == "block":
        content[10] = 7  # of a kind that there is not
    else:
        content = lines.encode()
    bad.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{re.escape(str(bad))}: damaged or cut off after line \d+ "):
        list(read_rows(DataConfig(source="jsonl", path=str(tmp_path))))


def test_a_device_among_the_data_is_refused_before_it_is_read(tmp_path):
    import os

    from data.rows import files_of

    os.mkfifo(tmp_path / "rows.jsonl")
    for path in (tmp_path, tmp_path / "rows.jsonl", "/dev/zero"):
        with pytest.raises(ValueError, match="is no regular file"):
            files_of(str(path))


def test_small_data_give_the_prompts_that_there_are(tokenizer, tmp_path):
    """Three short texts, one of them held out: its first half; and nothing to evaluate with is a sentence."""
    file = tmp_path / "few.jsonl"
    config = DataConfig(source="jsonl", path=write(file, [{"text": f"x{i} = {i}; y = 2 * x{i} + 1"} for i in range(3)]))
    [prompt] = held_out_prompts(config, tokenizer, 8, 96)
    whole = tokenizer("x0 = 0; y = 2 * x0 + 1")["input_ids"]
    assert prompt == whole[: len(whole) // 2]
    assert "have 1 prompt, not evaluation.prompts=8" in few_prompts(1, 8) and few_prompts(8, 8) is None
    write(file, [{"text": "x"}, {"text": "y"}])
    with pytest.raises(ValueError, match="no prompt to evaluate with"):
        held_out_prompts(config, tokenizer, 8, 96)


@pytest.mark.parametrize("mean", [600, 1100, 2000])
def test_rows_are_98_percent_full(mean):
    """Chats whose lengths are log-normal, longer ones split: every piece once, and in rows that hold it."""
    from random import Random

    length, random, sizes = 3072, Random(mean), []
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
    """Two processes and one; and a draw in the middle of a window is the same row when the rows are made anew, which is
    what a resumed run reads."""
    monkeypatch.setattr("data.packing.WINDOW", 64)
    texts = [{"text": f"word {i} " * (1 + i * 7 % 23)} for i in range(700)]
    one = DataConfig(source="jsonl", path=write(tmp_path / "a.jsonl", texts), length=64, num_proc=1)
    columns = []
    for config in (one, replace(one, num_proc=2, bad_rows=99)):
        rows = packed_rows(config, tokenizer, tokenizer_digest(tokenizer))
        columns.append({name: rows[name][:].tolist() for name in ("ids", "positions", "documents", "loss")})
        drawn = batch(rows, 37, 3, seed=0)["ids"]
        assert drawn.dtype == torch.int64 and drawn[1].tolist() == columns[0]["ids"][row_index(38, len(rows), 0)]
    assert columns[0] == columns[1]
    assert str(rows.features["ids"].feature.dtype) == "int32"

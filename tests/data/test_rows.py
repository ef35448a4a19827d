"""Rows of every layout and file become one form; what is broken is named; which rows are held out,
and asked."""

import gzip
import hashlib
import json
import os
import re
from dataclasses import replace

import pytest

from data.chat import normalise
from data.corpus import is_held_out as held_out_file, stdlib_documents
from data.counts import ExampleCounts, ExcludedExample
from data.prompts import evaluation_prompts, few_prompts
from data.rows import (
    DataConfig,
    DataPart,
    files_of,
    held_out_rows,
    is_held_out,
    read_rows,
    training_rows,
)

LLAMA3 = """{{- '<|begin|>' -}}
{%- for m in messages -%}
{{- '<|header|>' + m.role + '<|end_header|>\\n\\n' + m.content | trim + '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|header|>assistant<|end_header|>\\n\\n' -}}{%- endif -%}"""


@pytest.fixture(scope="module")
def tokenizer(repo):
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(repo / "data" / "embedded")
    made.chat_template = LLAMA3
    return made


def held_out_prompts(config, tokenizer, count, tokens):
    return [prompt.ids for prompt in evaluation_prompts(config, tokenizer, count, tokens)]


def chat(*turns: str, system: str | None = None) -> list[dict[str, str]]:
    messages = [
        {"role": "user" if i % 2 == 0 else "assistant", "content": turn}
        for i, turn in enumerate(turns)
    ]
    return ([{"role": "system", "content": system}] if system else []) + messages


def text_row(prompt: str, text: str, cut: bool = False) -> dict:
    return {"prompt": prompt, "text": text, "cut": cut, "chat": None}


def write(file, rows: list) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


SHARED = [
    {"from": "human", "value": "Hi"},
    {"from": "gpt", "value": "Hello"},
    {"from": "human", "value": "Bye"},
]
PARTS = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
LAYOUTS = {
    "messages": ({"messages": chat("Hi", "Hello")}, chat("Hi", "Hello")),
    "response behind messages": (
        {"messages": chat("Hi"), "response": "Hello"},
        chat("Hi", "Hello"),
    ),
    "ShareGPT": ({"conversations": SHARED}, chat("Hi", "Hello")),
    "columns that hold nothing": (
        {"messages": None, "conversations": SHARED, "text": None},
        chat("Hi", "Hello"),
    ),
    "parts": ({"messages": [PARTS, *chat("Hi", "Hello")[1:]]}, chat("Hi", "Hello")),
    "conversational": ({"prompt": chat("q"), "completion": chat("q", "a")[1:]}, chat("q", "a")),
    "Alpaca": ({"instruction": "Add.", "input": "1, 2", "output": "3"}, chat("Add.\n\n1, 2", "3")),
    "Alpaca without input": (
        {"instruction": "Hi.", "input": "", "output": "hi", "text": "..."},
        chat("Hi.", "hi"),
    ),
    "completion": ({"prompt": "p", "completion": "c"}, text_row("p", "c")),
    "response": (
        {"prompt": "p", "response": "c", "finish_reason": "length"},
        text_row("p", "c", True),
    ),
    "text": ({"text": "b"}, text_row("", "b")),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_become_one_form(name):
    row, expected = LAYOUTS[name]
    if isinstance(expected, list):
        expected = text_row("", "") | {"chat": {"messages": expected, "tools": [], "template": {}}}
    assert normalise(row) == expected


def test_questions_need_no_answer():
    assert normalise({"messages": chat("Hi", "Hello")}, answered=False)["chat"]["messages"] == chat(
        "Hi"
    )
    assert normalise({"prompt": "a"}, answered=False) == text_row("a", "")
    with pytest.raises(ExcludedExample, match="no answer"):
        normalise({"prompt": "a"})


INVALID = [
    "no json",
    json.dumps([1]),
    json.dumps({"messages": []}),
    json.dumps({"messages": "x"}),
    json.dumps({"messages": [{"role": "user"}]}),
    json.dumps({"conversations": [{"from": 3, "value": "x"}]}),
    json.dumps({"text": 3}),
    json.dumps(
        {"messages": [*chat("x"), {"role": "assistant", "content": "y", "token_ids": [2**70]}]}
    ),
    "null",
]
EXCLUDED = [
    json.dumps({"messages": chat("unanswered")}),
    json.dumps({"messages": chat("x", " ")}),
    json.dumps({"instruction": "x", "output": ""}),
    json.dumps({"prompt": "x"}),
    json.dumps({"text": ""}),
    json.dumps(
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, *chat("x", "y")[1:]]}
    ),
]


def test_a_mixed_set_with_broken_rows_is_read(tmp_path):
    from pyarrow import Table
    from pyarrow.parquet import write_table

    good = [
        json.dumps({"messages": chat("同じ", "はい 👋")}, ensure_ascii=False)
    ] * 2  # twice: once counts
    good += [json.dumps({"prompt": f"p{i}", "response": "some words"}) for i in range(60)]
    lines = [*good, *INVALID, *EXCLUDED]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    write_table(
        Table.from_pylist([{"messages": chat(f"{i}", "yes")} for i in range(20)]),
        tmp_path / "b.parquet",
    )
    (tmp_path / "c.txt").write_text("\ufeffA whole text,\n\nof two parts.\n", encoding="utf-8")
    (tmp_path / "d.jsonl").write_text(
        '\ufeff{"text": "first"}\n{"text": "second"}\n', encoding="utf-8"
    )
    config = DataConfig(path=str(tmp_path), max_invalid_fraction=0.09)
    counts = ExampleCounts()
    rows = list(read_rows(config, counts=counts))
    assert len(rows) == counts.used == 1 + 60 + 20 + 3
    assert {"A whole text,\n\nof two parts.\n", "first", "second"} <= {row["text"] for row in rows}
    once = {"there more than once, and taken once": 1, "a message has a part that is no text": 1}
    assert counts.excluded == {"no answer of the assistant": 4, "an empty text": 1} | once
    assert sum(counts.invalid.values()) == len(INVALID) and counts.total == len(lines) + 23
    assert "a.jsonl, line 63: no JSON (" in counts.first_invalid
    wanted = r"9 of 100 examples are invalid; data.max_invalid_fraction=0.08 allows 8. First: .*line 63: no JSON"
    with pytest.raises(ValueError, match=wanted):
        list(read_rows(replace(config, max_invalid_fraction=0.08)))


def test_a_path_that_exists_is_the_users_own_data(tmp_path):
    """Whatever the source was; what looks like a file and is none is refused, as are a path and
    parts together."""
    file = write(tmp_path / "mine.jsonl", [{"text": "x"}])
    copy = tmp_path / "copy"
    for source in ("embedded", "stdlib", "hub", "jsonl"):
        for path in (file, str(tmp_path)):
            config = DataConfig(source, path)
            config.check()
            assert config.source == "jsonl"
    write(copy / "data.jsonl", [{"text": "x"}])
    (copy / "README.md").write_text("A data set of the hub.")
    assert (
        DataConfig("hub", str(copy)).source == "hub"
        and DataConfig("embedded", str(copy)).source == "jsonl"
    )
    DataConfig("hub", "owner/name").check()
    for source, path, words in (
        ("embedded", "nope.jsonl", "no such file or folder$"),
        ("embedded", "owner/name", "data=hub data.path=owner/name"),
        ("jsonl", "nope", "no such file or folder$"),
        ("hub", "nope.jsonl", "no name on the hub"),
        ("hub", "/folders/nope", "no name on the hub"),
        ("self", file, "give one of them"),
        ("mixture", file, "give one of them"),
    ):
        with pytest.raises(ValueError, match=words):
            DataConfig(source, path, max_examples=3).check()


def test_one_list_in_a_json_file(tmp_path):
    file = tmp_path / "share.json"
    config = DataConfig(source="jsonl", path=str(file))
    file.write_text(json.dumps([{"conversations": SHARED}]))
    assert [row["chat"]["messages"][1]["content"] for row in read_rows(config)] == ["Hello"]
    for wrong in ('{"a": 1}', "[1,"):
        file.write_text(wrong)
        with pytest.raises(ValueError, match=r"share\.json: damaged"):
            list(read_rows(config))


@pytest.mark.parametrize("damage", ["cut off", "checksum", "no gzip", "parquet"])
def test_a_damaged_file_of_a_folder_is_named(tmp_path, damage):
    from pyarrow import Table
    from pyarrow.parquet import write_table

    texts = [{"text": hashlib.sha256(str(i).encode()).hexdigest()} for i in range(2000)]
    lines = "".join(json.dumps(row) + "\n" for row in texts)
    bad = tmp_path / ("b.parquet" if damage == "parquet" else "b.jsonl.gz")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    content = bytearray(gzip.compress(lines.encode()))
    if damage == "cut off":
        content = content[: len(content) // 2]
    elif damage == "checksum":
        content[-6] ^= 1
    elif damage == "no gzip":
        content = lines.encode()
    else:
        write_table(Table.from_pylist(texts), bad)
        content = bad.read_bytes()[:-9]
    bad.write_bytes(content)
    with pytest.raises(
        ValueError, match=rf"^{re.escape(str(bad))}: damaged or cut off after (line|row) \d+ "
    ):
        list(read_rows(DataConfig(source="jsonl", path=str(tmp_path))))


def test_a_line_without_an_end_is_never_whole_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("data.rows.LONGEST", 1000)
    file = write(tmp_path / "a.jsonl", [{"text": "x" * 1500}, {"text": "fine"}])
    assert [row["text"] for row in read_rows(DataConfig(path=file, max_invalid_fraction=1))] == [
        "fine"
    ]
    (tmp_path / "a.txt").write_text("x" * 1500)
    with pytest.raises(ValueError, match="a text of more than"):
        list(read_rows(DataConfig(source="jsonl", path=str(tmp_path / "a.txt"))))


def test_devices_and_empty_folders_are_refused_before_they_are_read(tmp_path):
    with pytest.raises(ValueError, match="no rows"):
        list(read_rows(DataConfig(source="jsonl", path=str(tmp_path))))
    os.mkfifo(tmp_path / "rows.jsonl")
    for path in (tmp_path, tmp_path / "rows.jsonl", "/dev/zero"):
        with pytest.raises(ValueError, match="is no regular file"):
            files_of(str(path))


def test_what_is_held_out(tmp_path):
    """The library's files by a hash of their path, one's own rows by their number; a mixture gives
    in turn."""
    train, held = (
        {document.name for document in stdlib_documents(split)} for split in ("train", "held_out")
    )
    assert not train & held and len(held) >= 15 and len(train) > 10 * len(held)
    assert len(list(training_rows(DataConfig()))) > 2500
    assert held_out_file("chunk.py") and not held_out_file("abc.py")  # the same on every machine
    assert [is_held_out(i) for i in (0, 9, 10, 490, 500, 510, 550)] == [
        True,
        False,
        True,
        True,
        True,
        False,
        True,
    ]
    parts = [
        DataPart(write(tmp_path / f"{word}.jsonl", [{"text": f"{word} {i}"} for i in range(30)]))
        for word in "ab"
    ]
    found = [row["text"] for row in held_out_rows(DataConfig(source="mixture", datasets=parts))]
    assert found == ["a 0", "b 0", "a 10", "b 10", "a 20", "b 20"]


def test_library_prompts_are_many_different_and_held_out(tokenizer):
    prompts = held_out_prompts(DataConfig(), tokenizer, 64, 48)
    assert len({tuple(prompt) for prompt in prompts}) == 64
    assert {len(prompt) for prompt in prompts} == {48}
    held = "\n".join(document.text for document in stdlib_documents("held_out"))
    assert all(tokenizer.decode(prompt) in held for prompt in prompts)


def test_evaluation_prompts_are_whole_turns_from_the_templates_first_token(tokenizer, tmp_path):
    """The longest beginning that has room; with its system prompt, and an invitation to answer at
    its end."""
    messages = chat("one", "yes " * 9, "two", "no " * 30, "three", "so", system="Be brief.")
    config = DataConfig(source="jsonl", path=str(tmp_path / "chats.jsonl"))
    write(tmp_path / "chats.jsonl", [{"messages": messages}, {"messages": chat("a", "b")}])
    sizes = {}
    for turns in (2, 4, 6):
        asked = tokenizer.apply_chat_template(
            messages[:turns], add_generation_prompt=True, return_dict=True
        )
        sizes[turns] = asked["input_ids"]
    assert held_out_prompts(config, tokenizer, 1, 1000) == [sizes[6]]
    assert held_out_prompts(config, tokenizer, 1, len(sizes[6]) - 1) == [sizes[4]]
    assert held_out_prompts(config, tokenizer, 1, len(sizes[4]) - 1) == [sizes[2]]
    assert held_out_prompts(config, tokenizer, 1, 5) == [
        sizes[2][-5:]
    ]  # not even the first question has room
    rows = [{"messages": messages}] + [{"text": f"filler {i}"} for i in range(9)]
    rows += [
        {"messages": chat("one " * 900, "yes", "last", "no")}
    ]  # row 10 is held out too, and asked a turn earlier
    write(tmp_path / "chats.jsonl", rows)
    found = evaluation_prompts(config, tokenizer, 2, 10_000)
    assert found[0].kind.startswith("chats to ") and found[1].kind not in ("chats", found[0].kind)
    assert "one one" in tokenizer.decode(found[1].ids) and "last" not in tokenizer.decode(
        found[1].ids
    )


def test_texts_from_outside_are_asked_as_the_data_are(tokenizer, tmp_path):
    """Beside chats through the template, as the drafter will be used: its card is measured on
    these."""
    for row, chats in (
        ({"messages": chat("one", "two")}, True),
        ({"text": "words of text " * 40}, False),
    ):
        config = DataConfig(source="jsonl", path=write(tmp_path / "rows.jsonl", [row]))
        *_, outside = evaluation_prompts(config, tokenizer, 2, 40, 1)
        asked = [{"role": "user", "content": outside.said}]
        ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        assert outside.beside and outside.chat == chats == (outside.ids == ids)


def test_small_data_give_the_prompts_that_there_are(tokenizer, tmp_path):
    """Three short texts, one of them held out: its first half; and nothing to evaluate with is a
    sentence."""
    file = tmp_path / "few.jsonl"
    config = DataConfig(
        source="jsonl",
        path=write(file, [{"text": f"x{i} = {i}; y = 2 * x{i} + 1"} for i in range(3)]),
    )
    [prompt] = held_out_prompts(config, tokenizer, 8, 96)
    whole = tokenizer("x0 = 0; y = 2 * x0 + 1")["input_ids"]
    assert prompt == whole[: len(whole) // 2]
    assert (
        "have 1 prompt, not evaluation.prompts=8" in few_prompts(1, 8) and few_prompts(8, 8) is None
    )
    write(file, [{"text": "x"}, {"text": "y"}])
    with pytest.raises(ValueError, match="no prompt to evaluate with"):
        held_out_prompts(config, tokenizer, 8, 96)

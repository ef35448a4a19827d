"""Records of every layout and file become one form, invalid ones are named, and which examples are
held out and used as prompts."""

import gzip
import hashlib
import json
import os
import re
from dataclasses import replace

import pytest

from data.chat import normalise_example
from data.corpus import is_held_out_file, read_stdlib_documents
from data.counts import ExampleCounts, ExcludedExample
from data.prompts import describe_prompt_shortage, select_evaluation_prompts
from data.rows import (
    DataConfig,
    MixtureDataset,
    is_held_out_index,
    list_data_files,
    read_examples,
    read_held_out_examples,
    read_training_examples,
)

LLAMA3_TEMPLATE = """{{- '<|begin|>' -}}
{%- for m in messages -%}
{{- '<|header|>' + m.role + '<|end_header|>\\n\\n' + m.content | trim + '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|header|>assistant<|end_header|>\\n\\n' -}}{%- endif -%}"""


@pytest.fixture(scope="module")
def tokenizer(repo):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(repo / "data" / "embedded")
    tokenizer.chat_template = LLAMA3_TEMPLATE
    return tokenizer


def held_out_prompt_ids(config, tokenizer, count, prompt_tokens):
    prompts = select_evaluation_prompts(config, tokenizer, count, prompt_tokens)
    return [prompt.ids for prompt in prompts]


def chat_messages(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    messages = [
        {"role": "user" if i % 2 == 0 else "assistant", "content": text}
        for i, text in enumerate(texts)
    ]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def text_example(prompt: str, text: str, cut: bool = False) -> dict:
    return {"prompt": prompt, "text": text, "cut": cut, "chat": None}


def write_jsonl(file, records: list) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


SHAREGPT_MESSAGES = [
    {"from": "human", "value": "Hi"},
    {"from": "gpt", "value": "Hello"},
    {"from": "human", "value": "Bye"},
]
MESSAGE_WITH_CONTENT_LIST = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
RECORD_LAYOUTS = {
    "messages": ({"messages": chat_messages("Hi", "Hello")}, chat_messages("Hi", "Hello")),
    "response after messages": (
        {"messages": chat_messages("Hi"), "response": "Hello"},
        chat_messages("Hi", "Hello"),
    ),
    "ShareGPT": ({"conversations": SHAREGPT_MESSAGES}, chat_messages("Hi", "Hello")),
    "null columns": (
        {"messages": None, "conversations": SHAREGPT_MESSAGES, "text": None},
        chat_messages("Hi", "Hello"),
    ),
    "content as a list": (
        {"messages": [MESSAGE_WITH_CONTENT_LIST, *chat_messages("Hi", "Hello")[1:]]},
        chat_messages("Hi", "Hello"),
    ),
    "conversational": (
        {"prompt": chat_messages("q"), "completion": chat_messages("q", "a")[1:]},
        chat_messages("q", "a"),
    ),
    "Alpaca": (
        {"instruction": "Add.", "input": "1, 2", "output": "3"},
        chat_messages("Add.\n\n1, 2", "3"),
    ),
    "Alpaca without input": (
        {"instruction": "Hi.", "input": "", "output": "hi", "text": "..."},
        chat_messages("Hi.", "hi"),
    ),
    "completion": ({"prompt": "p", "completion": "c"}, text_example("p", "c")),
    "response": (
        {"prompt": "p", "response": "c", "finish_reason": "length"},
        text_example("p", "c", True),
    ),
    "text": ({"text": "b"}, text_example("", "b")),
}


@pytest.mark.parametrize("name", RECORD_LAYOUTS)
def test_layouts_become_one_form(name):
    record, expected = RECORD_LAYOUTS[name]
    if isinstance(expected, list):
        expected = text_example("", "") | {
            "chat": {"messages": expected, "tools": [], "template": {}}
        }
    assert normalise_example(record) == expected


def test_questions_need_no_answer():
    record = {"messages": chat_messages("Hi", "Hello")}
    example = normalise_example(record, ends_with_answer=False)
    assert example["chat"]["messages"] == chat_messages("Hi")
    assert normalise_example({"prompt": "a"}, ends_with_answer=False) == text_example("a", "")
    with pytest.raises(ExcludedExample, match="no answer"):
        normalise_example({"prompt": "a"})


INVALID_LINES = [
    "no json",
    json.dumps([1]),
    json.dumps({"messages": []}),
    json.dumps({"messages": "x"}),
    json.dumps({"messages": [{"role": "user"}]}),
    json.dumps({"conversations": [{"from": 3, "value": "x"}]}),
    json.dumps({"text": 3}),
    json.dumps(
        {
            "messages": [
                *chat_messages("x"),
                {"role": "assistant", "content": "y", "token_ids": [2**70]},
            ]
        }
    ),
    "null",
]
EXCLUDED_LINES = [
    json.dumps({"messages": chat_messages("unanswered")}),
    json.dumps({"messages": chat_messages("x", " ")}),
    json.dumps({"instruction": "x", "output": ""}),
    json.dumps({"prompt": "x"}),
    json.dumps({"text": ""}),
    json.dumps(
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url"}]},
                *chat_messages("x", "y")[1:],
            ]
        }
    ),
]


def test_a_folder_with_invalid_records_is_read(tmp_path):
    from pyarrow import Table
    from pyarrow.parquet import write_table

    chat_line = json.dumps({"messages": chat_messages("同じ", "はい 👋")}, ensure_ascii=False)
    valid_lines = [chat_line, chat_line]  # the second is a duplicate
    valid_lines += [json.dumps({"prompt": f"p{i}", "response": "some words"}) for i in range(60)]
    lines = [*valid_lines, *INVALID_LINES, *EXCLUDED_LINES]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    write_table(
        Table.from_pylist([{"messages": chat_messages(f"{i}", "yes")} for i in range(20)]),
        tmp_path / "b.parquet",
    )
    (tmp_path / "c.txt").write_text("\ufeffA whole text,\n\nof two parts.\n", encoding="utf-8")
    (tmp_path / "d.jsonl").write_text(
        '\ufeff{"text": "first"}\n{"text": "second"}\n', encoding="utf-8"
    )
    config = DataConfig(path=str(tmp_path), max_invalid_fraction=0.09)
    counts = ExampleCounts()
    examples = list(read_examples(config, counts=counts))
    assert len(examples) == counts.used == 1 + 60 + 20 + 3
    assert {"A whole text,\n\nof two parts.\n", "first", "second"} <= {
        example["text"] for example in examples
    }
    assert counts.excluded == {
        "no answer of the assistant": 4,
        "the text is empty": 1,
        "duplicate of an earlier example": 1,
        "a message has content that is not text": 1,
    }
    assert sum(counts.invalid.values()) == len(INVALID_LINES)
    assert counts.total == len(lines) + 23
    assert "a.jsonl, line 63: not valid JSON (" in counts.first_invalid
    message = (
        r"9 of 100 examples are invalid; data.max_invalid_fraction=0.08 allows 8. "
        r"First: .*line 63: not valid JSON"
    )
    with pytest.raises(ValueError, match=message):
        list(read_examples(replace(config, max_invalid_fraction=0.08)))


def test_a_path_that_exists_is_the_users_own_data(tmp_path):
    """Whatever the source. A path that looks like a file but does not exist is refused, and so is a
    path for a source that uses none."""
    file = write_jsonl(tmp_path / "mine.jsonl", [{"text": "x"}])
    copy = tmp_path / "copy"
    for source in ("embedded", "stdlib", "hub", "jsonl"):
        for path in (file, str(tmp_path)):
            config = DataConfig(source, path)
            config.check()
            assert config.source == "jsonl"
    write_jsonl(copy / "data.jsonl", [{"text": "x"}])
    (copy / "README.md").write_text("A data set of the hub.")
    assert (
        DataConfig("hub", str(copy)).source == "hub"
        and DataConfig("embedded", str(copy)).source == "jsonl"
    )
    DataConfig("hub", "owner/name").check()
    for source, path, message in (
        ("embedded", "nope.jsonl", "no such file or folder$"),
        ("embedded", "owner/name", "data=hub data.path=owner/name"),
        ("jsonl", "nope", "no such file or folder$"),
        ("hub", "nope.jsonl", "the name of a data set on the hub has the form"),
        ("hub", "/folders/nope", "the name of a data set on the hub has the form"),
        ("self", file, "cannot be combined with data.path"),
        ("mixture", file, "cannot be combined with data.path"),
    ):
        with pytest.raises(ValueError, match=message):
            DataConfig(source, path, max_examples=3).check()


def test_one_list_in_a_json_file(tmp_path):
    file = tmp_path / "share.json"
    config = DataConfig(source="jsonl", path=str(file))
    file.write_text(json.dumps([{"conversations": SHAREGPT_MESSAGES}]))
    assert [row["chat"]["messages"][1]["content"] for row in read_examples(config)] == ["Hello"]
    for invalid_content in ('{"a": 1}', "[1,"):
        file.write_text(invalid_content)
        with pytest.raises(ValueError, match=r"share\.json is damaged"):
            list(read_examples(config))


@pytest.mark.parametrize("damage", ["cut off", "checksum", "not gzip", "parquet"])
def test_a_damaged_file_of_a_folder_is_named(tmp_path, damage):
    from pyarrow import Table
    from pyarrow.parquet import write_table

    records = [{"text": hashlib.sha256(str(i).encode()).hexdigest()} for i in range(2000)]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    damaged_name = "b.parquet" if damage == "parquet" else "b.jsonl.gz"
    damaged_file = tmp_path / damaged_name
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    content = bytearray(gzip.compress(lines.encode()))
    if damage == "cut off":
        content = content[: len(content) // 2]
    elif damage == "checksum":
        content[-6] ^= 1
    elif damage == "not gzip":
        content = lines.encode()
    else:
        write_table(Table.from_pylist(records), damaged_file)
        content = damaged_file.read_bytes()[:-9]
    damaged_file.write_bytes(content)
    with pytest.raises(
        ValueError,
        match=rf"^{re.escape(str(damaged_file))} is damaged or cut off after (line|row) \d+ ",
    ):
        list(read_examples(DataConfig(source="jsonl", path=str(tmp_path))))


def test_an_overlong_line_is_never_in_memory_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("data.rows.MAX_JSONL_LINE_CHARACTERS", 1000)
    monkeypatch.setattr("data.rows.MAX_TEXT_FILE_BYTES", 1000)
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "x" * 1500}, {"text": "fine"}])
    assert [
        row["text"] for row in read_examples(DataConfig(path=file, max_invalid_fraction=1))
    ] == ["fine"]
    (tmp_path / "a.txt").write_text("x" * 1500)
    with pytest.raises(ValueError, match="the text file has more than"):
        list(read_examples(DataConfig(source="jsonl", path=str(tmp_path / "a.txt"))))


def test_devices_and_empty_folders_are_refused_before_they_are_read(tmp_path):
    with pytest.raises(ValueError, match="no examples"):
        list(read_examples(DataConfig(source="jsonl", path=str(tmp_path))))
    os.mkfifo(tmp_path / "rows.jsonl")
    for path in (tmp_path, tmp_path / "rows.jsonl", "/dev/zero"):
        with pytest.raises(ValueError, match="only regular files can be read"):
            list_data_files(str(path))


def test_which_examples_are_held_out(tmp_path):
    """The library's files by a hash of their path, the user's examples by their index; a mixture
    gives them round-robin."""
    train_names = {document.name for document in read_stdlib_documents("train")}
    held_out_names = {document.name for document in read_stdlib_documents("held_out")}
    assert not train_names & held_out_names
    assert len(held_out_names) >= 15
    assert len(train_names) > 10 * len(held_out_names)
    assert len(list(read_training_examples(DataConfig()))) > 2500
    assert is_held_out_file("chunk.py")  # the same on every machine
    assert not is_held_out_file("abc.py")
    indices = (0, 9, 10, 490, 500, 510, 550)
    assert [i for i in indices if is_held_out_index(i)] == [0, 10, 490, 500, 550]
    parts = [
        MixtureDataset(
            write_jsonl(tmp_path / f"{word}.jsonl", [{"text": f"{word} {i}"} for i in range(30)])
        )
        for word in "ab"
    ]
    config = DataConfig(source="mixture", datasets=parts)
    texts = [example["text"] for example in read_held_out_examples(config)]
    assert texts == ["a 0", "b 0", "a 10", "b 10", "a 20", "b 20"]


def test_library_prompts_are_many_different_and_held_out(tokenizer):
    prompts = held_out_prompt_ids(DataConfig(), tokenizer, 64, 48)
    assert len({tuple(prompt) for prompt in prompts}) == 64
    assert {len(prompt) for prompt in prompts} == {48}
    held_out_text = "\n".join(document.text for document in read_stdlib_documents("held_out"))
    assert all(tokenizer.decode(prompt) in held_out_text for prompt in prompts)


def test_evaluation_prompts_are_whole_messages_from_the_templates_first_token(tokenizer, tmp_path):
    """The longest beginning of the chat that is short enough, with its system prompt and a
    generation prompt."""
    messages = chat_messages(
        "one", "yes " * 9, "two", "no " * 30, "three", "so", system="Be brief."
    )
    config = DataConfig(source="jsonl", path=str(tmp_path / "chats.jsonl"))
    write_jsonl(
        tmp_path / "chats.jsonl", [{"messages": messages}, {"messages": chat_messages("a", "b")}]
    )
    expected_ids = {}
    for message_count in (2, 4, 6):
        encoded = tokenizer.apply_chat_template(
            messages[:message_count], add_generation_prompt=True, return_dict=True
        )
        expected_ids[message_count] = encoded["input_ids"]
    assert held_out_prompt_ids(config, tokenizer, 1, 1000) == [expected_ids[6]]
    assert held_out_prompt_ids(config, tokenizer, 1, len(expected_ids[6]) - 1) == [expected_ids[4]]
    assert held_out_prompt_ids(config, tokenizer, 1, len(expected_ids[4]) - 1) == [expected_ids[2]]
    # Even the prompt of the first answer is too long.
    assert held_out_prompt_ids(config, tokenizer, 1, 5) == [expected_ids[2][-5:]]
    # Example 10 is held out too. Its prompt is for the last answer but one.
    records = [{"messages": messages}] + [{"text": f"filler {i}"} for i in range(9)]
    records.append({"messages": chat_messages("one " * 900, "yes", "last", "no")})
    write_jsonl(tmp_path / "chats.jsonl", records)
    first, second = select_evaluation_prompts(config, tokenizer, 2, 10_000)
    assert first.kind.startswith("chats to ")
    assert second.kind not in ("chats", first.kind)
    second_text = tokenizer.decode(second.ids)
    assert "one one" in second_text
    assert "last" not in second_text


def test_outside_prompts_are_chats_if_the_data_are(tokenizer, tmp_path):
    """The drafter's model card is measured on these prompts, so they must have the form that the
    drafter is used with."""
    for record, chats in (
        ({"messages": chat_messages("one", "two")}, True),
        ({"text": "words of text " * 40}, False),
    ):
        config = DataConfig(source="jsonl", path=write_jsonl(tmp_path / "rows.jsonl", [record]))
        *_, outside = select_evaluation_prompts(config, tokenizer, 2, 40, 1)
        question = {"role": "user", "content": outside.text_with_same_tokens}
        encoded = tokenizer.apply_chat_template(
            [question], add_generation_prompt=True, return_dict=True
        )
        assert outside.report_group
        assert outside.chat == chats == (outside.ids == encoded["input_ids"])


def test_small_data_sets_give_fewer_prompts(tokenizer, tmp_path):
    """Of three short texts one is held out and gives its first half. A data set without any prompt
    is refused."""
    file = tmp_path / "few.jsonl"
    config = DataConfig(
        source="jsonl",
        path=write_jsonl(file, [{"text": f"x{i} = {i}; y = 2 * x{i} + 1"} for i in range(3)]),
    )
    [prompt] = held_out_prompt_ids(config, tokenizer, 8, 96)
    text_ids = tokenizer("x0 = 0; y = 2 * x0 + 1")["input_ids"]
    assert prompt == text_ids[: len(text_ids) // 2]
    assert "only 1 prompt, fewer than evaluation.prompts=8" in describe_prompt_shortage(1, 8)
    assert describe_prompt_shortage(8, 8) is None
    write_jsonl(file, [{"text": "x"}, {"text": "y"}])
    with pytest.raises(ValueError, match="no evaluation prompt could be made"):
        held_out_prompt_ids(config, tokenizer, 8, 96)

"""Chats: formats, templates, and loss on exactly the assistant's tokens."""

import json
from dataclasses import replace

import pytest
from transformers import PreTrainedTokenizerFast

from data.chat import normalise
from data.packing import packed_rows
from data.prompts import evaluation_prompts, held_out_prompts
from data.rows import DataConfig, is_held_out, read_rows
from data.template import sequences, tokenize_chat
from infer.targets.target import tokenizer_digest
from train.pretraining.language_model import train_tokenizer

# Written for this test after the behaviour of the two families' templates: Qwen3 shows the thoughts of the last answer
# only, and gives it an empty thought if it has none; Llama 3 begins with a token of its own and trims.
QWEN3 = """{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set thought = '' -%}{%- set answer = m.content -%}
{%- if '</think>' in m.content -%}
{%- set thought = m.content.split('</think>')[0].replace('<think>', '').strip() -%}
{%- set answer = m.content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > ns.last -%}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}{%- endif -%}
{{- answer + '<|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
LLAMA3 = """{{- '<|begin|>' -}}
{%- for m in messages -%}
{{- '<|header|>' + m.role + '<|end_header|>\\n\\n' + m.content | trim + '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|header|>assistant<|end_header|>\\n\\n' -}}{%- endif -%}"""
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin|>", "<|header|>", "<|end_header|>"]


@pytest.fixture(scope="module", params=["qwen3", "llama3"])
def tokenizer(request) -> PreTrainedTokenizerFast:
    made = train_tokenizer(["some words of text, and more of them\n"] * 20, 300)
    made.add_special_tokens({"additional_special_tokens": SPECIAL})
    made.chat_template = {"qwen3": QWEN3, "llama3": LLAMA3}[request.param]
    return made


def chat(*turns: str, system: str | None = None) -> list[dict[str, str]]:
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": turn} for i, turn in enumerate(turns)]
    return ([{"role": "system", "content": system}] if system else []) + messages


def as_chat(messages: list[dict], tools=(), **told) -> dict:
    return {"messages": messages, "tools": [*tools], "template": told}


def learnt_texts(tokenizer, chat: dict) -> list[list[str]]:
    """The runs of learnt tokens of every sequence, as text."""
    found = []
    for ids, loss in tokenize_chat(tokenizer, chat):
        runs, before = [], False
        for id, on in zip(ids, loss, strict=True):
            runs += [[]] if on and not before else []
            runs[-1:] = [[*runs[-1], id]] if on else runs[-1:]
            before = on
        found.append([tokenizer.decode(run) for run in runs])
    return found


CHATS = [
    chat("Hello", "Hi there."),
    chat("Hello", "Hi there.", "And now?", "Now this,\n\nin two parts.", system="Be brief."),
    chat("同じ答え", "はい、そうです。", "مرحبا", "أهلا 👋"),
    chat("same", "same", "same", "same"),  # the answer's words stand elsewhere, too
    chat("a", "", "b", "something"),  # an empty answer in the middle
    chat(*["question", "answer with words"] * 20),
    chat("What?", "  \n indented answer \n"),
]


@pytest.mark.parametrize("messages", CHATS)
def test_loss_covers_exactly_the_answers(tokenizer, messages):
    """Read back from the marked tokens: the answers, one after the other, each with the token that ends it; everything
    else is the rest of the text."""
    [(ids, _)] = tokenize_chat(tokenizer, as_chat(messages))
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False)
    [runs] = learnt_texts(tokenizer, as_chat(messages))
    answers = [turn["content"] for turn in messages if turn["role"] == "assistant"]
    assert len(runs) == len(answers)
    for text, answer in zip(runs, answers, strict=True):
        assert text.endswith("<|im_end|>")
        assert text.removesuffix("<|im_end|>").strip() == answer.strip()


def test_thoughts_are_learnt_where_the_template_shows_them(tokenizer):
    messages = chat("Why?", "<think>\nwell\n</think>\n\nBecause.", "Really?", "<think>\nhmm\n</think>\n\nYes.")
    found = sequences(tokenizer, as_chat(messages))
    learnt = [[one.text[piece.start : piece.end] for piece in one.learnt] for one in found]
    first, second = (turn["content"] for turn in messages[1::2])
    assert learnt == ([[first, second]] if "<|header|>" in found[0].text else [[first], [second]])


def test_a_template_that_changes_answers_is_refused(tokenizer):
    template = tokenizer.chat_template
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content | upper }}{% endfor %}"
    with pytest.raises(ValueError, match="does not show answer 1 as it is"):
        tokenize_chat(tokenizer, as_chat(chat("a", "b")))
    tokenizer.chat_template = template


def text_row(prompt: str, text: str, cut: bool = False) -> dict:
    return {"prompt": prompt, "text": text, "cut": cut, "chat": None}


def test_formats():
    wanted = chat("Hi", "Hello")

    def messages(row: dict, answered: bool = True) -> list[dict]:
        return normalise(row, answered)["chat"]["messages"]

    assert messages({"messages": wanted}) == wanted
    assert messages({"messages": wanted[:1], "response": "Hello"}) == wanted
    shared = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}, {"from": "human", "value": "Bye"}]
    assert messages({"conversations": shared}) == wanted
    assert messages({"messages": wanted}, answered=False) == wanted[:1]
    assert normalise({"prompt": "a"}, answered=False) == text_row("a", "")
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, wanted[1]]
    assert messages({"messages": parts}) == wanted
    assert normalise({"prompt": "a", "response": "b"}) == text_row("a", "b")
    assert normalise({"text": "b"}) == text_row("", "b")


BAD = [
    "no json",
    json.dumps([1]),
    json.dumps({"messages": []}),
    json.dumps({"messages": "x"}),
    json.dumps({"messages": [{"role": "user", "content": "unanswered"}]}),
    json.dumps({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": " "}]}),
    json.dumps({"messages": [{"role": "user"}]}),
    json.dumps({"conversations": [{"from": 3, "value": "x"}]}),
    json.dumps({"text": ""}),
    json.dumps({"text": 3}),
    json.dumps({"question": "x"}),
    "null",
]


def test_a_mixed_set_with_broken_rows_trains(tokenizer, tmp_path, capsys):
    good = [json.dumps({"messages": messages}, ensure_ascii=False) for messages in CHATS] * 2  # twice: once counts
    good += [
        json.dumps({"conversations": [{"from": "human", "value": f"q{i}"}, {"from": "gpt", "value": "a b"}]})
        for i in range(60)
    ]
    good += [json.dumps({"prompt": f"p{i}", "response": "some words"}) for i in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(good + BAD) + "\n", encoding="utf-8")
    from pyarrow import Table
    from pyarrow.parquet import write_table

    write_table(
        Table.from_pylist([{"messages": chat(f"parquet {i}", "yes")} for i in range(20)]), tmp_path / "b.parquet"
    )
    config = DataConfig(source="jsonl", path=str(tmp_path), length=64, bad_rows=len(BAD))
    rows = list(read_rows(config))
    said = capsys.readouterr().err
    assert len(rows) == len(CHATS) + 60 + 60 + 20
    assert f"{len(BAD)} of {len(good) + len(BAD) + 20} rows cannot be used" in said
    assert "a.jsonl, line 135: no JSON" in said and f"{len(CHATS)} rows are there more than once" in said
    with pytest.raises(ValueError, match=f"{len(BAD)} of .* rows cannot be used, data.bad_rows=11 may be: .*line 135"):
        list(read_rows(replace(config, bad_rows=len(BAD) - 1)))
    packed = packed_rows(config, tokenizer, tokenizer_digest(tokenizer))
    assert packed["loss"][:].any(1).all() and packed["ids"][:].shape[1] == 64
    prompts = held_out_prompts(config, tokenizer, 3, 32)
    assert tokenizer.decode(prompts[0]).rstrip().endswith(("assistant", "<|end_header|>"))


def test_a_damaged_parquet_file_and_a_closed_one_are_named(tokenizer, tmp_path):
    from pyarrow import Table
    from pyarrow.parquet import write_table

    file = tmp_path / "a.parquet"
    write_table(Table.from_pylist([{"text": f"some text {i} " * 40} for i in range(400)]), file, compression="none")
    good = file.read_bytes()
    file.write_bytes(good[:-9])
    with pytest.raises(ValueError, match=r"a\.parquet: no sound Parquet file, after row 0"):
        packed_rows(DataConfig(source="jsonl", path=str(file), length=64), tokenizer, tokenizer_digest(tokenizer))
    (tmp_path / "b.jsonl").mkdir()  # a folder cannot be read, whoever asks
    with pytest.raises(ValueError, match=r"b\.jsonl is no regular file"):
        file.unlink()
        packed_rows(DataConfig(source="jsonl", path=str(tmp_path), length=64), tokenizer, tokenizer_digest(tokenizer))


def test_the_library_and_the_answers_are_all_good(capsys):
    from data.rows import training_rows

    assert len(list(training_rows(DataConfig()))) > 2500
    assert len(list(training_rows(DataConfig(source="stdlib")))) > 300


def test_evaluation_prompts_are_whole_turns_from_the_templates_first_token(tokenizer, tmp_path):
    """The longest beginning that has room; with its system prompt, and an invitation to answer at its end."""
    file, messages = (
        tmp_path / "chats.jsonl",
        chat("one", "yes " * 9, "two", "no " * 30, "three", "so", system="Be brief."),
    )
    file.write_text(json.dumps({"messages": messages}) + "\n" + json.dumps({"messages": chat("a", "b")}) + "\n")
    config = DataConfig(source="jsonl", path=str(file))
    sizes = {}
    for turns in (2, 4, 6):
        asked = tokenizer.apply_chat_template(messages[:turns], add_generation_prompt=True, return_dict=True)
        sizes[turns] = asked["input_ids"]
    assert held_out_prompts(config, tokenizer, 1, 1000) == [sizes[6]]
    assert held_out_prompts(config, tokenizer, 1, len(sizes[6]) - 1) == [sizes[4]]
    assert held_out_prompts(config, tokenizer, 1, len(sizes[4]) - 1) == [sizes[2]]
    assert held_out_prompts(config, tokenizer, 1, 5) == [sizes[2][-5:]]  # not even the first question has room
    rows = [{"messages": messages}] + [{"text": f"filler {i}"} for i in range(9)]
    rows += [{"messages": chat("one " * 900, "yes", "last", "no")}]  # row 10 is held out too, and asked a turn earlier
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = evaluation_prompts(config, tokenizer, 2, 10_000)
    assert found[0].kind.startswith("chats to ") and found[1].kind not in ("chats", found[0].kind)
    assert "one one" in tokenizer.decode(found[1].ids) and "last" not in tokenizer.decode(found[1].ids)
    assert [is_held_out(i) for i in (0, 9, 10, 490, 500, 510, 550)] == [True, False, True, True, True, False, True]


def test_texts_from_outside_are_asked_as_the_data_are(tokenizer, tmp_path):
    """Beside chats through the template, as the drafter will be used: its card is measured on these."""
    file = tmp_path / "rows.jsonl"
    for row, chats in (({"messages": chat("one", "two")}, True), ({"text": "words of text " * 40}, False)):
        file.write_text(json.dumps(row) + "\n")
        *_, outside = evaluation_prompts(DataConfig(source="jsonl", path=str(file)), tokenizer, 2, 40, 1)
        asked = [{"role": "user", "content": outside.said}]
        ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert outside.beside and outside.chat == chats == (outside.ids == ids)


@pytest.mark.parametrize(
    "row, expected",
    [
        ({"prompt": "p", "completion": "c"}, text_row("p", "c")),
        ({"instruction": "Add.", "input": "1, 2", "output": "3"}, chat("Add.\n\n1, 2", "3")),
        ({"instruction": "Say hi.", "input": "", "output": "hi", "text": "Below is ..."}, chat("Say hi.", "hi")),
        ({"prompt": chat("q"), "completion": [{"role": "assistant", "content": "a"}]}, chat("q", "a")),
    ],
    ids=["completion", "alpaca", "alpaca without input", "conversational"],
)
def test_other_rows_that_are_common(row, expected):
    wanted = expected if isinstance(expected, dict) else text_row("", "") | {"chat": as_chat(expected)}
    assert normalise(row) == wanted
    with pytest.raises(ValueError, match="no answer|an empty text"):
        normalise({"instruction": "x", "output": ""})


def test_text_files_and_byte_order_marks(tmp_path):
    (tmp_path / "a.txt").write_text("\ufeffA whole text,\n\nof two parts.\n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('\ufeff{"text": "first"}\n{"text": "second"}\n', encoding="utf-8")
    rows = list(read_rows(DataConfig(source="jsonl", path=str(tmp_path), bad_rows=0)))
    assert sorted(row["text"] for row in rows) == ["A whole text,\n\nof two parts.\n", "first", "second"]

"""Where a target's own questions begin and end, in templates of several kinds, and which are left
out."""

import pytest
from tokenizers.processors import TemplateProcessing

from data.questions import opening, sifted
from data.rows import DataConfig, read_rows

CHATML = """{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nBe good.<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
BRACKETS = """<s>{% for m in messages -%}
{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else m.content }}{% endfor %}"""
NAMES = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n\\n' }}{% endfor %}assistant:"


@pytest.fixture(scope="module")
def tokenizer(train_tokenizer):
    """One that puts <s> before every text, as Llama's does."""
    made = train_tokenizer(["some words of text, and more of them\n"] * 20, 300)
    made.add_special_tokens(
        {"bos_token": "<s>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    )
    first = ("<s>", made.convert_tokens_to_ids("<s>"))
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[first]
    )
    return made


@pytest.mark.parametrize(
    "template, system, begins, stop",
    [
        (CHATML, None, "<|im_start|>system\nBe good.<|im_end|>\n<|im_start|>user\n", "<|im_end|>"),
        (
            CHATML,
            "Be brief.",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n",
            "<|im_end|>",
        ),
        (BRACKETS, None, "[INST]", "[/INST]"),
        (NAMES, "Be brief.", "system: Be brief.\n\nuser:", "\n\nassistant:"),
    ],
)
def test_a_question_stands_where_the_template_has_a_users_words(
    tokenizer, monkeypatch, template, system, begins, stop
):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    found = opening(tokenizer, system)
    assert (found.text, found.stop) == (begins, [stop])
    messages = [*found.before, {"role": "user", "content": "some words"}]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(found.text)["input_ids"]
    whole = tokenizer(whole.removeprefix("<s>"))["input_ids"]
    assert whole[: len(ids)] == ids and ids[1] != tokenizer.bos_token_id


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}"])
def test_a_template_without_a_place_for_questions_is_refused(tokenizer, monkeypatch, template):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(ValueError, match="nothing before a user's words"):
        opening(tokenizer)
    monkeypatch.setattr(tokenizer, "chat_template", "{{ '[INST] ' + messages[-1].content }}")
    with pytest.raises(ValueError, match="does not show system prompts"):
        opening(tokenizer, "Be brief.")


def test_what_is_still_to_be_written_cannot_be_read():
    with pytest.raises(ValueError, match=r"launch.sh regenerate data=self .* then data=jsonl"):
        next(read_rows(DataConfig("self", max_examples=3)))


def test_questions_without_an_end_or_asked_before_are_left_out(tokenizer):
    long = "why do some words of a text stand where more of them would stand, "
    said = [
        "some words?",
        " Some  words! ",
        "",
        "???",
        "x",
        "half a \ufffd",
        "no end",
        "a a a a",
        long + "one",
        long + "two",
        "other words",
    ]
    ends = {6: "length", 7: "loop"}
    written = [
        {"index": 2 * i, "response": text, "finish": ends.get(i, "stop")}
        for i, text in enumerate(said)
    ]
    kept, dropped = sifted(written, tokenizer, 3)
    assert kept == {0: "some words?", 16: long + "one", 20: "other words"}
    assert sorted(dropped.items()) == [
        ("like an earlier one", 2),
        ("repeating themselves", 1),
        ("too long", 1),
        ("too short or no text", 4),
    ]

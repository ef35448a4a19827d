"""Where the question of a self-generated chat begins and ends in several kinds of templates, and
which questions are left out."""

import pytest
from tokenizers.processors import TemplateProcessing

from data.questions import build_question_prompt, filter_questions
from data.rows import DataConfig, read_examples

CHATML_SYSTEM_TEMPLATE = """{% if messages[0].role != 'system' -%}
{{ '<|im_start|>system\\nBe good.<|im_end|>\\n' }}{% endif %}
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
BRACKET_TEMPLATE = """<s>{% for m in messages -%}
{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else m.content }}{% endfor %}"""
ROLE_NAME_TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n\\n' }}{% endfor %}assistant:"
)
SYSTEM_QUESTION_START = "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n"


@pytest.fixture(scope="module")
def tokenizer(train_tokenizer):
    """Return a tokenizer that puts <s> before every text, as Llama's does."""
    tokenizer = train_tokenizer(["some words of text, and more of them\n"] * 20, 300)
    tokenizer.add_special_tokens(
        {"bos_token": "<s>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    )
    start_token = ("<s>", tokenizer.convert_tokens_to_ids("<s>"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[start_token]
    )
    return tokenizer


@pytest.mark.parametrize(
    "template, system, expected_text, expected_stop",
    [
        (
            CHATML_SYSTEM_TEMPLATE,
            None,
            SYSTEM_QUESTION_START.format(system="Be good."),
            "<|im_end|>",
        ),
        (
            CHATML_SYSTEM_TEMPLATE,
            "Be brief.",
            SYSTEM_QUESTION_START.format(system="Be brief."),
            "<|im_end|>",
        ),
        (BRACKET_TEMPLATE, None, "[INST]", "[/INST]"),
        (ROLE_NAME_TEMPLATE, "Be brief.", "system: Be brief.\n\nuser:", "\n\nassistant:"),
    ],
)
def test_a_question_begins_where_the_template_has_a_user_message(
    tokenizer, monkeypatch, template, system, expected_text, expected_stop
):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    prompt = build_question_prompt(tokenizer, system)
    assert (prompt.text, prompt.stop_strings) == (expected_text, [expected_stop])

    messages = [*prompt.messages, {"role": "user", "content": "some words"}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    rendered_ids = tokenizer(rendered.removeprefix("<s>"))["input_ids"]
    prompt_ids = tokenizer(prompt.text)["input_ids"]
    assert rendered_ids[: len(prompt_ids)] == prompt_ids
    assert prompt_ids[1] != tokenizer.bos_token_id


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}"])
def test_a_template_without_text_before_a_question_is_refused(tokenizer, monkeypatch, template):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(ValueError, match="needs a chat model whose chat template has text before"):
        build_question_prompt(tokenizer)
    monkeypatch.setattr(tokenizer, "chat_template", "{{ '[INST] ' + messages[-1].content }}")
    with pytest.raises(ValueError, match="leaves out system prompts"):
        build_question_prompt(tokenizer, "Be brief.")


def test_data_self_cannot_be_read_before_it_is_generated():
    with pytest.raises(ValueError, match=r"launch.sh regenerate data=self .* then use data=jsonl"):
        next(read_examples(DataConfig("self", max_examples=3)))


def test_unfinished_and_repeated_questions_are_left_out(tokenizer):
    long_prefix = "why do some words of a text stand where more of them would stand, "
    responses = [
        "some words?",
        " Some  words! ",
        "",
        "???",
        "x",
        "half a \ufffd",
        "no end",
        "a a a a",
        long_prefix + "one",
        long_prefix + "two",
        "other words",
    ]
    finish_reasons = {6: "length", 7: "loop"}
    rows = [
        {"index": 2 * i, "response": response, "finish": finish_reasons.get(i, "stop")}
        for i, response in enumerate(responses)
    ]
    questions, dropped = filter_questions(rows, tokenizer, 3)
    assert questions == {0: "some words?", 16: long_prefix + "one", 20: "other words"}
    assert dropped == {
        "like an earlier one": 2,
        "repeating themselves": 1,
        "too long": 1,
        "too short or no text": 4,
    }

"""Chats of all kinds in a template with reasoning and tools: exactly what the target generated
carries loss.

The template (thinking.jinja) behaves like Qwen3's. It shows reasoning after the last question only,
tools in the system message and tool results in user messages, and has a variable that turns
reasoning off by adding empty reasoning.
"""

import json
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace

import pytest

from data.chat import normalise_example
from data.counts import ExcludedExample, InvalidExample
from data.template import build_training_texts, tokenize_chat
from infer.api import encode_prompt

THINKING_TEMPLATE = Path(__file__).with_name("thinking.jinja").read_text().removesuffix("\n")
CHATML_WITHOUT_SYSTEM = """{% for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
OPEN_REASONING_TEMPLATE = CHATML_WITHOUT_SYSTEM.replace(
    "m.content", "m.content.split('</think>')[-1]"
).replace("assistant\\n'", "assistant\\n<think>\\n'")
END_TOKEN = "<|im_end|>"
ADD_TOOL = [
    {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}
]
REASONING_OFF = {"chat_template_kwargs": {"enable_thinking": False}}
REASONING_ON = {"chat_template_kwargs": {"enable_thinking": True}}


def user_message(text: str) -> dict:
    return {"role": "user", "content": text}


def answer(text: str | None, **fields) -> dict:
    return {"role": "assistant", "content": text, **fields}


def add_calls(*all_arguments: dict, as_text: bool = True) -> list[dict]:
    """Return one call of the tool `add` for each object of arguments."""
    tool_calls = []
    for arguments in all_arguments:
        if as_text:
            arguments = json.dumps(arguments)
        function = {"name": "add", "arguments": arguments}
        tool_calls.append({"id": "c", "type": "function", "function": function})
    return tool_calls


def tool_result(text: str) -> dict:
    return {"role": "tool", "tool_call_id": "c", "content": text}


SYSTEM_MESSAGE = {"role": "system", "content": "Be brief."}
TWO_TURNS = [user_message("a?"), answer("A."), user_message("b?"), answer("B.")]
SEPARATE_REASONING = [
    user_message("a?"),
    answer("A.", reasoning_content="hm a"),
    user_message("b?"),
    answer("B.", reasoning="hm b"),
]
REASONING_IN_CONTENT = [
    user_message("a?"),
    answer("<think>\nhm a\n</think>\n\nA."),
    user_message("b?"),
    answer("<think>\nhm b\n</think>\n\nB."),
]
TOOL_CHAT = [
    user_message("1+2?"),
    answer(None, tool_calls=add_calls({"x": 1})),
    tool_result("3"),
    answer("It is 3."),
]
FIRST_REASONED_ANSWER = "<think>\nhm a\n</think>\n\nA.#"
SECOND_REASONED_ANSWER = "<think>\nhm b\n</think>\n\nB.#"
CALL_TEXT = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
# name: (messages, other columns of the record, expected text with loss of each training text). In
# the expected text, a space separates spans and # stands for the end token.
CHAT_CASES = {
    "two turns": (TWO_TURNS, {}, ["A.# B.#"]),
    "system": ([SYSTEM_MESSAGE, *TWO_TURNS], {}, ["A.# B.#"]),
    "reasoning off": (TWO_TURNS, REASONING_OFF, ["A.# B.#"]),
    "separate reasoning": (SEPARATE_REASONING, {}, [FIRST_REASONED_ANSWER, SECOND_REASONED_ANSWER]),
    "reasoning in the content": (
        REASONING_IN_CONTENT,
        REASONING_ON,
        [FIRST_REASONED_ANSWER, SECOND_REASONED_ANSWER],
    ),
    "only the first answer has reasoning": (
        [*SEPARATE_REASONING[:2], *TWO_TURNS[2:]],
        {},
        [FIRST_REASONED_ANSWER, "B.#"],
    ),
    "only the last answer has reasoning": (
        [*TWO_TURNS[:2], *SEPARATE_REASONING[2:]],
        {},
        ["A.# " + SECOND_REASONED_ANSWER],
    ),
    "cut answer": ([*TWO_TURNS[:3], answer("B is", finish="length")], {}, ["A.# B is"]),
    "cut response": (TWO_TURNS[:1], {"response": "A is", "finish": "length"}, ["A is"]),
    "cut in the middle": (
        [user_message("a?"), answer("A is", finish="length"), *TWO_TURNS[2:]],
        {},
        ["A is"],
    ),
    "cut after reasoning": (
        [user_message("a?"), answer(FIRST_REASONED_ANSWER[:-1], finish_reason="length")],
        {},
        [FIRST_REASONED_ANSWER[:-1]],
    ),
    "cut within separate reasoning": (
        [*TWO_TURNS[:3], answer(None, reasoning_content="hm, and", finish="length")],
        {},
        ["A.#"],
    ),
    "cut within reasoning in the content": (
        [*TWO_TURNS[:3], answer("<think>\nhm, and", finish="length")],
        {},
        ["A.#"],
    ),
    "only cut reasoning": (
        [user_message("a?"), answer("<think>\nhm", finish="length")],
        {},
        ExcludedExample,
    ),
    "tool call": (TOOL_CHAT, {"tools": ADD_TOOL} | REASONING_OFF, [f"{CALL_TEXT}# It is 3.#"]),
    "tool call with content": (
        [
            TOOL_CHAT[0],
            answer("Let me see.", tool_calls=add_calls({"x": 1}, as_text=False)),
            *TOOL_CHAT[2:],
        ],
        {"tools": ADD_TOOL},
        [f"Let me see.\n{CALL_TEXT}# It is 3.#"],
    ),
    "tool call after reasoning": (
        [
            TOOL_CHAT[0],
            answer("", reasoning_content="add", tool_calls=add_calls({"x": 1})),
            *TOOL_CHAT[2:],
        ],
        {"tools": ADD_TOOL},
        [f"<think>\nadd\n</think>\n\n{CALL_TEXT}# It is 3.#"],
    ),
    "two calls at once": (
        [
            TOOL_CHAT[0],
            answer(None, tool_calls=add_calls({"x": 1}, {"x": 1})),
            tool_result("3"),
            tool_result("4"),
            answer("So."),
        ],
        {},
        [f"{CALL_TEXT}\n{CALL_TEXT}# So.#"],
    ),
    "a tool call is the last message": (
        [SYSTEM_MESSAGE, *TOOL_CHAT[:2]],
        {"tools": ADD_TOOL},
        [f"{CALL_TEXT}#"],
    ),
    "a tool call as content": (
        [TOOL_CHAT[0], answer(CALL_TEXT), *TOOL_CHAT[2:]],
        {"tools": json.dumps(ADD_TOOL)},
        [f"{CALL_TEXT}# It is 3.#"],
    ),
    "an empty answer": ([user_message("a?"), answer(""), *TWO_TURNS[2:]], {}, ["# B.#"]),
    "spaces around": ([user_message("a?"), answer("  A. \n")], {}, ["  A. \n#"]),
    "an answer of weight 0": (
        [user_message("a?"), answer("A.", weight=0), *TWO_TURNS[2:]],
        {},
        ["B.#"],
    ),
    "equal texts everywhere": (
        [user_message("A."), answer("A."), user_message("A."), answer("A.")],
        {},
        ["A.# A.#"],
    ),
    "non-ASCII letters": (
        [user_message("同じ"), answer("はい 👋"), *TWO_TURNS[2:]],
        {},
        ["はい 👋# B.#"],
    ),
}


@pytest.fixture(scope="module")
def tokenizer(train_tokenizer):
    tokenizer = train_tokenizer(["some words of text, and more of them\n"] * 20, 300)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", END_TOKEN]})
    tokenizer.chat_template = THINKING_TEMPLATE
    return tokenizer


def texts_with_loss(tokenizer, messages: list[dict], **columns) -> list[str]:
    """Return what carries loss in each training text, as in CHAT_CASES."""
    chat = normalise_example({"messages": messages} | columns)["chat"]
    texts = []
    for ids, loss in tokenize_chat(tokenizer, chat):
        spans = []
        for has_loss, pairs in groupby(zip(ids, loss, strict=True), itemgetter(1)):
            if has_loss:
                spans.append(tokenizer.decode([token_id for token_id, _ in pairs]))
        texts.append(" ".join(spans).replace(END_TOKEN, "#"))
    return texts


@pytest.mark.parametrize("name", CHAT_CASES)
def test_tokens_with_loss_are_what_the_target_generated(tokenizer, name):
    messages, columns, expected = CHAT_CASES[name]
    if expected is ExcludedExample:
        with pytest.raises(ExcludedExample):
            texts_with_loss(tokenizer, messages, **columns)
    else:
        assert texts_with_loss(tokenizer, messages, **columns) == expected


def test_reasoning_that_the_template_drops_is_learnt_after_its_prompt(tokenizer):
    """One training text is the prompt and the answer with its reasoning; the other one is the whole
    chat without this reasoning."""
    chat = normalise_example({"messages": SEPARATE_REASONING})["chat"]
    first, second = [text for text, _ in build_training_texts(tokenizer, chat)]
    prompt = "<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\n"
    assert first == prompt + "<think>\nhm a\n</think>\n\nA.<|im_end|>\n"
    assert second.startswith(prompt + "A.<|im_end|>\n<|im_start|>user\nb?")


def test_a_template_that_opens_the_reasoning_itself(tokenizer, monkeypatch):
    """As in DeepSeek-R1: the generation prompt ends with <think>, and reasoning is never shown."""
    monkeypatch.setattr(tokenizer, "chat_template", OPEN_REASONING_TEMPLATE)
    expected = [
        text.removeprefix("<think>\n") for text in (FIRST_REASONED_ANSWER, SECOND_REASONED_ANSWER)
    ]
    assert texts_with_loss(tokenizer, REASONING_IN_CONTENT) == expected
    assert texts_with_loss(tokenizer, SEPARATE_REASONING) == expected


# Concatenates the arguments of a call with strings, as DeepSeek's templates do.
CONCATENATING_TEMPLATE = """{{ tools | tojson if tools }}{% for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for c in m.tool_calls or [] -%}
{{ '<call>' + c.function.name + '\\n```json\\n' + c.function.arguments + '\\n```</call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# Prints an object of arguments in Python's notation.
PRINTING_TEMPLATE = CONCATENATING_TEMPLATE.replace(
    "+ c.function.arguments +", "~ c.function.arguments ~"
)


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize(
    "template", [CONCATENATING_TEMPLATE, PRINTING_TEMPLATE], ids=["concatenates", "prints"]
)
def test_arguments_are_text_for_templates_that_concatenate_them_with_text(
    tokenizer, monkeypatch, template, as_text
):
    """In training data, and as the server and `regenerate` encode a prompt."""
    monkeypatch.setattr(tokenizer, "chat_template", template)
    question, _, *later_messages = TOOL_CHAT
    messages = [
        question,
        answer("", tool_calls=add_calls({"x": True}, {"y": 2}, as_text=as_text)),
        *later_messages,
    ]
    calls_text = (
        '<call>add\n```json\n{"x": true}\n```</call><call>add\n```json\n{"y": 2}\n```</call>#'
    )
    assert texts_with_loss(tokenizer, messages, tools=ADD_TOOL) == [calls_text + " It is 3.#"]
    prompt = encode_prompt(
        SimpleNamespace(tokenizer=tokenizer, name="target"), messages[:3], tools=ADD_TOOL
    )
    assert calls_text.replace("#", END_TOKEN) in tokenizer.decode(prompt)


def test_arguments_stay_objects_for_templates_that_read_them(tokenizer):
    """Even if a tool's result contains the arguments in Python's notation."""
    messages = [*TOOL_CHAT[:2], tool_result("{'x': 1}"), answer("So.")]
    assert texts_with_loss(tokenizer, messages, tools=ADD_TOOL) == [f"{CALL_TEXT}# So.#"]


NO_RESULTS_TEMPLATE = CHATML_WITHOUT_SYSTEM.replace(
    "m.content", "(m.content if m.role != 'tool' else '')"
)
TRIMMING_TEMPLATE = CHATML_WITHOUT_SYSTEM.replace("m.content", "m.content | trim")
UPPERCASE_TEMPLATE = CHATML_WITHOUT_SYSTEM.replace("m.content", "m.content | upper")
LOWERCASE_TEMPLATE = CHATML_WITHOUT_SYSTEM.replace("m.content", "m.content | lower")


@pytest.mark.parametrize(
    "template, messages, columns, message",
    [
        (CHATML_WITHOUT_SYSTEM, SEPARATE_REASONING, {}, "leaves out the reasoning of an answer"),
        (CHATML_WITHOUT_SYSTEM, TOOL_CHAT, {}, "changes or leaves out the tool calls of an answer"),
        (
            CHATML_WITHOUT_SYSTEM,
            TWO_TURNS,
            {"tools": ADD_TOOL},
            "leaves out the definitions of the tools",
        ),
        (
            NO_RESULTS_TEMPLATE,
            [*TWO_TURNS[:3], tool_result("unseen"), *TWO_TURNS[3:]],
            {},
            r"the result of a tool \(message 3",
        ),
        (UPPERCASE_TEMPLATE, TWO_TURNS[:2], {}, None),
        (TRIMMING_TEMPLATE, [user_message("a?"), answer(" \n A. \n")], {}, None),
        (LOWERCASE_TEMPLATE, TWO_TURNS[:2], {}, "changes or leaves out an answer"),
        (THINKING_TEMPLATE, SEPARATE_REASONING, REASONING_OFF, "variables turn reasoning off"),
    ],
)
def test_what_a_template_does_not_show_is_refused(
    tokenizer, monkeypatch, template, messages, columns, message
):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    if message is None:
        assert texts_with_loss(tokenizer, messages, **columns) == ["A.#"]
    else:
        with pytest.raises(ExcludedExample, match=message):
            texts_with_loss(tokenizer, messages, **columns)


@pytest.mark.parametrize(
    "invalid_message, error",
    [
        (answer("x", function_call={"name": "f"}), "function_call, which is not supported"),
        (
            answer(None, tool_calls=[{"function": {"arguments": "{}"}}]),
            "a tool call must have a name",
        ),
        (answer(None, tool_calls=[]), "must have role and content as text"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "content that is not text",
        ),
        (
            answer(None, tool_calls=[{"function": {"name": "f", "arguments": "{x"}}]),
            "are not valid JSON",
        ),
        *(
            (answer("x", token_ids=[4, token_id]), "token_ids must be integers")
            for token_id in (-1, 2**70, True, 1.5, "4", None)
        ),
        (answer("x", token_ids="4"), "token_ids must be a list"),
    ],
)
def test_invalid_messages_are_named(invalid_message, error):
    with pytest.raises(ValueError, match=error):
        normalise_example({"messages": [user_message("a?"), invalid_message, answer("x")]})


def test_ids_outside_the_vocabulary_are_invalid(tokenizer):
    chat = normalise_example(
        {"messages": [user_message("a?"), answer("some", token_ids=[len(tokenizer)])]}
    )["chat"]
    with pytest.raises(
        InvalidExample,
        match=r"token_ids are outside the vocabulary \(id 284, vocabulary of 284 ids\)",
    ):
        tokenize_chat(tokenizer, chat)


def test_recorded_token_ids_are_kept(tokenizer):
    """A target may generate other tokens for a text than the tokenizer would. Servers return them
    with `return_token_ids`."""
    text = "some words of text"
    generated_ids = []
    for character in text:
        generated_ids += tokenizer(character)["input_ids"]
    end = tokenizer.convert_tokens_to_ids(END_TOKEN)
    canonical = tokenizer(text)["input_ids"]
    assert generated_ids != canonical
    for recorded, expected in (
        (generated_ids, generated_ids),
        ([*generated_ids, end], generated_ids),
        ([5, 6], canonical),
        ([], canonical),
    ):
        chat = normalise_example(
            {"messages": [user_message("a?"), answer(text, token_ids=recorded), *TWO_TURNS[2:]]}
        )["chat"]
        [(ids, loss)] = tokenize_chat(tokenizer, chat)
        ids_with_loss = [token_id for token_id, has_loss in zip(ids, loss, strict=True) if has_loss]
        assert ids_with_loss[: len(expected) + 1] == [*expected, end]
        assert tokenizer.decode(ids).endswith("B.<|im_end|>\n")

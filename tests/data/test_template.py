"""Chats of all kinds through a template with thinking and tools: what is learnt is what the target wrote, and no more.

The template is written after the behaviour of Qwen3's: thoughts are shown behind the last question only, tools stand in
the system's turn, results of tools in the user's, and a switch writes an empty thought where none is wanted.
"""

import json

import pytest

from data.chat import NothingWhole, normalise
from data.template import sequences, tokenize_chat
from train.pretraining.language_model import train_tokenizer

TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    {{- '# Tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content %}
        {%- set thought = '' %}
        {%- if m.reasoning_content is string %}
            {%- set thought = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- content }}{% endif %}
        {%- for call in m.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{% endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
PLAIN = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
OPENED = PLAIN.replace("m.content", "m.content.split('</think>')[-1]").replace(
    "assistant\\n'", "assistant\\n<think>\\n'"
)
END = "<|im_end|>"
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}]
OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def says(text: str | None, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


def calls(*arguments, name: str = "add", as_text: bool = True) -> list[dict]:
    said = [json.dumps(one) if as_text else one for one in arguments]
    return [{"id": "c", "type": "function", "function": {"name": name, "arguments": one}} for one in said]


def result(text: str) -> dict:
    return {"role": "tool", "tool_call_id": "c", "content": text}


def call_text(x: int) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {{"x": {x}}}}}\n</tool_call>'


SYSTEM = {"role": "system", "content": "Be brief."}
TWO = [user("a?"), says("A."), user("b?"), says("B.")]
THOUGHT_ASIDE = [user("a?"), says("A.", reasoning_content="hm a"), user("b?"), says("B.", reasoning="hm b")]
INLINE = [user("a?"), says("<think>\nhm a\n</think>\n\nA."), user("b?"), says("<think>\nhm b\n</think>\n\nB.")]
TOOL = [user("1+2?"), says(None, tool_calls=calls({"x": 1})), result("3"), says("It is 3.")]
# name: (row, what is learnt: of each sequence, the runs of learnt tokens as text)
CHATS = {
    "two turns": ({"messages": TWO}, [["A." + END, "B." + END]]),
    "system": ({"messages": [SYSTEM, *TWO]}, [["A." + END, "B." + END]]),
    "thinking off": ({"messages": TWO, "chat_template_kwargs": OFF}, [["A." + END, "B." + END]]),
    "thoughts aside": (
        {"messages": THOUGHT_ASIDE},
        [["<think>\nhm a\n</think>\n\nA." + END], ["<think>\nhm b\n</think>\n\nB." + END]],
    ),
    "thoughts inline": (
        {"messages": INLINE, "chat_template_kwargs": ON},
        [["<think>\nhm a\n</think>\n\nA." + END], ["<think>\nhm b\n</think>\n\nB." + END]],
    ),
    "only the first thinks": (
        {"messages": [*THOUGHT_ASIDE[:2], *TWO[2:]]},
        [["<think>\nhm a\n</think>\n\nA." + END], ["B." + END]],
    ),
    "only the last thinks": (
        {"messages": [*TWO[:2], *THOUGHT_ASIDE[2:]]},
        [["A." + END, "<think>\nhm b\n</think>\n\nB." + END]],
    ),
    "cut answer": ({"messages": [*TWO[:3], says("B is", finish="length")]}, [["A." + END, "B is"]]),
    "cut response": ({"messages": TWO[:1], "response": "A is", "finish": "length"}, [["A is"]]),
    "cut in the middle": ({"messages": [user("a?"), says("A is", finish="length"), *TWO[2:]]}, [["A is"]]),
    "cut behind a thought": (
        {"messages": [user("a?"), says("A is", reasoning_content="hm", finish="length")]},
        [["<think>\nhm\n</think>\n\nA is"]],
    ),
    "cut thought aside": (
        {"messages": [*TWO[:3], says(None, reasoning_content="hm, and", finish="length")]},
        [["A." + END]],
    ),
    "cut thought inline": ({"messages": [*TWO[:3], says("<think>\nhm, and", finish="length")]}, [["A." + END]]),
    "only a cut thought": ({"messages": [user("a?"), says("<think>\nhm", finish="length")]}, NothingWhole),
    "tool call": (
        {"messages": TOOL, "tools": TOOLS, "chat_template_kwargs": OFF},
        [[call_text(1) + END, "It is 3." + END]],
    ),
    "tool call with words": (
        {
            "messages": [TOOL[0], says("Let me see.", tool_calls=calls({"x": 1}, as_text=False)), *TOOL[2:]],
            "tools": TOOLS,
        },
        [["Let me see.\n" + call_text(1) + END, "It is 3." + END]],
    ),
    "tool call after a thought": (
        {
            "messages": [TOOL[0], says("", reasoning_content="add", tool_calls=calls({"x": 1})), *TOOL[2:]],
            "tools": TOOLS,
        },
        [["<think>\nadd\n</think>\n\n" + call_text(1) + END, "It is 3." + END]],
    ),
    "two calls at once": (
        {
            "messages": [
                TOOL[0],
                says(None, tool_calls=calls({"x": 1}, {"x": 2})),
                result("3"),
                result("4"),
                says("So."),
            ]
        },
        [[call_text(1) + "\n" + call_text(2) + END, "So." + END]],
    ),
    "a call is the last": ({"messages": [SYSTEM, *TOOL[:2]], "tools": TOOLS}, [[call_text(1) + END]]),
    "a call written by the target as text": (
        {"messages": [TOOL[0], says(call_text(1)), *TOOL[2:]], "tools": json.dumps(TOOLS)},
        [[call_text(1) + END, "It is 3." + END]],
    ),
    "an empty answer": ({"messages": [user("a?"), says(""), *TWO[2:]]}, [[END, "B." + END]]),
    "spaces around": ({"messages": [user("a?"), says("  A. \n")]}, [["  A. \n" + END]]),
    "not all are learnt": ({"messages": [user("a?"), says("A.", weight=0), *TWO[2:]]}, [["B." + END]]),
    "same words everywhere": (
        {"messages": [user("A."), says("A."), user("A."), says("A.")]},
        [["A." + END, "A." + END]],
    ),
    "other letters": ({"messages": [user("同じ"), says("はい 👋"), *TWO[2:]]}, [["はい 👋" + END, "B." + END]]),
}


@pytest.fixture(scope="module")
def tokenizer():
    made = train_tokenizer(["some words of text, and more of them\n"] * 20, 300)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", END]})
    made.chat_template = TEMPLATE
    return made


def learnt(tokenizer, row: dict) -> list[list[str]]:
    found = []
    for ids, loss in tokenize_chat(tokenizer, normalise(row)["chat"]):
        starts = [i for i, on in enumerate(loss) if on and not (i and loss[i - 1])]
        ends = [next((k for k in range(i, len(ids)) if not loss[k]), len(ids)) for i in starts]
        found.append([tokenizer.decode(ids[a:b]) for a, b in zip(starts, ends, strict=True)])
    return found


@pytest.mark.parametrize("name", CHATS)
def test_learnt_tokens_are_what_the_target_wrote(tokenizer, name):
    row, expected = CHATS[name]
    if isinstance(expected, type):
        with pytest.raises(expected):
            normalise(row)
    else:
        assert learnt(tokenizer, row) == expected


def test_a_thought_that_the_template_drops_is_learnt_where_it_was_written(tokenizer):
    """The sequence is the prompt that the target saw, and what it wrote; the rest of the chat follows without it."""
    first, second = (one.text for one in sequences(tokenizer, normalise({"messages": THOUGHT_ASIDE})["chat"]))
    asked = "<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\n"
    assert first == asked + "<think>\nhm a\n</think>\n\nA.<|im_end|>\n"
    assert second.startswith(asked + "A.<|im_end|>\n<|im_start|>user\nb?")


def test_a_template_that_opens_the_thought_itself(tokenizer):
    """DeepSeek-R1's kind: the opening is the prompt's, and no thought is ever shown again."""
    tokenizer.chat_template = OPENED
    said = [["hm a\n</think>\n\nA." + END], ["hm b\n</think>\n\nB." + END]]
    assert learnt(tokenizer, {"messages": INLINE}) == learnt(tokenizer, {"messages": THOUGHT_ASIDE}) == said
    tokenizer.chat_template = TEMPLATE


@pytest.mark.parametrize(
    "template, row, words",
    [
        (PLAIN, {"messages": THOUGHT_ASIDE}, "does not show the thought of answer 1"),
        (PLAIN, {"messages": TOOL}, "does not show the tool calls of answer 1"),
        (PLAIN, {"messages": TWO, "tools": TOOLS}, "does not show tools"),
        (PLAIN.replace("m.content", "(m.content if m.role != 'tool' else '')"),
         {"messages": [*TWO[:3], result("unseen"), *TWO[3:]]}, "the tool's result in message 3"),
        (PLAIN.replace("m.content", "m.content | upper"), {"messages": TWO[:2]}, None),
        (PLAIN.replace("m.content", "m.content | trim"), {"messages": [user("a?"), says(" \n A. \n")]}, None),
        (PLAIN.replace("m.content", "m.content | lower"), {"messages": TWO[:2]}, "does not show answer 1 as it is"),
        (TEMPLATE, {"messages": THOUGHT_ASIDE, "chat_template_kwargs": OFF}, "is told that there is none"),
    ],
)  # fmt: skip
def test_what_a_template_does_not_show_is_named(tokenizer, template, row, words):
    tokenizer.chat_template = template
    if words is None:
        assert learnt(tokenizer, row) == [["A." + END]]
    else:
        with pytest.raises(ValueError, match=words):
            learnt(tokenizer, row)
    tokenizer.chat_template = TEMPLATE


@pytest.mark.parametrize(
    "turn, words",
    [
        (says("x", function_call={"name": "f"}), "old form"),
        (says(None, tool_calls=[{"function": {"arguments": "{}"}}]), "a tool call without a name"),
        (says(None, tool_calls=[]), "without role or content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "a part that is no text"),
        (says(None, tool_calls=[{"function": {"name": "f", "arguments": "{x"}}]), "are no JSON"),
    ],
)
def test_messages_that_cannot_be_read_are_named(turn, words):
    with pytest.raises(ValueError, match=words):
        normalise({"messages": [user("a?"), turn, says("x")]})


def test_ids_of_the_target_are_kept(tokenizer):
    """It may write a text in other tokens than a tokenizer would: `return_token_ids` says in which."""
    text = "some words of text"
    own = [id for word in text for id in tokenizer(word)["input_ids"]]
    end = tokenizer.convert_tokens_to_ids(END)
    canonical = tokenizer(text)["input_ids"]
    assert own != canonical
    for given, wanted in ((own, own), ([*own, end], own), ([5, 6], canonical), ([], canonical)):
        chat = normalise({"messages": [user("a?"), says(text, token_ids=given), *TWO[2:]]})["chat"]
        [(ids, loss)] = tokenize_chat(tokenizer, chat)
        on = [id for id, learnt in zip(ids, loss, strict=True) if learnt]
        assert on[: len(wanted) + 1] == [*wanted, end]
        assert tokenizer.decode(ids).endswith("B.<|im_end|>\n")

"""Chats of all kinds through a template with thinking and tools: what is learnt is what the target
wrote, and no more.

The template (thinking.jinja) is written after the behaviour of Qwen3's: thoughts are shown behind
the last question only, tools stand in the system's turn, results of tools in the user's, and a
switch writes an empty thought where none is wanted.
"""

import json
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace

import pytest

from data.chat import normalise
from data.counts import ExcludedExample, InvalidExample
from data.template import sequences, tokenize_chat
from infer.api import encode

TEMPLATE = Path(__file__).with_name("thinking.jinja").read_text().removesuffix("\n")
PLAIN = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
OPENED = PLAIN.replace("m.content", "m.content.split('</think>')[-1]").replace(
    "assistant\\n'", "assistant\\n<think>\\n'"
)
END = "<|im_end|>"
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}]
OFF, ON = ({"chat_template_kwargs": {"enable_thinking": on}} for on in (False, True))


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def says(text: str | None, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


def calls(*arguments, name: str = "add", as_text: bool = True) -> list[dict]:
    said = [json.dumps(one) if as_text else one for one in arguments]
    return [
        {"id": "c", "type": "function", "function": {"name": name, "arguments": one}}
        for one in said
    ]


def result(text: str) -> dict:
    return {"role": "tool", "tool_call_id": "c", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}
TWO = [user("a?"), says("A."), user("b?"), says("B.")]
THOUGHT_ASIDE = [
    user("a?"),
    says("A.", reasoning_content="hm a"),
    user("b?"),
    says("B.", reasoning="hm b"),
]
INLINE = [
    user("a?"),
    says("<think>\nhm a\n</think>\n\nA."),
    user("b?"),
    says("<think>\nhm b\n</think>\n\nB."),
]
TOOL = [user("1+2?"), says(None, tool_calls=calls({"x": 1})), result("3"), says("It is 3.")]
HM_A = "<think>\nhm a\n</think>\n\nA.#"
HM_B = "<think>\nhm b\n</think>\n\nB.#"
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
# name: (messages, what else the row has, what is learnt of each sequence: runs of tokens as text,
# their end as #)
CHATS = {
    "two turns": (TWO, {}, ["A.# B.#"]),
    "system": ([SYSTEM, *TWO], {}, ["A.# B.#"]),
    "thinking off": (TWO, OFF, ["A.# B.#"]),
    "thoughts aside": (THOUGHT_ASIDE, {}, [HM_A, HM_B]),
    "thoughts inline": (INLINE, ON, [HM_A, HM_B]),
    "only the first thinks": ([*THOUGHT_ASIDE[:2], *TWO[2:]], {}, [HM_A, "B.#"]),
    "only the last thinks": ([*TWO[:2], *THOUGHT_ASIDE[2:]], {}, ["A.# " + HM_B]),
    "cut answer": ([*TWO[:3], says("B is", finish="length")], {}, ["A.# B is"]),
    "cut response": (TWO[:1], {"response": "A is", "finish": "length"}, ["A is"]),
    "cut in the middle": ([user("a?"), says("A is", finish="length"), *TWO[2:]], {}, ["A is"]),
    "cut behind a thought": (
        [user("a?"), says(HM_A[:-1], finish_reason="length")],
        {},
        [HM_A[:-1]],
    ),
    "cut thought aside": (
        [*TWO[:3], says(None, reasoning_content="hm, and", finish="length")],
        {},
        ["A.#"],
    ),
    "cut thought inline": ([*TWO[:3], says("<think>\nhm, and", finish="length")], {}, ["A.#"]),
    "only a cut thought": ([user("a?"), says("<think>\nhm", finish="length")], {}, ExcludedExample),
    "tool call": (TOOL, {"tools": TOOLS} | OFF, [f"{CALL}# It is 3.#"]),
    "tool call with words": (
        [TOOL[0], says("Let me see.", tool_calls=calls({"x": 1}, as_text=False)), *TOOL[2:]],
        {"tools": TOOLS},
        [f"Let me see.\n{CALL}# It is 3.#"],
    ),
    "tool call after a thought": (
        [TOOL[0], says("", reasoning_content="add", tool_calls=calls({"x": 1})), *TOOL[2:]],
        {"tools": TOOLS},
        [f"<think>\nadd\n</think>\n\n{CALL}# It is 3.#"],
    ),
    "two calls at once": (
        [
            TOOL[0],
            says(None, tool_calls=calls({"x": 1}, {"x": 1})),
            result("3"),
            result("4"),
            says("So."),
        ],
        {},
        [f"{CALL}\n{CALL}# So.#"],
    ),
    "a call is the last": ([SYSTEM, *TOOL[:2]], {"tools": TOOLS}, [f"{CALL}#"]),
    "a call as text": (
        [TOOL[0], says(CALL), *TOOL[2:]],
        {"tools": json.dumps(TOOLS)},
        [f"{CALL}# It is 3.#"],
    ),
    "an empty answer": ([user("a?"), says(""), *TWO[2:]], {}, ["# B.#"]),
    "spaces around": ([user("a?"), says("  A. \n")], {}, ["  A. \n#"]),
    "not all are learnt": ([user("a?"), says("A.", weight=0), *TWO[2:]], {}, ["B.#"]),
    "same words everywhere": ([user("A."), says("A."), user("A."), says("A.")], {}, ["A.# A.#"]),
    "other letters": ([user("同じ"), says("はい 👋"), *TWO[2:]], {}, ["はい 👋# B.#"]),
}


@pytest.fixture(scope="module")
def tokenizer(train_tokenizer):
    made = train_tokenizer(["some words of text, and more of them\n"] * 20, 300)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", END]})
    made.chat_template = TEMPLATE
    return made


def learnt(tokenizer, messages: list[dict], **more) -> list[str]:
    found = []
    for ids, loss in tokenize_chat(tokenizer, normalise({"messages": messages} | more)["chat"]):
        runs = groupby(zip(ids, loss, strict=True), itemgetter(1))
        said = [tokenizer.decode([id for id, _ in run]) for on, run in runs if on]
        found.append(" ".join(said).replace(END, "#"))
    return found


@pytest.mark.parametrize("name", CHATS)
def test_learnt_tokens_are_what_the_target_wrote(tokenizer, name):
    messages, more, expected = CHATS[name]
    if expected is ExcludedExample:
        with pytest.raises(ExcludedExample):
            learnt(tokenizer, messages, **more)
    else:
        assert learnt(tokenizer, messages, **more) == expected


def test_a_thought_that_the_template_drops_is_learnt_where_it_was_written(tokenizer):
    """The sequence is the prompt that the target saw, and what it wrote; the rest of the chat
    follows without it."""
    first, second = (
        text for text, _ in sequences(tokenizer, normalise({"messages": THOUGHT_ASIDE})["chat"])
    )
    asked = "<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\n"
    assert first == asked + "<think>\nhm a\n</think>\n\nA.<|im_end|>\n"
    assert second.startswith(asked + "A.<|im_end|>\n<|im_start|>user\nb?")


def test_a_template_that_opens_the_thought_itself(tokenizer, monkeypatch):
    """DeepSeek-R1's kind: the opening is the prompt's, and no thought is ever shown again."""
    monkeypatch.setattr(tokenizer, "chat_template", OPENED)
    said = [text.removeprefix("<think>\n") for text in (HM_A, HM_B)]
    assert learnt(tokenizer, INLINE) == learnt(tokenizer, THOUGHT_ASIDE) == said


# As DeepSeek's templates, which join the arguments of a call to strings.
JOINS = """{{ tools | tojson if tools }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for c in m.tool_calls or [] -%}
{{ '<call>' + c.function.name + '\\n```json\\n' + c.function.arguments + '\\n```</call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
PRINTS = JOINS.replace(
    "+ c.function.arguments +", "~ c.function.arguments ~"
)  # an object would show as Python's


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize("template", [JOINS, PRINTS], ids=["joins", "prints"])
def test_arguments_are_text_for_templates_that_join_them_to_text(
    tokenizer, monkeypatch, template, as_text
):
    """In training data, and as the server and `regenerate` encode a prompt."""
    monkeypatch.setattr(tokenizer, "chat_template", template)
    asked, _, *behind = TOOL
    messages = [asked, says("", tool_calls=calls({"x": True}, {"y": 2}, as_text=as_text)), *behind]
    joined = '<call>add\n```json\n{"x": true}\n```</call><call>add\n```json\n{"y": 2}\n```</call>#'
    assert learnt(tokenizer, messages, tools=TOOLS) == [joined + " It is 3.#"]
    prompt = encode(SimpleNamespace(tokenizer=tokenizer, name="target"), messages[:3], tools=TOOLS)
    assert joined.replace("#", END) in tokenizer.decode(prompt)


def test_arguments_stay_objects_for_templates_that_read_them(tokenizer):
    """Also where a tool's result holds the arguments as Python writes them."""
    messages = [*TOOL[:2], result("{'x': 1}"), says("So.")]
    assert learnt(tokenizer, messages, tools=TOOLS) == [f"{CALL}# So.#"]


NO_RESULTS = PLAIN.replace("m.content", "(m.content if m.role != 'tool' else '')")
TRIMS, RAISES, LOWERS = (
    PLAIN.replace("m.content", f"m.content | {filter}") for filter in ("trim", "upper", "lower")
)


@pytest.mark.parametrize(
    "template, messages, more, words",
    [
        (PLAIN, THOUGHT_ASIDE, {}, "does not show the thought of an answer"),
        (PLAIN, TOOL, {}, "does not show the tool calls of an answer"),
        (PLAIN, TWO, {"tools": TOOLS}, "does not show tools"),
        (
            NO_RESULTS,
            [*TWO[:3], result("unseen"), *TWO[3:]],
            {},
            r"the result of a tool \(message 3",
        ),
        (RAISES, TWO[:2], {}, None),
        (TRIMS, [user("a?"), says(" \n A. \n")], {}, None),
        (LOWERS, TWO[:2], {}, "does not show an answer as it is"),
        (TEMPLATE, THOUGHT_ASIDE, OFF, "is told that there is none"),
    ],
)
def test_what_a_template_does_not_show_is_named(
    tokenizer, monkeypatch, template, messages, more, words
):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    if words is None:
        assert learnt(tokenizer, messages, **more) == ["A.#"]
    else:
        with pytest.raises(ExcludedExample, match=words):
            learnt(tokenizer, messages, **more)


@pytest.mark.parametrize(
    "turn, words",
    [
        (says("x", function_call={"name": "f"}), "old form"),
        (says(None, tool_calls=[{"function": {"arguments": "{}"}}]), "a tool call without a name"),
        (says(None, tool_calls=[]), "without role or content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "a part that is no text",
        ),
        (says(None, tool_calls=[{"function": {"name": "f", "arguments": "{x"}}]), "are no JSON"),
        *(
            (says("x", token_ids=[4, id]), "token_ids are whole numbers")
            for id in (-1, 2**70, True, 1.5, "4", None)
        ),
        (says("x", token_ids="4"), "token_ids is a list"),
    ],
)
def test_messages_that_cannot_be_read_are_named(turn, words):
    with pytest.raises(ValueError, match=words):
        normalise({"messages": [user("a?"), turn, says("x")]})


def test_ids_outside_the_vocabulary_are_invalid(tokenizer):
    chat = normalise({"messages": [user("a?"), says("some", token_ids=[len(tokenizer)])]})["chat"]
    with pytest.raises(
        InvalidExample, match=r"token_ids are outside the vocabulary \(284 of 284\)"
    ):
        tokenize_chat(tokenizer, chat)


def test_ids_of_the_target_are_kept(tokenizer):
    """It may write a text in other tokens than a tokenizer would: `return_token_ids` says in
    which."""
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

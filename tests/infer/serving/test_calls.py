"""Reasoning and tool calls: how answers are parsed, and what OpenAI's client receives."""

import copy
import json

import httpx
import pytest
from llguidance.hf import from_tokenizer

from infer import Engine, load_drafter
from infer.config import EngineConfig
from infer.engine.grammar import compile_grammar, get_grammar_tokenizer as guidance_tokenizer
from infer.serving.calls import TOOL_CALL_FORMATS, AnswerFormat, AnswerParser, find_answer_format
from infer.serving.messages import Tool

WEATHER_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
CALL_TOOLS = [
    Tool("weather", WEATHER_SCHEMA),
    Tool("now", {"type": "object", "properties": {}, "additionalProperties": False}),
]
# It opens the reasoning without containing the tag, as if the model did not reason by itself.
TOOL_TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}<tool_call>\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "\n{% endfor %}{% if add_generation_prompt %}assistant:"
    "{% if thinking %}{{ '<th' + 'ink>\n' }}{% endif %}{% endif %}"
)
WEATHER_CALL = '{"name": "weather", "arguments": {"city": "Ulm", "days": 2}}'
# By format: a text, and its reasoning, content and calls.
FORMAT_SAMPLES = {
    "hermes": (
        "<think>\nHm, < 3.\n</think>\n\nSo: "
        f'\n<tool_call>\n{WEATHER_CALL}\n</tool_call>\n<tool_call>\n{{"name": "now", "arguments": '
        f"{{}}}}\n</tool_call>",
        ("Hm, < 3.", "So:", [("weather", {"city": "Ulm", "days": 2}), ("now", {})]),
    ),
    "tags": (
        "One\n\n<tool_call>\n<function=weather>\n<parameter=city>\nUlm\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
        (None, "One", [("weather", {"city": "Ulm", "days": 2})]),
    ),
    "llama3": (
        f'<|python_tag|>{WEATHER_CALL.replace("arguments", "parameters")}; {{"name": "now", '
        f'"parameters": {{}}}}',
        (None, None, [("weather", {"city": "Ulm", "days": 2}), ("now", {})]),
    ),
    "reasoning": ("<think>a</think> b ", ("a", "b ", [])),
}


def parse_in_steps(answer_format, text, step, tools=CALL_TOOLS, prefix=""):
    """Parse a text in steps of some characters; return the joined reasoning, content and calls."""
    answer = AnswerParser(answer_format, tools, prefix)
    reasoning = ""
    content = ""
    calls = []
    pieces = [text[i : i + step] for i in range(0, len(text), step)] or [""]
    for number, piece in enumerate(pieces):
        delta = answer.parse(piece, number == len(pieces) - 1)
        reasoning += delta.get("reasoning_content", "")
        content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
    return (
        reasoning or None,
        content or None,
        [(name, json.loads(arguments)) for name, arguments in calls],
    )


@pytest.mark.parametrize("name", FORMAT_SAMPLES)
def test_every_format_is_parsed_in_steps_of_every_size(embedded, name):
    text, expected = FORMAT_SAMPLES[name]
    answer_format = AnswerFormat(embedded.tokenizer, TOOL_CALL_FORMATS[name])
    tools = CALL_TOOLS if TOOL_CALL_FORMATS[name].call_field else []
    for step in (1, 2, 3, 7, len(text)):
        assert parse_in_steps(answer_format, text, step, tools) == expected, step


def test_text_that_is_not_a_call_becomes_content(embedded):
    hermes, llama = (
        AnswerFormat(embedded.tokenizer, TOOL_CALL_FORMATS[name]) for name in ("hermes", "llama3")
    )
    for step in (1, 5, 100):
        assert parse_in_steps(hermes, "a <tool_call>\nno\n</tool_call> b", step) == (
            None,
            "a\nno\n b",
            [],
        )
        assert parse_in_steps(hermes, "a < b <tool", step) == (None, "a < b <tool", [])
        assert parse_in_steps(llama, '{"a": 1}', step) == (None, '{"a": 1}', [])
        assert parse_in_steps(hermes, "so</think> b", step, prefix="<think>") == ("so", "b", [])
        call = f"<tool_call>{WEATHER_CALL}</tool_call>"
        assert parse_in_steps(hermes, call, step, tools=()) == (None, call, [])


@pytest.mark.parametrize("family, name", [("qwen3", "hermes"), ("qwen3_5", "tags")])
def test_answers_are_parsed_as_by_the_server_of_transformers(embedded, family, name):
    """With the templates of that server, as the tokenizer's own and compared with our table."""
    from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS as SERVER_TEMPLATES

    response_template = next(
        template for families, template in SERVER_TEMPLATES.items() if family in families
    )
    text, _ = FORMAT_SAMPLES[name]
    shown = [
        {"type": "function", "function": {"name": t.name, "parameters": t.parameters}}
        for t in CALL_TOOLS
    ]
    answer = embedded.tokenizer.parse_response(text, response_template, prefix="", tools=shown)
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in answer["tool_calls"]
    ]
    expected = answer.get("reasoning_content"), answer.get("content"), calls
    assert (
        parse_in_steps(AnswerFormat(embedded.tokenizer, TOOL_CALL_FORMATS[name]), text, 4)
        == expected
    )
    parsed = parse_in_steps(AnswerFormat(embedded.tokenizer, None, response_template), text, 4)
    assert parsed[:2] == expected[:2] and [name for name, _ in parsed[2]] == [
        name for name, _ in calls
    ]


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", ["hermes", "llama3"])
def test_grammars_of_calls_allow_the_calls_of_their_format(embedded, thinking, name):
    answer_format = AnswerFormat(embedded.tokenizer, TOOL_CALL_FORMATS[name])
    grammar = answer_format.build_tool_call_grammar(CALL_TOOLS, True, thinking)
    text = FORMAT_SAMPLES[name][0].removeprefix("<|python_tag|>").partition(";")[0]
    text = text[max(0, text.find("<tool_call>")) :]
    if thinking:
        text = "hm < 3 </think>\n\n" + text
    for words, right in (
        (text, True),
        (text.replace("2", '"x"'), False),
        (text.replace("weather", "wether"), False),
    ):
        matcher = compile_grammar("grammar", grammar, guidance_tokenizer(embedded)).deep_copy()
        ids = embedded.tokenizer(words)["input_ids"]
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == right, (
            words
        )


def test_grammars_support_schema_references_and_special_tokens(embedded):
    """pydantic creates schemas with references. Some tokenizers have marks as special tokens."""
    day = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    parameters = {
        "type": "object",
        "properties": {"day": {"$ref": "#/$defs/Day"}},
        "required": ["day"],
    }
    tool = Tool("plan", parameters | {"$defs": {"Day": day}, "additionalProperties": False})
    tokenizer = copy.deepcopy(embedded.tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>"]})
    guidance = from_tokenizer(tokenizer)
    texts = {
        "hermes": '<tool_call>\n{"name": "plan", "arguments": {"day": {"n": 3}}}\n</tool_call>',
        "llama3": '{"name": "plan", "parameters": {"day": {"n": 3}}}',
    }
    for name, text in texts.items():
        answer_format = AnswerFormat(tokenizer, TOOL_CALL_FORMATS[name])
        grammar = answer_format.build_tool_call_grammar([tool], False, False)
        for words, right in ((text, True), (text.replace("3", "true"), False)):
            matcher = compile_grammar("grammar", grammar, guidance).deep_copy()
            ids = tokenizer(words)["input_ids"]
            assert (
                matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
            ) == right, words
        assert answer_format.needs_special_tokens
    with pytest.raises(ValueError, match="use tool_choice="):
        AnswerFormat(tokenizer, TOOL_CALL_FORMATS["tags"]).build_tool_call_grammar(
            [tool], False, False
        )


@pytest.fixture(scope="module")
def served(running, embedded):
    """The embedded target with a chat template that shows tools."""
    target = copy.copy(embedded)
    target.tokenizer = copy.deepcopy(embedded.tokenizer)
    target.tokenizer.chat_template = TOOL_TEMPLATE
    engine = Engine(
        target,
        load_drafter("embedded"),
        EngineConfig("ddtree", 16, max_num_seqs=2, prefix_cache_mib=64),
        1600,
    )
    with running(engine) as (url, service):
        yield url, service


@pytest.fixture
def client(served):
    openai = pytest.importorskip("openai", reason="needs OpenAI's client")
    with openai.OpenAI(base_url=f"{served[0]}/v1", api_key="none", max_retries=0) as client:
        yield client


TOOL_DEFINITIONS = [
    {"type": "function", "function": {"name": t.name, "parameters": t.parameters}}
    for t in CALL_TOOLS
]
NAMED_TOOL_CHOICE = {"type": "function", "function": {"name": "weather"}}
WEATHER_QUESTION = [{"role": "user", "content": "the weather in Ulm?"}]


@pytest.mark.parametrize("choice", ["required", NAMED_TOOL_CHOICE])
def test_required_calls(client, choice):
    """Complete and streamed answers are the same. The grammar makes the calls of the small target
    valid."""
    settings = {
        "model": "embedded",
        "messages": WEATHER_QUESTION,
        "tools": TOOL_DEFINITIONS,
        "tool_choice": choice,
        "temperature": 0,
    }
    settings |= {"max_tokens": 150, "parallel_tool_calls": False}
    complete = client.chat.completions.create(**settings).choices[0]
    assert complete.finish_reason == "tool_calls" and complete.message.content is None
    [call] = complete.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.id.startswith("call_")
    assert call.function.name in ("weather", "now")[: 1 + (choice == "required")]
    assert call.function.name == "now" or (
        set(arguments) == {"city", "days"} and 1 <= arguments["days"] <= 9
    )
    chunks = list(client.chat.completions.create(stream=True, **settings))
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    deltas = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or ()]
    assert {each.index for each in deltas} == {0} and deltas[0].function.name == call.function.name
    assert "".join(each.function.arguments for each in deltas) == call.function.arguments
    with client.chat.completions.stream(**settings) as stream:
        joined = stream.get_final_completion().choices[0].message.tool_calls
    assert [(each.function.name, each.function.arguments) for each in joined] == [
        (call.function.name, call.function.arguments)
    ]


def test_reasoning_content_and_calls_of_the_model(client):
    """A regular expression makes the target reason, answer and call a tool."""
    reasoning_options = {
        "chat_template_kwargs": {"thinking": True},
        "guided_regex": r"[a-z]{3,9}</think>\n\n[a-z]{3,9}\.",
    }
    settings = {
        "model": "embedded",
        "messages": WEATHER_QUESTION,
        "temperature": 0,
        "max_tokens": 80,
        "extra_body": reasoning_options,
    }
    complete = client.chat.completions.create(**settings).choices[0].message
    assert (
        complete.reasoning_content.isalpha()
        and complete.content[:-1].isalpha()
        and complete.content[-1] == "."
    )
    deltas = [
        chunk.choices[0].delta for chunk in client.chat.completions.create(stream=True, **settings)
    ]
    assert (
        "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        == complete.reasoning_content
    )
    assert "".join(delta.content or "" for delta in deltas) == complete.content
    text = r"Yes\.\n<tool_call>\n\{\"name\": \"now\", \"arguments\": \{\}\}\n</tool_call>"
    settings["extra_body"] = {"guided_regex": text}
    with_tools = client.chat.completions.create(tools=TOOL_DEFINITIONS, **settings).choices[0]
    assert (
        with_tools.message.content == "Yes."
        and with_tools.message.tool_calls[0].function.name == "now"
    )
    assert with_tools.finish_reason == "tool_calls"
    without_tools = client.chat.completions.create(**settings).choices[
        0
    ]  # without tools, the call is content
    assert "<tool_call>" in without_tools.message.content and without_tools.finish_reason == "stop"


def test_a_parsed_answer(client):
    from pydantic import BaseModel, Field

    class City(BaseModel):
        name: str = Field(max_length=6)
        size: int = Field(ge=0, le=99)

    done = client.chat.completions.parse(
        model="embedded",
        messages=WEATHER_QUESTION,
        response_format=City,
        temperature=0,
        max_tokens=80,
    )
    assert isinstance(done.choices[0].message.parsed, City)


@pytest.mark.robustness
def test_an_agent_with_six_turns(served, client):
    """Two functions are called alternately, their results are sent back, and an answer follows."""
    local = {
        "weather": lambda city, days: f"{city[:3]} {'sun ' * (days % 3)}",
        "now": lambda: "12:00",
    }
    messages = list(WEATHER_QUESTION)
    called_names = []
    reused = 0
    for turn in range(6):
        name = ("weather", "now")[turn % 2]
        choice = {"type": "function", "function": {"name": name}}
        done = client.chat.completions.create(
            model="embedded",
            messages=messages,
            tools=TOOL_DEFINITIONS,
            tool_choice=choice,
            temperature=0.7,
            seed=turn,
            max_tokens=120,
        )
        message = done.choices[0].message
        reused = done.usage.prompt_tokens_details.cached_tokens
        messages.append(message)
        for call in message.tool_calls:
            result = local[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            called_names.append(call.function.name)
    assert called_names == ["weather", "now"] * 3 and reused > 150
    counts = dict(
        line.rsplit(" ", 1) for line in httpx.get(f"{served[0]}/metrics").text.splitlines()
    )
    assert float(counts["blockdraft_reused_prompt_tokens_total"]) > 500
    last = client.chat.completions.create(
        model="embedded",
        messages=messages,
        tools=TOOL_DEFINITIONS,
        tool_choice="none",
        temperature=0,
        max_tokens=9,
    )
    assert last.choices[0].message.content and last.choices[0].message.tool_calls is None


WIDE_SCHEMA = {"type": "object", "properties": {f"{i}": {} for i in range(1001)}}
WIDE_TOOL = {
    "type": "function",
    "function": {"name": "a", "parameters": {"type": "array", "items": WIDE_SCHEMA}},
}


@pytest.mark.parametrize(
    "fields, expected_message",
    [
        ({"tools": TOOL_DEFINITIONS[:1] * 2}, "two tools have the same name"),
        ({"tool_choice": "required"}, "a tool that is not in tools"),
        (
            {
                "tools": TOOL_DEFINITIONS,
                "tool_choice": {"type": "function", "function": {"name": "x"}},
            },
            "a tool that is not in tools",
        ),
        (
            {
                "tools": TOOL_DEFINITIONS,
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "constraint json_schema",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
        (
            {"tools": [WIDE_TOOL], "tool_choice": "required"},
            "1001 properties; at most 1000 are allowed",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "a", "parameters": {"type": "x"}}}
                ]
            },
            "grammar",
        ),
    ],
)
def test_invalid_tools_are_refused_with_a_message(served, fields, expected_message):
    fields = {"tool_choice": "required"} | fields if expected_message == "grammar" else fields
    answer = httpx.post(
        f"{served[0]}/v1/chat/completions", json={"messages": WEATHER_QUESTION, **fields}
    )
    assert answer.status_code == 400 and expected_message in answer.json()["error"]["message"]


def test_formats_are_found_by_the_chat_template(embedded):
    tokenizer = copy.deepcopy(embedded.tokenizer)
    for template, name in (
        (TOOL_TEMPLATE, "hermes"),
        ("<tool_call><function=", "tags"),
        ("ipython", "llama3"),
        ("<think>", "reasoning"),
    ):
        tokenizer.chat_template = template
        assert find_answer_format(tokenizer).call_format is TOOL_CALL_FORMATS[name]
    tokenizer.chat_template = "{{ messages }}"
    assert find_answer_format(tokenizer) is None
    tokenizer.response_template = {"start_anchor": "x", "fields": {"content": {}}}
    assert find_answer_format(tokenizer).response_template is not None

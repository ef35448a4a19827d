"""Tools, thoughts and the loops of agents: what OpenAI's client makes of them, and how texts are
told apart."""

import copy
import json

import httpx
import pytest
from llguidance.hf import from_tokenizer

from infer import Engine, load_drafter
from infer.config import EngineConfig
from infer.engine.grammar import compile_grammar, grammar_tokenizer as guidance_tokenizer
from infer.serving.calls import FORMATS, AnswerReader, Reading, reading_of
from infer.serving.protocol import Tool

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    Tool("weather", WEATHER),
    Tool("now", {"type": "object", "properties": {}, "additionalProperties": False}),
]
TEMPLATE = (  # it opens a thought, and does not look as if the model opened any by itself
    "{% if tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}<tool_call>\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if thinking %}{{ '<th' + 'ink>\n' }}{% endif %}{% endif %}"
)
CALL = '{"name": "weather", "arguments": {"city": "Ulm", "days": 2}}'
SAMPLES = {  # a text by its format: thought, words, calls
    "hermes": (
        f"<think>\nHm, < 3.\n</think>\n\nSo: \n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n"
        '{"name": "now", "arguments": {}}\n</tool_call>',
        ("Hm, < 3.", "So:", [("weather", {"city": "Ulm", "days": 2}), ("now", {})]),
    ),
    "tags": (
        "One\n\n<tool_call>\n<function=weather>\n<parameter=city>\nUlm\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>",
        (None, "One", [("weather", {"city": "Ulm", "days": 2})]),
    ),
    "llama3": (
        f'<|python_tag|>{CALL.replace("arguments", "parameters")}; {{"name": "now", "parameters": {{}}}}',
        (None, None, [("weather", {"city": "Ulm", "days": 2}), ("now", {})]),
    ),
    "thoughts": ("<think>a</think> b ", ("a", "b ", [])),
}


def parts(reading, text, step, tools=TOOLS, prefix=""):
    """Read a text in steps of so many letters; return thought, words and calls, as joined
    deltas."""
    answer = AnswerReader(reading, tools, prefix)
    thought = ""
    words = ""
    calls = []
    pieces = [text[i : i + step] for i in range(0, len(text), step)] or [""]
    for number, piece in enumerate(pieces):
        delta = answer.read(piece, number == len(pieces) - 1)
        thought += delta.get("reasoning_content", "")
        words += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
    return (
        thought or None,
        words or None,
        [(name, json.loads(arguments)) for name, arguments in calls],
    )


@pytest.mark.parametrize("name", SAMPLES)
def test_every_format_in_every_piece(embedded, name):
    text, expected = SAMPLES[name]
    reading = Reading(embedded.tokenizer, FORMATS[name])
    tools = TOOLS if FORMATS[name].calls else []
    for step in (1, 2, 3, 7, len(text)):
        assert parts(reading, text, step, tools) == expected, step


def test_what_is_no_call_is_words(embedded):
    hermes, llama = (Reading(embedded.tokenizer, FORMATS[name]) for name in ("hermes", "llama3"))
    for step in (1, 5, 100):
        assert parts(hermes, "a <tool_call>\nno\n</tool_call> b", step) == (None, "a\nno\n b", [])
        assert parts(hermes, "a < b <tool", step) == (None, "a < b <tool", [])
        assert parts(llama, '{"a": 1}', step) == (None, '{"a": 1}', [])
        assert parts(hermes, "so</think> b", step, prefix="<think>") == ("so", "b", [])
        call = f"<tool_call>{CALL}</tool_call>"
        assert parts(hermes, call, step, tools=()) == (None, call, [])


@pytest.mark.parametrize("family, name", [("qwen3", "hermes"), ("qwen3_5", "tags")])
def test_texts_are_read_as_transformers_server_reads_them(embedded, family, name):
    """By the templates of that server, both as the tokenizer's own and beside the row of the
    table."""
    from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS as THEIRS

    own = next(template for families, template in THEIRS.items() if family in families)
    text, _ = SAMPLES[name]
    shown = [
        {"type": "function", "function": {"name": t.name, "parameters": t.parameters}}
        for t in TOOLS
    ]
    said = embedded.tokenizer.parse_response(text, own, prefix="", tools=shown)
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in said["tool_calls"]
    ]
    expected = said.get("reasoning_content"), said.get("content"), calls
    assert parts(Reading(embedded.tokenizer, FORMATS[name]), text, 4) == expected
    mine = parts(Reading(embedded.tokenizer, None, own), text, 4)
    assert mine[:2] == expected[:2] and [name for name, _ in mine[2]] == [name for name, _ in calls]


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", ["hermes", "llama3"])
def test_grammars_of_calls_allow_the_calls_of_their_format(embedded, thinking, name):
    reading = Reading(embedded.tokenizer, FORMATS[name])
    grammar = reading.grammar(TOOLS, True, thinking)
    text = SAMPLES[name][0].removeprefix("<|python_tag|>").partition(";")[0]
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


def test_grammars_know_what_schemas_refer_to_and_special_tokens(embedded):
    """As pydantic makes schemas, and as tokenizers whose marks are special tokens write calls."""
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
        reading = Reading(tokenizer, FORMATS[name])
        grammar = reading.grammar([tool], False, False)
        for words, right in ((text, True), (text.replace("3", "true"), False)):
            matcher = compile_grammar("grammar", grammar, guidance).deep_copy()
            ids = tokenizer(words)["input_ids"]
            assert (
                matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
            ) == right, words
        assert reading.special
    with pytest.raises(ValueError, match="use auto"):
        Reading(tokenizer, FORMATS["tags"]).grammar([tool], False, False)


@pytest.fixture(scope="module")
def served(running, embedded):
    """The embedded target with a chat template that shows tools."""
    target = copy.copy(embedded)
    target.tokenizer = copy.deepcopy(embedded.tokenizer)
    target.tokenizer.chat_template = TEMPLATE
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


SHOWN = [
    {"type": "function", "function": {"name": t.name, "parameters": t.parameters}} for t in TOOLS
]
NAMED = {"type": "function", "function": {"name": "weather"}}
ASKED = [{"role": "user", "content": "the weather in Ulm?"}]


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_calls_that_must_be_made(client, choice):
    """Whole and streamed, the same; the target is small: the grammar makes its calls valid."""
    settings = {
        "model": "embedded",
        "messages": ASKED,
        "tools": SHOWN,
        "tool_choice": choice,
        "temperature": 0,
    }
    settings |= {"max_tokens": 150, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**settings).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    [call] = whole.message.tool_calls
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


def test_thoughts_words_and_calls_of_the_models_own(client):
    """An expression makes the target think, speak, and call."""
    opened = {
        "chat_template_kwargs": {"thinking": True},
        "guided_regex": r"[a-z]{3,9}</think>\n\n[a-z]{3,9}\.",
    }
    settings = {
        "model": "embedded",
        "messages": ASKED,
        "temperature": 0,
        "max_tokens": 80,
        "extra_body": opened,
    }
    whole = client.chat.completions.create(**settings).choices[0].message
    assert (
        whole.reasoning_content.isalpha()
        and whole.content[:-1].isalpha()
        and whole.content[-1] == "."
    )
    deltas = [
        chunk.choices[0].delta for chunk in client.chat.completions.create(stream=True, **settings)
    ]
    assert (
        "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        == whole.reasoning_content
    )
    assert "".join(delta.content or "" for delta in deltas) == whole.content
    text = r"Yes\.\n<tool_call>\n\{\"name\": \"now\", \"arguments\": \{\}\}\n</tool_call>"
    settings["extra_body"] = {"guided_regex": text}
    found = client.chat.completions.create(tools=SHOWN, **settings).choices[0]
    assert found.message.content == "Yes." and found.message.tool_calls[0].function.name == "now"
    assert found.finish_reason == "tool_calls"
    plain = client.chat.completions.create(**settings).choices[
        0
    ]  # without tools it is a text like any other
    assert "<tool_call>" in plain.message.content and plain.finish_reason == "stop"


def test_a_parsed_answer(client):
    from pydantic import BaseModel, Field

    class City(BaseModel):
        name: str = Field(max_length=6)
        size: int = Field(ge=0, le=99)

    done = client.chat.completions.parse(
        model="embedded", messages=ASKED, response_format=City, temperature=0, max_tokens=80
    )
    assert isinstance(done.choices[0].message.parsed, City)


@pytest.mark.robustness
def test_an_agents_loop_of_six_turns(served, client):
    """Two local functions are called in turn, their results are sent back, and the loop ends with
    words."""
    local = {
        "weather": lambda city, days: f"{city[:3]} {'sun ' * (days % 3)}",
        "now": lambda: "12:00",
    }
    messages = list(ASKED)
    made = []
    reused = 0
    for turn in range(6):
        name = ("weather", "now")[turn % 2]
        choice = {"type": "function", "function": {"name": name}}
        done = client.chat.completions.create(
            model="embedded",
            messages=messages,
            tools=SHOWN,
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
            made.append(call.function.name)
    assert made == ["weather", "now"] * 3 and reused > 150
    counts = dict(
        line.rsplit(" ", 1) for line in httpx.get(f"{served[0]}/metrics").text.splitlines()
    )
    assert float(counts["blockdraft_reused_prompt_tokens_total"]) > 500
    last = client.chat.completions.create(
        model="embedded",
        messages=messages,
        tools=SHOWN,
        tool_choice="none",
        temperature=0,
        max_tokens=9,
    )
    assert last.choices[0].message.content and last.choices[0].message.tool_calls is None


WIDE = {"type": "object", "properties": {f"{i}": {} for i in range(1001)}}
WIDE_TOOL = {
    "type": "function",
    "function": {"name": "a", "parameters": {"type": "array", "items": WIDE}},
}


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"tools": SHOWN[:1] * 2}, "two have one name"),
        ({"tool_choice": "required"}, "no such tool"),
        (
            {"tools": SHOWN, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "no such tool",
        ),
        (
            {"tools": SHOWN, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "json_schema too",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
        ({"tools": [WIDE_TOOL], "tool_choice": "required"}, "1001 properties, 1000 may be"),
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
def test_what_cannot_be_called_is_refused_in_a_sentence(served, fields, said):
    fields = {"tool_choice": "required"} | fields if said == "grammar" else fields
    answer = httpx.post(f"{served[0]}/v1/chat/completions", json={"messages": ASKED, **fields})
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]


def test_rows_are_found_by_the_chat_template(embedded):
    tokenizer = copy.deepcopy(embedded.tokenizer)
    for template, name in (
        (TEMPLATE, "hermes"),
        ("<tool_call><function=", "tags"),
        ("ipython", "llama3"),
        ("<think>", "thoughts"),
    ):
        tokenizer.chat_template = template
        assert reading_of(tokenizer).format is FORMATS[name]
    tokenizer.chat_template = "{{ messages }}"
    assert reading_of(tokenizer) is None
    tokenizer.response_template = {"start_anchor": "x", "fields": {"content": {}}}
    assert reading_of(tokenizer).own is not None

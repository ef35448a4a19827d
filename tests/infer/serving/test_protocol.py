"""Requests and responses of OpenAI's API, with OpenAI's client."""

import asyncio
import json
import random
from weakref import WeakKeyDictionary

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessage
from pydantic import ValidationError

from infer import Engine, load_drafter
from infer.config import EngineConfig
from infer.engine import grammar
from infer.serving.config import ServerConfig
from infer.serving.protocol import ChatRequest, PromptRequest
from infer.serving.server import create_app
from infer.targets.loading import load_tokenizer
from infer.utils.chat_template import place_reasoning

QUESTION_MESSAGES = [{"role": "user", "content": "def read(path):"}]
NAMED_TEMPLATE = (
    "{% if shout is defined and shout %}LOUD {% endif %}{% for m in messages %}{% if m.name %}{{ "
    "m.name }}: {% endif %}{% if m.thinking %}({{ m.thinking }}) {% endif %}{{ m['content'] }}{% "
    "endfor %}"
)


@pytest.fixture(scope="module")
def served(running, load_program):
    target, drafter = load_program("fuzz_http").build_small_models()
    target.tokenizer = load_tokenizer("embedded")
    target.tokenizer.chat_template = NAMED_TEMPLATE
    with running(Engine(target, drafter, EngineConfig("ddtree", 6, max_num_seqs=4), 64)) as (
        url,
        service,
    ):
        yield url, service


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served[0]}/v1", api_key="none", max_retries=0) as client:
        yield client


def create_chat(client, messages=QUESTION_MESSAGES, **options):
    return client.chat.completions.create(
        model="embedded", messages=messages, **{"max_tokens": 4, **options}
    )


NEUTRAL_FIELDS = {
    **dict.fromkeys(
        (
            "temperature",
            "top_p",
            "n",
            "stream",
            "logprobs",
            "stop",
            "seed",
            "stream_options",
            "user",
        )
    ),
    **{
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
    },
    **{"store": False, "metadata": {"who": "me"}, "audio": None},
    **{"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "functions": []},
}


@pytest.mark.parametrize("name", NEUTRAL_FIELDS)
def test_neutral_fields_pass(client, name):
    assert create_chat(client, extra_body={name: NEUTRAL_FIELDS[name]}).choices[
        0
    ].finish_reason in ("length", "stop")


def test_an_answer_can_be_sent_back_unchanged(client):
    message = create_chat(client).choices[0].message
    conversation = [*QUESTION_MESSAGES, message.model_dump(), {"role": "user", "content": "on"}]
    assert "refusal" in conversation[1]
    assert create_chat(client, conversation).choices[0].message.role == "assistant"
    assert create_chat(client, [*QUESTION_MESSAGES, message]).choices


ANSWER_FIELDS = {"role": "assistant", "content": "on "}
URL_CITATION = {
    "type": "url_citation",
    "url_citation": {"start_index": 0, "end_index": 2, "title": "a", "url": "b"},
}
LOOK_CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        (
            dict.fromkeys(
                ("refusal", "audio", "function_call", "tool_calls", "annotations", "reasoning")
            ),
            "on ",
        ),
        (
            {"annotations": [URL_CITATION], "provider_specific_fields": {"a": 1}, "tool_calls": []},
            "on ",
        ),
        ({"reasoning_content": "why"}, "(why) on "),
        ({"reasoning": "why"}, "(why) on "),
        ({"thinking": "why"}, "(why) on "),
        ({"reasoning": "why", "reasoning_content": "why"}, "(why) on "),
        ({"name": "Ada"}, "Ada: on "),
        ({"content": None, "refusal": "no "}, "no "),
        ({"content": [{"type": "refusal", "refusal": "no "}]}, "no "),
        ({"content": [{"type": "text", "text": "on ", "annotations": []}]}, "on "),
        (
            {"content": None, "tool_calls": [LOOK_CALL | {"index": 0, "extra_content": {"a": 1}}]},
            "",
        ),
    ],
)
def test_an_answer_of_any_server_can_be_sent_back(served, client, fields, shown):
    """As OpenAI's client returns it, with fields that vLLM, OpenAI and others add."""
    message = ChatCompletionMessage.model_construct(**ANSWER_FIELDS | fields).model_dump(
        warnings=False
    )
    tokens = create_chat(client, [*QUESTION_MESSAGES, message]).usage.prompt_tokens
    assert tokens == len(served[1].target.tokenizer("def read(path):" + shown)["input_ids"])


@pytest.mark.parametrize(
    ("template", "placed"),
    [
        (
            "{{ m.reasoning_content }}{{ m['thinking'] }}",
            {"content": "on", "reasoning_content": "why"},
        ),
        ("{{ m['reasoning'] }}", {"content": "on", "reasoning": "why"}),
        ("{{ m.content.split('</think>')[-1] }}", {"content": "<think>\nwhy\n</think>\n\non"}),
        ("{{ m.content }}", {"content": "on"}),
    ],
)
def test_reasoning_is_placed_where_the_template_reads_it(template, placed):
    message = {"role": "assistant", "content": "on", "reasoning_content": "why"}
    assert place_reasoning([message], template) == [{"role": "assistant"} | placed]


def test_tools_are_refused_without_a_parser(client, monkeypatch):
    """`infer.serving.calls` is an optional package."""
    monkeypatch.setattr(
        "infer.serving.service.ANSWER_FORMAT_ENTRY_POINT", "infer.serving.gone:find_answer_format"
    )
    tools = [{"type": "function", "function": {"name": "now"}}]
    sentence = (
        "tools: the parser of tool calls is not in this installation: infer/serving/gone.py is "
        "missing"
    )
    with pytest.raises(openai.BadRequestError, match=sentence):
        create_chat(client, tools=tools)
    assert (
        create_chat(client, tools=tools, tool_choice="none").choices[0].message.content is not None
    )


STREAM_FIELDS = {"stream": True}


@pytest.mark.parametrize(
    ("fields", "expected_message"),
    [
        ({"stream_options": {"include_usage": True}}, "work with stream=true only"),
        ({"trace": True}, "work with stream=true only"),
        (
            STREAM_FIELDS | {"stream_options": {"include_usages": True}},
            "stream_options.include_usages",
        ),
        ({"top_logprobs": 2}, "top_logprobs works with logprobs=true only"),
        ({"max_completion_tokens": 9}, "max_tokens is the old name of max_completion_tokens"),
        (
            {"messages": [{"role": "user", "contents": "x"}]},
            'messages.0: the message has no field "content"',
        ),
        ({"messages": [{"role": "user", "content": "x", "name": 1}]}, "messages.0.name"),
        (
            {"messages": [{"role": "assistant", "content": None, "audio": {"id": "1"}}]},
            "messages.0.audio",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]},
            "messages.0.tool_calls",
        ),
        *(
            ({name: True}, name)
            for name in ("temperature", "top_p", "n", "seed", "max_tokens", "presence_penalty")
        ),
        ({"temprature": 1}, "temprature"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"store": True}, "store"),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            "chat_template_kwargs.enable_thinking",
        ),
        (
            {"chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}},
            "chat_template_kwargs.chat_template",
        ),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs.tokenize"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ],
)
def test_fields_that_would_have_no_effect_are_named(client, fields, expected_message):
    with pytest.raises(openai.BadRequestError, match=expected_message):
        create_chat(client, extra_body=fields)


def test_the_template_gets_its_options(served, client):
    assert create_chat(
        client, extra_body={"chat_template_kwargs": {"shout": True}}
    ).usage.prompt_tokens == len(served[1].target.tokenizer("LOUD def read(path):")["input_ids"])


def test_a_prompt_counts_once_however_many_answers(served, client):
    tokens = len(served[1].target.tokenizer("def read(path):")["input_ids"])
    assert create_chat(client, n=3).usage.prompt_tokens == tokens
    assert create_chat(client, n=3).usage.total_tokens == tokens + 12
    *_, last = create_chat(client, n=3, stream=True, stream_options={"include_usage": True})
    assert last.usage.prompt_tokens == tokens
    two = client.completions.create(
        model="embedded", prompt=["def read(path):", "x"], n=2, max_tokens=2
    )
    assert two.usage.prompt_tokens == tokens + len(served[1].target.tokenizer("x")["input_ids"])


def test_token_ids_are_returned_on_request(client):
    assert not hasattr(create_chat(client).choices[0], "token_ids")
    answer = create_chat(client, extra_body={"return_token_ids": True})
    ids = answer.choices[0].token_ids
    assert len(ids) == answer.usage.completion_tokens > 0 and all(isinstance(id, int) for id in ids)


def test_curl_without_a_content_type_gets_an_explanation(served):
    form = {"content-type": "application/x-www-form-urlencoded"}
    content = json.dumps({"prompt": "x", "max_tokens": 2})
    answer = httpx.post(f"{served[0]}/v1/completions", content=content, headers=form)
    assert answer.status_code == 400
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def embedded_server(running, embedded):
    with running(
        Engine(embedded, load_drafter("embedded"), EngineConfig("ddtree", 8, max_num_seqs=4), 96)
    ) as (url, _):
        yield url


def test_answers_follow_their_constraint(embedded_server):
    client = openai.OpenAI(base_url=f"{embedded_server}/v1", api_key="none", max_retries=0)
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    named = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema}}
    answer = create_chat(client, response_format=named, max_tokens=40, temperature=0).choices[0]
    assert answer.finish_reason == "length" or json.loads(answer.message.content).keys() == {"ok"}
    for constraint in ({"guided_choice": ["red", 'b"l ue']}, {"guided_regex": 'red|b"l ue'}):
        for stream in (False, True):
            answer = create_chat(client, extra_body=constraint, max_tokens=20, stream=stream)
            if stream:
                text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
            else:
                text = answer.choices[0].message.content
            assert text in ("red", 'b"l ue')
    anything = create_chat(
        client, extra_body={"guided_json": {}}, max_tokens=20, temperature=0
    ).choices[0]
    assert anything.finish_reason == "length" or json.loads(anything.message.content) != ""
    body = {"model": "embedded", "prompt": "x", "guided_grammar": 'start: "a" "b"', "max_tokens": 9}
    assert (
        httpx.post(f"{embedded_server}/v1/completions", json=body).json()["choices"][0]["text"]
        == "ab"
    )


def test_the_grammar_tokenizer_is_built_before_the_first_request(running, embedded, monkeypatch):
    """Building it blocks all threads."""
    monkeypatch.setattr(grammar, "_grammar_tokenizers", WeakKeyDictionary())
    with running(Engine(embedded, None, EngineConfig("plain"), 96)):
        assert embedded.tokenizer in grammar._grammar_tokenizers


def test_every_malformed_field_is_refused_with_a_message(load_program):
    """Every field of both requests, nested ones included, gets a value of every JSON type."""
    program = load_program("fuzz_http")
    app = create_app(
        Engine(program.build_small_models()[0], None, EngineConfig("plain", max_num_seqs=2), 64),
        ServerConfig(),
    )
    service = app.state.service
    refused = set()

    async def send_all() -> None:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client:
            for path, field, value, body in program.generate_wrong_values():
                content = program.dump_request(body, random.Random(0))
                answer = await client.post(
                    path, content=content, headers={"content-type": "application/json"}
                )
                assert answer.status_code in (
                    (200, 400, 404) if field == ("model",) else (200, 400)
                ), (field, value, answer.text)
                if answer.status_code != 200:
                    refused.add(field[-1])
                    assert len(answer.json()["error"]["message"].split()) > 1, (
                        field,
                        value,
                        answer.text,
                    )

    service.start()
    asyncio.run(send_all())
    service.stop()
    assert refused >= {*program.PromptRequest.model_fields, *program.ChatRequest.model_fields}


@pytest.mark.parametrize(
    "constraint, expected_message",
    [
        ({"guided_regex": "("}, "regex"),
        ({"guided_json": {"type": "nonsense"}}, "json_schema"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex and guided_choice"),
        ({"response_format": {"type": "json_schema"}}, "requires json_schema.schema"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a{3000000}"}, "forces more than 2048 bytes"),
        (
            {"guided_regex": "(x|y)(((((a{100}){100}){100}){100}){100})"},
            "forces more than 2048 bytes",
        ),
        ({"guided_json": {"const": "a" * 5000}}, "forces more than 2048 bytes"),
        ({"guided_regex": "(" + "a?" * 20_000 + "a" * 20_000 + ")*"}, "takes more than 1 s"),
    ],
)
def test_invalid_constraints_are_refused(embedded_server, constraint, expected_message):
    client = openai.OpenAI(base_url=f"{embedded_server}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match=expected_message):
        create_chat(client, extra_body=constraint)


def named_schema(properties: int) -> dict:
    return {
        "type": "object",
        "properties": {f"p{i}": {"type": "string"} for i in range(properties)},
    }


@pytest.mark.parametrize(
    "constraint, expected_message",
    [
        ({"guided_json": named_schema(10_000)}, "characters; at most 65536 are allowed"),
        ({"guided_json": named_schema(2_000)}, "2000 properties; at most 1000 are allowed"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": named_schema(2_000)},
                }
            },
            "at most 1000 are allowed",
        ),
        ({"guided_regex": "a" * 70_000}, "characters; at most 65536 are allowed"),
    ],
)
def test_large_constraints_are_refused_before_they_are_compiled(
    served, client, monkeypatch, constraint, expected_message
):
    """Compiling one takes a second, in which other requests wait."""
    monkeypatch.setattr(served[1].grammar_sandbox, "check", None)
    with pytest.raises(openai.BadRequestError, match=expected_message):
        create_chat(client, extra_body=constraint)


@pytest.mark.parametrize(
    ("request_class", "body"),
    [
        (PromptRequest, {"prompt": [1, "a", [1]] * 30_000}),
        (PromptRequest, {"prompt": [[1]] * 100_000}),
        (ChatRequest, {"messages": [{}] * 100_000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * 100_000}]}),
        (ChatRequest, {"messages": QUESTION_MESSAGES} | {f"unknown{i}": 1 for i in range(50_000)}),
        (
            ChatRequest,
            {"messages": QUESTION_MESSAGES, "metadata": {f"key{i}": 1 for i in range(50_000)}},
        ),
    ],
)
def test_one_of_many_errors_is_reported(request_class, body):
    """Reporting all of them would block the event loop for seconds."""
    with pytest.raises(ValidationError) as refusal:
        request_class.model_validate(body)
    assert refusal.value.error_count() <= 3

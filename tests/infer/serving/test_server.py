"""The server works with OpenAI's client, refuses invalid requests, and answers many clients."""

import io
import json
import socket

import httpx
import openai
import pytest
import torch
from rich.console import Console

from infer import Engine, generate
from infer.cli.chat import ChatCommand, print_answer, run as chat
from infer.config import DrafterConfig, EngineConfig
from infer.drafters.build import create_drafter
from infer.engine.sampling import derive_seed
from infer.serving.config import ServerConfig
from infer.serving.service import CompletionService
from infer.utils.errors import RunAborted

SERVER_CAPACITY = 256


@pytest.fixture(scope="module")
def drafter(shallow_target):
    """An untrained drafter with layers of the target, so that some drafts are accepted."""
    drafter = create_drafter(DrafterConfig(layers=2, block_size=6), shallow_target)
    drafter.init_weights(torch.Generator().manual_seed(0))
    drafter.warm_start(shallow_target)
    return drafter


@pytest.fixture(scope="module")
def served(running, shallow_target, drafter):
    engine = Engine(
        shallow_target, drafter, EngineConfig("ddtree", 12, max_num_seqs=8), SERVER_CAPACITY
    )
    with running(engine, max_requests=300, max_body_bytes=20_000) as (url, service):
        yield url, service


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served[0]}/v1", api_key="none", max_retries=0) as client:
        yield client


def baseline_text(shallow_target, prompt, **options) -> str:
    return generate(shallow_target, None, prompt, method="plain", **options).text


def test_completions_are_those_of_the_target(client, shallow_target):
    prompts = ["import os\n\ndef", "class Reader:\n"]
    done = client.completions.create(model="embedded", prompt=prompts, max_tokens=40, temperature=0)
    assert [choice.text for choice in done.choices] == [
        baseline_text(shallow_target, prompt, max_new_tokens=40) for prompt in prompts
    ]
    assert [choice.index for choice in done.choices] == [0, 1]
    assert {choice.finish_reason for choice in done.choices} <= {"length", "stop"}
    assert done.usage.completion_tokens <= 80 and done.usage.prompt_tokens == sum(
        len(shallow_target.tokenizer(prompt)["input_ids"]) for prompt in prompts
    )


def test_a_seed_determines_the_text_with_and_without_streaming(client, shallow_target):
    settings = {"max_tokens": 24, "temperature": 0.8, "top_p": 0.9, "seed": 5}
    expected = baseline_text(
        shallow_target, "def walk(", max_new_tokens=24, temperature=0.8, top_p=0.9, seed=5
    )
    complete = client.completions.create(model="embedded", prompt="def walk(", **settings)
    assert complete.choices[0].text == expected
    options = {"include_usage": True}
    chunks = list(
        client.completions.create(
            model="embedded", prompt="def walk(", stream=True, stream_options=options, **settings
        )
    )
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == expected
    assert chunks[-1].usage == complete.usage
    assert [c.finish_reason for chunk in chunks for c in chunk.choices][-1] == complete.choices[
        0
    ].finish_reason
    two = client.completions.create(model="embedded", prompt="def walk(", n=2, **settings)
    assert two.choices[0].text == expected
    second = baseline_text(
        shallow_target,
        "def walk(",
        max_new_tokens=24,
        temperature=0.8,
        top_p=0.9,
        seed=derive_seed(5, 1),
    )
    assert two.choices[1].text == second != expected
    three = client.completions.create(model="embedded", prompt=["def walk("] * 3, **settings)
    assert [choice.text for choice in three.choices][:2] == [expected, second]
    assert len({choice.text for choice in three.choices}) == 3


def test_stop_strings_and_log_probabilities(client, shallow_target):
    full = baseline_text(shallow_target, "import os\n", max_new_tokens=60)
    stop = full[20:23]
    done = client.completions.create(
        model="embedded",
        prompt="import os\n",
        max_tokens=60,
        temperature=0,
        stop=[stop, "never"],
        logprobs=3,
    )
    choice = done.choices[0]
    assert choice.text == full[: full.index(stop)] and choice.finish_reason == "stop"
    assert (
        len(choice.logprobs.tokens)
        == len(choice.logprobs.token_logprobs)
        == done.usage.completion_tokens
    )
    for token, logprob, top in zip(
        choice.logprobs.tokens,
        choice.logprobs.token_logprobs,
        choice.logprobs.top_logprobs,
        strict=True,
    ):
        assert top[token] == pytest.approx(logprob) == pytest.approx(max(top.values()))


def test_chat_through_the_template(client, shallow_target):
    messages = [{"role": "user", "content": "def read(path):"}]
    expected = baseline_text(shallow_target, messages, max_new_tokens=30)
    messages_with_parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "def read"}, {"type": "text", "text": "(path):"}],
        }
    ]
    for equivalent_messages in (messages, messages_with_parts):
        done = client.chat.completions.create(
            model="embedded", messages=equivalent_messages, max_tokens=30, temperature=0
        )
        assert (
            done.choices[0].message.content == expected
            and done.choices[0].message.role == "assistant"
        )
    stream = client.chat.completions.create(
        model="embedded",
        messages=messages,
        max_tokens=30,
        temperature=0,
        stream=True,
        logprobs=True,
        top_logprobs=2,
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert chunks[0].choices[0].delta.role == "assistant"
    entries = [
        entry
        for chunk in chunks
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [len(entry.top_logprobs) for entry in entries] == [2] * len(entries) and entries


def test_models_health_metrics(served, client):
    url, service = served
    assert [model.id for model in client.models.list()] == ["embedded"]
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    client.completions.create(model="embedded", prompt="x", max_tokens=9, temperature=0)
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    assert float(values["blockdraft_generated_tokens_total"]) >= 9
    assert float(values["blockdraft_rounds_total"]) >= 1
    assert float(values["blockdraft_drafted_tokens_total"]) == 12 * float(
        values["blockdraft_rounds_total"]
    )


@pytest.mark.parametrize(
    ("body", "status", "expected_message"),
    [
        ({"prompt": "x", "model": "gpt-9"}, 404, "this server has no model 'gpt-9'"),
        ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        (
            {"prompt": "x", "max_tokens": SERVER_CAPACITY + 1},
            400,
            f"at most {SERVER_CAPACITY} are possible; shorten the prompt or lower max_new_tokens",
        ),
        ({"prompt": "x" * 3000, "max_tokens": 1}, 400, "shorten the prompt or lower"),
        ({"prompt": ""}, 400, "at least one token"),
        ({"prompt": []}, 400, "at least 1 item"),
        ({"prompt": [[]]}, 400, "at least one token"),
        ({"prompt": [1, 10**12]}, 400, "the model has only the ids"),
        ({"prompt": [1, -1]}, 400, "the model has only the ids"),
        ({"prompt": {"a": 1}}, 400, "prompt"),
        ({}, 400, "prompt"),
        ({"prompt": "x", "temperature": -1}, 400, "temperature"),
        ({"prompt": "x", "temperature": 1e-9}, 400, "temperature"),
        ({"prompt": "x", "temperature": float("nan")}, 400, "temperature"),
        ({"prompt": "x", "top_p": 0}, 400, "top_p"),
        ({"prompt": "x", "seed": 2**80}, 400, "seed"),
        ({"prompt": "x", "stop": ["a"] * 17}, 400, "stop"),
        ({"prompt": "x", "stop": [""]}, 400, "stop"),
        ({"prompt": "x", "logprobs": 21}, 400, "logprobs"),
        ({"prompt": "x", "best_of": 4}, 400, "best_of"),
        ({"prompt": "x", "temprature": 1}, 400, "temprature"),
        ({"prompt": ["x"] * 100, "n": 16}, 400, "1600 sequences"),
        ({"prompt": "x" * 30_000}, 413, "20000 bytes"),
    ],
)
def test_invalid_requests_get_a_message(served, body, status, expected_message):
    content = json.dumps(body)
    response = httpx.post(
        f"{served[0]}/v1/completions", content=content, headers={"content-type": "application/json"}
    )
    assert response.status_code == status, response.text
    assert expected_message in response.json()["error"]["message"]


def test_malformed_http_requests_are_refused(served, client):
    url, _ = served
    json_type = {"content-type": "application/json"}
    assert httpx.post(f"{url}/v1/completions", content=b"{", headers=json_type).status_code == 400
    assert (
        httpx.post(f"{url}/v1/completions", content=b"\xff\xfe", headers=json_type).status_code
        == 400
    )
    assert (
        httpx.post(f"{url}/v1/completions", content=b"[" * 15_000, headers=json_type).status_code
        == 400
    )
    assert httpx.get(f"{url}/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert httpx.get(f"{url}/v1/completions").status_code == 405
    endless = (b" " * 1000 for _ in range(1000))  # no content-length
    assert (
        httpx.post(f"{url}/v1/completions", content=endless, headers=json_type).status_code == 413
    )
    with pytest.raises(openai.BadRequestError, match="at least one token"):
        client.completions.create(model="embedded", prompt="")
    with pytest.raises(openai.NotFoundError, match="this server has no model"):
        client.completions.create(model="other", prompt="x")


@pytest.mark.robustness
def test_many_clients_get_correct_outputs_whatever_others_send(start_command):
    """Some clients stream, close early, or send malformed or large requests. All others get the
    output of the target for their own prompt."""
    arguments = ["--requests", "160", "--clients", "40", "--margin", "1000"]
    assert "\n0 faults" in start_command("tests/robustness/fuzz_http.py", arguments).finish()


def test_a_full_server_gives_status_429(running, idle, shallow_target, drafter):
    engine = Engine(
        shallow_target, drafter, EngineConfig("ddtree", 12, max_num_seqs=1), SERVER_CAPACITY
    )
    with running(engine, max_requests=2) as (url, service):
        body = {"prompt": ["a", "b"], "max_tokens": 250, "stream": True, "temperature": 0}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
            assert response.status_code == 200
            refused = httpx.post(f"{url}/v1/completions", json={"prompt": "c"})
            assert (
                refused.status_code == 429
                and "try again later" in refused.json()["error"]["message"]
            )
        assert (
            idle(service) and service.metrics.tokens._value.get() < 400
        )  # of 500: generation stops when the client disconnects
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "c"}).status_code == 200


def test_chat_in_the_terminal_colours_drafts(running, scripted_drafter, embedded):
    messages = [{"role": "user", "content": "import os\n"}]
    reference = generate(embedded, None, messages, method="plain", max_new_tokens=40)
    prompt = embedded.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True
    )
    drafter = scripted_drafter(
        [prompt["input_ids"] + reference.ids] * 2, 6, embedded.config.vocab_size
    )
    console = Console(record=True, force_terminal=True, width=200, file=io.StringIO())
    with running(
        Engine(embedded, drafter, EngineConfig("chain", 5, max_num_seqs=1), SERVER_CAPACITY)
    ) as (url, _):
        config = ChatCommand(url=url, max_tokens=40)
        with httpx.Client(base_url=config.url, timeout=60) as http:
            message = print_answer(http, messages, config, console)
            plain_console = Console(file=io.StringIO(), color_system=None, record=True)
            print_answer(http, messages, config, plain_console)
    assert message["content"] == reference.text and plain_console.export_text().startswith(
        reference.text
    )  # no rejected drafts without colours
    printed = console.export_text(styles=True)
    assert "\x1b[9;31m" in printed  # struck through: rejected by the target
    assert "\x1b[1;33m" in printed and "a round" in printed


def test_chat_serves_its_target_until_it_ends(shallow_target, drafter, monkeypatch):
    engine = Engine(
        shallow_target, drafter, EngineConfig("ddtree", 12, max_num_seqs=1), SERVER_CAPACITY
    )
    monkeypatch.setattr("infer.cli.chat.open_and_describe_engine", lambda config: (engine, ""))
    with socket.create_server(("127.0.0.1", 0)) as free:
        config = ChatCommand(max_tokens=10, server=ServerConfig(port=free.getsockname()[1]))
    console = Console(file=io.StringIO(), record=True)
    typed_lines = iter(["import os", ""])
    monkeypatch.setattr(console, "input", lambda _: next(typed_lines))
    chat(config, console)
    assert "[10 tokens in" in console.export_text()
    with pytest.raises(httpx.ConnectError):
        httpx.get(config.server.url)


def test_chat_reports_why_its_server_ended(shallow_target, drafter, monkeypatch):
    engine = Engine(
        shallow_target, drafter, EngineConfig("ddtree", 12, max_num_seqs=1), SERVER_CAPACITY
    )
    monkeypatch.setattr("infer.cli.chat.open_and_describe_engine", lambda config: (engine, ""))
    with socket.create_server(("127.0.0.1", 0)) as other_server:
        config = ChatCommand(server=ServerConfig(port=other_server.getsockname()[1]))
        with pytest.raises(RunAborted, match=f"{config.server.url}: .*address already in use"):
            chat(config)
    monkeypatch.setattr(CompletionService, "start", lambda self: 1 / 0)
    with pytest.raises(RunAborted, match="could not be started, see the error above"):
        chat(config)


def test_chat_without_a_server_gives_one_sentence():
    with pytest.raises(
        ValueError, match="no server answers at http://127.0.0.1:9.*launch.sh serve"
    ):
        chat(ChatCommand(url="http://127.0.0.1:9"))

"""Failures of the engine cost only the sequences that caused them. An engine that cannot be reset
ends the process."""

import json
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import httpx
import pytest
import torch

from infer import Engine, generate
from infer.config import EngineConfig
from infer.serving import server as server_module, service as service_module
from infer.serving.config import ServerConfig
from infer.serving.worker import ENGINE_LOST_MESSAGE
from infer.utils.errors import RunAborted

REQUEST_BODY = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def engine(pair):
    return Engine(*pair, EngineConfig("ddtree", 6, max_num_seqs=3), 64)


@pytest.fixture(scope="module")
def reference_texts(pair):
    """Twelve prompts and the outputs of the target alone."""
    prompts = [f"def f{i}(" for i in range(12)]
    options = {"method": "plain", "max_new_tokens": REQUEST_BODY["max_tokens"], "ignore_eos": True}
    answers = generate(pair[0], None, prompts, **options)
    return {prompt: answer.text for prompt, answer in zip(prompts, answers, strict=True)}


def fail_first_calls(function, times: int = 1):
    """Return a function that raises at its first calls."""
    remaining_failures = [times]

    def call_or_fail(*args, **kwargs):
        if remaining_failures[0]:
            remaining_failures[0] -= 1
            raise RuntimeError("out of memory")
        return function(*args, **kwargs)

    return call_or_fail


def inject(step: str, engine: Engine, service, patch, times: int = 1) -> None:
    """Make a step of the engine's thread fail at its next calls."""
    owner, name = {
        "submit": (engine, "submit"),
        "admit": (engine.target, "extend_cache"),
        "enter": (engine.runner, "prepare_for_decoding"),
        "draft": (engine.runner.drafter, "draft_block"),
        "verify": (engine.target, "verify"),
        "commit": (engine.runner, "_copy_to_host"),
        "free": (engine.runner, "release_finished_rows"),
        "send": (service.worker, "_send_new_tokens"),
    }[step]
    patch.setattr(owner, name, fail_first_calls(getattr(owner, name), times))


@pytest.mark.parametrize(
    "step", ["submit", "admit", "enter", "draft", "verify", "commit", "free", "send"]
)
def test_an_error_in_any_step_costs_only_its_sequence(
    running, idle, engine, reference_texts, step, monkeypatch
):
    """Twelve prompts share three batch rows. A sequence that cannot be submitted or sent gets 500.
    Those of a failed round are decoded again, and all other outputs are correct.
    """
    with running(engine) as (url, service), httpx.Client(base_url=url, timeout=60) as client:

        def ask(prompt: str) -> httpx.Response:
            return client.post("/v1/completions", json=REQUEST_BODY | {"prompt": prompt})

        with monkeypatch.context() as patch, ThreadPoolExecutor(12) as pool:
            inject(step, engine, service, patch)
            answers = list(pool.map(ask, reference_texts))
        failed = [answer for answer in answers if answer.status_code == 500]
        assert (step in ("submit", "send")) <= len(failed) <= 1  # one may be alone in its round
        assert all("the engine failed on this request" in answer.text for answer in failed)
        for answer, text in zip(answers, reference_texts.values(), strict=True):
            assert answer.status_code == 500 or answer.json()["choices"][0]["text"] == text
        for prompt, text in [*reference_texts.items()][:4]:
            assert ask(prompt).json()["choices"][0]["text"] == text
        assert idle(service) and engine.runner.batch_state.cache.lengths == []


def test_a_stream_continues_after_a_failed_round(running, engine, monkeypatch):
    """Nothing is sent twice, and log-probabilities and counts are those of the tokens."""
    with running(engine) as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        body = REQUEST_BODY | {"prompt": "def f(", "max_tokens": 40, "logprobs": 1, "stream": True}

        def read_stream() -> tuple[str, list[str], list[float]]:
            with client.stream("POST", "/v1/completions", json=body) as answer:
                events = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
            choices = [json.loads(event)["choices"][0] for event in events]
            logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
            return (
                "".join(choice["text"] for choice in choices),
                [token for entry in logprobs for token in entry["tokens"]],
                [value for entry in logprobs for value in entry["token_logprobs"]],
            )

        text, tokens, logprobs = read_stream()
        assert len(tokens) == len(logprobs) == 40
        calls = []
        to_host = engine.runner._copy_to_host

        def fail_third_shared_round(*args):
            # A sequence that fails alone would be given up.
            is_shared = len(engine.scheduler.running) == 2
            calls.append(is_shared)
            if is_shared and calls.count(True) == 3:
                raise RuntimeError("out of memory")
            return to_host(*args)

        monkeypatch.setattr(engine.runner, "_copy_to_host", fail_third_shared_round)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(
                client.post,
                "/v1/completions",
                json=REQUEST_BODY | {"prompt": "x", "max_tokens": 50},
            )
            again = read_stream()
            assert other.result().status_code == 200
        assert calls.count(True) >= 3
        assert again[:2] == (text, tokens)
        assert again[2] == pytest.approx(logprobs, abs=1e-4)


def test_old_caches_are_freed_before_new_ones_are_allocated(engine, monkeypatch):
    cache = engine.target.allocate_cache

    def check_and_create(*sizes):
        assert engine.runner.batch_state is None and engine.runner.prefill_batch is None
        return cache(*sizes)

    monkeypatch.setattr(engine.target, "allocate_cache", check_and_create)
    engine.reset()
    assert engine.runner.batch_state is not None


def test_an_engine_that_is_lost_answers_every_request_and_ends_the_process(
    pair, monkeypatch, free_port
):
    """Running and waiting requests get 500, later ones no connection, and `serve` raises
    RunAborted."""
    engine = Engine(*pair, EngineConfig("ddtree", 6, max_num_seqs=1), 64)
    errors = []
    options = ServerConfig(port=free_port)
    listening = threading.Event()

    def serve() -> None:
        try:
            server_module.serve(engine, options, listening.set)
        except RunAborted as error:
            errors.append(str(error))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert listening.wait(60)
    url = f"http://127.0.0.1:{free_port}/v1/completions"
    monkeypatch.setattr(
        engine.runner, "decode_round", fail_first_calls(engine.runner.decode_round, 99)
    )
    monkeypatch.setattr(
        engine.target, "allocate_cache", fail_first_calls(engine.target.allocate_cache, 99)
    )
    with ThreadPoolExecutor(5) as pool:
        answers = list(
            pool.map(
                lambda i: httpx.post(url, json=REQUEST_BODY | {"prompt": f"x{i}"}, timeout=60),
                range(5),
            )
        )
    assert {answer.status_code for answer in answers} <= {500, 503}
    thread.join(60)
    assert errors == [ENGINE_LOST_MESSAGE]
    with pytest.raises(httpx.ConnectError):
        httpx.post(url, json=REQUEST_BODY | {"prompt": "x"})


def test_a_request_after_the_engine_has_ended_gets_503(running, engine):
    with running(engine) as (url, service):
        service.worker.inbox.put(None)
        service.worker.join(20)
        service.worker.failure = ENGINE_LOST_MESSAGE
        answer = httpx.post(f"{url}/v1/completions", json=REQUEST_BODY | {"prompt": "x"})
        assert answer.status_code == 503 and "could not be restarted" in answer.text
        assert httpx.get(f"{url}/health").status_code == 503


@pytest.mark.parametrize("slow_step", ["prompt", "grammar"])
def test_other_requests_are_answered_while_one_is_prepared(running, engine, monkeypatch, slow_step):
    """Tokenising a long prompt and compiling a grammar do not block the event loop."""
    started = threading.Event()
    others_answered = threading.Event()
    encode = service_module.encode_prompt

    def wait_for_others(*arguments):
        started.set()
        assert others_answered.wait(60)
        return encode(*arguments) if slow_step == "prompt" else None

    with running(engine) as (url, service), ThreadPoolExecutor(1) as other:
        if slow_step == "prompt":
            monkeypatch.setattr(service_module, "encode_prompt", wait_for_others)
        else:
            monkeypatch.setattr(service.grammar_sandbox, "check", wait_for_others)
        shape = {"guided_regex": "[ab]+"} if slow_step == "grammar" else {}
        slow = other.submit(
            httpx.post,
            f"{url}/v1/completions",
            json=REQUEST_BODY | {"prompt": "x"} | shape,
            timeout=60,
        )
        assert started.wait(60)
        assert httpx.get(f"{url}/health", timeout=20).status_code == 200
        others_answered.set()
        assert slow.result().status_code == (
            200 if slow_step == "prompt" else 400
        )  # grammars need an end token, which this target lacks


def test_a_request_without_memory_gets_503(running, engine, monkeypatch):
    with running(engine) as (url, _):
        with monkeypatch.context() as patch:
            patch.setattr(service_module, "encode_prompt", Mock(side_effect=MemoryError))
            answer = httpx.post(f"{url}/v1/completions", json=REQUEST_BODY | {"prompt": "x"})
            assert (
                answer.status_code == 503 and "short of memory" in answer.json()["error"]["message"]
            )
        assert (
            httpx.post(f"{url}/v1/completions", json=REQUEST_BODY | {"prompt": "x"}).status_code
            == 200
        )


@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError])
def test_a_round_without_memory_gets_503(running, engine, monkeypatch, kind):
    with running(engine) as (url, _):
        with monkeypatch.context() as patch:
            patch.setattr(engine.runner, "decode_round", Mock(side_effect=kind))
            answer = httpx.post(
                f"{url}/v1/completions", json=REQUEST_BODY | {"prompt": "x"}, timeout=60
            )
            assert (
                answer.status_code == 503 and "short of memory" in answer.json()["error"]["message"]
            )
        assert (
            httpx.post(f"{url}/v1/completions", json=REQUEST_BODY | {"prompt": "x"}).status_code
            == 200
        )


def test_serve_prints_its_address_and_ends_with_a_sentence(start_command, free_port):
    """Baseline decoding needs no checkpoint. Ctrl-C shows no traceback and ends streams with a
    message."""
    options = ["decoding=plain", f"server.port={free_port}", "server.max_length=200"]
    server = start_command("infer/main.py", ["serve", *options])
    while "talk to it" not in server.output.read_text():
        assert server.poll() is None, server.output.read_text()
        time.sleep(0.02)
    assert f"http://127.0.0.1:{free_port}/v1: plain" in server.output.read_text()
    assert httpx.get(f"http://127.0.0.1:{free_port}/health").status_code == 200
    body = {"prompt": "import", "n": 16, "max_tokens": 190, "ignore_eos": True, "stream": True}
    with httpx.stream(
        "POST", f"http://127.0.0.1:{free_port}/v1/completions", json=body, timeout=60
    ) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        server.send_signal(signal.SIGINT)
        *_, last = filter(None, lines)
    output = server.finish(130)
    assert "stopped by Ctrl-C" in output and "Traceback" not in output and "Cancel" not in output
    assert "the server was stopped" in last or last == "data: [DONE]"


def test_a_server_with_a_used_port_raises_an_error(engine, free_port):
    other_server = socket.create_server(("127.0.0.1", free_port))
    with (
        other_server,
        pytest.raises(
            RunAborted, match=f"127.0.0.1:{free_port}: .* already in use; choose another"
        ),
    ):
        server_module.serve(
            engine, ServerConfig(port=free_port), lambda: pytest.fail("it does not listen")
        )


def test_ctrl_c_in_the_chat_gives_one_sentence(start_command, free_port):
    """Ctrl-C while the server does not answer."""
    import socket

    with socket.create_server(("127.0.0.1", free_port)) as listening:
        chat = start_command("infer/main.py", ["chat", f"url=http://127.0.0.1:{free_port}"])
        listening.settimeout(120)
        connection, _ = listening.accept()
        time.sleep(0.2)
        chat.send_signal(signal.SIGINT)
        output = chat.finish(130)
        assert "stopped by Ctrl-C" in output and "Traceback" not in output
        connection.close()

"""What fails in the engine costs the texts that it concerns, and no more; an engine that is lost
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
from infer.serving import server as server_module
from infer.serving.config import ServerConfig
from infer.utils.errors import Stopped

BODY = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def engine(pair):
    return Engine(*pair, EngineConfig("ddtree", 6, max_num_seqs=3), 64)


@pytest.fixture(scope="module")
def right(pair):
    """Twelve prompts, and what the target alone writes to them."""
    prompts = [f"def f{i}(" for i in range(12)]
    options = {"method": "plain", "max_new_tokens": BODY["max_tokens"], "ignore_eos": True}
    answers = generate(pair[0], None, prompts, **options)
    return {prompt: answer.text for prompt, answer in zip(prompts, answers, strict=True)}


def failing(function, times: int = 1):
    """The function, which raises at its first calls."""
    left = [times]

    def fails(*args, **kwargs):
        if left[0]:
            left[0] -= 1
            raise RuntimeError("out of memory")
        return function(*args, **kwargs)

    return fails


def inject(step: str, engine: Engine, service, patch, times: int = 1) -> None:
    """Make a step of the server's worker fail at its next calls."""
    place, name = {
        "take": (engine, "submit"),
        "admit": (engine.target, "extend"),
        "enter": (engine.runner, "begin"),
        "draft": (engine.runner.drafter, "draft_block"),
        "verify": (engine.target, "verify"),
        "commit": (engine.runner, "_to_host"),
        "free": (engine.runner, "free"),
        "tell": (service.worker, "_tell"),
    }[step]
    patch.setattr(place, name, failing(getattr(place, name), times))


@pytest.mark.parametrize(
    "step", ["take", "admit", "enter", "draft", "verify", "commit", "free", "tell"]
)
def test_an_error_in_any_step_costs_its_text_and_nothing_else(
    running, idle, engine, right, step, monkeypatch
):
    """Of twelve texts on three rows one that cannot be taken in or told gets 500, those of a failed
    round are written
    on: all others are their own text."""
    with running(engine) as (url, service), httpx.Client(base_url=url, timeout=60) as client:

        def ask(prompt: str) -> httpx.Response:
            return client.post("/v1/completions", json=BODY | {"prompt": prompt})

        with monkeypatch.context() as patch, ThreadPoolExecutor(12) as pool:
            inject(step, engine, service, patch)
            answers = list(pool.map(ask, right))
        failed = [answer for answer in answers if answer.status_code == 500]
        assert (step in ("take", "tell")) <= len(failed) <= 1  # one may be alone in its round
        assert all("the engine failed on this text" in answer.text for answer in failed)
        for answer, text in zip(answers, right.values(), strict=True):
            assert answer.status_code == 500 or answer.json()["choices"][0]["text"] == text
        for prompt, text in [*right.items()][:4]:
            assert ask(prompt).json()["choices"][0]["text"] == text
        assert idle(service) and engine.runner.memory.cache.lengths == []


def test_a_stream_goes_on_after_a_round_that_failed(running, engine, monkeypatch):
    """What was sent is not sent again; log-probabilities and counts are those of the tokens."""
    with running(engine) as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        body = BODY | {"prompt": "def f(", "max_tokens": 40, "logprobs": 1, "stream": True}

        def told() -> tuple[str, list[str], list[float]]:
            with client.stream("POST", "/v1/completions", json=body) as answer:
                events = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
            choices = [json.loads(event)["choices"][0] for event in events]
            logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
            return (
                "".join(choice["text"] for choice in choices),
                [token for each in logprobs for token in each["tokens"]],
                [value for each in logprobs for value in each["token_logprobs"]],
            )

        text, tokens, logprobs = told()
        assert len(tokens) == len(logprobs) == 40
        calls = []
        to_host = engine.runner._to_host

        def fails(*args):
            both = len(engine.scheduler.writing) == 2  # one that fails alone would be given up
            calls.append(both)
            if both and calls.count(True) == 3:
                raise RuntimeError("out of memory")
            return to_host(*args)

        monkeypatch.setattr(engine.runner, "_to_host", fails)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(
                client.post, "/v1/completions", json=BODY | {"prompt": "x", "max_tokens": 50}
            )
            again = told()
            assert other.result().status_code == 200
        assert calls.count(True) >= 3
        assert again[:2] == (text, tokens)
        assert again[2] == pytest.approx(logprobs, abs=1e-4)


def test_the_old_caches_go_before_the_new_ones_come(engine, monkeypatch):
    cache = engine.target.cache

    def looking(*sizes):
        assert engine.runner.memory is None and engine.runner.prompts is None
        return cache(*sizes)

    monkeypatch.setattr(engine.target, "cache", looking)
    engine.reset()
    assert engine.runner.memory is not None


def test_an_engine_that_is_lost_leaves_nobody_waiting_and_ends_the_process(
    pair, monkeypatch, free_port
):
    """Those in work and those that wait get 500, later ones no connection; `serve` ends with a
    sentence."""
    engine = Engine(*pair, EngineConfig("ddtree", 6, max_num_seqs=1), 64)
    ended = []
    options = ServerConfig(port=free_port)
    bound = threading.Event()

    def serving() -> None:
        try:
            server_module.serve(engine, options, bound.set)
        except Stopped as stopped:
            ended.append(str(stopped))

    thread = threading.Thread(target=serving, daemon=True)
    thread.start()
    assert bound.wait(60)
    url = f"http://127.0.0.1:{free_port}/v1/completions"
    monkeypatch.setattr(engine.runner, "round", failing(engine.runner.round, 99))
    monkeypatch.setattr(engine.target, "cache", failing(engine.target.cache, 99))
    with ThreadPoolExecutor(5) as pool:
        answers = list(
            pool.map(
                lambda i: httpx.post(url, json=BODY | {"prompt": f"x{i}"}, timeout=60), range(5)
            )
        )
    assert {answer.status_code for answer in answers} <= {500, 503}
    thread.join(60)
    assert ended == [server_module.ENDED]
    with pytest.raises(httpx.ConnectError):
        httpx.post(url, json=BODY | {"prompt": "x"})


def test_a_request_that_comes_after_the_end_is_told(running, engine):
    with running(engine) as (url, service):
        service.worker.inbox.put(None)
        service.worker.join(20)
        service.worker.failure = server_module.ENDED
        answer = httpx.post(f"{url}/v1/completions", json=BODY | {"prompt": "x"})
        assert answer.status_code == 503 and "did not come back" in answer.text
        assert httpx.get(f"{url}/health").status_code == 503


@pytest.mark.parametrize("what", ["prompt", "grammar"])
def test_others_are_answered_while_a_request_is_read(running, engine, monkeypatch, what):
    """A long prompt is tokenised, and a grammar compiled, beside the event loop."""
    begun = threading.Event()
    answered = threading.Event()
    encode = server_module.encode

    def waits(*arguments):
        begun.set()
        assert answered.wait(60)
        return encode(*arguments) if what == "prompt" else None

    with running(engine) as (url, service), ThreadPoolExecutor(1) as other:
        if what == "prompt":
            monkeypatch.setattr(server_module, "encode", waits)
        else:
            monkeypatch.setattr(service.trial, "check", waits)
        shape = {"guided_regex": "[ab]+"} if what == "grammar" else {}
        slow = other.submit(
            httpx.post, f"{url}/v1/completions", json=BODY | {"prompt": "x"} | shape, timeout=60
        )
        assert begun.wait(60)
        assert httpx.get(f"{url}/health", timeout=20).status_code == 200
        answered.set()
        assert slow.result().status_code == (
            200 if what == "prompt" else 400
        )  # this target has no end token


def test_a_request_that_finds_no_memory_is_told_so(running, engine, monkeypatch):
    with running(engine) as (url, _):
        with monkeypatch.context() as patch:
            patch.setattr(server_module, "encode", Mock(side_effect=MemoryError))
            answer = httpx.post(f"{url}/v1/completions", json=BODY | {"prompt": "x"})
            assert (
                answer.status_code == 503 and "short of memory" in answer.json()["error"]["message"]
            )
        assert httpx.post(f"{url}/v1/completions", json=BODY | {"prompt": "x"}).status_code == 200


@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError])
def test_a_round_that_finds_no_memory_is_told_so(running, engine, monkeypatch, kind):
    with running(engine) as (url, _):
        with monkeypatch.context() as patch:
            patch.setattr(engine.runner, "round", Mock(side_effect=kind))
            answer = httpx.post(f"{url}/v1/completions", json=BODY | {"prompt": "x"}, timeout=60)
            assert (
                answer.status_code == 503 and "short of memory" in answer.json()["error"]["message"]
            )
        assert httpx.post(f"{url}/v1/completions", json=BODY | {"prompt": "x"}).status_code == 200


def test_serve_says_its_address_when_it_listens_and_ends_with_a_word(start_command, free_port):
    """Plain decoding asks for no checkpoint. Ctrl-C shows no trace, and ends a stream with a
    sentence."""
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
    said = server.finish(130)
    assert "stopped by Ctrl-C" in said and "Traceback" not in said and "Cancel" not in said
    assert "the server was stopped" in last or last == "data: [DONE]"


def test_a_server_whose_port_is_taken_says_no_address(engine, free_port):
    taken = socket.create_server(("127.0.0.1", free_port))
    with (
        taken,
        pytest.raises(Stopped, match=f"127.0.0.1:{free_port}: .* already in use; choose another"),
    ):
        server_module.serve(
            engine, ServerConfig(port=free_port), lambda: pytest.fail("it is not bound")
        )


def test_a_stop_in_the_chat_is_a_sentence(start_command, free_port):
    """Ctrl-C while the server does not answer."""
    import socket

    with socket.create_server(("127.0.0.1", free_port)) as listening:
        chat = start_command("infer/main.py", ["chat", f"url=http://127.0.0.1:{free_port}"])
        listening.settimeout(120)
        connection, _ = listening.accept()
        time.sleep(0.2)
        chat.send_signal(signal.SIGINT)
        said = chat.finish(130)
        assert "stopped by Ctrl-C" in said and "Traceback" not in said
        connection.close()

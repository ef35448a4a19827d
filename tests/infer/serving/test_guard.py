"""At the server's door: the key, slow clients, and texts that are checked again."""

import logging
import socket
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
import uvicorn

from infer import Engine
from infer.config import EngineConfig
from infer.engine.choices import choose_tokens
from infer.serving.config import ServerConfig
from infer.serving.guard import network
from infer.serving.server import create_app

KEY = "0123456789abcdef-key"


@pytest.fixture(scope="module")
def fuzzer(load_program):
    """The fuzzer of the server, whose small target is served here too."""
    return load_program("fuzz_http")


@contextmanager
def running(fuzzer, **options):
    """A small server as `serve` would run it; gives its port and its service."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    target, drafter = fuzzer.small()
    options = ServerConfig(port=port, **options)
    options.check()
    app = create_app(Engine(target, drafter, EngineConfig("ddtree", 6, rows=4), 64), options)
    server = uvicorn.Server(network(app, options))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield port, app.state.service
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def test_the_key_opens_and_nothing_else_does(fuzzer, tmp_path, monkeypatch):
    monkeypatch.delenv("BLOCKDRAFT_API_KEY", raising=False)
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    with running(fuzzer, api_key_file=str(file)) as (port, service):
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            body = {"prompt": "x", "max_tokens": 2}
            for wrong in ("", KEY, f"Bearer {KEY[:-1]}", f"Bearer {KEY}x", f"bearer {KEY}", "Bearer", "Basic x"):
                answer = client.post("/v1/completions", json=body, headers={"authorization": wrong})
                assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
                assert KEY not in answer.text and answer.headers["www-authenticate"] == "Bearer"
            for path in ("/v1/models", "/metrics", "/nothing"):
                assert client.get(path).status_code == 401
            assert client.get("/health").status_code == 200
            client.headers["authorization"] = f"Bearer {KEY}"
            assert client.post("/v1/completions", json=body).status_code == 200
            counted = client.get("/metrics").text
        assert 'requests_total{path="other",status="401"} 1.0' in counted
        assert not service.inside


def test_other_machines_are_let_in_with_a_key_or_a_word(tmp_path, monkeypatch):
    monkeypatch.delenv("BLOCKDRAFT_API_KEY", raising=False)
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        ServerConfig(host=host).check()
    for host in ("0.0.0.0", "::", "192.168.1.2", "example", "localhost.example"):
        with pytest.raises(ValueError, match=r"other machines can reach that; give server\.api_key_file"):
            ServerConfig(host=host).check()
        ServerConfig(host=host, open=True).check()
    monkeypatch.setenv("BLOCKDRAFT_API_KEY", KEY)
    ServerConfig(host="0.0.0.0").check()
    assert ServerConfig().key() == KEY.encode()
    file = tmp_path / "key"
    for content, says in (
        ("short", "at least 16"),
        (f"{KEY} two", "one word"),
        ("", "at least 16"),
        ("é" * 20, "ASCII"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=says) as refusal:
            ServerConfig(api_key_file=str(file)).check()
        assert not content or content not in str(refusal.value)
    with pytest.raises(ValueError, match="cannot be read"):
        ServerConfig(api_key_file=str(tmp_path / "none")).check()


def test_who_sends_or_reads_too_slowly_is_hung_up_on(fuzzer):
    starts = [
        b"",
        b"POST /v1/completions HT",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{",
    ]
    with running(fuzzer, patience=0.3) as (port, _):
        for sent in starts:
            with socket.create_connection(("127.0.0.1", port), 20) as client:
                client.sendall(sent)
                with pytest.raises((ConnectionError, EOFError)):
                    if not client.recv(1):
                        raise EOFError
        # a text that takes longer than that is not a slow client
        body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True, "n": 16}
        assert httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60).status_code == 200


def test_finished_texts_are_checked_again(fuzzer, monkeypatch, caplog):
    with running(fuzzer, verify=1.0) as (port, service):
        url = f"http://127.0.0.1:{port}"

        def write(count: int) -> dict[str, float]:
            body = {"prompt": "x", "max_tokens": 20, "temperature": 0.8, "seed": 1, "n": count}
            before = sum(outcomes().values())
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
            end = time.monotonic() + 60
            while sum(outcomes().values()) < before + count and time.monotonic() < end:
                time.sleep(0.02)
            return outcomes()

        def outcomes() -> dict[str, float]:
            checked = service.metrics.checked
            return {outcome: checked.labels(outcome)._value.get() for outcome in ("same", "tie", "defect")}

        assert write(4) == {"same": 4, "tie": 0, "defect": 0}

        def wrong(*arguments):  # a fault of the engine: one token too far
            return (choose_tokens(*arguments) + 1) % service.target.head_weight.shape[0]

        with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
            patch.setattr("infer.engine.round.choose_tokens", wrong)
            assert write(2) == {"same": 4, "tie": 0, "defect": 2}
        assert "is not the target's own: token 0 is" in caplog.text
        assert 'checked_texts_total{outcome="defect"} 2.0' in httpx.get(f"{url}/metrics").text


def test_what_is_no_text_is_told_so(fuzzer):
    """Half of a surrogate pair is valid JSON and no text: in every place where it is quoted or read."""
    with running(fuzzer) as (port, _), httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        for fields in ('"model": "\\ud800"', '"prompt": "\\ud800"', '"prompt": ["\\ud800"]', '"\\ud800": 1'):
            content = '{"max_tokens": 1, ' + fields + ("}" if "prompt" in fields else ', "prompt": "x"}')
            answer = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
            assert answer.status_code in (400, 404) and answer.json()["error"]["message"], fields


def test_headers_have_sixteen_kib_together(fuzzer):
    with running(fuzzer) as (port, _), httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        assert client.get("/health", headers={"x": "y" * 15_000}).status_code == 200
        many = {f"x-{i}": "y" * 1000 for i in range(60)}
        for headers in ({"x": "y" * 20_000}, {"x": "y" * 60_000}, many):
            assert client.get("/health", headers=headers).status_code in (400, 431)


def test_a_server_for_this_machine_answers_to_its_names_only(fuzzer, tmp_path):
    """Else a page in a browser here, whose name resolves to 127.0.0.1, would read answers (DNS rebinding)."""
    file = tmp_path / "key"
    file.write_text(KEY)
    theirs = ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "[::2]", "localhost.evil.example", "[")
    with running(fuzzer) as (port, _), httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        for host in ("localhost", f"LOCALHOST:{port}", "127.0.0.1:1", "127.0.0.9", "[::1]:8000"):
            assert client.get("/v1/models", headers={"host": host}).status_code == 200, host
        for host in theirs:
            answer = client.get("/v1/models", headers={"host": host})
            assert answer.status_code == 403 and "answers to localhost" in answer.json()["error"]["message"], host
    for options in ({"api_key_file": str(file)}, {"open": True}):  # a proxy's name, as it may be
        with running(fuzzer, **options) as (port, _):
            headers = {"host": "models.example", "authorization": f"Bearer {KEY}"}
            assert httpx.get(f"http://127.0.0.1:{port}/v1/models", headers=headers).status_code == 200

"""Limits on requests: the API key, names of this machine, and sizes."""

import socket

import httpx
import pytest

from infer import Engine
from infer.config import EngineConfig
from infer.serving.config import ServerConfig

API_KEY_VALUE = "0123456789abcdef-key"


@pytest.fixture
def engine(pair):
    return Engine(*pair, EngineConfig("ddtree", 6, max_num_seqs=4), 64)


@pytest.fixture(scope="module")
def bounded_server(pair, running):
    """The port of a server that allows 20,000 bytes and pauses of one second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infer.serving.guard.MAX_PAUSE_IN_REQUEST_BODY_SECONDS", 1)
        with running(
            Engine(*pair, EngineConfig("ddtree", 6, max_num_seqs=4), 64), max_body_bytes=20_000
        ) as (url, _):
            yield int(url.rpartition(":")[2])


def test_only_the_key_is_accepted(running, engine, monkeypatch):
    monkeypatch.setenv("BLOCKDRAFT_API_KEY", API_KEY_VALUE)
    with running(engine) as (url, service):
        with httpx.Client(base_url=url, timeout=60) as client:
            body = {"prompt": "x", "max_tokens": 2}
            for wrong in (
                "",
                API_KEY_VALUE,
                f"Bearer {API_KEY_VALUE[:-1]}",
                f"Bearer {API_KEY_VALUE}x",
                f"bearer {API_KEY_VALUE}",
                "Bearer",
                "Basic x",
            ):
                answer = client.post("/v1/completions", json=body, headers={"authorization": wrong})
                assert (
                    answer.status_code == 401
                    and answer.json()["error"]["type"] == "authentication_error"
                )
                assert (
                    API_KEY_VALUE not in answer.text
                    and answer.headers["www-authenticate"] == "Bearer"
                )
            for path in ("/v1/models", "/metrics", "/nothing"):
                assert client.get(path).status_code == 401
            assert client.get("/health").status_code == 200
            client.headers["authorization"] = f"Bearer {API_KEY_VALUE}"
            assert client.post("/v1/completions", json=body).status_code == 200
        assert not service.active_requests


def test_listening_to_other_machines_needs_a_key_or_an_option(monkeypatch):
    monkeypatch.delenv("BLOCKDRAFT_API_KEY", raising=False)
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        ServerConfig(host=host).check()
    for host in ("0.0.0.0", "::", "192.168.1.2", "example", "localhost.example"):
        with pytest.raises(ValueError, match="other machines can reach this address"):
            ServerConfig(host=host).check()
        ServerConfig(host=host, allow_unauthenticated=True).check()
    monkeypatch.setenv("BLOCKDRAFT_API_KEY", API_KEY_VALUE)
    ServerConfig(host="0.0.0.0").check()
    assert ServerConfig().read_api_key() == API_KEY_VALUE.encode()
    for key in ("short", f"{API_KEY_VALUE} two", "é" * 20):
        monkeypatch.setenv("BLOCKDRAFT_API_KEY", key)
        with pytest.raises(ValueError, match="one word of at least 16 ASCII") as refusal:
            ServerConfig().check()
        assert key not in str(refusal.value)


def test_invalid_text_gets_an_error(running, engine):
    """Half of a surrogate pair is valid JSON but not valid text, wherever it is read or quoted."""
    with running(engine) as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        for fields in (
            '"model": "\\ud800"',
            '"prompt": "\\ud800"',
            '"prompt": ["\\ud800"]',
            '"\\ud800": 1',
        ):
            content = (
                '{"max_tokens": 1, ' + fields + ("}" if "prompt" in fields else ', "prompt": "x"}')
            )
            answer = client.post(
                "/v1/completions", content=content, headers={"content-type": "application/json"}
            )
            assert answer.status_code in (400, 404) and answer.json()["error"]["message"], fields


def test_a_local_server_accepts_local_names_only(running, engine, monkeypatch):
    """Otherwise a web page whose name resolves to 127.0.0.1 could read answers (DNS rebinding)."""
    foreign_hosts = (
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "[::2]",
        "localhost.evil.example",
        "[",
    )
    with running(engine) as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        for host in (
            "localhost",
            f"LOCALHOST:{url[-5:]}",
            "127.0.0.1:1",
            "127.0.0.9",
            "[::1]:8000",
        ):
            assert client.get("/v1/models", headers={"host": host}).status_code == 200, host
        for host in foreign_hosts:
            answer = client.get("/v1/models", headers={"host": host})
            assert (
                answer.status_code == 403
                and "accepts requests to localhost" in answer.json()["error"]["message"]
            ), host
    for key in ("", API_KEY_VALUE):  # the name of a proxy is accepted
        monkeypatch.setenv("BLOCKDRAFT_API_KEY", key)
        with running(engine, allow_unauthenticated=not key) as (url, _):
            headers = {"host": "models.example", "authorization": f"Bearer {API_KEY_VALUE}"}
            assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200


REQUEST_HEAD = (
    "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
)
CHUNKED_HEAD = REQUEST_HEAD + "transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (REQUEST_HEAD + "content-length: 99999999999999999999\r\n\r\n", 413),
        (REQUEST_HEAD + "content-length: 20001\r\n\r\n", 413),
        (
            REQUEST_HEAD + "expect: 100-continue\r\ncontent-length: 99999999999999999999\r\n\r\n",
            413,
        ),
        (
            REQUEST_HEAD.replace("completions", "nothing")
            + "content-length: 99999999999999999999\r\n\r\n",
            413,
        ),
        (
            REQUEST_HEAD.replace("127.0.0.1", "evil.example")
            + "content-length: 99999999999999999999\r\n\r\n",
            413,
        ),
        (REQUEST_HEAD + f"content-length: {'9' * 30}\r\n\r\n", 400),
        (CHUNKED_HEAD + "FFFFFFFFFFFFFFFF\r\n", 413),
        (CHUNKED_HEAD + "4e21\r\n", 413),
        (CHUNKED_HEAD + f"{'F' * 30}\r\n", 400),
        (CHUNKED_HEAD + "1\r\n{\r\nFFFFFFFFFFFFFFFF\r\n", 413),
        (CHUNKED_HEAD + "1;a\r\n \r\n" * 19_000, 413),  # more bytes around the body than in it
        (CHUNKED_HEAD + f"1;{'a' * 9000}\r\n \r\n" * 20, 413),
        (CHUNKED_HEAD + f"2\r\n{{}}\r\n0\r\n{'a: b' * 5000}", 400),
        (
            "GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: "
            "chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\n",
            200,
        ),
        (REQUEST_HEAD + "content-length: 9\r\n\r\n{", 408),
    ],
)
def test_an_announced_size_is_refused_before_it_is_sent(bounded_server, sent, status):
    """The connection is closed, without waiting for the rest."""
    with socket.create_connection(("127.0.0.1", bounded_server), timeout=10) as connection:
        connection.sendall(sent.encode())
        answer = b""
        try:
            while piece := connection.recv(1 << 16):
                answer += piece
        except ConnectionResetError:  # the server did not read everything
            assert len(sent) > 10_000
    assert int(answer.split()[1]) == status or len(sent) > 10_000 and not answer, answer


def test_large_requests_that_are_not_too_large_are_read(bounded_server):
    """In chunks of various sizes, several requests on one connection."""
    url = f"http://127.0.0.1:{bounded_server}/v1/completions"
    content = b'{"max_tokens": 1, "prompt": "x"}' + b" " * 19_000
    with httpx.Client(headers={"content-type": "application/json"}) as client:
        for size in (64, 1000, 19_000) * 2:
            pieces = (content[start : start + size] for start in range(0, len(content), size))
            assert client.post(url, content=pieces).status_code == 200

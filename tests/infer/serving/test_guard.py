"""At the server's door: the key, names of this machine, and sizes."""

import socket

import httpx
import pytest

from infer import Engine
from infer.config import EngineConfig
from infer.serving.config import ServerConfig

KEY = "0123456789abcdef-key"


@pytest.fixture
def engine(pair):
    return Engine(*pair, EngineConfig("ddtree", 6, max_num_seqs=4), 64)


@pytest.fixture(scope="module")
def bounded_server(pair, running):
    """The port of a server whose requests may have 20,000 bytes, and pause for a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infer.serving.guard.MAX_PAUSE_SECONDS", 1)
        with running(
            Engine(*pair, EngineConfig("ddtree", 6, max_num_seqs=4), 64), max_body_bytes=20_000
        ) as (
            url,
            _,
        ):
            yield int(url.rpartition(":")[2])


def test_the_key_opens_and_nothing_else_does(running, engine, monkeypatch):
    monkeypatch.setenv("BLOCKDRAFT_API_KEY", KEY)
    with running(engine) as (url, service):
        with httpx.Client(base_url=url, timeout=60) as client:
            body = {"prompt": "x", "max_tokens": 2}
            for wrong in (
                "",
                KEY,
                f"Bearer {KEY[:-1]}",
                f"Bearer {KEY}x",
                f"bearer {KEY}",
                "Bearer",
                "Basic x",
            ):
                answer = client.post("/v1/completions", json=body, headers={"authorization": wrong})
                assert (
                    answer.status_code == 401
                    and answer.json()["error"]["type"] == "authentication_error"
                )
                assert KEY not in answer.text and answer.headers["www-authenticate"] == "Bearer"
            for path in ("/v1/models", "/metrics", "/nothing"):
                assert client.get(path).status_code == 401
            assert client.get("/health").status_code == 200
            client.headers["authorization"] = f"Bearer {KEY}"
            assert client.post("/v1/completions", json=body).status_code == 200
        assert not service.inside


def test_other_machines_are_let_in_with_a_key_or_a_word(monkeypatch):
    monkeypatch.delenv("BLOCKDRAFT_API_KEY", raising=False)
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        ServerConfig(host=host).check()
    for host in ("0.0.0.0", "::", "192.168.1.2", "example", "localhost.example"):
        with pytest.raises(
            ValueError, match="other machines can reach that; set BLOCKDRAFT_API_KEY"
        ):
            ServerConfig(host=host).check()
        ServerConfig(host=host, allow_unauthenticated=True).check()
    monkeypatch.setenv("BLOCKDRAFT_API_KEY", KEY)
    ServerConfig(host="0.0.0.0").check()
    assert ServerConfig().key() == KEY.encode()
    for key in ("short", f"{KEY} two", "é" * 20):
        monkeypatch.setenv("BLOCKDRAFT_API_KEY", key)
        with pytest.raises(ValueError, match="one word of at least 16 ASCII") as refusal:
            ServerConfig().check()
        assert key not in str(refusal.value)


def test_what_is_no_text_is_told_so(running, engine):
    """Half of a surrogate pair is valid JSON and no text: in every place where it is quoted or
    read."""
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


def test_a_server_for_this_machine_answers_to_its_names_only(running, engine, monkeypatch):
    """Else a page in a browser here, whose name resolves to 127.0.0.1, would read answers (DNS
    rebinding)."""
    theirs = (
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
        for host in theirs:
            answer = client.get("/v1/models", headers={"host": host})
            assert (
                answer.status_code == 403
                and "answers to localhost" in answer.json()["error"]["message"]
            ), host
    for key in ("", KEY):  # a proxy's name, as it may be
        monkeypatch.setenv("BLOCKDRAFT_API_KEY", key)
        with running(engine, allow_unauthenticated=not key) as (url, _):
            headers = {"host": "models.example", "authorization": f"Bearer {KEY}"}
            assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200


HEAD = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
CHUNKED = HEAD + "transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (HEAD + "content-length: 99999999999999999999\r\n\r\n", 413),
        (HEAD + "content-length: 20001\r\n\r\n", 413),
        (HEAD + "expect: 100-continue\r\ncontent-length: 99999999999999999999\r\n\r\n", 413),
        (
            HEAD.replace("completions", "nothing") + "content-length: 99999999999999999999\r\n\r\n",
            413,
        ),
        (
            HEAD.replace("127.0.0.1", "evil.example")
            + "content-length: 99999999999999999999\r\n\r\n",
            413,
        ),
        (HEAD + f"content-length: {'9' * 30}\r\n\r\n", 400),
        (CHUNKED + "FFFFFFFFFFFFFFFF\r\n", 413),
        (CHUNKED + "4e21\r\n", 413),
        (CHUNKED + f"{'F' * 30}\r\n", 400),
        (CHUNKED + "1\r\n{\r\nFFFFFFFFFFFFFFFF\r\n", 413),
        (CHUNKED + "1;a\r\n \r\n" * 19_000, 413),  # more around the body than in it
        (CHUNKED + f"1;{'a' * 9000}\r\n \r\n" * 20, 413),
        (CHUNKED + f"2\r\n{{}}\r\n0\r\n{'a: b' * 5000}", 400),
        (
            "GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\n",
            200,
        ),
        (HEAD + "content-length: 9\r\n\r\n{", 408),
    ],
)
def test_a_size_that_is_said_and_not_sent_is_answered_at_once(bounded_server, sent, status):
    """And the connection is closed: nobody waits for the rest."""
    with socket.create_connection(("127.0.0.1", bounded_server), timeout=10) as connection:
        connection.sendall(sent.encode())
        answer = b""
        try:
            while piece := connection.recv(1 << 16):
                answer += piece
        except ConnectionResetError:  # what it did not read
            assert len(sent) > 10_000
    assert int(answer.split()[1]) == status or len(sent) > 10_000 and not answer, answer


def test_large_requests_that_are_not_too_large_are_read(bounded_server):
    """In chunks of usual sizes, and of few bytes, and many on one connection."""
    url = f"http://127.0.0.1:{bounded_server}/v1/completions"
    content = b'{"max_tokens": 1, "prompt": "x"}' + b" " * 19_000
    with httpx.Client(headers={"content-type": "application/json"}) as client:
        for size in (64, 1000, 19_000) * 2:
            pieces = (content[start : start + size] for start in range(0, len(content), size))
            assert client.post(url, content=pieces).status_code == 200

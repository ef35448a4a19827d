"""Limits on requests: who may send them, how large, and how slowly.

`Guard` wraps the application: it checks the key and the size of a request and counts answers. `Patient` is the protocol
below it, which closes the connection of a client that sends or reads too slowly.
"""

import asyncio
import hashlib
import hmac
from functools import partial
from urllib.parse import urlsplit

import h11
import prometheus_client
import uvicorn
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from infer.serving.config import ServerConfig, loopback
from infer.serving.protocol import error

MOST_HEADERS = 16 * 1024  # bytes, names and values together
PATHS = ("/health", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions")


class Refused(HTTPException):
    """A refusal for the client: an HTTP status, a sentence, and the field that it is about."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(status, message)
        self.param = param


class Guard:
    """Middleware that asks for the key (except for /health), counts answers, and stops reading a request that is too
    large. A server for this machine that asks for no key answers to this machine's names only: a page in a
    browser here can have a name of its own resolve to 127.0.0.1 (DNS rebinding), and would read the answers."""

    def __init__(self, app: ASGIApp, options: ServerConfig, answered: prometheus_client.Counter) -> None:
        self.app, self.most, self.answered, key = app, options.max_body, answered, options.key()
        self.digest = None if key is None else hashlib.sha256(b"Bearer " + key).digest()
        self.local = key is None and not options.open and loopback(options.host)

    def refusal(self, scope: Scope) -> Response | None:
        """Return what a request is told before its body is read; None: it may go on."""
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MOST_HEADERS:
            return error(431, f"the headers of a request may have {MOST_HEADERS} bytes")
        host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
        if self.local and host and not loopback(hostname(host)):
            return error(403, f"this server answers to localhost and 127.0.0.1, not to {host[:100]}: see server.open")
        if not self.authorized(scope):
            refusal = error(401, "this server asks for a key: send it as Authorization: Bearer <key>")
            refusal.headers["WWW-Authenticate"] = "Bearer"
            return refusal
        return None

    def authorized(self, scope: Scope) -> bool:
        """Return whether a request carries the key. Comparing digests takes a time that says nothing about the key."""
        if self.digest is None or scope["path"] == "/health":
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(hashlib.sha256(given).digest(), self.digest)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        taken = 0

        async def bounded() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self.most:
                raise Refused(413, f"a request may have {self.most} bytes")
            return message

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in PATHS else "other"
                self.answered.labels(path, message["status"]).inc()
            await send(message)

        refusal = self.refusal(scope)
        if refusal is None:
            return await self.app(scope, bounded, counted)
        await refusal(scope, receive, counted)


def hostname(host: str) -> str:
    """Return a Host header without its port; an empty text where it is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


class Patient(H11Protocol):
    """HTTP/1.1 with time limits: a client has `patience` seconds to send a whole request, and to go on reading after it
    stopped."""

    def __init__(self, patience: float, **uvicorns: object) -> None:
        super().__init__(**uvicorns)
        self.patience = patience

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.sending = self.loop.call_later(self.patience, transport.abort)
        self.reading: asyncio.TimerHandle | None = None

    def handle_events(self) -> None:
        super().handle_events()
        unfinished = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if unfinished and self.sending is None:
            self.sending = self.loop.call_later(self.patience, self.transport.abort)
        elif not unfinished and self.sending is not None:
            self.sending.cancel()
            self.sending = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self.reading = self.loop.call_later(self.patience, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.reading is not None:
            self.reading.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self.sending, self.reading):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)


def network(app: ASGIApp, options: ServerConfig) -> uvicorn.Config:
    """Return uvicorn's settings. Headers may have 16 KiB together; a stopped server ends running answers after a
    second (`infer.serving.server.Server`), and what is left after two."""
    return uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        http=partial(Patient, options.patience),
        ws="none",
        log_level="warning",
        proxy_headers=False,
        server_header=False,
        limit_concurrency=options.max_connections,
        h11_max_incomplete_event_size=MOST_HEADERS,
        timeout_graceful_shutdown=2,
    )

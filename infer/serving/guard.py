"""Limits on requests: who may send them, and how large."""

import asyncio
import hmac
from functools import partial
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from infer.serving.config import ServerConfig, loopback
from infer.serving.protocol import error

MAX_HEADERS = 16 * 1024  # bytes, names and values together
MAX_CONNECTIONS = 1024  # open at once; further ones are told 503
MAX_FRAMING_BYTES = (
    64 * 1024
)  # of chunk sizes, chunk extensions and trailers, beyond the bytes of the body
MAX_PIECE_BYTES = 16 * 1024  # read before limits are looked at again
MAX_PAUSE_SECONDS = 60  # in which nothing of a body comes
CLOSE = {"Connection": "close"}  # the rest of the request is not read
EXCESSIVE = "excessive"  # in a request's state: `BoundedProtocol` has found it too large


class Guard:
    """Middleware that asks for the key (except for /health), and stops reading a request that is
    too large. A server for this machine that asks for no key answers to this machine's names only:
    a page in a browser here can have a name of its own resolve to 127.0.0.1 (DNS rebinding), and
    would read the answers."""

    def __init__(self, app: ASGIApp, options: ServerConfig) -> None:
        self.app = app
        self.most = options.max_body_bytes
        key = options.key()
        self.too_large = f"a request may have {self.most} bytes"
        self.expected = None if key is None else b"Bearer " + key
        self.local = key is None and not options.allow_unauthenticated and loopback(options.host)

    def refusal(self, scope: Scope) -> Response | None:
        """Return what a request is told before its body is read; None: it may go on."""
        headers = dict(scope["headers"])
        if int(headers.get(b"content-length", 0)) > self.most:
            refusal = error(413, self.too_large)
            refusal.headers.update(CLOSE)
            return refusal
        host = headers.get(b"host", b"").decode("latin-1")
        if self.local and host and not loopback(hostname(host)):
            return error(
                403,
                f"this server answers to localhost and 127.0.0.1, not to {host[:100]}: see server.allow_unauthenticated",
            )
        if self.expected is None or scope["path"] == "/health":
            return None
        if hmac.compare_digest(headers.get(b"authorization", b""), self.expected):
            return None
        refusal = error(401, "this server asks for a key: send it as Authorization: Bearer <key>")
        refusal.headers["WWW-Authenticate"] = "Bearer"
        return refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        taken = 0
        complete = False

        async def bounded() -> Message:
            nonlocal taken, complete
            try:
                async with asyncio.timeout(None if complete else MAX_PAUSE_SECONDS):
                    message = await receive()
            except TimeoutError as late:
                late_body = f"nothing more of the request came for {MAX_PAUSE_SECONDS} s"
                raise HTTPException(408, late_body, CLOSE) from late
            taken += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if taken > self.most or EXCESSIVE in scope.get("state", ()):
                raise HTTPException(413, self.too_large, CLOSE)
            return message

        refusal = self.refusal(scope)
        await (self.app(scope, bounded, send) if refusal is None else refusal(scope, receive, send))


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 that reads no further where a body's next chunk is said to be larger than a body may
    be (`max_body` bytes), or where a request sends too many bytes around its body. `Guard` then
    answers."""

    def __init__(self, *args: object, max_body: int, **options: object) -> None:
        super().__init__(*args, **options)
        self.max_body = max_body
        self.framing = (
            0  # bytes around the body of the request that is being read, beyond as many as it has
        )
        self.excessive = False

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), MAX_PIECE_BYTES):
            if self.excessive or self.transport.is_closing():
                return
            self.read_piece(data[start : start + MAX_PIECE_BYTES])

    def read_piece(self, piece: bytes) -> None:
        """Read a piece of a request, and note whether the request is too large."""
        cycle = self.cycle
        before = 0 if cycle is None else len(cycle.body)
        super().data_received(piece)
        if self.conn.their_state is not h11.SEND_BODY:
            return

        if self.cycle is cycle:
            body_bytes = len(cycle.body) - before
            self.framing = max(0, self.framing + len(piece) - 2 * body_bytes)
        else:
            self.framing = 0
        unread = self.cycle.response_complete  # what is sent of the body then is read by nobody
        max_framing = MAX_FRAMING_BYTES + (self.max_body if unread else 0)
        # h11 has no public name for the size of a chunk whose bytes are not there yet
        chunk_bytes = getattr(getattr(self.conn, "_reader", None), "_bytes_in_chunk", 0)
        if chunk_bytes <= self.max_body and self.framing <= max_framing:
            return
        self.excessive = True
        self.scope["state"][EXCESSIVE] = True
        self.cycle.message_event.set()
        if unread:
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.excessive:
            self.transport.close()


def hostname(host: str) -> str:
    """Return a Host header without its port; an empty text where it is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def network(app: ASGIApp, options: ServerConfig) -> uvicorn.Config:
    """Return uvicorn's settings. A stopped server ends running answers after a second
    (`infer.serving.server.Server`), and what is left after two."""
    return uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        http=partial(BoundedProtocol, max_body=options.max_body_bytes),
        ws="none",
        log_level="warning",
        proxy_headers=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        h11_max_incomplete_event_size=MAX_HEADERS,
        timeout_graceful_shutdown=2,
    )

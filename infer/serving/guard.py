"""Limits on requests: who may send them, and how large."""

import hmac
from urllib.parse import urlsplit

import uvicorn
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infer.serving.config import ServerConfig, loopback
from infer.serving.protocol import error

MAX_HEADERS = 16 * 1024  # bytes, names and values together
MAX_CONNECTIONS = 1024  # open at once; further ones are told 503


class Guard:
    """Middleware that asks for the key (except for /health), and stops reading a request that is too
    large. A server for this machine that asks for no key answers to this machine's names only: a page
    in a browser here can have a name of its own resolve to 127.0.0.1 (DNS rebinding), and would read
    the answers."""

    def __init__(self, app: ASGIApp, options: ServerConfig) -> None:
        self.app, self.most, key = app, options.max_body, options.key()
        self.expected = None if key is None else b"Bearer " + key
        self.local = key is None and not options.open and loopback(options.host)

    def refusal(self, scope: Scope) -> Response | None:
        """Return what a request is told before its body is read; None: it may go on."""
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        if self.local and host and not loopback(hostname(host)):
            return error(403, f"this server answers to localhost and 127.0.0.1, not to {host[:100]}: see server.open")
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

        async def bounded() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self.most:
                raise HTTPException(413, f"a request may have {self.most} bytes")
            return message

        refusal = self.refusal(scope)
        await (self.app(scope, bounded, send) if refusal is None else refusal(scope, receive, send))


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
        http="h11",
        ws="none",
        log_level="warning",
        proxy_headers=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        h11_max_incomplete_event_size=MAX_HEADERS,
        timeout_graceful_shutdown=2,
    )

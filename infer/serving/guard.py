"""Limits on HTTP requests: who may send them, and how large they may be."""

import asyncio
import hmac
from functools import partial
from typing import Any, cast
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from infer.serving.config import ServerConfig, is_loopback
from infer.serving.responses import make_error_response

MAX_HEADER_BYTES = 16 * 1024  # names and values together
MAX_CONNECTIONS = 1024  # open at the same time; further ones get status 503
# Bytes of chunk sizes, chunk extensions and trailers, beyond as many bytes as the body has.
MAX_HTTP_BODY_FRAMING_BYTES = 64 * 1024
HTTP_BYTES_BETWEEN_LIMIT_CHECKS = 16 * 1024  # processed before the limits are checked again
MAX_PAUSE_IN_REQUEST_BODY_SECONDS = 60  # between two parts of a body
# `ApiServer` ends running answers after one second; after this time connections are closed.
SHUTDOWN_TIMEOUT_SECONDS = 2
MAX_QUOTED_HOST_CHARACTERS = 100
CLOSE_CONNECTION = {"Connection": "close"}  # the rest of the request is not read
# Key in a request's state: `LimitedH11Protocol` has found that the request is too large.
TOO_LARGE_REQUEST_STATE_KEY = "too_large"


class RequestGuard:
    """Middleware that requires the API key (except for /health) and limits the size of requests.

    A loopback server without a key accepts only the names of this machine in the Host header. A
    web page could otherwise resolve a name of its own to 127.0.0.1 (DNS rebinding) and read
    answers.
    """

    def __init__(self, app: ASGIApp, options: ServerConfig) -> None:
        self.app = app
        self.max_body_bytes = options.max_body_bytes
        self.too_large_message = f"a request may have {self.max_body_bytes} bytes"
        key = options.key()
        self.expected_authorization = None if key is None else b"Bearer " + key
        self.requires_local_host = (
            key is None and not options.allow_unauthenticated and is_loopback(options.host)
        )

    def refuse(self, scope: Scope) -> Response | None:
        """Return the response to a request that is refused before its body is read, else None."""
        headers = dict(scope["headers"])
        if int(headers.get(b"content-length", 0)) > self.max_body_bytes:
            response = make_error_response(413, self.too_large_message)
            response.headers.update(CLOSE_CONNECTION)
            return response
        host = headers.get(b"host", b"").decode("latin-1")
        if self.requires_local_host and host and not is_loopback(parse_hostname(host)):
            return make_error_response(
                403,
                "this server answers to localhost and 127.0.0.1, not to "
                f"{host[:MAX_QUOTED_HOST_CHARACTERS]}: see server.allow_unauthenticated",
            )
        if self.expected_authorization is None or scope["path"] == "/health":
            return None
        authorization = headers.get(b"authorization", b"")
        if hmac.compare_digest(authorization, self.expected_authorization):
            return None
        response = make_error_response(
            401, "this server requires a key: send it as Authorization: Bearer <key>"
        )
        response.headers["WWW-Authenticate"] = "Bearer"
        return response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        refusal = self.refuse(scope)
        if refusal is not None:
            return await refusal(scope, receive, send)
        received_bytes = 0
        is_complete = False

        async def receive_limited() -> Message:
            nonlocal received_bytes, is_complete
            try:
                async with asyncio.timeout(
                    None if is_complete else MAX_PAUSE_IN_REQUEST_BODY_SECONDS
                ):
                    message = await receive()
            except TimeoutError as error:
                raise HTTPException(
                    408,
                    f"nothing more of the request came for {MAX_PAUSE_IN_REQUEST_BODY_SECONDS} s",
                    CLOSE_CONNECTION,
                ) from error
            received_bytes += len(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            is_too_large = TOO_LARGE_REQUEST_STATE_KEY in scope.get("state", ())
            if received_bytes > self.max_body_bytes or is_too_large:
                raise HTTPException(413, self.too_large_message, CLOSE_CONNECTION)
            return message

        await self.app(scope, receive_limited, send)


class LimitedH11Protocol(H11Protocol):
    """HTTP/1.1 that stops reading a request that announces or sends too much.

    This is the case if the next chunk of a body is announced as larger than `max_body` bytes, or
    if there are too many bytes around the body. `RequestGuard` then sends the response.
    """

    def __init__(self, *args: Any, max_body: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.max_body = max_body
        # Bytes around the body of the current request, beyond as many bytes as the body has.
        self.framing_bytes = 0
        self.is_too_large = False

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), HTTP_BYTES_BETWEEN_LIMIT_CHECKS):
            if self.is_too_large or self.transport.is_closing():
                return
            self.process_bytes(data[start : start + HTTP_BYTES_BETWEEN_LIMIT_CHECKS])

    def process_bytes(self, data: bytes) -> None:
        """Process bytes of a request, then check the limits."""
        cycle = self.cycle
        previous_body_bytes = 0 if cycle is None else len(cycle.body)
        super().data_received(data)
        if self.conn.their_state is not h11.SEND_BODY:
            return

        if self.cycle is cycle:
            body_bytes = len(cycle.body) - previous_body_bytes
            self.framing_bytes = max(0, self.framing_bytes + len(data) - 2 * body_bytes)
        else:
            self.framing_bytes = 0
        # After the response, nothing reads the rest of the body.
        is_answered = self.cycle.response_complete
        max_framing_bytes = MAX_HTTP_BODY_FRAMING_BYTES + (self.max_body if is_answered else 0)
        # h11 has no public name for the size of a chunk whose bytes have not arrived.
        reader = getattr(self.conn, "_reader", None)
        chunk_bytes = getattr(reader, "_bytes_in_chunk", 0)
        if chunk_bytes <= self.max_body and self.framing_bytes <= max_framing_bytes:
            return
        self.is_too_large = True
        self.scope["state"][TOO_LARGE_REQUEST_STATE_KEY] = True
        self.cycle.message_event.set()
        if is_answered:
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.is_too_large:
            self.transport.close()


def parse_hostname(host: str) -> str:
    """Return a Host header without its port; an empty text if it is malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def build_uvicorn_config(app: ASGIApp, options: ServerConfig) -> uvicorn.Config:
    """Return uvicorn's settings for an application."""
    protocol_class = partial(LimitedH11Protocol, max_body=options.max_body_bytes)
    return uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        http=cast(Any, protocol_class),  # uvicorn only calls it
        ws="none",
        log_level="warning",
        proxy_headers=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_SECONDS,
    )

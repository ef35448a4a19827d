"""Checks who may send HTTP requests to the server, and limits how large requests may be."""

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

MAX_HTTP_HEADERS_BYTES = 16 * 1024  # limit of the total size of a request's header names and values
MAX_CONNECTIONS = 1024  # if more connections are open, requests get status 503
# Framing bytes of a chunked request are chunk sizes, chunk extensions and trailers, but neither
# headers nor body. A request may have this many more framing bytes than body bytes.
MAX_HTTP_BODY_FRAMING_BYTES = 64 * 1024
HTTP_BYTES_BETWEEN_LIMIT_CHECKS = (
    16 * 1024
)  # number of received bytes after which the size limits are checked
MAX_PAUSE_IN_REQUEST_BODY_SECONDS = 60  # limit of the time between two parts of a request body
# When the server stops, connections that are still open after this time are closed. `ApiServer`
# ends running answers earlier, after SECONDS_TO_FINISH_ANSWERS.
SHUTDOWN_TIMEOUT_SECONDS = 2
MAX_QUOTED_HOST_CHARACTERS = 100  # in error messages, a longer Host header is cut
# Header of an error response. The server then closes the connection without reading the rest of the
# request.
CLOSE_CONNECTION = {"Connection": "close"}
# Key that `LimitedH11Protocol` sets in the ASGI state of a request that is too large
TOO_LARGE_REQUEST_STATE_KEY = "too_large"


class RequestGuard:
    """Middleware that requires the API key (except for /health) and limits the size of requests.

    A server that listens on a loopback address without a key accepts only "localhost" and loopback
    addresses in the Host header. Without this check, a web page could make its domain name resolve
    to 127.0.0.1 (DNS rebinding) and read the answers of the server.
    """

    def __init__(self, app: ASGIApp, options: ServerConfig) -> None:
        self.app = app
        self.max_body_bytes = options.max_body_bytes
        self.too_large_message = (
            f"the request body is larger than {self.max_body_bytes} bytes: send less, or start "
            "the server with a larger server.max_body_bytes"
        )
        key = options.read_api_key()
        self.expected_authorization = None if key is None else b"Bearer " + key
        self.requires_local_host = (
            key is None and not options.allow_unauthenticated and is_loopback(options.host)
        )

    def check_request_headers(self, scope: Scope) -> Response | None:
        """Check the headers of a request before its body is read.

        Returns None if the request is accepted, else the error response to send.
        """
        headers = dict(scope["headers"])
        if int(headers.get(b"content-length", 0)) > self.max_body_bytes:
            response = make_error_response(413, self.too_large_message)
            response.headers.update(CLOSE_CONNECTION)
            return response
        host = headers.get(b"host", b"").decode("latin-1")
        if self.requires_local_host and host and not is_loopback(parse_hostname(host)):
            return make_error_response(
                403,
                "this server accepts requests to localhost and 127.0.0.1 only, not to "
                f"{host[:MAX_QUOTED_HOST_CHARACTERS]}: use one of these addresses, or start the "
                "server with server.allow_unauthenticated=true",
            )
        if self.expected_authorization is None or scope["path"] == "/health":
            return None
        authorization = headers.get(b"authorization", b"")
        if hmac.compare_digest(authorization, self.expected_authorization):
            return None
        response = make_error_response(
            401, "this server requires a key: send the header 'Authorization: Bearer <key>'"
        )
        response.headers["WWW-Authenticate"] = "Bearer"
        return response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        refusal = self.check_request_headers(scope)
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
                    "the request is incomplete, and no data arrived for "
                    f"{MAX_PAUSE_IN_REQUEST_BODY_SECONDS} s: send the request again",
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
    """An HTTP/1.1 protocol for uvicorn that stops reading a request that is too large.

    A request is too large if the header of a chunk of its body announces more than `max_body`
    bytes, or if the request has too many framing bytes, see MAX_HTTP_BODY_FRAMING_BYTES.
    `RequestGuard` then sends the error response.
    """

    def __init__(self, *args: Any, max_body: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.max_body = max_body
        # Number of framing bytes of the current request (see MAX_HTTP_BODY_FRAMING_BYTES), minus
        # the number of its body bytes; at least 0
        self.framing_bytes = 0
        self.is_too_large = False

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), HTTP_BYTES_BETWEEN_LIMIT_CHECKS):
            if self.is_too_large or self.transport.is_closing():
                return
            self.process_and_check_size(data[start : start + HTTP_BYTES_BETWEEN_LIMIT_CHECKS])

    def process_and_check_size(self, data: bytes) -> None:
        """Pass received bytes to uvicorn, then check whether the request is too large."""
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
        # After the response was sent, uvicorn discards the rest of the body. The discarded bytes
        # are counted as framing bytes, so the limit is increased by the maximum size of a body.
        is_answered = self.cycle.response_complete
        max_framing_bytes = MAX_HTTP_BODY_FRAMING_BYTES + (self.max_body if is_answered else 0)
        # Number of bytes that the current chunk announces. h11 has no public attribute for it.
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


def parse_hostname(host_header: str) -> str:
    """Return the host name in the value of a Host header, without the port.

    Returns an empty string if the value is malformed.
    """
    try:
        return urlsplit(f"//{host_header}").hostname or ""
    except ValueError:
        return ""


def build_uvicorn_config(app: ASGIApp, options: ServerConfig) -> uvicorn.Config:
    """Return uvicorn's settings for the server: address, limits and timeouts."""
    protocol_class = partial(LimitedH11Protocol, max_body=options.max_body_bytes)
    return uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        # uvicorn's annotation asks for a class, but any callable that returns a protocol works.
        http=cast(Any, protocol_class),
        ws="none",
        log_level="warning",
        proxy_headers=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        h11_max_incomplete_event_size=MAX_HTTP_HEADERS_BYTES,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_SECONDS,
    )

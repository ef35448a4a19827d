"""The OpenAI-compatible HTTP server for one engine.

The sequences of all requests are decoded in one batch. service.py checks and answers requests,
worker.py has the thread that runs the engine, and guard.py limits who may send requests and how
large they may be.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import prometheus_client
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from infer.engine.engine import Engine
from infer.serving.config import ServerConfig
from infer.serving.guard import RequestGuard, build_uvicorn_config
from infer.serving.protocol import ChatRequest, PromptRequest
from infer.serving.responses import ChatBuilder, CompletionBuilder, make_error_response
from infer.serving.service import CompletionService
from infer.serving.worker import OUT_OF_MEMORY_DELTA
from infer.utils.errors import RunAborted

SECONDS_TO_FINISH_ANSWERS = 1.0  # when the server stops, running answers have this time to finish
MAX_QUOTED_CONTENT_TYPE_CHARACTERS = 100  # in error messages, a longer Content-Type header is cut


async def handle_http_exception(request: Request, error: HTTPException) -> Response:
    """Return the error response for an exception that was raised while answering a request."""
    response = make_error_response(error.status_code, error.detail)
    response.headers.update(error.headers or {})
    return response


async def handle_memory_error(request: Request, error: MemoryError) -> Response:
    """Return the error response to a request that needs too much memory."""
    assert OUT_OF_MEMORY_DELTA.error is not None
    return make_error_response(*OUT_OF_MEMORY_DELTA.error)


async def handle_validation_error(request: Request, error: RequestValidationError) -> Response:
    """Return the error response to a request with invalid fields. It names the first of them."""
    content_type = request.headers.get("content-type", "")
    if "json" not in content_type:
        return make_error_response(
            400,
            f"the header Content-Type is '{content_type[:MAX_QUOTED_CONTENT_TYPE_CHARACTERS]}': "
            "send the request as JSON with Content-Type: application/json",
        )
    first_error = error.errors()[0]
    field = ".".join(str(key) for key in first_error["loc"] if key != "body")
    message = first_error["msg"].removeprefix("Value error, ")
    return make_error_response(400, f"{field}: {message}" if field else message)


EXCEPTION_HANDLERS: dict[Any, Any] = {
    HTTPException: handle_http_exception,
    MemoryError: handle_memory_error,
    RequestValidationError: handle_validation_error,
}


def create_app(engine: Engine, options: ServerConfig) -> FastAPI:
    """Return the HTTP application that answers requests with an engine.

    The thread that runs the engine starts and ends together with the application.
    """
    service = CompletionService(engine, options)
    created = int(time.time())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        service.start()
        yield
        service.stop()

    app = FastAPI(
        title="Block-diffusion drafting",
        lifespan=lifespan,
        openapi_url=None,
        exception_handlers=EXCEPTION_HANDLERS,
    )
    app.state.service = service
    app.add_middleware(RequestGuard, options=options)

    @app.get("/health")
    async def health() -> Response:
        if service.worker.is_alive():
            return JSONResponse({"status": "ok"}, 200)
        return JSONResponse({"status": "the engine has ended"}, 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        text = prometheus_client.generate_latest(service.metrics.registry)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> dict:
        model = {
            "id": service.model_name,
            "object": "model",
            "created": created,
            "owned_by": "local",
            "max_model_len": engine.capacity,
        }
        return {"object": "list", "data": [model]}

    @app.post("/v1/completions")
    async def completions(body: PromptRequest, request: Request) -> Response:
        return await service.answer(body, request, CompletionBuilder)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await service.answer(body, request, ChatBuilder)

    return app


class ApiServer(uvicorn.Server):
    """The HTTP server of a `CompletionService`.

    When the server is stopped, running answers have SECONDS_TO_FINISH_ANSWERS seconds to finish.
    `run` raises RunAborted if the server cannot listen at the configured address.

    on_listening: called when the server accepts connections
    """

    def __init__(
        self, config: uvicorn.Config, service: CompletionService, on_listening: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.service = service
        self.on_listening = on_listening

    async def startup(self, sockets: list | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit as exit_error:
            # uvicorn raises SystemExit in two cases. If it cannot listen, the context of SystemExit
            # is an OSError. If the application could not start, uvicorn has printed the error.
            error = exit_error.__context__
            if error is None:
                reason = "the server could not be started, see the error above"
            else:
                reason = f"{error}; choose another server.host= or server.port="
            raise RunAborted(f"{self.service.options.url}: {reason}") from exit_error
        self.on_listening()

    async def shutdown(self, sockets: list | None = None) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(SECONDS_TO_FINISH_ANSWERS, self.service.fail_running_answers)
        await super().shutdown(sockets)


def make_server(
    engine: Engine, options: ServerConfig, on_listening: Callable[[], None]
) -> ApiServer:
    """Return an HTTP server that answers requests with an engine.

    Its method `run` starts it, and returns after `should_exit` was set to true or the engine has
    failed for good.

    on_listening: called when the server accepts connections
    """
    app = create_app(engine, options)
    service = app.state.service
    server = ApiServer(build_uvicorn_config(app, options), service, on_listening)
    service.worker.on_failure = lambda: setattr(server, "should_exit", True)
    return server


def serve(
    engine: Engine, options: ServerConfig, on_listening: Callable[[], None] = lambda: None
) -> None:
    """Serve an engine over HTTP until the process is interrupted.

    on_listening: called when the server accepts connections

    Raises RunAborted if the engine has failed for good. The process then ends with an error code,
    so that a supervisor can restart it.
    """
    server = make_server(engine, options, on_listening)
    server.run()
    if server.service.worker.failure is not None:
        raise RunAborted(server.service.worker.failure)

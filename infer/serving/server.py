"""The server: OpenAI-compatible HTTP in front of one engine, whose rows all requests share.

The engine lives in a thread of its own and knows no HTTP; the event loop knows no tensors. Between
them go `Ticket`s, one for each text, and `TextPiece`s back.
"""

import asyncio
import gc
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pkgutil import resolve_name

import prometheus_client
import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from infer.api import Prompt, TextStream, encode
from infer.config import TextOptions
from infer.engine.engine import Engine
from infer.engine.grammar import (
    asked_grammar,
    check_grammar_size,
    check_properties,
    grammar_tokenizer,
    serialised_tokenizer,
)
from infer.engine.sequence import Sequence, check_prompt
from infer.engine.trial import Trial
from infer.serving.config import ServerConfig
from infer.serving.guard import Guard, network
from infer.serving.protocol import (
    Chat,
    ChatRequest,
    Completion,
    CompletionRequest,
    Form,
    PromptRequest,
    TextPiece,
    error,
    event,
    failed,
)
from infer.utils.chat_template import place_thoughts
from infer.utils.errors import Stopped
from infer.utils.optional import is_installed, require_installed

log = logging.getLogger(__name__)

# (tokenizer) -> how a model's answers are told apart into thoughts, words and tool calls: an
# optional package
ANSWER_READING = "infer.serving.calls:reading_of"
ENDED = "the engine failed and did not come back: start the server again (fewer decoding.max_num_seqs take less memory)"
SHORT = failed(503, "the server is short of memory: send a smaller request, or try again later")
FAILED = failed(500, "the engine failed on this text")
CLOSED = failed(503, "the server was stopped")
DECODING_LABELS = ("method", "budget")  # options of the engine that /metrics tells


@dataclass(eq=False)
class Ticket:
    """One text on its way through the engine. `pieces` belongs to the event loop."""

    prompt: list[int]
    options: TextOptions
    loop: asyncio.AbstractEventLoop
    pieces: "asyncio.Queue[tuple[int, TextPiece]]"  # of all texts of its request
    index: int  # among them
    special: bool = False  # whether its pieces have special tokens
    trace: bool = False  # whether they say what was rejected
    text: Sequence | None = None  # the engine thread's, like what was told of it so far
    tokens: int = 0
    rounds: int = 0
    cancelled: bool = False

    def tell(self, piece: TextPiece) -> None:
        """Hand a piece from the engine's thread to the event loop."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, (self.index, piece))


class Metrics:
    """The counters and gauges of /metrics, and how the engine decodes: the values of
    DECODING_LABELS."""

    def __init__(self, decoding: dict[str, str]) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        kept = {"namespace": "blockdraft", "registry": self.registry}
        counter = partial(prometheus_client.Counter, **kept)
        gauge = partial(prometheus_client.Gauge, **kept)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of texts let in")
        self.reused = counter(
            "reused_prompt_tokens", "Of these, not computed: an earlier text began alike"
        )
        self.tokens = counter("generated_tokens", "Committed tokens")
        self.rounds = counter("rounds", "Rounds, one count per row")
        self.drafted = counter("drafted_tokens", "Verified draft nodes")
        self.accepted = counter(
            "accepted_tokens_per_pos", "Rounds that accepted a draft so deep", ["position"]
        )
        self.writing = gauge("texts_writing", "Texts being written")
        self.waiting = gauge("texts_waiting", "Texts waiting for a row")
        prometheus_client.Info("decoding", "How texts are decoded", **kept).info(decoding)


class Worker(threading.Thread):
    """The thread that runs the engine while there is work, and sleeps otherwise.

    The texts of a round that fails are written on, fewer side by side, until one fails alone: that
    one is given up, as is a text that cannot be told. An engine that cannot come back ends the
    thread: `failure` says why, and `on_failure` stops the server, which tells everybody.
    """

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        super().__init__(name="engine", daemon=True)
        self.engine = engine
        self.metrics = metrics
        self.inbox: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self.open: dict[Sequence, tuple[Ticket, TextStream]] = {}
        self.failure: str | None = None
        self.on_failure: Callable[[], None] = lambda: None

    def run(self) -> None:
        try:
            self._work()
        except Exception:
            log.exception("the engine's thread failed")
            self.failure = ENDED
            self.on_failure()

    def _work(self) -> None:
        """Take texts in and write them until a None comes. Raises whatever the engine raises that
        cannot come back."""
        while True:
            tickets = (
                [] if self.engine.busy else [self.inbox.get()]
            )  # sleeps while there is nothing to do
            while not self.inbox.empty():
                tickets.append(self.inbox.get())
            if None in tickets:
                return
            for ticket in tickets:
                self._take(ticket)
            if self.engine.busy and (wrong := self._step()) is not None:
                self._recover(wrong)

    def _take(self, ticket: Ticket) -> None:
        if ticket.cancelled:
            return
        try:
            ticket.text = text = self.engine.submit(ticket.prompt, ticket.options)
            text.trace = ticket.trace
            self.open[text] = ticket, TextStream(self.engine.target, text, ticket.special)
        except Exception as error:
            log.exception("a text was let in that the engine refuses")
            self._give_up(ticket, end_of(error))

    def _give_up(self, ticket: Ticket, end: TextPiece) -> None:
        """Tell a text's client that it failed; the engine drops it with the next round."""
        if ticket.text is not None:
            ticket.text.cancelled = True
            self.open.pop(ticket.text, None)
        ticket.tell(end)

    def _step(self) -> TextPiece | None:
        """Run a round and tell of it; return what a text is told that made it fail, None if it did
        not."""
        for text, (ticket, _) in self.open.items():
            text.cancelled = ticket.cancelled
        wrong = None
        try:
            self.engine.step()
        except Exception as error:  # what it holds, tensors among it, is free only after this block
            log.exception("a round failed")
            wrong = end_of(error)
        for text, (ticket, _) in list(self.open.items()):
            if len(text.ids) <= ticket.tokens and text.finish is None:
                continue
            try:
                self._tell(text)
            except Exception as error:
                log.exception("a text could not be told")
                self._give_up(ticket, end_of(error))
        self.metrics.writing.set(len(self.engine.scheduler.writing))
        self.metrics.waiting.set(
            len(self.engine.scheduler.waiting) + len(self.engine.scheduler.entering)
        )
        return wrong

    def _recover(self, wrong: TextPiece) -> None:
        """Let the texts of a failed round wait again, in an engine with new caches; give one up
        that failed alone."""
        text = self.engine.scheduler.retry()
        if text in self.open:
            self._give_up(self.open[text][0], wrong)
        gc.collect()
        self.engine.reset()

    def _tell(self, text: Sequence) -> None:
        ticket, pieces = self.open[text]
        new = text.ids[ticket.tokens :]
        rounds = text.drafted[ticket.rounds :]
        rejected = text.rejected[-1] if text.rejected else None
        piece = TextPiece(
            pieces.next(), new, text.logprobs[ticket.tokens :], text.finish, sum(rounds), rejected
        )
        if ticket.tokens == 0 and new:
            self.metrics.prompt_tokens.inc(len(text.prompt))
            self.metrics.reused.inc(text.stats.reused)
        self.metrics.tokens.inc(len(new))
        self.metrics.rounds.inc(len(rounds))
        self.metrics.drafted.inc(sum(rounds))
        for accepted in text.accepted[ticket.rounds :]:
            for position in range(accepted):
                self.metrics.accepted.labels(position).inc()
        ticket.tokens, ticket.rounds = len(text.ids), len(text.drafted)
        ticket.tell(piece)  # who has an answer finds it counted
        if text.finish is not None:
            del self.open[text]


class Service:
    """The event loop's side: the texts of all requests that have not ended."""

    def __init__(self, engine: Engine, options: ServerConfig) -> None:
        self.engine = engine
        self.options = options
        self.target, self.name = engine.target, options.model_name or engine.target.name
        self.reading = None
        if is_installed(ANSWER_READING):
            self.reading = resolve_name(ANSWER_READING)(self.target.tokenizer)
        options_of_engine = vars(engine.options)  # a masked model's have no budget
        labels = [name for name in DECODING_LABELS if name in options_of_engine]
        self.metrics = Metrics({name: str(options_of_engine[name]) for name in labels})
        self.worker = Worker(engine, self.metrics)
        self.inside: set[Ticket] = set()
        self.preparing = 0  # texts that are not inside yet
        self.trial = Trial(partial(serialised_tokenizer, engine.target))
        self.reader = ThreadPoolExecutor(1, "prompts")
        self.compiler = ThreadPoolExecutor(1, "grammars")

    def start(self) -> None:
        """Start all threads: short of memory, none could be started later. Making llguidance's
        tokenizer holds all of them up, for a second where the vocabulary is large: it is made
        here."""
        with suppress(ValueError):  # of targets that cannot follow grammars
            grammar_tokenizer(self.target)
        self.worker.start()
        for pool in (self.reader, self.compiler):
            pool.submit(int).result()

    def stop(self) -> None:
        """End all threads, whatever they do."""
        self.worker.inbox.put(None)
        for pool in (self.reader, self.compiler):
            pool.shutdown(wait=False, cancel_futures=True)
        self.trial.close()
        self.worker.join()

    async def admit(self, body: CompletionRequest) -> list[Ticket]:
        """Check a request's texts and queue them, all or none. Prompts are tokenised and grammars
        compiled outside the event loop. Raises HTTPException."""
        prompts = self._prompts(body)
        self.preparing += len(prompts) * body.n
        try:
            pool = self.compiler if body.shapes() or body.wished_calls else self.reader
            loop = asyncio.get_running_loop()
            tickets = await loop.run_in_executor(pool, self._tickets, body, prompts, loop)
        except ValueError as wrong:
            raise HTTPException(400, str(wrong)) from wrong
        finally:
            self.preparing -= len(prompts) * body.n
        self.inside.update(tickets)
        for ticket in tickets:
            self.worker.inbox.put(ticket)
        return tickets

    def _prompts(self, body: CompletionRequest) -> list[Prompt]:
        """Return a request's prompts. Raises HTTPException for what is no work for this server, or
        not now."""
        if self.worker.failure is not None:
            raise HTTPException(503, self.worker.failure)
        if body.model not in (None, self.name):
            raise HTTPException(404, f"the model here is {self.name}, not {body.model}")
        prompts = body.prompts()
        working = len(self.inside) + self.preparing
        most = self.options.max_requests
        if len(prompts) * body.n > most:
            raise HTTPException(
                400,
                f"the request is for {len(prompts) * body.n} texts, {most} may be in work at all",
            )
        if working + len(prompts) * body.n > most:
            raise HTTPException(
                429, f"{working} texts are in work or waiting, {most} may be: try again later"
            )
        return prompts

    def _tickets(
        self, body: CompletionRequest, prompts: list[Prompt], loop: asyncio.AbstractEventLoop
    ) -> list[Ticket]:
        """Return a request's texts, checked. Raises ValueError."""
        if body.callable_tools:
            require_installed(ANSWER_READING, "tools: what reads tool calls")
        tickets = []
        pieces = asyncio.Queue()
        special = body.chat and self.reading is not None and self.reading.special
        if body.chat and getattr(self.target.tokenizer, "chat_template", None) is not None:
            template = str(self.target.tokenizer.get_chat_template())
            prompts = [place_thoughts(messages, template) for messages in prompts]
        for prompt in prompts:
            ids = encode(self.target, prompt, body.template_options, body.tools_shown)
            for _ in range(body.n):
                index = len(tickets)
                options = self._settings(body, ids, index)
                tickets.append(Ticket(ids, options, loop, pieces, index, special, body.trace))
        return tickets

    def _settings(self, body: CompletionRequest, ids: list[int], index: int) -> TextOptions:
        """Return the checked options of one text. Raises ValueError."""
        most, logprobs = body.limits()
        room = max(1, self.engine.capacity - len(ids))
        settings = body.text_options(room if most is None else most, logprobs, index)
        check_prompt(ids, settings, self.engine.capacity, self.target.vocabulary)
        if (tools := body.wished_calls) is not None:
            for tool in tools:
                check_properties(tool.parameters)
            if self.reading is None:
                raise ValueError(
                    "tool_choice: how this model writes calls is not known here, use auto"
                )
            calls = self.reading.grammar(tools, body.several_calls, self.reading.thinks(ids))
            settings = replace(settings, grammar=calls)
        if (asked := asked_grammar(settings)) is not None:
            check_grammar_size(*asked)
            self.trial.check(*asked)
        self.engine.check_text(settings)
        return settings

    def close(self) -> None:
        """End all answers with a sentence: the server stops."""
        for ticket in self.inside:
            ticket.cancelled = True
            ticket.pieces.put_nowait((ticket.index, CLOSED))

    def leave(self, tickets: list[Ticket]) -> None:
        """Forget the texts of a request that has ended; cancel those that have not."""
        for ticket in self.inside.intersection(tickets):
            self.inside.discard(ticket)
            ticket.cancelled = True

    async def answer(self, body: CompletionRequest, request: Request, form: type[Form]) -> Response:
        """Return the response to a request, whole or streamed."""
        tickets = await self.admit(body)
        prompts = [ticket.prompt for ticket in tickets[:: body.n]]
        answers = []
        if body.chat and self.reading is not None:
            answers = [self.reading.reader(body.callable_tools, prompts[0]) for _ in range(body.n)]
        form = form(self.target, self.name, body, prompts, answers)
        if body.stream:
            return Stream(self.events(tickets, form, body), lambda: self.leave(tickets))
        whole = asyncio.ensure_future(gather(tickets))
        gone = asyncio.ensure_future(disconnected(request))
        try:
            await asyncio.wait([whole, gone], return_when=asyncio.FIRST_COMPLETED)
            if not whole.done():
                return error(499, "the client went away")
            return JSONResponse(form.whole(whole.result(), reused(tickets[:: body.n])))
        finally:
            whole.cancel()
            gone.cancel()
            self.leave(tickets)

    async def events(
        self, tickets: list[Ticket], form: Form, body: CompletionRequest
    ) -> AsyncIterator[str]:
        """Yield server-sent events as rounds commit; the texts of a request come mixed, told apart
        by their index."""
        for i in range(len(tickets)):
            if opening := form.opening(i):
                yield event(opening)
        tokens = 0
        try:
            async for index, piece in pieces_of(tickets):
                tokens += len(piece.ids)
                if piece.text or piece.logprobs or piece.finish or piece.rejected:
                    yield event(form.chunk(index, piece))
        except HTTPException as refused:
            yield event({"error": {"message": refused.detail, "type": "server_error"}})
            return
        if body.stream_options and body.stream_options.include_usage:
            usage = form.usage(tokens, reused(tickets[:: body.n]))
            yield event(form.envelope([], chunk=True) | {"usage": usage})
        yield "data: [DONE]\n\n"


class Stream(StreamingResponse):
    """Server-sent events. `after` is called when the response is over, even if nobody listened."""

    def __init__(self, events: AsyncIterator[str], after: Callable[[], None]) -> None:
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self.after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.after()


async def refused(request: Request, wrong: HTTPException) -> Response:
    response = error(wrong.status_code, wrong.detail)
    response.headers.update(wrong.headers or {})
    return response


async def short(request: Request, wrong: MemoryError) -> Response:
    return error(*SHORT.refusal)


async def invalid(request: Request, wrong: RequestValidationError) -> Response:
    kind = request.headers.get("content-type", "")
    if "json" not in kind:
        return error(
            400, f"send JSON, with the header Content-Type: application/json (it is '{kind[:100]}')"
        )
    first = wrong.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    said = first["msg"].removeprefix("Value error, ")
    return error(400, f"{where}: {said}" if where else said)


REFUSALS = {HTTPException: refused, MemoryError: short, RequestValidationError: invalid}


def create_app(engine: Engine, options: ServerConfig) -> FastAPI:
    """Return the application around an engine; its start and stop start and end the engine's
    thread."""
    service = Service(engine, options)
    began = int(time.time())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        service.stop()

    app = FastAPI(
        title="Block-diffusion drafting",
        lifespan=lifespan,
        openapi_url=None,
        exception_handlers=REFUSALS,
    )
    app.state.service = service
    app.add_middleware(Guard, options=options)

    @app.get("/health")
    async def health() -> Response:
        alive = service.worker.is_alive()
        return JSONResponse(
            {"status": "ok" if alive else "the engine has ended"}, 200 if alive else 503
        )

    @app.get("/metrics")
    async def metrics() -> Response:
        text = prometheus_client.generate_latest(service.metrics.registry)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> dict:
        model = {"id": service.name, "object": "model", "created": began, "owned_by": "local"}
        return {"object": "list", "data": [model | {"max_model_len": engine.capacity}]}

    @app.post("/v1/completions")
    async def completions(body: PromptRequest, request: Request) -> Response:
        return await service.answer(body, request, Completion)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await service.answer(body, request, Chat)

    return app


def end_of(error: Exception) -> TextPiece:
    """Return what a text is told that made the engine raise. On a CPU torch has no class for want
    of memory."""
    full = isinstance(
        error, MemoryError | torch.OutOfMemoryError
    ) or "can't allocate memory" in str(error)
    return SHORT if full else FAILED


def reused(tickets: list[Ticket]) -> int:
    """Return how many prompt tokens of texts that have ended were not computed."""
    return sum(ticket.text.stats.reused for ticket in tickets)


async def pieces_of(tickets: list[Ticket]) -> AsyncIterator[tuple[int, TextPiece]]:
    """Yield the pieces of a request's texts as they come, with the text's index, up to the end of
    all. Raises HTTPException where one failed."""
    left = len(tickets)
    while left:
        index, piece = await tickets[0].pieces.get()
        if piece.refusal is not None:
            raise HTTPException(*piece.refusal)
        left -= piece.finish is not None
        yield index, piece


async def gather(tickets: list[Ticket]) -> list[TextPiece]:
    """Wait for whole texts; return each as one piece. Raises HTTPException where one failed."""
    texts = [TextPiece("", [], [], None) for _ in tickets]
    async for index, new in pieces_of(tickets):
        said = texts[index]
        texts[index] = TextPiece(
            said.text + new.text, said.ids + new.ids, said.logprobs + new.logprobs, new.finish
        )
    return texts


async def disconnected(request: Request) -> None:
    """Return when the client has gone away."""
    while not await request.is_disconnected():
        await asyncio.sleep(0.1)


class Server(uvicorn.Server):
    """Calls `on_bound` once the address is this server's; its `run` raises Stopped, with the
    reason, where it cannot be. Stopped, it gives running answers a second to end."""

    def __init__(
        self, config: uvicorn.Config, service: Service, on_bound: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.service = service
        self.on_bound = on_bound

    async def startup(self, sockets: list | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit as ended:  # an OSError, or what it has shown
            wrong = ended.__context__
            elsewhere = "choose another server.host= or server.port="
            why = f"{wrong}; {elsewhere}" if wrong else "it could not be started, as it says above"
            raise Stopped(f"{self.service.options.url}: {why}") from ended
        self.on_bound()

    async def shutdown(self, sockets: list | None = None) -> None:
        asyncio.get_running_loop().call_later(1, self.service.close)
        await super().shutdown(sockets)


def make_server(engine: Engine, options: ServerConfig, on_bound: Callable[[], None]) -> Server:
    """Return a server of an engine, which its `run` starts, and `should_exit` ends; it ends where
    the engine cannot go on. It calls `on_bound` once it listens."""
    app = create_app(engine, options)
    service = app.state.service
    server = Server(network(app, options), service, on_bound)
    service.worker.on_failure = lambda: setattr(server, "should_exit", True)
    return server


def serve(
    engine: Engine, options: ServerConfig, on_bound: Callable[[], None] = lambda: None
) -> None:
    """Serve until interrupted, and call `on_bound` once it listens. Raises Stopped where the engine
    cannot go on, so that the process ends with an exit code that a supervisor sees."""
    server = make_server(engine, options, on_bound)
    server.run()
    if server.service.worker.failure is not None:
        raise Stopped(server.service.worker.failure)

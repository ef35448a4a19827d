"""Checks and answers the requests to the server, with complete or streamed responses.

Most code runs in the event loop. Prompts are tokenised and grammars compiled in other threads.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from infer.api import encode_prompt
from infer.config import SamplingOptions
from infer.engine.engine import Engine
from infer.engine.grammar import (
    check_grammar_size,
    check_property_count,
    get_grammar_option,
    get_grammar_tokenizer,
    serialise_tokenizer,
)
from infer.engine.grammar_sandbox import GrammarSandbox
from infer.engine.sequence import check_prompt
from infer.serving.config import ServerConfig
from infer.serving.protocol import CompletionRequest
from infer.serving.responses import (
    DeltaParser,
    ResponseBuilder,
    SequenceDelta,
    format_server_sent_event,
    make_error_response,
    make_failure_delta,
)
from infer.serving.worker import EngineThread, SequenceRequest, ServerMetrics
from infer.utils.chat_template import place_reasoning
from infer.utils.optional import is_installed, require_installed

# Function of an optional module that returns the `AnswerFormat` of a tokenizer. An `AnswerFormat`
# separates answers into reasoning, content and tool calls.
ANSWER_FORMAT_ENTRY_POINT = "infer.serving.calls:find_answer_format"
SERVER_STOPPED_DELTA = make_failure_delta(503, "the server was stopped")
# Engine options that are labels in /metrics
ENGINE_OPTIONS_IN_METRICS_LABELS = ("method", "budget")
DISCONNECT_POLL_SECONDS = 0.1
# Status that nginx logs if the client closes the connection before the response
CLIENT_CLOSED_REQUEST_STATUS = 499


class CompletionService:
    """Checks and answers the requests for one engine.

    A request is admitted if it is valid and the server is not overloaded. An admitted request has
    one `SequenceRequest` for each answer.

    active_requests: the `SequenceRequest`s of all admitted requests that still have an open
        connection
    num_preparing_sequences: number of sequences that are being tokenised or checked
    """

    def __init__(self, engine: Engine, options: ServerConfig) -> None:
        self.engine = engine
        self.options = options
        self.target = engine.target
        self.model_name = options.model_name or engine.target.name
        self.answer_format: Any = None
        if is_installed(ANSWER_FORMAT_ENTRY_POINT):
            find_answer_format = resolve_name(ANSWER_FORMAT_ENTRY_POINT)
            self.answer_format = find_answer_format(self.target.tokenizer)
        engine_options = vars(engine.options)
        # An engine of a masked diffusion model has no option "budget".
        labels = {
            name: str(engine_options[name])
            for name in ENGINE_OPTIONS_IN_METRICS_LABELS
            if name in engine_options
        }
        self.metrics = ServerMetrics(labels)
        self.worker = EngineThread(engine, self.metrics)
        self.active_requests: set[SequenceRequest] = set()
        self.num_preparing_sequences = 0
        self.grammar_sandbox = GrammarSandbox(partial(serialise_tokenizer, engine.target))
        # Prompts with and without a grammar have separate threads, so that a grammar that compiles
        # slowly does not delay requests without a grammar.
        self.prompt_pool = ThreadPoolExecutor(1, "prompts")
        self.grammar_pool = ThreadPoolExecutor(1, "grammars")

    def start(self) -> None:
        """Start all threads now. A thread that is started later could fail to start if memory is
        short.

        The tokenizer of llguidance is also built now. For a large vocabulary, this takes a second
        and blocks all threads.
        """
        # A ValueError means that llguidance is missing or does not support the tokenizer.
        with suppress(ValueError):
            get_grammar_tokenizer(self.target)
        self.worker.start()
        for pool in (self.prompt_pool, self.grammar_pool):
            pool.submit(int).result()

    def stop(self) -> None:
        """End all threads."""
        self.worker.inbox.put(None)
        for pool in (self.prompt_pool, self.grammar_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        self.grammar_sandbox.close()
        self.worker.join()

    async def admit(self, request: CompletionRequest) -> list[SequenceRequest]:
        """Check a request, and queue all of its sequences for the engine.

        Prompts are tokenised and grammars compiled outside the event loop. Raises HTTPException if
        the request is refused; then no sequence is queued.
        """
        prompts = self._check_admission(request)
        sequence_count = len(prompts) * request.n
        self.num_preparing_sequences += sequence_count
        try:
            has_grammar = request.grammar_options() or request.required_call_candidates
            pool = self.grammar_pool if has_grammar else self.prompt_pool
            loop = asyncio.get_running_loop()
            sequence_requests = await loop.run_in_executor(
                pool, self._build_sequence_requests, request, prompts, loop
            )
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        finally:
            self.num_preparing_sequences -= sequence_count
        self.active_requests.update(sequence_requests)
        for sequence_request in sequence_requests:
            self.worker.inbox.put(sequence_request)
        return sequence_requests

    def _check_admission(self, request: CompletionRequest) -> list[Any]:
        """Check that the server can take a request, and return the prompts of the request.

        Raises HTTPException if the engine has failed, if the request names another model, or if the
        request would exceed the maximum number of sequences.
        """
        if self.worker.failure is not None:
            raise HTTPException(503, self.worker.failure)
        if request.model not in (None, self.model_name):
            raise HTTPException(
                404,
                f"this server has no model {request.model!r}: use {self.model_name!r}, or leave "
                "out the field model",
            )
        prompts = request.prompts()
        sequence_count = len(prompts) * request.n
        active_count = len(self.active_requests) + self.num_preparing_sequences
        limit = self.options.max_requests
        if sequence_count > limit:
            raise HTTPException(
                400,
                f"the request asks for {sequence_count} sequences, this server allows {limit} "
                "(server.max_requests): send several requests",
            )
        if active_count + sequence_count > limit:
            raise HTTPException(
                429,
                f"{active_count} sequences are running or waiting, this server allows {limit}: "
                "try again later",
            )
        return prompts

    def _build_sequence_requests(
        self, request: CompletionRequest, prompts: list[Any], loop: asyncio.AbstractEventLoop
    ) -> list[SequenceRequest]:
        """Tokenise the prompts of a request and check its options.

        loop: the event loop of the HTTP server

        Returns a `SequenceRequest` for each answer. Raises ValueError for an invalid request.
        """
        if request.callable_tools:
            require_installed(ANSWER_FORMAT_ENTRY_POINT, "tools: the parser of tool calls")
        tokenizer: Any = self.target.tokenizer
        if request.is_chat and getattr(tokenizer, "chat_template", None) is not None:
            template = str(tokenizer.get_chat_template())
            prompts = [place_reasoning(messages, template) for messages in prompts]

        keep_special_tokens = False
        if request.is_chat and self.answer_format is not None:
            keep_special_tokens = self.answer_format.needs_special_tokens
        sequence_requests = []
        deltas = asyncio.Queue()
        for prompt in prompts:
            ids = encode_prompt(
                self.target, prompt, request.template_options, request.template_tools
            )
            for _ in range(request.n):
                index = len(sequence_requests)
                sequence_request = SequenceRequest(
                    ids,
                    self._build_checked_options(request, ids, index),
                    loop,
                    deltas,
                    index,
                    keep_special_tokens,
                    request.trace,
                )
                sequence_requests.append(sequence_request)
        return sequence_requests

    def _build_checked_options(
        self, request: CompletionRequest, prompt_ids: list[int], index: int
    ) -> SamplingOptions:
        """Return the options with which the engine generates one answer to a request.

        index: number of the answer in the request

        Raises ValueError for invalid options, prompts that are too long, and grammars that are
        invalid or too expensive.
        """
        max_new_tokens = request.output_token_limit
        if max_new_tokens is None:
            max_new_tokens = max(1, self.engine.capacity - len(prompt_ids))
        options = request.to_sampling_options(max_new_tokens, index)
        check_prompt(prompt_ids, options, self.engine.capacity, self.target.vocab_size)

        tools = request.required_call_candidates
        if tools is not None:
            for tool in tools:
                check_property_count(tool.parameters)
            if self.answer_format is None:
                raise ValueError(
                    "tool_choice requires a tool call, but the format of this model's tool calls "
                    'is unknown: use tool_choice="auto"'
                )
            grammar = self.answer_format.build_tool_call_grammar(
                tools,
                request.allows_several_required_calls,
                self.answer_format.prompt_opens_reasoning(prompt_ids),
            )
            options = replace(options, grammar=grammar)

        grammar = get_grammar_option(options)
        if grammar is not None:
            check_grammar_size(*grammar)
            self.grammar_sandbox.check(*grammar)
        self.engine.check_options(options)
        return options

    def fail_running_answers(self) -> None:
        """End all running answers with an error. It is called when the server stops."""
        for sequence_request in self.active_requests:
            sequence_request.cancelled = True
            sequence_request.deltas.put_nowait((sequence_request.index, SERVER_STOPPED_DELTA))

    def release(self, sequence_requests: list[SequenceRequest]) -> None:
        """Remove the sequences of a finished HTTP request from the active ones, and cancel those
        that are still being decoded.
        """
        for sequence_request in self.active_requests.intersection(sequence_requests):
            self.active_requests.discard(sequence_request)
            sequence_request.cancelled = True

    async def answer(
        self,
        request: CompletionRequest,
        http_request: Request,
        builder_class: type[ResponseBuilder],
    ) -> Response:
        """Generate the answers to a request, and return the HTTP response, complete or streamed.

        builder_class: builds the response in the form of the requested API
        """
        sequence_requests = await self.admit(request)
        # The list has request.n sequences for the first prompt, then those for the next prompt.
        first_of_prompts = sequence_requests[:: request.n]
        prompts = [sequence_request.prompt for sequence_request in first_of_prompts]
        parsers: list[DeltaParser] = []
        if request.is_chat and self.answer_format is not None:
            for _ in range(request.n):
                parser = self.answer_format.create_parser(request.callable_tools, prompts[0])
                parsers.append(parser)
        builder = builder_class(self.target, self.model_name, request, prompts, parsers)
        if request.stream:
            events = self.stream_events(sequence_requests, builder, request)
            return EventStreamResponse(events, lambda: self.release(sequence_requests))

        complete = asyncio.ensure_future(collect_answers(sequence_requests))
        disconnected = asyncio.ensure_future(wait_for_disconnect(http_request))
        try:
            await asyncio.wait([complete, disconnected], return_when=asyncio.FIRST_COMPLETED)
            if not complete.done():
                return make_error_response(
                    CLIENT_CLOSED_REQUEST_STATUS, "the client closed the connection"
                )
            cached_tokens = count_cached_tokens(first_of_prompts)
            return JSONResponse(builder.build_response(complete.result(), cached_tokens))
        finally:
            complete.cancel()
            disconnected.cancel()
            self.release(sequence_requests)

    async def stream_events(
        self,
        sequence_requests: list[SequenceRequest],
        builder: ResponseBuilder,
        request: CompletionRequest,
    ) -> AsyncIterator[str]:
        """Yield the chunks of the response as server-sent events, as soon as tokens are decoded.

        Chunks of different answers are interleaved. Each chunk contains the index of its answer.
        """
        for index in range(len(sequence_requests)):
            first_chunk = builder.build_first_chunk(index)
            if first_chunk is not None:
                yield format_server_sent_event(first_chunk)
        completion_tokens = 0
        try:
            async for index, delta in iterate_deltas(sequence_requests):
                completion_tokens += len(delta.ids)
                if delta.text or delta.logprobs or delta.finish_reason or delta.rejected_ids:
                    yield format_server_sent_event(builder.build_chunk(index, delta))
        except HTTPException as error:
            yield format_server_sent_event(
                {"error": {"message": error.detail, "type": "server_error"}}
            )
            return
        if request.stream_options and request.stream_options.include_usage:
            cached_tokens = count_cached_tokens(sequence_requests[:: request.n])
            yield format_server_sent_event(
                builder.build_usage_chunk(completion_tokens, cached_tokens)
            )
        yield "data: [DONE]\n\n"


class EventStreamResponse(StreamingResponse):
    """A response of server-sent events.

    on_close: called when the response has ended, even if the client has not read any event
    """

    def __init__(self, events: AsyncIterator[str], on_close: Callable[[], None]) -> None:
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self.on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.on_close()


def count_cached_tokens(sequence_requests: list[SequenceRequest]) -> int:
    """Return how many prompt tokens of these sequences were found in the prefix cache."""
    sequences = [sequence_request.sequence for sequence_request in sequence_requests]
    return sum(sequence.stats.cached_tokens for sequence in sequences if sequence is not None)


async def iterate_deltas(
    sequence_requests: list[SequenceRequest],
) -> AsyncIterator[tuple[int, SequenceDelta]]:
    """Yield (index of the sequence, delta) for a request as soon as tokens are decoded.

    Ends when all sequences have finished. Raises HTTPException if a sequence has failed.
    """
    unfinished_count = len(sequence_requests)
    while unfinished_count:
        index, delta = await sequence_requests[0].deltas.get()
        if delta.error is not None:
            raise HTTPException(*delta.error)
        if delta.finish_reason is not None:
            unfinished_count -= 1
        yield index, delta


async def collect_answers(sequence_requests: list[SequenceRequest]) -> list[SequenceDelta]:
    """Wait until all sequences have finished, and return each answer as a single delta.

    Raises HTTPException if a sequence has failed.
    """
    answers = [SequenceDelta("", [], [], None) for _ in sequence_requests]
    async for index, delta in iterate_deltas(sequence_requests):
        answer = answers[index]
        answers[index] = SequenceDelta(
            answer.text + delta.text,
            answer.ids + delta.ids,
            answer.logprobs + delta.logprobs,
            delta.finish_reason,
        )
    return answers


async def wait_for_disconnect(http_request: Request) -> None:
    """Wait until the client has closed the connection."""
    while not await http_request.is_disconnected():
        await asyncio.sleep(DISCONNECT_POLL_SECONDS)

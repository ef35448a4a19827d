"""Generates answers with a server that has OpenAI's API, with many concurrent requests.

The server may be vLLM, SGLang or the server of this project.
"""

import asyncio
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpx

from infer.config import DecodeOptions, SamplingOptions
from infer.serving.regeneration_task import (
    PromptExample,
    RegenerationTask,
    TargetOutput,
    parse_call_arguments,
    restore_reasoning_tag,
    seed_options_for_turn,
)

MAX_REQUEST_ATTEMPTS = 3  # number of failed requests after which an example counts as failed
# Delay after the first failed request; four times as long after the second
FIRST_RETRY_DELAY_SECONDS = 1.0
MAX_OUTAGE_SECONDS = 60.0  # the run ends if the server accepts no connection for this time
CONNECT_TIMEOUT_SECONDS = 10.0
READ_TIMEOUT_SECONDS = 600.0
# Maximum number of started examples whose record is not yielded yet, per concurrent request.
# Records are yielded in the order of the examples, so finished examples wait for a slow one before
# them. With a larger number, new requests can be sent for a longer time while the slow example
# runs.
MAX_STARTED_TASKS_PER_CONCURRENT_REQUEST = 4
RETRYABLE_CLIENT_ERRORS = (408, 429)  # HTTP status codes 4xx after which a request is sent again
# The field `owned_by` of a model shows which server it is: "vllm", or "local" for our server. Only
# these two support the request field return_token_ids.
MODEL_OWNERS_RETURNING_TOKEN_IDS = ("vllm", "local")
# Sampling options that OpenAI's API does not have. They are sent only if they are not the default.
EXTRA_SAMPLING_OPTIONS = ("top_k", "min_p", "repetition_penalty", "ignore_eos")


def build_request_body(task: RegenerationTask, model: str, options: DecodeOptions) -> dict:
    """Return the body of the HTTP request for the next output of an example.

    task: the example, and the outputs that were already generated for it
    model: name of the model on the server
    """
    example = task.example
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "seed": seed_options_for_turn(options, example, task.turn).seed,
        "top_p": options.top_p,
    }
    values = vars(options)
    defaults = vars(SamplingOptions())
    for name in EXTRA_SAMPLING_OPTIONS:
        if values[name] != defaults[name]:
            body[name] = values[name]
    if options.stop:
        body["stop"] = list(options.stop)
    if example.tools:
        body["tools"] = example.tools
    if example.template_options:
        body["chat_template_kwargs"] = example.template_options

    prompt = task.prompt
    if isinstance(prompt, str):
        body["prompt"] = prompt
    else:
        body["messages"] = to_openai_messages(prompt)
    return body


def to_openai_messages(messages: list[dict]) -> list[dict]:
    """Return messages in which the arguments of tool calls are JSON text, as in OpenAI's API."""
    converted_messages = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            arguments = json.dumps(parse_call_arguments(call["function"]))
            function = call["function"] | {"arguments": arguments}
            calls.append(call | {"function": function})
        converted_messages.append(message | {"tool_calls": calls} if calls else message)
    return converted_messages


def parse_response(response: dict, is_chat: bool, prompt_end: str = "") -> TargetOutput:
    """Return the output that a server's response contains.

    is_chat: true for a response of /chat/completions, false for one of /completions
    prompt_end: the text at the end of the prompt. If it ends with "<think>" and the response has no
        separate reasoning, "<think>" is added in front of the output

    Raises LookupError, TypeError or AttributeError for a malformed response.
    """
    choice = response["choices"][0]
    message = choice["message"] if is_chat else {"content": choice["text"]}
    text = str(message["content"] or "")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    finish_reason = choice["finish_reason"] or "stop"
    # If a stop string ended the output, vLLM reports this string as stop_reason. The output then
    # has no end token.
    if isinstance(choice.get("stop_reason"), str):
        finish_reason = "stop string"
    if is_chat and not reasoning:
        text = restore_reasoning_tag(text, prompt_end)
    token_ids = choice.get("token_ids") or None
    tool_calls = message.get("tool_calls") or None
    return TargetOutput(text, finish_reason, token_ids, reasoning, tool_calls)


class OpenAIClient:
    """Generates answers with a server that has OpenAI's API.

    url: address of the API, such as http://host:8000/v1
    options: sampling options and the maximum number of generated tokens
    max_concurrent_requests: maximum number of requests that run at the same time
    prompt_end: takes an example and returns the text at the end of its prompts

    If the environment variable OPENAI_API_KEY is set, its value is sent as the API key. The
    constructor raises ValueError if there is no server at the address, or if the server has no
    model.
    """

    def __init__(
        self,
        url: str,
        options: DecodeOptions,
        max_concurrent_requests: int,
        prompt_end: Callable[[PromptExample], str] = lambda example: "",
    ) -> None:
        self.url = url.rstrip("/")
        self.options = options
        self.max_concurrent_requests = max_concurrent_requests
        self.prompt_end = prompt_end
        key = os.environ.get("OPENAI_API_KEY")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            response = httpx.get(
                f"{self.url}/models", headers=self.headers, timeout=CONNECT_TIMEOUT_SECONDS
            )
            model = response.json()["data"][0]
            self.model = str(model["id"])
            self.reports_token_ids = model.get("owned_by") in MODEL_OWNERS_RETURNING_TOKEN_IDS
        except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(
                f"server={url}: no server with a model answers at this address ({error}): start "
                "the server, or correct the address, which usually ends in /v1. To use several "
                "servers, start one run for each of them with another shard="
            ) from error

    def answer_examples(
        self, examples: Iterable[PromptExample], on_finished: Callable[[], None] = lambda: None
    ) -> Iterator[dict]:
        """Answer the examples, and yield a record for each, in the order of the examples.

        Closing the generator cancels running requests. `RegenerationTask` describes the records.

        on_finished: called as soon as an example is finished. Its record is yielded later if
            earlier examples are not finished
        """
        started: deque[asyncio.Task] = deque()
        timeout = httpx.Timeout(CONNECT_TIMEOUT_SECONDS, read=READ_TIMEOUT_SECONDS)
        limits = httpx.Limits(max_connections=None)
        with asyncio.Runner() as runner:
            loop = runner.get_loop()
            request_slots = asyncio.Semaphore(self.max_concurrent_requests)
            http = httpx.AsyncClient(headers=self.headers, timeout=timeout, limits=limits)
            for example in examples:
                answer = self._answer_example(http, request_slots, example, on_finished)
                started.append(loop.create_task(answer))
                if (
                    len(started)
                    == MAX_STARTED_TASKS_PER_CONCURRENT_REQUEST * self.max_concurrent_requests
                ):
                    yield loop.run_until_complete(started.popleft())
            while started:
                yield loop.run_until_complete(started.popleft())

    async def _answer_example(
        self,
        http: httpx.AsyncClient,
        request_slots: asyncio.Semaphore,
        example: PromptExample,
        on_finished: Callable[[], None],
    ) -> dict:
        """Send requests until the example is finished, and return its record.

        request_slots: limits the number of concurrent requests

        Raises ValueError if the server accepts no connection for MAX_OUTAGE_SECONDS.
        """
        task = RegenerationTask(example)
        failed_attempts = 0
        last_response_time = time.monotonic()
        while task.record is None:
            async with request_slots:
                try:
                    error = await self._try_request_output(http, task)
                except httpx.ConnectError as connect_error:
                    # A failed connection has nothing to do with the example, so it does not count
                    # as one of the example's failed requests.
                    if time.monotonic() - last_response_time > MAX_OUTAGE_SECONDS:
                        raise ValueError(
                            f"server={self.url} has accepted no connection for "
                            f"{MAX_OUTAGE_SECONDS:.0f} s ({connect_error}): start the server, "
                            "then run the same command again to continue"
                        ) from connect_error
                    await asyncio.sleep(min(1.0, MAX_OUTAGE_SECONDS / 10))
                    continue
            last_response_time = time.monotonic()
            if error is None:
                continue
            failed_attempts += 1
            if failed_attempts == MAX_REQUEST_ATTEMPTS:
                task.fail_or_end_chat(error)
            else:
                await asyncio.sleep(FIRST_RETRY_DELAY_SECONDS * 4 ** (failed_attempts - 1))
        on_finished()
        return task.record

    async def _try_request_output(
        self, http: httpx.AsyncClient, task: RegenerationTask
    ) -> str | None:
        """Request the next output of a task from the server, and add it to the task.

        Returns an error message if the request failed and may be sent again. Returns None if the
        output was added, or if the task was ended with an error. Raises ConnectError if the server
        accepts no connection.
        """
        body = build_request_body(task, self.model, self.options)
        if self.reports_token_ids and task.is_chat:
            body["return_token_ids"] = True
        path = "/chat/completions" if task.is_chat else "/completions"
        try:
            response = await http.post(self.url + path, json=body)
            if response.status_code == 200:
                prompt_end = self.prompt_end(task.example)
                task.add_output(parse_response(response.json(), task.is_chat, prompt_end))
                return None
        except httpx.ConnectError:
            raise
        except (
            httpx.HTTPError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            return f"the server sent no valid response ({type(error).__name__}: {error})"

        status = response.status_code
        message = f"the server answered with status {status}: {response.text[:200]}"
        is_client_error = 400 <= status < 500 and status not in RETRYABLE_CLIENT_ERRORS
        if not is_client_error:
            return message
        # The server would refuse the same request again, so the example fails. Status 400 may mean
        # that the chat has become too long. In this case, the answers to its earlier turns are
        # kept.
        task.fail_or_end_chat(message, keep_answers=status == 400)
        return None

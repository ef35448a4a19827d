"""Answers from a server with OpenAI's API (vLLM, SGLang or ours), with many concurrent requests."""

import asyncio
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpx

from infer.config import DecodeOptions, TextOptions
from infer.serving.regeneration_task import (
    PromptExample,
    RegenerationTask,
    TargetOutput,
    parse_call_arguments,
    restore_reasoning_tag,
    seed_options_for_turn,
)

MAX_REQUEST_ATTEMPTS = 3  # for one output, before its example counts as failed
RETRY_DELAY_SECONDS = 1.0  # before the second attempt, four times as long before the third
MAX_OUTAGE_SECONDS = 60.0  # without a connection, before the run ends
CONNECT_TIMEOUT_SECONDS = 10.0
READ_TIMEOUT_SECONDS = 600.0
# Tasks that are started for each concurrent request. Records are yielded in order, so a slow task
# must not keep the others from starting.
MAX_STARTED_TASKS_PER_CONCURRENT_REQUEST = 4
RETRYABLE_CLIENT_ERRORS = (408, 429)  # HTTP status codes
# `owned_by` of models whose server supports return_token_ids: vLLM and our server.
MODEL_OWNERS_RETURNING_TOKEN_IDS = ("vllm", "local")
# Sampling options that OpenAI's API does not have. They are sent only if they have an effect.
EXTRA_SAMPLING_OPTIONS = ("top_k", "min_p", "repetition_penalty", "ignore_eos")


def build_request_body(task: RegenerationTask, model: str, options: DecodeOptions) -> dict:
    """Return the body of the request for a task's next output."""
    example = task.example
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "seed": seed_options_for_turn(options, example, task.turn).seed,
        "top_p": options.top_p,
    }
    values = vars(options)
    defaults = vars(TextOptions())
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
    """Return messages with the arguments of tool calls as JSON text, as OpenAI's API takes them."""
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
    """Return the output in a server's response.

    prompt_end: the last words of the prompt, which may open the reasoning of the output

    Raises LookupError, TypeError or AttributeError for a response of another form.
    """
    choice = response["choices"][0]
    message = choice["message"] if is_chat else {"content": choice["text"]}
    text = str(message["content"] or "")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    finish_reason = choice["finish_reason"] or "stop"
    # In vLLM's responses, stop_reason is the stop string that ended the output. Such an output does
    # not have the model's own end.
    if isinstance(choice.get("stop_reason"), str):
        finish_reason = "stop string"
    if is_chat and not reasoning:
        text = restore_reasoning_tag(text, prompt_end)
    token_ids = choice.get("token_ids") or None
    tool_calls = message.get("tool_calls") or None
    return TargetOutput(text, finish_reason, token_ids, reasoning, tool_calls)


class OpenAIClient:
    """Generates answers with a server.

    url: address of the API, such as http://host:8000/v1
    max_concurrent_requests: requests that are running at the same time
    prompt_end: returns the last words of an example's prompts

    The key in the environment variable OPENAI_API_KEY is sent. Raises ValueError if there is no
    server with a model at the address.
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
                f"server={url}: there are no models there ({error}); the address usually ends in "
                "/v1. For several servers, start one run for each, with shard="
            ) from error

    def answer_examples(
        self, examples: Iterable[PromptExample], on_finished: Callable[[], None] = lambda: None
    ) -> Iterator[dict]:
        """Yield the records of the examples in order.

        `on_finished` is called for each finished example, in any order. Closing the generator
        cancels running requests.
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

        Raises ValueError if the server accepts no connection for MAX_OUTAGE_SECONDS.
        """
        task = RegenerationTask(example)
        failed_attempts = 0
        last_response_time = time.monotonic()
        while task.record is None:
            async with request_slots:
                try:
                    error = await self._request_output(http, task)
                except httpx.ConnectError as connect_error:
                    # The example is not the reason, so this is not one of its attempts.
                    if time.monotonic() - last_response_time > MAX_OUTAGE_SECONDS:
                        raise ValueError(
                            f"server={self.url} has not answered for {MAX_OUTAGE_SECONDS:.0f} s: "
                            f"{connect_error}"
                        ) from connect_error
                    await asyncio.sleep(min(1.0, MAX_OUTAGE_SECONDS / 10))
                    continue
            last_response_time = time.monotonic()
            if error is None:
                continue
            failed_attempts += 1
            if failed_attempts == MAX_REQUEST_ATTEMPTS:
                task.fail(error)
            else:
                await asyncio.sleep(RETRY_DELAY_SECONDS * 4 ** (failed_attempts - 1))
        on_finished()
        return task.record

    async def _request_output(self, http: httpx.AsyncClient, task: RegenerationTask) -> str | None:
        """Request a task's next output and add it to the task.

        Returns an error message if another attempt may succeed, else None. Raises ConnectError.
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
            return f"no valid response: {type(error).__name__}: {error}"

        status = response.status_code
        message = f"status {status}: {response.text[:200]}"
        is_client_error = 400 <= status < 500 and status not in RETRYABLE_CLIENT_ERRORS
        if not is_client_error:
            return message
        # Another attempt would fail, too. With status 400, a chat may have become too long.
        task.fail(message, keep_answers=status == 400)
        return None

"""Answers from a server with OpenAI's API (vLLM, SGLang, ours), many requests under way, in the
rows' order."""

import asyncio
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import httpx

from infer.config import DecodeOptions, TextOptions
from infer.serving.dialogue import Dialogue, Row, Turn, arguments_of, of_row, with_opening

TRIES = 3  # requests for one answer, before its row counts as failed
REST = 1.0  # seconds before the second request, four times as long before the third
PATIENCE = 60.0  # seconds without the server before the run ends
SAYS_IDS = ("vllm", "local")  # owners of models that know return_token_ids: vLLM, and our server


def request_body(dialogue: Dialogue, model: str, options: DecodeOptions) -> dict:
    """Return what a server is asked next. Fields that OpenAI's API does not have are sent where not
    neutral."""
    row = dialogue.row
    told = vars(options)
    body = {
        "model": model,
        "max_tokens": options.max_new_tokens,
        "temperature": options.temperature,
    }
    body |= {"seed": of_row(options, row, dialogue.turns).seed, "top_p": options.top_p}
    neutral = vars(TextOptions())
    for name in ("top_k", "min_p", "repetition_penalty", "ignore_eos"):
        if told[name] != neutral[name]:
            body[name] = told[name]
    body |= {"stop": list(options.stop)} if options.stop else {}
    body |= {"tools": row.tools} if row.tools else {}
    body |= {"chat_template_kwargs": row.template} if row.template else {}
    return body | (
        {"messages": in_api(dialogue.prompt)} if dialogue.chat else {"prompt": dialogue.prompt}
    )


def in_api(messages: list[dict]) -> list[dict]:
    """Return messages as OpenAI's API has them: the arguments of tool calls are texts there."""
    sent = []
    for message in messages:
        if message.get("tool_calls"):
            functions = [call["function"] for call in message["tool_calls"]]
            functions = [
                function | {"arguments": json.dumps(arguments_of(function))}
                for function in functions
            ]
            calls = zip(message["tool_calls"], functions, strict=True)
            message = message | {
                "tool_calls": [call | {"function": function} for call, function in calls]
            }
        sent.append(message)
    return sent


def turn_of(response: dict, chat: bool, prompt_end: str = "") -> Turn:
    """Return a server's response as a turn; `prompt_end`: the last words of the prompt, which may
    open a thought. Raises LookupError, TypeError or AttributeError for one that is no answer."""
    choice = response["choices"][0]
    said = choice["message"] if chat else {"content": choice["text"]}
    text = str(said["content"] or "")
    finish = choice["finish_reason"] or "stop"
    thought = said.get("reasoning_content") or said.get("reasoning")
    # vLLM's: the text that stopped it, which is not the model's end
    if isinstance(choice.get("stop_reason"), str):
        finish = "stop string"
    if chat and not thought:
        text = with_opening(text, prompt_end)
    return Turn(
        text, finish, choice.get("token_ids") or None, thought, said.get("tool_calls") or None
    )


class Client:
    """A server that answers rows, `at_once` requests under way. prompt_end: the last words of a
    row's prompts. A request is tried three times before its row counts as failed; the key in
    OPENAI_API_KEY is sent. Raises ValueError where no server has a model."""

    def __init__(
        self,
        url: str,
        options: DecodeOptions,
        at_once: int,
        prompt_end: Callable[[Row], str] = lambda row: "",
    ) -> None:
        self.url = url.rstrip("/")
        self.options = options
        self.at_once = at_once
        self.prompt_end = prompt_end
        key = os.environ.get("OPENAI_API_KEY")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            first = httpx.get(f"{self.url}/models", headers=self.headers, timeout=10).json()[
                "data"
            ][0]
            self.model = str(first["id"])
            self.says_ids = first.get("owned_by") in SAYS_IDS
        except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as wrong:
            raise ValueError(
                f"server={url}: no models there ({wrong}); an address ends in /v1 as a rule, several take a shard= each"
            ) from wrong

    def answers(
        self, rows: Iterable[Row], finished: Callable[[], None] = lambda: None
    ) -> Iterator[dict]:
        """Yield the answers in the rows' order, and call `finished` as each of them is there, in
        any order. Who stops does not wait for those under way."""
        begun: deque[asyncio.Task] = deque()
        timeout = httpx.Timeout(10, read=600)
        limits = httpx.Limits(max_connections=None)
        with asyncio.Runner() as runner:
            loop = runner.get_loop()
            room = asyncio.Semaphore(self.at_once)
            http = httpx.AsyncClient(headers=self.headers, timeout=timeout, limits=limits)
            for row in rows:
                begun.append(loop.create_task(self._answer(http, room, row, finished)))
                if len(begun) == 4 * self.at_once:
                    yield loop.run_until_complete(begun.popleft())
            while begun:
                yield loop.run_until_complete(begun.popleft())

    async def _answer(
        self,
        http: httpx.AsyncClient,
        room: asyncio.Semaphore,
        row: Row,
        finished: Callable[[], None],
    ) -> dict:
        """Ask until the row has its answer. Raises ValueError where the server has been away for
        long."""
        dialogue = Dialogue(row)
        tries = 0
        last = time.monotonic()
        while dialogue.answer is None:
            async with room:
                try:
                    wrong = await self._ask(http, dialogue)
                except httpx.ConnectError as away:  # the row is not at fault
                    if time.monotonic() - last > PATIENCE:
                        raise ValueError(
                            f"server={self.url} has not answered for {PATIENCE:.0f} s: {away}"
                        ) from away
                    await asyncio.sleep(min(1.0, PATIENCE / 10))
                    continue
            last = time.monotonic()
            tries = tries + (wrong is not None)
            if tries == TRIES:
                dialogue.fail(wrong)
            elif wrong is not None:
                await asyncio.sleep(REST * 4 ** (tries - 1))
        finished()
        return dialogue.answer

    async def _ask(self, http: httpx.AsyncClient, dialogue: Dialogue) -> str | None:
        """Let the server answer a row's next turn; return what is wrong where it may be another
        time. Raises ConnectError."""
        body = request_body(dialogue, self.model, self.options)
        body |= {"return_token_ids": True} if self.says_ids and dialogue.chat else {}
        path = "/chat/completions" if dialogue.chat else "/completions"
        try:
            response = await http.post(self.url + path, json=body)
            if response.status_code == 200:
                dialogue.take(
                    turn_of(response.json(), dialogue.chat, self.prompt_end(dialogue.row))
                )
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
        ) as wrong:
            return f"no answer: {type(wrong).__name__}: {wrong}"
        status = response.status_code
        error = f"status {response.status_code}: {response.text[:200]}"
        if not 400 <= status < 500 or status in (408, 429):
            return error
        dialogue.fail(
            error, keep=status == 400
        )  # asking again changes nothing; a chat may have grown too long
        return None

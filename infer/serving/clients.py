"""Answers from servers with OpenAI's API (vLLM, SGLang, ours), any number of them side by side.

Each server takes the next row when it has room, so that a slow one answers fewer; one that fails rests, longer each
time, while the others have its rows. Answers come in the rows' order, and no row is begun that is too far ahead of the
oldest one under way.
"""

import heapq
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import NamedTuple

import httpx

from infer.config import DecodeOptions, TextOptions
from infer.serving.dialogue import Answer, Answering, Dialogue, Row, Turn, arguments_of, of_row, with_opening

LARGEST_RESPONSE = 32 << 20  # bytes of what a server answers
TRIES = 3  # answers of servers that are none, before a row counts as failed
FIRST_REST, LONGEST_REST = 0.05, 30.0  # seconds that a failing server is left alone
PATIENCE = 60.0  # seconds without any server before the run ends
SAYS_IDS = ("vllm", "local")  # owners of models that know return_token_ids: vLLM, and our server


class Unreachable(Exception):
    """Raised where a server does not listen; the row is not at fault."""


class Again(Exception):
    """Raised for a request that may work another time, or elsewhere; the message says what happened."""


def request_body(row: Row, model: str, options: DecodeOptions, dialogue: Dialogue | None = None) -> dict:
    """Return what a server is asked next. Fields that OpenAI's API does not have are sent where not neutral."""
    dialogue = dialogue or Dialogue(row)
    body = {"model": model, "max_tokens": options.max_new_tokens, "temperature": options.temperature}
    body |= {"seed": of_row(options, row, dialogue.turns).seed, "top_p": options.top_p}
    neutral = TextOptions()
    for name in ("top_k", "min_p", "repetition_penalty", "ignore_eos"):
        if getattr(options, name) != getattr(neutral, name):
            body[name] = getattr(options, name)
    body |= {"stop": list(options.stop)} if options.stop else {}
    body |= {"tools": row.tools} if row.tools else {}
    body |= {"chat_template_kwargs": row.template} if row.template else {}
    return body | ({"messages": in_api(dialogue.prompt)} if dialogue.chat else {"prompt": dialogue.prompt})


def in_api(messages: list[dict]) -> list[dict]:
    """Return messages as OpenAI's API has them: the arguments of tool calls are texts there."""
    sent = []
    for message in messages:
        if message.get("tool_calls"):
            functions = [call["function"] for call in message["tool_calls"]]
            functions = [function | {"arguments": json.dumps(arguments_of(function))} for function in functions]
            calls = zip(message["tool_calls"], functions, strict=True)
            message = message | {"tool_calls": [call | {"function": function} for call, function in calls]}
        sent.append(message)
    return sent


def turn_of(response: dict, chat: bool, prompt_end: str = "") -> Turn:
    """Return a server's response as a turn; `prompt_end`: the last words of the prompt, which may open a thought.
    Raises ValueError for one that is no answer."""
    try:
        choice = response["choices"][0]
        said = choice["message"] if chat else {"content": choice["text"]}
        text, thought, finish = said["content"] or "", None, choice["finish_reason"] or "stop"
        thought = said.get("reasoning_content") or said.get("reasoning")
        calls, ids = said.get("tool_calls"), choice.get("token_ids")
    except (LookupError, TypeError, AttributeError) as wrong:
        raise ValueError(f"no answer: {type(wrong).__name__}: {wrong}") from wrong
    if not isinstance(text, str):
        raise ValueError("an answer that is no text")
    if isinstance(choice.get("stop_reason"), str):  # vLLM's: the text that stopped it, which is not the model's end
        finish = "stop string"
    if chat and not thought:
        text = with_opening(text, prompt_end)
    return Turn(text, finish, ids or None, thought, calls or None)


@dataclass
class Server:
    """One server, and how it fares."""

    url: str
    options: DecodeOptions
    prompt_end: Callable[[Row], str] = lambda row: ""
    model: str | None = None  # the first that it has
    fails: int = 0  # in a row
    rests_until: float = 0.0
    client: httpx.Client = field(init=False)
    ids_too: bool = False

    def __post_init__(self) -> None:
        headers = {"Accept-Encoding": "identity"}  # no compressed answer that grows when it is unpacked
        if os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {os.environ['OPENAI_API_KEY']}"
        limits = httpx.Limits(max_connections=None)
        timeout = httpx.Timeout(10, read=600)
        self.client = httpx.Client(base_url=self.url.rstrip("/"), headers=headers, timeout=timeout, limits=limits)

    def connect(self) -> str | None:
        """Ask which model it has; return what is wrong where there is none."""
        try:
            first = json.loads(self._asked("GET", "/models")[1])["data"][0]
            self.ids_too, self.model = first.get("owned_by") in SAYS_IDS, str(first["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError, RecursionError, AttributeError) as wrong:
            return f"server={self.url}: no models there ({wrong}); an address ends in /v1 as a rule"
        return None

    def _asked(self, method: str, path: str, body: dict | None = None) -> tuple[int, bytes]:
        """Return a response's status and content. Raises ValueError for one that is larger than any answer."""
        content = b""
        with self.client.stream(method, path, json=body) as response:
            for part in response.iter_bytes():
                content += part
                if len(content) > LARGEST_RESPONSE:
                    raise ValueError(f"a response of more than {LARGEST_RESPONSE} bytes")
        return response.status_code, content

    def ask(self, dialogue: Dialogue) -> None:
        """Let the server answer a row's next turn. Raises Again or Unreachable."""
        body = request_body(dialogue.row, self.model, self.options, dialogue)
        body |= {"return_token_ids": True} if self.ids_too and dialogue.chat else {}
        path = "/chat/completions" if dialogue.chat else "/completions"
        try:
            status, content = self._asked("POST", path, body)
            if status == 200:
                response = json.loads(content)
                dialogue.take(turn_of(response, dialogue.chat, self.prompt_end(dialogue.row)))
                return
        except httpx.ConnectError as wrong:
            raise Unreachable(f"{type(wrong).__name__}: {wrong}") from wrong
        except (httpx.HTTPError, ValueError, RecursionError) as wrong:
            raise Again(f"{type(wrong).__name__}: {wrong}") from wrong
        error = f"status {status}: {content[:200].decode(errors='replace')}"
        if 400 <= status < 500 and status not in (408, 429):
            dialogue.fail(error, keep=status == 400)  # asking again changes nothing; a chat may have grown too long
        else:
            raise Again(error)


def by_server(
    urls: str, options: DecodeOptions, at_once: int, prompt_end: Callable[[Row], str] = lambda row: ""
) -> Answering:
    """Return a function that answers rows by one or several servers, `at_once` requests under way at each, in the rows'
    order. A request is tried three times before its row counts as failed; the key in OPENAI_API_KEY is sent to these
    servers only. urls: with commas between them. prompt_end: the last words of a row's prompts. Raises ValueError where
    no server has a model."""
    servers = [Server(url.strip(), options, prompt_end) for url in urls.split(",")]
    faults = [server.connect() for server in servers]
    if all(faults):
        raise ValueError(faults[0])
    model = next(server.model for server in servers if server.model)
    for server in servers:
        server.model = server.model or model
    return lambda rows: Pool(servers, at_once, rows).answers()


class Job(NamedTuple):
    """A row that a server is to ask. Of several, the first in the rows' order is asked first."""

    place: int
    tries: int
    dialogue: Dialogue


class Pool:
    """Rows on their way through several servers. All threads hold `changed` while they look at or change it."""

    def __init__(self, servers: list[Server], at_once: int, rows: Iterable[Row]) -> None:
        self.servers, self.rows = servers, iter(rows)
        self.window = 4 * at_once * len(servers)  # most rows that are begun and not given out yet
        self.changed = Condition()
        self.waiting: list[Job] = []  # heap of those to be asked again
        self.done: dict[int, Answer] = {}  # by place
        self.begun = self.given = 0
        self.ended = self.stopped = False
        self.failure: Exception | None = None
        self.answered_at = time.monotonic()  # when any server was last there
        for server in servers:
            for _ in range(at_once):
                Thread(target=self._work, args=(server,), daemon=True).start()

    def answers(self) -> Iterator[Answer]:
        """Yield the answers in the rows' order. Who stops does not wait for those under way."""
        try:
            while True:
                with self.changed:
                    self.changed.wait_for(lambda: self.given in self.done or self._over() or self.failure)
                    if self.failure is not None:
                        raise self.failure
                    if self.given not in self.done:
                        return
                    answer = self.done.pop(self.given)
                    self.given += 1
                    self.changed.notify_all()
                yield answer
        finally:
            with self.changed:
                self.stopped = True
                self.changed.notify_all()

    def _over(self) -> bool:
        return self.ended and self.given == self.begun

    def _next(self, server: Server) -> Job | None:
        """Wait until the server is to ask something, and return that; None at the end."""
        with self.changed:
            while not (self.stopped or self.failure or self._over()):
                rest = server.rests_until - time.monotonic()
                if rest > 0:
                    self.changed.wait(rest)
                elif self.waiting:
                    return heapq.heappop(self.waiting)
                elif not self.ended and self.begun - self.given < self.window:
                    row = next(self.rows, None)
                    if row is not None:
                        self.begun += 1
                        return Job(self.begun - 1, 0, Dialogue(row))
                    self.ended = True
                    self.changed.notify_all()
                else:
                    self.changed.wait()
        return None

    def _work(self, server: Server) -> None:
        try:
            while (job := self._next(server)) is not None:
                place, tries, dialogue = job
                error: Exception | None = None
                try:
                    while dialogue.answer is None:
                        server.ask(dialogue)
                except (Again, Unreachable) as wrong:
                    error = wrong
                    if isinstance(wrong, Again) and tries + 1 == TRIES:
                        dialogue.fail(str(wrong))
                with self.changed:
                    self._note(server, error)
                    if dialogue.answer is None:
                        heapq.heappush(self.waiting, Job(place, tries + isinstance(error, Again), dialogue))
                    else:
                        self.done[place] = dialogue.answer
                    self.changed.notify_all()
        except Exception as wrong:  # noqa: BLE001  of the rows; whoever waits for answers gets it
            with self.changed:
                self.failure = wrong
                self.changed.notify_all()

    def _note(self, server: Server, error: Exception | None) -> None:
        """Note how a server fared: one that fails rests; where all have been away for long, the run ends."""
        now = time.monotonic()
        if not isinstance(error, Unreachable):
            self.answered_at = now
        if error is None:
            server.fails = 0
            return
        if now >= server.rests_until:  # the others of its requests failed with the same fault
            server.fails += 1
            server.rests_until = now + min(LONGEST_REST, FIRST_REST * 2**server.fails)
        if now - self.answered_at > PATIENCE:
            self.failure = ValueError(f"no server has answered for {PATIENCE:.0f} seconds, the last said: {error}")

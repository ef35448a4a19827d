"""Answers from servers with OpenAI's API (vLLM, SGLang, ours), any number of them side by side.

Each server takes the next row when it has room, so that a slow one answers fewer; one that fails rests, longer each
time, while the others have its rows. Answers come in the rows' order, and no row is begun that is too far ahead of the
oldest one under way.
"""

import json
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Condition, Thread

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


@dataclass(eq=False)
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
    return lambda rows: Pool(servers, at_once).answers(rows)


class Pool:
    """Rows on their way through several servers, a thread for each request that may be under way."""

    def __init__(self, servers: list[Server], at_once: int) -> None:
        self.servers, self.at_once = servers, at_once
        self.changed = Condition()  # held by who looks at or changes `busy`, or how servers fare
        self.busy: Counter[Server] = Counter()  # requests under way
        self.answered_at = time.monotonic()  # when any server was last there
        self.tasks: SimpleQueue[tuple[Future, Row] | None] = SimpleQueue()
        self.threads = [Thread(target=self._work, daemon=True) for _ in range(at_once * len(servers))]

    def answers(self, rows: Iterable[Row]) -> Iterator[Answer]:
        """Yield the answers in the rows' order. Who stops does not wait for those under way."""
        begun: deque[Future] = deque()
        for thread in self.threads:
            thread.start()
        try:
            for row in rows:
                begun.append(Future())
                self.tasks.put((begun[-1], row))
                if len(begun) == 4 * len(self.threads):
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        finally:
            for future in begun:
                future.cancel()
            for _ in self.threads:
                self.tasks.put(None)

    def _work(self) -> None:
        while (task := self.tasks.get()) is not None:
            future, row = task
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._answer(row))
                except Exception as wrong:  # noqa: BLE001  whoever waits for the answer gets it
                    future.set_exception(wrong)

    def _answer(self, row: Row) -> Answer:
        """Ask servers until the row has its answer. Raises ValueError where all have been away for long."""
        dialogue, tries = Dialogue(row), 0
        while dialogue.answer is None:
            server, error = self._take(), None
            try:
                server.ask(dialogue)
            except (Again, Unreachable) as wrong:
                error = wrong
                tries += isinstance(wrong, Again)
                if tries == TRIES:
                    dialogue.fail(str(wrong))
            finally:
                self._give_back(server, error)
        return dialogue.answer

    def _take(self) -> Server:
        """Wait for a server that has room and does not rest."""
        with self.changed:
            while True:
                now, roomy = time.monotonic(), [each for each in self.servers if self.busy[each] < self.at_once]
                ready = [server for server in roomy if server.rests_until <= now]
                if ready:
                    server = min(ready, key=self.busy.__getitem__)
                    self.busy[server] += 1
                    return server
                self.changed.wait(min((server.rests_until - now for server in roomy), default=None))

    def _give_back(self, server: Server, error: Exception | None) -> None:
        """Note how a server fared: one that fails rests. Raises ValueError where all have been away for long."""
        with self.changed:
            now = time.monotonic()
            self.busy[server] -= 1
            self.changed.notify_all()
            if not isinstance(error, Unreachable):
                self.answered_at = now
            if error is None:
                server.fails = 0
            elif now >= server.rests_until:  # else the others of its requests failed with the same fault
                server.fails += 1
                server.rests_until = now + min(LONGEST_REST, FIRST_REST * 2**server.fails)
            if now - self.answered_at > PATIENCE:
                raise ValueError(f"no server has answered for {PATIENCE:.0f} seconds, the last said: {error}")

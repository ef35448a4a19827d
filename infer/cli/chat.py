"""`chat`: a conversation in the terminal with a target and its drafter, or with a server of ours,
coloured to show what was drafted.

Green: drafted and accepted. Red, struck through: drafted, refused by the target. Yellow: the
    target's
own token, one a round.
"""

import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field

import httpx
from rich.console import Console
from rich.text import Text

from infer.cli.serve import ServeCommand, opened
from infer.serving.config import KEY_VARIABLE
from infer.utils.checks import FREE_TEXT, at_least
from infer.utils.progress import HEARTBEAT

ACCEPTED = "green"
REJECTED = "red strike"
BONUS = "bold yellow"


@dataclass
class ChatCommand(ServeCommand):
    """Chat with a target and its drafter. They are served while the chat lasts, or `url` names a
    running server.

    target: see TargetConfig in infer/config.py
    checkpoint: a drafter folder, a training checkpoint, or the name of a target whose drafter this
        repository contains (embedded, smollm2); default: the drafter in the target's folder
    drafter: see LoadedConfig in infer/config.py
    decoding: see EngineConfig in infer/config.py
    masked: only if the target is a masked diffusion model, see MaskedConfig in
        infer/masked/config.py
    server: see ServerConfig in infer/serving/config.py
    url: address of a running server; null: serve the target here
    system: system prompt; @file: read it from a file
    prompt: first message: the prompt (--prompt TEXT takes it without Hydra's quoting rules); @file:
        read it from a file; -: read it from standard input
    temperature: 0 is greedy decoding
    max_tokens: maximum tokens of an answer; null: as many as the server's max_length allows
    """

    url: str | None = None
    system: str = field(default="", metadata={FREE_TEXT: True})
    prompt: str = field(default="", metadata={FREE_TEXT: True})
    temperature: float = 0.0
    max_tokens: int | None = 256

    def check(self) -> None:
        """Raise ValueError for options that every server would refuse."""
        super().check()
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url={self.url}: an address such as http://127.0.0.1:8000")
        at_least(self, temperature=0, max_tokens=1)


@contextmanager
def serving(config: ChatCommand) -> Iterator[str]:
    """Serve the target while the block lasts, and give the address. Raises Stopped where nobody can
    be served there."""
    from infer.serving.server import make_server

    bound, (engine, _) = threading.Event(), opened(config)
    server = make_server(engine, config.server, bound.set)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(server.run)
        running.add_done_callback(lambda _: bound.set())
        try:
            bound.wait()
            if running.done():
                running.result()
            yield config.server.url
        finally:
            server.should_exit = True


def chunks(
    client: httpx.Client, messages: list[dict[str, str]], config: ChatCommand
) -> Iterator[dict]:
    """Yield the chunks of one streamed answer. Raises ValueError with the server's own sentence if
    it refuses."""
    body = {
        "messages": messages,
        "temperature": config.temperature,
        "max_tokens": config.max_tokens,
    }
    body |= {"stream": True, "trace": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            response.read()
            raise ValueError(f"the server refused ({response.status_code}): {response.text[:400]}")
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise ValueError(chunk["error"]["message"])
                yield chunk


def coloured(text: str, round: dict | None, colours: bool) -> Text:
    """Return one round's text: accepted drafts, rejected drafts, which only colours tell from text,
    and the target's own token last."""
    if round is None:
        return Text(text, BONUS)
    bonus = round["bonus"] if text.endswith(round["bonus"]) else ""
    accepted = text.removesuffix(bonus)
    return Text.assemble(
        (accepted, ACCEPTED), (round["rejected"] if colours else "", REJECTED), (bonus, BONUS)
    )


def answer(
    client: httpx.Client, messages: list[dict[str, str]], config: ChatCommand, console: Console
) -> dict[str, str]:
    """Print one answer as it is written, its thought dim and apart from its words; return it as a
    message."""
    thought = words = ""
    rounds = tokens = drafted = 0
    colours = console.color_system is not None
    for chunk in chunks(client, messages, config):
        delta = chunk["choices"][0]["delta"]
        round = chunk.get("round")
        new_thought = delta.get("reasoning_content") or ""
        new_words = delta.get("content") or ""
        if new_thought:
            shown = coloured(new_thought, round, colours)
            if (
                new_words
            ):  # the round ended the thought: its last token and what it rejected are behind it
                shown = Text(new_thought, ACCEPTED)
            shown.stylize("dim")
            console.print(shown, end="", soft_wrap=True)
        if new_words and not words and (thought or new_thought):
            console.print("\n")
        if new_words or not new_thought:
            console.print(coloured(new_words, round, colours), end="", soft_wrap=True)
        thought += new_thought
        words += new_words
        if round is not None:
            rounds = rounds + 1
            tokens = tokens + round["committed"]
            drafted = drafted + round["drafted"]
    if rounds:
        note = f"[{tokens} tokens in {rounds} rounds, {tokens / rounds:.2f} a round; {drafted} drafts verified]"
        console.print(Text(f"\n{note}", "dim"))
    said = {"role": "assistant", "content": words}
    return said | ({"reasoning_content": thought} if thought else {})


def run(config: ChatCommand, console: Console | None = None) -> None:
    """Talk until the input ends. Raises ValueError if there is no server."""
    console = console or Console(highlight=False)
    with nullcontext(config.url) if config.url else serving(config) as url:
        HEARTBEAT.at(None)
        talk(config, url, console)


def talk(config: ChatCommand, url: str, console: Console) -> None:
    """Talk to the server at an address."""
    messages = [{"role": "system", "content": config.system}] if config.system else []
    key = os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(
        base_url=url, headers=headers, timeout=httpx.Timeout(10, read=None)
    ) as client:
        try:
            model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        except (httpx.HTTPError, ValueError, LookupError) as wrong:
            raise ValueError(
                f"no server answers at {url} ({wrong}): start one with ./launch.sh serve, talk to a target=..., or set "
                f"{KEY_VARIABLE} to its key"
            ) from wrong
        legend = Text.assemble(
            ("accepted draft", ACCEPTED), " ", ("rejected", REJECTED), " ", ("target's own", BONUS)
        )
        console.print(Text.assemble(f"{model} at {url}; an empty line ends the chat. ", legend))
        with suppress(EOFError, KeyboardInterrupt):
            for question in questions(config.prompt, console):
                messages.append({"role": "user", "content": question})
                try:
                    messages.append(answer(client, messages, config, console))
                except (
                    KeyboardInterrupt,
                    ValueError,
                    httpx.HTTPError,
                ) as wrong:  # nobody listens: it stops writing
                    messages.pop()
                    console.print(Text(f"\n{str(wrong) or 'stopped'}", "red"))


def questions(first: str, console: Console) -> Iterator[str]:
    """Yield the question that the chat begins with, unless it is empty, and then what the user
    types, up to an empty line."""
    if first:
        console.print(Text.assemble(("> ", "bold"), first))
        yield first
    while question := console.input("[bold]> [/bold]"):
        yield question

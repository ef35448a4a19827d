"""The command `chat`: a conversation in the terminal with a target or with a server of ours.

Colours show what was drafted. Green: drafted and accepted. Red, struck through: drafted and
rejected. Yellow: the bonus token, one in each round.
"""

import json
import os
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.console import Console
from rich.text import Text

from infer.cli.serve import ServeCommand, open_served_engine
from infer.serving.config import API_KEY_ENVIRONMENT_VARIABLE
from infer.utils.checks import TEXT_OR_FILE_METADATA_KEY, require_at_least
from infer.utils.progress import HEARTBEAT

ACCEPTED_STYLE = "green"
REJECTED_STYLE = "red strike"
BONUS_STYLE = "bold yellow"
MAX_QUOTED_SERVER_RESPONSE_CHARACTERS = 400  # of a server's response in an error message
CHAT_CONNECT_TIMEOUT_SECONDS = 10


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
    system: str = field(default="", metadata={TEXT_OR_FILE_METADATA_KEY: True})
    prompt: str = field(default="", metadata={TEXT_OR_FILE_METADATA_KEY: True})
    temperature: float = 0.0
    max_tokens: int | None = 256

    def check(self) -> None:
        """Raise ValueError for options that every server would refuse."""
        super().check()
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url={self.url}: give an address such as http://127.0.0.1:8000")
        require_at_least(self, temperature=0, max_tokens=1)


@contextmanager
def serve_in_background(config: ChatCommand) -> Generator[str]:
    """Serve the target within the block, and yield the server's address.

    Raises RunAborted if the server cannot listen there.
    """
    from infer.serving.server import make_server

    started_or_failed = threading.Event()
    engine, _ = open_served_engine(config)
    server = make_server(engine, config.server, started_or_failed.set)
    with ThreadPoolExecutor(1) as thread:
        running_server = thread.submit(server.run)
        running_server.add_done_callback(lambda _: started_or_failed.set())
        try:
            started_or_failed.wait()
            if running_server.done():
                running_server.result()  # raises its error
            yield config.server.url
        finally:
            server.should_exit = True


def stream_chunks(
    client: httpx.Client, messages: list[dict[str, str]], config: ChatCommand
) -> Iterator[dict]:
    """Yield the chunks of one streamed answer.

    Raises ValueError with the server's message if it refuses the request.
    """
    body = {
        "messages": messages,
        "temperature": config.temperature,
        "max_tokens": config.max_tokens,
        "stream": True,
        "trace": True,
    }
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            response.read()
            raise ValueError(
                f"the server refused the request ({response.status_code}): "
                f"{response.text[:MAX_QUOTED_SERVER_RESPONSE_CHARACTERS]}"
            )
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise ValueError(chunk["error"]["message"])
            yield chunk


def colour_round(text: str, round_info: dict | None, has_colours: bool) -> Text:
    """Return one round's text in colours: accepted drafts, rejected drafts and the bonus token.

    round_info: the chunk's "round"; None: the text is the first bonus token
    has_colours: if false, rejected drafts are left out, because only colours distinguish them
    """
    if round_info is None:
        return Text(text, BONUS_STYLE)
    bonus = round_info["bonus"] if text.endswith(round_info["bonus"]) else ""
    accepted = text.removesuffix(bonus)
    rejected = round_info["rejected"] if has_colours else ""
    return Text.assemble(
        (accepted, ACCEPTED_STYLE), (rejected, REJECTED_STYLE), (bonus, BONUS_STYLE)
    )


def print_answer(
    client: httpx.Client, messages: list[dict[str, str]], config: ChatCommand, console: Console
) -> dict[str, str]:
    """Print one answer while it is generated, and return it as a message.

    Its reasoning is dim and separated from the content by an empty line.
    """
    reasoning = ""
    content = ""
    rounds = 0
    tokens = 0
    drafted = 0
    has_colours = console.color_system is not None
    for chunk in stream_chunks(client, messages, config):
        delta = chunk["choices"][0]["delta"]
        round_info = chunk.get("round")
        new_reasoning = delta.get("reasoning_content") or ""
        new_content = delta.get("content") or ""
        if new_reasoning:
            coloured_text = colour_round(new_reasoning, round_info, has_colours)
            if new_content:
                # The reasoning ended in this round, so the bonus token and the rejected drafts
                # come after it.
                coloured_text = Text(new_reasoning, ACCEPTED_STYLE)
            coloured_text.stylize("dim")
            console.print(coloured_text, end="", soft_wrap=True)
        if new_content and not content and (reasoning or new_reasoning):
            console.print("\n")
        if new_content or not new_reasoning:
            coloured_text = colour_round(new_content, round_info, has_colours)
            console.print(coloured_text, end="", soft_wrap=True)
        reasoning += new_reasoning
        content += new_content
        if round_info is not None:
            rounds += 1
            tokens += round_info["committed"]
            drafted += round_info["drafted"]
    if rounds:
        statistics = (
            f"[{tokens} tokens in {rounds} rounds, {tokens / rounds:.2f} a round; "
            f"{drafted} drafts verified]"
        )
        console.print(Text(f"\n{statistics}", "dim"))
    message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    return message


def run(config: ChatCommand, console: Console | None = None) -> None:
    """Chat until the input ends. Raises ValueError if there is no server at `url`."""
    console = console or Console(highlight=False)
    server = nullcontext(config.url) if config.url else serve_in_background(config)
    with server as url:
        HEARTBEAT.set_activity(None)
        run_conversation(config, url, console)


def run_conversation(config: ChatCommand, url: str, console: Console) -> None:
    """Send the user's questions to the server at an address, and print the answers."""
    messages = [{"role": "system", "content": config.system}] if config.system else []
    key = os.environ.get(API_KEY_ENVIRONMENT_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    # No limit for reading: an answer may take long.
    timeout = httpx.Timeout(CHAT_CONNECT_TIMEOUT_SECONDS, read=None)
    with httpx.Client(base_url=url, headers=headers, timeout=timeout) as client:
        print_introduction(client, url, console)
        with suppress(EOFError, KeyboardInterrupt):
            for question in read_questions(config.prompt, console):
                messages.append({"role": "user", "content": question})
                try:
                    messages.append(print_answer(client, messages, config, console))
                except (KeyboardInterrupt, ValueError, httpx.HTTPError) as error:
                    # Ctrl-C closes the connection, and the server stops generating.
                    messages.pop()
                    console.print(Text(f"\n{str(error) or 'stopped'}", "red"))


def print_introduction(client: httpx.Client, url: str, console: Console) -> None:
    """Print the model's name and the meaning of the colours.

    Raises ValueError if there is no server.
    """
    try:
        response: Any = client.get("/v1/models").raise_for_status().json()
        model = response["data"][0]["id"]
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise ValueError(
            f"no server answers at {url} ({error}): start one with ./launch.sh serve, give "
            f"target=... to chat without one, or set {API_KEY_ENVIRONMENT_VARIABLE} to the "
            "server's key"
        ) from error
    legend = Text.assemble(
        ("accepted draft", ACCEPTED_STYLE),
        " ",
        ("rejected draft", REJECTED_STYLE),
        " ",
        ("bonus token", BONUS_STYLE),
    )
    console.print(Text.assemble(f"{model} at {url}; an empty line ends the chat. ", legend))


def read_questions(first_question: str, console: Console) -> Iterator[str]:
    """Yield the first question unless it is empty, then what the user types up to an empty line."""
    if first_question:
        console.print(Text.assemble(("> ", "bold"), first_question))
        yield first_question
    while question := console.input("[bold]> [/bold]"):
        yield question

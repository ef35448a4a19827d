"""The command `chat`: a conversation in the terminal with a target or with a running server of this
project.

Accepted draft tokens are printed green. Rejected draft tokens are printed red and struck through.
The bonus token of each round is printed yellow.
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

from infer.cli.serve import ServeCommand, open_and_describe_engine
from infer.serving.config import API_KEY_ENVIRONMENT_VARIABLE
from infer.utils.checks import TEXT_OR_FILE_METADATA_KEY, require_at_least, require_http_address
from infer.utils.progress import HEARTBEAT

ACCEPTED_STYLE = "green"
REJECTED_STYLE = "red strike"
BONUS_STYLE = "bold yellow"
MAX_QUOTED_SERVER_RESPONSE_CHARACTERS = (
    400  # in error messages, a longer response of the server is cut
)
CHAT_CONNECT_TIMEOUT_SECONDS = 10


@dataclass
class ChatCommand(ServeCommand):
    """Chat with a target and its drafter. If the option url is set, the command uses a running
    server. Otherwise it starts a server, which ends with the chat.

    target: see TargetConfig in infer/config.py
    checkpoint: a drafter folder, a training checkpoint, or the name of a target whose drafter this
        repository contains (embedded, smollm2). The default is the drafter in the target's folder
    drafter: see DrafterLoadConfig in infer/config.py
    decoding: see EngineConfig in infer/config.py
    masked: only if the target is a masked diffusion model, see MaskedConfig in
        infer/masked/config.py
    server: see ServerConfig in infer/serving/config.py
    url: address of a running server, such as http://127.0.0.1:8000. null means that this command
        starts a server for the target
    system: the system prompt; @file reads it from a file
    prompt: the first message of the user. With --prompt TEXT instead of prompt=TEXT, Hydra's
        quoting rules do not apply. @file reads the message from a file, and - from standard input
    temperature: sampling temperature; 0 means greedy decoding
    max_tokens: maximum number of tokens of an answer. null means as many as the server's max_length
        allows
    """

    url: str | None = None
    system: str = field(default="", metadata={TEXT_OR_FILE_METADATA_KEY: True})
    prompt: str = field(default="", metadata={TEXT_OR_FILE_METADATA_KEY: True})
    temperature: float = 0.0
    max_tokens: int | None = 256

    def check(self) -> None:
        """Raise ValueError for invalid options, such as a malformed address."""
        super().check()
        require_http_address(self, "url")
        require_at_least(self, temperature=0, max_tokens=1)


@contextmanager
def serve_in_background(config: ChatCommand) -> Generator[str]:
    """Run a server in another thread during the `with` block, and yield its address.

    Raises RunAborted if the server cannot listen at `config.server.host` and `config.server.port`.
    """
    from infer.serving.server import make_server

    started_or_failed = threading.Event()
    engine, _ = open_and_describe_engine(config)
    server = make_server(engine, config.server, started_or_failed.set)
    with ThreadPoolExecutor(1) as thread:
        running_server = thread.submit(server.run)
        running_server.add_done_callback(lambda _: started_or_failed.set())
        try:
            started_or_failed.wait()
            if running_server.done():
                running_server.result()  # raises the server's exception, if one has ended it
            yield config.server.url
        finally:
            server.should_exit = True


def stream_chunks(
    client: httpx.Client, messages: list[dict[str, str]], config: ChatCommand
) -> Iterator[dict]:
    """Send chat messages to the server, and yield the chunks of its streamed answer.

    Raises ValueError with the server's error message if the server refuses the request.
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
    """Return the text of one decoding round with colours.

    Accepted draft tokens, rejected draft tokens and the bonus token have different colours.

    text: the text that the round added to the answer
    round_info: the value of the key "round" in the server's chunk; None for the first token, which
        the prefill generates
    has_colours: whether the terminal shows colours. If not, rejected draft tokens are left out,
        because without colours they look like a part of the answer
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
    """Print one answer while the server generates it. Return the answer as a chat message.

    The reasoning of the answer is printed dim, with an empty line after it.
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
                # This round contains the end of the reasoning and the start of the content. Its
                # bonus token and its rejected draft tokens belong to the content, so all tokens of
                # the reasoning are accepted draft tokens.
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
            f"[{tokens} tokens in {rounds} rounds, {tokens / rounds:.2f} a round; {drafted} "
            "drafts verified]"
        )
        console.print(Text(f"\n{statistics}", "dim"))
    message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    return message


def run(config: ChatCommand, console: Console | None = None) -> None:
    """Chat until the user enters an empty line or ends the input.

    Raises ValueError if no server answers at `config.url`.
    """
    console = console or Console(highlight=False)
    server = nullcontext(config.url) if config.url else serve_in_background(config)
    with server as url:
        HEARTBEAT.set_activity(None)
        run_conversation(config, url, console)


def run_conversation(config: ChatCommand, url: str, console: Console) -> None:
    """Read questions from the terminal, send them to the server at `url`, and print the answers."""
    messages = [{"role": "system", "content": config.system}] if config.system else []
    key = os.environ.get(API_KEY_ENVIRONMENT_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    # There is no time limit for reading the response, because long answers take long to generate.
    timeout = httpx.Timeout(CHAT_CONNECT_TIMEOUT_SECONDS, read=None)
    with httpx.Client(base_url=url, headers=headers, timeout=timeout) as client:
        print_introduction(client, url, console)
        with suppress(EOFError, KeyboardInterrupt):
            for question in read_questions(config.prompt, console):
                messages.append({"role": "user", "content": question})
                try:
                    messages.append(print_answer(client, messages, config, console))
                except (KeyboardInterrupt, ValueError, httpx.HTTPError) as error:
                    # After Ctrl-C the connection is closed already, so the server stops generating.
                    messages.pop()
                    console.print(Text(f"\n{str(error) or 'stopped'}", "red"))


def print_introduction(client: httpx.Client, url: str, console: Console) -> None:
    """Print the name of the served model and the meaning of the colours.

    Raises ValueError if no server answers at `url`.
    """
    try:
        response: Any = client.get("/v1/models").raise_for_status().json()
        model = response["data"][0]["id"]
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise ValueError(
            f"no server answers at {url} ({error}): start a server with ./launch.sh serve, or "
            "remove url= to chat without a server; if the server requires a key, set "
            f"{API_KEY_ENVIRONMENT_VARIABLE} to it"
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
    """Yield the questions that the user enters in the terminal, until an empty line.

    first_question: question that is printed and yielded first; "" means none
    """
    if first_question:
        console.print(Text.assemble(("> ", "bold"), first_question))
        yield first_question
    while question := console.input("[bold]> [/bold]"):
        yield question

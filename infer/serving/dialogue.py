"""Rows that a target answers anew: a text once, a chat turn by turn, each answer after those
written before it."""

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from infer.config import DecodeOptions
from infer.engine.sampling import derived_seed

WHOLE = ("stop", "tool_calls")  # why an answer ended that nothing cut off
# as Qwen's and Hermes' templates have it
CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """One prompt; `index` is its place in the data.

    prompt: a text, or the messages of a chat; answers among them are written anew
    tools, template: of a chat, what its template is given and told
    """

    index: int
    prompt: str | list[dict]
    tools: list[dict] = field(default_factory=list)
    template: dict = field(default_factory=dict)

    @property
    def chat(self) -> bool:
        return not isinstance(self.prompt, str)


@dataclass(frozen=True)
class Turn:
    """What the target wrote at one time, and why it ended. ids: its tokens, where they are known;
    thought and calls: where a server tells them apart from the text."""

    text: str
    finish: str
    ids: list[int] | None = None
    thought: str | None = None
    calls: list[dict] | None = None

    def message(self) -> dict:
        """Return it as a message of a chat."""
        said = {"role": "assistant", "content": self.text}
        said |= {"reasoning_content": self.thought} if self.thought else {}
        said |= {"tool_calls": self.calls} if self.calls else {}
        said["finish"] = self.finish
        return said | ({"token_ids": self.ids} if self.ids else {})


# Takes rows and a function that is called whenever one of them is finished, in any order; yields
# `Dialogue.answer`s in the rows' order.
Answering = Callable[[Iterable[Row], Callable[[], None]], Iterator[dict]]


def of_row(options: DecodeOptions, row: Row, turn: int = 0) -> DecodeOptions:
    """Return the options with the row's own seed, and of its turns each its own, whoever answers
    and wherever a run begins."""
    return replace(options, seed=derived_seed(derived_seed(options.seed, row.index), turn))


class Dialogue:
    """A row on its way: what is asked next, `prompt`, until its `answer` is there: a row to train
    on, {"index", "prompt", "response", "finish"} or {"index", "messages", ...}, or {"index",
    "error"}.

    A chat ends early with an answer that was cut, and where the recorded results of tools are not
    those of the calls that the target makes.
    """

    def __init__(self, row: Row) -> None:
        self.row = row
        self.turns = 0
        self.answer: dict | None = None
        self.messages: list[dict] = []
        self.chat = row.chat
        self._left = deque(row.prompt if row.chat else ())
        if row.chat:
            self._go_on()

    @property
    def prompt(self) -> str | list[dict]:
        """What is asked next: a text, or messages as templates and servers read them."""
        return [asked(message) for message in self.messages] if self.chat else self.row.prompt

    def take(self, turn: Turn) -> None:
        """Take what the target wrote next."""
        self.turns += 1
        if not self.chat:
            said = {"prompt": self.row.prompt, "response": turn.text, "finish": turn.finish}
            self.answer = {"index": self.row.index} | said
            return
        recorded: list[tuple[str, object]] = []
        while self._left and self._left[0]["role"] == "assistant":
            recorded += calls_of(self._left.popleft())
        self.messages.append(turn.message())
        results = bool(self._left) and self._left[0]["role"] == "tool"
        fits = calls_of(self.messages[-1]) == (recorded if results else [])
        if turn.finish in WHOLE and fits:
            self._go_on()
        else:
            self._finish()

    def fail(self, error: str, keep: bool = False) -> None:
        """End with an error; to `keep` what was answered before, which was not at fault."""
        if keep and self.turns:
            while self.messages[-1]["role"] != "assistant":
                self.messages.pop()
            self._finish()
        else:
            self.answer = {"index": self.row.index, "error": error}

    def _go_on(self) -> None:
        """Take the messages up to where the assistant speaks next; the end, if there are none."""
        before = len(self.messages)
        while self._left and self._left[0]["role"] != "assistant":
            self.messages.append(self._left.popleft())
        if len(self.messages) == before:
            self._finish()

    def _finish(self) -> None:
        row = self.row
        self.answer = {"index": row.index, "messages": self.messages}
        self.answer |= {"tools": row.tools} if row.tools else {}
        self.answer |= {"chat_template_kwargs": row.template} if row.template else {}


def asked(message: dict) -> dict:
    """Return a message as it is sent on: what the target wrote in the words that it wrote."""
    said = {
        key: message[key] for key in ("role", "content", "name", "tool_call_id") if key in message
    }
    if message.get("reasoning_content"):
        said["content"] = (
            f"<think>\n{message['reasoning_content'].strip()}\n</think>\n\n{said['content']}"
        )
    return said | ({"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {})


def calls_of(message: dict) -> list[tuple[str, object]]:
    """Return the tool calls of an answer, (name, arguments) each; those in its text if it has no
    others."""
    found = [call["function"] for call in message.get("tool_calls", ())]
    if not found:
        try:
            found = [json.loads(text) for text in CALL.findall(message["content"])]
        except ValueError:
            return [("", message["content"])]  # like no other
    return [(call.get("name", ""), arguments_of(call)) for call in found]


def arguments_of(call: dict) -> object:
    """Return the arguments of a call, which may be JSON in a text."""
    arguments = call.get("arguments") or {}
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def opens_thought(prompt: str) -> bool:
    """Return whether the prompt's end opens the thought that the answer begins with."""
    return prompt.rstrip().endswith("<think>")


def with_opening(text: str, prompt: str) -> str:
    """Return an answer with the opening of its thought, if that was the prompt's."""
    return (
        f"<think>\n{text}"
        if opens_thought(prompt) and not text.lstrip().startswith("<think>")
        else text
    )

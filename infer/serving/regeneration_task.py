"""Examples of a data set for which the target generates new answers.

A text gets one output. In a chat, every assistant message is generated again, each after the
messages that were generated before it.
"""

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from infer.config import TextOptions
from infer.engine.sampling import derive_seed

# Finish reasons of outputs that no limit cut off.
COMPLETE_FINISH_REASONS = ("stop", "tool_calls")
# A tool call in the text of an answer, as the templates of Qwen and Hermes write it.
TOOL_CALL_PATTERN = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
AnyTextOptions = TypeVar("AnyTextOptions", bound=TextOptions)


@dataclass(frozen=True)
class PromptExample:
    """An example of the data.

    index: its position in the data
    prompt: a text, or the messages of a chat; assistant messages among them are generated again
    tools: tool definitions of a chat
    template_options: variables of the chat template
    """

    index: int
    prompt: str | list[dict]
    tools: list[dict] = field(default_factory=list)
    template_options: dict = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.prompt, str)

    @property
    def messages(self) -> list[dict]:
        """The messages of a chat; an empty list for a text."""
        return cast(list[dict], self.prompt) if self.is_chat else []


@dataclass(frozen=True)
class TargetOutput:
    """What the target generated for one prompt.

    token_ids: None if a server does not report them
    reasoning, tool_calls: set if a server separates them from the text
    """

    text: str
    finish_reason: str
    token_ids: list[int] | None = None
    reasoning: str | None = None
    tool_calls: list[dict] | None = None

    def to_message(self) -> dict:
        """Return the output as an assistant message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        message["finish"] = self.finish_reason
        if self.token_ids:
            message["token_ids"] = self.token_ids
        return message


# Takes examples and a function that is called whenever one of them is finished, in any order.
# Yields the `RegenerationTask.record` of every example, in the order of the examples.
AnswerExamples = Callable[[Iterable[PromptExample], Callable[[], None]], Iterator[dict]]


def seed_options_for_turn(
    options: AnyTextOptions, example: PromptExample, turn: int = 0
) -> AnyTextOptions:
    """Return the options with the sampling seed of one turn of an example.

    The seed depends only on the configured seed, the example's index and the turn. It is the same
    for our engine and a server, and for a run that was resumed.
    """
    example_seed = derive_seed(options.seed, example.index)
    return replace(options, seed=derive_seed(example_seed, turn))


class RegenerationTask:
    """An example whose answers are being generated.

    `prompt` is what the target gets next. `record` is None until the example is finished. It is
    then a row of training data, {"index", "prompt", "response", "finish"} or {"index",
    "messages", ...}, or {"index", "error"}.

    A chat ends early after an answer that was cut off. It also ends where the data has results of
    tool calls, and the target made other calls.
    """

    def __init__(self, example: PromptExample) -> None:
        self.example = example
        self.is_chat = example.is_chat
        self.turn = 0  # outputs added so far
        self.record: dict | None = None
        self.messages: list[dict] = []
        self._remaining = deque(example.messages)
        if self.is_chat:
            self._add_messages_until_assistant()

    @property
    def prompt(self) -> str | list[dict]:
        """The next prompt: a text, or messages as chat templates and servers take them."""
        if not self.is_chat:
            return self.example.prompt
        return [to_prompt_message(message) for message in self.messages]

    def add_output(self, output: TargetOutput) -> None:
        """Add the target's output for `prompt`."""
        self.turn += 1
        if not self.is_chat:
            self.record = {
                "index": self.example.index,
                "prompt": self.example.prompt,
                "response": output.text,
                "finish": output.finish_reason,
            }
            return

        recorded_calls: list[tuple[str, object]] = []
        while self._remaining and self._remaining[0]["role"] == "assistant":
            recorded_calls += extract_tool_calls(self._remaining.popleft())
        self.messages.append(output.to_message())

        tool_results_follow = bool(self._remaining) and self._remaining[0]["role"] == "tool"
        expected_calls = recorded_calls if tool_results_follow else []
        calls_match = extract_tool_calls(self.messages[-1]) == expected_calls
        if output.finish_reason in COMPLETE_FINISH_REASONS and calls_match:
            self._add_messages_until_assistant()
        else:
            self._finish_chat()

    def fail(self, error: str, keep_answers: bool = False) -> None:
        """Finish with an error.

        keep_answers: if there are answers already, finish the chat after the last one instead
        """
        if keep_answers and self.turn:
            while self.messages[-1]["role"] != "assistant":
                self.messages.pop()
            self._finish_chat()
        else:
            self.record = {"index": self.example.index, "error": error}

    def _add_messages_until_assistant(self) -> None:
        """Add the messages before the next assistant message. Finish if there are none."""
        previous_count = len(self.messages)
        while self._remaining and self._remaining[0]["role"] != "assistant":
            self.messages.append(self._remaining.popleft())
        if len(self.messages) == previous_count:
            self._finish_chat()

    def _finish_chat(self) -> None:
        self.record = {"index": self.example.index, "messages": self.messages}
        if self.example.tools:
            self.record["tools"] = self.example.tools
        if self.example.template_options:
            self.record["chat_template_kwargs"] = self.example.template_options


def to_prompt_message(message: dict) -> dict:
    """Return a message as part of a prompt, with its reasoning in front of the content."""
    keys = ("role", "content", "name", "tool_call_id")
    prompt_message = {key: message[key] for key in keys if key in message}
    if message.get("reasoning_content"):
        reasoning = message["reasoning_content"].strip()
        prompt_message["content"] = f"<think>\n{reasoning}\n</think>\n\n{prompt_message['content']}"
    if message.get("tool_calls"):
        prompt_message["tool_calls"] = message["tool_calls"]
    return prompt_message


def extract_tool_calls(message: dict) -> list[tuple[str, object]]:
    """Return (name, arguments) of every tool call of an assistant message.

    Without "tool_calls", the calls are parsed from the content. Content with a malformed call
    gives one entry that equals no valid call.
    """
    functions = [call["function"] for call in message.get("tool_calls", ())]
    if not functions:
        try:
            functions = [json.loads(text) for text in TOOL_CALL_PATTERN.findall(message["content"])]
        except ValueError:
            return [("", message["content"])]
    return [(function.get("name", ""), parse_call_arguments(function)) for function in functions]


def parse_call_arguments(function: dict) -> object:
    """Return the arguments of a called function, which may be JSON text."""
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def opens_reasoning(prompt_end: str) -> bool:
    """Return whether a prompt ends with "<think>", so that the output begins with reasoning."""
    return prompt_end.rstrip().endswith("<think>")


def restore_reasoning_tag(text: str, prompt_end: str) -> str:
    """Return an output with "<think>" in front, if it was the end of the prompt."""
    if opens_reasoning(prompt_end) and not text.lstrip().startswith("<think>"):
        return f"<think>\n{text}"
    return text

"""Examples of a data set that need new answers, and the state of generating them.

For an example that is a text, the target generates one output. For an example that is a chat, it
generates every assistant message again. The prompt of an assistant message contains all messages
before it, with newly generated assistant messages in place of the old ones.
"""

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from infer.config import SamplingOptions
from infer.engine.sampling import derive_seed

# Finish reasons of complete outputs. An output with another finish reason was cut off, for example
# at the maximum number of tokens.
COMPLETE_FINISH_REASONS = ("stop", "tool_calls")
# Matches a tool call in the text of an answer, in the format of Qwen and Hermes models
TOOL_CALL_PATTERN = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
AnyTextOptions = TypeVar("AnyTextOptions", bound=SamplingOptions)


@dataclass(frozen=True)
class PromptExample:
    """An example of the data set that needs new answers.

    index: position of the example in the data set
    prompt: a text, or the messages of a chat, whose assistant messages are generated again
    tools: tool definitions of a chat
    template_options: keys are names of chat template variables, values are their values
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
    """The output of the target for one prompt.

    text: the output; without reasoning and tool calls if a server has separated them
    finish_reason: "stop" or "tool_calls" for a complete output; other values for an output that was
        cut off
    token_ids: ids of the generated tokens; None if a server does not return them
    reasoning: the reasoning; None if it was not separated from the text
    tool_calls: the tool calls; None if they were not separated from the text
    """

    text: str
    finish_reason: str
    token_ids: list[int] | None = None
    reasoning: str | None = None
    tool_calls: list[dict] | None = None

    def to_message(self) -> dict:
        """Return the output as an assistant message of a chat."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        message["finish"] = self.finish_reason
        if self.token_ids:
            message["token_ids"] = self.token_ids
        return message


# Type of functions that generate the answers to examples, (examples, on_finished) -> records. The
# function yields the `RegenerationTask.record` of every example, in the order of the examples. It
# calls on_finished whenever an example is finished, in any order.
AnswerExamples = Callable[[Iterable[PromptExample], Callable[[], None]], Iterator[dict]]


def seed_options_for_turn(
    options: AnyTextOptions, example: PromptExample, turn: int = 0
) -> AnyTextOptions:
    """Return a copy of the options with the sampling seed for one output of an example.

    The seed depends only on `options.seed`, the index of the example and the turn. It does not
    depend on whether our engine or a server generates the output, or on whether the run was
    interrupted.

    turn: number of outputs that were generated for the example before
    """
    example_seed = derive_seed(options.seed, example.index)
    return replace(options, seed=derive_seed(example_seed, turn))


class RegenerationTask:
    """An example whose answers are being generated.

    `prompt` is the next prompt for the target. `add_output` takes the output and sets the next
    prompt. `record` is None until the example is finished, and then one of these dictionaries:
    - {"index", "prompt", "response", "finish"} for a text
    - {"index", "messages", ...} for a chat
    - {"index", "error"} for an example that has failed

    A chat ends early after an answer that was cut off. It also ends early if the next messages in
    the data are results of tool calls, but the target has made other tool calls than those in the
    data.
    """

    def __init__(self, example: PromptExample) -> None:
        self.example = example
        self.is_chat = example.is_chat
        self.turn = 0  # number of outputs added to the chat
        self.record: dict | None = None
        self.messages: list[dict] = []
        self._remaining = deque(example.messages)
        if self.is_chat:
            self._add_messages_until_assistant()

    @property
    def prompt(self) -> str | list[dict]:
        """The prompt for the next output: a text, or a list of chat messages."""
        if not self.is_chat:
            return self.example.prompt
        return [to_message_with_inline_reasoning(message) for message in self.messages]

    def add_output(self, output: TargetOutput) -> None:
        """Add the target's output for `prompt`, and set the next prompt or finish the example."""
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

    def fail_or_end_chat(self, error: str, keep_answers: bool = False) -> None:
        """Finish the example because an output could not be generated.

        error: error message for the record of a failed example
        keep_answers: if true and the chat already has new answers, the example does not fail. The
            chat ends after the last of these answers
        """
        if keep_answers and self.turn:
            while self.messages[-1]["role"] != "assistant":
                self.messages.pop()
            self._finish_chat()
        else:
            self.record = {"index": self.example.index, "error": error}

    def _add_messages_until_assistant(self) -> None:
        """Extend `messages` by the example's next messages, up to its next assistant message.

        If this adds no message, the chat is finished.
        """
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


def to_message_with_inline_reasoning(message: dict) -> dict:
    """Return a message in the form that prompts contain.

    The reasoning of an assistant message is put in front of its content, between "<think>" and
    "</think>".
    """
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

    If the message has no entry "tool_calls", the calls are parsed from its content. If a call in
    the content is malformed, [("", content)] is returned, which differs from every list of valid
    calls.
    """
    functions = [call["function"] for call in message.get("tool_calls", ())]
    if not functions:
        try:
            functions = [json.loads(text) for text in TOOL_CALL_PATTERN.findall(message["content"])]
        except ValueError:
            return [("", message["content"])]
    return [(function.get("name", ""), parse_call_arguments(function)) for function in functions]


def parse_call_arguments(function: dict) -> object:
    """Return the arguments of a called function as a Python object.

    Arguments that are not valid JSON are returned as text.

    function: has the key "arguments", whose value is JSON text or already a Python object
    """
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def opens_reasoning(prompt_end: str) -> bool:
    """Return whether a prompt ends with "<think>", so that the output begins with reasoning.

    prompt_end: the last characters of the prompt
    """
    return prompt_end.rstrip().endswith("<think>")


def restore_reasoning_tag(text: str, prompt_end: str) -> str:
    """Return an output with "<think>" in front if its prompt ended with "<think>".

    prompt_end: the last characters of the prompt
    """
    if opens_reasoning(prompt_end) and not text.lstrip().startswith("<think>"):
        return f"<think>\n{text}"
    return text

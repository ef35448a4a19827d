"""Convert chat messages to the form that a chat template expects.

Most chat templates (Qwen3, Llama 3) expect the arguments of a tool call as an object. Others
(DeepSeek V3, R1, V3.1) insert the arguments into the prompt as they are, and expect JSON text. Some
templates read the reasoning of an answer under a separate key of the message. Others expect the
reasoning at the start of the content.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from jinja2 import TemplateError

# Keys of a message under which a chat template may read reasoning. For each template, the first of
# these keys that occurs in its text is used.
CHAT_TEMPLATE_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


def convert_tool_arguments(tokenizer: Any, messages: list[dict], **options: object) -> list[dict]:
    """Convert the arguments of all tool calls in `messages` to the form that the tokenizer's chat
    template expects: objects or JSON text. Return the converted messages.

    To choose the form, the template is tried with both. A form is wrong if the template raises an
    error, or if it prints arguments in Python's notation instead of JSON. JSON text is chosen if it
    has fewer such mistakes than objects.

    options: further arguments of `apply_chat_template`
    """
    functions = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            functions.append(call.get("function", {}))
    if not functions:
        return messages

    with_objects = _convert_arguments(messages, parse_tool_arguments)
    with_json_text = _convert_arguments(messages, tool_arguments_to_json)
    python_notations = [
        str(parse_tool_arguments(function.get("arguments"))) for function in functions
    ]

    def count_python_notation(candidate: list[dict]) -> float:
        try:
            text = tokenizer.apply_chat_template(candidate, tokenize=False, **options)
        except (TypeError, TemplateError):
            return float("inf")
        return sum(
            text.count(notation) for notation in python_notations if notation not in ("", "{}")
        )

    object_errors = count_python_notation(with_objects)
    if object_errors and count_python_notation(with_json_text) < object_errors:
        return with_json_text
    return with_objects


def parse_tool_arguments(arguments: object) -> object:
    """Parse the arguments of a tool call if they are JSON text. Return all other arguments
    unchanged."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def tool_arguments_to_json(arguments: object) -> str:
    """Convert the arguments of a tool call to JSON text. Return text unchanged."""
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments, ensure_ascii=False)


def _convert_arguments(messages: list[dict], convert: Callable[[object], object]) -> list[dict]:
    """Return copies of the messages, with `convert` applied to the arguments of each tool call."""
    converted_messages = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            function = call.get("function", {})
            if "arguments" in function:
                function = function | {"arguments": convert(function["arguments"])}
                call = call | {"function": function}
            calls.append(call)
        converted_messages.append(message | {"tool_calls": calls} if calls else message)
    return converted_messages


def place_reasoning(messages: Sequence[dict], template: str) -> list[dict]:
    """Move the `reasoning_content` of each message to where the chat template reads reasoning.
    Return new messages.

    template: the text of the chat template. If it contains one of CHAT_TEMPLATE_REASONING_KEYS, the
    reasoning is stored under this key. If it contains only "</think>", the reasoning is put in
    front of the content, inside <think> tags. If it contains neither, the reasoning is dropped.
    """
    template_keys = (
        key
        for key in CHAT_TEMPLATE_REASONING_KEYS
        if re.search(rf"\.{key}\b|['\"]{key}['\"]", template)
    )
    reasoning_key = next(template_keys, None)

    placed_messages = []
    for message in messages:
        placed = {key: value for key, value in message.items() if key != "reasoning_content"}
        reasoning = message.get("reasoning_content")
        if reasoning and reasoning_key:
            placed[reasoning_key] = reasoning
        elif reasoning and "</think>" in template:
            placed["content"] = f"<think>\n{reasoning.strip()}\n</think>\n\n{message['content']}"
        placed_messages.append(placed)
    return placed_messages

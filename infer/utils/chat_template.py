"""Messages in the form that a chat template reads.

The arguments of a tool call are an object for most templates (Qwen3, Llama 3), and JSON text for
those that join them to strings (DeepSeek V3, R1, V3.1). A thought has a key of its own in some
templates, and stands in the content in others.
"""

import json
import re
from collections.abc import Callable, Sequence

from jinja2 import TemplateError

# of a message, under which chat templates read its thought; the first that a template has
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")


def readable_messages(tokenizer, messages: list[dict], **options: object) -> list[dict]:
    """Return messages with the arguments of their tool calls as the tokenizer's chat template takes
    them: as objects, unless the template fails with these or writes them in Python's notation and
        does
    neither with JSON text. `options`: what else the template is given, as for
    `apply_chat_template`."""
    calls = [
        call.get("function", {}) for message in messages for call in message.get("tool_calls") or ()
    ]
    if not calls:
        return messages
    with_objects = _with_arguments(messages, arguments_object)
    with_text = _with_arguments(messages, arguments_text)
    written_by_python = [str(arguments_object(call.get("arguments"))) for call in calls]

    def count_python_notation(form: list[dict]) -> float:
        try:
            text = tokenizer.apply_chat_template(form, tokenize=False, **options)
        except (TypeError, TemplateError):
            return float("inf")
        return sum(
            text.count(notation) for notation in written_by_python if notation not in ("", "{}")
        )

    errors_of_objects = count_python_notation(with_objects)
    if errors_of_objects and count_python_notation(with_text) < errors_of_objects:
        return with_text
    return with_objects


def arguments_object(arguments: object) -> object:
    """Return the arguments of a tool call as an object. They may be JSON text; other text stays as
    it is."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def arguments_text(arguments: object) -> str:
    """Return the arguments of a tool call as JSON text; text stays as the model wrote it."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_arguments(messages: list[dict], convert: Callable[[object], object]) -> list[dict]:
    """Return messages with the arguments of their tool calls converted."""
    converted = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            function = call.get("function", {})
            if "arguments" in function:
                call = call | {"function": function | {"arguments": convert(function["arguments"])}}
            calls.append(call)
        converted.append(message | {"tool_calls": calls} if calls else message)
    return converted


def place_thoughts(messages: Sequence[dict], template: str) -> list[dict]:
    """Return messages with their thoughts, `reasoning_content`, where a chat template reads them:
    under its own key; else, where it knows the tag that ends a thought, in front of the content."""
    keys = (key for key in THOUGHT_KEYS if re.search(rf"\.{key}\b|['\"]{key}['\"]", template))
    thought_key = next(keys, None)
    placed = []
    for message in messages:
        others = {key: value for key, value in message.items() if key != "reasoning_content"}
        thought = message.get("reasoning_content")
        if thought and thought_key:
            others[thought_key] = thought
        elif thought and "</think>" in template:
            others["content"] = f"<think>\n{thought.strip()}\n</think>\n\n{message['content']}"
        placed.append(others)
    return placed

"""Convert records of every supported layout to one form of example.

An example is {"prompt", "text", "cut", "chat"}. A chat has only `chat`; any other example has no
`chat`. data/template.py applies chat templates.
"""

import json
from typing import Any, TypeVar

from data.counts import ExcludedExample, InvalidExample

Value = TypeVar("Value")

CANONICAL_MESSAGE_REASONING_KEY = (
    "reasoning_content"  # OpenAI-compatible servers call it that, or "reasoning"
)

# Names in other layouts, and the names in this code.
ROLE_ALIASES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
COLUMN_ALIASES = {"conversations": "messages", "completion": "response", "finish_reason": "finish"}
MESSAGE_KEY_ALIASES = {
    "from": "role",
    "value": "content",
    "reasoning": CANONICAL_MESSAGE_REASONING_KEY,
    "finish_reason": "finish",
}

# Finish reasons of a complete answer. Any other reason means that it was cut off.
FINISH_REASONS_OF_COMPLETE_ANSWERS = (None, "stop", "tool_calls", "function_call")

MAX_TOKEN_ID = 2**31 - 1
MAX_QUOTED_INVALID_VALUE_CHARACTERS = 80  # of an invalid value in an error message
NO_ANSWER_EXCLUSION_REASON = "no answer of the assistant"


def require_type(
    value: object, expected_type: type[Value], message: str, detail: str = ""
) -> Value:
    """Return a value of a record unchanged.

    Raises InvalidExample with `message` if it is not of the expected type.
    """
    if not isinstance(value, expected_type):
        raise InvalidExample(message, detail)
    return value


def rename_keys(record: object, aliases: dict[str, str], message: str) -> dict[str, Any]:
    """Return a record without null values and with aliased keys renamed.

    If it has both the alias and the standard key, the standard key's value is used.
    Raises InvalidExample with `message` if the record is not a dictionary.
    """
    items = require_type(record, dict, message).items()
    non_null = {key: value for key, value in items if value is not None}

    renamed = {}
    for key, value in non_null.items():
        if aliases.get(key) in non_null:
            continue
        renamed[aliases.get(key, key)] = value
    return renamed


def parse_json(value: object, expected_type: type[Value], name: str) -> Value:
    """Return a value that may be given as JSON text, parsed.

    name: what it is called in error messages, a plural noun
    Raises InvalidExample if it is not valid JSON or not of the expected type.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise InvalidExample(
                f"{name} are not valid JSON", value[:MAX_QUOTED_INVALID_VALUE_CHARACTERS]
            ) from error
    return require_type(value, expected_type, f"{name} are not a JSON {expected_type.__name__}")


def normalise_example(record: object, with_answer: bool = True) -> dict[str, Any]:
    """Return a record of any known layout as {"prompt", "text", "cut", "chat"}.

    chat: {"messages", "tools", "template"}; `template` holds the chat template's variables
        (`chat_template_kwargs`)
    cut: whether the text was cut off before its end, according to "finish" or "finish_reason"
    with_answer: end the chat with an answer; otherwise end it with the last question

    An answer that was cut off ends its chat. If it was cut off within its reasoning, it is removed
    together with its question.

    Layouts:
    - {"messages": [{"role", "content"}]} with optional "tools" and "chat_template_kwargs", as
      `./launch.sh regenerate` writes, and with "response" if the last message is the user's
    - ShareGPT's {"conversations": [{"from", "value"}]}
    - {"prompt", "response"} or {"prompt", "completion"}, both texts or both lists of messages
    - Alpaca's {"instruction", "input", "output"}
    - {"text"}

    Raises InvalidExample for a malformed record, and ExcludedExample if it has nothing to train on
    (or no question, if `with_answer` is false).
    """
    fields = rename_keys(record, COLUMN_ALIASES, "an example must be a JSON object")
    prompt = fields.get("prompt", "")
    response = fields.get("response", "")

    if "instruction" in fields and "output" in fields:
        fields = {"messages": _build_alpaca_messages(fields)}
    elif isinstance(prompt, list) and isinstance(response, list):
        fields["messages"] = prompt + response
    if fields.get("messages"):
        chat = _normalise_chat(fields, with_answer)
        return {"prompt": "", "text": "", "cut": False, "chat": chat}

    if not {"text", "response", "prompt"} & fields.keys():
        raise InvalidExample("expected messages, conversations, text, or prompt and response")
    text = fields.get("text", response)
    for value in (text, prompt):
        require_type(value, str, "text, prompt and response must be strings")
    if with_answer and prompt and not text.strip():
        raise ExcludedExample(NO_ANSWER_EXCLUSION_REASON)
    if not text.strip() and not prompt:
        raise ExcludedExample("an empty text")
    is_cut = fields.get("finish") not in FINISH_REASONS_OF_COMPLETE_ANSWERS
    return {"prompt": prompt, "text": text, "cut": is_cut, "chat": None}


def _build_alpaca_messages(fields: dict) -> list[dict]:
    """Return the question and answer of an Alpaca record as messages."""
    question_texts = [str(fields[key]) for key in ("instruction", "input") if fields.get(key)]
    return [
        {"role": "user", "content": "\n\n".join(question_texts)},
        {"role": "assistant", "content": fields["output"]},
    ]


def _normalise_chat(fields: dict, with_answer: bool) -> dict[str, Any]:
    """Return {"messages", "tools", "template"} of a record that has messages."""
    raw_messages = require_type(fields["messages"], list, "messages must be a list")
    messages = [_normalise_message(message) for message in raw_messages]
    if messages[-1]["role"] != "assistant" and "response" in fields:
        answer = {
            "role": "assistant",
            "content": fields["response"],
            "finish": fields.get("finish"),
        }
        messages.append(_normalise_message(answer))

    if with_answer:
        messages = _truncate_after_cut_answer(messages)
    # A question without an answer has no loss; an answer after the last question is not needed.
    while messages and (messages[-1]["role"] == "assistant") != with_answer:
        messages.pop()

    answers = [message for message in messages if message["role"] == "assistant"]
    if with_answer and not any(_has_answer_content(answer) for answer in answers):
        raise ExcludedExample(NO_ANSWER_EXCLUSION_REASON)
    if not messages:
        raise ExcludedExample("no question of the user")

    template_kwargs = fields.get("chat_template_kwargs") or {}
    return {
        "messages": messages,
        "tools": parse_json(fields.get("tools") or [], list, "tools"),
        "template": parse_json(template_kwargs, dict, "chat_template_kwargs"),
    }


def _has_answer_content(answer: dict) -> bool:
    """Return whether an assistant's message has text, tool calls or reasoning."""
    return bool(
        answer["content"].strip() or answer.keys() & {"tool_calls", CANONICAL_MESSAGE_REASONING_KEY}
    )


def _truncate_after_cut_answer(messages: list[dict]) -> list[dict]:
    """Return the messages up to the first answer that was cut off.

    That answer is included unless it was cut off within its reasoning.
    Raises ExcludedExample if no answer is left.
    """
    for index, message in enumerate(messages):
        if (
            message["role"] != "assistant"
            or message.get("finish") in FINISH_REASONS_OF_COMPLETE_ANSWERS
        ):
            continue

        content = message["content"]
        has_open_tag = "<think>" in content and "</think>" not in content
        has_only_reasoning = (
            CANONICAL_MESSAGE_REASONING_KEY in message
            and not content.strip()
            and "tool_calls" not in message
        )
        if not has_open_tag and not has_only_reasoning:
            return messages[: index + 1]

        earlier_messages = messages[:index]
        if not any(earlier["role"] == "assistant" for earlier in earlier_messages):
            raise ExcludedExample("the answer was cut off within its reasoning")
        return earlier_messages
    return messages


def _normalise_message(raw_message: object) -> dict[str, Any]:
    """Return a message with the keys that chat templates read.

    An answer also has its finish reason, its loss weight and its original token ids, if known.
    """
    fields = rename_keys(
        raw_message, MESSAGE_KEY_ALIASES, "messages must be objects with role and content"
    )
    if fields.get("function_call"):
        raise InvalidExample("function_call is the old form of tool_calls; use tool_calls")
    tool_calls = fields.get("tool_calls")
    reasoning = fields.get(CANONICAL_MESSAGE_REASONING_KEY)
    role = fields.get("role")
    content = fields.get("content", "" if tool_calls or reasoning else None)
    if isinstance(content, list):
        content = _join_content_parts(content)
    for value in (role, content):
        message_keys = f"its keys are {', '.join(fields)}"
        require_type(value, str, "a message must have role and content as text", message_keys)

    message = {"role": ROLE_ALIASES.get(role, role), "content": content}
    for key in ("name", "tool_call_id"):
        if isinstance(fields.get(key), str):
            message[key] = fields[key]
    if message["role"] != "assistant":
        return message

    if isinstance(reasoning, str) and reasoning.strip():
        message[CANONICAL_MESSAGE_REASONING_KEY] = reasoning
    if tool_calls:
        message["tool_calls"] = [_normalise_tool_call(call) for call in tool_calls]
    if fields.get("token_ids"):
        message["token_ids"] = _check_token_ids(fields["token_ids"])
    # OpenAI's fine-tuning format marks answers that are not trained on with weight 0.
    if fields.get("weight") == 0:
        message["weight"] = 0
    if "finish" in fields:
        message["finish"] = fields["finish"]
    return message


def _join_content_parts(content_parts: list) -> str:
    """Return the text of a message whose content is a list of {"type": "text", "text"}.

    Raises ExcludedExample if one of them is not text, such as an image.
    """
    texts = []
    for content_part in content_parts:
        if not isinstance(content_part, dict) or not isinstance(content_part.get("text"), str):
            raise ExcludedExample("a message has content that is not text")
        texts.append(content_part["text"])
    return "".join(texts)


def _check_token_ids(token_ids: object) -> list[int]:
    """Return token ids unchanged. Raises InvalidExample for a value that cannot be a token id."""
    checked_ids: list = require_type(token_ids, list, "token_ids must be a list")
    for token_id in checked_ids:
        # JSON's true and false are int in Python.
        is_integer = isinstance(token_id, int) and not isinstance(token_id, bool)
        if not is_integer or not 0 <= token_id <= MAX_TOKEN_ID:
            raise InvalidExample(
                "token_ids must be integers from 0 on", f"not {str(token_id)[:40]}"
            )
    return checked_ids


def _normalise_tool_call(call: object) -> dict[str, Any]:
    """Return a tool call as {"type", "function": {"name", "arguments"}} with "id" if it has one.

    Arguments may be an object or JSON text. `convert_tool_arguments` in
    infer/utils/chat_template.py converts them to the form that a chat template expects.
    """
    message = "a tool call must have a name"
    call_fields: dict = require_type(call, dict, message)
    function: dict = require_type(call_fields.get("function", call_fields), dict, message)
    name = require_type(function.get("name"), str, message)
    arguments = function.get("arguments") or {}
    parse_json(arguments, object, "arguments of a tool call")

    tool_call: dict[str, Any] = {
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    if isinstance(call_fields.get("id"), str):
        tool_call["id"] = call_fields["id"]
    return tool_call

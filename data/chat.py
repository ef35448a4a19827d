"""Convert records of all supported formats, such as ShareGPT and Alpaca, to one form of example.

An example is a dictionary with the keys "prompt", "text", "cut" and "chat". If the record is a
chat, "chat" holds the chat, and "prompt" and "text" are empty. Otherwise "chat" is None, "text" is
the text that the model is trained on, and "prompt" is the text before "text". "cut" is True if the
text was cut off before its end. data/template.py applies chat templates.
"""

import json
from typing import Any, TypeVar

from data.counts import ExcludedExample, InvalidExample

Value = TypeVar("Value")

# Key of a message that holds the reasoning of an answer. OpenAI-compatible servers use this key or
# the key "reasoning".
CANONICAL_MESSAGE_REASONING_KEY = "reasoning_content"

# Keys are names that other record formats use; values are the names that this code uses instead.
ROLE_ALIASES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
COLUMN_ALIASES = {"conversations": "messages", "completion": "response", "finish_reason": "finish"}
MESSAGE_KEY_ALIASES = {
    "from": "role",
    "value": "content",
    "reasoning": CANONICAL_MESSAGE_REASONING_KEY,
    "finish_reason": "finish",
}

# Finish reasons of a complete answer; None means that no reason was recorded. Any other finish
# reason means that the answer was cut off.
FINISH_REASONS_OF_COMPLETE_ANSWERS = (None, "stop", "tool_calls", "function_call")

MAX_TOKEN_ID = 2**31 - 1
MAX_QUOTED_INVALID_VALUE_CHARACTERS = (
    80  # maximum number of characters of an invalid value that an error message quotes
)
NO_ANSWER_EXCLUSION_REASON = "no answer of the assistant"


def require_type(
    value: object, expected_type: type[Value], message: str, detail: str = ""
) -> Value:
    """Check that a value of a record has the expected type, and return the value unchanged.

    Raises InvalidExample with `message` and `detail` if the value has another type.
    """
    if not isinstance(value, expected_type):
        raise InvalidExample(message, detail)
    return value


def rename_keys_and_drop_nulls(
    record: object, aliases: dict[str, str], message: str
) -> dict[str, Any]:
    """Return a copy of a record without null values, with its keys renamed to the standard keys.

    aliases: keys are the key names of other record formats, values are the standard keys

    If the record has both an alias and its standard key, the value of the standard key is kept.
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
    """Return a value, parsed as JSON if it is a string and unchanged otherwise.

    name: a plural noun for the value in error messages, such as "tools"

    Raises InvalidExample if the text is not valid JSON, or the result is not of the expected type.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise InvalidExample(
                f"{name} are not valid JSON", value[:MAX_QUOTED_INVALID_VALUE_CHARACTERS]
            ) from error
    return require_type(value, expected_type, f"{name} are not a JSON {expected_type.__name__}")


def normalise_example(record: object, ends_with_answer: bool = True) -> dict[str, Any]:
    """Convert a record of any supported format to an example {"prompt", "text", "cut", "chat"}.

    ends_with_answer: if True, the returned chat ends with its last answer; if False, it ends with
        its last question

    Keys of the returned example:
    - "chat": {"messages", "tools", "template"}, or None for a record without messages. "template"
      holds the variables of the chat template (`chat_template_kwargs`).
    - "text": the text that the model is trained on; "" for a chat
    - "prompt": the text before "text"; "" for a chat
    - "cut": whether the text was cut off before its end, according to the record's "finish" or
      "finish_reason"

    If `ends_with_answer` is True, a chat ends early with its first answer that was cut off. If this
    answer was cut off within its reasoning, the chat ends with the answer before it.

    Supported formats of records:
    - {"messages": [{"role", "content"}]}, with optional "tools" and "chat_template_kwargs". If the
      last message is the user's, "response" may hold the answer. `./launch.sh regenerate` writes
      this format.
    - ShareGPT: {"conversations": [{"from", "value"}]}
    - {"prompt", "response"} or {"prompt", "completion"}, both texts or both lists of messages
    - Alpaca: {"instruction", "input", "output"}
    - {"text"}

    Raises InvalidExample if the record is malformed. Raises ExcludedExample if the record has
    nothing to train on, and, if `ends_with_answer` is False, if the record has no question.
    """
    fields = rename_keys_and_drop_nulls(record, COLUMN_ALIASES, "an example must be a JSON object")
    prompt = fields.get("prompt", "")
    response = fields.get("response", "")

    if "instruction" in fields and "output" in fields:
        fields = {"messages": _build_alpaca_messages(fields)}
    elif isinstance(prompt, list) and isinstance(response, list):
        fields["messages"] = prompt + response
    if fields.get("messages"):
        chat = _normalise_chat(fields, ends_with_answer)
        return {"prompt": "", "text": "", "cut": False, "chat": chat}

    if not {"text", "response", "prompt"} & fields.keys():
        raise InvalidExample(
            'an example must have the key "messages", "conversations" or "text", or the keys '
            '"prompt" and "response"'
        )
    text = fields.get("text", response)
    for value in (text, prompt):
        require_type(value, str, "text, prompt and response must be strings")
    if ends_with_answer and prompt and not text.strip():
        raise ExcludedExample(NO_ANSWER_EXCLUSION_REASON)
    if not text.strip() and not prompt:
        raise ExcludedExample("the text is empty")
    is_cut = fields.get("finish") not in FINISH_REASONS_OF_COMPLETE_ANSWERS
    return {"prompt": prompt, "text": text, "cut": is_cut, "chat": None}


def _build_alpaca_messages(fields: dict) -> list[dict]:
    """Return the messages (question and answer) of an Alpaca record."""
    question_texts = [str(fields[key]) for key in ("instruction", "input") if fields.get(key)]
    return [
        {"role": "user", "content": "\n\n".join(question_texts)},
        {"role": "assistant", "content": fields["output"]},
    ]


def _normalise_chat(fields: dict, ends_with_answer: bool) -> dict[str, Any]:
    """Convert a record that has messages to a chat {"messages", "tools", "template"}.

    ends_with_answer: if True, the chat ends with its last answer; if False, with its last question
    """
    raw_messages = require_type(fields["messages"], list, "messages must be a list")
    messages = [_normalise_message(message) for message in raw_messages]
    if messages[-1]["role"] != "assistant" and "response" in fields:
        answer = {
            "role": "assistant",
            "content": fields["response"],
            "finish": fields.get("finish"),
        }
        messages.append(_normalise_message(answer))

    if ends_with_answer:
        messages = _truncate_after_cut_answer(messages)
    # If ends_with_answer is True (training), a last question without an answer is dropped, because
    # none of its tokens carries loss. If it is False, the answer to the last question is dropped,
    # because the target will generate a new one.
    while messages and (messages[-1]["role"] == "assistant") != ends_with_answer:
        messages.pop()

    answers = [message for message in messages if message["role"] == "assistant"]
    if ends_with_answer and not any(_has_answer_content(answer) for answer in answers):
        raise ExcludedExample(NO_ANSWER_EXCLUSION_REASON)
    if not messages:
        raise ExcludedExample("the chat has no user message to answer")

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
    """Return the messages up to and including the first answer that was cut off.

    An answer that was cut off within its reasoning is not included. Raises ExcludedExample if the
    messages before such an answer contain no other answer.
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
    """Convert a message of any supported format to a message with the keys of chat templates.

    An answer also keeps three keys for training, if the raw message has them: "finish" (finish
    reason), "weight" (only 0, for an answer that is not trained on) and "token_ids" (the ids of
    the generated tokens).
    """
    fields = rename_keys_and_drop_nulls(
        raw_message, MESSAGE_KEY_ALIASES, "messages must be objects with role and content"
    )
    if fields.get("function_call"):
        raise InvalidExample(
            "a message has function_call, which is not supported; use tool_calls instead"
        )
    tool_calls = fields.get("tool_calls")
    reasoning = fields.get(CANONICAL_MESSAGE_REASONING_KEY)
    role = fields.get("role")
    content = fields.get("content", "" if tool_calls or reasoning else None)
    if isinstance(content, list):
        content = _join_content_parts(content)
    for value in (role, content):
        message_keys = f"the keys of this message are {', '.join(fields)}"
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
    # In OpenAI's fine-tuning format, weight 0 marks an answer that is not trained on.
    if fields.get("weight") == 0:
        message["weight"] = 0
    if "finish" in fields:
        message["finish"] = fields["finish"]
    return message


def _join_content_parts(content_parts: list) -> str:
    """Join the texts of a message whose content is a list of parts {"type": "text", "text"}.

    Raises ExcludedExample if a part is not text, such as an image.
    """
    texts = []
    for content_part in content_parts:
        if not isinstance(content_part, dict) or not isinstance(content_part.get("text"), str):
            raise ExcludedExample("a message has content that is not text")
        texts.append(content_part["text"])
    return "".join(texts)


def _check_token_ids(token_ids: object) -> list[int]:
    """Check that a value is a list of token ids, and return the list.

    Raises InvalidExample if the value is not a list of integers from 0 to MAX_TOKEN_ID.
    """
    checked_ids: list = require_type(token_ids, list, "token_ids must be a list")
    for token_id in checked_ids:
        # `bool` is a subclass of `int`, so isinstance(..., int) alone would accept JSON's `true`.
        is_integer = isinstance(token_id, int) and not isinstance(token_id, bool)
        if not is_integer or not 0 <= token_id <= MAX_TOKEN_ID:
            raise InvalidExample(
                f"token_ids must be integers from 0 to {MAX_TOKEN_ID}", f"not {str(token_id)[:40]}"
            )
    return checked_ids


def _normalise_tool_call(call: object) -> dict[str, Any]:
    """Convert a tool call to {"type", "function": {"name", "arguments"}}, with "id" if it has one.

    The arguments may be an object or JSON text. `convert_tool_arguments` in
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

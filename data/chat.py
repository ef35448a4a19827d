"""Rows of every layout in, one form out. What a chat template makes of a chat: data/template.py.

A row becomes {"prompt", "text", "cut", "chat"}: a chat has `chat` and nothing else, any other row
none.
"""

import json

from data.counts import ExcludedExample, InvalidExample

ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}  # ShareGPT's names
# why an answer ended that is whole; any other reason cut it
ENDED = (None, "stop", "tool_calls", "function_call")
THOUGHT = "reasoning_content"  # our key; OpenAI-compatible servers say that or "reasoning"
# What the layouts call the columns of a row and the keys of a message: theirs, ours.
COLUMNS = {"conversations": "messages", "completion": "response", "finish_reason": "finish"}
KEYS = {"from": "role", "value": "content", "reasoning": THOUGHT, "finish_reason": "finish"}


MAX_TOKEN_ID = 2**31 - 1
NO_ANSWER = "no answer of the assistant"


def checked(value: object, kind: type, wrong: str, detail: str = ""):
    """Return a value of a row. Raises InvalidExample, saying `wrong`, if it is of another kind."""
    if not isinstance(value, kind):
        raise InvalidExample(wrong, detail)
    return value


def renamed(given: object, names: dict[str, str], wrong: str) -> dict:
    """Return an object with our names for its keys, without those that hold nothing; ours count
    more."""
    given = {key: value for key, value in checked(given, dict, wrong).items() if value is not None}
    return {
        names.get(key, key): value for key, value in given.items() if names.get(key) not in given
    }


def parsed(value: object, kind: type, what: str):
    """Return a value that may be written as JSON. Raises InvalidExample if it is of another
    kind."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise InvalidExample(f"{what} are no JSON", value[:80]) from error
    return checked(value, kind, f"{what} are no JSON {kind.__name__}")


def normalise(row: object, answered: bool = True) -> dict:
    """Return one row of any known layout as {"prompt", "text", "cut", "chat"}. A chat is
    {"messages", "tools", "template"}, the last being what its template is told
    (`chat_template_kwargs`). If it is to be `answered`, its last message is an answer, else what is
    behind the last question is left out.

    An answer that did not come to its end ("finish" or "finish_reason" says so) is the last one; if
    that was in the middle of a thought, it is left out, with its question. `cut` says the same of a
    text.

    Layouts: {"messages": [{"role", "content"}]} with "tools" and "chat_template_kwargs" (what
    `./launch.sh regenerate` writes), with "response" behind them if the last one is the user's;
    ShareGPT's {"conversations": [{"from", "value"}]}; {"prompt", "response"} or "completion", texts
    or both messages; Alpaca's {"instruction", "input", "output"}; {"text"}. Raises InvalidExample
    with what is wrong, ExcludedExample where there is nothing to learn, or nothing to ask.
    """
    row = renamed(row, COLUMNS, "a row is a JSON object")
    prompt = row.get("prompt", "")
    response = row.get("response", "")
    if "instruction" in row and "output" in row:
        asked = "\n\n".join(str(row[part]) for part in ("instruction", "input") if row.get(part))
        row = {
            "messages": [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": row["output"]},
            ]
        }
    elif isinstance(prompt, list) and isinstance(response, list):
        row["messages"] = prompt + response
    if row.get("messages"):
        return {"prompt": "", "text": "", "cut": False, "chat": _chat(row, answered)}
    if not {"text", "response", "prompt"} & row.keys():
        raise InvalidExample("expected messages, conversations, text, or prompt and response")
    text = row.get("text", response)
    for part in (text, prompt):
        checked(part, str, "text, prompt and response are strings")
    if answered and prompt and not text.strip():
        raise ExcludedExample(NO_ANSWER)
    if not text.strip() and not prompt:
        raise ExcludedExample("an empty text")
    return {"prompt": prompt, "text": text, "cut": row.get("finish") not in ENDED, "chat": None}


def _chat(row: dict, answered: bool) -> dict:
    """Return a chat of `normalise`."""
    messages = [_message(turn) for turn in checked(row["messages"], list, "messages is a list")]
    if messages[-1]["role"] != "assistant" and "response" in row:
        messages.append(
            _message({"role": "assistant", "content": row["response"], "finish": row.get("finish")})
        )
    messages = _up_to_cut(messages) if answered else messages
    while messages and (messages[-1]["role"] == "assistant") != answered:
        messages.pop()  # a question without an answer has no loss
    answers = [turn for turn in messages if turn["role"] == "assistant"]
    if answered and not any(
        turn["content"].strip() or turn.keys() & {"tool_calls", THOUGHT} for turn in answers
    ):
        raise ExcludedExample(NO_ANSWER)
    if not messages:
        raise ExcludedExample("no question of the user")
    tools = parsed(row.get("tools") or [], list, "tools")
    return {
        "messages": messages,
        "tools": tools,
        "template": parsed(row.get("chat_template_kwargs") or {}, dict, "chat_template_kwargs"),
    }


def _up_to_cut(messages: list[dict]) -> list[dict]:
    """Return the messages up to the first answer that did not come to its end, without it if it is
    a cut thought."""
    for i, turn in enumerate(messages):
        if turn["role"] == "assistant" and turn.get("finish") not in ENDED:
            opened = "<think>" in turn["content"] and "</think>" not in turn["content"]
            alone = THOUGHT in turn and not turn["content"].strip() and "tool_calls" not in turn
            if not (opened or alone):  # there is something behind its thought
                return messages[: i + 1]
            if not any(before["role"] == "assistant" for before in messages[:i]):
                raise ExcludedExample("the answer was cut within its thought")
            return messages[:i]
    return messages


def _message(turn: object) -> dict:
    """Return a message with what a template may show of it, and what is known of how it was
    written."""
    turn = renamed(turn, KEYS, "messages is a list of objects with role and content")
    if turn.get("function_call"):
        raise InvalidExample("function_call is the old form of tool_calls: give those")
    calls = turn.get("tool_calls")
    thought = turn.get(THOUGHT)
    content = turn.get("content", "" if calls or thought else None)
    if isinstance(content, list):  # OpenAI's parts
        if not all(
            isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
        ):
            raise ExcludedExample("a message has a part that is no text")
        content = "".join(part["text"] for part in content)
    for part in (turn.get("role"), content):
        checked(part, str, "a message without role or content as text", f"it has {', '.join(turn)}")
    message = {"role": ROLES.get(turn["role"], turn["role"]), "content": content}
    message |= {
        key: turn[key] for key in ("name", "tool_call_id") if isinstance(turn.get(key), str)
    }
    if message["role"] != "assistant":
        return message
    if isinstance(thought, str) and thought.strip():
        message[THOUGHT] = thought
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    if turn.get("token_ids"):
        message["token_ids"] = _token_ids(turn["token_ids"])
    if turn.get("weight") == 0:  # OpenAI's word for an answer that is not learnt from
        message["weight"] = 0
    return message | {key: turn[key] for key in ("finish",) if key in turn}


def _token_ids(ids: object) -> list[int]:
    """Return the ids of tokens. Raises InvalidExample for any value that cannot be one."""
    for id in checked(ids, list, "token_ids is a list"):
        # JSON's true and false are int in Python
        if not isinstance(id, int) or isinstance(id, bool) or not 0 <= id <= MAX_TOKEN_ID:
            raise InvalidExample("token_ids are whole numbers from 0 on", f"not {str(id)[:40]}")
    return ids


def _call(call: object) -> dict:
    """Return a tool call. Its arguments may be an object or JSON text: readable_messages in
    infer/utils/chat_template.py gives them to a template as it takes them."""
    wrong = "a tool call without a name"
    inside = checked(checked(call, dict, wrong).get("function", call), dict, wrong)
    name = checked(inside.get("name"), str, wrong)
    arguments = inside.get("arguments") or {}
    parsed(arguments, object, "arguments of a tool call")
    made = {"name": name, "arguments": arguments}
    return {"type": "function", "function": made} | (
        {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    )

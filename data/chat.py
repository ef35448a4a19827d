"""Conversations: common row formats in, the target's chat template applied, the assistant's part marked.

A row becomes {"prompt", "text", "messages"}: a chat has messages and nothing else, any other row none.
"""

import json

from jinja2 import TemplateError

MARK = "ANSWERGOESHERE"  # takes the place of an answer, to find where the template puts it
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}  # ShareGPT's names


def normalise(row: object, answered: bool = True) -> dict:
    """Return one row of any known format as {"prompt", "text", "messages"}; the last message is an answer if it is to
    be `answered`, else the answer's place is empty: what is behind the last question is left out.

    Formats: {"messages": [{"role", "content"}]}, with "response" behind them if the last one is the user's (what
    `./launch.sh regenerate` writes); ShareGPT's {"conversations": [{"from", "value"}]}; {"prompt", "response"} or
    "completion", texts or both messages; Alpaca's {"instruction", "input", "output"}; {"text"}. Raises ValueError with
    what is wrong.
    """
    if not isinstance(row, dict):
        raise ValueError("a row is a JSON object")
    row = _in_our_words(row)
    turns = row.get("messages") or row.get("conversations")
    if turns is not None:
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
            raise ValueError("messages is a list of objects with role and content")
        messages = [_turn(turn) for turn in turns]
        if messages[-1]["role"] != "assistant" and isinstance(row.get("response"), str):
            messages.append({"role": "assistant", "content": row["response"]})
        while messages and (messages[-1]["role"] == "assistant") != answered:
            messages.pop()  # a question without an answer has no loss
        if answered and not any(turn["role"] == "assistant" and turn["content"].strip() for turn in messages):
            raise ValueError("no answer of the assistant in the conversation")
        if not messages:
            raise ValueError("no question in the conversation")
        return {"prompt": "", "text": "", "messages": messages}
    if "text" not in row and "response" not in row and (answered or "prompt" not in row):
        raise ValueError("expected messages, conversations, text, or prompt and response")
    text, prompt = row.get("text", row.get("response", "")), row.get("prompt", "")
    if not (isinstance(text, str) and isinstance(prompt, str)):
        raise ValueError("text, prompt and response are strings")
    if not text.strip() and (answered or not prompt):
        raise ValueError("an empty text")
    return {"prompt": prompt, "text": text, "messages": None}


def _in_our_words(row: dict) -> dict:
    """Return a row of a format that only calls things by other names, by ours."""
    if isinstance(row.get("instruction"), str) and isinstance(row.get("output"), str):  # Alpaca
        asked = "\n\n".join(part for part in (row["instruction"], row.get("input")) if part)
        return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]}
    if "completion" in row and "response" not in row:
        row = row | {"response": row["completion"]}
    prompt, response = row.get("prompt"), row.get("response")
    if isinstance(prompt, list) and isinstance(response, list):
        return {"messages": prompt + response}
    return row


def _turn(turn: dict) -> dict[str, str]:
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if isinstance(content, list):  # OpenAI's parts
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    if not (isinstance(role, str) and isinstance(content, str)):
        raise ValueError(f"a message without role or content: {json.dumps(turn, ensure_ascii=False)[:80]}")
    return {"role": ROLES.get(role, role), "content": content}


def render(tokenizer, messages: list[dict[str, str]]) -> tuple[str, list[tuple[int, int]]]:
    """Return the conversation as the template writes it, and the place of each answer in it: [start, end) in
    characters, from behind the words that ask the assistant to speak to the end of the answer.

    Raises ValueError where the template does not show an answer as it is: its loss would fall on other tokens.
    """

    def template(turns: list[dict[str, str]], ask: bool = False) -> str:
        try:
            return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=ask)
        except TemplateError as error:  # roles in an order that it refuses
            raise ValueError(f"the chat template says: {error}") from error

    whole, spans = template(messages), []
    for i, turn in enumerate(messages):
        if turn["role"] != "assistant":
            continue
        # A thought before the answer stays in place: some templates treat it in a way of their own.
        thought, close, answer = turn["content"].rpartition("</think>")
        marked = {"role": "assistant", "content": thought + close + ("\n\n" if close else "") + MARK}
        before, found, after = template([*messages[:i], marked, *messages[i + 1 :]]).partition(MARK)
        start, end = len(before), len(whole) - len(after)
        asked = template(messages[:i], ask=True)
        if whole.startswith(asked) and len(asked) <= start:
            start = len(asked)
        fits = found and whole.startswith(before[: len(asked)]) and whole.endswith(after) and start <= end
        if not fits or not whole[start:end].strip().endswith(answer.strip()):
            raise ValueError(f"the chat template does not show answer {i} as it is")
        spans.append((start, end))
    return whole, spans


def tokenize_chat(tokenizer, messages: list[dict[str, str]]) -> tuple[list[int], list[bool]]:
    """Return the token ids of a conversation, and which of them carry loss: the answers', and the special token that
    ends each."""
    text, spans = render(tokenizer, messages)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, special = encoded["input_ids"], set(tokenizer.all_special_ids)
    loss = [False] * len(ids)
    at = 0
    for start, end in spans:
        while at < len(ids) and encoded["offset_mapping"][at][0] < start:
            at += 1
        while at < len(ids) and encoded["offset_mapping"][at][1] <= end:
            loss[at] = True
            at += 1
        if at < len(ids) and ids[at] in special:
            loss[at] = True
    return ids, loss

"""Questions that a chat model writes itself (Magpie, 2406.08464): its template up to a user's
words, gone on with until the user's turn ends; and which of them are worth an answer."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from data.template import apply, source

MARK = "QUESTIONGOESHERE"
ALIKE = 64  # first characters, of words alone, that no two questions share


@dataclass(frozen=True)
class Opening:
    """What a template writes before a user's words, and how they end.

    before: messages of the chat before the question
    text: what the target goes on from
    stop: texts that end the question, besides the target's end tokens
    """

    before: list[dict]
    text: str
    stop: list[str]


def opening(tokenizer, system: str | None = None) -> Opening:
    """Return where a chat's first question begins, behind a system prompt if there is one. Raises
    ValueError where the template does not show that, or has nothing before a user's words."""
    before = [{"role": "system", "content": system}] if system else []
    messages = [*before, {"role": "user", "content": MARK}]
    asked = (
        apply(tokenizer, messages, {"tools": [], "template": {}}, ask=True)
        if source(tokenizer)
        else ""
    )
    text, _, behind = asked.partition(MARK)
    text = text.rstrip(" ")  # most tokenizers have a space at the beginning of a word
    ids = tokenizer(text)["input_ids"]
    if (
        ids[:2] == [tokenizer.bos_token_id] * 2
    ):  # the template writes it, and the tokenizer another one
        text = text.removeprefix(tokenizer.bos_token)
    if system and system.strip() not in text:
        raise ValueError(
            "questions.system: this model's chat template does not show system prompts, leave it out"
        )
    if not text:
        raise ValueError(
            "data=self is for chat models: this one's chat template has nothing before a user's words"
        )
    ends = behind.strip(" ").rstrip() or behind
    first = tokenizer(behind.lstrip(), add_special_tokens=False)["input_ids"][:1]
    if first and not tokenizer.decode(first, skip_special_tokens=True):
        ends = tokenizer.decode(first)
    return Opening(before, text, [ends] if ends else [])


def sifted(written: Iterable[dict], tokenizer, fewest: int) -> tuple[dict[int, str], Counter]:
    """Return the questions that are worth an answer, by their rows, and how many are not, by
    reason.

    written: {"index", "response", "finish"} in order, "length" and "loop" for those that did not
        end
    fewest: tokens of a question
    """
    kept = {}
    dropped = Counter()
    seen = set()
    for row in written:
        text = row["response"].strip()
        start = " ".join(re.findall(r"\w+", text.lower()))[:ALIKE]
        if row["finish"] in ("length", "loop"):
            dropped["too long" if row["finish"] == "length" else "repeating themselves"] += 1
        elif not start or "\ufffd" in text or len(tokenizer(text)["input_ids"]) < fewest:
            dropped["too short or no text"] += 1
        elif start in seen:
            dropped["like an earlier one"] += 1
        else:
            seen.add(start)
            kept[row["index"]] = text
    return kept, dropped

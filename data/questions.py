"""Questions that a chat model writes itself, as in Magpie (2406.08464).

The model continues its chat template from where a user message begins until the message ends. The
questions are then filtered.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from data.template import get_template_source, render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SELF_QUESTION_PLACEHOLDER = "QUESTIONGOESHERE"
DUPLICATE_QUESTION_PREFIX_CHARACTERS = (
    64  # two questions whose first word characters agree are duplicates
)


@dataclass(frozen=True)
class QuestionPrompt:
    """Prompt from which the target generates a user's question.

    messages: messages of the chat before the question, such as a system prompt
    text: text that the target continues
    stop_strings: strings that end the question, in addition to the target's end tokens
    """

    messages: list[dict]
    text: str
    stop_strings: list[str]


def build_question_prompt(
    tokenizer: "PreTrainedTokenizerBase", system: str | None = None
) -> QuestionPrompt:
    """Return the chat template's text up to the first user message.

    system: system prompt of the chat, if any

    Raises ValueError if the template does not show the system prompt, or has no text before a user
    message.
    """
    messages = [{"role": "system", "content": system}] if system else []
    rendered = ""
    if get_template_source(tokenizer):
        question = {"role": "user", "content": SELF_QUESTION_PLACEHOLDER}
        chat = {"tools": [], "template": {}}
        rendered = render_chat(tokenizer, [*messages, question], chat, add_generation_prompt=True)
    text, _, suffix = rendered.partition(SELF_QUESTION_PLACEHOLDER)
    # Most tokenizers put the space at the beginning of the next word's token.
    text = text.rstrip(" ")

    # If both the template and the tokenizer add the start token, drop the template's.
    ids = tokenizer(text)["input_ids"]
    if ids[:2] == [tokenizer.bos_token_id] * 2:
        text = text.removeprefix(tokenizer.bos_token)

    if system and system.strip() not in text:
        raise ValueError(
            "questions.system: this model's chat template does not show system prompts; remove it"
        )
    if not text:
        raise ValueError(
            "data=self needs a chat model whose template has text before a user's message; "
            "this one has none"
        )
    end = _find_question_end(tokenizer, suffix)
    return QuestionPrompt(messages, text, [end] if end else [])


def _find_question_end(tokenizer: "PreTrainedTokenizerBase", suffix: str) -> str:
    """Return the string that ends a question, given the template's text after it.

    This is the first token of the text if that is a special token, and otherwise the whole text.
    """
    first_id = tokenizer(suffix.lstrip(), add_special_tokens=False)["input_ids"][:1]
    if first_id and not tokenizer.decode(first_id, skip_special_tokens=True):
        return cast("str", tokenizer.decode(first_id))
    return suffix.strip(" ").rstrip() or suffix


def filter_questions(
    rows: Iterable[dict], tokenizer: "PreTrainedTokenizerBase", min_tokens: int
) -> tuple[dict[int, str], Counter]:
    """Return the usable questions by row index, and the number of unusable ones by reason.

    rows: {"index", "response", "finish"} in order; `finish` is "length" or "loop" if the question
        did not end
    min_tokens: minimum length of a question
    """
    questions = {}
    dropped = Counter()
    seen_prefixes = set()
    for row in rows:
        text = row["response"].strip()
        words = " ".join(re.findall(r"\w+", text.lower()))
        prefix = words[:DUPLICATE_QUESTION_PREFIX_CHARACTERS]

        if row["finish"] == "length":
            dropped["too long"] += 1
        elif row["finish"] == "loop":
            dropped["repeating themselves"] += 1
        elif not prefix or "\ufffd" in text or len(tokenizer(text)["input_ids"]) < min_tokens:
            dropped["too short or no text"] += 1
        elif prefix in seen_prefixes:
            dropped["like an earlier one"] += 1
        else:
            seen_prefixes.add(prefix)
            questions[row["index"]] = text
    return questions, dropped

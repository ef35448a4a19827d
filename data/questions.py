"""Let a chat model generate user questions, as in Magpie (2406.08464).

The prompt is the text of the chat template up to the point where a user message begins. The model
continues this prompt with a user message. Unusable questions are then removed.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from data.template import get_template_source, render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

USER_QUESTION_PLACEHOLDER = "QUESTIONGOESHERE"
# Two questions are duplicates if their first 64 characters are equal, in lower case and without
# punctuation.
DUPLICATE_QUESTION_PREFIX_CHARACTERS = 64


@dataclass(frozen=True)
class QuestionPrompt:
    """A prompt from which the target generates a user's question.

    messages: messages before the question, such as a system prompt
    text: text that the target continues
    stop_strings: strings that end the generated question, in addition to the target's end tokens
    """

    messages: list[dict]
    text: str
    stop_strings: list[str]


def build_question_prompt(
    tokenizer: "PreTrainedTokenizerBase", system: str | None = None
) -> QuestionPrompt:
    """Return a prompt that ends where the chat template would insert the first user message.

    system: system prompt of the chat; None for a chat without a system prompt

    Raises ValueError if the chat template leaves out the system prompt, or puts no text before a
    user message.
    """
    messages = [{"role": "system", "content": system}] if system else []
    rendered = ""
    if get_template_source(tokenizer):
        question = {"role": "user", "content": USER_QUESTION_PLACEHOLDER}
        chat = {"tools": [], "template": {}}
        rendered = render_chat(tokenizer, [*messages, question], chat, add_generation_prompt=True)
    text, _, suffix = rendered.partition(USER_QUESTION_PLACEHOLDER)
    # Most tokenizers join a space with the word after it, so the prompt must not end with a space.
    text = text.rstrip(" ")

    # If both the template and the tokenizer add the BOS token, remove the template's BOS token.
    ids = tokenizer(text)["input_ids"]
    if ids[:2] == [tokenizer.bos_token_id] * 2:
        text = text.removeprefix(tokenizer.bos_token)

    if system and system.strip() not in text:
        raise ValueError(
            "questions.system cannot be used: the chat template of this model leaves out "
            "system prompts; remove questions.system"
        )
    if not text:
        raise ValueError(
            "data=self needs a chat model whose chat template has text before a user's message; "
            "the template of this model has none, so use another model or other data"
        )
    end = _find_question_end(tokenizer, suffix)
    return QuestionPrompt(messages, text, [end] if end else [])


def _find_question_end(tokenizer: "PreTrainedTokenizerBase", suffix: str) -> str:
    """Return the string by which the end of a generated question is recognised.

    suffix: the text of the chat template after a question

    If `suffix` starts with a special token, this token is returned. Otherwise `suffix` is returned,
    without white space at its end.
    """
    first_id = tokenizer(suffix.lstrip(), add_special_tokens=False)["input_ids"][:1]
    if first_id and not tokenizer.decode(first_id, skip_special_tokens=True):
        return cast("str", tokenizer.decode(first_id))
    return suffix.strip(" ").rstrip() or suffix


def filter_questions(
    rows: Iterable[dict], tokenizer: "PreTrainedTokenizerBase", min_tokens: int
) -> tuple[dict[int, str], Counter]:
    """Select the usable ones of the generated questions.

    rows: dictionaries {"index", "response", "finish"}, in order. "response" is the question.
        "finish" is "length" if generation stopped at the maximum length, and "loop" if generation
        stopped because the question repeats itself
    min_tokens: minimum number of tokens of a question

    Returns two dictionaries: "index" -> usable question, and reason -> number of questions that
    were removed for this reason.
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

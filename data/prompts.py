"""Select prompts for evaluation, as token ids.

They are held-out prompts of several kinds, and fixed prompts of this package from outside the data.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, cast

from data.rows import DataConfig, read_held_out_examples, round_robin
from data.template import prepare_messages, render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Prompts written for this package, a JSON object {"kind", "prompt"} a line.
OUTSIDE_PROMPTS_FILE = Path(__file__).resolve().parent / "embedded" / "outside.jsonl"
OUTSIDE_PROMPTS_GROUP_NAME = "outside the data"

# Kinds of prompts from plain text that end where a pattern ends, in Python code.
CODE_PROMPT_END_PATTERNS = {
    "in functions": re.compile(r"^[ \t]*def [^\n]*:\n(?:[ \t]+[^\n]*\n){3}", re.MULTILINE),
    "in docstrings": re.compile(r'^[ \t]*[rR]?"""[^\n"]{12,}\n', re.MULTILINE),
}
TEXT_START_PROMPT_KIND = "starts of texts"
MID_TEXT_PROMPT_KIND = "further on"

CHAT_PROMPT_KIND_PREFIX = "chats"
MAX_TOKENS_OF_CHAT_PROMPT_KINDS = (128, 512, 2048)  # maximum prompt tokens of each kind of chat

MAX_EXAMPLES_READ_PER_PROMPT = 20  # held-out examples read for each requested prompt


@dataclass(frozen=True)
class Prompt:
    """A prompt to evaluate with.

    ids: token ids
    kind: kind of text, such as "in functions"; results are reported by kind
    report_group: name of the group that is reported next to the held-out prompts; None for a
        held-out prompt
    request_text: text that a client sends to a server to get these ids; empty if there is none
    chat: whether `request_text` is sent as a chat's question
    """

    ids: list[int]
    kind: str
    report_group: str | None = None
    request_text: str = ""
    chat: bool = False


def select_evaluation_prompts(
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    count: int,
    prompt_tokens: int,
    outside: int = 0,
) -> list[Prompt]:
    """Return `count` prompts that training never sees, evenly spread over their kinds.

    A chat gives a prompt of whole messages (`_select_chat_prompt`). An example with a prompt gives
    its last tokens. A plain text gives its first tokens and those before CODE_PROMPT_END_PATTERNS. If
    these are too few, later windows of long texts are added, and then first halves of short texts.
    Small data sets may give fewer than `count`.

    prompt_tokens: tokens of a prompt; of a chat, at most
    outside: number of prompts of `load_outside_prompts` to add, at most `count`

    Raises ValueError if there is no prompt, or `count` is 0.
    """
    if not count:
        raise ValueError("evaluation.prompts=0: use at least 1 prompt")
    prompts_by_kind: dict[str, list[Prompt]] = {}
    windows_by_text: list[list[Prompt]] = []
    first_halves: list[Prompt] = []

    def add_prompt(ids: list[int], kind: str) -> None:
        prompts_by_kind.setdefault(kind, []).append(Prompt(ids, kind))

    examples = islice(read_held_out_examples(config), MAX_EXAMPLES_READ_PER_PROMPT * count)
    for number, example in enumerate(examples):
        if example["chat"]:
            # Training leaves such a chat out, and reports it.
            with suppress(ValueError):
                ids = _select_chat_prompt(example["chat"], tokenizer, prompt_tokens, number)
                add_prompt(ids, _name_chat_kind(len(ids)))
        elif example["prompt"]:
            add_prompt(tokenizer(example["prompt"])["input_ids"][-prompt_tokens:], "prompts")
        else:
            ids = tokenizer(example["text"])["input_ids"]
            text_prompts = _select_text_prompts(example["text"], ids, tokenizer, prompt_tokens)
            for prompt in text_prompts:
                add_prompt(prompt.ids, prompt.kind)
            windows = _select_later_windows(ids, prompt_tokens, bool(text_prompts))
            windows_by_text.append(windows)
            if len(ids) > 1 and not text_prompts and not windows:
                half = min(prompt_tokens, len(ids) // 2)
                first_halves.append(Prompt(ids[:half], MID_TEXT_PROMPT_KIND))
        if _has_enough_of_each_kind(prompts_by_kind, count):
            break

    prompts_of_kinds = round_robin(prompts_by_kind.values())
    candidates = [*prompts_of_kinds, *round_robin(windows_by_text), *first_halves]
    prompts = candidates[:count]
    if not prompts:
        raise ValueError(
            f"data.source={config.source}: the held-out examples give no prompt to evaluate with"
        )
    has_chats = any(kind.startswith(CHAT_PROMPT_KIND_PREFIX) for kind in prompts_by_kind)
    outside_prompts = load_outside_prompts(tokenizer, prompt_tokens, has_chats)
    return prompts + outside_prompts[: min(outside, count)]


def _select_text_prompts(
    text: str, ids: list[int], tokenizer: "PreTrainedTokenizerBase", prompt_tokens: int
) -> list[Prompt]:
    """Return the prompts of a plain text that end where `_find_prompt_ends` says.

    ids: token ids of the text
    """
    prompts = []
    for kind, end in _find_prompt_ends(text, tokenizer, len(ids), prompt_tokens):
        prompts.append(Prompt(ids[end - prompt_tokens : end], kind))
    return prompts


def _select_later_windows(ids: list[int], prompt_tokens: int, skip_start: bool) -> list[Prompt]:
    """Return prompts from every fourth window of `prompt_tokens` tokens of a text.

    ids: token ids of the text
    skip_start: start after the first four windows, as the text has other prompts already
    """
    step = 4 * prompt_tokens
    first_start = step if skip_start else 0
    starts = range(first_start, len(ids) - 2 * prompt_tokens, step)
    return [Prompt(ids[start : start + prompt_tokens], MID_TEXT_PROMPT_KIND) for start in starts]


def _has_enough_of_each_kind(prompts_by_kind: dict[str, list[Prompt]], count: int) -> bool:
    """Return whether every kind of plain text has its share of `count` prompts."""
    kinds = (TEXT_START_PROMPT_KIND, *CODE_PROMPT_END_PATTERNS)
    return all(len(prompts_by_kind.get(kind, ())) * len(kinds) >= count for kind in kinds)


def _name_chat_kind(prompt_length: int) -> str:
    """Return the kind of a chat prompt with this number of tokens."""
    for max_length in MAX_TOKENS_OF_CHAT_PROMPT_KINDS:
        if prompt_length <= max_length:
            return f"{CHAT_PROMPT_KIND_PREFIX} to {max_length:,}"
    return f"{CHAT_PROMPT_KIND_PREFIX} over {MAX_TOKENS_OF_CHAT_PROMPT_KINDS[-1]:,}"


def load_outside_prompts(
    tokenizer: "PreTrainedTokenizerBase", prompt_tokens: int, chats: bool
) -> list[Prompt]:
    """Return the prompts of OUTSIDE_PROMPTS_FILE.

    prompt_tokens: maximum length of a plain text prompt; a longer one is cut at its start
    chats: render them, uncut, as questions with the chat template
    """
    prompts = []
    with OUTSIDE_PROMPTS_FILE.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            text = record["prompt"]
            if chats:
                question = {"role": "user", "content": text}
                chat = {"tools": [], "template": {}}
                rendered = render_chat(tokenizer, [question], chat, add_generation_prompt=True)
                ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
            else:
                ids = tokenizer(text)["input_ids"]
                if len(ids) > prompt_tokens:
                    ids = ids[-prompt_tokens:]
                    text = cast("str", tokenizer.decode(ids, clean_up_tokenization_spaces=False))
                    # A cut inside a character, for example, cannot be sent as text.
                    if tokenizer(text)["input_ids"] != ids:
                        text = ""
            prompts.append(Prompt(ids, record["kind"], OUTSIDE_PROMPTS_GROUP_NAME, text, chats))
    return prompts


def describe_prompt_shortage(count: int, requested: int) -> str | None:
    """Return a warning that there are fewer prompts than requested; None if there are enough."""
    if count >= requested:
        return None
    available = "1 prompt" if count == 1 else f"{count} prompts"
    return f"the held-out text gives only {available} instead of evaluation.prompts={requested}"


def _select_chat_prompt(
    chat: dict, tokenizer: "PreTrainedTokenizerBase", max_tokens: int, chat_number: int
) -> list[int]:
    """Return a chat up to one of its answers as token ids, at most `max_tokens` of them.

    Messages are whole, and the prompt starts with the template's first token, so that the system
    prompt is included. Of the answers whose prompt is short enough, the last one is used for the
    first chat, the one before for the second, and so on (`chat_number`). If even the prompt of the
    first answer is too long, its last tokens are returned.

    Raises ValueError if the chat has no question, or the template does not show the chat.
    """
    messages = prepare_messages(tokenizer, chat)
    answers = [
        index for index, message in enumerate(messages) if message["role"] == "assistant" and index
    ]
    if not answers:
        raise ValueError("no question in the conversation")

    ids: list[int] = []
    fitting_prompts: list[list[int]] = []
    for answer in answers:
        text = render_chat(tokenizer, messages[:answer], chat, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) > max_tokens:
            break
        fitting_prompts.append(ids)
    if not fitting_prompts:
        return ids[-max_tokens:]
    return fitting_prompts[-1 - chat_number % len(fitting_prompts)]


def _find_prompt_ends(
    text: str, tokenizer: "PreTrainedTokenizerBase", text_tokens: int, prompt_tokens: int
) -> Iterator[tuple[str, int]]:
    """Yield (kind, token index) where prompts of `prompt_tokens` tokens end in a text.

    There is at most one of each kind; of several matches of a pattern the middle one is used.
    An end with fewer than `prompt_tokens` tokens before or after it is skipped.

    text_tokens: number of tokens of the text
    """
    if text_tokens >= 2 * prompt_tokens:
        yield TEXT_START_PROMPT_KIND, prompt_tokens
    for kind, pattern in CODE_PROMPT_END_PATTERNS.items():
        character_ends = [match.end() for match in pattern.finditer(text)]
        if not character_ends:
            continue
        middle_end = character_ends[len(character_ends) // 2]
        # Without the last token, which may extend beyond the line.
        end = len(tokenizer(text[:middle_end])["input_ids"]) - 1
        if prompt_tokens <= end <= text_tokens - prompt_tokens:
            yield kind, end

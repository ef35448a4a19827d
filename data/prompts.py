"""Select prompts for evaluation, as token ids.

Held-out prompts come from the held-out examples of the user's data. Outside prompts are fixed
prompts that were written for this package and are not in the data.
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

# The outside prompts. Each line is a JSON object {"kind", "prompt"}.
OUTSIDE_PROMPTS_FILE = Path(__file__).resolve().parent / "embedded" / "outside.jsonl"
OUTSIDE_PROMPTS_GROUP_NAME = "outside the data"

# Kinds of prompts from Python code. Key: kind of prompt. Value: a pattern; a prompt of this kind
# ends where a match of the pattern ends.
CODE_PROMPT_END_PATTERNS = {
    "in functions": re.compile(r"^[ \t]*def [^\n]*:\n(?:[ \t]+[^\n]*\n){3}", re.MULTILINE),
    "in docstrings": re.compile(r'^[ \t]*[rR]?"""[^\n"]{12,}\n', re.MULTILINE),
}
# The kinds of prompts from any plain text: its first tokens, and tokens after the first ones.
TEXT_START_PROMPT_KIND = "starts of texts"
MID_TEXT_PROMPT_KIND = "further on"

CHAT_PROMPT_KIND_PREFIX = "chats"
MAX_TOKENS_OF_CHAT_PROMPT_KINDS = (
    128,
    512,
    2048,
)  # maximum number of prompt tokens of each kind of chat

# At most this many held-out examples are read for each requested prompt.
MAX_EXAMPLES_READ_PER_PROMPT = 20


@dataclass(frozen=True)
class Prompt:
    """A prompt to evaluate with.

    ids: token ids
    kind: kind of prompt, such as "in functions"; results are reported for each kind
    report_group: None for a held-out prompt; otherwise the name of the group of prompts whose
        results are reported separately
    request_text: text that a server tokenises to `ids`; empty if no text does
    chat: whether a client must send `request_text` as a chat message instead of plain text
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
    """Return `count` prompts from the held-out examples, evenly spread over the kinds of prompts.

    If these prompts are too few, later windows of long texts are added, and then the first halves
    of short texts. A small data set may still have fewer than `count` prompts.

    prompt_tokens: number of tokens of a prompt; for a chat, the maximum number
    outside: number of outside prompts to add, at most `count`

    Raises ValueError if the held-out examples contain no prompt, or `count` is 0.
    """
    if not count:
        raise ValueError("evaluation.prompts=0: set it to at least 1")
    prompts_by_kind: dict[str, list[Prompt]] = {}
    windows_by_text: list[list[Prompt]] = []
    first_halves: list[Prompt] = []

    def add_prompt(ids: list[int], kind: str) -> None:
        prompts_by_kind.setdefault(kind, []).append(Prompt(ids, kind))

    examples = islice(read_held_out_examples(config), MAX_EXAMPLES_READ_PER_PROMPT * count)
    for number, example in enumerate(examples):
        if example["chat"]:
            # A chat without a question, or one that the template changes, is skipped. Training
            # skips it too, and reports it.
            with suppress(ValueError):
                ids = _select_chat_prompt(example["chat"], tokenizer, prompt_tokens, number)
                add_prompt(ids, _name_chat_kind(len(ids)))
        elif example["prompt"]:  # its last tokens
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
            f"data.source={config.source}: no evaluation prompt could be made from the held-out "
            "examples; use more or longer examples"
        )
    has_chats = any(kind.startswith(CHAT_PROMPT_KIND_PREFIX) for kind in prompts_by_kind)
    outside_prompts = load_outside_prompts(tokenizer, prompt_tokens, has_chats)
    return prompts + outside_prompts[: min(outside, count)]


def _select_text_prompts(
    text: str, ids: list[int], tokenizer: "PreTrainedTokenizerBase", prompt_tokens: int
) -> list[Prompt]:
    """Return the prompts of a plain text that end at the positions of `_find_prompt_ends`.

    ids: token ids of the text
    """
    prompts = []
    for kind, end in _find_prompt_ends(text, tokenizer, len(ids), prompt_tokens):
        prompts.append(Prompt(ids[end - prompt_tokens : end], kind))
    return prompts


def _select_later_windows(ids: list[int], prompt_tokens: int, skip_start: bool) -> list[Prompt]:
    """Return prompts from every fourth window of `prompt_tokens` tokens of a text.

    ids: token ids of the text
    skip_start: whether to skip the first four windows, because the text already has other prompts
    """
    step = 4 * prompt_tokens
    first_start = step if skip_start else 0
    starts = range(first_start, len(ids) - 2 * prompt_tokens, step)
    return [Prompt(ids[start : start + prompt_tokens], MID_TEXT_PROMPT_KIND) for start in starts]


def _has_enough_of_each_kind(prompts_by_kind: dict[str, list[Prompt]], count: int) -> bool:
    """Return whether there are enough prompts of each kind of plain text.

    Enough means `count` prompts, evenly spread over the kinds.
    """
    kinds = (TEXT_START_PROMPT_KIND, *CODE_PROMPT_END_PATTERNS)
    return all(len(prompts_by_kind.get(kind, ())) * len(kinds) >= count for kind in kinds)


def _name_chat_kind(prompt_length: int) -> str:
    """Return the kind of a chat prompt with `prompt_length` tokens."""
    for max_length in MAX_TOKENS_OF_CHAT_PROMPT_KINDS:
        if prompt_length <= max_length:
            return f"{CHAT_PROMPT_KIND_PREFIX} to {max_length:,}"
    return f"{CHAT_PROMPT_KIND_PREFIX} over {MAX_TOKENS_OF_CHAT_PROMPT_KINDS[-1]:,}"


def load_outside_prompts(
    tokenizer: "PreTrainedTokenizerBase", prompt_tokens: int, chats: bool
) -> list[Prompt]:
    """Return the outside prompts, those of OUTSIDE_PROMPTS_FILE.

    prompt_tokens: maximum number of tokens of a plain text prompt; the first tokens of a longer
        prompt are removed
    chats: whether to render each prompt as a chat question with the chat template; the question is
        not shortened
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
                    # If the first token starts inside a character, for example, no text has exactly
                    # these token ids.
                    if tokenizer(text)["input_ids"] != ids:
                        text = ""
            prompts.append(Prompt(ids, record["kind"], OUTSIDE_PROMPTS_GROUP_NAME, text, chats))
    return prompts


def describe_prompt_shortage(count: int, requested: int) -> str | None:
    """Return a warning if there are fewer prompts than requested, otherwise None.

    count: number of prompts
    requested: number of requested prompts
    """
    if count >= requested:
        return None
    available = "1 prompt" if count == 1 else f"{count} prompts"
    return f"the held-out text gives only {available}, fewer than evaluation.prompts={requested}"


def _select_chat_prompt(
    chat: dict, tokenizer: "PreTrainedTokenizerBase", max_tokens: int, chat_number: int
) -> list[int]:
    """Return the token ids of the messages before one of the answers of a chat.

    The prompt has at most `max_tokens` tokens. It begins with the first message, so the system
    prompt is included, and all messages are whole. If even the prompt of the first answer is too
    long, the last `max_tokens` tokens of that prompt are returned.

    chat_number: chooses among the answers whose prompt is short enough: 0 chooses the last answer,
        1 the answer before it, and so on

    Raises ValueError if the chat has no question, or the chat template cannot render the chat.
    """
    messages = prepare_messages(tokenizer, chat)
    answers = [
        index for index, message in enumerate(messages) if message["role"] == "assistant" and index
    ]
    if not answers:
        raise ValueError("the chat has no question")

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
    """Yield (kind, token index) for each position of a text at which a prompt should end.

    There is at most one position for each kind of prompt. If a pattern matches several times, the
    middle match is used. A position is skipped if fewer than `prompt_tokens` tokens precede it or
    follow it.

    text_tokens: number of tokens of the text
    prompt_tokens: number of tokens of a prompt
    """
    if text_tokens >= 2 * prompt_tokens:
        yield TEXT_START_PROMPT_KIND, prompt_tokens
    for kind, pattern in CODE_PROMPT_END_PATTERNS.items():
        character_ends = [match.end() for match in pattern.finditer(text)]
        if not character_ends:
            continue
        middle_end = character_ends[len(character_ends) // 2]
        # The last token is not counted, because in the whole text it may extend beyond the match.
        end = len(tokenizer(text[:middle_end])["input_ids"]) - 1
        if prompt_tokens <= end <= text_tokens - prompt_tokens:
            yield kind, end

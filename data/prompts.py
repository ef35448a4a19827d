"""Select prompts for evaluation, as token ids.

Held-out prompts are made from the examples of the user's data that training does not read. Outside
prompts are fixed prompts in a file of this package. They are not from the user's data.
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

# File with the outside prompts (not from the user's data), one JSON object {"kind", "prompt"} per
# line.
EXTERNAL_PROMPTS_FILE = Path(__file__).resolve().parent / "embedded" / "outside.jsonl"
EXTERNAL_PROMPTS_GROUP_NAME = "outside the data"

# Keys are kinds of prompts from Python code, values are patterns. A prompt ends where a match of
# its pattern ends.
CODE_PROMPT_END_PATTERNS = {
    "in functions": re.compile(r"^[ \t]*def [^\n]*:\n(?:[ \t]+[^\n]*\n){3}", re.MULTILINE),
    "in docstrings": re.compile(r'^[ \t]*[rR]?"""[^\n"]{12,}\n', re.MULTILINE),
}
# Kinds of prompts from plain text: the first tokens of a text, or tokens from within a text.
TEXT_START_PROMPT_KIND = "starts of texts"
MID_TEXT_PROMPT_KIND = "further on"

CHAT_PROMPT_KIND_PREFIX = "chats"
MAX_TOKENS_OF_CHAT_PROMPT_KINDS = (
    128,
    512,
    2048,
)  # chat prompts are reported in groups of up to 128, up to 512, up to 2048 and more tokens

# Maximum number of held-out examples that are read for each requested prompt.
MAX_EXAMPLES_READ_PER_PROMPT = 20


@dataclass(frozen=True)
class Prompt:
    """A prompt to evaluate with.

    ids: token ids
    kind: kind of prompt, such as "in functions" (a prompt that ends inside a Python function);
        results are reported for each kind
    report_group: name of a group of prompts whose results are reported separately; None for a
        held-out prompt, which is in no such group
    text_with_same_tokens: text that a server tokenises to `ids`; empty if no text does
    chat: whether a client must send `text_with_same_tokens` as a chat message instead of plain text
    """

    ids: list[int]
    kind: str
    report_group: str | None = None
    text_with_same_tokens: str = ""
    chat: bool = False


def select_evaluation_prompts(
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    count: int,
    prompt_tokens: int,
    external_count: int = 0,
) -> list[Prompt]:
    """Return `count` held-out prompts, and `external_count` prompts that are not from the data.

    About the same number of held-out prompts is of each kind, such as starts of texts. If there are
    fewer than `count`, prompts from the middle of long texts are added, and then the first halves
    of short texts. A small data set may still give fewer than `count`.

    prompt_tokens: number of tokens of a prompt; for a chat, the maximum number
    external_count: number of prompts from the file of this package, at most `count`

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
            # Skip chats without a prompt and chats that the template refuses, as training does.
            with suppress(ValueError):
                ids = _select_chat_prompt(example["chat"], tokenizer, prompt_tokens, number)
                add_prompt(ids, _name_chat_kind(len(ids)))
        elif example["prompt"]:  # use the last tokens of the recorded prompt
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
        if _has_equal_share_of_each_kind(prompts_by_kind, count):
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
    outside_prompts = load_external_prompts(tokenizer, prompt_tokens, has_chats)
    return prompts + outside_prompts[: min(external_count, count)]


def _select_text_prompts(
    text: str, ids: list[int], tokenizer: "PreTrainedTokenizerBase", prompt_tokens: int
) -> list[Prompt]:
    """Return the prompts from a plain text, at most one of each kind.

    Kinds are, for example, the start of the text and tokens that end inside a docstring.

    ids: token ids of the text
    prompt_tokens: number of tokens of a prompt
    """
    prompts = []
    for kind, end in _find_prompt_kinds_and_ends(text, tokenizer, len(ids), prompt_tokens):
        prompts.append(Prompt(ids[end - prompt_tokens : end], kind))
    return prompts


def _select_later_windows(ids: list[int], prompt_tokens: int, skip_start: bool) -> list[Prompt]:
    """Return a prompt of `prompt_tokens` tokens from every 4 * `prompt_tokens` tokens of a text.

    ids: token ids of the text
    skip_start: whether to skip the first 4 * `prompt_tokens` tokens, because other prompts of the
        text may be there
    """
    step = 4 * prompt_tokens
    first_start = step if skip_start else 0
    starts = range(first_start, len(ids) - 2 * prompt_tokens, step)
    return [Prompt(ids[start : start + prompt_tokens], MID_TEXT_PROMPT_KIND) for start in starts]


def _has_equal_share_of_each_kind(prompts_by_kind: dict[str, list[Prompt]], count: int) -> bool:
    """Return whether each of the n kinds of plain-text prompts has at least `count` / n prompts."""
    kinds = (TEXT_START_PROMPT_KIND, *CODE_PROMPT_END_PATTERNS)
    return all(len(prompts_by_kind.get(kind, ())) * len(kinds) >= count for kind in kinds)


def _name_chat_kind(prompt_length: int) -> str:
    """Return the kind of a chat prompt with `prompt_length` tokens, such as "chats to 512"."""
    for max_length in MAX_TOKENS_OF_CHAT_PROMPT_KINDS:
        if prompt_length <= max_length:
            return f"{CHAT_PROMPT_KIND_PREFIX} to {max_length:,}"
    return f"{CHAT_PROMPT_KIND_PREFIX} over {MAX_TOKENS_OF_CHAT_PROMPT_KINDS[-1]:,}"


def load_external_prompts(
    tokenizer: "PreTrainedTokenizerBase", prompt_tokens: int, as_chats: bool
) -> list[Prompt]:
    """Return the prompts of EXTERNAL_PROMPTS_FILE, which are not from the user's data.

    prompt_tokens: if `as_chats` is False, longer prompts are cut to their last `prompt_tokens`
        tokens
    as_chats: whether to render each prompt as a user message with the chat template
    """
    prompts = []
    with EXTERNAL_PROMPTS_FILE.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            text = record["prompt"]
            if as_chats:
                question = {"role": "user", "content": text}
                chat = {"tools": [], "template": {}}
                rendered = render_chat(tokenizer, [question], chat, add_generation_prompt=True)
                ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
            else:
                ids = tokenizer(text)["input_ids"]
                if len(ids) > prompt_tokens:
                    ids = ids[-prompt_tokens:]
                    text = cast("str", tokenizer.decode(ids, clean_up_tokenization_spaces=False))
                    # The decoded text may have other token ids, for example if the prompt starts
                    # inside a character. A server that gets this text would then decode another
                    # prompt.
                    if tokenizer(text)["input_ids"] != ids:
                        text = ""
            prompts.append(Prompt(ids, record["kind"], EXTERNAL_PROMPTS_GROUP_NAME, text, as_chats))
    return prompts


def describe_prompt_shortage(count: int, requested: int) -> str | None:
    """Return a warning if fewer prompts were found than requested, otherwise None.

    count: number of prompts that were found
    requested: number of prompts that were requested
    """
    if count >= requested:
        return None
    available = "1 prompt" if count == 1 else f"{count} prompts"
    return f"the held-out text gives only {available}, fewer than evaluation.prompts={requested}"


def _select_chat_prompt(
    chat: dict, tokenizer: "PreTrainedTokenizerBase", max_tokens: int, answers_to_skip: int
) -> list[int]:
    """Return the token ids of a prompt: all messages of a chat before one of its answers.

    The prompt has at most `max_tokens` tokens. If even the messages before the first answer have
    more tokens, the last `max_tokens` of these tokens are returned.

    answers_to_skip: chooses among the answers with at most `max_tokens` tokens before them: 0
        chooses the last of these answers, 1 the second last, and so on

    Raises ValueError if no answer of the chat follows another message, or if the chat template
    cannot render the chat.
    """
    messages = prepare_messages(tokenizer, chat)
    answers = [
        index for index, message in enumerate(messages) if message["role"] == "assistant" and index
    ]
    if not answers:
        raise ValueError("the chat has no answer that follows another message")

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
    return fitting_prompts[-1 - answers_to_skip % len(fitting_prompts)]


def _find_prompt_kinds_and_ends(
    text: str, tokenizer: "PreTrainedTokenizerBase", text_tokens: int, prompt_tokens: int
) -> Iterator[tuple[str, int]]:
    """Yield (kind of prompt, token index at which the prompt ends) for prompts from a plain text.

    There is at most one prompt of each kind. If the pattern of a kind matches several times, the
    prompt ends at the middle match. A prompt is left out if fewer than `prompt_tokens` tokens
    come before its end or after it.

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
        # The last token is left out, because in the whole text it may include later characters.
        end = len(tokenizer(text[:middle_end])["input_ids"]) - 1
        if prompt_tokens <= end <= text_tokens - prompt_tokens:
            yield kind, end

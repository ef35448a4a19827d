"""Prompts for evaluation, as token ids: held-out ones of several kinds, and texts of our own from
outside the data."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from data.rows import DataConfig, held_out_rows, in_turn
from data.template import apply, readable

OUTSIDE = (
    Path(__file__).resolve().parent / "embedded" / "outside.jsonl"
)  # {"kind", "prompt"}, written for this
ELSEWHERE = "outside the data"

# Where a prompt may end within a text, besides behind its first tokens: Python's functions and
# docstrings.
PLACES = {
    "in functions": re.compile(r"^[ \t]*def [^\n]*:\n(?:[ \t]+[^\n]*\n){3}", re.MULTILINE),
    "in docstrings": re.compile(r'^[ \t]*[rR]?"""[^\n"]{12,}\n', re.MULTILINE),
}
LENGTHS = (128, 512, 2048)  # tokens: chats are told apart by the length of their prompts
STARTS = "starts of texts"
FURTHER = "further on"
CHATS = "chats"


@dataclass(frozen=True)
class Prompt:
    """A prompt to evaluate with."""

    ids: list[int]
    kind: str
    beside: str | None = None  # what those are called that are reported beside the held-out ones
    said: str = ""  # what a client sends for these ids, of prompts from outside the data
    chat: bool = False  # it is sent as a chat's question


def evaluation_prompts(
    config: DataConfig, tokenizer, count: int, tokens: int, outside: int = 0
) -> list[Prompt]:
    """Return `count` prompts that training never saw, as many of one kind as of another where there
    are so many, and `outside` texts from outside the data (no more than `count`, or than OUTSIDE
    has), asked as questions where the data are chats.

    A chat gives whole turns, `_asked`, and is of a kind by its length; a row with a prompt of its
    own its last `tokens` tokens; plain text its first ones, and as many before one of its PLACES.
    Where that is not enough, windows from further on are taken round-robin from every text that is
    long enough, so that few texts still give many prompts; then first halves of short texts. Small
    data may give fewer than `count`; raises ValueError where there are none, or none are asked for.
    """
    if not count:
        raise ValueError("evaluation.prompts=0: how many are to be decoded?")
    found: dict[str, list[Prompt]] = {}
    windows: list[list[Prompt]] = []
    halves: list[Prompt] = []

    def take(ids: list[int], kind: str) -> None:
        found.setdefault(kind, []).append(Prompt(ids, kind))

    for number, row in enumerate(islice(held_out_rows(config), 20 * count)):
        if row["chat"]:
            with suppress(ValueError):  # training leaves such a row out, and says so
                asked = _asked(row["chat"], tokenizer, tokens, number)
                most = next((most for most in LENGTHS if len(asked) <= most), None)
                take(asked, f"{CHATS} to {most:,}" if most else f"{CHATS} over {LENGTHS[-1]:,}")
        elif row["prompt"]:
            take(tokenizer(row["prompt"])["input_ids"][-tokens:], "prompts")
        else:
            ids = tokenizer(row["text"])["input_ids"]
            ends = list(_ends(row["text"], tokenizer, len(ids), tokens))
            for kind, end in ends:
                take(ids[end - tokens : end], kind)
            starts = range(4 * tokens if ends else 0, len(ids) - 2 * tokens, 4 * tokens)
            windows.append([Prompt(ids[start : start + tokens], FURTHER) for start in starts])
            if len(ids) > 1 and not (ends or starts):
                halves.append(Prompt(ids[: min(tokens, len(ids) // 2)], FURTHER))
        if all(len(found.get(kind, ())) * (1 + len(PLACES)) >= count for kind in (STARTS, *PLACES)):
            break
    prompts = [*in_turn(found.values()), *in_turn(windows), *halves][:count]
    if not prompts:
        raise ValueError(
            f"data.source={config.source}: the held-out rows give no prompt to evaluate with"
        )
    chats = any(kind.startswith(CHATS) for kind in found)
    return prompts + outside_prompts(tokenizer, tokens, chats)[: min(outside, count)]


def outside_prompts(tokenizer, tokens: int, chats: bool) -> list[Prompt]:
    """Return the prompts of OUTSIDE: their last `tokens` tokens as plain text, or, if `chats`, as
    questions whole."""
    prompts = []
    with OUTSIDE.open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            said = row["prompt"]
            if chats:
                asked = [{"role": "user", "content": said}]
                text = apply(tokenizer, asked, {"tools": [], "template": {}}, ask=True)
                ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            else:
                ids = tokenizer(said)["input_ids"]
                if len(ids) > tokens:
                    ids = ids[-tokens:]
                    said = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
                    said = (
                        said if tokenizer(said)["input_ids"] == ids else ""
                    )  # cut within a character
            prompts.append(Prompt(ids, row["kind"], ELSEWHERE, said, chats))
    return prompts


def few_prompts(found: int, wanted: int) -> str | None:
    """Return the sentence about data too small for the prompts that are wanted, None where it is
    not."""
    if found >= wanted:
        return None
    have = f"{found} prompt{'s' * (found != 1)}"
    return (
        f"evaluations have {have}, not evaluation.prompts={wanted}: the held-out text gives no more"
    )


def _asked(chat: dict, tokenizer, tokens: int, number: int) -> list[int]:
    """Return a chat up to an answer that `tokens` tokens have room for: whole turns, from the
    template's first token on, so that the system prompt is there. Of the answers that have room,
    one after the other by the chat's `number`. Where not even the first question has room, its last
    tokens. Raises ValueError where there is no question, or the template does not show the chat."""
    messages = readable(tokenizer, chat)
    ends = [i for i, turn in enumerate(messages) if turn["role"] == "assistant" and i]
    if not ends:
        raise ValueError("no question in the conversation")
    fitting: list[list[int]] = []
    for end in ends:
        ids = tokenizer(apply(tokenizer, messages[:end], chat, ask=True), add_special_tokens=False)[
            "input_ids"
        ]
        if len(ids) > tokens:
            break
        fitting.append(ids)
    return fitting[-1 - number % len(fitting)] if fitting else ids[-tokens:]


def _ends(text: str, tokenizer, length: int, tokens: int) -> Iterator[tuple[str, int]]:
    """Yield the kinds of places that a text of `length` tokens has, and where, in tokens, a prompt
    ends
    there: one of each kind, of several the one in the middle; places with fewer than `tokens`
        tokens on
    either side do not count."""
    if length >= 2 * tokens:
        yield STARTS, tokens
    for kind, pattern in PLACES.items():
        places = [match.end() for match in pattern.finditer(text)]
        for place in places[len(places) // 2 :][:1]:
            end = (
                len(tokenizer(text[:place])["input_ids"]) - 1
            )  # the last token may reach beyond the line
            if tokens <= end <= length - tokens:
                yield kind, end

"""Prompts for evaluation, as token ids: held-out ones of several kinds, and texts of our own from outside the data."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from data.rows import DataConfig, held_out_rows

OUTSIDE = Path(__file__).resolve().parent / "embedded" / "outside.jsonl"  # {"kind", "prompt"}, written for this
ELSEWHERE = "outside the data"

# Where a prompt may end within a text, besides behind its first tokens: Python's functions and docstrings.
PLACES = {
    "in functions": re.compile(r"^[ \t]*def [^\n]*:\n(?:[ \t]+[^\n]*\n){3}", re.MULTILINE),
    "in docstrings": re.compile(r'^[ \t]*[rR]?"""[^\n"]{12,}\n', re.MULTILINE),
}
STARTS, FURTHER = "starts of texts", "further on"


@dataclass(frozen=True)
class Prompt:
    """A prompt to evaluate with."""

    ids: list[int]
    kind: str
    beside: str | None = None  # what those are called that are reported beside the held-out ones


def evaluation_prompts(config: DataConfig, tokenizer, count: int, tokens: int, outside: int = 0) -> list[Prompt]:
    """Return `count` prompts that training never saw, as many of one kind as of another where there are so many, and
    `outside` texts from outside the data (no more than `count`, or than OUTSIDE has).

    A chat gives all before its last answer, a row with a prompt of its own that prompt (the last `tokens` tokens);
    plain text its first `tokens` tokens, and as many before one of its PLACES. Where that is not enough, windows from
    further on are taken round-robin from every text that is long enough, so that few texts still give many prompts.
    Raises ValueError if there are too few.
    """
    found: dict[str, list[list[int]]] = {}
    windows: list[tuple[int, list[int]]] = []
    for row in islice(held_out_rows(config), 20 * count):
        if row["messages"]:
            asked = row["messages"][:-1]  # the last one is an answer
            ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
            found.setdefault("chats", []).append(ids[-tokens:])
        elif row["prompt"]:
            found.setdefault("prompts", []).append(tokenizer(row["prompt"])["input_ids"][-tokens:])
        else:
            ids = tokenizer(row["text"])["input_ids"]
            ends = list(_ends(row["text"], tokenizer, len(ids), tokens))
            for kind, end in ends:
                found.setdefault(kind, []).append(ids[end - tokens : end])
            starts = range(4 * tokens if ends else 0, len(ids) - 2 * tokens, 4 * tokens)
            windows += [(turn, ids[start : start + tokens]) for turn, start in enumerate(starts)]
        if all(len(found.get(kind, ())) * (1 + len(PLACES)) >= count for kind in (STARTS, *PLACES)):
            break
    spare = [ids for _, ids in sorted(windows, key=lambda window: window[0])]
    ready = [*_in_turn({kind: iter(prompts) for kind, prompts in found.items()})]
    prompts = [*ready[:count], *(Prompt(ids, FURTHER) for ids in spare[: max(0, count - len(ready))])]
    if len(prompts) < count:
        raise ValueError(f"evaluation.prompts={count}: the held-out text gives only {len(prompts)} prompts")
    with OUTSIDE.open(encoding="utf-8") as lines:
        others = [json.loads(line) for line in islice(lines, min(outside, count))]
    return prompts + [Prompt(tokenizer(row["prompt"])["input_ids"][-tokens:], row["kind"], ELSEWHERE) for row in others]


def held_out_prompts(config: DataConfig, tokenizer, count: int, tokens: int) -> list[list[int]]:
    """Return the ids of `evaluation_prompts` without those from outside."""
    return [prompt.ids for prompt in evaluation_prompts(config, tokenizer, count, tokens)]


def _ends(text: str, tokenizer, length: int, tokens: int) -> Iterator[tuple[str, int]]:
    """Yield the kinds of places that a text of `length` tokens has, and where, in tokens, a prompt ends there: one of
    each kind, of several the one in the middle; places with fewer than `tokens` tokens on either side do not count."""
    if length >= 2 * tokens:
        yield STARTS, tokens
    for kind, pattern in PLACES.items():
        places = [match.end() for match in pattern.finditer(text)]
        for place in places[len(places) // 2 :][:1]:
            end = len(tokenizer(text[:place])["input_ids"]) - 1  # the last token may reach beyond the line
            if tokens <= end <= length - tokens:
                yield kind, end


def _in_turn(kinds: dict[str, Iterator[list[int]]]) -> Iterator[Prompt]:
    """Yield prompts of the kinds in turn, until there are no more of any."""
    while kinds:
        for kind in list(kinds):
            ids = next(kinds[kind], None)
            if ids is None:
                del kinds[kind]
            else:
                yield Prompt(ids, kind)

"""What people call: text or token ids in, text, ids and statistics out."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infer.config import DecodeOptions
from infer.decode import DecodeStats, decode
from infer.dflash import DFlash
from infer.target import Target


@dataclass(frozen=True)
class Generation:
    """One answer. `text` ends before a stop string and has no special tokens; `ids` hold an end token if one came."""

    text: str | None  # None when the target has no tokenizer
    ids: list[int]
    prompt_ids: list[int]
    finish_reason: str  # "stop" or "length"
    commits: list[int]  # how many of `ids` each round committed, the prefill's one first
    stats: DecodeStats


def generate(
    target: Target,
    drafter: DFlash | None,
    prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
    method: str = "ddtree",
    budget: int = 64,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    stop: Sequence[str] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> Generation | list[Generation]:
    """Continues one prompt (a string or token ids) or many (a list of them; decoded together).

    The output is the target's own: greedy, the same tokens as plain decoding; sampled, the same text for the same seed,
    whatever the method, budget and drafter. Raises ValueError for options or prompts that make no sense.
    """
    options = DecodeOptions(method, budget, max_new_tokens, temperature, seed, list(stop))
    options.check()
    one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    ids = [_encode(target, prompt) for prompt in ([prompts] if one else prompts)]
    if options.stop and target.tokenizer is None:
        raise ValueError("stop strings need a tokenizer: load the target with load_target")
    limit = getattr(target.config, "max_position_embeddings", None)
    longest = max(map(len, ids)) + max_new_tokens
    if limit is not None and longest > limit:
        raise ValueError(f"prompt and answer may take {longest} positions, the target has {limit}: shorten either")
    done = decode(target, drafter, ids, options, clock)
    answers = [
        Generation(_text(target, row.ids, options), row.ids, prompt, row.finish, row.commits, row.stats)
        for prompt, row in zip(ids, done, strict=True)
    ]
    return answers[0] if one else answers


def _encode(target: Target, prompt: str | Sequence[int]) -> list[int]:
    if not isinstance(prompt, str):
        return list(prompt)
    if target.tokenizer is None:
        raise ValueError("this target has no tokenizer: give token ids")
    return target.tokenizer(prompt)["input_ids"]


def _text(target: Target, ids: list[int], options: DecodeOptions) -> str | None:
    if target.tokenizer is None:
        return None
    text = target.tokenizer.decode(ids, skip_special_tokens=True)
    ends = [at for stop in options.stop if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text

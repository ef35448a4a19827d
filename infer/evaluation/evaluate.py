"""Measured acceptance: held-out prompts decoded with plain, chain and DDTree, by the code that users call.

Acceptance is never estimated from token accuracy: every number here comes from decoding.
"""

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest

import torch

from infer.config import EvaluationConfig, TextOptions
from infer.drafters.base import Drafter
from infer.engine.engine import Engine
from infer.engine.sequence import STAGES, Text
from infer.evaluation.lossless import explain
from infer.targets.target import Target, pad_ids

TOGETHER = 8  # texts whose guesses are counted side by side


def evaluate(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    config: EvaluationConfig,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict:
    """Decodes every prompt with every method and returns what `infer.evaluation.report` draws. Where a method wrote something else
    than plain decoding, `ties` and `defects` say on how many prompts and why, see `infer.evaluation.lossless`."""
    results = decode_all(target, drafter, prompts, config, progress)
    result = summary(target, drafter, prompts, results, config)
    plain = results["plain", 0].texts
    for line, measured in zip(result["methods"], results.values(), strict=True):
        pairs = zip(measured.texts, plain, strict=True)
        found = [explain(target, text.prompt, text.ids, own.ids, text.options) for text, own in pairs]
        causes = [difference.cause for difference in found if difference is not None]
        if causes:
            line |= {"ties": causes.count("tie"), "defects": causes.count("defect")}
    return result


def decode_all(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    config: EvaluationConfig,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> "dict[tuple[str, int], Measured]":
    """Every prompt with every method, and how often the drafter guesses right along what plain decoding wrote."""
    results = decode_prompts(target, drafter, prompts, config, progress)
    length = max(map(len, prompts), default=0) + config.max_new_tokens
    plain = results["plain", 0]
    for first in range(0, len(prompts), TOGETHER):
        plain.add_hits(hits(target, drafter, plain.texts[first : first + TOGETHER], length))
    return results


def decode_prompts(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    config: EvaluationConfig,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> "dict[tuple[str, int], Measured]":
    """Every prompt with every method, `config.rows` at a time. The methods take turns on the same prompts, so that a
    noisy machine is equally noisy for all."""
    methods = config.methods(drafter.block_size)
    clock = synchronised_clock(target.device)
    results = {method: Measured() for method in methods}
    length = max(map(len, prompts), default=0) + config.max_new_tokens

    def run(chunk: list[list[int]], method: tuple[str, int], tokens: int, into: Measured) -> None:
        began = clock()
        engine = Engine(target, drafter, config.engine(*method), length, clock)
        options = TextOptions(max_new_tokens=tokens, temperature=config.temperature, seed=config.seed)
        texts = [engine.submit(prompt, options) for prompt in chunk]
        while engine.busy:
            engine.step()
        into.seconds += clock() - began
        into.texts += texts
        for stage, seconds in engine.seconds.items():
            into.stages[stage] += seconds

    for method in methods:  # warm-up: first calls pay for allocations and kernels
        run(prompts[: config.rows], method, min(16, config.max_new_tokens), Measured())
    for first in range(0, len(prompts), config.rows):
        for method in methods:
            run(prompts[first : first + config.rows], method, config.max_new_tokens, results[method])
        progress(min(first + config.rows, len(prompts)), len(prompts))
    return results


@torch.inference_mode()
def hits(target: Target, drafter: Drafter, texts: list[Text], length: int) -> torch.Tensor:
    """How often the drafter's likeliest token is the one that came, by drafted position: (L, 2), right guesses and all,
    a block drafted at every token of finished texts of at most `length` tokens, side by side. What DART's tables 3 and
    4 call accuracy."""
    rows, drafted = len(texts), drafter.block_size - 1
    cache, state = target.cache(rows, length), drafter.state(rows, length)
    prompts, answers = [text.prompt for text in texts], [text.ids for text in texts]
    with cache.add(rows) as part, state.add(rows) as begun:
        features = target.extend(prompts, part, drafter.layer_ids)
        ids = pad_ids(prompts, target.device)
        drafter.update_context(target, features.context, ids, [len(prompt) for prompt in prompts], begun)
    features = target.extend(answers, cache, drafter.layer_ids).context
    ids = pad_ids(answers, target.device)  # (B, A)
    ends = torch.tensor([len(answer) for answer in answers], device=ids.device)
    counts = torch.zeros(drafted, 2, dtype=torch.long, device=ids.device)
    for step in range(ids.shape[1] - 1):
        guesses = drafter.draft(target, ids[:, step], state).argmax(-1)  # (B, L)
        ahead = step + torch.arange(1, drafted + 1, device=ids.device)  # (L,)
        there = ahead < ends[:, None]  # (B, L)
        right = there & (guesses == ids[:, ahead.clamp(max=ids.shape[1] - 1)])
        counts += torch.stack([right.sum(0), there.sum(0)], 1)
        going = [int(step < len(answer)) for answer in answers]
        drafter.update_context(target, features[:, step : step + 1], ids[:, step : step + 1], going, state)
    return counts


def summary(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    results: "dict[tuple[str, int], Measured]",
    config: EvaluationConfig,
) -> dict:
    """The figures of an evaluation. `speedup` is the ratio of total times; `identical` says whether a method's tokens
    equal plain decoding's on every prompt."""
    plain = results["plain", 0]
    rows = [summarise(method, measured, plain) for method, measured in results.items()]
    best = max((method for method in results if method[0] == "ddtree"), key=lambda m: tau(results[m].texts))
    return {
        "target": target.name,
        "device": describe_device(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "prompts": len(prompts),
        "rows": config.rows,
        "prompt_tokens": config.prompt_tokens,
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "block_size": drafter.block_size,
        "accuracy": [right / max(1, count) for right, count in plain.guesses],
        "methods": rows,
        "samples": [
            sample(target, prompt, done)
            for prompt, done in list(zip(prompts, results[best].texts, strict=True))[: config.samples]
        ],
    }


@dataclass
class Measured:
    """What one method wrote, and how long it took."""

    texts: list[Text] = field(default_factory=list)
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    guesses: list[list[int]] = field(default_factory=list)  # of plain decoding, see `hits`

    def add_hits(self, counts: torch.Tensor) -> None:
        """Counts (L, 2) more guesses."""
        self.guesses = (counts.cpu() + torch.tensor(self.guesses or 0)).tolist()

    @staticmethod
    def joined(shares: "list[Measured]") -> "Measured":
        """What several processes measured, each on its share of the prompts: share i holds prompts i, i + n, ..."""
        texts = [text for some in zip_longest(*(share.texts for share in shares)) for text in some if text is not None]
        stages = {stage: sum(share.stages[stage] for share in shares) for stage in STAGES}
        whole = Measured(texts, sum(share.seconds for share in shares), stages)
        for share in shares:
            if share.guesses:
                whole.add_hits(torch.tensor(share.guesses))
        return whole


def tau(texts: list[Text]) -> float:
    """Acceptance length pooled over rounds."""
    rounds = sum(text.stats.rounds for text in texts)
    return sum(text.stats.tokens - 1 for text in texts) / rounds if rounds else 1.0


def summarise(method: tuple[str, int], measured: Measured, plain: Measured) -> dict:
    """One line of the table."""
    texts, seconds = measured.texts, measured.seconds
    tokens = sum(text.stats.tokens for text in texts)
    return {
        "name": method[0],
        "budget": method[1],
        "tau": tau(texts),
        "tau_prompt_mean": sum(text.stats.tau for text in texts) / len(texts),
        "rounds": sum(text.stats.rounds for text in texts),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "speedup": plain.seconds / seconds,
        "histogram": [sum(counts) for counts in zip(*(text.stats.histogram for text in texts), strict=True)],
        "stage_seconds": measured.stages | {"other": seconds - sum(measured.stages.values())},
        "identical": [text.ids for text in texts] == [text.ids for text in plain.texts],
    }


def sample(target: Target, prompt: list[int], done: Text) -> dict:
    """A decoded text in pieces: the prefill's first token, then each round's accepted drafts and its bonus token."""
    text = target.tokenizer.decode
    pieces, at = [], 0
    for round, count in enumerate(done.commits):
        ids = done.ids[at : at + count]
        if ids[:-1]:
            pieces.append([text(ids[:-1]), "accepted"])
        pieces.append([text(ids[-1:]), "bonus"])
        at += count
        assert round or count == 1
    return {"prompt": text(prompt), "completion": text(done.ids), "accepted": done.commits, "pieces": pieces}


def synchronised_clock(device: torch.device) -> Callable[[], float]:
    """A clock whose readings mean that the device's work is done."""
    if device.type != "cuda":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


def describe_device(device: torch.device) -> str:
    """Hardware in words, for the report."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    except OSError:
        pass
    return f"CPU, {torch.get_num_threads()} threads, {model}"


def same_output(evaluation: dict) -> bool:
    """Whether every method wrote what plain decoding wrote."""
    return all(method["identical"] for method in evaluation["methods"])


def best_tau(evaluation: dict) -> float:
    """The highest acceptance length of any tree: what marks the best checkpoint."""
    return max(method["tau"] for method in evaluation["methods"])

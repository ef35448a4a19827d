"""Measured acceptance: held-out prompts decoded with plain, chain and DDTree, by the code that users call.

Acceptance is never estimated from token accuracy: every number here comes from decoding.
"""

import platform
import time
from collections.abc import Callable

import torch

from infer.config import DecodeOptions, EvaluationConfig
from infer.decode import Decoded, decode
from infer.dflash import DFlash
from infer.target import Target


def evaluate(
    target: Target,
    drafter: DFlash,
    prompts: list[list[int]],
    config: EvaluationConfig,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict:
    """Decodes every prompt with every method, one at a time, and returns what `infer.report` draws.

    The methods take turns on each prompt, so that a noisy machine is equally noisy for all; `speedup` is the ratio of
    total times. `identical` says whether a method's tokens equal plain decoding's on every prompt.
    """
    methods = config.methods(drafter.block_size)
    clock = synchronised_clock(target.device)
    results: dict[tuple[str, int], list[Decoded]] = {method: [] for method in methods}

    def run(prompt: list[int], method: tuple[str, int], tokens: int) -> Decoded:
        options = DecodeOptions(
            method=method[0],
            budget=max(1, method[1]),
            max_new_tokens=tokens,
            temperature=config.temperature,
            seed=config.seed,
        )
        return decode(target, drafter, [prompt], options, clock)[0]

    for method in methods:  # warm-up: first calls pay for allocations and kernels
        run(prompts[0], method, min(16, config.max_new_tokens))
    for i, prompt in enumerate(prompts):
        for method in methods:
            results[method].append(run(prompt, method, config.max_new_tokens))
        progress(i + 1, len(prompts))

    plain = results["plain", 0]
    rows = [summarise(method, results[method], plain) for method in methods]
    best = max((method for method in methods if method[0] == "ddtree"), key=lambda m: tau(results[m]))
    return {
        "target": target.name,
        "device": describe_device(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "prompts": len(prompts),
        "prompt_tokens": config.prompt_tokens,
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "block_size": drafter.block_size,
        "methods": rows,
        "samples": [
            sample(target, prompt, done)
            for prompt, done in list(zip(prompts, results[best], strict=True))[: config.samples]
        ],
    }


def tau(rows: list[Decoded]) -> float:
    """Acceptance length pooled over rounds."""
    rounds = sum(row.stats.rounds for row in rows)
    return sum(row.stats.tokens - 1 for row in rows) / rounds if rounds else 1.0


def summarise(method: tuple[str, int], rows: list[Decoded], plain: list[Decoded]) -> dict:
    """One line of the table."""
    seconds = sum(row.stats.seconds for row in rows)
    tokens = sum(row.stats.tokens for row in rows)
    stages = {name: sum(row.stats.stage_seconds[name] for row in rows) for name in rows[0].stats.stage_seconds}
    return {
        "name": method[0],
        "budget": method[1],
        "tau": tau(rows),
        "tau_prompt_mean": sum(row.stats.tau for row in rows) / len(rows),
        "rounds": sum(row.stats.rounds for row in rows),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "speedup": sum(row.stats.seconds for row in plain) / seconds,
        "histogram": [sum(counts) for counts in zip(*(row.stats.histogram for row in rows), strict=True)],
        "stage_seconds": stages | {"other": seconds - sum(stages.values())},
        "identical": [row.ids for row in rows] == [row.ids for row in plain],
    }


def sample(target: Target, prompt: list[int], done: Decoded) -> dict:
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

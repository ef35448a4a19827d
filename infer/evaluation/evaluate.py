"""Measured acceptance: held-out prompts decoded with every method, by the code that users call.

Acceptance is never estimated from token accuracy: every number here comes from decoding.
"""

import math
import platform
import statistics
import time
from collections import abc
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType

import torch

from infer.api import AnyTarget
from infer.config import EvaluationConfig
from infer.drafters.base import Drafter
from infer.evaluation.acceptance import AnyPrompt, reference_of
from infer.evaluation.lossless import find_difference
from infer.evaluation.measuring import (
    Measured,
    Progress,
    PromptSet,
    cut_at,
    decided,
    measure,
    middle,
    variants,
)
from infer.evaluation.replay import replay_trees, study_of
from infer.evaluation.results import GENERATE, Evaluation, MethodResult, Reference, tree_of
from infer.evaluation.ruler import acceptance_length, counted, figures, rate
from infer.evaluation.showing import show_texts
from infer.targets.target import Target, number_format

BRIEF = 4  # a brief evaluation decodes every fourth prompt


def evaluate(
    target: Target,
    drafter: Drafter,
    prompts: abc.Sequence[AnyPrompt],
    config: EvaluationConfig,
    progress: Progress = lambda done, total: None,
) -> Evaluation:
    """Decode every prompt with every method. Where a method of ours wrote something else than plain
    decoding, `ties` and `defects` say on how many prompts and why, see
    `infer.evaluation.lossless`."""
    parts = parts_of(prompts, config)
    measured = decode_all(target, drafter, parts, progress)
    result = summarise(target, drafter, parts, measured)
    measured = [of_part for of_part in measured if of_part[0].texts]  # the others had no time
    return replace(
        explain_differences(target, result, measured[0]),
        beside=[
            explain_differences(target, *pair)
            for pair in zip(result.beside, measured[1:], strict=True)
        ],
    )


def explain_differences(target: Target, result: Evaluation, measured: list[Measured]) -> Evaluation:
    """Return the evaluation with `ties` and `defects` of the methods that wrote something else than
    plain decoding."""
    methods = []
    for method, one in zip(result.methods, measured, strict=True):
        pairs = (
            [] if method.name == GENERATE.name else zip(one.texts, measured[0].texts, strict=True)
        )
        causes = [
            find_difference(target, plain.prompt, text.ids, plain.ids, plain.options)
            for text, plain in pairs
        ]
        if any(causes):
            method = replace(method, ties=causes.count("tie"), defects=causes.count("defect"))
        methods.append(method)
    return replace(result, methods=methods)


def parts_of(prompts: abc.Sequence[AnyPrompt], config: EvaluationConfig) -> list[PromptSet]:
    """Return what an evaluation decodes: its prompts; with one budget, those beside them, and every
    second of its own sampled, if the others are greedy."""
    groups: dict[str | None, list[int]] = {}
    for number, prompt in enumerate(prompts):
        groups.setdefault(prompt.beside, []).append(number)
    single = replace(config, budgets=[middle(config.budgets)])
    parts = [
        PromptSet(what, [prompts[i] for i in numbers], numbers, single if what else config)
        for what, numbers in groups.items()
    ]
    if config.temperature == 0 and config.sampling_temperature is not None:
        own = parts[0]
        sampled = replace(single, temperature=config.sampling_temperature)
        parts.append(
            PromptSet(
                f"temperature {config.sampling_temperature:g}",
                own.prompts[::2],
                own.numbers[::2],
                sampled,
            )
        )
    return parts


def brief(part: PromptSet) -> PromptSet:
    """Return the part with fewer prompts: what a checkpoint in the middle of training is worth."""
    config = replace(
        part.config, max_minutes=part.config.max_minutes and part.config.max_minutes / BRIEF
    )
    return replace(
        part, prompts=part.prompts[::BRIEF], numbers=part.numbers[::BRIEF], config=config
    )


def decode_all(
    target: Target,
    drafter: Drafter,
    parts: abc.Sequence[PromptSet],
    progress: Progress = lambda done, total: None,
) -> list[list[Measured]]:
    """Decode the prompts of every part with every method, plain decoding first; of the first part,
    also keep what a report shows of the texts, and replay greedy ones by trees. Where transformers'
    plain decoding is slower than ours there, it is left out of the other parts. The parts share
    `evaluation.max_minutes` by their answers; parts behind the first are left out, and have no texts,
    where no time is left."""
    total = sum(len(part.prompts) for part in parts)
    done = 0
    results = []
    slower = False
    end = time.monotonic() + 60 * (parts[0].config.max_minutes or math.inf)
    answers = [len(part.prompts) * len(variants(drafter, part.config)) for part in parts]
    for number, part in enumerate(parts):

        def onwards(more: int, _: int, before: int = done) -> None:
            progress(before + more, total)

        prompts = [prompt.ids for prompt in part.prompts]
        every = [
            one
            for one in variants(drafter, part.config)
            if not (slower and one.name == GENERATE.name)
        ]
        now = time.monotonic()
        if number and decided(target, now > end):
            results.append([Measured(variant) for variant in every])
            continue
        until = now + max(0.0, end - now) * answers[number] / max(1, sum(answers[number:]))
        results.append(measure(target, drafter, every, prompts, onwards, part.numbers, until))
        slower = slower or decided(target, fastest_plain(results[0]) is results[0][0])
        done += len(prompts)
    plain, *trees = results[0]
    own = [
        one
        for one in trees
        if tree_of(one.variant.name).by_budget and not tree_of(one.variant.name).ngrams
    ]
    best = max(
        own, key=lambda one: acceptance_length(counted(text.commits for text in one.texts))[0]
    )
    plain.shown = show_texts(target, drafter, best.texts, best.variant.options)
    plain.replayed = replay_trees(target, drafter, plain.texts, parts[0].config)
    return results


def summarise(
    target: Target, drafter: Drafter, parts: abc.Sequence[PromptSet], measured: list[list[Measured]]
) -> Evaluation:
    """Return the figures of an evaluation, what is reported beside it included. What there was no
    time for is named in the first part's `cut`."""
    found = []
    left_out = []
    for part, of_part in zip(parts, measured, strict=True):
        if not of_part[0].texts:
            left_out.append(part.what)
            continue
        cut = cut_at(part.config.max_minutes, len(of_part[0].texts), len(part.prompts))
        found.append(summarise_part(target, drafter, replace(part, cut=cut), of_part))
    first, *beside = found
    if left_out:
        names = ", ".join(left_out)
        limit = f"evaluation.max_minutes={parts[0].config.max_minutes:.3g}"
        cut = (
            f"{first.cut}, and none for {names}"
            if first.cut
            else f"{limit} had no time for {names}"
        )
        first = replace(first, cut=cut)
    return replace(
        first, beside=beside, reference=reference_among(target, drafter, parts, measured)
    )


def reference_among(
    target: Target, drafter: Drafter, parts: abc.Sequence[PromptSet], measured: list[list[Measured]]
) -> Reference | None:
    """Return what chains took on the prompts that others may be asked, None where there are none,
    or no chain."""
    for part, of_part in zip(parts, measured, strict=True):
        known = dict(zip(part.numbers, part.prompts, strict=True))
        for one in of_part if part.config.temperature == 0 and of_part[0].texts else ():
            if one.variant.name == "chain" and any(prompt.said for prompt in part.prompts):
                return reference_of(
                    target, drafter, [known[each.number] for each in one.prompts], one.texts
                )
    return None


def summarise_part(
    target: AnyTarget, drafter: Drafter | None, part: PromptSet, measured: list[Measured]
) -> Evaluation:
    """Return the figures of one part; of a masked model without a drafter."""
    plain = measured[0]
    config = part.config
    kinds = {number: prompt.kind for number, prompt in zip(part.numbers, part.prompts, strict=True)}
    fastest, (samples, example) = fastest_plain(measured), plain.shown or ([], None)
    return Evaluation(
        target=target.name,
        device=describe_device(target.device),
        dtype=number_format(target),
        prompts=len(plain.texts),
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        block_size=drafter and drafter.block_size,
        methods=[method_result(one, plain, fastest, kinds) for one in measured],
        samples=samples,
        example=example,
        baseline=fastest.variant.name,
        what=part.what,
        trees=study_of(plain.replayed) if plain.replayed else None,
        cut=part.cut,
        date=time.strftime("%Y-%m-%d"),
    )


def fastest_plain(measured: abc.Sequence[Measured]) -> Measured:
    """Return the plain decoder that is faster on most prompts: ours, the first, or that of
    transformers."""
    ours, *rest = measured
    theirs = next((one for one in rest if one.variant.name == GENERATE.name), ours)
    return theirs if figures(theirs.prompts, ours.prompts).speedup > 1 else ours


def method_result(
    measured: Measured,
    plain: Measured,
    fastest: Measured,
    kinds: abc.Mapping[int, str] = MappingProxyType({}),
) -> MethodResult:
    """Return one row of the table. `plain` wrote what every method must; `fastest` is the fastest
    plain decoder; `kinds`: those of the prompts by their numbers."""
    texts = measured.texts
    stats = measured.stats
    found = figures(measured.prompts, fastest.prompts)
    drawn_otherwise = (
        measured.variant.name == GENERATE.name and measured.variant.options.temperature > 0
    )
    return MethodResult(
        name=measured.variant.name,
        budget=measured.variant.budget,
        tau_prompt_mean=sum(one.tau for one in stats) / len(texts),
        rounds=sum(one.rounds for one in stats),
        tokens=sum(one.tokens for one in stats),
        seconds=measured.seconds,
        tokens_per_second=found.speedup * statistics.median(map(rate, fastest.prompts)),
        histogram=[sum(counts) for counts in zip(*(one.histogram for one in stats), strict=True)],
        identical=None
        if drawn_otherwise
        else [text.ids for text in texts] == [text.ids for text in plain.texts],
        prompts=[replace(one, kind=kinds.get(one.number, "")) for one in measured.prompts],
        again=measured.again or None,
        **asdict(found),
    )


def describe_device(device: torch.device) -> str:
    """Return the hardware in words, for the report."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    known = Path("/proc/cpuinfo")
    lines = known.read_text(encoding="utf-8").splitlines() if known.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    model = names[0] if names else platform.processor() or platform.machine()
    return f"CPU, {torch.get_num_threads()} threads, {model}"

"""Evaluates a drafter by decoding prompts with every decoding method.

The prompts are decoded with the same engine that users run. Speed and acceptance are measured while
it decodes, and are not estimated from the accuracy of single tokens.
"""

import math
import platform
import statistics
import time
from collections import abc
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import cast

import torch

from infer.api import AnyTarget
from infer.config import EvaluationConfig
from infer.drafters.base import Drafter
from infer.evaluation.acceptance import EvaluationPrompt, build_reference
from infer.evaluation.lossless import classify_difference
from infer.evaluation.measurement import (
    ProgressCallback,
    PromptSet,
    VariantMeasurement,
    broadcast_decision,
    describe_time_limit,
    list_variants,
    measure_variants,
    median_budget,
)
from infer.evaluation.metrics import (
    compute_acceptance_length_or_ratio,
    compute_metrics,
    compute_output_tokens_per_second,
    count_tokens_and_rounds,
)
from infer.evaluation.replay import replay_tree_variants, summarise_replay
from infer.evaluation.results import (
    TRANSFORMERS_BASELINE_METHOD,
    AcceptanceReference,
    Evaluation,
    MethodResult,
    find_tree_method,
)
from infer.evaluation.samples import decode_report_samples
from infer.targets.target import Target, weight_format_name

SHORT_EVALUATION_STRIDE = 4  # before the last checkpoint, only every fourth prompt is decoded


def evaluate(
    target: Target,
    drafter: Drafter,
    prompts: abc.Sequence[EvaluationPrompt],
    config: EvaluationConfig,
    progress: ProgressCallback = lambda done, total: None,
) -> Evaluation:
    """Decode every prompt with every method, and return the results.

    Outputs are compared with those of baseline decoding. In the result of each method, the field
    `ties` is the number of outputs that differ because of rounding, and `defects` is the number of
    outputs that differ for another reason, see `infer.evaluation.lossless`.
    """
    prompt_sets = build_prompt_sets(prompts, config)
    measurements = measure_prompt_sets(target, drafter, prompt_sets, progress)
    evaluation = summarise_evaluation(target, drafter, prompt_sets, measurements)

    # A prompt set has no sequences if the time limit evaluation.max_minutes was reached before its
    # first prompt.
    measured_sets = [measurement for measurement in measurements if measurement[0].sequences]
    classified = [
        count_ties_and_defects(target, result, measurement)
        for result, measurement in zip(evaluation.with_others, measured_sets, strict=True)
    ]
    return replace(classified[0], other_evaluations=classified[1:])


def count_ties_and_defects(
    target: Target, evaluation: Evaluation, measurements: list[VariantMeasurement]
) -> Evaluation:
    """Count the outputs of each method that differ from the output of baseline decoding, and return
    the evaluation with these counts. `classify_difference` divides these outputs into ties
    (rounding errors) and defects. A method without such outputs keeps None as its counts.

    measurements: one for each method of the evaluation, in the same order
    """
    baseline = measurements[0].sequences
    methods = []
    for method, measurement in zip(evaluation.methods, measurements, strict=True):
        causes = []
        if method.name != TRANSFORMERS_BASELINE_METHOD.name:
            for sequence, expected in zip(measurement.sequences, baseline, strict=True):
                cause = classify_difference(
                    target, expected.prompt, sequence.ids, expected.ids, expected.options
                )
                causes.append(cause)
        if any(causes):
            method = replace(method, ties=causes.count("tie"), defects=causes.count("defect"))
        methods.append(method)
    return replace(evaluation, methods=methods)


def build_prompt_sets(
    prompts: abc.Sequence[EvaluationPrompt], config: EvaluationConfig
) -> list[PromptSet]:
    """Group the prompts of an evaluation into prompt sets, whose results are reported separately.
    The first set has the held-out prompts. Each `report_group` of the prompts is a further set. If
    decoding is greedy and `config.sampling_temperature` is set, there is one more set, which
    decodes every second held-out prompt again with sampling. The first set is decoded with all node
    budgets in `config.budgets`, and the other sets with the median one.
    """
    numbers_by_name: dict[str | None, list[int]] = {}
    for number, prompt in enumerate(prompts):
        numbers_by_name.setdefault(prompt.report_group, []).append(number)

    one_budget = replace(config, budgets=[median_budget(config.budgets)])
    prompt_sets = []
    for name, numbers in numbers_by_name.items():
        set_config = config if name is None else one_budget
        prompt_sets.append(PromptSet(name, [prompts[i] for i in numbers], numbers, set_config))

    if config.temperature == 0 and config.sampling_temperature is not None:
        main_set = prompt_sets[0]
        sampled = PromptSet(
            name=f"temperature {config.sampling_temperature:g}",
            prompts=main_set.prompts[::2],
            prompt_numbers=main_set.prompt_numbers[::2],
            config=replace(one_budget, temperature=config.sampling_temperature),
        )
        prompt_sets.append(sampled)
    return prompt_sets


def subsample_prompt_set(prompt_set: PromptSet) -> PromptSet:
    """Return the prompt set with a quarter of its prompts and a quarter of its time limit.

    All checkpoints of a training run except the last one are evaluated with this smaller set.
    """
    minutes = prompt_set.config.max_minutes
    if minutes is not None:
        minutes = minutes / SHORT_EVALUATION_STRIDE
    return replace(
        prompt_set,
        prompts=prompt_set.prompts[::SHORT_EVALUATION_STRIDE],
        prompt_numbers=prompt_set.prompt_numbers[::SHORT_EVALUATION_STRIDE],
        config=replace(prompt_set.config, max_minutes=minutes),
    )


def measure_prompt_sets(
    target: Target,
    drafter: Drafter,
    prompt_sets: abc.Sequence[PromptSet],
    progress: ProgressCallback = lambda done, total: None,
) -> list[list[VariantMeasurement]]:
    """Decode the prompts of every prompt set with every method.

    Returns a list for each set, with the measurement of each method, baseline decoding first. The
    baseline measurement of the first set also has text samples for the report, and what each round
    would commit with draft trees (`infer.evaluation.replay`).

    If `generate` of transformers is slower than our baseline decoding on the first set, it is not
    measured on the other sets. The time limit `max_minutes` is divided among the sets in proportion
    to their numbers of outputs. If no time is left for a set, its measurements have no sequences.
    """
    total = sum(len(prompt_set.prompts) for prompt_set in prompt_sets)
    done = 0
    results: list[list[VariantMeasurement]] = []
    is_transformers_slower = False
    end = time.monotonic() + 60 * (prompt_sets[0].config.max_minutes or math.inf)
    output_counts = [
        len(prompt_set.prompts) * len(list_variants(drafter, prompt_set.config))
        for prompt_set in prompt_sets
    ]
    for i, prompt_set in enumerate(prompt_sets):

        def report_progress(done_in_set: int, _: int, done_before: int = done) -> None:
            progress(done_before + done_in_set, total)

        variants = [
            variant
            for variant in list_variants(drafter, prompt_set.config)
            if not (is_transformers_slower and variant.name == TRANSFORMERS_BASELINE_METHOD.name)
        ]
        now = time.monotonic()
        if i > 0 and broadcast_decision(target, now > end):
            results.append([VariantMeasurement(variant) for variant in variants])
            continue

        share = output_counts[i] / max(1, sum(output_counts[i:]))
        deadline = now + max(0.0, end - now) * share
        prompt_ids = [prompt.ids for prompt in prompt_set.prompts]
        numbers = prompt_set.prompt_numbers
        measurements = measure_variants(
            target, drafter, variants, prompt_ids, report_progress, numbers, deadline
        )
        results.append(measurements)
        if not is_transformers_slower:
            is_ours_fastest = find_fastest_baseline(results[0]) is results[0][0]
            is_transformers_slower = broadcast_decision(target, is_ours_fastest)
        done += len(prompt_set.prompts)

    baseline, *others = results[0]
    best = find_best_tree_measurement(others)
    baseline.samples = decode_report_samples(target, drafter, best.sequences, best.variant.options)
    baseline.replayed = replay_tree_variants(
        target, drafter, baseline.sequences, prompt_sets[0].config
    )
    return results


def find_best_tree_measurement(measurements: list[VariantMeasurement]) -> VariantMeasurement:
    """Return the measurement of the tree method with the most tokens per round.

    Methods without a node budget and methods that use n-grams are not considered.
    """
    candidates = []
    for measurement in measurements:
        row = find_tree_method(measurement.variant.name)
        if row.scales_with_budget and not row.needs_ngrams:
            candidates.append(measurement)

    def tau(measurement: VariantMeasurement) -> float:
        commits = (sequence.commits for sequence in measurement.sequences)
        return compute_acceptance_length_or_ratio(count_tokens_and_rounds(commits))[0]

    return max(candidates, key=tau)


def summarise_evaluation(
    target: Target,
    drafter: Drafter,
    prompt_sets: abc.Sequence[PromptSet],
    measurements: list[list[VariantMeasurement]],
) -> Evaluation:
    """Combine the measurements of all prompt sets into one evaluation.

    The returned evaluation has the results of the first set. Its `other_evaluations` have the
    results of the other sets, and its `time_limit_note` names the sets for which no time was left.
    """
    evaluations = []
    skipped_names = []
    for prompt_set, measurement in zip(prompt_sets, measurements, strict=True):
        done = len(measurement[0].sequences)
        if done == 0:
            skipped_names.append(prompt_set.name or "")
            continue
        note = describe_time_limit(prompt_set.config.max_minutes, done, len(prompt_set.prompts))
        prompt_set = replace(prompt_set, time_limit_note=note)
        evaluations.append(summarise_prompt_set(target, drafter, prompt_set, measurement))

    first, *others = evaluations
    note = first.time_limit_note
    if skipped_names:
        names = ", ".join(skipped_names)
        if note:
            note = f"{note}, and no time for {names}"
        else:
            minutes = prompt_sets[0].config.max_minutes
            note = f"evaluation.max_minutes={minutes:.3g} left no time for {names}"
    reference = build_reference_from_sets(target, drafter, prompt_sets, measurements)
    return replace(first, time_limit_note=note, other_evaluations=others, reference=reference)


def build_reference_from_sets(
    target: Target,
    drafter: Drafter,
    prompt_sets: abc.Sequence[PromptSet],
    measurements: list[list[VariantMeasurement]],
) -> AcceptanceReference | None:
    """Build the acceptance reference (prompts, answers, and counts of accepted draft tokens) from
    the measurements of an evaluation.

    The first prompt set is used that was decoded greedily and contains a prompt that can be sent to
    a server as text (`text_with_same_tokens`). Returns None if there is no such set, or if no chain
    (a draft without branches) was measured on it.
    """
    for prompt_set, set_measurements in zip(prompt_sets, measurements, strict=True):
        if prompt_set.config.temperature > 0 or not set_measurements[0].sequences:
            continue
        if not any(prompt.text_with_same_tokens for prompt in prompt_set.prompts):
            continue
        prompts_by_number = dict(zip(prompt_set.prompt_numbers, prompt_set.prompts, strict=True))
        for measurement in set_measurements:
            if measurement.variant.name == "chain":
                numbers = [result.number for result in measurement.prompt_results]
                prompts = [prompts_by_number[number] for number in numbers]
                return build_reference(target, drafter, prompts, measurement.sequences)
    return None


def summarise_prompt_set(
    target: AnyTarget,
    drafter: Drafter | None,
    prompt_set: PromptSet,
    measurements: list[VariantMeasurement],
) -> Evaluation:
    """Return the results of one prompt set.

    drafter: None for a masked diffusion model
    measurements: one for each decoding method, our baseline decoding first
    """
    # `target` may be a masked diffusion model. It has all attributes that are read below.
    model = cast(Target, target)
    baseline = measurements[0]
    fastest_baseline = find_fastest_baseline(measurements)
    samples, example = baseline.samples or ([], None)
    kinds = {
        number: prompt.kind
        for number, prompt in zip(prompt_set.prompt_numbers, prompt_set.prompts, strict=True)
    }
    methods = [
        summarise_method(measurement, baseline, fastest_baseline, kinds)
        for measurement in measurements
    ]
    return Evaluation(
        target=model.name,
        device=describe_device(model.device),
        dtype=weight_format_name(model),
        prompts=len(baseline.sequences),
        max_new_tokens=prompt_set.config.max_new_tokens,
        temperature=prompt_set.config.temperature,
        block_size=None if drafter is None else drafter.block_size,
        methods=methods,
        samples=samples,
        example=example,
        baseline=fastest_baseline.variant.name,
        prompt_set_name=prompt_set.name,
        tree_study=summarise_replay(baseline.replayed) if baseline.replayed else None,
        time_limit_note=prompt_set.time_limit_note,
        date=time.strftime("%Y-%m-%d"),
    )


def find_fastest_baseline(measurements: abc.Sequence[VariantMeasurement]) -> VariantMeasurement:
    """Return the measurement of the faster baseline: baseline decoding with our engine, or with
    transformers. Transformers is faster if its speedup over our engine is above 1 in the median
    over the prompts.

    measurements: the measurements of one prompt set, our baseline decoding first
    """
    our_baseline, *others = measurements
    for measurement in others:
        if measurement.variant.name == TRANSFORMERS_BASELINE_METHOD.name:
            metrics = compute_metrics(measurement.prompt_results, our_baseline.prompt_results)
            return measurement if metrics.speedup > 1 else our_baseline
    return our_baseline


def summarise_method(
    measurement: VariantMeasurement,
    baseline: VariantMeasurement,
    fastest_baseline: VariantMeasurement,
    kinds: abc.Mapping[int, str] = MappingProxyType({}),
) -> MethodResult:
    """Return the results of one decoding method.

    measurement: the measurement of the method
    baseline: the measurement of baseline decoding with our engine, whose outputs every method must
        reproduce
    fastest_baseline: the measurement of the fastest baseline decoder; speedups are relative to it
    kinds: keys are prompt numbers, values are kinds of prompts, such as "functions"
    """
    variant = measurement.variant
    stats = measurement.stats
    metrics = compute_metrics(measurement.prompt_results, fastest_baseline.prompt_results)
    baseline_speeds = map(compute_output_tokens_per_second, fastest_baseline.prompt_results)

    identical = None
    has_other_noise = (
        variant.name == TRANSFORMERS_BASELINE_METHOD.name and variant.options.temperature > 0
    )
    if not has_other_noise:
        output_ids = [sequence.ids for sequence in measurement.sequences]
        identical = output_ids == [sequence.ids for sequence in baseline.sequences]

    histograms = zip(*(each.histogram for each in stats), strict=True)
    prompt_results = [
        replace(result, kind=kinds.get(result.number, "")) for result in measurement.prompt_results
    ]
    return MethodResult(
        name=variant.name,
        budget=variant.budget,
        tau_prompt_mean=sum(each.tau for each in stats) / len(measurement.sequences),
        rounds=sum(each.rounds for each in stats),
        tokens=sum(each.tokens for each in stats),
        seconds=measurement.seconds,
        tokens_per_second=metrics.speedup * statistics.median(baseline_speeds),
        histogram=[sum(counts) for counts in histograms],
        identical=identical,
        prompts=prompt_results,
        remeasured_prompts=measurement.remeasured_prompts or None,
        **asdict(metrics),
    )


def describe_device(device: torch.device) -> str:
    """Return a description of the GPU or CPU, for reports."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        for line in cpu_info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.split(":")[1].strip()
                break
    return f"CPU, {torch.get_num_threads()} threads, {model}"

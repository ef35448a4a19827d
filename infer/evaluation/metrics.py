"""Acceptance length and speedup of a method from the results of its prompts, with confidence
intervals.

A speedup is the median, over prompts, of the ratio of tokens per second to the fastest baseline
decoder. Intervals contain 95 of 100 bootstrap resamples of the prompts:
https://doi.org/10.1201/9780429246593, chapter 13.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from infer.evaluation.results import Evaluation, PromptResult

BOOTSTRAP_SAMPLES = 2000
CONFIDENCE_PERCENT = 95.0
# a prompt that takes this many times a method's median time per token is measured again
REMEASURED_PROMPT_TIME_RATIO = 5
# with fewer prompts no interval is given
MIN_PROMPTS_FOR_CONFIDENCE_INTERVAL = 5
# shared prompts needed to compare checkpoints: the interval of 5 prompts covers the true value 82
# times in 100, that of 8 prompts 88 times
MIN_PROMPTS_TO_COMPARE_CHECKPOINTS = 8


@dataclass(frozen=True)
class MethodMetrics:
    """Acceptance length and speedup of one method. Intervals are None for fewer than
    MIN_PROMPTS_FOR_CONFIDENCE_INTERVAL prompts."""

    tau: float
    tau_interval: list[float] | None
    speedup: float
    speedup_interval: list[float] | None


def compute_metrics(
    prompts: Sequence[PromptResult], baseline: Sequence[PromptResult]
) -> MethodMetrics:
    """Compute a method's metrics from its prompts; `baseline` holds the fastest baseline decoder's
    results on the same prompts."""
    baseline_by_number = {result.number: result for result in baseline}
    ratios = np.array(
        [
            prompt_tokens_per_second(result)
            / prompt_tokens_per_second(baseline_by_number[result.number])
            for result in prompts
        ]
    )
    tau, tau_interval = acceptance_length([(each.tokens - 1, each.rounds) for each in prompts])
    speedup_interval = bootstrap_interval(
        lambda indices: np.median(ratios[indices], axis=-1), len(ratios)
    )
    return MethodMetrics(tau, tau_interval, float(np.median(ratios)), speedup_interval)


def prompt_tokens_per_second(result: PromptResult) -> float:
    """Return a prompt's tokens per second in its fastest measurement."""
    return result.tokens / max(min(result.seconds), 1e-9)


def acceptance_length(
    counts: Sequence, baseline_counts: Sequence | None = None
) -> tuple[float, list[float] | None]:
    """Return the tokens per round of n outputs, pooled over rounds, and the interval over outputs.

    counts: (n, 2), for each output its tokens after the prefill's token, and its rounds
    baseline_counts: (n, 2), the same for other decodings of the same prompts; if given, the ratio
        to their tokens per round is returned
    """
    count_array = np.asarray(counts, float).reshape(-1, 2)

    def statistic(indices: np.ndarray) -> np.ndarray:
        lengths = pooled_acceptance_length(count_array[indices])
        if baseline_counts is None:
            return lengths
        baseline_array = np.asarray(baseline_counts, float).reshape(-1, 2)
        return lengths / pooled_acceptance_length(baseline_array[indices])

    length = float(statistic(np.arange(len(counts))))
    return length, bootstrap_interval(statistic, len(counts))


def count_tokens_and_rounds(commits: Iterable[Sequence[int]]) -> list[tuple[int, int]]:
    """Return the counts that `acceptance_length` takes. `commits` holds for each output the tokens
    committed by each round, the prefill's token first."""
    return [(sum(lengths) - 1, len(lengths) - 1) for lengths in commits]


def pooled_acceptance_length(counts: np.ndarray) -> np.ndarray:
    """Return the tokens per round, shape (...), of n outputs together with counts (..., n, 2); 1
    for outputs without rounds."""
    tokens, rounds = np.moveaxis(counts.sum(-2), -1, 0)
    return np.where(rounds > 0, tokens / np.maximum(rounds, 1), 1.0)


def bootstrap_interval(
    statistic: Callable[[np.ndarray], np.ndarray], count: int
) -> list[float] | None:
    """Return the bootstrap confidence interval of a statistic over `count` observations; None for
    fewer than MIN_PROMPTS_FOR_CONFIDENCE_INTERVAL.

    `statistic` takes indices of observations (BOOTSTRAP_SAMPLES, count), drawn with replacement,
    and returns (BOOTSTRAP_SAMPLES,). The same call always gives the same interval.
    """
    if count < MIN_PROMPTS_FOR_CONFIDENCE_INTERVAL:
        return None
    indices = np.random.default_rng(0).integers(count, size=(BOOTSTRAP_SAMPLES, count))
    tail_percent = (100 - CONFIDENCE_PERCENT) / 2
    return np.percentile(statistic(indices), [tail_percent, 100 - tail_percent]).tolist()


def select_best_checkpoint(evaluations: Sequence[Evaluation]) -> Evaluation:
    """Return the evaluation of the best checkpoint: the last one, unless an earlier one is
    significantly better on at least MIN_PROMPTS_TO_COMPARE_CHECKPOINTS prompts."""
    by_step = sorted(evaluations, key=lambda evaluation: evaluation.step or 0)
    best = by_step.pop()
    for earlier in reversed(by_step):
        if is_significantly_better(earlier, best):
            best = earlier
    return best


def is_significantly_better(evaluation: Evaluation, other: Evaluation) -> bool:
    """Return whether the drafter has a significantly higher acceptance length in `evaluation` than
    in `other`, by its method with the highest one, on the prompts that both decoded."""
    pairs = pair_shared_prompts(evaluation, other)
    if len(pairs) < MIN_PROMPTS_TO_COMPARE_CHECKPOINTS:
        return False
    counts = [(result.tokens - 1, result.rounds) for result, _ in pairs]
    other_counts = [(result.tokens - 1, result.rounds) for _, result in pairs]
    _, ratio_interval = acceptance_length(counts, other_counts)
    return ratio_interval is not None and ratio_interval[0] > 1


def pair_shared_prompts(
    evaluation: Evaluation, other: Evaluation
) -> list[tuple[PromptResult, PromptResult]]:
    """Return the results of both evaluations on the prompts that both decoded with one method: the
    drafter's method with the highest acceptance length in `evaluation`, without n-grams if there is
    one."""
    without_ngrams = [
        method for method in evaluation.drafter_methods if not method.tree_method.needs_ngrams
    ]
    candidates = without_ngrams or evaluation.drafter_methods
    best = max(candidates, key=lambda method: method.tau)

    other_by_number = {}
    for method in other.methods:
        if method.label == best.label:
            other_by_number = {result.number: result for result in method.prompts or ()}
            break
    return [
        (result, other_by_number[result.number])
        for result in best.prompts or ()
        if result.number in other_by_number
    ]


def describe_too_few_prompts(evaluations: Sequence[Evaluation]) -> str | None:
    """Return a sentence if the evaluations share too few prompts to compare checkpoints, so that
    the last one is taken; else None."""
    *earlier, last = sorted(evaluations, key=lambda evaluation: evaluation.step or 0)
    shared = [len(pair_shared_prompts(evaluation, last)) for evaluation in earlier]
    most_shared = max(shared, default=MIN_PROMPTS_TO_COMPARE_CHECKPOINTS)
    if most_shared >= MIN_PROMPTS_TO_COMPARE_CHECKPOINTS:
        return None
    return (
        f"The last checkpoint is taken: evaluations share {most_shared} of the "
        f"{MIN_PROMPTS_TO_COMPARE_CHECKPOINTS} prompts that are needed to choose an earlier one."
    )

"""Computes the acceptance length and the speedup of a method, with confidence intervals, from the
results on each prompt.

A prompt's speedup is its tokens per second divided by those of the fastest baseline decoder. The
speedup of a method is the median over the prompts. Confidence intervals contain 95 % of the values
from bootstrap resamples of the prompts (https://doi.org/10.1201/9780429246593, chapter 13).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from infer.evaluation.results import Evaluation, PromptResult

BOOTSTRAP_SAMPLES = 2000
CONFIDENCE_PERCENT = 95.0
# A prompt whose time per token is more than this many times the method's median is measured again.
REMEASURED_PROMPT_TIME_RATIO = 5
# With fewer prompts, no confidence interval is reported.
MIN_PROMPTS_FOR_CONFIDENCE_INTERVAL = 5
# Two checkpoints are compared only on at least this many prompts that both have decoded. The
# interval of 5 prompts contains the true value in 82 % of cases, that of 8 prompts in 88 %.
MIN_PROMPTS_TO_COMPARE_CHECKPOINTS = 8


@dataclass(frozen=True)
class MethodMetrics:
    """Acceptance length and speedup of one method.

    tau: the acceptance length, which is the number of tokens per round
    tau_interval, speedup_interval: confidence intervals; None for fewer than
        MIN_PROMPTS_FOR_CONFIDENCE_INTERVAL prompts
    """

    tau: float
    tau_interval: list[float] | None
    speedup: float
    speedup_interval: list[float] | None


def compute_metrics(
    prompts: Sequence[PromptResult], baseline: Sequence[PromptResult]
) -> MethodMetrics:
    """Compute the metrics of a method.

    prompts: the results of the method on each prompt
    baseline: the results of the fastest baseline decoder on the same prompts
    """
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
    """Return the tokens per second in the fastest measurement of a prompt."""
    return result.tokens / max(min(result.seconds), 1e-9)


def acceptance_length(
    counts: Sequence, baseline_counts: Sequence | None = None
) -> tuple[float, list[float] | None]:
    """Return the number of tokens per round of several outputs, and its confidence interval.

    The number is the sum of all tokens divided by the sum of all rounds.

    counts: for each output (number of tokens without the token of the prefill, number of rounds)
    baseline_counts: the same for other outputs of the same prompts. If given, the tokens per round
        are divided by those of these outputs
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
    """Return (number of tokens without the token of the prefill, number of rounds) of each output.

    commits: for each output, how many tokens the prefill and each round committed, in this order
    """
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
    """Return the evaluation of the best checkpoint of a training run.

    This is the last checkpoint, unless an earlier one is significantly better. Two checkpoints are
    compared on the prompts that both have decoded, if these are at least
    MIN_PROMPTS_TO_COMPARE_CHECKPOINTS.
    """
    by_step = sorted(evaluations, key=lambda evaluation: evaluation.step or 0)
    best = by_step.pop()
    for earlier in reversed(by_step):
        if is_significantly_better(earlier, best):
            best = earlier
    return best


def is_significantly_better(evaluation: Evaluation, other: Evaluation) -> bool:
    """Return whether the acceptance length in `evaluation` is significantly higher than in `other`.

    The prompts and the method with which they are compared are those of `pair_shared_prompts`.
    """
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
    """Return pairs of the results of two evaluations on the prompts that both have decoded.

    The results are those of one method, which has the highest acceptance length in `evaluation`
    among the methods that use the drafter. Methods that use n-grams are considered only if there is
    no other.
    """
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
    """Return a sentence that says that checkpoints cannot be compared, and why, or else None.

    They cannot be compared if the evaluations share fewer than MIN_PROMPTS_TO_COMPARE_CHECKPOINTS
    prompts.
    """
    *earlier, last = sorted(evaluations, key=lambda evaluation: evaluation.step or 0)
    shared = [len(pair_shared_prompts(evaluation, last)) for evaluation in earlier]
    most_shared = max(shared, default=MIN_PROMPTS_TO_COMPARE_CHECKPOINTS)
    if most_shared >= MIN_PROMPTS_TO_COMPARE_CHECKPOINTS:
        return None
    return (
        f"The last checkpoint is used as the best one: the evaluations share {most_shared} of the "
        f"{MIN_PROMPTS_TO_COMPARE_CHECKPOINTS} prompts that are needed to choose an earlier one."
    )

"""Computes the acceptance length and the speedup of a decoding method, with confidence intervals.

The acceptance length τ is the number of tokens per round. A prompt's speedup is its tokens per
second divided by those of the fastest baseline decoder. The speedup of a method is the median over
the prompts. Confidence intervals contain 95 % of the values from bootstrap resamples of the prompts
(https://doi.org/10.1201/9780429246593, chapter 13).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from infer.evaluation.results import Evaluation, PromptResult

BOOTSTRAP_SAMPLES = 2000
CONFIDENCE_PERCENT = 95.0
# A prompt is measured again if its time per token is more than this many times the method's median.
MIN_TIME_RATIO_TO_REMEASURE = 5
# With fewer prompts, no confidence interval is computed.
MIN_PROMPTS_FOR_CONFIDENCE_INTERVAL = 5
# Two checkpoints are compared only if at least this many prompts were decoded with both of them.
# With 8 prompts, the bootstrap confidence interval contains the true value in 88 % of cases; with 5
# prompts, in 82 %.
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
    """Compute the acceptance length and the speedup of a method, with confidence intervals.

    prompts: the results of the method on each prompt
    baseline: the results of the fastest baseline decoder on the same prompts
    """
    baseline_by_number = {result.number: result for result in baseline}
    speedup, speedup_interval = compute_median_speedup(
        [compute_output_tokens_per_second(result) for result in prompts],
        [compute_output_tokens_per_second(baseline_by_number[each.number]) for each in prompts],
    )
    tau, tau_interval = compute_acceptance_length_or_ratio(
        [(each.tokens - 1, each.rounds) for each in prompts]
    )
    return MethodMetrics(tau, tau_interval, speedup, speedup_interval)


def compute_median_speedup(
    tokens_per_second: Sequence[float], baseline_tokens_per_second: Sequence[float]
) -> tuple[float, list[float] | None]:
    """Return the median over prompts of the speedup of a prompt, and its confidence interval.

    tokens_per_second: of the method, for each prompt
    baseline_tokens_per_second: of the baseline, for the same prompts
    """
    ratios = np.asarray(tokens_per_second, float) / np.asarray(baseline_tokens_per_second, float)
    interval = bootstrap_interval(lambda indices: np.median(ratios[indices], axis=-1), len(ratios))
    return float(np.median(ratios)), interval


def compute_output_tokens_per_second(result: PromptResult) -> float:
    """Return the tokens per second for one prompt. If the prompt was measured several times, use
    the shortest time.
    """
    return result.tokens / max(min(result.seconds), 1e-9)


def compute_acceptance_length_or_ratio(
    counts: Sequence, baseline_counts: Sequence | None = None
) -> tuple[float, list[float] | None]:
    """Return the acceptance length over several outputs, and its confidence interval.

    The acceptance length is the sum of all tokens divided by the sum of all rounds. The token that
    the prefill generates is not counted. The interval is None for fewer than
    MIN_PROMPTS_FOR_CONFIDENCE_INTERVAL outputs.

    counts: (number of tokens, number of rounds) of each output
    baseline_counts: the same for other outputs of the same prompts. If given, the function returns
        the acceptance length of `counts` divided by that of `baseline_counts`, and the confidence
        interval of this ratio
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
    """Return (number of tokens, number of rounds) of each output.

    The token that the prefill generates is not counted.

    commits: for each output, the numbers of tokens that the prefill and then each round committed
    """
    return [(sum(lengths) - 1, len(lengths) - 1) for lengths in commits]


def pooled_acceptance_length(counts: np.ndarray) -> np.ndarray:
    """Return the tokens per round of several outputs together; 1 if they have no rounds.

    counts: number of tokens and of rounds of each output, of shape (..., num_outputs, 2)

    The returned array has the shape of `counts` without the last two dimensions.
    """
    tokens, rounds = np.moveaxis(counts.sum(-2), -1, 0)
    return np.where(rounds > 0, tokens / np.maximum(rounds, 1), 1.0)


def bootstrap_interval(
    statistic: Callable[[np.ndarray], np.ndarray], num_observations: int
) -> list[float] | None:
    """Return the bootstrap confidence interval of a statistic, such as a median over prompts.

    statistic: takes indices of observations, of shape (BOOTSTRAP_SAMPLES, num_observations), and
        returns the statistic of each sample, of shape (BOOTSTRAP_SAMPLES,)
    num_observations: number of observations

    Each sample has `num_observations` observations that are drawn with replacement. The random seed
    is fixed, so the same call always gives the same interval. Returns None for fewer than
    MIN_PROMPTS_FOR_CONFIDENCE_INTERVAL observations.
    """
    if num_observations < MIN_PROMPTS_FOR_CONFIDENCE_INTERVAL:
        return None
    indices = np.random.default_rng(0).integers(
        num_observations, size=(BOOTSTRAP_SAMPLES, num_observations)
    )
    tail_percent = (100 - CONFIDENCE_PERCENT) / 2
    return np.percentile(statistic(indices), [tail_percent, 100 - tail_percent]).tolist()


def select_best_checkpoint(evaluations: Sequence[Evaluation]) -> Evaluation:
    """Return the evaluation of the best checkpoint of a training run.

    This is the last checkpoint, unless an earlier one is significantly better. Two checkpoints are
    compared on the prompts that were decoded with both. If there are fewer than
    MIN_PROMPTS_TO_COMPARE_CHECKPOINTS such prompts, the later checkpoint counts as better.
    """
    by_step = sorted(evaluations, key=lambda evaluation: evaluation.step or 0)
    best = by_step.pop()
    for earlier in reversed(by_step):
        if is_significantly_better(earlier, best):
            best = earlier
    return best


def is_significantly_better(evaluation: Evaluation, other: Evaluation) -> bool:
    """Return whether `evaluation` has a significantly higher acceptance length than `other`.

    `pair_shared_prompts` selects the method and the prompts that are compared.
    """
    pairs = pair_shared_prompts(evaluation, other)
    if len(pairs) < MIN_PROMPTS_TO_COMPARE_CHECKPOINTS:
        return False
    counts = [(result.tokens - 1, result.rounds) for result, _ in pairs]
    other_counts = [(result.tokens - 1, result.rounds) for _, result in pairs]
    _, ratio_interval = compute_acceptance_length_or_ratio(counts, other_counts)
    return ratio_interval is not None and ratio_interval[0] > 1


def pair_shared_prompts(
    evaluation: Evaluation, other: Evaluation
) -> list[tuple[PromptResult, PromptResult]]:
    """Return pairs of results of two evaluations, one for each prompt that both have decoded.

    All results are from the same decoding method: the one with the highest acceptance length in
    `evaluation` among the methods that use the drafter and no n-grams. If every method uses
    n-grams, the method is chosen among all of them.
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
    """Return a sentence that says that the checkpoints of a run cannot be compared, and why.

    Returns None if the last checkpoint and an earlier one have at least
    MIN_PROMPTS_TO_COMPARE_CHECKPOINTS prompts in common, because they can then be compared.
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

"""Figures from what every prompt took, with the intervals in which they would lie on other prompts
of the same kind.

A speedup is the median, over prompts, of tokens a second over those of the fastest plain decoder.
Intervals hold 95 of 100 bootstrap samples of the prompts: https://doi.org/10.1201/9780429246593,
chapter 13.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from infer.evaluation.results import Evaluation, PromptResult

SAMPLES = 2000  # of the bootstrap
LEVEL = 95.0  # per cent
DISTURBED = 5  # times a method's median time a token, from which on a prompt is measured again
FEWEST = 5  # prompts below which nothing can be said about other prompts
ENOUGH = 8  # shared prompts to tell checkpoints apart: an interval of 5 holds the truth 82 times in 100, one of 8 88


@dataclass(frozen=True)
class Figures:
    """What the prompts of one method come to. Intervals are None for fewer than FEWEST prompts."""

    tau: float
    tau_interval: list[float] | None
    speedup: float
    speedup_interval: list[float] | None


def figures(prompts: Sequence[PromptResult], baseline: Sequence[PromptResult]) -> Figures:
    """Return the figures of a method's prompts, over the same prompts by the fastest plain
    decoder."""
    plain = {one.number: one for one in baseline}
    ratios = np.array([rate(one) / rate(plain[one.number]) for one in prompts])
    return Figures(
        *acceptance_length([(one.tokens - 1, one.rounds) for one in prompts]),
        speedup=float(np.median(ratios)),
        speedup_interval=interval(lambda drawn: np.median(ratios[drawn], axis=-1), len(ratios)),
    )


def rate(prompt: PromptResult) -> float:
    """Return tokens a second, in the fastest of several repeats."""
    return prompt.tokens / max(min(prompt.seconds), 1e-9)


def acceptance_length(
    counts: Sequence, base: Sequence | None = None
) -> tuple[float, list[float] | None]:
    """Return the tokens a round of n texts, pooled, and its interval over texts. counts (n, 2): the
    tokens of each behind the prefill's, and its rounds; with those of a `base`, (n, 2) of the same
    texts, the ratio to its tokens a round."""

    def of(drawn: np.ndarray) -> np.ndarray:
        found = [
            pooled(np.asarray(each, float).reshape(-1, 2)[drawn])
            for each in (counts, base)
            if each is not None
        ]
        return found[0] / found[-1] if base is not None else found[0]

    return float(of(np.arange(len(counts)))), interval(of, len(counts))


def counted(texts: Iterable[Sequence[int]]) -> list[tuple[int, int]]:
    """Return the counts of `acceptance_length` of texts by what each of their rounds committed, the
    prefill first."""
    return [(sum(commits) - 1, len(commits) - 1) for commits in texts]


def pooled(counts: np.ndarray) -> np.ndarray:
    """Return the tokens a round (...) of texts with counts (..., n, 2) together; 1 without
    rounds."""
    gains, rounds = np.moveaxis(counts.sum(-2), -1, 0)
    return np.where(rounds > 0, gains / np.maximum(rounds, 1), 1.0)


def interval(figure: Callable[[np.ndarray], np.ndarray], count: int) -> list[float] | None:
    """Return the bootstrap interval of a figure over `count` observations. `figure` takes numbers
    of observations (SAMPLES, count), drawn with replacement, and returns (SAMPLES,). The same call
    gives the same interval."""
    if count < FEWEST:
        return None
    drawn = np.random.default_rng(0).integers(count, size=(SAMPLES, count))
    outside = (100 - LEVEL) / 2
    return np.percentile(figure(drawn), [outside, 100 - outside]).tolist()


def best_of(evaluations: Sequence[Evaluation]) -> Evaluation:
    """Return the best checkpoint's evaluation: the last, unless an earlier one is better by more
    than noise, on no fewer than ENOUGH prompts."""
    ordered = sorted(evaluations, key=lambda evaluation: evaluation.step or 0)
    best = ordered.pop()
    for earlier in reversed(ordered):
        best = earlier if is_better(earlier, best) else best
    return best


def is_better(one: Evaluation, other: Evaluation) -> bool:
    """Return whether the drafter's method with the highest acceptance length has a higher one in
    evaluation `one` than in `other`, on the prompts that both decoded, by more than noise."""
    pairs = shared_prompts(one, other)
    if len(pairs) < ENOUGH:
        return False
    _, lead = acceptance_length(
        *([(one.tokens - 1, one.rounds) for one in side] for side in zip(*pairs, strict=True))
    )
    return lead[0] > 1


def shared_prompts(one: Evaluation, other: Evaluation) -> list[tuple[PromptResult, PromptResult]]:
    """Return what the drafter's method with the highest acceptance length in `one`, without n-grams
    if there is such a one, took on the prompts that both decoded with it."""
    alone = [method for method in one.of_drafter if not method.tree.ngrams]
    top = max(alone or one.of_drafter, key=lambda method: method.tau)
    same = next((method for method in other.methods if method.label == top.label), None)
    theirs = {prompt.number: prompt for prompt in same.prompts or ()} if same else {}
    return [
        (prompt, theirs[prompt.number]) for prompt in top.prompts or () if prompt.number in theirs
    ]


def too_few(evaluations: Sequence[Evaluation]) -> str | None:
    """Return the sentence about checkpoints that cannot be told apart, so that the last is taken;
    else None."""
    *earlier, last = sorted(evaluations, key=lambda evaluation: evaluation.step or 0)
    shared = max((len(shared_prompts(one, last)) for one in earlier), default=ENOUGH)
    if shared >= ENOUGH:
        return None
    return f"The last checkpoint is taken: evaluations share {shared} of the {ENOUGH} prompts that a choice takes."

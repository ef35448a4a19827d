"""Speedups that one can believe: medians over prompts, intervals, marks; what is the fastest, and
what the best."""

from dataclasses import replace

import numpy as np
import pytest

from infer.evaluation.results import Evaluation, MethodResult, PromptResult
from infer.evaluation.ruler import best_of, figures, interval, too_few
from infer.evaluation.tables import headline, legend, mark, notes_of, of_kind, table

COUNT = 24


def prompts(rounds, seconds, tokens=100, kinds=("any",), looped=0) -> list[PromptResult]:
    """Prompts of `tokens` tokens each: rounds and seconds by prompt."""
    return [
        PromptResult(i, kinds[i % len(kinds)], tokens, int(r), list(s), looped * (i == 0))
        for i, (r, s) in enumerate(zip(rounds, seconds, strict=True))
    ]


def repeated(seconds) -> list[list[float]]:
    return [[one] for one in seconds]


def noisy(scale: float, spread: float, seed: int) -> list[list[float]]:
    return repeated(scale * np.exp(spread * np.random.default_rng(seed).standard_normal(COUNT)))


def method(
    name: str, budget: int, own: list[PromptResult], plain: list[PromptResult]
) -> MethodResult:
    found = figures(own, plain)
    return MethodResult(
        name=name,
        budget=budget,
        tau_prompt_mean=found.tau,
        rounds=sum(one.rounds for one in own),
        tokens=sum(one.tokens for one in own),
        seconds=1.0,
        tokens_per_second=1.0,
        histogram=[],
        identical=True,
        prompts=own,
        **vars(found),
    )


def evaluation(methods: list[MethodResult], step: int = 1, **more) -> Evaluation:
    shared = {
        "target": "t",
        "device": "CPU",
        "dtype": "float32",
        "max_new_tokens": 100,
        "temperature": 0.0,
    }
    return Evaluation(prompts=COUNT, methods=methods, samples=[], step=step, **shared | more)


PLAIN = prompts([99] * COUNT, noisy(1.0, 0.02, 0))
ROUNDS = [33] * COUNT  # τ = 3


def test_a_speedup_is_the_median_of_the_prompts_own():
    """Half of the prompts were decoded while the machine was three times as slow, for all methods
    alike: sums are led by those; a single stall counts as one prompt."""
    slow = np.where(np.arange(COUNT) % 2, 3.0, 1.0)
    plain = slow.copy()
    own = slow / 1.5
    own[0] *= 50
    found = figures(prompts(ROUNDS, repeated(own)), prompts([99] * COUNT, repeated(plain)))
    assert found.speedup == pytest.approx(1.5) and found.speedup_interval == pytest.approx(
        [1.5, 1.5]
    )
    assert found.tau == 3.0


def test_of_several_repeats_the_fastest_counts():
    own = prompts(ROUNDS, [[9.0, 0.5]] * COUNT)
    assert figures(own, prompts([99] * COUNT, [[1.0, 7.0]] * COUNT)).speedup == pytest.approx(2.0)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """300 evaluations of 32 prompts whose true median is known."""
    dice = np.random.default_rng(3)
    covered = 0
    for _ in range(300):
        values = np.exp(0.3 * dice.standard_normal(32))  # median 1
        low, high = interval(lambda drawn, values=values: np.median(values[drawn], axis=-1), 32)
        covered += low <= 1 <= high
    assert 0.90 < covered / 300 <= 1
    assert interval(lambda drawn: drawn.mean(-1), 9) == interval(lambda drawn: drawn.mean(-1), 9)
    assert interval(lambda drawn: drawn.mean(-1), 4) is None


@pytest.mark.parametrize(
    ("scale", "spread", "finding", "sign"),
    [(0.5, 0.02, "faster", ""), (1.5, 0.02, "slower", ""), (0.98, 0.3, "undecided", "~")],
)
def test_what_is_no_finding_is_marked(scale, spread, finding, sign):
    own = method("ddtree", 8, prompts(ROUNDS, noisy(scale, spread, 5)), PLAIN)
    result = evaluation([method("plain", 0, PLAIN, PLAIN), own])
    assert (own.finding, mark(own)) == (finding, sign)
    lines = table(result).splitlines()
    assert lines[3].split("|")[-3].endswith("]" + sign + " ")
    assert len(legend(result.methods)) == bool(sign)
    assert all(line in lines for line in legend(result.methods))
    said = headline(result)
    assert ("not significant" in said) == (finding == "undecided")
    assert ("(slower)" in said) == (finding == "slower") and "times as fast" in said


def test_too_few_prompts_show_nothing():
    plain = PLAIN[:4]
    own = prompts(ROUNDS[:4], noisy(0.5, 0.01, 2)[:4])
    assert method("chain", 7, own, plain).finding == "undecided"
    old = replace(method("chain", 7, own, plain), prompts=None)
    assert (old.finding, mark(old)) == ("", "")  # a file of an earlier version


def test_the_fastest_is_surely_so():
    plain = method("plain", 0, PLAIN, PLAIN)
    sure = method("ddtree", 8, prompts(ROUNDS, noisy(0.5, 0.02, 1)), PLAIN)
    lucky = method("ddtree", 16, prompts(ROUNDS, noisy(0.47, 0.5, 8)), PLAIN)
    assert lucky.speedup_interval[0] < sure.speedup_interval[0] < lucky.speedup_interval[1]
    assert evaluation([plain, sure, lucky]).fastest is sure


def test_speedups_are_over_the_fastest_plain_decoder():
    fast = prompts([99] * COUNT, noisy(0.8, 0.02, 4))
    rows = [method(name, 0, own, fast) for name, own in (("plain", PLAIN), ("generate", fast))]
    result = evaluation(
        [*rows, method("chain", 7, prompts(ROUNDS, noisy(0.6, 0.02, 6)), fast)], baseline="generate"
    )
    assert result.plain is result.methods[1] and result.plain.speedup == 1 and rows[0].speedup < 1
    assert result.drafting == result.methods[2:]
    assert "as fast as plain decoding by transformers" in headline(result)


def test_kinds_of_prompts_have_figures_of_their_own():
    kinds = ("heads", "bodies")
    rounds = [50 if i % 2 else 25 for i in range(COUNT)]
    plain = prompts([99] * COUNT, [[1.0]] * COUNT, kinds=kinds)
    own = prompts(rounds, [[0.5]] * COUNT, kinds=kinds)
    result = evaluation([method("plain", 0, plain, plain), method("chain", 7, own, plain)])
    assert of_kind(result.methods[1], result.plain, "heads").tau == pytest.approx(99 / 25)
    lines = table(replace(result, beside=[replace(result, what="elsewhere")])).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[5:9]]
    assert rows[0] == ["τ, speedup", "heads", "bodies", "elsewhere"] and rows[2][0] == "plain"
    assert rows[3] == ["chain", "3.96 2.00x", "1.98 2.00x", "2.64 2.00x"]


def test_the_share_of_loops_is_said():
    plain = method("plain", 0, prompts([99] * COUNT, [[1.0]] * COUNT, looped=48), PLAIN)
    said = "held-out prompts: 1 of 24 texts (4%) ended in loops, which are 2% of 2400 tokens"
    assert table(evaluation([plain, plain])).endswith(said)
    assert notes_of(evaluation([replace(plain, prompts=None)])) == []


def test_the_best_checkpoint_is_the_last_unless_another_is_surely_better():
    """On the prompts that both decoded: an evaluation in mid-training decodes fewer."""

    def at(step: int, rounds, every: int = 1) -> Evaluation:
        own = prompts(rounds, [[0.5]] * COUNT)[::every]
        return evaluation(
            [
                method("plain", 0, PLAIN[::every], PLAIN[::every]),
                method("chain", 7, own, PLAIN[::every]),
            ],
            step,
        )

    dice = np.random.default_rng(0)
    some = dice.integers(20, 50, COUNT)
    last = at(9, some)
    assert best_of([at(3, some + 1), at(6, some - dice.integers(0, 2, COUNT)), last]).step in (6, 9)
    assert best_of([at(3, some + dice.integers(-5, 5, COUNT)), last]) is last
    assert best_of([at(3, some - 8, every=3), last]).step == 3
    assert best_of([at(3, some + 8, every=3), last]) is last
    assert too_few([at(3, some - 8), last]) is None and too_few([last]) is None


@pytest.mark.parametrize("shared, chosen", [(0, 9), (7, 9), (8, 3)])
def test_few_shared_prompts_choose_no_checkpoint(shared, chosen):
    """An earlier checkpoint is far better on all that it shares with the last one; one prompt more
    is its own."""
    rounds = np.array([40] * 12)
    own = [prompts(rounds - 10, [[0.5]] * 12)[:shared], prompts(rounds, [[0.5]] * 12)]
    own[0].append(replace(own[1][0], number=99, rounds=11))
    both = [
        evaluation([method("chain", 7, each, each)] * 2, step)
        for step, each in zip((3, 9), own, strict=True)
    ]
    assert best_of(both).step == chosen
    assert (too_few(both) or "").count(f"share {shared} of the 8 prompts") == (chosen == 9)
    bare = [
        replace(one, methods=[replace(each, prompts=None) for each in one.methods]) for one in both
    ]
    assert best_of(bare) is bare[1]  # files of an earlier version


def test_ngrams_do_not_choose_a_checkpoint():
    """With n-grams the earlier one looks better; by itself the drafter is not."""
    chain = method("chain", 7, prompts([40] * COUNT, [[0.5]] * COUNT), PLAIN)
    joined = [
        method("ddtree+ngrams", 8, prompts([rounds] * COUNT, [[0.5]] * COUNT), PLAIN)
        for rounds in (20, 35)
    ]
    both = [evaluation([chain, chain, one], step) for one, step in zip(joined, (3, 9), strict=True)]
    assert best_of(both) is both[1]

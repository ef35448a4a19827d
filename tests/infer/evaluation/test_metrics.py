"""Metrics of methods: medians over prompts, intervals and marks; the fastest method, and the best
checkpoint."""

from dataclasses import replace

import numpy as np
import pytest

from infer.evaluation.metrics import (
    bootstrap_interval,
    compute_metrics,
    describe_too_few_prompts,
    select_best_checkpoint,
)
from infer.evaluation.results import Evaluation, MethodResult, PromptResult
from infer.evaluation.tables import (
    build_significance_legend,
    format_evaluation,
    format_findings,
    list_measurement_notes,
    restrict_to_kind,
    significance_mark,
)

PROMPT_COUNT = 24


def make_results(rounds, seconds, tokens=100, kinds=("any",), loop_tokens=0) -> list[PromptResult]:
    """Return results of prompts with `tokens` tokens each. rounds, seconds: one entry for each
    prompt; loop_tokens: of the first prompt."""
    results = []
    for i, (prompt_rounds, prompt_seconds) in enumerate(zip(rounds, seconds, strict=True)):
        kind = kinds[i % len(kinds)]
        loop = loop_tokens if i == 0 else 0
        result = PromptResult(i, kind, tokens, int(prompt_rounds), list(prompt_seconds), loop)
        results.append(result)
    return results


def one_measurement_each(seconds) -> list[list[float]]:
    return [[each] for each in seconds]


def noisy_seconds(scale: float, spread: float, seed: int) -> list[list[float]]:
    noise = np.random.default_rng(seed).standard_normal(PROMPT_COUNT)
    return one_measurement_each(scale * np.exp(spread * noise))


def make_method(
    name: str, budget: int, results: list[PromptResult], baseline: list[PromptResult]
) -> MethodResult:
    metrics = compute_metrics(results, baseline)
    return MethodResult(
        name=name,
        budget=budget,
        tau_prompt_mean=metrics.tau,
        rounds=sum(result.rounds for result in results),
        tokens=sum(result.tokens for result in results),
        seconds=1.0,
        tokens_per_second=1.0,
        histogram=[],
        identical=True,
        prompts=results,
        **vars(metrics),
    )


def make_evaluation(methods: list[MethodResult], step: int = 1, **fields) -> Evaluation:
    defaults = {
        "target": "t",
        "device": "CPU",
        "dtype": "float32",
        "max_new_tokens": 100,
        "temperature": 0.0,
    }
    return Evaluation(
        prompts=PROMPT_COUNT, methods=methods, samples=[], step=step, **defaults | fields
    )


BASELINE_RESULTS = make_results([99] * PROMPT_COUNT, noisy_seconds(1.0, 0.02, 0))
ROUNDS_FOR_TAU_3 = [33] * PROMPT_COUNT


def test_a_speedup_is_the_median_over_prompts():
    """Half of the prompts were decoded while the machine was three times as slow, for all methods
    alike. Those would dominate sums; a single stall counts as one prompt."""
    baseline_seconds = np.where(np.arange(PROMPT_COUNT) % 2, 3.0, 1.0)
    seconds = baseline_seconds / 1.5
    seconds[0] *= 50
    metrics = compute_metrics(
        make_results(ROUNDS_FOR_TAU_3, one_measurement_each(seconds)),
        make_results([99] * PROMPT_COUNT, one_measurement_each(baseline_seconds)),
    )
    assert metrics.speedup == pytest.approx(1.5)
    assert metrics.speedup_interval == pytest.approx([1.5, 1.5])
    assert metrics.tau == 3.0


def test_of_several_measurements_the_fastest_counts():
    results = make_results(ROUNDS_FOR_TAU_3, [[9.0, 0.5]] * PROMPT_COUNT)
    baseline = make_results([99] * PROMPT_COUNT, [[1.0, 7.0]] * PROMPT_COUNT)
    assert compute_metrics(results, baseline).speedup == pytest.approx(2.0)


def test_the_interval_covers_the_true_value_as_often_as_it_should():
    """300 evaluations of 32 prompts whose true median is known."""
    generator = np.random.default_rng(3)
    covered = 0
    for _ in range(300):
        values = np.exp(0.3 * generator.standard_normal(32))  # the true median is 1
        low, high = bootstrap_interval(
            lambda indices, values=values: np.median(values[indices], axis=-1), 32
        )
        covered += low <= 1 <= high
    assert 0.90 < covered / 300 <= 1

    first = bootstrap_interval(lambda indices: indices.mean(-1), 9)
    assert first == bootstrap_interval(lambda indices: indices.mean(-1), 9)
    assert bootstrap_interval(lambda indices: indices.mean(-1), 4) is None


@pytest.mark.parametrize(
    ("scale", "spread", "significance", "mark"),
    [(0.5, 0.02, "faster", ""), (1.5, 0.02, "slower", ""), (0.98, 0.3, "undecided", "~")],
)
def test_speedups_that_are_not_significant_are_marked(scale, spread, significance, mark):
    results = make_results(ROUNDS_FOR_TAU_3, noisy_seconds(scale, spread, 5))
    method = make_method("ddtree", 8, results, BASELINE_RESULTS)
    baseline = make_method("plain", 0, BASELINE_RESULTS, BASELINE_RESULTS)
    evaluation = make_evaluation([baseline, method])
    assert (method.significance, significance_mark(method)) == (significance, mark)

    lines = format_evaluation(evaluation).splitlines()
    assert lines[3].split("|")[-3].endswith("]" + mark + " ")
    legend = build_significance_legend(evaluation.methods)
    assert len(legend) == bool(mark)
    assert all(line in lines for line in legend)

    headline = format_findings(evaluation)
    assert ("not significant" in headline) == (significance == "undecided")
    assert ("(slower)" in headline) == (significance == "slower")
    assert "times as fast" in headline


def test_few_prompts_are_never_significant():
    baseline = BASELINE_RESULTS[:4]
    results = make_results(ROUNDS_FOR_TAU_3[:4], noisy_seconds(0.5, 0.01, 2)[:4])
    method = make_method("chain", 7, results, baseline)
    assert method.significance == "undecided"
    from_earlier_version = replace(method, prompts=None)
    assert (from_earlier_version.significance, significance_mark(from_earlier_version)) == ("", "")


def test_the_best_method_has_the_highest_lower_bound():
    baseline = make_method("plain", 0, BASELINE_RESULTS, BASELINE_RESULTS)
    precise_results = make_results(ROUNDS_FOR_TAU_3, noisy_seconds(0.5, 0.02, 1))
    precise = make_method("ddtree", 8, precise_results, BASELINE_RESULTS)
    noisy_results = make_results(ROUNDS_FOR_TAU_3, noisy_seconds(0.47, 0.5, 8))
    noisy = make_method("ddtree", 16, noisy_results, BASELINE_RESULTS)
    assert noisy.speedup_interval[0] < precise.speedup_interval[0] < noisy.speedup_interval[1]
    assert make_evaluation([baseline, precise, noisy]).best_drafter_method is precise


def test_speedups_refer_to_the_fastest_baseline():
    fast = make_results([99] * PROMPT_COUNT, noisy_seconds(0.8, 0.02, 4))
    baselines = [
        make_method("plain", 0, BASELINE_RESULTS, fast),
        make_method("generate", 0, fast, fast),
    ]
    chain_results = make_results(ROUNDS_FOR_TAU_3, noisy_seconds(0.6, 0.02, 6))
    chain = make_method("chain", 7, chain_results, fast)
    evaluation = make_evaluation([*baselines, chain], baseline="generate")
    assert evaluation.fastest_baseline is evaluation.methods[1]
    assert evaluation.fastest_baseline.speedup == 1
    assert baselines[0].speedup < 1
    assert evaluation.drafting_methods == evaluation.methods[2:]
    assert "as fast as plain decoding by transformers" in format_findings(evaluation)


def test_each_kind_of_prompts_has_its_metrics():
    kinds = ("heads", "bodies")
    rounds = [50 if i % 2 else 25 for i in range(PROMPT_COUNT)]
    baseline = make_results([99] * PROMPT_COUNT, [[1.0]] * PROMPT_COUNT, kinds=kinds)
    results = make_results(rounds, [[0.5]] * PROMPT_COUNT, kinds=kinds)
    evaluation = make_evaluation(
        [make_method("plain", 0, baseline, baseline), make_method("chain", 7, results, baseline)]
    )
    heads = restrict_to_kind(evaluation.methods[1], evaluation.fastest_baseline, "heads")
    assert heads.tau == pytest.approx(99 / 25)

    other = replace(evaluation, prompt_set_name="elsewhere")
    lines = format_evaluation(replace(evaluation, other_evaluations=[other])).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[5:9]]
    assert rows[0] == ["τ, speedup", "heads", "bodies", "elsewhere"]
    assert rows[2][0] == "plain"
    assert rows[3] == ["chain", "3.96 2.00x", "1.98 2.00x", "2.64 2.00x"]


def test_the_share_of_loops_is_reported():
    results = make_results([99] * PROMPT_COUNT, [[1.0]] * PROMPT_COUNT, loop_tokens=48)
    baseline = make_method("plain", 0, results, BASELINE_RESULTS)
    note = (
        "held-out prompts: 1 of 24 outputs (4%) ended in repetitions, which are 2% of 2400 tokens"
    )
    assert format_evaluation(make_evaluation([baseline, baseline])).endswith(note)
    assert list_measurement_notes(make_evaluation([replace(baseline, prompts=None)])) == []


def test_the_best_checkpoint_is_the_last_unless_another_is_significantly_better():
    """Compared on the prompts that both decoded: evaluations during training decode fewer."""

    def evaluate_step(step: int, rounds, stride: int = 1) -> Evaluation:
        results = make_results(rounds, [[0.5]] * PROMPT_COUNT)[::stride]
        baseline = BASELINE_RESULTS[::stride]
        methods = [
            make_method("plain", 0, baseline, baseline),
            make_method("chain", 7, results, baseline),
        ]
        return make_evaluation(methods, step)

    generator = np.random.default_rng(0)
    rounds = generator.integers(20, 50, PROMPT_COUNT)
    last = evaluate_step(9, rounds)

    slightly_worse = evaluate_step(3, rounds + 1)
    slightly_better = evaluate_step(6, rounds - generator.integers(0, 2, PROMPT_COUNT))
    assert select_best_checkpoint([slightly_worse, slightly_better, last]).step in (6, 9)
    noisy = evaluate_step(3, rounds + generator.integers(-5, 5, PROMPT_COUNT))
    assert select_best_checkpoint([noisy, last]) is last
    much_better = evaluate_step(3, rounds - 8, stride=3)
    assert select_best_checkpoint([much_better, last]).step == 3
    much_worse = evaluate_step(3, rounds + 8, stride=3)
    assert select_best_checkpoint([much_worse, last]) is last
    assert describe_too_few_prompts([evaluate_step(3, rounds - 8), last]) is None
    assert describe_too_few_prompts([last]) is None


@pytest.mark.parametrize("shared, best_step", [(0, 9), (7, 9), (8, 3)])
def test_few_shared_prompts_choose_no_checkpoint(shared, best_step):
    """The earlier checkpoint is much better on all prompts that it shares with the last one, and
    has one more prompt."""
    rounds = np.array([40] * 12)
    last_results = make_results(rounds, [[0.5]] * 12)
    earlier_results = make_results(rounds - 10, [[0.5]] * 12)[:shared]
    earlier_results.append(replace(last_results[0], number=99, rounds=11))
    evaluations = [
        make_evaluation([make_method("chain", 7, results, results)] * 2, step)
        for step, results in ((3, earlier_results), (9, last_results))
    ]
    assert select_best_checkpoint(evaluations).step == best_step
    sentence = describe_too_few_prompts(evaluations)
    if best_step == 9:
        assert f"share {shared} of the 8 prompts" in sentence
    else:
        assert sentence is None

    from_earlier_version = [
        replace(each, methods=[replace(method, prompts=None) for method in each.methods])
        for each in evaluations
    ]
    assert select_best_checkpoint(from_earlier_version) is from_earlier_version[1]


def test_ngrams_do_not_choose_a_checkpoint():
    """With n-grams the earlier checkpoint looks better; the drafter alone is not."""
    chain_results = make_results([40] * PROMPT_COUNT, [[0.5]] * PROMPT_COUNT)
    chain = make_method("chain", 7, chain_results, BASELINE_RESULTS)
    evaluations = []
    for step, rounds in ((3, 20), (9, 35)):
        results = make_results([rounds] * PROMPT_COUNT, [[0.5]] * PROMPT_COUNT)
        with_ngrams = make_method("ddtree+ngrams", 8, results, BASELINE_RESULTS)
        evaluations.append(make_evaluation([chain, chain, with_ngrams], step))
    assert select_best_checkpoint(evaluations) is evaluations[1]

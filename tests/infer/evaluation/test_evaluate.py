"""What an evaluation decodes: prompt sets, variants, seeds and time limits."""

from dataclasses import replace
from itertools import count

import pytest
import torch

from data.prompts import Prompt
from data.suites import LoadedQuestionSet
from infer import generate
from infer.config import DecodeOptions, DrafterConfig, EvaluationConfig
from infer.drafters.build import create_drafter
from infer.drafters.lookup import PromptLookup
from infer.engine.sampling import derive_seed
from infer.evaluation import evaluate, measurement
from infer.evaluation.evaluate import (
    build_prompt_sets,
    measure_prompt_sets,
    summarise_evaluation,
    summarise_method,
)
from infer.evaluation.measurement import (
    VariantMeasurement,
    list_variants,
    measure_variants,
    merge_measurements,
)
from infer.evaluation.suite import answer_questions
from infer.evaluation.tables import format_evaluation
from infer.ngrams.count import count_ngrams

EQUAL_PROMPTS = [[7, 8, 9, 10]] * 6


def output_ids(measured: VariantMeasurement) -> list[list[int]]:
    return [sequence.ids for sequence in measured.sequences]


def variant_names(measurements: list[VariantMeasurement]) -> list[str]:
    return [measured.variant.name for measured in measurements]


def test_each_sampled_prompt_has_its_own_noise_on_any_process(make_tiny):
    """One prompt six times gives six different outputs, for every method the same ones, whichever
    prompts a process has."""
    target, drafter = make_tiny()
    config = EvaluationConfig(max_new_tokens=6, budgets=[7], temperature=1.0)
    variants = list_variants(drafter, config)
    measurements = measure_variants(target, drafter, variants, EQUAL_PROMPTS)
    expected = output_ids(measurements[0])
    assert len({tuple(ids) for ids in expected}) == 6
    for measured in measurements:
        if measured.variant.name != "generate":
            assert output_ids(measured) == expected

    options = DecodeOptions(max_new_tokens=6, temperature=1.0, method="plain", max_num_seqs=1)
    for number, ids in enumerate(expected):
        seeded = replace(options, seed=derive_seed(0, number))
        assert generate(target, None, EQUAL_PROMPTS[0], options=seeded).ids == ids

    [second_half] = measure_variants(
        target, drafter, variants[:1], EQUAL_PROMPTS[1::2], prompt_numbers=range(6)[1::2]
    )
    assert output_ids(second_half) == expected[1::2]


def test_methods_with_ngrams(make_tiny, tmp_path):
    """With an n-gram file beside the weights: DDTree with it and without, and n-grams without the
    drafter."""
    target, drafter = make_tiny(block_size=6)
    text_config = EvaluationConfig(max_new_tokens=4, budgets=[3], ngrams="text")
    text_variants = list_variants(drafter, text_config)
    assert [variant.name for variant in text_variants] == [
        "plain",
        "generate",
        "chain",
        "ddtree",
        "ddtree+ngrams",
        "n-grams alone",
    ]
    continuities = [variant.options.ngrams for variant in text_variants]
    assert continuities[-3:] == ["none", "text", "text"]

    documents = [[7, 8, 9, 10, 11, 12, 13, 7, 8, 9]]
    vocabulary_size = len(target.head_weight)
    ngrams = count_ngrams(documents, vocabulary_size, 3, tmp_path / "ngrams", "0" * 64)
    drafter.ngram_path = ngrams.path
    config = EvaluationConfig(max_new_tokens=12, budgets=[2, 8, 4])
    variants = list_variants(drafter, config)
    assert [(variant.name, variant.budget) for variant in variants[2:]] == [
        ("chain", 5),
        ("ddtree", 2),
        ("ddtree", 8),
        ("ddtree", 4),
        ("ddtree+ngrams", 4),
        ("n-grams alone", 4),
    ]
    without_ngrams = list_variants(drafter, replace(config, ngrams="none"))
    assert not any("n-grams" in variant.name for variant in without_ngrams)

    prompt = EQUAL_PROMPTS[0]
    measurements = measure_variants(target, drafter, variants, [prompt])
    commits = {
        (measured.variant.name, measured.variant.budget): measured.sequences[0].commits
        for measured in measurements
    }
    options = {"max_new_tokens": 12, "budget": 4}
    assert commits["ddtree+ngrams", 4] == generate(target, drafter, prompt, **options).commits
    plain_tree = generate(target, drafter, prompt, ngrams="none", **options)
    assert commits["ddtree", 4] == plain_tree.commits
    lookup = PromptLookup(6, drafter.ngram_path)
    assert commits["n-grams alone", 4] == generate(target, lookup, prompt, **options).commits
    assert all(output_ids(measured) == output_ids(measurements[0]) for measured in measurements)


def test_disturbed_prompts_are_measured_again(make_tiny, monkeypatch):
    """The machine stalls for ten seconds during one prompt of one method: the speed is as without
    the stall."""
    target, drafter = make_tiny()
    # Each sequence reads the clock twice. Readings 0 to 3 are those of two warm-ups; the stall is
    # during the fourth sequence after them.
    readings = count()
    stall_reading = 2 * (2 + 3)

    def stalling_clock() -> float:
        reading = next(readings)
        return reading + (10.0 if reading > stall_reading else 0.0)

    open_engine = measurement.open_engine
    monkeypatch.setattr(measurement, "synchronised_clock", lambda device: stalling_clock)
    # The engine gets another clock, so that it does not advance this one.
    monkeypatch.setattr(measurement, "open_engine", lambda *args: open_engine(*args[:-1]))
    config = EvaluationConfig(max_new_tokens=4, budgets=[2], ngrams="none")
    plain, _, chain, *_ = list_variants(drafter, config)
    measurements = measure_variants(target, drafter, [plain, chain], EQUAL_PROMPTS[:4])
    assert sorted(measured.remeasured_prompts for measured in measurements) == [0, 1]
    for measured in measurements:
        assert all(result.seconds == [1.0] for result in measured.prompt_results)

    baseline = measurements[0]
    methods = [summarise_method(measured, baseline, baseline) for measured in measurements]
    speeds = [(method.tokens_per_second, method.speedup) for method in methods]
    assert speeds == [(4.0, 1.0), (4.0, 1.0)]
    assert [method.remeasured_prompts for method in methods].count(None) == 1


@pytest.mark.parametrize("minutes", [None, 1e-9])
def test_an_evaluation_respects_its_time_limit(make_tiny, minutes):
    """A very short limit leaves one prompt of the first prompt set, and the note names what was
    left out."""
    target, drafter = make_tiny()
    config = EvaluationConfig(
        max_new_tokens=4, budgets=[2], sampling_temperature=None, max_minutes=minutes
    )
    prompts = []
    for ids in EQUAL_PROMPTS[:3]:
        prompts += [Prompt(ids, "any", None), Prompt(ids, "any", "outside")]
    evaluation = evaluate.evaluate(target, drafter, prompts, config)
    notes = [(each.prompts, each.time_limit_note) for each in evaluation.with_others]
    if minutes is None:
        assert notes == [(3, None)] * 2
    else:
        note = "evaluation.max_minutes=1e-09 had time for 1 of 3 prompts, and no time for outside"
        assert notes == [(1, note)]
        assert f"\n{note}" in format_evaluation(evaluation)


def test_a_slow_transformers_baseline_is_left_out_of_other_prompt_sets(make_tiny, monkeypatch):
    """If it is slower on the first prompt set in one of the processes, it is left out by all."""
    target, drafter = make_tiny()
    prompts = [
        Prompt(EQUAL_PROMPTS[0], "starts", group) for group in (None, None, "outside", "outside")
    ]
    config = EvaluationConfig(max_new_tokens=4, budgets=[2], sampling_temperature=None)
    prompt_sets = build_prompt_sets(prompts, config)
    monkeypatch.setattr(evaluate, "find_fastest_baseline", lambda measurements: measurements[1])
    transformers_fastest = measure_prompt_sets(target, drafter, prompt_sets)
    monkeypatch.setattr(evaluate, "find_fastest_baseline", lambda measurements: measurements[0])
    ours_fastest = measure_prompt_sets(target, drafter, prompt_sets)

    drafting = ["chain", "ddtree", "n-grams alone"]
    with_baseline = ["plain", "generate", *drafting]
    without_baseline = ["plain", *drafting]
    assert list(map(variant_names, transformers_fastest)) == [with_baseline, with_baseline]
    assert list(map(variant_names, ours_fastest)) == [with_baseline, without_baseline]

    merged = [
        merge_measurements(shares)
        for shares in zip(transformers_fastest, ours_fastest, strict=True)
    ]
    assert variant_names(merged[1]) == without_baseline
    assert len(merged[1][0].sequences) == 4
    evaluation = summarise_evaluation(target, drafter, prompt_sets, ours_fastest)
    other = evaluation.other_evaluations[0]
    assert (other.prompt_set_name, other.prompts, other.baseline) == ("outside", 2, "plain")


def test_each_turn_of_a_suite_has_its_own_noise(shallow_target):
    """Two chats of two equal turns give four answers with four seeds."""
    drafter = create_drafter(DrafterConfig(layers=1, block_size=4), shallow_target)
    drafter.initialize(shallow_target, torch.Generator().manual_seed(0), warm_start=True)
    turn = [{"role": "user", "content": "x = "}]
    config = EvaluationConfig(max_new_tokens=6, budgets=[3], temperature=1.0)
    questions = LoadedQuestionSet("", "", [[turn, turn], [turn, turn]])
    variants = list_variants(drafter, config)
    measurements, left_out = answer_questions(
        shallow_target, drafter, questions, False, variants, lambda done, total: None
    )
    assert left_out == 0
    seeds = [sequence.options.seed for sequence in measurements[0].sequences]
    assert sorted(seeds) == sorted(derive_seed(0, number) for number in range(4))

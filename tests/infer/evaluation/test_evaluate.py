"""What an evaluation decodes."""

from dataclasses import replace
from itertools import count

import pytest
import torch

from data.prompts import Prompt
from data.suites import Questions
from infer import generate
from infer.config import DecodeOptions, EvaluationConfig
from infer.drafters.lookup import Lookup
from infer.engine.sampling import derived_seed
from infer.evaluation import evaluate, measuring
from infer.evaluation.evaluate import decode_all, parts_of, summarise
from infer.evaluation.measuring import join, measure, variants
from infer.evaluation.suite import ask
from infer.evaluation.tables import table
from infer.ngrams.count import count_ngrams

PROMPTS = [[7, 8, 9, 10]] * 6


def ids(measured) -> list[list[int]]:
    return [text.ids for text in measured.texts]


def test_sampled_prompts_have_noise_of_their_own_on_any_process(make_tiny):
    """Six times one prompt: six texts, for every method the same ones, whichever prompts a process
    has."""
    target, drafter = make_tiny()
    config = EvaluationConfig(max_new_tokens=6, budgets=[7], temperature=1.0)
    every = measure(target, drafter, variants(drafter, config), PROMPTS)
    assert len({tuple(text) for text in ids(every[0])}) == 6
    assert all(ids(one) == ids(every[0]) for one in every if one.variant.name != "generate")
    options = DecodeOptions(max_new_tokens=6, temperature=1.0, method="plain", max_num_seqs=1)
    for number, text in enumerate(ids(every[0])):
        assert generate(target, None, PROMPTS[0], options=options_of(options, number)).ids == text
    second = measure(
        target, drafter, variants(drafter, config)[:1], PROMPTS[1::2], numbers=range(6)[1::2]
    )
    assert ids(second[0]) == ids(every[0])[1::2]


def options_of(options: DecodeOptions, number: int) -> DecodeOptions:
    return DecodeOptions(**(vars(options) | {"seed": derived_seed(0, number)}))


def test_ngrams_are_methods_of_their_own(make_tiny, tmp_path):
    """With a file beside the weights: DDTree without it and with it, and the n-grams in the
    drafter's place."""
    target, drafter = make_tiny(block_size=6)
    text = variants(drafter, EvaluationConfig(max_new_tokens=4, budgets=[3], ngrams="text"))
    assert [one.name for one in text] == [
        "plain",
        "generate",
        "chain",
        "ddtree",
        "ddtree+ngrams",
        "n-grams alone",
    ]
    assert [one.options.ngrams for one in text][-3:] == ["none", "text", "text"]
    texts = [[7, 8, 9, 10, 11, 12, 13, 7, 8, 9]]
    drafter.ngrams = count_ngrams(
        texts, len(target.head_weight), 3, tmp_path / "ngrams", "0" * 64
    ).path
    config = EvaluationConfig(max_new_tokens=12, budgets=[2, 8, 4])
    every = variants(drafter, config)
    assert [(one.name, one.budget) for one in every[2:]] == [
        *[("chain", 5), ("ddtree", 2), ("ddtree", 8), ("ddtree", 4)],
        *[("ddtree+ngrams", 4), ("n-grams alone", 4)],
    ]
    assert "n-grams" not in " ".join(
        one.name for one in variants(drafter, replace(config, ngrams="none"))
    )
    measured = measure(target, drafter, every, PROMPTS[:1])
    rounds = {(one.variant.name, one.variant.budget): one.texts[0].commits for one in measured}
    own = [
        generate(target, drafter, PROMPTS[0], max_new_tokens=12, budget=4, ngrams=file)
        for file in (None, "none")
    ]
    assert [rounds["ddtree+ngrams", 4], rounds["ddtree", 4]] == [text.commits for text in own]
    alone = Lookup(6, drafter.ngrams)
    assert (
        rounds["n-grams alone", 4]
        == generate(target, alone, PROMPTS[0], max_new_tokens=12, budget=4).commits
    )
    assert all(ids(one) == ids(measured[0]) for one in measured)


def test_what_was_disturbed_is_measured_again(make_tiny, monkeypatch):
    """The machine stands still for ten seconds during one prompt of one method: its rate is as
    without."""
    target, drafter = make_tiny()
    readings = count()  # two a text, the first at 0: of two warm-ups, then of the methods in turn

    def slow_clock() -> float:
        reading = next(readings)
        return reading + 10.0 * (
            reading > 2 * (2 + 3)
        )  # the stall: behind the first reading of the fourth text

    opened = measuring.open_engine
    monkeypatch.setattr(measuring, "synchronised_clock", lambda device: slow_clock)
    monkeypatch.setattr(measuring, "open_engine", lambda *args: opened(*args[:-1]))
    plain, _, chain, *_ = variants(
        drafter, EvaluationConfig(max_new_tokens=4, budgets=[2], ngrams="none")
    )
    measured = measure(target, drafter, [plain, chain], PROMPTS[:4])
    assert sorted(one.again for one in measured) == [0, 1]
    assert all(prompt.seconds == [1.0] for one in measured for prompt in one.prompts)
    rows = [evaluate.method_result(one, measured[0], measured[0]) for one in measured]
    assert [(row.tokens_per_second, row.speedup) for row in rows] == [(4.0, 1.0), (4.0, 1.0)]
    assert [row.again for row in rows].count(None) == 1


@pytest.mark.parametrize("minutes", [None, 1e-9])
def test_an_evaluation_keeps_to_its_minutes(make_tiny, minutes):
    """A limit that has room for little leaves one prompt of the first part, and names what is left
    out."""
    target, drafter = make_tiny()
    config = EvaluationConfig(
        max_new_tokens=4, budgets=[2], sampling_temperature=None, max_minutes=minutes
    )
    prompts = [Prompt(ids, "any", beside) for ids in PROMPTS[:3] for beside in (None, "outside")]
    result = evaluate.evaluate(target, drafter, prompts, config)
    evaluations = [(one.prompts, one.cut) for one in (result, *result.beside)]
    if minutes is None:
        assert evaluations == [(3, None)] * 2
    else:
        cut = "evaluation.max_minutes=1e-09 had time for 1 of 3 prompts, and none for outside"
        assert evaluations == [(1, cut)] and f"\n{cut}" in table(result)


def test_slow_plain_decoders_are_left_out_beside_an_evaluation(make_tiny, monkeypatch):
    """Transformers' plain decoding, where it is slower on the first part, is left out of the
    others, by all processes where one of them found it so."""
    target, drafter = make_tiny()
    prompts = [
        Prompt(PROMPTS[0], "starts", beside) for beside in (None, None, "outside", "outside")
    ]
    parts = parts_of(
        prompts, EvaluationConfig(max_new_tokens=4, budgets=[2], sampling_temperature=None)
    )
    monkeypatch.setattr(evaluate, "fastest_plain", lambda measured: measured[1])
    patient = decode_all(target, drafter, parts)
    monkeypatch.setattr(evaluate, "fastest_plain", lambda measured: measured[0])
    hasty = decode_all(target, drafter, parts)
    names = [[[one.variant.name for one in part] for part in every] for every in (patient, hasty)]
    rows = ["chain", "ddtree", "n-grams alone"]
    assert names[0] == [["plain", "generate", *rows]] * 2
    assert names[1] == [["plain", "generate", *rows], ["plain", *rows]]
    joined = [join(of_part) for of_part in zip(patient, hasty, strict=True)]
    assert [one.variant.name for one in joined[1]] == names[1][1] and len(joined[1][0].texts) == 4
    column = summarise(target, drafter, parts, hasty).beside[0]
    assert (column.what, column.prompts, column.baseline) == ("outside", 2, "plain")


def test_a_suites_turns_have_noise_of_their_own(shallow_target, make_tiny):
    """Two chats of two equal turns: four answers, none the beginning of what another one's noise
    gives."""
    from infer.config import DrafterConfig
    from infer.drafters.base import new_drafter

    drafter = new_drafter(DrafterConfig(layers=1, block_size=4), shallow_target)
    drafter.initialize(shallow_target, torch.Generator().manual_seed(0), warm=True)
    turn = [{"role": "user", "content": "x = "}]
    config = EvaluationConfig(max_new_tokens=6, budgets=[3], temperature=1.0)
    questions = Questions("", "", [[turn, turn], [turn, turn]])
    methods = variants(drafter, config)
    measured, left_out = ask(shallow_target, drafter, questions, False, methods, lambda *_: None)
    seeds = [text.options.seed for text in measured[0].texts]
    assert left_out == 0 and sorted(seeds) == sorted(derived_seed(0, number) for number in range(4))

"""What an evaluation decodes."""

from dataclasses import replace

import torch

from data.prompts import Prompt
from infer import generate
from infer.config import DecodeOptions, EvaluationConfig
from infer.engine.sampling import derived_seed
from infer.evaluation import evaluate
from infer.evaluation.evaluate import Variant, decode_all, join, measure, parts_of, summarise, variants
from infer.evaluation.masked import evaluate_masked
from infer.evaluation.suite import ask

PROMPTS = [[7, 8, 9, 10]] * 6


def ids(measured) -> list[list[int]]:
    return [text.ids for text in measured.texts]


def test_sampled_prompts_have_noise_of_their_own_in_any_batch_and_on_any_process(make_tiny):
    """Six times one prompt: six texts, for every method the same ones, whichever prompts a process has."""
    target, drafter = make_tiny()
    config = EvaluationConfig(max_new_tokens=10, budgets=[7], temperature=1.0, seed=5, rows=4)
    every = measure(target, drafter, variants(target, drafter, config), PROMPTS)
    assert len({tuple(text) for text in ids(every[0])}) == 6
    assert all(ids(one) == ids(every[0]) for one in every if one.variant.name != "generate")
    options = DecodeOptions(max_new_tokens=10, temperature=1.0, method="plain", rows=1)
    for number, text in enumerate(ids(every[0])):
        assert generate(target, None, PROMPTS[0], options=options_of(options, number)).ids == text
    second = measure(target, drafter, variants(target, drafter, config)[:1], PROMPTS[1::2], numbers=range(6)[1::2])
    assert ids(second[0]) == ids(every[0])[1::2]


def options_of(options: DecodeOptions, number: int) -> DecodeOptions:
    return DecodeOptions(**(vars(options) | {"seed": derived_seed(5, number)}))


def test_a_texts_own_ngrams_need_no_file(make_tiny):
    target, drafter = make_tiny()
    config = EvaluationConfig(max_new_tokens=4, budgets=[3], continuity="text")
    names = [one.name for one in variants(target, drafter, config)]
    assert names == ["plain", "generate", "chain", "ddtree", "ddtree+continuity"]
    assert [one.options.continuity for one in variants(target, drafter, config)][-2:] == ["none", "text"]


def test_another_drafter_and_slow_plain_decoders_beside_an_evaluation(make_tiny, monkeypatch):
    """The other drafter decodes every second prompt; what is too slow on the first part is left out of the others, by
    all processes where one of them found it so."""
    target, drafter = make_tiny()
    other = make_tiny(seed=1)[1]
    prompts = [Prompt(ids, "starts") for ids in PROMPTS[:4]]
    parts = parts_of(prompts, EvaluationConfig(max_new_tokens=4, budgets=[2], sampled=None), other)
    monkeypatch.setattr(evaluate, "SLOW", 1e9)
    patient = decode_all(target, drafter, parts)
    monkeypatch.setattr(evaluate, "SLOW", 0.0)
    hasty = decode_all(target, drafter, parts)
    names = [[[one.variant.name for one in part] for part in every] for every in (patient, hasty)]
    assert names[0] == [["plain", "generate", "chain", "ddtree"]] * 2
    assert names[1] == [["plain", "generate", "chain", "ddtree"], ["plain", "chain", "ddtree"]]
    own = generate(target, other, PROMPTS[0], options=replace(patient[1][2].variant.options, seed=0))
    assert patient[1][2].numbers == [0, 2] and patient[1][2].texts[0].stats.rounds == own.stats.rounds
    joined = [join(of_part) for of_part in zip(patient, hasty, strict=True)]
    assert [one.variant.name for one in joined[1]] == names[1][1] and len(joined[1][0].texts) == 4
    column = summarise(target, drafter, parts, hasty).beside[0]
    assert column.what == evaluate.OTHER_DRAFTER and column.prompts == 2 and column.baseline == "plain"


def test_a_suites_turns_have_noise_of_their_own(shallow_target, make_tiny):
    """Two chats of two equal turns: four answers, none the beginning of what another one's noise gives."""
    from infer.config import DrafterConfig
    from infer.drafters.base import new_drafter

    drafter = new_drafter(DrafterConfig(layers=1, block_size=4), shallow_target)
    drafter.initialize(shallow_target, torch.Generator().manual_seed(0), warm=True)
    turn = [{"role": "user", "content": "x = "}]
    config = EvaluationConfig(max_new_tokens=6, budgets=[3], temperature=1.0, seed=5, rows=2)
    measured, left_out = ask(shallow_target, drafter, [[turn, turn], [turn, turn]], False, config, lambda *_: None)
    seeds = [text.options.seed for text in measured[0].texts]
    assert left_out == 0 and sorted(seeds) == sorted(derived_seed(5, number) for number in range(4))


def test_masked_prompts_have_noise_of_their_own(make_masked):
    model = make_masked()
    options = DecodeOptions(
        method="ssd", max_new_tokens=8, block_length=4, temperature=1.0, seed=5, rows=3, ignore_eos=True
    )
    measured = measure(
        model, None, [Variant("steps", 1, DecodeOptions(**(vars(options) | {"method": "steps"})))], PROMPTS
    )
    assert len({tuple(text) for text in ids(measured[0])}) > 3
    result = evaluate_masked(model, PROMPTS, options, lengths=(1, 2), orders=("greedy",), nodes=2)
    assert all(method.identical for method in result.methods)

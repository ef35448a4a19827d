"""What an evaluation decodes."""

import torch

from infer import generate
from infer.config import DecodeOptions, EvaluationConfig
from infer.engine.sampling import derived_seed
from infer.evaluation.evaluate import Variant, measure, variants
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


def test_a_suites_turns_have_noise_of_their_own(embedded, make_tiny):
    """Two chats of two equal turns: four answers, none the beginning of what another one's noise gives."""
    from infer.config import DrafterConfig
    from infer.drafters.base import new_drafter

    drafter = new_drafter(DrafterConfig(layers=1, block_size=4), embedded)
    drafter.initialize(embedded, torch.Generator().manual_seed(0), warm=True)
    turn = [{"role": "user", "content": "x = "}]
    config = EvaluationConfig(max_new_tokens=6, budgets=[3], temperature=1.0, seed=5, rows=2)
    measured, left_out = ask(embedded, drafter, [[turn, turn], [turn, turn]], False, config, lambda *_: None)
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

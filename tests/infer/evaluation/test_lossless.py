"""The first difference from baseline decoding is found, and ties are told from defects."""

import random
from dataclasses import replace

import pytest
import torch

from infer.api import decode_prompts
from infer.config import DecodeOptions, SamplingOptions
from infer.evaluation.lossless import classify_difference

PROMPT_IDS = [[5, 6, 7], list(range(40)) + list(range(40)), [9]]
SAMPLING_OPTIONS = [
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.0, "top_p": 0.7, "top_k": 20, "min_p": 0.02, "seed": 4},
    {"repetition_penalty": 1.4},
]


@pytest.mark.parametrize("options", SAMPLING_OPTIONS)
def test_any_other_token_is_a_defect(make_tiny, options):
    target, drafter = make_tiny()
    generator = random.Random(0)
    sequences = decode_prompts(
        target, drafter, PROMPT_IDS, DecodeOptions(20, method="ddtree", budget=8, **options)
    )
    baseline = decode_prompts(
        target, None, PROMPT_IDS, DecodeOptions(20, method="plain", **options)
    )
    for sequence, expected in zip(sequences, baseline, strict=True):
        prompt = sequence.prompt
        options = sequence.options
        assert classify_difference(target, prompt, sequence.ids, expected.ids, options) is None
        index = generator.randrange(len(sequence.ids))
        altered = list(sequence.ids)
        altered[index] = (altered[index] + 1 + generator.randrange(95)) % 97
        assert classify_difference(target, prompt, altered, expected.ids, options) == "defect"


def test_an_output_of_another_length_is_a_defect(make_tiny):
    target, _ = make_tiny()
    (text,) = decode_prompts(target, None, [[5, 6]], DecodeOptions(8, method="plain"))
    assert classify_difference(target, [5, 6], text.ids[:5], text.ids, text.options) == "defect"
    assert classify_difference(target, [5, 6], text.ids, text.ids, text.options) is None


def test_two_tokens_of_the_same_logit_are_a_tie_and_a_wider_gap_is_none(make_tiny):
    """A copy of the chosen token's row in the head makes another token just as good; a little
    smaller, it is worse."""
    target, _ = make_tiny(seed=1)
    (text,) = decode_prompts(target, None, [[5, 6]], DecodeOptions(1, method="plain"))
    twin = 90
    assert text.ids != [twin]
    with torch.no_grad():
        target.head_weight[twin] = target.head_weight[text.ids[0]]
    assert classify_difference(target, [5, 6], [twin], text.ids, text.options) == "tie"
    # the noise of the two is not the same: one of them is likelier to be drawn
    assert (
        classify_difference(
            target, [5, 6], [twin], text.ids, replace(text.options, temperature=0.8)
        )
        == "defect"
    )
    with torch.no_grad():
        target.head_weight[twin] *= 0.999
    assert classify_difference(target, [5, 6], [twin], text.ids, text.options) == "defect"


def test_a_token_at_the_edge_of_top_p_is_a_tie():
    """With probabilities of 0.6 and 0.4, top-p 0.6 admits the second token only if the first is
    rounded down."""
    from infer.evaluation.lossless import TargetTokenChooser

    logits = torch.tensor([0.6, 0.4]).log()[None, None]
    for top_p, possible in ((0.6, True), (0.59, False)):
        choices = (
            TargetTokenChooser(logits, 0, [], SamplingOptions(temperature=1.0, seed=seed))
            for seed in range(99)
        )
        seed = next(seed for seed, choice in enumerate(choices) if choice.choose_token() == 1)
        chosen = TargetTokenChooser(
            logits, 0, [], SamplingOptions(temperature=1.0, top_p=top_p, seed=seed)
        )
        assert chosen.is_possible(0, 1e-4)
        assert chosen.is_possible(1, 1e-4) == possible


def test_differences_in_bfloat16_are_ties(make_tiny):
    """A random target has many near-ties, which passes over trees round differently."""
    target, drafter = make_tiny(torch.bfloat16, seed=2)
    prompts = [[i, 2 * i % 97, 3 * i % 97] for i in range(1, 33)]
    baseline = decode_prompts(
        target, None, prompts, DecodeOptions(16, method="plain", max_num_seqs=32)
    )
    trees = decode_prompts(
        target, drafter, prompts, DecodeOptions(16, method="ddtree", budget=12, max_num_seqs=32)
    )
    causes = [
        classify_difference(target, tree.prompt, tree.ids, expected.ids, tree.options)
        for tree, expected in zip(trees, baseline, strict=True)
    ]
    assert set(filter(None, causes)) == {"tie"}

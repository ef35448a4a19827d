"""Prompt lookup: its drafts agree with a direct search and with transformers, and outputs are those
of baseline decoding."""

import numpy as np
import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from infer.api import decode_prompts, generate
from infer.config import DecodeOptions
from infer.drafters.lookup import (
    LOOKUP_WEIGHT_FACTOR_PER_TOKEN,
    MAX_LOOKUP_SUFFIX_TOKENS,
    PromptLookup,
    compute_continuation_distributions,
)
from infer.formats.checkpoint import load_drafter


def match_length(sequence: list[int], position: int) -> int:
    """Return how many tokens up to `position` equal the last tokens of the sequence, at most
    MAX_LOOKUP_SUFFIX_TOKENS."""
    length = 0
    while length < min(MAX_LOOKUP_SUFFIX_TOKENS, position + 1):
        if sequence[position - length] != sequence[len(sequence) - 1 - length]:
            break
        length += 1
    return length


def search_continuations(sequence: list[int], length: int, vocab_size: int) -> np.ndarray:
    """Compute `compute_continuation_distributions` position by position."""
    weights = np.zeros((length, vocab_size))
    for position in range(len(sequence) - 1):
        matched_tokens = match_length(sequence, position)
        if matched_tokens == 0:
            continue
        extended = list(sequence)
        for slot in range(length):
            extended.append(extended[position + 1 + slot])
        weight = LOOKUP_WEIGHT_FACTOR_PER_TOKEN**matched_tokens * (1 + position / len(sequence))
        for slot, token in enumerate(extended[len(sequence) :]):
            weights[slot, token] += weight
    total = weights.sum(-1, keepdims=True)
    return np.where(total > 0, weights / np.maximum(total, 1e-9), 1 / vocab_size)


def test_continuations_agree_with_a_search_position_by_position():
    rng = np.random.default_rng(0)
    for length in range(1, 60):
        sequence = rng.integers(0, 5, length)
        expected = search_continuations(sequence.tolist(), 6, 7)
        assert np.allclose(compute_continuation_distributions(sequence, 6, 7), expected), sequence


def test_likeliest_drafts_are_those_of_transformers():
    """The sequences have one longest match, from which both implementations copy."""
    rng = np.random.default_rng(1)
    generator = PromptLookupCandidateGenerator(
        num_output_tokens=5, max_matching_ngram_size=3, max_length=999
    )
    for _ in range(30):
        sequence = rng.permutation(200)[:60]
        start = int(rng.integers(3, 40))
        sequence = np.concatenate([sequence, sequence[start - 3 : start]])
        ids, _ = generator.get_candidates(torch.from_numpy(sequence)[None])
        expected = ids[0, len(sequence) :].tolist()
        assert compute_continuation_distributions(sequence, 5, 200).argmax(-1).tolist() == expected


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_outputs_are_those_of_baseline_decoding_and_repetition_is_drafted(make_tiny, temperature):
    """Sequences of different lengths end at different times, with chains and with trees."""
    target, _ = make_tiny()
    prompts = [[3, 1, 4, 1, 5, 9], [2, 7], [8] * 11, [6, 6, 1]]
    options = {"max_new_tokens": 40, "temperature": temperature, "max_num_seqs": 2}
    baseline = decode_prompts(target, None, prompts, DecodeOptions(method="plain", **options))
    expected = [output.ids for output in baseline]
    for method in ("chain", "ddtree"):
        drafter = load_drafter("lookup")
        outputs = decode_prompts(
            target, drafter, prompts, DecodeOptions(method=method, budget=8, **options)
        )
        assert [output.ids for output in outputs] == expected
        if temperature == 0:  # greedy outputs of random weights soon repeat themselves
            output = generate(target, PromptLookup(), [3, 1, 4], method=method, max_new_tokens=200)
            assert output.stats.tau > 1.5

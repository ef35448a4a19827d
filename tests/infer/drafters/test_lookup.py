"""Prompt lookup: what it drafts, against a search by hand and against transformers' own; and that
no text changes."""

import numpy as np
import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from infer.api import decode, generate
from infer.config import DecodeOptions
from infer.drafters.lookup import LONGEST, TRUST, Lookup, continuations
from infer.formats.checkpoint import load_drafter


def by_hand(text: list[int], length: int, vocabulary: int) -> np.ndarray:
    """The same, place by place."""
    shares = np.zeros((length, vocabulary))
    for place in range(len(text) - 1):
        matched = 0
        while (
            matched < LONGEST
            and place - matched >= 0
            and text[place - matched] == text[len(text) - 1 - matched]
        ):
            matched += 1
        if not matched:
            continue
        copied = list(text)
        for ahead in range(length):
            copied.append(copied[place + 1 + ahead])
        for ahead, token in enumerate(copied[len(text) :]):
            shares[ahead, token] += TRUST**matched * (1 + place / len(text))
    total = shares.sum(-1, keepdims=True)
    return np.where(total > 0, shares / np.maximum(total, 1e-9), 1 / vocabulary)


def test_what_is_drafted():
    dice = np.random.default_rng(0)
    for size in range(1, 60):
        text = dice.integers(0, 5, size)
        assert np.allclose(continuations(text, 6, 7), by_hand(text.tolist(), 6, 7)), text


def test_the_likeliest_drafts_are_those_of_transformers():
    """Where the longest match stands alone, theirs and ours copy from the same place."""
    dice = np.random.default_rng(1)
    theirs = PromptLookupCandidateGenerator(
        num_output_tokens=5, max_matching_ngram_size=3, max_length=999
    )
    for _ in range(30):
        text = dice.permutation(200)[:60]
        start = int(dice.integers(3, 40))
        text = np.concatenate([text, text[start - 3 : start]])
        ids, _ = theirs.get_candidates(torch.from_numpy(text)[None])
        assert continuations(text, 5, 200).argmax(-1).tolist() == ids[0, len(text) :].tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_plain_decodings_and_repetition_pays(make_tiny, temperature):
    """Several rows of different lengths that end at different times, chain and tree."""
    target, _ = make_tiny()
    prompts = [[3, 1, 4, 1, 5, 9], [2, 7], [8] * 11, [6, 6, 1]]
    shared = {"max_new_tokens": 40, "temperature": temperature, "max_num_seqs": 2}
    plain = decode(target, None, prompts, DecodeOptions(method="plain", **shared))
    for method in ("chain", "ddtree"):
        drafter = load_drafter("lookup")
        texts = decode(target, drafter, prompts, DecodeOptions(method=method, budget=8, **shared))
        assert [text.ids for text in texts] == [text.ids for text in plain]
        if not temperature:  # greedy texts of random weights run into loops, which lookup knows
            assert (
                generate(target, Lookup(), [3, 1, 4], method=method, max_new_tokens=200).stats.tau
                > 1.5
            )

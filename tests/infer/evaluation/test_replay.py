"""Replays of greedy outputs give what decoding gives, round by round, and their counts add up."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import one_hot

from data.prompts import load_external_prompts
from infer import load_drafter
from infer.api import decode_prompts
from infer.config import DecodeOptions, HeadConfig
from infer.drafters.base import DraftedBlock
from infer.evaluation.acceptance import count_accepted_drafts
from infer.evaluation.metrics import compute_acceptance_length_or_ratio, count_tokens_and_rounds
from infer.evaluation.replay import (
    BlockBatch,
    ReplayVariant,
    count_first_choices,
    extract_features,
    replay_sequences,
    summarise_replay,
)
from infer.trees.vocabulary import FULL_VOCABULARY

MARKOV_HEAD = HeadConfig("markov", rank=6)
TINY_DRAFTERS = {
    "windowed": {"sliding_window": 5},
    "dart": {"family": "dart"},
    "reduced vocabulary": {"draft_vocab_size": 60, "head": MARKOV_HEAD},
    "recurrent": {"head": HeadConfig("gru", rank=6, hidden_size=10)},
}


def decode_variant(target, drafter, prompts, variant: ReplayVariant, max_new_tokens: int) -> list:
    options = DecodeOptions(
        max_new_tokens=max_new_tokens,
        method=variant.method,
        budget=variant.node_budget,
        ngrams="none",
        max_num_seqs=1,
        max_num_batched_tokens=None,
    )
    return decode_prompts(target, drafter, prompts, options)


@pytest.mark.parametrize("name", TINY_DRAFTERS)
def test_any_drafter_is_replayed_as_it_decodes(make_tiny, name):
    target, drafter = make_tiny(block_size=5, **TINY_DRAFTERS[name])
    large_tree = ReplayVariant("ddtree", 90)
    variants = [
        ReplayVariant("chain", 4),
        ReplayVariant("ddtree", 12),
        large_tree,
        ReplayVariant("static", 14),
    ]
    prompts = [[7, 8, 9, 10], list(range(20, 41)), [3]]
    decoded = {
        variant: decode_variant(target, drafter, prompts, variant, 16) for variant in variants
    }
    sequences = [(sequence.prompt, sequence.ids) for sequence in decoded[variants[0]]]
    features = [extract_features(target, drafter.layer_ids, sequence) for sequence in sequences]
    replayed = replay_sequences(target, drafter, sequences, variants, features)
    for variant in variants:
        expected = [sequence.commits for sequence in decoded[variant]]
        assert [sequence.commits[variant] for sequence in replayed] == expected, variant
    assert max(max(sequence.commits[large_tree]) for sequence in replayed) > 1


@pytest.mark.robustness
def test_the_counts_are_those_of_decoding(embedded):
    """Decoded chains show how often first choices are correct; no ranking accepts more than the
    ideal one."""
    drafter = load_drafter("embedded")
    prompts = [prompt.ids for prompt in load_external_prompts(embedded.tokenizer, 48, False)[:5]]
    chain = ReplayVariant("chain", 7)
    tree = ReplayVariant("ddtree", 16)
    ideal_tree = ReplayVariant("ddtree", 16, "ideal")
    decoded_chains = decode_variant(embedded, drafter, prompts, chain, 32)
    sequences = [(sequence.prompt, sequence.ids) for sequence in decoded_chains]
    replayed_chains = replay_sequences(
        embedded, drafter, sequences, [chain], first_choice_variant=chain
    )
    source = "marginals" if drafter.head_spec is None else "head"
    for replayed, decoded in zip(replayed_chains, decoded_chains, strict=True):
        assert replayed.commits[chain] == decoded.commits
        attempts, correct, *after_sibling = replayed.first_choices[source]
        counts = count_accepted_drafts(decoded.commits, 10**6, 7)  # of all rounds
        assert attempts[0] == counts.rounds
        assert not np.any(after_sibling)
        assert (np.array(counts.accepted) <= correct).all()
        # The end of the sequence cuts one accepted draft at most.
        assert (correct - counts.accepted).sum() <= 1

    replayed_trees = replay_sequences(
        embedded, drafter, sequences, [tree, ideal_tree], first_choice_variant=tree
    )
    tree_commits = [
        sequence.commits for sequence in decode_variant(embedded, drafter, prompts, tree, 32)
    ]
    assert [sequence.commits[tree] for sequence in replayed_trees] == tree_commits

    study = summarise_replay(replayed_trees)
    taus = {result.ranking: result.tau for result in study.results}
    chain_commits = [sequence.commits[chain] for sequence in replayed_chains]
    chain_tau, _ = compute_acceptance_length_or_ratio(count_tokens_and_rounds(chain_commits))
    assert taus["ideal"] > taus["drafter"] > chain_tau
    after_first, after_sibling = [each for each in study.first_choices if each.source == source]
    rounds = sum(len(commits) - 1 for commits in tree_commits)
    assert after_first.attempts[0] + after_sibling.attempts[0] == rounds
    assert after_sibling.attempts[0] == 0
    assert after_first.interval[0] < after_first.accuracy < after_first.interval[1]
    assert sum(after_sibling.attempts) > 0


def test_positions_after_an_accepted_sibling():
    """The second token was not the first choice, and was accepted: the tokens after it follow a
    sibling."""
    # (1, 4, 9): the first choice at every position
    marginals = one_hot(torch.tensor([[1, 8, 3, 4]]), 9)
    next_tokens = torch.tensor([[1, 2, 3, -1, -1]])
    batch = BlockBatch(torch.zeros(1).long(), DraftedBlock(marginals), next_tokens, None)
    drafter = SimpleNamespace(head_spec=None, vocabulary=FULL_VOCABULARY)

    counts = count_first_choices(None, drafter, batch, torch.tensor([3]))
    assert list(counts) == ["marginals"]
    expected = [[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0]]
    assert counts["marginals"][:, 0].tolist() == expected
    counts = count_first_choices(None, drafter, batch, torch.tensor([1]))
    assert counts["marginals"][:, 0].sum(1).tolist() == [2, 1, 0, 0]

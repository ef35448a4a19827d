"""Replays of greedy texts are what decoding does, round by round; what is counted in them adds
up."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import one_hot

from data.prompts import outside_prompts
from infer import load_drafter
from infer.api import decode
from infer.config import DecodeOptions, HeadConfig
from infer.drafters.base import DraftedBlock
from infer.evaluation.acceptance import count_accepted
from infer.evaluation.replay import Drafts, Order, features_of, first_choices, replay, study_of
from infer.evaluation.ruler import acceptance_length, counted
from infer.trees.vocabulary import ALL

HEAD = HeadConfig("markov", rank=6)
TINY = {
    "windowed": {"sliding_window": 5},
    "dart": {"family": "dart"},
    "part": {"draft_vocab_size": 60, "head": HEAD},
    "recurrent": {"head": HeadConfig("gru", rank=6, hidden_size=10)},
}


def decoded(target, drafter, prompts, order: Order, tokens: int) -> list:
    asked = {
        "method": order.method,
        "budget": order.nodes,
        "ngrams": "none",
        "max_num_seqs": 1,
        "max_num_batched_tokens": None,
    }
    return decode(target, drafter, prompts, DecodeOptions(max_new_tokens=tokens, **asked))


@pytest.mark.parametrize("name", TINY)
def test_any_drafter_is_replayed_as_it_decodes(make_tiny, name):
    target, drafter = make_tiny(block_size=5, **TINY[name])
    orders = [Order("chain", 4), Order("ddtree", 12), Order("ddtree", 90), Order("static", 14)]
    prompts = [[7, 8, 9, 10], list(range(20, 41)), [3]]
    real = {order: decoded(target, drafter, prompts, order, 16) for order in orders}
    texts = [(text.prompt, text.ids) for text in real[orders[0]]]
    found = replay(
        target,
        drafter,
        texts,
        orders,
        [features_of(target, drafter.layer_ids, text) for text in texts],
    )
    for order in orders:
        assert [text.commits[order] for text in found] == [text.commits for text in real[order]], (
            order
        )
    assert max(map(max, (text.commits[orders[2]] for text in found))) > 1


@pytest.mark.robustness
def test_what_is_counted_is_what_decoding_accepted(embedded):
    """Chains decoded for real say how often first choices are right; no order accepts more than the
    best one."""
    drafter = load_drafter("embedded")
    prompts = [prompt.ids for prompt in outside_prompts(embedded.tokenizer, 48, False)[:5]]
    chain = Order("chain", 7)
    tree = Order("ddtree", 16)
    best = Order("ddtree", 16, "ideal")
    real = decoded(embedded, drafter, prompts, chain, 32)
    texts = [(text.prompt, text.ids) for text in real]
    by_chain = replay(embedded, drafter, texts, [chain], reference=chain)
    own = "marginals" if drafter.head_row is None else "head"
    for found, text in zip(by_chain, real, strict=True):
        assert found.commits[chain] == text.commits
        asked, right, *behind = found.choices[own]
        known = count_accepted(text.commits, 10**6, 7)  # of all rounds
        assert asked[0] == known.rounds and not np.any(behind)
        assert (np.array(known.accepted) <= right).all() and (
            right - known.accepted
        ).sum() <= 1  # cut at the end
    found = replay(embedded, drafter, texts, [tree, best], reference=tree)
    own_rounds = [text.commits for text in decoded(embedded, drafter, prompts, tree, 32)]
    assert [text.commits[tree] for text in found] == own_rounds
    study = study_of(found)
    gained = {one.by: one.tau for one in study.orders}
    assert (
        gained["ideal"]
        > gained["drafter"]
        > acceptance_length(counted(text.commits[chain] for text in by_chain))[0]
    )
    spine, behind = [one for one in study.choices if one.by == own]
    assert spine.asked[0] + behind.asked[0] == sum(len(rounds) - 1 for rounds in own_rounds)
    assert not behind.asked[0]
    assert spine.interval[0] < spine.share < spine.interval[1] and sum(behind.asked) > 0


def test_places_behind_an_accepted_sibling():
    """The second token was not the first choice, and was accepted: what follows it is behind a
    sibling."""
    scores = one_hot(
        torch.tensor([[1, 8, 3, 4]]), 9
    )  # (1, 4, 9): the first choice of every position
    drafts = Drafts(
        torch.zeros(1).long(), DraftedBlock(scores), torch.tensor([[1, 2, 3, -1, -1]]), None
    )
    drafter = SimpleNamespace(head_row=None, vocabulary=ALL)
    ((by, places),) = first_choices(None, drafter, drafts, torch.tensor([3]))
    assert by == "marginals"
    assert places[:, 0].tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0]]
    ((_, places),) = first_choices(None, drafter, drafts, torch.tensor([1]))
    assert places[:, 0].sum(1).tolist() == [2, 1, 0, 0]

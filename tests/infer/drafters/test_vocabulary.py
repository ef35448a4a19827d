"""Drafters that know a part of the target's tokens: the whole one's scores among these, and the
target's texts."""

import pytest
import torch

from infer import generate
from infer.config import HeadConfig
from infer.drafters.heads.draft import behind
from infer.ngrams.model import NGram
from infer.targets.layers import some_outputs
from infer.trees.guided import guided_ddtree
from infer.trees.tree import Proposal
from infer.trees.vocabulary import Vocabulary

KINDS = {
    "none": HeadConfig(),
    "markov": HeadConfig("markov", rank=6),
    "rnn": HeadConfig("markov", kind="rnn", rank=6),
    "selector": HeadConfig("selector", rank=6),
    "swiglu": HeadConfig("swiglu", hidden_size=10),
    "gru": HeadConfig("gru", rank=6, hidden_size=10),
}
SOME = torch.randperm(97, generator=torch.Generator().manual_seed(3))


def pair(make_tiny, kind: str, family: str, tokens: torch.Tensor):
    """A target, a drafter of all its tokens, and one of `tokens` with the same weights."""
    options = {"head": KINDS[kind], "family": family, "block_size": 5}
    target, whole = make_tiny(**options)
    generator = torch.Generator().manual_seed(1)
    for weight in whole.parameters():
        weight.data = 0.4 * torch.randn(weight.shape, generator=generator) + (weight.ndim == 1)
    part = make_tiny(**options, draft_vocab_size=len(tokens))[1]
    weights = whole.state_dict() | {"d2t": tokens - torch.arange(len(tokens))}
    for name in weights.keys() & {
        name for name, weight in part.state_dict().items() if len(weight) == len(tokens)
    }:
        weights[name] = weights[name] if name == "d2t" else weights[name][tokens]
    part.load_state_dict(weights)
    return target, *(drafter.eval().requires_grad_(False) for drafter in (whole, part))


def drafted(target, drafter) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities (L, R) of a block behind random context, and of one behind given tokens,
    any of the 97."""
    state = drafter.state(1, 20)
    generator = torch.Generator().manual_seed(4)
    features = torch.randn(1, 6, drafter.fc.in_features, generator=generator)
    with state.add(1) as row:
        drafter.update_context(target, features, torch.zeros(1, 6, dtype=torch.long), [6], row)
    before = torch.randint(97, (1, 4), generator=generator)
    block = drafter.draft_block(target, before[:, 0], state)
    given = block.marginals if drafter.head_row is None else behind(drafter, target, block, before)
    return block.marginals[0], given[0]


@pytest.mark.parametrize(
    ("kind", "family"), [*((kind, "dflash") for kind in KINDS), ("none", "dart"), ("gru", "dart")]
)
def test_scores_are_the_whole_drafters_among_its_tokens(make_tiny, kind, family):
    target, whole, part = pair(make_tiny, kind, family, SOME[:40])
    for every, some in zip(drafted(target, whole), drafted(target, part), strict=True):
        assert torch.allclose(some, every[:, SOME[:40]].log_softmax(-1), atol=1e-5)


@pytest.mark.parametrize(("kind", "temperature"), [*zip(KINDS, [0.0, 1.0] * 3, strict=True)])
def test_texts_are_the_targets_own_with_a_vocabulary_of_few_tokens(
    make_tiny, ngrams, kind, temperature
):
    """Half of what the target writes cannot be drafted. With a vocabulary that it can, more is
    accepted."""
    target, _, part = pair(make_tiny, kind, "dflash", SOME[:5])
    options = {
        "max_new_tokens": 20,
        "temperature": temperature,
        "top_k": 20,
        "seed": 2,
        "ignore_eos": True,
    }
    expected = generate(target, None, [3, 1, 4], method="plain", **options).ids
    for method in (
        {"method": "chain"},
        {"method": "ddtree"},
        {"method": "ddtree", "ngrams": str(ngrams)},
    ):
        found = generate(target, part, [3, 1, 4], budget=12, **method, **options)
        assert found.ids == expected
    known = set(SOME[:5].tolist())
    accepted = generate(target, part, [3, 1, 4], method="chain", **options).stats
    assert accepted.rounds >= sum(token not in known for token in expected[1:])  # each ends a round


def test_n_grams_propose_tokens_that_the_drafter_does_not_know():
    marginals = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    text = [9, 8, 7, 9, 8, 7, 9]
    known = Vocabulary(torch.arange(4), 20)
    tree = guided_ddtree(
        Proposal(torch.tensor([9]), marginals, 12, NGram.uniform(20), [text], vocabulary=known)
    )
    assert tree.tokens[0, 1] == 8 and 7 in tree.tokens[0]


def test_rows_of_an_int8_head_give_the_same_sums():
    from infer.int8_cpu.modules import Int8Linear

    generator = torch.Generator().manual_seed(1)
    head = Int8Linear(64, 97, False)
    states = torch.randn(3, 64, generator=generator)
    head.codes.data = torch.randint(-60, 60, (97, 64), dtype=torch.int8, generator=generator)
    head.scales.data, head.smooth.data = (
        torch.rand(size, generator=generator) + 0.5 for size in (97, 64)
    )
    expected = head(states)[:, SOME[:30]]
    part = some_outputs(head, SOME[:30])
    assert torch.equal(part(states), expected) and torch.equal(part.weight, head.weight[SOME[:30]])

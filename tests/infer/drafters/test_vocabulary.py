"""Drafters with a draft vocabulary: their scores are those of a drafter of all tokens, and outputs
are the target's."""

import pytest
import torch

from infer import generate
from infer.config import HeadConfig
from infer.drafters.heads.draft import teacher_forced_log_probs
from infer.ngrams.model import NGramModel
from infer.targets.layers import select_output_features
from infer.trees.guided import build_guided_ddtree
from infer.trees.tree import Proposal
from infer.trees.vocabulary import DraftVocabulary

FULL_VOCAB_SIZE = 97
SHUFFLED_TOKENS = torch.randperm(FULL_VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
DRAFT_TOKENS = SHUFFLED_TOKENS[:40]
FEW_DRAFT_TOKENS = SHUFFLED_TOKENS[:5]
DRAFTER_HEADS = {
    "none": HeadConfig(),
    "markov": HeadConfig("markov", rank=6),
    "rnn": HeadConfig("markov", kind="rnn", rank=6),
    "selector": HeadConfig("selector", rank=6),
    "swiglu": HeadConfig("swiglu", hidden_size=10),
    "gru": HeadConfig("gru", rank=6, hidden_size=10),
}


def make_drafter_pair(make_tiny, head: str, family: str, draft_tokens: torch.Tensor):
    """Return a target, a drafter of all its tokens, and a drafter of `draft_tokens` with the same
    weights."""
    options = {"head": DRAFTER_HEADS[head], "family": family, "block_size": 5}
    target, full_drafter = make_tiny(**options)
    generator = torch.Generator().manual_seed(1)
    for parameter in full_drafter.parameters():
        offset = 1.0 if parameter.ndim == 1 else 0.0  # norms are about one
        parameter.data = 0.4 * torch.randn(parameter.shape, generator=generator) + offset

    _, restricted_drafter = make_tiny(**options, draft_vocab_size=len(draft_tokens))
    weights = full_drafter.state_dict()
    for name, weight in restricted_drafter.state_dict().items():
        if name != "d2t" and len(weight) == len(draft_tokens):
            weights[name] = weights[name][draft_tokens]
    weights["d2t"] = draft_tokens - torch.arange(len(draft_tokens))
    restricted_drafter.load_state_dict(weights)
    for drafter in (full_drafter, restricted_drafter):
        drafter.eval().requires_grad_(False)
    return target, full_drafter, restricted_drafter


def draft_log_probs(target, drafter) -> list[torch.Tensor]:
    """Return the log-probabilities (L, R) of a block after a random context: the marginals, and
    those after random previous tokens."""
    state = drafter.allocate_state(1, 20)
    generator = torch.Generator().manual_seed(4)
    features = torch.randn(1, 6, drafter.fc.in_features, generator=generator)
    tokens = torch.zeros(1, 6, dtype=torch.long)
    with state.add(1) as new_rows:
        drafter.update_context(target, features, tokens, [6], new_rows)
    previous_tokens = torch.randint(FULL_VOCAB_SIZE, (1, 4), generator=generator)
    block = drafter.draft_block(target, previous_tokens[:, 0], state)
    if drafter.head_spec is None:
        return [block.marginals[0]]
    conditional = teacher_forced_log_probs(drafter, target, block, previous_tokens)
    return [block.marginals[0], conditional[0]]


@pytest.mark.parametrize(
    ("head", "family"),
    [*((head, "dflash") for head in DRAFTER_HEADS), ("none", "dart"), ("gru", "dart")],
)
def test_scores_are_those_of_all_tokens_restricted_to_the_draft_vocabulary(make_tiny, head, family):
    target, full_drafter, restricted_drafter = make_drafter_pair(
        make_tiny, head, family, DRAFT_TOKENS
    )
    all_log_probs = draft_log_probs(target, full_drafter)
    restricted_log_probs = draft_log_probs(target, restricted_drafter)
    for full, restricted in zip(all_log_probs, restricted_log_probs, strict=True):
        expected = full[:, DRAFT_TOKENS].log_softmax(-1)
        assert torch.allclose(restricted, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("head", "temperature"), [*zip(DRAFTER_HEADS, [0.0, 1.0] * 3, strict=True)]
)
def test_outputs_are_the_targets_with_a_small_draft_vocabulary(
    make_tiny, ngrams, head, temperature
):
    """Most tokens that the target generates cannot be drafted; each of them ends a round."""
    target, _, drafter = make_drafter_pair(make_tiny, head, "dflash", FEW_DRAFT_TOKENS)
    prompt = [3, 1, 4]
    options = {
        "max_new_tokens": 20,
        "temperature": temperature,
        "top_k": 20,
        "seed": 2,
        "ignore_eos": True,
    }
    expected = generate(target, None, prompt, method="plain", **options).ids
    methods = [
        {"method": "chain"},
        {"method": "ddtree"},
        {"method": "ddtree", "ngrams": str(ngrams)},
    ]
    for method in methods:
        output = generate(target, drafter, prompt, budget=12, **method, **options)
        assert output.ids == expected

    draft_vocabulary = set(FEW_DRAFT_TOKENS.tolist())
    stats = generate(target, drafter, prompt, method="chain", **options).stats
    assert stats.rounds >= sum(token not in draft_vocabulary for token in expected[1:])


def test_n_grams_propose_tokens_outside_the_draft_vocabulary():
    marginals = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    context = [9, 8, 7, 9, 8, 7, 9]
    draft_vocabulary = DraftVocabulary(torch.arange(4), 20)
    proposal = Proposal(
        torch.tensor([9]),
        marginals,
        12,
        NGramModel.uniform(20),
        [context],
        vocabulary=draft_vocabulary,
    )
    tree = build_guided_ddtree(proposal)
    assert tree.tokens[0, 1] == 8
    assert 7 in tree.tokens[0]


def test_selected_rows_of_an_int8_head_give_the_same_outputs():
    from infer.int8_cpu.modules import Int8Linear

    generator = torch.Generator().manual_seed(1)
    head = Int8Linear(64, FULL_VOCAB_SIZE, False)
    states = torch.randn(3, 64, generator=generator)
    codes = torch.randint(-60, 60, (FULL_VOCAB_SIZE, 64), dtype=torch.int8, generator=generator)
    head.codes.data = codes
    head.scales.data = torch.rand(FULL_VOCAB_SIZE, generator=generator) + 0.5
    head.smooth.data = torch.rand(64, generator=generator) + 0.5
    expected = head(states)[:, DRAFT_TOKENS]
    selected_head = select_output_features(head, DRAFT_TOKENS)
    assert torch.equal(selected_head(states), expected)
    assert torch.equal(selected_head.weight, head.weight[DRAFT_TOKENS])

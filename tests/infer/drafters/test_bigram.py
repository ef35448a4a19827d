"""The bigram drafter against plain Python sums over a dictionary of counts."""

from math import log
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from infer.drafters import baselines
from infer.drafters.baselines import FLOOR, Bigram
from infer.engine.rejection import draft_noise
from infer.trees.ddtree import ddtree
from infer.trees.fixed import full_tree
from infer.trees.tree import Proposal


class Pairs:
    """Counts from a dictionary {token: {next: count}}, of tokens alone from SINGLES."""

    def __init__(self, pairs: dict[int, dict[int, int]], vocabulary: int) -> None:
        self.pairs, self.vocabulary = pairs, vocabulary

    def continuations(self, context) -> tuple[np.ndarray, np.ndarray]:
        following = self.pairs.get(context[0], {}) if context else SINGLES
        return np.array([*following], dtype=np.int64), np.array([*following.values()], dtype=np.int64)


PAIRS = {0: {1: 3, 2: 1}, 1: {2: 5, 4: 5, 0: 1}, 2: {3: 7}, 3: {0: 1, 5: 2}, 5: {5: 1, 1: 2}}  # nothing after 4
SINGLES = {0: 5, 1: 11, 2: 6, 3: 7, 4: 5, 5: 3}  # and 6 was never seen
VOCABULARY = 7


def drafted(drafter: Bigram, bonus: torch.Tensor) -> torch.Tensor:
    """The marginals behind bonus tokens (B,), whatever the texts before them were."""
    state = drafter.state(len(bonus), 10)
    state.texts = [[4] for _ in bonus]
    return drafter.draft(SimpleNamespace(head_weight=torch.zeros(VOCABULARY, 1)), bonus, state)


def after(token: int) -> list[float]:
    following = PAIRS.get(token, SINGLES)
    return [following.get(v, 0) / sum(following.values()) for v in range(VOCABULARY)]


def floored(q: list[float]) -> list[float]:
    return [log((1 - FLOOR) * value + FLOOR / VOCABULARY) for value in q]


def plain_chain(bonus: int, length: int, kept: int) -> list[list[float]]:
    q, rows = after(bonus), []
    for _ in range(length):
        rows.append(floored(q))
        best = sorted(range(VOCABULARY), key=lambda s: -q[s])[:kept]
        total = sum(q[s] for s in best)
        q = [sum(q[s] / total * after(s)[v] for s in best) for v in range(VOCABULARY)]
    return rows


@pytest.mark.parametrize("kept", [1, 2, 64])
def test_marginals_are_those_of_the_markov_chain(kept, monkeypatch):
    monkeypatch.setattr(baselines, "KEPT", kept)
    drafter = Bigram(Pairs(PAIRS, VOCABULARY), block_size=6)
    marginals = drafted(drafter, torch.arange(VOCABULARY))
    assert marginals.shape == (7, 5, 7) and marginals.dtype == torch.float32
    for token in range(VOCABULARY):
        assert torch.allclose(marginals[token], torch.tensor(plain_chain(token, 5, kept)), atol=1e-5)
    assert torch.allclose(marginals.exp().sum(-1), torch.ones(7, 5))


def test_conditional_rows_are_exact():
    drafter = Bigram(Pairs(PAIRS, VOCABULARY))
    tokens = torch.tensor([[0, 4, 5], [3, 3, 6]])
    rows = drafter.conditional(1, tokens)
    assert rows.shape == (2, 3, 7) and rows.dtype == torch.float32
    expected = [[floored(after(token)) for token in row] for row in tokens.tolist()]
    assert torch.allclose(rows, torch.tensor(expected), atol=1e-5)
    assert torch.isfinite(rows).all()
    assert torch.equal(drafter.conditional(0, tokens[:, :1])[:, 0], drafted(drafter, tokens[:, 0])[:, 0])


def test_what_the_engine_and_the_trees_ask_for():
    drafter = Bigram(Pairs(PAIRS, VOCABULARY))
    assert drafter.block_size == 8 and drafter.layer_ids == ()
    state = drafter.state(2, 50)
    with state.add(2) as part:
        drafter.update_context(None, torch.empty(2, 3, 0), torch.zeros(2, 3, dtype=torch.long), [3, 2], part)
    assert state.texts == [[0, 0, 0], [0, 0]]
    bonus = torch.tensor([0, 5])
    assert ddtree(Proposal(bonus, drafted(drafter, bonus), 10)).budget == 10
    tree = full_tree(bonus, drafter.conditional, width=2, depth=3)
    assert tree.budget == 14
    for row in range(2):
        for node in range(1, 15):
            q = after(int(tree.tokens[row, tree.parents[row, node]]))
            assert q[tree.tokens[row, node]] >= sorted(q)[-2]
    noise = draft_noise(torch.tensor([1, 2]), torch.arange(3).expand(2, -1), VOCABULARY)
    assert full_tree(bonus, drafter.conditional, width=2, depth=3, noise=noise).draws.q.shape == (2, 7, VOCABULARY)


def test_a_block_of_nothing_is_refused():
    with pytest.raises(ValueError, match="block_size=1"):
        Bigram(Pairs(PAIRS, VOCABULARY), block_size=1)

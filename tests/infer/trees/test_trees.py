"""Draft trees: the optimum by exhaustive enumeration, valid, and what they say about themselves."""

from itertools import product

import pytest
import torch
from torch.nn import functional as F

from infer.engine.packet import rejected_path
from infer.kernels import table
from infer.trees.ddtree import ddtree
from infer.trees.tree import DraftTree, Proposal


@pytest.fixture(autouse=True, params=["best first", "by depth"])
def search(request, monkeypatch):
    """Everything holds for both ways to the tree: compiled for the CPU, and in tensors for any
    device."""
    if request.param == "by depth":
        monkeypatch.setattr(table, "FAST_VERSIONS", {})


def prefixes(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    """The drafted nodes as token tuples, by walking to the root; checks parents and depths on the
    way."""
    found = []
    for node in range(1, tree.budget + 1):
        path = []
        at = node
        while at:
            assert tree.parents[row, at] < at
            assert tree.depths[row, at] == tree.depths[row, tree.parents[row, at]] + 1
            path.insert(0, int(tree.tokens[row, at]))
            at = int(tree.parents[row, at])
        found.append(tuple(path))
    return found


def enumerate_all(marginals: torch.Tensor) -> dict[tuple[int, ...], float]:
    """Every prefix of marginals (L, V) with its log-probability."""
    length, vocabulary = marginals.shape
    return {
        prefix: sum(float(marginals[i, token]) for i, token in enumerate(prefix))
        for depth in range(1, length + 1)
        for prefix in product(range(vocabulary), repeat=depth)
    }


@pytest.mark.parametrize("length, vocabulary", [(1, 7), (2, 9), (3, 5), (4, 4), (6, 2)])
@pytest.mark.parametrize("budget", [1, 5, 60, 10_000])
def test_ddtree_is_the_exhaustive_top_b(length, vocabulary, budget):
    marginals = torch.randn(
        4, length, vocabulary, generator=torch.Generator().manual_seed(length)
    ).mul(2)
    marginals = marginals.log_softmax(-1)
    tree = ddtree(Proposal(torch.tensor([3, 1, 0, 2]), marginals, budget))
    assert tree.tokens[:, 0].tolist() == [3, 1, 0, 2]
    for row in range(4):
        scores = enumerate_all(marginals[row])
        best = sorted(scores, key=scores.get, reverse=True)[:budget]
        assert set(prefixes(tree, row)) == set(best)
        expected = torch.tensor([scores[prefix] for prefix in prefixes(tree, row)])
        assert torch.allclose(tree.log_probs[row, 1:].float(), expected, atol=1e-5)


@pytest.mark.parametrize("budget", [16, 300])
def test_both_ways_give_the_same_tree_at_full_size(budget, monkeypatch):
    marginals = (
        torch.randn(2, 15, 3000, generator=torch.Generator().manual_seed(5)) * 3
    ).log_softmax(-1)
    trees = []
    for fast_versions in ({}, table.FAST_VERSIONS):
        monkeypatch.setattr(table, "FAST_VERSIONS", fast_versions)
        trees.append(ddtree(Proposal(torch.tensor([1, 2]), marginals, budget)))
        trees[-1].ancestors()
    for row in range(2):
        assert set(prefixes(trees[0], row)) == set(prefixes(trees[1], row))
    assert torch.allclose(trees[0].log_probs, trees[1].log_probs, atol=1e-5)


def test_nodes_of_all_rows_compete():
    """Of all ways to share so many nodes among rows the one that promises most; behind a row there
    is no node."""
    log_probs = F.pad(
        -torch.rand(4, 5, generator=torch.Generator().manual_seed(1)).cumsum(1), (1, 0)
    )
    steps = torch.arange(6).expand(4, -1)
    whole = DraftTree(steps + 7, (steps - 1).clamp(min=0), steps, log_probs, 5)
    cut = whole.likeliest(2)
    worth = log_probs.exp().cumsum(1)
    ways = [way for way in product(range(6), repeat=4) if sum(way) == 8]
    assert tuple(cut.budgets) == max(
        ways, key=lambda way: sum(worth[row, n] for row, n in enumerate(way))
    )
    assert [(row >= 0).sum() - 1 for row in cut.tokens] == cut.budgets and cut.budget == max(
        cut.budgets
    )
    assert rejected_path(cut, 0, 0) == list(range(8, 8 + cut.budgets[0]))

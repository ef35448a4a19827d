"""Draft trees: valid, and the optimum by exhaustive enumeration."""

from itertools import product

import pytest
import torch
from torch.nn import functional as F

from infer.engine.round_outcome import find_rejected_path
from infer.kernels import table
from infer.trees.ddtree import build_ddtree
from infer.trees.tree import DraftTree, Proposal


@pytest.fixture(autouse=True, params=["best first", "by depth"])
def search_kernel(request, monkeypatch):
    """Run every test with both searches: compiled for the CPU, and in tensors for any device."""
    if request.param == "by depth":
        monkeypatch.setattr(table, "FAST_KERNEL_TABLE_PATHS", {})


def list_prefixes(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    """Return the prefixes of the drafted nodes, and check parents and depths."""
    prefixes = []
    for drafted_node in range(1, tree.max_drafted + 1):
        path = []
        node = drafted_node
        while node:
            parent = int(tree.parents[row, node])
            assert parent < node
            assert tree.depths[row, node] == tree.depths[row, parent] + 1
            path.insert(0, int(tree.tokens[row, node]))
            node = parent
        prefixes.append(tuple(path))
    return prefixes


def score_all_prefixes(marginals: torch.Tensor) -> dict[tuple[int, ...], float]:
    """Return every prefix of marginals (L, V) with its log-probability."""
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
    tree = build_ddtree(Proposal(torch.tensor([3, 1, 0, 2]), marginals, budget))
    assert tree.tokens[:, 0].tolist() == [3, 1, 0, 2]
    for row in range(4):
        scores = score_all_prefixes(marginals[row])
        best = sorted(scores, key=scores.get, reverse=True)[:budget]
        prefixes = list_prefixes(tree, row)
        assert set(prefixes) == set(best)
        expected = torch.tensor([scores[prefix] for prefix in prefixes])
        assert torch.allclose(tree.log_probs[row, 1:].float(), expected, atol=1e-5)


@pytest.mark.parametrize("budget", [16, 300])
def test_both_searches_build_the_same_tree_at_full_size(budget, monkeypatch):
    marginals = (
        torch.randn(2, 15, 3000, generator=torch.Generator().manual_seed(5)) * 3
    ).log_softmax(-1)
    trees = []
    for fast_versions in ({}, table.FAST_KERNEL_TABLE_PATHS):
        monkeypatch.setattr(table, "FAST_KERNEL_TABLE_PATHS", fast_versions)
        trees.append(build_ddtree(Proposal(torch.tensor([1, 2]), marginals, budget)))
        trees[-1].build_ancestor_mask()
    for row in range(2):
        assert set(list_prefixes(trees[0], row)) == set(list_prefixes(trees[1], row))
    assert torch.allclose(trees[0].log_probs, trees[1].log_probs, atol=1e-5)


def test_the_likeliest_nodes_of_all_rows_are_kept():
    """Of all distributions of that many nodes to rows, the one with the most expected tokens.
    Padding has no tokens."""
    log_probs = F.pad(
        -torch.rand(4, 5, generator=torch.Generator().manual_seed(1)).cumsum(1), (1, 0)
    )
    depths = torch.arange(6).expand(4, -1)
    tree = DraftTree(depths + 7, (depths - 1).clamp(min=0), depths, log_probs, 5)
    pruned = tree.keep_likeliest(2)
    expected_tokens = log_probs.exp().cumsum(1)
    all_counts = [counts for counts in product(range(6), repeat=4) if sum(counts) == 8]
    best_counts = max(
        all_counts,
        key=lambda counts: sum(expected_tokens[row, count] for row, count in enumerate(counts)),
    )
    assert tuple(pruned.drafted_counts) == best_counts
    assert [(row >= 0).sum() - 1 for row in pruned.tokens] == pruned.drafted_counts
    assert pruned.max_drafted == max(pruned.drafted_counts)
    assert find_rejected_path(pruned, 0, 0) == list(range(8, 8 + pruned.drafted_counts[0]))

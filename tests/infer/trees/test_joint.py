"""One budget for several rows: the best nodes of the union of their trees."""

import itertools

import pytest
import torch

from infer.engine.verify import walk
from infer.trees.ddtree import ddtree
from infer.trees.joint import by_place, expected, places, share
from infer.trees.tree import Proposal


@pytest.fixture
def tree():
    """Trees of twelve nodes in three rows, of a sure drafter, an unsure one, and one that knows nothing."""
    logits = (
        torch.randn(3, 4, 20, generator=torch.Generator().manual_seed(1)) * torch.tensor([6.0, 2, 0.1])[:, None, None]
    )
    return ddtree(Proposal(torch.tensor([1, 2, 3]), logits.log_softmax(-1), 12))


@pytest.mark.parametrize("total", [1, 6, 17, 36])
def test_no_other_split_of_the_budget_is_expected_to_commit_more(tree, total):
    gained = tree.log_probs[:, 1:].exp().cumsum(1)  # (3, 12) by nodes
    gained = torch.cat([torch.zeros(3, 1), gained], 1)
    splits = [split for split in itertools.product(range(13), repeat=3) if sum(split) == total]
    best = max(sum(float(gained[row, size]) for row, size in enumerate(split)) for split in splits)
    place = places(tree)
    shared = share(tree, place, total)
    sizes = shared.part.sizes.tolist()
    assert sum(sizes) == total
    assert sum(float(gained[row, size]) for row, size in enumerate(sizes)) == pytest.approx(best, rel=1e-6)
    width = shared.tokens.shape[1]
    assert shared.part.packed.tolist() == [row * width + node for row in range(3) for node in range(sizes[row] + 1)]
    if total % 3 == 0:
        found = expected(by_place(tree.log_probs, place))
        assert float(found[total // 3]) == pytest.approx(1 + best / 3, rel=1e-6)


def test_rows_that_are_not_in_use_get_nothing(tree):
    shared = share(tree, places(tree, torch.tensor([0, 1, 1])), 8)
    assert shared.part.sizes[0] == 0 and shared.part.sizes.sum() == 8


def test_the_walk_takes_no_node_that_was_not_verified(tree):
    """A target that says what the trees say, everywhere: the walk ends where a row's part does."""
    shared = share(tree, places(tree), 9, narrow=True)
    chosen = torch.full_like(shared.tokens, -1)
    for row, (tokens, parents) in enumerate(zip(shared.tokens.tolist(), shared.parents.tolist(), strict=True)):
        for node in range(len(tokens) - 1, 0, -1):  # the first child is chosen
            chosen[row, parents[node]] = tokens[node]
    accepted = walk(shared, chosen)
    for row, size in enumerate(shared.part.sizes.tolist()):
        path = accepted.path[row, : accepted.lengths[row]].tolist()
        assert max(path) <= size and (len(path) > 1) == (size > 0)

"""Masks whose shapes depend on no length."""

import pytest
import torch
from torch.nn import functional as F

from infer.attention.masks import cached_blocks, tree_mask
from infer.trees.tree import DraftTree


@pytest.mark.parametrize("pattern", [(False, None), (True, None), (False, 3), (True, 5)])
def test_a_drafters_block_sees_the_same(pattern):
    """A query sees what is cached and the block, or of that what comes before it, less than a window away."""
    causal, window = pattern
    for row, (end, found) in enumerate(
        zip((0, 4, 9), cached_blocks(torch.tensor([0, 4, 9]), 6, 20, *pattern).dense, strict=True)
    ):
        for query in range(6):
            last = end + query if causal else end + 5
            seen = [key <= last and (window is None or abs(end + query - key) < window) for key in range(20)]
            assert found[0, query].tolist() == seen, row


def test_a_tree_mask_equals_a_loop():
    """A node sees its row's cached positions, its ancestors and itself, if they are less than a window before it."""
    parents, depths = torch.tensor([[0, 0, 1, 1, 2, 0]]), torch.tensor([[0, 1, 2, 2, 3, 1]])
    ancestors = DraftTree(parents, parents, depths, F.pad(depths.float(), (0, 0)), 3).ancestors()
    for window in (None, 3):
        end = torch.tensor([5])
        found = tree_mask(end, end[:, None] + depths, ancestors, 12, window).dense[0, 0]
        for node in range(6):
            path, at = {node}, node
            while at:
                at = int(parents[0, at])
                path.add(at)
            near = 0 if window is None else 5 + int(depths[0, node]) - window + 1
            seen = {slot for slot in range(5) if slot >= near}
            seen |= {5 + other for other in path if 5 + int(depths[0, other]) >= near}
            assert set(found[node].nonzero()[:, 0].tolist()) == seen

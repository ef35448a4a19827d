"""DDTree: the draft tree of B nodes that maximises the expected acceptance length under the drafter's marginals.

DDTree section 4.3: the B most probable prefixes. Two ways to the same tree: best first with a heap (the paper's
algorithm 1, compiled for the CPU, where numba is installed, and in one Triton kernel on a GPU), and depth by depth in
tensor operations, wherever neither is at hand.
"""

from functools import lru_cache

import torch

from infer.attention.attend import has_kernel
from infer.trees import compiled
from infer.trees.conditional import best_of_levels, conditional_ddtree
from infer.trees.tree import DraftTree, Nodes, Proposal, behind, comparable, node_count


def ddtree(proposal: Proposal) -> DraftTree:
    """Return the top `budget` prefixes (all of them, if there are fewer) of the marginals (B, L, V), in descending
    order of probability: the first n nodes are the tree of budget n. The top K = min(budget, V) tokens of a position
    suffice (lemma 1). With a conditional head, prefixes of the head's candidates by their conditional probability."""
    if proposal.steps is not None:
        return conditional_ddtree(proposal)
    marginals, budget = proposal.marginals, proposal.budget
    top, ids = marginals.topk(min(budget, marginals.shape[-1]), dim=-1)  # (B, L, K)
    search = best_first if compiled.available(top) or has_kernel(top.device) else by_depth
    return behind(proposal.bonus, search(comparable(top), ids, budget), marginals.shape[1])


def best_first(top: torch.Tensor, ids: torch.Tensor, budget: int) -> Nodes:
    """Run algorithm 1: the drafted nodes, best first, from the sorted log-probabilities and ids (B, L, K) of every
    position's likeliest tokens."""
    rows, length, ranks = top.shape
    if has_kernel(top.device):
        from infer.trees import search_kernel

        return search_kernel.best_first(top[:, 0], top[:, 1:, None], ids, node_count(length, ranks, budget))
    nodes = torch.empty(3, rows, node_count(length, ranks, budget), dtype=torch.long)
    scores = torch.empty(nodes.shape[1:], dtype=torch.float32)
    compiled.best_first(top.float().contiguous().numpy(), ids.contiguous().numpy(), nodes.numpy(), scores.numpy())
    return Nodes(*nodes, scores)


def by_depth(top: torch.Tensor, ids: torch.Tensor, budget: int) -> Nodes:
    """Find the same nodes from the same arguments, depth by depth on their device: extend the best prefixes of a depth
    by the likeliest tokens, keep the best of these, and at the end take the best of all depths.

    Exact: a prefix among the top B has its parent among them. Sorting is stable and shallow prefixes come first, so
    that a parent precedes a child of equal score.
    """
    scores, tokens = top[:, 0], ids[:, 0]  # (B, P) of the prefixes kept at this depth, best first
    parents = torch.full_like(tokens, -1)  # among all kept prefixes, -1 for the root
    depths = torch.ones_like(tokens)
    levels, first = [(scores, tokens, parents, depths)], 0
    for depth in range(1, top.shape[1]):
        prefix, rank = _pairs(scores.shape[1], top.shape[2], budget, top.device)  # (C,)
        candidates = scores[:, prefix] + top[:, depth, rank]  # (B, C)
        scores, order = candidates.sort(dim=1, descending=True, stable=True)
        scores, order = scores[:, :budget], order[:, :budget]
        tokens = ids[:, depth].gather(1, rank[order])
        parents = prefix[order] + first
        first += levels[-1][0].shape[1]
        levels.append((scores, tokens, parents, torch.full_like(tokens, depth + 1)))
    return best_of_levels(levels, budget)


@lru_cache(maxsize=256)
def _pairs(prefixes: int, ranks: int, budget: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (prefix, rank) of the extensions that can be among the best `budget` of a depth: (C,) each. The pair (r,
    t), counted from 0, is preceded by all (r', t') with r' <= r and t' <= t, hence (r + 1) (t + 1) <= budget."""
    prefix, rank = torch.arange(prefixes), torch.arange(ranks)
    pairs = ((prefix[:, None] + 1) * (rank + 1) <= budget).nonzero()
    return pairs[:, 0].to(device), pairs[:, 1].to(device)

"""DDTree: the draft tree of B nodes that maximises the expected acceptance length under the drafter's marginals.

DDTree section 4.3, algorithm 1: the B most probable prefixes, found best first.
"""

from heapq import heappop, heappush

import torch

from infer.trees.tree import DraftTree


def ddtree(bonus: torch.Tensor, marginals: torch.Tensor, budget: int) -> DraftTree:
    """The top `budget` prefixes (all of them, if there are fewer) of marginals (B, L, V), in log space, behind the
    bonus tokens (B,). The top K = min(budget, V) tokens of a position suffice (lemma 1)."""
    _, length, vocabulary = marginals.shape
    top, ids = marginals.topk(min(budget, vocabulary), dim=-1)  # (B, L, K)
    rows = [_best_first(*row, budget) for row in zip(top.tolist(), ids.tolist(), strict=True)]
    tokens, parents, depths, scores = (torch.tensor(column, device=bonus.device) for column in zip(*rows, strict=True))
    zeros = torch.zeros_like(bonus)[:, None]
    return DraftTree(
        tokens=torch.cat([bonus[:, None], tokens], 1),
        parents=torch.cat([zeros, parents], 1),
        depths=torch.cat([zeros, depths], 1),
        log_probs=torch.cat([zeros.to(scores.dtype), scores], 1),
        max_depth=length,
    )


def _best_first(top: list[list[float]], ids: list[list[int]], budget: int) -> tuple[list, list, list, list]:
    """Algorithm 1 for one row: tokens, parents, depths and scores of the drafted nodes in descending order of score.

    A heap entry is a prefix that is not in the tree yet: its score, negated for Python's min-heap, its parent's node
    and score, its depth and the rank of its last token.
    """
    tokens, parents, depths, scores = [], [], [], []
    length, ranks = len(top), len(top[0])
    heap = [(-top[0][0], 0, 1, 0, 0.0)]
    while heap and len(tokens) < budget:
        negated, parent, depth, rank, above = heappop(heap)
        tokens.append(ids[depth - 1][rank])
        parents.append(parent)
        depths.append(depth)
        scores.append(-negated)
        if rank + 1 < ranks:  # the next sibling
            heappush(heap, (-(above + top[depth - 1][rank + 1]), parent, depth, rank + 1, above))
        if depth < length:  # the first child, of the node just added
            heappush(heap, (negated - top[depth][0], len(tokens), depth + 1, 0, -negated))
    return tokens, parents, depths, scores

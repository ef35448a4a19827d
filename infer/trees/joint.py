"""One node budget for rows side by side: the nodes that are likeliest to be accepted, in whichever row they are.

What a round commits over all rows is expected to be the sum of its nodes' path probabilities (DDTree proposition 1, row
by row), and a node costs about the same in every row. So the best N nodes of the union of the trees are the N likeliest
of all; as a child is never likelier than its parent, they are the first few nodes of every row's own best tree. A row
whose next tokens the drafter does not know costs its root, and one that it is sure of gets a larger tree.

B rows, F drafted nodes found in each, M nodes of the widest tree with its root, N nodes verified, roots included.
"""

import torch

from infer.trees.tree import DraftTree, Part

MOST = 2  # times its even share that a row may get; more gained nothing (LOG.md)


def places(tree: DraftTree, live: torch.Tensor | None = None) -> torch.Tensor:
    """Return the place of every drafted node among those of all rows, likeliest first, (B, F) int64 from 0, for ranked
    trees. Rows that are not `live` (B,) come last."""
    scores = tree.log_probs[:, 1:].float()
    if live is not None:
        scores = scores.masked_fill(live[:, None] == 0, -torch.inf)
    order = scores.flatten().sort(descending=True, stable=True).indices
    places = torch.empty_like(order)
    return places.scatter_(0, order, torch.arange(len(order), device=order.device)).view_as(scores)


def by_place(log_probs: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities (B, F + 1), roots first, with all drafted nodes in the order of their places (B, F)."""
    drafted = log_probs[:, 1:].flatten()
    ordered = torch.empty_like(drafted).scatter_(0, places.flatten(), drafted)
    return torch.cat([log_probs[:, :1], ordered.view_as(places)], 1)


def expected(log_probs: torch.Tensor) -> torch.Tensor:
    """Return how many tokens a row is expected to commit where every row has 0 .. F nodes on average, (F + 1,), from
    what `by_place` returns, (B, F + 1)."""
    gained = log_probs[:, 1:].float().exp().flatten().cumsum(0)[len(log_probs) - 1 :: len(log_probs)]  # (F,)
    return torch.cat([gained.new_ones(1), 1 + gained / len(log_probs)])


def share(tree: DraftTree, places: torch.Tensor, total: int, narrow: bool = False) -> DraftTree:
    """Return the trees of the `total` first nodes by `places` (B, F); as wide as before, unless they are to be
    `narrow`: then as wide as the widest, which the host has to know."""
    sizes = (places < total).sum(1)  # (B,)
    if narrow:
        tree = tree.first(int(sizes.max()))
    rows, width = tree.tokens.shape
    left_out = torch.arange(width, device=sizes.device) > sizes[:, None]  # (B, M)
    packed = left_out.flatten().to(torch.uint8).argsort(stable=True)[: rows + total]
    parts = (tree.tokens, tree.parents, tree.depths, tree.log_probs)
    return DraftTree(*parts, tree.max_depth, part=Part(sizes, packed))

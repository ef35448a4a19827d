"""The static tree: every node down to a fixed depth gets the same number of children.

The shape is that of "Tree-Based Speculative Decoding" for NanoGPT, which takes the likeliest tokens as children. Here
they can also be drawn from the drafter's distribution, which is kept for `infer.engine.rejection`.

B rows, M nodes with the root, W width, D depth, I = 1 + W + .. + W^(D-1) inner nodes, L drafted positions, R rows of
draft distributions, V vocabulary.
"""

import torch

from infer.trees.tree import Conditional, DraftTree, Draws, Proposal


def by_position(marginals: torch.Tensor) -> Conditional:
    """Return a drafter's marginals (B, L, V) as a conditional that depends on the position alone."""
    return lambda depth, tokens: marginals[:, depth, None]


def static(proposal: Proposal) -> DraftTree:
    """Return the deepest full tree that fits into the budget, over the drafter's conditional distribution if it has
    one.

    Raises ValueError if not even the root's children fit, or if there are fewer tokens than children."""
    marginals, width = proposal.marginals, proposal.width
    depth = static_depth(width, proposal.budget, marginals.shape[1])
    conditional = proposal.conditional or by_position(marginals)
    return full_tree(proposal.bonus, conditional, width, depth, proposal.noise and proposal.noise(depth))


def full_tree(
    bonus: torch.Tensor, conditional: Conditional, width: int, depth: int, noise: torch.Tensor | None = None
) -> DraftTree:
    """Return the full tree of `width` and `depth` behind the bonus tokens (B,) int64.

    Without noise, children are the `width` likeliest tokens, likeliest first: the article's tree. With Gumbel noise
    (B, >= depth, V), `infer.engine.rejection.draft_noise`, they are drawn from q without replacement: the top W of
    log q + noise are an ordered sample without replacement (Gumbel top-k: Vieira 2014; Kool et al. 2019).

    The nodes of one depth share the noise of their position, which is as good as noise of their own: a walk reads the
    children of one node a depth, chosen by noise of shallower depths, which is independent of this one. Nodes that
    share the distribution too have the same children: with marginals, all nodes of a depth.

    Raises ValueError if there are fewer tokens than children.
    """
    tokens, log_probs, rows = [bonus[:, None]], [torch.zeros(len(bonus), 1, device=bonus.device)], []
    row, count = [], 0
    for level in range(depth):
        log_q = conditional(level, tokens[-1])  # (B, n or 1, V)
        if width > log_q.shape[-1]:
            raise ValueError(f"width={width} is more than the {log_q.shape[-1]} tokens there are: take fewer")
        nodes, distinct = tokens[-1].shape[1], log_q.shape[1]
        scores = log_q if noise is None else log_q + noise[:, level, None]
        children = scores.topk(width, dim=-1).indices  # (B, n or 1, W)
        scores = log_probs[-1][..., None] + log_q.gather(-1, children).float()  # (B, n, W)
        tokens.append(children.expand(-1, nodes, -1).flatten(1))
        log_probs.append(scores.flatten(1))
        rows.append(log_q)
        row.append(torch.arange(count, count + distinct, device=bonus.device).expand(nodes))
        count += distinct
    node = torch.arange(sum(level.shape[1] for level in tokens), device=bonus.device)
    depths = torch.cat([torch.full_like(level, at) for at, level in enumerate(tokens)], 1)
    return DraftTree(
        tokens=torch.cat(tokens, 1),
        parents=((node - 1).clamp(min=0) // width).expand(len(bonus), -1),
        depths=depths,
        log_probs=torch.cat(log_probs, 1),
        max_depth=depth,
        draws=Draws(width, None if noise is None else torch.cat(rows, 1), torch.cat(row)),
    )


def static_depth(width: int, budget: int, longest: int) -> int:
    """Return the depth, at most `longest`, of the deepest full tree of that width with at most `budget` drafted nodes.

    Raises ValueError if not even the root's children fit.
    """
    if not 1 <= width <= budget:
        raise ValueError(f"width={width} does not fit into budget={budget}: it must be between 1 and the budget")
    depth, level, nodes = 1, width, width
    while depth < longest and nodes + level * width <= budget:
        depth, level = depth + 1, level * width
        nodes += level
    return depth

"""The static tree: every node down to a fixed depth gets the same number of children, the likeliest
tokens behind it.

The shape is that of "Tree-Based Speculative Decoding" for NanoGPT; sampled texts are verified by
the same walk as all others, which is lossless whatever the children are.

B rows, W width, P prefixes of a depth.
"""

import torch

from infer.kernels.reference_search import behind_candidates, comparable
from infer.trees.ddtree import Marginals
from infer.trees.tree import DraftTree, Nodes, Proposal, behind


def static(proposal: Proposal) -> DraftTree:
    """Return the deepest full tree that fits into the budget, over the marginals or a conditional
    head; of fewer children where there is no room or there are no tokens for so many."""
    steps = proposal.steps or Marginals(proposal.marginals, proposal.width, proposal.vocabulary)
    width = min(proposal.width, proposal.budget, steps.tokens.shape[2])
    depth = static_depth(width, proposal.budget, steps.tokens.shape[1])
    scores = torch.zeros(len(proposal.bonus), 1, device=steps.tokens.device)
    levels = []
    memory = None
    which = torch.zeros_like(scores, dtype=torch.long)  # (B, P) the last candidate of every prefix
    for slot in range(depth):
        log_q, memory = behind_candidates(steps, slot, which, memory)
        best = comparable(log_q.expand(-1, scores.shape[1], -1)).topk(width)  # (B, P, W)
        scores = (scores[..., None] + best.values).flatten(1)
        which = best.indices.flatten(1)
        memory = None if memory is None else memory.repeat_interleave(width, 1)
        levels.append(
            (steps.tokens[:, slot].gather(1, which), torch.full_like(which, slot + 1), scores)
        )
    tokens, depths, scores = (torch.cat(column, 1) for column in zip(*levels, strict=True))
    parents = (torch.arange(tokens.shape[1], device=tokens.device) // width).expand_as(tokens)
    return behind(proposal.bonus, Nodes(tokens, parents, depths, scores), depth)


def static_depth(width: int, budget: int, longest: int) -> int:
    """Return the depth, at most `longest`, of the deepest full tree of that width with at most
    `budget` drafted nodes, 1 at least."""
    depth = 1
    level = width
    nodes = width
    while depth < longest and nodes + level * width <= budget:
        depth = depth + 1
        level = level * width
        nodes += level
    return depth

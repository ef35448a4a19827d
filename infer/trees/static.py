"""The static tree: every node above the deepest level has the same number of children.

The children of a node are the likeliest tokens after the node. The project "Tree-Based Speculative
Decoding" for NanoGPT builds trees of the same shape.
"""

import torch

from infer.kernels.reference_search import compute_position_log_probs, replace_nan_log_probs
from infer.trees.ddtree import MarginalConditionals
from infer.trees.tree import DraftNodes, DraftTree, Proposal, add_roots


def build_static_tree(proposal: Proposal) -> DraftTree:
    """Return trees in which each node above the deepest level has `proposal.width` children.

    The depth is the largest one for which the tree fits into the node budget. If the node budget or
    the number of candidates per position is smaller than `proposal.width`, nodes have only this
    smaller number of children. If the drafter has a conditional head, the children of a node depend
    on the path to the node.
    """
    conditionals = proposal.conditionals
    if conditionals is None:
        assert proposal.marginals is not None
        conditionals = MarginalConditionals(proposal.marginals, proposal.width, proposal.vocabulary)
    tokens = conditionals.tokens
    _, length, num_candidates = tokens.shape
    width = min(proposal.width, proposal.budget, num_candidates)
    depth = find_static_depth(width, proposal.budget, length)

    # (batch rows, prefixes): log-probabilities of the prefixes that end on the tree level that was
    # built last.
    scores = torch.zeros(len(proposal.bonus_tokens), 1, device=tokens.device)
    # (batch rows, prefixes): the last token of each of these prefixes, as an index into the
    # candidates of its position.
    last_candidates = torch.zeros_like(scores, dtype=torch.long)
    head_state = None  # (batch rows, prefixes, state size) for a recurrent conditional head
    level_tokens = []
    level_depths = []
    level_scores = []
    for slot in range(depth):
        log_q, head_state = compute_position_log_probs(
            conditionals, slot, last_candidates, head_state
        )
        log_q = replace_nan_log_probs(log_q.expand(-1, scores.shape[1], -1))
        best = log_q.topk(width)  # the likeliest tokens after each prefix
        scores = (scores[..., None] + best.values).flatten(1)
        last_candidates = best.indices.flatten(1)
        if head_state is not None:
            head_state = head_state.repeat_interleave(width, 1)

        level_tokens.append(tokens[:, slot].gather(1, last_candidates))
        level_depths.append(torch.full_like(last_candidates, slot + 1))
        level_scores.append(scores)

    node_tokens = torch.cat(level_tokens, 1)
    parents = torch.arange(node_tokens.shape[1], device=tokens.device) // width
    nodes = DraftNodes(
        node_tokens,
        parents.expand_as(node_tokens),
        torch.cat(level_depths, 1),
        torch.cat(level_scores, 1),
    )
    return add_roots(proposal.bonus_tokens, nodes, depth)


def find_static_depth(width: int, budget: int, max_depth: int) -> int:
    """Return the largest depth, up to `max_depth`, for which a full tree fits into the node budget.

    width: number of children of each node above the deepest level
    budget: maximum number of drafted nodes

    The depth is at least 1.
    """
    depth = 1
    level_nodes = width
    total_nodes = width
    while depth < max_depth and total_nodes + level_nodes * width <= budget:
        depth = depth + 1
        level_nodes = level_nodes * width
        total_nodes += level_nodes
    return depth

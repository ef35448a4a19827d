"""The static tree: down to a fixed depth, every node has the same number of children. The children
are the likeliest tokens after the node.

The shape is that of "Tree-Based Speculative Decoding" for NanoGPT. Decoding is lossless whatever
the children are, since the target verifies all trees by the same walk.

B batch rows, P prefixes of the same depth, M candidates per position, W children per node, S state
size of a recurrent head.
"""

import torch

from infer.kernels.reference_search import compute_slot_log_probs, replace_nan_log_probs
from infer.trees.ddtree import MarginalConditionals
from infer.trees.tree import DraftNodes, DraftTree, Proposal, with_root


def build_static_tree(proposal: Proposal) -> DraftTree:
    """Return the deepest tree that fits into the node budget, if each node above the last level has
    `proposal.width` children.

    Nodes have fewer children if the budget or the number of candidates is smaller than the width.
    With a conditional head the children of a node depend on the node's token.
    """
    conditionals = proposal.conditionals
    if conditionals is None:
        assert proposal.marginals is not None
        conditionals = MarginalConditionals(proposal.marginals, proposal.width, proposal.vocabulary)
    tokens = conditionals.tokens
    _, length, num_candidates = tokens.shape
    width = min(proposal.width, proposal.budget, num_candidates)
    depth = find_static_depth(width, proposal.budget, length)

    scores = torch.zeros(len(proposal.bonus), 1, device=tokens.device)  # (B, P)
    # (B, P) for each prefix the index of its last token among the candidates of that position
    last_candidates = torch.zeros_like(scores, dtype=torch.long)
    head_state = None  # (B, P, S) the state of a recurrent head
    level_tokens = []
    level_depths = []
    level_scores = []
    for slot in range(depth):
        log_q, head_state = compute_slot_log_probs(conditionals, slot, last_candidates, head_state)
        log_q = replace_nan_log_probs(log_q.expand(-1, scores.shape[1], -1))  # (B, P, M)
        best = log_q.topk(width)  # (B, P, W)
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
    return with_root(proposal.bonus, nodes, depth)


def find_static_depth(width: int, budget: int, max_depth: int) -> int:
    """Return the depth of the deepest full tree of the given width that has at most `budget`
    drafted nodes. The depth is between 1 and `max_depth`."""
    depth = 1
    level_nodes = width
    total_nodes = width
    while depth < max_depth and total_nodes + level_nodes * width <= budget:
        depth = depth + 1
        level_nodes = level_nodes * width
        total_nodes += level_nodes
    return depth

"""The chain: the most probable token of each position, which DFlash verifies. A tree of width
one."""

import torch

from infer.trees.tree import DraftTree, Nodes, Proposal, behind


def chain(proposal: Proposal) -> DraftTree:
    """Return the likeliest token of each of the first min(budget, L) positions, one behind the
    other; with a conditional head the likeliest one behind those before it."""
    bonus = proposal.bonus
    steps = proposal.steps
    length = min(proposal.budget, proposal.marginals.shape[1])
    if steps is not None:
        tokens, log_probs = steps.chain(length)
    else:
        log_probs, columns = proposal.marginals[:, :length].max(-1)  # (B, length)
        tokens = proposal.vocabulary.ids(columns)
    order = torch.arange(length, device=bonus.device).expand(len(bonus), -1)
    return behind(bonus, Nodes(tokens, order, order + 1, log_probs.cumsum(1)), length)

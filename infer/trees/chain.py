"""The chain: the most probable token at each position, what DFlash verifies. A tree of width one."""

import torch

from infer.trees.tree import DraftTree, Proposal


def chain(proposal: Proposal) -> DraftTree:
    """Return the likeliest token of each of the first min(budget, L) positions, one behind the other."""
    bonus, length = proposal.bonus, min(proposal.budget, proposal.marginals.shape[1])
    log_probs, tokens = proposal.marginals[:, :length].max(-1)  # (B, length)
    order = torch.arange(length + 1, device=bonus.device).expand(len(bonus), -1)
    return DraftTree(
        tokens=torch.cat([bonus[:, None], tokens], 1),
        parents=(order - 1).clamp(min=0),
        depths=order,
        log_probs=torch.cat([torch.zeros_like(log_probs[:, :1]), log_probs.cumsum(1)], 1),
        max_depth=length,
    )

"""The chain: a tree of width one with the likeliest token of each position. DFlash verifies chains.

B batch rows, L drafted positions.
"""

import torch

from infer.trees.tree import DraftNodes, DraftTree, Proposal, with_root


def build_chain(proposal: Proposal) -> DraftTree:
    """Return the greedy chain of min(budget, L) tokens for each batch row.

    Each token is the likeliest token of its position. With a conditional head, it is the likeliest
    token after the previous tokens of the chain.
    """
    assert proposal.marginals is not None
    length = min(proposal.budget, proposal.marginals.shape[1])
    if proposal.conditionals is not None:
        tokens, log_probs = proposal.conditionals.chain(length)
    else:
        log_probs, columns = proposal.marginals[:, :length].max(-1)  # (B, length)
        tokens = proposal.vocabulary.columns_to_ids(columns)

    rows = len(proposal.bonus)
    parents = torch.arange(length, device=proposal.bonus.device).expand(rows, -1)
    nodes = DraftNodes(tokens, parents, parents + 1, log_probs.cumsum(1))
    return with_root(proposal.bonus, nodes, length)

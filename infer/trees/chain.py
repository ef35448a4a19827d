"""The chain: a draft tree without branches, as in DFlash."""

import torch

from infer.trees.tree import DraftNodes, DraftTree, Proposal, add_roots


def build_chain(proposal: Proposal) -> DraftTree:
    """Return a draft tree without branches (a chain) for each batch row.

    A chain has one token for each drafted position, but at most as many tokens as the node budget.
    Each token is the likeliest one at its position. If the drafter has a conditional head, it is
    the likeliest one after the previous tokens of the chain.
    """
    assert proposal.marginals is not None
    length = min(proposal.budget, proposal.marginals.shape[1])
    if proposal.conditionals is not None:
        tokens, log_probs = proposal.conditionals.draft_greedy_chain(length)
    else:
        log_probs, columns = proposal.marginals[:, :length].max(-1)  # (B, length)
        tokens = proposal.vocabulary.columns_to_ids(columns)

    rows = len(proposal.bonus_tokens)
    parents = torch.arange(length, device=proposal.bonus_tokens.device).expand(rows, -1)
    nodes = DraftNodes(tokens, parents, parents + 1, log_probs.cumsum(1))
    return add_roots(proposal.bonus_tokens, nodes, length)

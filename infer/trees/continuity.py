"""DART's continuity-aware tree, and DDTree's tree on path-conditioned scores: both ask an n-gram model which of the
drafted tokens go together (see `infer.trees.guided` for the searches, `infer.ngrams.model` for the model).

The model lies in the host's memory, so the trees are built there: on a GPU a round has one more copy to the host, of
the K likeliest tokens of every position.
"""

import numpy as np
import torch

from infer.trees import guided
from infer.trees.ddtree import node_count
from infer.trees.tree import DraftTree, Nodes, Proposal, behind

RANKS, BEAM = 25, 20  # DART appendix D: tokens looked at a position, prefixes that are gone on with


def continuity(proposal: Proposal) -> DraftTree:
    """DART algorithm 1: a beam over the 25 likeliest tokens of every position of the marginals (B, L, V), and of all
    prefixes seen the `budget` best, in descending order of score. log_probs are the drafter's alone."""
    top, ids = _likeliest(proposal.marginals)
    rows, length, ranks = top.shape
    seen, active = 0, 1
    for _ in range(length):
        seen, active = seen + active * ranks, min(BEAM, active * ranks)
    nodes = torch.empty(3, rows, min(proposal.budget, seen), dtype=torch.long)
    log_probs = torch.empty(nodes.shape[1:], dtype=torch.float32)
    ngram = proposal.ngram
    for row, context in enumerate(_contexts(proposal)):
        judged = top[row].numpy(), ids[row].numpy(), context
        filled = nodes[:, row].numpy(), log_probs[row].numpy()
        guided.beam(ngram.arrays, ngram.tokens, ngram.order, *judged, BEAM, *filled)
    return behind(proposal.bonus, Nodes(*nodes, log_probs), length)


def guided_ddtree(proposal: Proposal) -> DraftTree:
    """Return the top `budget` prefixes when a token's probability behind a path is proportional to its marginal times
    its n-gram probability to the power of `weight`. The first n nodes are the tree of budget n; log_probs are these
    path-conditioned ones."""
    top, ids = _likeliest(proposal.marginals)
    rows, length, ranks = top.shape
    nodes = torch.empty(3, rows, node_count(length, ranks, proposal.budget), dtype=torch.long)
    scores = torch.empty(nodes.shape[1:], dtype=torch.float64)
    ngram = proposal.ngram
    for row, context in enumerate(_contexts(proposal)):
        judged = top[row].numpy(), ids[row].numpy(), context
        filled = nodes[:, row].numpy(), scores[row].numpy()
        guided.best_first(ngram.arrays, ngram.tokens, ngram.order, proposal.weight, *judged, *filled)
    return behind(proposal.bonus, Nodes(*nodes, scores.float()), length)


def _likeliest(marginals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and ids (B, L, K) of every position's likeliest tokens, on the host."""
    top, ids = marginals.topk(min(RANKS, marginals.shape[-1]), dim=-1)
    return top.float().cpu(), ids.cpu()


def _contexts(proposal: Proposal) -> list[np.ndarray]:
    """As much of every row's text as the n-gram model looks at: (C,) int64 each."""
    longest = proposal.ngram.order - 1
    return [np.array(context[max(0, len(context) - longest) :], np.int64) for context in proposal.contexts]

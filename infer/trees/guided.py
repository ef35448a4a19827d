"""DDTree's tree on path-conditioned scores: n-grams judge which drafted tokens follow each other
(`infer.ngrams.factor`).

The n-gram model is in the host's memory, so the trees are built there: on a GPU a round has one
more copy to the host, of the K likeliest tokens of every position.

B rows, L drafted positions, M candidates a position, P prefixes, V vocabulary.
"""

import numpy as np
import torch

from infer.kernels import cpu_search
from infer.kernels.reference_search import node_count, one_table
from infer.ngrams.factor import MORE, REACH, Guide
from infer.trees.ddtree import Marginals
from infer.trees.tree import Conditionals, DraftTree, Nodes, Proposal, behind

RANKS = 25  # tokens of the marginals considered at a position, as in DART appendix D


def guided_ddtree(proposal: Proposal) -> DraftTree:
    """Return the top `budget` prefixes when a token's probability behind a path is proportional to
    its marginal times its n-gram probability to the power of `weight`; the n-gram model's counts
    are corrected by those of the text itself. The first n nodes are the tree of budget n; log_probs
    are these path-conditioned ones. With a conditional head a token's probability behind its path
    takes its marginal's place, unless the head is recurrent."""
    steps = proposal.steps
    if steps is None or steps.recurrent:
        steps = Marginals(proposal.marginals, RANKS, proposal.vocabulary)
    rows, length, ranks = steps.tokens.shape
    nodes = torch.empty(rows, 3, node_count(length, ranks, proposal.budget), dtype=torch.long)
    scores = torch.empty(rows, nodes.shape[2], dtype=torch.float64)
    for guide, *found in zip(
        guides(proposal, steps, nodes.shape[2]), nodes.numpy(), scores.numpy(), strict=True
    ):
        log_q = np.empty(guide.listed.shape)
        tokens = np.empty_like(guide.listed)
        cpu_search.search(log_q, tokens, length, 0, guide, *found)
    return behind(proposal.bonus, Nodes(*nodes.unbind(1), scores.float()), length)


def guides(proposal: Proposal, steps: Marginals | Conditionals, budget: int) -> list[Guide]:
    """Return what every row's search chooses from: the likeliest tokens of the marginals, or a
    conditional head's candidates. What n-grams add has its marginal, on the host; elsewhere the
    vocabulary stays where it is, and what is not listed counts as the last that is, as do tokens
    that the drafter does not know."""
    ngram = proposal.ngram
    marginals = proposal.marginals
    known = proposal.vocabulary
    last = marginals.gather(-1, known.columns(steps.tokens[..., -1:]))
    alone = known.whole(marginals, last) if marginals.device.type == "cpu" else last
    listed = (part.numpy() for part in steps.tokens.cpu().sort(-1))  # tokens and places (B, L, K)
    log_q = (part.float().cpu().contiguous().numpy() for part in (one_table(steps), alone))
    ranks = steps.tokens.shape[2] + MORE
    longest = max(ngram.order - 1, 1)
    counted = ngram.arrays, ngram.tokens, float(proposal.weight), known.size or marginals.shape[-1]
    return [
        Guide(
            *counted,
            steps.table[1].shape[2],
            *row,
            listed=np.empty((budget, ranks), np.int64),
            suffixes=np.empty((budget, longest), np.int64),
            grown=np.empty((budget, longest + 1, ranks), np.int64),
            recent=np.empty((budget, REACH), np.int64),
        )
        for row in zip(contexts(proposal), *listed, *log_q, strict=True)
    ]


def contexts(proposal: Proposal) -> list[np.ndarray]:
    """Return every row's text: (C,) int64 each."""
    return [np.asarray(context, np.int64) for context in proposal.contexts]

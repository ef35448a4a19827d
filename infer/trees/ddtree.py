"""DDTree: the draft tree with the largest expected acceptance length for a given number of nodes.

The tree consists of the likeliest prefixes (DDTree section 4.3). A prefix is a sequence of drafted
tokens, and a node represents the prefix that ends at the node. The score of a node is the
log-probability of its prefix: the score of the parent plus the log-probability of the node's token
after the parent's prefix. A prefix is never more probable than its parent. Lemma 1 and proposition
1 of the paper therefore also hold for the probabilities of a conditional head. If the drafter
predicts only marginals (probabilities that do not depend on the other drafted tokens), they are
used as the conditional probabilities.

The search is exact. For marginals and for heads that depend on the previous token only, it is the
best-first search of the paper's algorithm 1. For recurrent heads it proceeds depth by depth. Both
searches are in `infer.kernels`.
"""

import torch

from infer.kernels.reference_search import search_tree_by_depth
from infer.kernels.table import select_kernels
from infer.trees.tree import DraftTree, Proposal, add_roots
from infer.trees.vocabulary import FULL_VOCABULARY, DraftVocabulary


class MarginalConditionals:
    """A drafter's marginal probabilities, which do not depend on the tokens drafted before, in the
    form of the protocol `Conditionals`.

    The candidates are the `count` likeliest tokens of each position.
    """

    recurrent: bool = False

    def __init__(
        self, marginals: torch.Tensor, count: int, vocabulary: DraftVocabulary = FULL_VOCABULARY
    ) -> None:
        count = min(count, marginals.shape[-1])
        top_log_q, columns = marginals.topk(count, dim=-1)
        # (batch rows, drafted positions, candidates)
        self.tokens: torch.Tensor = vocabulary.columns_to_ids(columns)
        # Log-probabilities of the candidates: (batch rows, candidates) for the first position, and
        # (batch rows, other positions, 1, candidates). The third axis, for the previous candidate,
        # has length 1 because marginals do not depend on the previous candidate.
        self.candidate_log_probs: tuple[torch.Tensor, torch.Tensor] = (
            top_log_q[:, 0],
            top_log_q[:, 1:, None],
        )


def build_ddtree(proposal: Proposal) -> DraftTree:
    """Return draft trees of the likeliest prefixes under the drafter.

    A tree has as many drafted nodes as the node budget, or fewer if there are fewer prefixes. The
    nodes are in descending order of probability, so the first n nodes are the tree for a budget of
    n nodes.

    For a budget of n nodes, only the n likeliest tokens of each position are considered; the others
    cannot be in the tree (lemma 1). With a conditional head, only the head's candidates are
    considered.
    """
    conditionals = proposal.conditionals
    if conditionals is None:
        assert proposal.marginals is not None
        conditionals = MarginalConditionals(
            proposal.marginals, proposal.budget, proposal.vocabulary
        )
    if conditionals.recurrent:
        search = search_tree_by_depth
    else:
        search = select_kernels(proposal.bonus_tokens.device, torch.float32).best_first_search

    nodes = search(conditionals, proposal.budget)
    return add_roots(proposal.bonus_tokens, nodes, max_depth=conditionals.tokens.shape[1])

"""DDTree: the draft tree that maximises the expected acceptance length for a given node budget.

This tree consists of the likeliest prefixes (DDTree section 4.3). The score of a node is its
parent's score plus log q, the log-probability of the node's token after the parent's prefix. log q
is at most 0, so a prefix never has a higher score than its parent. Lemma 1 and proposition 1 of the
paper therefore also hold for the conditional distributions of a drafter's head. Marginals are
treated as conditionals that do not depend on the previous token.

The search is exact. For marginals and for heads that depend on the previous token only, it is the
best-first search of the paper's algorithm 1. For recurrent heads it proceeds depth by depth. Both
searches are in `infer.kernels`.

B batch rows, L drafted positions, M candidates per position, R columns of the marginals: one for
each token that the drafter proposes.
"""

import torch

from infer.kernels.reference_search import search_tree_by_depth
from infer.kernels.table import select_kernels
from infer.trees.tree import DraftTree, Proposal, with_root
from infer.trees.vocabulary import FULL_VOCABULARY, DraftVocabulary


class MarginalConditionals:
    """Marginals (B, L, R) in the form of `Conditionals`, which here do not depend on the previous
    token. The candidates are the `count` likeliest tokens of each position."""

    recurrent: bool = False

    def __init__(
        self, marginals: torch.Tensor, count: int, vocabulary: DraftVocabulary = FULL_VOCABULARY
    ) -> None:
        count = min(count, marginals.shape[-1])
        top_log_q, columns = marginals.topk(count, dim=-1)
        self.tokens: torch.Tensor = vocabulary.columns_to_ids(columns)  # (B, L, M)
        # (B, M) and (B, L - 1, 1, M): the third axis has length 1 because the previous token does
        # not matter.
        self.table: tuple[torch.Tensor, torch.Tensor] = (top_log_q[:, 0], top_log_q[:, 1:, None])


def build_ddtree(proposal: Proposal) -> DraftTree:
    """Return trees of the `budget` likeliest prefixes, or of all prefixes if there are fewer.

    Nodes are in descending order of probability, so the first n nodes are the tree for a budget of
    n nodes. Only the min(budget, R) likeliest tokens of each position are considered, which is
    sufficient (lemma 1). With a conditional head the prefixes consist of the head's candidates.
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
        search = select_kernels(proposal.bonus.device, torch.float32).best_first_search

    nodes = search(conditionals, proposal.budget)
    return with_root(proposal.bonus, nodes, max_depth=conditionals.tokens.shape[1])

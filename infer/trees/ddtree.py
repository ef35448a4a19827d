"""DDTree: the draft tree that maximises the expected acceptance length for a given node budget.

DDTree section 4.3: the tree of the likeliest prefixes. The score of a node is its parent's score
plus log q of its token after its path. log q is at most 0, so a prefix never scores above its
parent, and lemma 1 and proposition 1 also hold for the conditionals of a drafter's head. Marginals
are conditionals that do not depend on the previous token.

The search is exact. It is best first (the paper's algorithm 1) over the table of marginals or of a
first-order head, and depth by depth for recurrent heads. Both searches are in `infer.kernels`.

B batch rows, L drafted positions, M candidates per position, R columns of the marginals.
"""

import torch

from infer.kernels.reference_search import search_tree_by_depth
from infer.kernels.table import select_kernels
from infer.trees.tree import DraftTree, Proposal, with_root
from infer.trees.vocabulary import FULL_VOCABULARY, DraftVocabulary


class MarginalConditionals:
    """Marginals (B, L, R) in the form of conditionals that do not depend on the previous token,
    restricted to the `count` likeliest tokens of every position."""

    recurrent: bool = False

    def __init__(
        self,
        marginals: torch.Tensor,
        count: int,
        vocabulary: DraftVocabulary = FULL_VOCABULARY,
    ) -> None:
        count = min(count, marginals.shape[-1])
        top_log_q, columns = marginals.topk(count, dim=-1)
        self.tokens: torch.Tensor = vocabulary.columns_to_ids(columns)  # (B, L, M)
        # (B, M) and (B, L - 1, 1, M): one row for all previous tokens
        self.table: tuple[torch.Tensor, torch.Tensor] = (top_log_q[:, 0], top_log_q[:, 1:, None])


def build_ddtree(proposal: Proposal) -> DraftTree:
    """Return the `budget` likeliest prefixes, or all prefixes if there are fewer, in descending
    order of probability: the first n nodes are the tree of budget n.

    The min(budget, R) likeliest tokens of each position of the marginals suffice (lemma 1). With a
    conditional head the prefixes consist of the head's candidates.
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

"""DDTree: the draft tree of B nodes that maximises the expected acceptance length under the
drafter's distributions.

DDTree section 4.3: the B likeliest prefixes. The score of a node is its parent's plus log q of its
token behind its own path, at most 0, so that a prefix never scores above its parent: lemma 1 and
proposition 1 hold with the conditionals of a drafter's head for marginals, which are conditionals
with one row, and the best B prefixes are found exactly: best first (the paper's algorithm 1) over
the table of a first-order head or of marginals, depth by depth for recurrent heads. `infer.kernels`
has both searches.

B rows, L drafted positions, M candidates a position, V vocabulary.
"""

import torch

from infer.kernels.reference_search import search_by_depth
from infer.kernels.table import kernels_for
from infer.trees.tree import DraftTree, Proposal, behind
from infer.trees.vocabulary import ALL, Vocabulary


class Marginals:
    """Marginals (B, L, V) of a vocabulary as conditionals with one row, over their `count`
    likeliest tokens."""

    recurrent = False

    def __init__(self, marginals: torch.Tensor, count: int, vocabulary: Vocabulary = ALL) -> None:
        top, columns = marginals.topk(min(count, marginals.shape[-1]), dim=-1)
        self.tokens = vocabulary.ids(columns)  # (B, L, M)
        self.table = top[:, 0], top[:, 1:, None]  # (B, M), (B, L - 1, 1, M)


def ddtree(proposal: Proposal) -> DraftTree:
    """Return the top `budget` prefixes (all of them, if there are fewer) of the marginals (B, L,
    V), in descending order of probability: the first n nodes are the tree of budget n. The top K =
    min(budget, V) tokens of a position suffice (lemma 1). With a conditional head, prefixes of the
    head's candidates by their conditional probability."""
    steps = proposal.steps or Marginals(proposal.marginals, proposal.budget, proposal.vocabulary)
    search = kernels_for(proposal.bonus.device, torch.float32).best_first_search
    if steps.recurrent:
        search = search_by_depth
    return behind(proposal.bonus, search(steps, proposal.budget), steps.tokens.shape[1])

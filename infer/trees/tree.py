"""The draft tree that the target verifies, and the drafter's proposal from which it is built."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from infer.kernels.reference_search import DraftNodes
from infer.ngrams.model import NGramModel
from infer.trees.vocabulary import FULL_VOCABULARY, DraftVocabulary


class Conditionals(Protocol):
    """A drafter's probabilities of candidate tokens, given the tokens drafted before. Each drafted
    position has a list of candidate tokens.

    If the drafter has a conditional head, `infer.drafters.heads.draft.ConditionalDraft` computes
    the probabilities. Otherwise they are the marginals, which do not depend on the other drafted
    tokens.
    """

    # Whether the probabilities of a position depend on all tokens drafted before. If false, they
    # depend on the previous token only, and `candidate_log_probs` contains them.
    recurrent: bool
    # (batch rows, drafted positions, candidates) int64: token ids, in descending order of marginal
    # probability.
    tokens: torch.Tensor

    @property
    def candidate_log_probs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The log-probabilities of all candidates, for heads that are not recurrent.

        The first tensor is for position 0 and has the shape (B, candidates). The second tensor is
        for the other positions and has the shape (B, positions - 1, previous candidates,
        candidates). The size of its third axis is 1 if the log-probabilities do not depend on the
        previous candidate.
        """

    def compute_first_log_probs(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the log-probabilities of the candidates of position 0, and the initial state of a
        recurrent head.

        The log-probabilities have the shape (B, 1, candidates), and the state has the shape (B, 1,
        state size). The state is None if the head is not recurrent.
        """

    def compute_next_log_probs(
        self, position: int, candidates: torch.Tensor, state: torch.Tensor | None, /
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the log-probabilities of a position's candidates after each prefix, and the
        recurrent head's state after each prefix.

        candidates: (B, prefixes), the last token of each prefix, given as an index into the
            candidates of the previous position
        state: (B, prefixes, state size), the recurrent head's state before the last token of each
            prefix; None if the head is not recurrent

        The log-probabilities have the shape (B, prefixes, candidates).
        """

    def draft_greedy_chain(self, length: int, /) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a chain of `length` tokens. Each token is the likeliest one after the previous
        tokens of the chain.

        All tokens that the drafter scores are considered, not only the candidates. Returns tokens
        (B, length) and their log-probabilities (B, length).
        """


@dataclass(frozen=True)
class Proposal:
    """The input of a tree method: the drafter's distributions and the options of the tree."""

    bonus_tokens: torch.Tensor  # (batch rows,) int64: the bonus tokens, which become the roots
    # (batch rows, drafted positions, tokens that the drafter scores): log-probabilities, computed
    # with the sampling options and with the same Gumbel noise with which the target samples. None
    # without a drafter.
    marginals: torch.Tensor | None
    budget: int = 0  # maximum number of drafted nodes per batch row
    ngram: NGramModel | None = None
    # The last tokens of each batch row's sequence, including the bonus token, for the n-gram model.
    contexts: Sequence[Sequence[int] | np.ndarray] = ()
    ngram_weight: float = 1.0  # exponent of the n-gram probabilities in the score of a token
    width: int = 1  # number of children per node of a static tree
    eos_token_ids: Collection[int] = ()
    conditionals: Conditionals | None = None  # None if the drafter has no conditional head
    # Which token id each index on the last axis of `marginals` stands for.
    vocabulary: DraftVocabulary = FULL_VOCABULARY


@dataclass(frozen=True)
class DraftTree:
    """The draft trees of a batch, one for each batch row.

    Node 0 is the root. The root has the bonus token and does not count towards the node budget. A
    parent comes before its children. A node represents the prefix that consists of all tokens from
    the root to the node (DDTree section 4.2).
    """

    tokens: torch.Tensor  # (batch rows, nodes) int64: the token of each node
    parents: torch.Tensor  # (batch rows, nodes) int64: the parent's node number; 0 for the root
    depths: torch.Tensor  # (batch rows, nodes) int64: depth of each node; 0 for the root
    # (batch rows, nodes): log-probability, under the drafter, of the prefix that ends at the node.
    # It is 0 for the root.
    log_probs: torch.Tensor
    # Upper bound of `depths`: usually the number of drafted positions, 0 for trees of only a root.
    max_depth: int
    # (batch rows, nodes) bool: true for nodes, false for padding. The padding comes after the nodes
    # of a batch row and has the token -1. None if there is no padding.
    node_mask: torch.Tensor | None = None

    @property
    def max_drafted(self) -> int:
        """The largest number of drafted nodes of a batch row."""
        return self.tokens.shape[1] - 1

    @property
    def drafted_counts(self) -> list[int]:
        """The number of drafted nodes of each batch row, without the root."""
        if self.node_mask is None:
            return [self.max_drafted] * len(self.tokens)
        return (self.node_mask.sum(1) - 1).tolist()

    def positions(self, root_positions: torch.Tensor) -> torch.Tensor:
        """Return the positions of all nodes in their sequences, (B, nodes).

        root_positions: (B,), the positions of the roots
        """
        return root_positions[:, None] + self.depths

    def build_ancestor_mask(self) -> torch.Tensor:
        """Return the attention mask between nodes, (B, nodes, nodes) bool.

        Entry [b, q, k] is true if, in batch row b, node k is node q or an ancestor of node q.
        """
        rows, nodes = self.parents.shape
        mask = torch.eye(nodes, dtype=torch.bool, device=self.parents.device).expand(rows, -1, -1)

        # Pointer doubling. In each iteration, the mask contains the ancestors that are fewer than
        # `steps` levels above a node, and `upper_node` is the ancestor that is `steps` levels above
        # it (or the root).
        upper_node = self.parents
        steps = 1
        while steps <= self.max_depth:
            mask = mask | mask.gather(1, upper_node[..., None].expand(-1, -1, nodes))
            upper_node = upper_node.gather(1, upper_node)
            steps = 2 * steps
        return mask.contiguous()

    def keep_first(self, num_nodes: int) -> "DraftTree":
        """Return trees that consist of the root and the first `num_nodes` drafted nodes.

        If the nodes are sorted by probability, these are the best trees of this size.
        """
        end = num_nodes + 1
        return DraftTree(
            self.tokens[:, :end],
            self.parents[:, :end],
            self.depths[:, :end],
            self.log_probs[:, :end],
            self.max_depth,
        )

    def keep_likeliest(self, mean_nodes_per_row: int) -> "DraftTree":
        """Return smaller trees that keep the likeliest drafted nodes among the nodes of all batch
        rows.

        The trees of the batch keep `mean_nodes_per_row` drafted nodes on average. Batch rows in
        which the drafter is confident keep more nodes, and other batch rows keep fewer. The nodes
        of each batch row must be sorted by probability.
        """
        rows, nodes = self.log_probs[:, 1:].shape
        likeliest = self.log_probs[:, 1:].flatten().topk(rows * mean_nodes_per_row).indices
        row_of_node = likeliest // nodes
        counts = 1 + row_of_node.bincount(minlength=rows)

        tree = self.keep_first(int(counts.max()) - 1)
        node_mask = torch.arange(tree.max_drafted + 1, device=counts.device) < counts[:, None]
        return replace(tree, tokens=tree.tokens.where(node_mask, -1), node_mask=node_mask)


def add_roots(bonus: torch.Tensor, nodes: DraftNodes, max_depth: int) -> DraftTree:
    """Return draft trees that consist of roots and the given drafted nodes.

    bonus: (B,), the bonus tokens, which become the tokens of the roots

    The trees are on the device of the bonus tokens.
    """
    zeros = torch.zeros_like(bonus)[:, None]
    log_probs = nodes.log_probs.to(bonus.device)
    return DraftTree(
        tokens=torch.cat([bonus[:, None], nodes.tokens.to(bonus.device)], 1),
        parents=torch.cat([zeros, nodes.parents.to(bonus.device)], 1),
        depths=torch.cat([zeros, nodes.depths.to(bonus.device)], 1),
        log_probs=torch.cat([zeros.to(log_probs.dtype), log_probs], 1),
        max_depth=max_depth,
    )


def build_root_only_trees(proposal: Proposal) -> DraftTree:
    """Return trees with only a root, so that the target decodes one token per sequence as without a
    drafter."""
    return make_root_trees(proposal.bonus_tokens)


def make_root_trees(bonus: torch.Tensor) -> DraftTree:
    """Return trees with only a root.

    bonus: (B,), the bonus tokens, which become the tokens of the roots
    """
    zeros = torch.zeros_like(bonus)[:, None]
    return DraftTree(bonus[:, None], zeros, zeros, zeros.float(), max_depth=0)

"""The draft tree that the target verifies in a round, and the proposal that it is built from.

B batch rows, M nodes including the root, L drafted positions, R tokens that the drafter proposes.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from infer.kernels.reference_search import DraftNodes
from infer.ngrams.model import NGramModel
from infer.trees.vocabulary import FULL_VOCABULARY, DraftVocabulary


class Conditionals(Protocol):
    """Conditional distributions over M candidate tokens per position, from a conditional head
    (`infer.drafters.heads.draft.ConditionalDraft`) or from marginals."""

    # True: a token depends on all tokens before it, not only on the last one, so there is no table.
    recurrent: bool
    # (B, L, M) int64 ids of the candidates, by descending marginal probability
    tokens: torch.Tensor

    @property
    def table(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log q (B, M) of position 0, and (B, L - 1, M, M) of the others, indexed by
        [previous candidate, candidate]."""

    def begin(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return log q (B, 1, M) of position 0, and a recurrent head's state (B, 1, S)."""

    def extend(
        self, position: int, candidates: torch.Tensor, state: torch.Tensor | None, /
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return log q (B, P, M) of a position after prefixes whose last tokens are the candidates
        numbered `candidates` (B, P) of the position before, and a recurrent head's new state."""

    def chain(self, length: int, /) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the greedy chain over the drafter's whole vocabulary: the likeliest token of each
        position after the ones before it, (B, length), and its log q, (B, length)."""


@dataclass(frozen=True)
class Proposal:
    """The input of a tree method: the drafter's distributions and the options of the tree."""

    bonus: torch.Tensor  # (B,) int64, the bonus tokens, which become the roots
    # (B, L, R) log space, conditioned on the target's noise; None without a drafter
    marginals: torch.Tensor | None
    budget: int = 0  # maximum number of drafted nodes per batch row
    ngram: NGramModel | None = None
    # With an n-gram model: the last tokens of every row's sequence, including the bonus token.
    contexts: Sequence[Sequence[int] | np.ndarray] = ()
    weight: float = 1.0  # exponent of the n-gram probability; the drafter's has exponent 1
    width: int = 1  # children per node of a static tree
    eos_token_ids: Collection[int] = ()
    conditionals: Conditionals | None = None  # of a drafter with a conditional head
    vocabulary: DraftVocabulary = FULL_VOCABULARY  # of the R columns of `marginals`


@dataclass(frozen=True)
class DraftTree:
    """Draft trees of B batch rows. Node 0 is the root, which holds the bonus token and does not
    count towards the node budget. A parent comes before its children.

    A node stands for the whole prefix from the root down to it (DDTree section 4.2).
    """

    tokens: torch.Tensor  # (B, M) int64
    parents: torch.Tensor  # (B, M) int64, the root's parent is the root
    depths: torch.Tensor  # (B, M) int64, 0 for the root
    # (B, M) log-probability of the whole prefix under the drafter, 0 for the root
    log_probs: torch.Tensor
    max_depth: int  # upper bound of `depths`: L, or 0 for a tree with only a root
    # (B, M) bool: which entries are nodes rather than padding. The nodes of a row come first, the
    # tokens of padding are -1. None: all entries are nodes.
    node_mask: torch.Tensor | None = None

    @property
    def max_drafted(self) -> int:
        """Number of drafted nodes of the batch row that has most."""
        return self.tokens.shape[1] - 1

    @property
    def drafted_counts(self) -> list[int]:
        """Number of drafted nodes of every batch row."""
        if self.node_mask is None:
            return [self.max_drafted] * len(self.tokens)
        return (self.node_mask.sum(1) - 1).tolist()

    def positions(self, root_positions: torch.Tensor) -> torch.Tensor:
        """Return the absolute positions (B, M) of all nodes from those of the roots (B,)."""
        return root_positions[:, None] + self.depths

    def ancestors(self) -> torch.Tensor:
        """Return the attention mask between nodes, (B, M, M) bool.

        [q, k] is true where k is q or an ancestor of q.
        """
        rows, nodes = self.parents.shape
        mask = torch.eye(nodes, dtype=torch.bool, device=self.parents.device).expand(rows, -1, -1)

        # Pointer doubling: `mask` covers fewer than `steps` steps up, and `upper_node` (B, M) is
        # the ancestor `steps` steps up, or the root if there is none.
        upper_node = self.parents
        steps = 1
        while steps <= self.max_depth:
            mask = mask | mask.gather(1, upper_node[..., None].expand(-1, -1, nodes))
            upper_node = upper_node.gather(1, upper_node)
            steps = 2 * steps
        return mask.contiguous()

    def keep_first(self, num_nodes: int) -> "DraftTree":
        """Return the trees of the first `num_nodes` drafted nodes. If nodes are sorted by
        probability, this is the best tree of that size."""
        end = num_nodes + 1
        return DraftTree(
            self.tokens[:, :end],
            self.parents[:, :end],
            self.depths[:, :end],
            self.log_probs[:, :end],
            self.max_depth,
        )

    def keep_likeliest(self, nodes_per_row: int) -> "DraftTree":
        """Return trees of the B * `nodes_per_row` likeliest drafted nodes of all batch rows.

        Rows with a confident drafter keep more nodes than others. Nodes must be sorted by
        probability within each row.
        """
        rows, nodes = self.log_probs[:, 1:].shape
        likeliest = self.log_probs[:, 1:].flatten().topk(rows * nodes_per_row).indices
        row_of_node = likeliest // nodes
        counts = 1 + row_of_node.bincount(minlength=rows)

        tree = self.keep_first(int(counts.max()) - 1)
        node_mask = torch.arange(tree.max_drafted + 1, device=counts.device) < counts[:, None]
        return replace(tree, tokens=tree.tokens.where(node_mask, -1), node_mask=node_mask)


def with_root(bonus: torch.Tensor, nodes: DraftNodes, max_depth: int) -> DraftTree:
    """Return trees of drafted nodes (B, M - 1) below roots with bonus tokens (B,), on the device of
    the bonus tokens."""
    zeros = torch.zeros_like(bonus)[:, None]
    log_probs = nodes.log_probs.to(bonus.device)
    return DraftTree(
        tokens=torch.cat([bonus[:, None], nodes.tokens.to(bonus.device)], 1),
        parents=torch.cat([zeros, nodes.parents.to(bonus.device)], 1),
        depths=torch.cat([zeros, nodes.depths.to(bonus.device)], 1),
        log_probs=torch.cat([zeros.to(log_probs.dtype), log_probs], 1),
        max_depth=max_depth,
    )


def build_undrafted_trees(proposal: Proposal) -> DraftTree:
    """Return trees with only a root: baseline decoding."""
    return make_root_trees(proposal.bonus)


def make_root_trees(bonus: torch.Tensor) -> DraftTree:
    """Return trees with only a root from bonus tokens (B,)."""
    zeros = torch.zeros_like(bonus)[:, None]
    return DraftTree(bonus[:, None], zeros, zeros, zeros.float(), max_depth=0)

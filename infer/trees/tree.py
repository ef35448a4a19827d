"""The draft tree that the target verifies in a round, and the proposal from which the tree is
built.

B batch rows, M nodes including the root, L drafted positions, R tokens that the drafter can
propose. log q is a log-probability under the drafter.
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
    """Conditional distributions over the candidate tokens of each position, from a conditional head
    (`infer.drafters.heads.draft.ConditionalDraft`) or from marginals.

    In this class M is the number of candidates per position, P a number of prefixes, and S the
    state size of a recurrent head.
    """

    # Whether a token depends on all tokens before it. If false, it depends on the previous token
    # only, and `table` exists.
    recurrent: bool
    # (B, L, M) int64 token ids of the candidates, in descending order of marginal probability
    tokens: torch.Tensor

    @property
    def table(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log q (B, M) of position 0, and log q (B, L - 1, M, M) of the other positions. The
        last two axes are the previous candidate and the candidate."""

    def begin(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return log q (B, 1, M) of position 0, and the initial state (B, 1, S) of a recurrent
        head, or None."""

    def extend(
        self, position: int, candidates: torch.Tensor, state: torch.Tensor | None, /
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return log q (B, P, M) of a position after P prefixes, and a recurrent head's new state.

        `candidates` (B, P) are the last tokens of the prefixes, as indices of candidates at the
        previous position. `state` is the recurrent head's state after the prefixes.
        """

    def chain(self, length: int, /) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the greedy chain over the drafter's whole vocabulary, as tokens (B, length) and
        their log q (B, length). Each token is the likeliest one after the previous tokens."""


@dataclass(frozen=True)
class Proposal:
    """The input of a tree method: the drafter's distributions and the options of the tree."""

    bonus: torch.Tensor  # (B,) int64 the bonus tokens, which become the roots
    # (B, L, R) log-probabilities, adjusted by the target's sampling noise; None without a drafter
    marginals: torch.Tensor | None
    budget: int = 0  # maximum number of drafted nodes per batch row
    ngram: NGramModel | None = None
    # The last tokens of each row's sequence, including the bonus token. Used with an n-gram model.
    contexts: Sequence[Sequence[int] | np.ndarray] = ()
    weight: float = 1.0  # exponent of n-gram probabilities; the drafter's exponent is 1
    width: int = 1  # children per node of a static tree
    eos_token_ids: Collection[int] = ()
    conditionals: Conditionals | None = None  # None if the drafter has no conditional head
    vocabulary: DraftVocabulary = FULL_VOCABULARY  # maps columns of `marginals` to token ids


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
    max_depth: int  # no depth is larger; usually L, or 0 for a tree with only a root
    # (B, M) bool: which entries are nodes rather than padding. The nodes of a row come before the
    # padding, which has token -1. None: all entries are nodes.
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
        """Return the absolute positions (B, M) of all nodes, given the positions (B,) of the
        roots."""
        return root_positions[:, None] + self.depths

    def ancestors(self) -> torch.Tensor:
        """Return the attention mask between nodes, (B, M, M) bool.

        Entry [b, q, k] is true if, in batch row b, node k is node q or an ancestor of node q.
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
        """Return trees that consist of the root and the first `num_nodes` drafted nodes. If nodes
        are sorted by probability, these are the best trees of that size."""
        end = num_nodes + 1
        return DraftTree(
            self.tokens[:, :end],
            self.parents[:, :end],
            self.depths[:, :end],
            self.log_probs[:, :end],
            self.max_depth,
        )

    def keep_likeliest(self, nodes_per_row: int) -> "DraftTree":
        """Return trees that keep the B * `nodes_per_row` likeliest drafted nodes of all batch rows
        together.

        Rows where the drafter is confident keep more nodes than other rows. Nodes must be sorted by
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
    """Return trees that consist of roots with the bonus tokens (B,), and of the drafted nodes (B, M
    - 1) below the roots. The trees are on the device of the bonus tokens."""
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
    """Return trees with only a root, which make a round of baseline decoding."""
    return make_root_trees(proposal.bonus)


def make_root_trees(bonus: torch.Tensor) -> DraftTree:
    """Return trees with only a root. The roots have the bonus tokens (B,)."""
    zeros = torch.zeros_like(bonus)[:, None]
    return DraftTree(bonus[:, None], zeros, zeros, zeros.float(), max_depth=0)

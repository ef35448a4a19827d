"""The draft tree, what a round asks the target to verify, and the proposal that it is built from.

B rows, M nodes with the root, L drafted positions, R tokens that the drafter knows.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from infer.kernels.reference_search import Nodes
from infer.ngrams.model import NGram
from infer.trees.vocabulary import ALL, Vocabulary


class Conditionals(Protocol):
    """Conditional distributions over M candidates a position
    (`infer.drafters.heads.draft.ConditionalDraft`)."""

    recurrent: bool  # all tokens before count, not the last one alone: there is no table
    tokens: torch.Tensor  # (B, L, M) int64 ids, the candidates, likeliest first by themselves
    # log q (B, M) at slot 0, (B, L - 1, M, M) at the others: [before, token]
    table: tuple[torch.Tensor, torch.Tensor]

    def begin(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return log q (B, 1, M) of slot 0, and a memory (B, 1, S) if all tokens before count."""

    def extend(
        self, slot: int, which: torch.Tensor, memory: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return log q (B, P, M) of a slot behind prefixes that end with candidates `which` (B, P),
        and a memory."""

    def chain(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each slot's likeliest token of all behind the ones before, and its log q: (B,
        length) both."""


@dataclass(frozen=True)
class Proposal:
    """What a round gives to a tree method: the drafter's distributions, the options, and what else
    there may be."""

    bonus: torch.Tensor  # (B,) int64, the roots
    # (B, L, R) log space, conditioned on the target's noise; None: there is no drafter
    marginals: torch.Tensor | None
    budget: int = 0  # drafted nodes at most
    ngram: NGram | None = None
    contexts: Sequence[
        Sequence[int]
    ] = ()  # with an n-gram model: every row's text, the bonus token included
    weight: float = 1.0  # of the n-gram model against the drafter
    width: int = 1  # children of every node of a full tree
    ends: Collection[int] = ()  # tokens that end a text
    steps: Conditionals | None = None  # of a drafter with a conditional head
    vocabulary: Vocabulary = ALL  # of the R columns of marginals


@dataclass(frozen=True)
class DraftTree:
    """Nodes of B trees. Node 0 is the bonus token, the root, outside the budget; a parent comes
    before its children.

    A node stands for the whole prefix from the root down to it (DDTree section 4.2).
    """

    tokens: torch.Tensor  # (B, M) int64
    parents: torch.Tensor  # (B, M) int64, the root's is itself
    depths: torch.Tensor  # (B, M) int64, the root's is 0
    log_probs: torch.Tensor  # (B, M) of the whole prefix under the drafter, the root's is 0
    max_depth: int  # no node is deeper: L of the marginals, 0 for a root alone
    # (B, M) bool, what of these are nodes, a row's first; the others' tokens are -1. None: all
    real: torch.Tensor | None = None

    @property
    def budget(self) -> int:
        """Drafted nodes, of the row that has most."""
        return self.tokens.shape[1] - 1

    @property
    def budgets(self) -> list[int]:
        """Drafted nodes of every row."""
        return (
            [self.budget] * len(self.tokens)
            if self.real is None
            else (self.real.sum(1) - 1).tolist()
        )

    def positions(self, start: torch.Tensor) -> torch.Tensor:
        """Return absolute positions (B, M) for a root at `start` (B,): by depth, never by slot."""
        return start[:, None] + self.depths

    def ancestors(self) -> torch.Tensor:
        """Return (B, M, M) bool: [q, k] is true where k is q or an ancestor of q, the nodes that q
        attends to."""
        rows, nodes = self.parents.shape
        mask = torch.eye(nodes, dtype=torch.bool, device=self.parents.device).expand(rows, -1, -1)
        # (B, M): the ancestor so many steps up, the root where there is none
        above = self.parents
        reach = 1
        # doubling: what a node sees within `reach` steps, and what that one sees
        while reach <= self.max_depth:
            mask = mask | mask.gather(1, above[..., None].expand(-1, -1, nodes))
            above = above.gather(1, above)
            reach = 2 * reach
        return mask if mask.is_contiguous() else mask.contiguous()

    def first(self, nodes: int) -> "DraftTree":
        """Return the tree of the first `nodes` drafted nodes: for ranked trees, the best one of
        that size."""
        end = nodes + 1
        return DraftTree(
            self.tokens[:, :end],
            self.parents[:, :end],
            self.depths[:, :end],
            self.log_probs[:, :end],
            self.max_depth,
        )

    def likeliest(self, nodes: int) -> "DraftTree":
        """Return the best ranked trees of B * `nodes` drafted nodes in all, wherever these are:
        rows of which the drafter is sure have more than others."""
        rows, found = self.log_probs[:, 1:].shape
        chosen = (
            self.log_probs[:, 1:].flatten().topk(rows * nodes).indices // found
        )  # the rows of these
        counts = 1 + chosen.bincount(minlength=rows)
        cut = self.first(int(counts.max()) - 1)
        real = torch.arange(cut.budget + 1, device=counts.device) < counts[:, None]
        return replace(cut, tokens=cut.tokens.where(real, -1), real=real)


def behind(bonus: torch.Tensor, nodes: Nodes, max_depth: int) -> DraftTree:
    """Return the tree of drafted nodes (B, M - 1) behind the roots bonus (B,), on their device."""
    zeros = torch.zeros_like(bonus)[:, None]
    log_probs = nodes.log_probs.to(bonus.device)
    return DraftTree(
        tokens=torch.cat([bonus[:, None], nodes.tokens.to(bonus.device)], 1),
        parents=torch.cat([zeros, nodes.parents.to(bonus.device)], 1),
        depths=torch.cat([zeros, nodes.depths.to(bonus.device)], 1),
        log_probs=torch.cat([zeros.to(log_probs.dtype), log_probs], 1),
        max_depth=max_depth,
    )


def plain(proposal: Proposal) -> DraftTree:
    """Return the root alone: plain decoding."""
    return root_only(proposal.bonus)


def root_only(bonus: torch.Tensor) -> DraftTree:
    """Return the trees without drafted nodes over bonus tokens (B,)."""
    zeros = torch.zeros_like(bonus)[:, None]
    return DraftTree(bonus[:, None], zeros, zeros, zeros.float(), max_depth=0)

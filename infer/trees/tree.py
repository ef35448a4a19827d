"""The draft tree: what a round asks the target to verify.

B rows, M nodes with the root, L drafted positions, V vocabulary.
"""

from dataclasses import dataclass

import torch

from infer.trees import compiled
from infer.utils import jit


@dataclass(frozen=True)
class DraftTree:
    """Nodes of B trees. Node 0 is the bonus token, the root, outside the budget; a parent comes before its children.

    A node stands for the whole prefix from the root down to it (DDTree section 4.2).
    """

    tokens: torch.Tensor  # (B, M) int64
    parents: torch.Tensor  # (B, M) int64, the root's is itself
    depths: torch.Tensor  # (B, M) int64, the root's is 0
    log_probs: torch.Tensor  # (B, M) of the whole prefix under the drafter, the root's is 0
    max_depth: int  # no node is deeper: L of the marginals, 0 for a root alone

    @property
    def budget(self) -> int:
        """Drafted nodes."""
        return self.tokens.shape[1] - 1

    def positions(self, start: torch.Tensor) -> torch.Tensor:
        """Absolute positions (B, M) when the root stands at `start` (B,): by depth, never by slot."""
        return start[:, None] + self.depths

    def ancestors(self) -> torch.Tensor:
        """(B, M, M) bool: [q, k] says that k is q or an ancestor of q, which is what q may look at."""
        rows, nodes = self.parents.shape
        if self.parents.device.type == "cpu" and jit.AVAILABLE:
            mask = torch.empty(rows, nodes, nodes, dtype=torch.bool)
            compiled.ancestors(self.parents.numpy(), mask.numpy())
            return mask
        mask = torch.eye(nodes, dtype=torch.bool, device=self.parents.device).repeat(rows, 1, 1)
        ancestor = self.parents[..., None]  # (B, M, 1)
        for _ in range(self.max_depth):
            mask.scatter_(2, ancestor, True)
            ancestor = self.parents.gather(1, ancestor[..., 0])[..., None]
        return mask

    def first(self, nodes: int) -> "DraftTree":
        """The tree of the first `nodes` drafted nodes: for trees sorted by probability, the best one of that size."""
        end = nodes + 1
        return DraftTree(
            self.tokens[:, :end], self.parents[:, :end], self.depths[:, :end], self.log_probs[:, :end], self.max_depth
        )

    def expected_length(self) -> torch.Tensor:
        """(B,) expected acceptance length under the drafter's factorised distribution, the bonus token included: the
        sum of the prefix probabilities (DDTree proposition 1)."""
        return self.log_probs.exp().sum(1)


def root_only(bonus: torch.Tensor) -> DraftTree:
    """The empty tree over bonus tokens (B,): plain decoding."""
    zeros = torch.zeros_like(bonus)[:, None]
    return DraftTree(bonus[:, None], zeros, zeros, zeros.float(), max_depth=0)

"""The tokens that a drafter proposes: all V of the target, or some R of them.

A drafter's scores are (..., R), a column a token; texts, trees and the target have ids. Here one
becomes the other.
"""

from typing import NamedTuple

import torch


class Vocabulary(NamedTuple):
    """What the columns of scores stand for. Without `tokens`, column v is token v of the target."""

    tokens: torch.Tensor | None = None  # (R,) int64, each id once
    size: int = 0  # V

    def ids(self, columns: torch.Tensor) -> torch.Tensor:
        """Columns (...) int64 to ids (...)."""
        return columns if self.tokens is None else self.tokens[columns]

    def columns(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids (...) int64 to columns (...), -1 for tokens that have none."""
        if self.tokens is None:
            return ids
        places = torch.full((self.size,), -1, device=ids.device)
        places[self.tokens] = torch.arange(len(self.tokens), device=ids.device)
        return places[ids]

    def part(self, values: torch.Tensor | None) -> torch.Tensor | None:
        """Values of all tokens (..., V) to those of the columns (..., R)."""
        return values if self.tokens is None or values is None else values[..., self.tokens]

    def whole(self, scores: torch.Tensor, rest: torch.Tensor | None = None) -> torch.Tensor:
        """Scores (..., R) to those of all tokens (..., V); the others have `rest` (..., 1), or
        minus infinity."""
        if self.tokens is None:
            return scores
        rest = torch.full_like(scores[..., :1], -torch.inf) if rest is None else rest
        everything = rest.expand(*scores.shape[:-1], self.size).contiguous()
        return everything.index_copy_(-1, self.tokens, scores)


ALL = Vocabulary()

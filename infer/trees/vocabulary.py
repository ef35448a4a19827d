"""The tokens that a drafter proposes: all V tokens of the target, or R of them.

A drafter's scores have shape (..., R), one column per token. Sequences, trees and the target use
token ids. `DraftVocabulary` converts between columns and ids.
"""

from typing import NamedTuple

import torch


class DraftVocabulary(NamedTuple):
    """The token ids of a drafter's score columns. Without `tokens`, column v is token id v."""

    tokens: torch.Tensor | None = None  # (R,) int64, each id once
    size: int = 0  # V

    def columns_to_ids(self, columns: torch.Tensor) -> torch.Tensor:
        """Convert columns (...) int64 to token ids (...)."""
        if self.tokens is None:
            return columns
        return self.tokens[columns]

    def ids_to_columns(self, ids: torch.Tensor) -> torch.Tensor:
        """Convert token ids (...) int64 to columns (...), -1 for tokens without a column."""
        if self.tokens is None:
            return ids
        column_of_id = torch.full((self.size,), -1, device=ids.device)
        column_of_id[self.tokens] = torch.arange(len(self.tokens), device=ids.device)
        return column_of_id[ids]

    def select_columns(self, values: torch.Tensor | None) -> torch.Tensor | None:
        """Select the drafter's tokens: (..., V) -> (..., R). None stays None."""
        if self.tokens is None or values is None:
            return values
        return values[..., self.tokens]

    def expand_to_full(
        self, scores: torch.Tensor, other_scores: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Expand scores (..., R) to all V tokens of the target, (..., V).

        Tokens without a column get `other_scores` (..., 1), by default minus infinity.
        """
        if self.tokens is None:
            return scores
        if other_scores is None:
            other_scores = torch.full_like(scores[..., :1], -torch.inf)
        full_scores = other_scores.expand(*scores.shape[:-1], self.size).contiguous()
        return full_scores.index_copy_(-1, self.tokens, scores)


FULL_VOCABULARY = DraftVocabulary()

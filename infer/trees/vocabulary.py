"""The tokens that a drafter can propose: all V tokens of the target's vocabulary, or only R of
them.

A drafter's scores have shape (..., R), with one column per token that it can propose. Sequences,
trees and the target use token ids. `DraftVocabulary` converts between columns and token ids.
"""

from typing import NamedTuple

import torch


class DraftVocabulary(NamedTuple):
    """The token ids of a drafter's score columns. If `tokens` is None, columns are token ids."""

    tokens: torch.Tensor | None = None  # (R,) int64 the token id of each column
    size: int = 0  # V, the target's vocabulary size; not used if `tokens` is None

    def columns_to_ids(self, columns: torch.Tensor) -> torch.Tensor:
        """Convert score columns (...) int64 to token ids (...)."""
        if self.tokens is None:
            return columns
        return self.tokens[columns]

    def ids_to_columns(self, ids: torch.Tensor) -> torch.Tensor:
        """Convert token ids (...) int64 to score columns (...). The result is -1 for tokens that
        the drafter cannot propose."""
        if self.tokens is None:
            return ids
        column_of_id = torch.full((self.size,), -1, device=ids.device)
        column_of_id[self.tokens] = torch.arange(len(self.tokens), device=ids.device)
        return column_of_id[ids]

    def select_columns(self, values: torch.Tensor | None) -> torch.Tensor | None:
        """Select the columns of the tokens that the drafter can propose from `values` (..., V).
        Return (..., R), or None if `values` is None."""
        if self.tokens is None or values is None:
            return values
        return values[..., self.tokens]

    def expand_to_full(
        self, scores: torch.Tensor, other_scores: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Expand scores (..., R) to all V tokens of the target, (..., V).

        Tokens that the drafter cannot propose get `other_scores` (..., 1), by default minus
        infinity.
        """
        if self.tokens is None:
            return scores
        if other_scores is None:
            other_scores = torch.full_like(scores[..., :1], -torch.inf)
        full_scores = other_scores.expand(*scores.shape[:-1], self.size).contiguous()
        return full_scores.index_copy_(-1, self.tokens, scores)


FULL_VOCABULARY = DraftVocabulary()

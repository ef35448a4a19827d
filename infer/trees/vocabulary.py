"""The tokens that a drafter scores: the whole vocabulary of the target, or a subset.

A drafter's scores have one column (index on the last axis) for each token that the drafter scores.
Sequences, trees and the target use token ids of the target. `DraftVocabulary` converts between
columns and token ids.
"""

from typing import NamedTuple

import torch


class DraftVocabulary(NamedTuple):
    """The tokens that a drafter scores. Column i of the drafter's scores belongs to tokens[i]."""

    # (columns,) int64: the token id of each column of the drafter's scores. None if the drafter
    # scores the whole vocabulary, so that columns are token ids.
    tokens: torch.Tensor | None = None
    target_vocab_size: int = 0  # the target's vocabulary size; not used if `tokens` is None

    def columns_to_ids(self, columns: torch.Tensor) -> torch.Tensor:
        """Convert columns of the drafter's scores to token ids, (...) int64."""
        if self.tokens is None:
            return columns
        return self.tokens[columns]

    def ids_to_columns(self, ids: torch.Tensor) -> torch.Tensor:
        """Convert token ids (...) int64 to columns of the drafter's scores.

        The result is -1 for tokens that the drafter does not score.
        """
        if self.tokens is None:
            return ids
        column_of_id = torch.full((self.target_vocab_size,), -1, device=ids.device)
        column_of_id[self.tokens] = torch.arange(len(self.tokens), device=ids.device)
        return column_of_id[ids]

    def select_columns(self, values: torch.Tensor | None) -> torch.Tensor | None:
        """Select the values of the tokens that the drafter scores.

        values: (..., target vocabulary size), or None

        Returns (..., number of tokens that the drafter scores), or None if `values` is None.
        """
        if self.tokens is None or values is None:
            return values
        return values[..., self.tokens]

    def expand_to_full(
        self, scores: torch.Tensor, other_scores: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Expand a drafter's scores to the whole vocabulary of the target.

        scores: (..., number of tokens that the drafter scores)
        other_scores: (..., 1), the score of all other tokens; None for minus infinity

        Returns (..., target vocabulary size).
        """
        if self.tokens is None:
            return scores
        if other_scores is None:
            other_scores = torch.full_like(scores[..., :1], -torch.inf)
        full_scores = other_scores.expand(*scores.shape[:-1], self.target_vocab_size).contiguous()
        return full_scores.index_copy_(-1, self.tokens, scores)


FULL_VOCABULARY = DraftVocabulary()

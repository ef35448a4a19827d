"""Prompt lookup: drafts from n-grams of the sequence itself
(https://github.com/apoorvumang/prompt-lookup-decoding), with the interface of a drafter.

It is the baseline that a drafter with a network has to beat.

B batch rows, C new positions, L drafted positions, T tokens of a sequence, V vocabulary.
"""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from infer.drafters.base import DraftedBlock
from infer.drafters.families import PROMPT_LOOKUP_FAMILY
from infer.targets.target import Target
from infer.trees.vocabulary import FULL_VOCABULARY

# Weight of the uniform distribution in each drafted distribution, so that every token is possible.
LOOKUP_UNIFORM_DISTRIBUTION_WEIGHT = 1e-4
MAX_LOOKUP_SUFFIX_TOKENS = 4  # longest suffix of the sequence that is searched in it
LOOKUP_WEIGHT_FACTOR_PER_TOKEN = 8.0  # weight of a match relative to one that is a token shorter


class LookupState:
    """The tokens of each batch row's sequence up to its bonus token, which is not included."""

    def __init__(self) -> None:
        self.sequences: list[list[int]] = []

    @contextmanager
    def add(self, count: int) -> Generator["LookupState"]:
        """Yield a state of `count` new empty batch rows, to be filled; they become the next rows of
        this state when the block is left without an exception."""
        new_rows = LookupState()
        new_rows.sequences = [[] for _ in range(count)]
        yield new_rows
        self.sequences += new_rows.sequences

    def keep(self, order: list[int]) -> None:
        """Replace the batch rows: new row i is the old row order[i]; other rows are removed."""
        self.sequences = [self.sequences[i] for i in order]

    def read(self, row: int, start: int, count: int) -> list[torch.Tensor]:
        """Return no tensors: the tokens, which the caller has, are enough to restore a row."""
        return []

    def restore(self, row: int, ids: list[int], pieces: list[list[torch.Tensor]]) -> None:
        """Fill an empty batch row with the tokens `ids`."""
        self.sequences[row] = list(ids)


class PromptLookup(nn.Module):
    """A drafter without weights that reads the tokens of a sequence and no features of the target.

    The distribution of a drafted position counts the tokens that followed earlier occurrences of
    the sequence's suffix, at that distance. A match weighs LOOKUP_WEIGHT_FACTOR_PER_TOKEN times as much as one
    that is a token shorter; of equally long matches, a later one weighs more. A copy that reaches
    the end of the sequence repeats from its start. `block_size` includes the bonus token.
    """

    family = PROMPT_LOOKUP_FAMILY
    layer_ids: tuple[int, ...] = ()
    head_spec = None
    dtype = None
    config = None
    vocabulary = FULL_VOCABULARY
    family_config: dict[str, Any] = {}
    quantised = False

    def __init__(self, block_size: int = 8, ngram_path: Path | None = None) -> None:
        super().__init__()
        assert block_size > 1, "block_size includes the bonus token and must be at least 2"
        self.block_size = block_size
        self.ngram_path = ngram_path  # n-gram file for trees

    def check_target(self, target: Target) -> None:
        """Do nothing: prompt lookup works with every target."""

    def allocate_state(self, rows: int, capacity: int, keep_all: bool = True) -> LookupState:
        """Return an empty state; the arguments are those of `Drafter.allocate_state`."""
        return LookupState()

    def update_context(
        self,
        target: Target,
        features: torch.Tensor,
        tokens: torch.Tensor,
        counts: list[int],
        state: LookupState,
        counts_on_device: torch.Tensor | None = None,
    ) -> None:
        """Append the first counts[b] of the committed tokens (B, C) to sequence b."""
        for sequence, row_tokens, count in zip(
            state.sequences, tokens.tolist(), counts, strict=True
        ):
            sequence += row_tokens[:count]

    def draft_block(self, target: Target, bonus: torch.Tensor, state: LookupState) -> DraftedBlock:
        """Draft one block for every batch row, after the bonus tokens (B,) int64."""
        length = self.block_size - 1
        vocab_size = target.vocab_size
        distributions = [
            compute_continuations(np.array([*sequence, token]), length, vocab_size)
            for sequence, token in zip(state.sequences, bonus.tolist(), strict=True)
        ]
        matched = (1 - LOOKUP_UNIFORM_DISTRIBUTION_WEIGHT) * np.stack(distributions)  # (B, L, V)
        marginals = torch.from_numpy(
            np.log(matched + LOOKUP_UNIFORM_DISTRIBUTION_WEIGHT / vocab_size)
        ).float()
        return DraftedBlock(marginals.to(bonus.device))


def compute_continuations(sequence: np.ndarray, length: int, vocab_size: int) -> np.ndarray:
    """Return the distributions (L, V), float64, of the next `length` tokens of a sequence (T,).

    They are uniform where the last token did not occur before.
    """
    last = len(sequence) - 1
    matches = np.flatnonzero(sequence[:-1] == sequence[-1])  # earlier positions of the last token
    if not len(matches):
        return np.full((length, vocab_size), 1 / vocab_size)

    matched_tokens = np.ones(len(matches))
    still_matching = np.ones(len(matches), bool)
    for distance in range(1, MAX_LOOKUP_SUFFIX_TOKENS):
        positions = matches - distance
        same_token = sequence[np.maximum(positions, 0)] == sequence[max(last - distance, 0)]
        still_matching &= (positions >= 0) & same_token & (distance <= last)
        matched_tokens += still_matching

    weights = LOOKUP_WEIGHT_FACTOR_PER_TOKEN**matched_tokens * (1 + matches / len(sequence))
    distributions = np.zeros((length, vocab_size))
    for slot in range(length):
        # A copy that reaches the end of the sequence starts again after the match.
        next_tokens = sequence[matches + 1 + slot % (last - matches)]
        np.add.at(distributions[slot], next_tokens, weights)
    return distributions / weights.sum()

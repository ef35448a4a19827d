"""Prompt lookup (https://github.com/apoorvumang/prompt-lookup-decoding) with the interface of a
drafter: if the sequence's last tokens occurred earlier in the same sequence, draft the tokens that
followed them there.

A drafter with a neural network should be faster than this baseline.

B batch rows, C new positions, L drafted positions, T tokens of a sequence, V tokens of the
vocabulary.
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

# Weight of the uniform distribution, which is mixed into each drafted distribution so that no token
# has probability 0.
LOOKUP_UNIFORM_DISTRIBUTION_WEIGHT = 1e-4
MAX_LOOKUP_SUFFIX_TOKENS = (
    4  # maximum number of tokens at the end of the sequence that are looked up earlier in it
)
LOOKUP_WEIGHT_FACTOR_PER_TOKEN = (
    8.0  # factor by which a match weighs more than a match that is one token shorter
)


class LookupState:
    """The decoding state of prompt lookup: each batch row's committed tokens, without the bonus
    token that follows them."""

    def __init__(self) -> None:
        self.sequences: list[list[int]] = []

    @contextmanager
    def add(self, count: int) -> Generator["LookupState"]:
        """Yield a state of `count` new empty batch rows, which the caller fills.

        When the `with` block ends without an exception, the new batch rows are appended to this
        state.
        """
        new_rows = LookupState()
        new_rows.sequences = [[] for _ in range(count)]
        yield new_rows
        self.sequences += new_rows.sequences

    def keep(self, order: list[int]) -> None:
        """Select and reorder batch rows: row order[i] becomes row i. Rows that are not in `order`
        are removed."""
        self.sequences = [self.sequences[i] for i in order]

    def read_cached_states(self, row: int, start: int, count: int) -> list[torch.Tensor]:
        """Return an empty list, because `restore_row` needs only the tokens, which the caller has.

        The same method of other drafters returns cached keys and values.
        """
        return []

    def restore_row(self, row: int, ids: list[int], pieces: list[list[torch.Tensor]]) -> None:
        """Fill the empty batch row `row` with the tokens `ids`. `pieces` is ignored: for other
        drafters, it holds cached keys and values."""
        self.sequences[row] = list(ids)


class PromptLookup(nn.Module):
    """A drafter without weights, which reads only the tokens of a sequence.

    A match is an earlier position at which the last token of the sequence, or several last tokens,
    occurred. For the d-th drafted token, each match proposes the token d positions after the match.
    If the sequence ends before that position, the tokens after the match are repeated.

    The distribution of the d-th token is the weighted count of the proposed tokens. The weight of a
    match is multiplied by LOOKUP_WEIGHT_FACTOR_PER_TOKEN for each additional token that matches. Of
    two matches with the same number of matching tokens, the later one weighs more.

    `block_size` is the number of drafted tokens + 1, as the bonus token is counted too.
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
        # file of n-gram counts for tree methods that use n-grams; None if there is none
        self.ngram_path = ngram_path

    @property
    def default_ngram_path(self) -> Path | None:
        """The n-gram file that DDTree uses if the option `ngrams` is null."""
        return self.ngram_path

    def check_target(self, target: Target) -> None:
        """Do nothing: prompt lookup works with every target."""

    def allocate_state(self, rows: int, capacity: int, keep_all: bool = True) -> LookupState:
        """Return an empty decoding state. The arguments are ignored; they exist because drafters
        with a KV cache need them."""
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
        """Append newly committed tokens to the sequences of the decoding state.

        `tokens` (B, T) has one row per sequence, of which the first counts[b] tokens are appended.
        """
        for sequence, row_tokens, count in zip(
            state.sequences, tokens.tolist(), counts, strict=True
        ):
            sequence += row_tokens[:count]

    def draft_block(self, target: Target, bonus: torch.Tensor, state: LookupState) -> DraftedBlock:
        """Draft one block for every batch row, after the bonus tokens `bonus` (B,) int64."""
        length = self.block_size - 1
        vocab_size = target.vocab_size
        distributions = [
            compute_continuation_distributions(np.array([*sequence, token]), length, vocab_size)
            for sequence, token in zip(state.sequences, bonus.tolist(), strict=True)
        ]
        # (B, drafted tokens, vocabulary size)
        matched = (1 - LOOKUP_UNIFORM_DISTRIBUTION_WEIGHT) * np.stack(distributions)
        marginals = torch.from_numpy(
            np.log(matched + LOOKUP_UNIFORM_DISTRIBUTION_WEIGHT / vocab_size)
        ).float()
        return DraftedBlock(marginals.to(bonus.device))


def compute_continuation_distributions(
    sequence: np.ndarray, length: int, vocab_size: int
) -> np.ndarray:
    """Return the distributions (length, vocab_size), float64, of the next `length` tokens of
    `sequence`, an array of token ids.

    The distributions are uniform if the last token of the sequence has not occurred before.
    """
    last = len(sequence) - 1
    # earlier positions at which the last token of the sequence occurs
    matches = np.flatnonzero(sequence[:-1] == sequence[-1])
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
        # The modulo repeats the tokens after a match if the sequence ends too early.
        next_tokens = sequence[matches + 1 + slot % (last - matches)]
        np.add.at(distributions[slot], next_tokens, weights)
    return distributions / weights.sum()

"""Prompt lookup: the text's own n-grams draft, no network and no training (https://github.com/apoorvumang/prompt-lookup-
decoding). A baseline for drafters, behind the interface that the engine knows.

B rows, L drafted positions, V vocabulary, P earlier places.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from infer.drafters.bigram import FLOOR
from infer.targets.target import Target

NAME = "lookup"  # what is given as a checkpoint
LONGEST = 4  # tokens of the text's end that are looked for in it
TRUST = 8.0  # how much more a place counts whose match is one token longer


class LookupState:
    """The texts of the rows, each a list of ids up to, not with, its bonus token."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    @contextmanager
    def add(self, count: int) -> Iterator["LookupState"]:
        """`count` more rows, to be filled; taken into use when the block is left without an error."""
        new = LookupState()
        new.texts = [[] for _ in range(count)]
        yield new
        self.texts += new.texts

    def keep(self, order: list[int]) -> None:
        """Row i becomes what row order[i] was."""
        self.texts = [self.texts[i] for i in order]

    def read(self, row: int, start: int, count: int) -> list[torch.Tensor]:
        """Return nothing: the tokens say it all."""
        return []

    def restore(self, row: int, ids: list[int], parts: list[list[torch.Tensor]]) -> None:
        """Begin an empty row with these tokens."""
        self.texts[row] = list(ids)


class Lookup:
    """A drafter of blocks of `block_size`, bonus token included. A position's distribution is what stood at that
    distance behind earlier places in the text that end as the text does now: longer matches count TRUST times as much a
    token, and of equal ones the later. Copies that run into the text's end go on with what they copied."""

    layer_ids: tuple[int, ...] = ()  # no features of the target

    def __init__(self, block_size: int = 8, ngrams: Path | None = None) -> None:
        self.block_size = block_size
        self.ngrams = ngrams  # a file that trees ask

    def check_target(self, target: Target) -> None:
        """Do nothing: any target will do."""

    def to(self, device: torch.device, dtype: torch.dtype) -> "Lookup":
        """Return itself: its marginals are always float32, on the device of the bonus tokens."""
        return self

    def state(self, rows: int, capacity: int) -> LookupState:
        return LookupState()

    def update_context(
        self,
        target: Target,
        features: torch.Tensor,
        tokens: torch.Tensor,
        counts: Sequence[int],
        state: LookupState,
        *unused: object,
    ) -> None:
        """Add the first counts[i] of the committed tokens (B, Q) to the texts."""
        for text, row, count in zip(state.texts, tokens.tolist(), counts, strict=True):
            text += row[:count]

    def draft(self, target: Target, bonus: torch.Tensor, state: LookupState) -> torch.Tensor:
        """The marginals behind the bonus tokens (B,) int64: log space, float32, (B, L, V)."""
        vocabulary = target.head_weight.shape[0]
        texts = [np.array([*text, token]) for text, token in zip(state.texts, bonus.tolist(), strict=True)]
        shares = [continuations(text, self.block_size - 1, vocabulary) for text in texts]
        marginals = torch.from_numpy(np.stack(shares))
        return ((1 - FLOOR) * marginals + FLOOR / vocabulary).log().float().to(bonus.device)


def continuations(text: np.ndarray, length: int, vocabulary: int) -> np.ndarray:
    """Return the distributions of the next `length` tokens of a text (T,), (L, V) float64; uniform without a match."""
    last = len(text) - 1
    places = np.flatnonzero(text[:-1] == text[-1])  # (P,) earlier places of the last token
    if not len(places):
        return np.full((length, vocabulary), 1 / vocabulary)
    matched, alike = np.ones(len(places)), np.ones(len(places), bool)
    for back in range(1, LONGEST):
        there = places - back
        alike &= (there >= 0) & (text[np.maximum(there, 0)] == text[max(last - back, 0)]) & (back <= last)
        matched += alike
    weights = TRUST**matched * (1 + places / len(text))
    shares = np.zeros((length, vocabulary))
    for ahead in range(length):
        following = text[places + 1 + ahead % (last - places)]  # a copy goes on with itself
        np.add.at(shares[ahead], following, weights)
    return shares / weights.sum()

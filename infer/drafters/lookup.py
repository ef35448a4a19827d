"""Prompt lookup: the text's own n-grams draft
(https://github.com/apoorvumang/prompt-lookup-decoding), behind the interface that the engine knows:
what a drafter with a network has to beat.

B rows, L drafted positions, V vocabulary, P earlier places.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import nn

from infer.drafters.base import DraftedBlock
from infer.drafters.families import LOOKUP
from infer.targets.target import Target
from infer.trees.vocabulary import ALL

FLOOR = 1e-4  # share of the uniform distribution in all that is drafted: no token is impossible
LONGEST = 4  # tokens of the text's end that lookup looks for in it
TRUST = 8.0  # how much more a place counts whose match is one token longer


class Texts:
    """The texts of the rows, each a list of ids up to, not with, its bonus token."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    @contextmanager
    def add(self, count: int) -> Iterator["Texts"]:
        """`count` more rows, to be filled; taken into use when the block is left without an
        error."""
        new = Texts()
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


class Lookup(nn.Module):
    """A drafter of blocks of `block_size`, bonus token included, that reads a text and no features
    of the target.

    A position's distribution is what stood at that distance behind earlier places in the text that
    end as the text does now: longer matches count TRUST times as much a token, and of equal ones
    the later. Copies that run into the text's end go on with what they copied."""

    family = LOOKUP
    layer_ids: tuple[int, ...] = ()
    head_row = dtype = config = None
    vocabulary = ALL
    own = {}
    quantised = False

    def __init__(self, block_size: int = 8, ngrams: Path | None = None) -> None:
        super().__init__()
        assert block_size > 1, "a block of the bonus token alone drafts nothing"
        self.block_size = block_size
        self.ngrams = ngrams  # a file that trees ask

    def check_target(self, target: Target) -> None:
        """Do nothing: any target will do."""

    def state(self, rows: int, capacity: int, whole: bool = True) -> Texts:
        return Texts()

    def update_context(self, target, features, tokens, counts, state, on_device=None) -> None:
        """Add the first counts[i] of the committed tokens (B, Q) to the texts."""
        for text, row, count in zip(state.texts, tokens.tolist(), counts, strict=True):
            text += row[:count]

    def draft_block(self, target: Target, bonus: torch.Tensor, state: Texts) -> DraftedBlock:
        """The marginals behind the bonus tokens (B,) int64: log space, float32, (B, L, V)."""
        length = self.block_size - 1
        vocabulary = target.vocabulary
        texts = [
            np.array([*text, token])
            for text, token in zip(state.texts, bonus.tolist(), strict=True)
        ]
        found = np.stack([continuations(text, length, vocabulary) for text in texts])
        floored = torch.from_numpy(np.log((1 - FLOOR) * found + FLOOR / vocabulary)).float()
        return DraftedBlock(floored.to(bonus.device))


def continuations(text: np.ndarray, length: int, vocabulary: int) -> np.ndarray:
    """Return the distributions of the next `length` tokens of a text (T,), (L, V) float64; uniform
    without a match."""
    last = len(text) - 1
    places = np.flatnonzero(text[:-1] == text[-1])  # (P,) earlier places of the last token
    if not len(places):
        return np.full((length, vocabulary), 1 / vocabulary)
    matched = np.ones(len(places))
    alike = np.ones(len(places), bool)
    for back in range(1, LONGEST):
        there = places - back
        alike &= (
            (there >= 0)
            & (text[np.maximum(there, 0)] == text[max(last - back, 0)])
            & (back <= last)
        )
        matched += alike
    weights = TRUST**matched * (1 + places / len(text))
    shares = np.zeros((length, vocabulary))
    for ahead in range(length):
        following = text[places + 1 + ahead % (last - places)]  # a copy goes on with itself
        np.add.at(shares[ahead], following, weights)
    return shares / weights.sum()

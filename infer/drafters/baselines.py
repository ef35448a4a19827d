"""Drafters without a network, behind the interface that the engine knows: baselines for those with one.

`Lookup` is prompt lookup: the text's own n-grams draft (https://github.com/apoorvumang/prompt-lookup-decoding).
`Bigram` counts which token follows which: what "Tree-Based Speculative Decoding" for NanoGPT drafts with.

B rows, n nodes, L drafted positions, V vocabulary, P earlier places.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import nn

from infer.drafters.base import DraftedBlock
from infer.drafters.families import BIGRAM, LOOKUP
from infer.ngrams.model import NGram
from infer.targets.target import Target

FLOOR = 1e-4  # share of the uniform distribution in all that is drafted: no token is impossible
LONGEST = 4  # tokens of the text's end that lookup looks for in it
TRUST = 8.0  # how much more a place counts whose match is one token longer
KEPT = 64  # likeliest tokens of a position that a bigram's next marginal is summed over


class Texts:
    """The texts of the rows, each a list of ids up to, not with, its bonus token."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    @contextmanager
    def add(self, count: int) -> Iterator["Texts"]:
        """`count` more rows, to be filled; taken into use when the block is left without an error."""
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


class Baseline(nn.Module):
    """A drafter of blocks of `block_size`, bonus token included, that reads a text and no features of the target; it
    adds `shares`. Raises ValueError for blocks without a drafted position."""

    layer_ids: tuple[int, ...] = ()
    head_row = dtype = config = conditional = None

    def __init__(self, block_size: int = 8, ngrams: Path | None = None) -> None:
        super().__init__()
        if block_size < 2:
            raise ValueError(f"block_size={block_size} drafts nothing: it counts the bonus token, so take 2 or more")
        self.block_size = block_size
        self.ngrams = ngrams  # a file that trees ask

    def check_target(self, target: Target) -> None:
        """Do nothing: any target will do."""

    def state(self, rows: int, capacity: int) -> Texts:
        return Texts()

    def update_context(
        self,
        target: Target,
        features: torch.Tensor,
        tokens: torch.Tensor,
        counts: Sequence[int],
        state: Texts,
        *unused: object,
    ) -> None:
        """Add the first counts[i] of the committed tokens (B, Q) to the texts."""
        for text, row, count in zip(state.texts, tokens.tolist(), counts, strict=True):
            text += row[:count]

    def shares(self, text: np.ndarray, vocabulary: int) -> np.ndarray:
        """Return the distributions of the next L tokens of a text (T,), (L, V) float64."""
        raise NotImplementedError

    def draft_block(self, target: Target, bonus: torch.Tensor, state: Texts) -> DraftedBlock:
        """The marginals behind the bonus tokens (B,) int64: log space, float32, (B, L, V)."""
        texts = [np.array([*text, token]) for text, token in zip(state.texts, bonus.tolist(), strict=True)]
        found = np.stack([self.shares(text, len(target.head_weight)) for text in texts])
        return DraftedBlock(floored(found).to(bonus.device))

    def draft(self, target: Target, bonus: torch.Tensor, state: Texts) -> torch.Tensor:
        return self.draft_block(target, bonus, state).marginals


class Lookup(Baseline):
    """A position's distribution is what stood at that distance behind earlier places in the text that end as the text
    does now: longer matches count TRUST times as much a token, and of equal ones the later. Copies that run into the
    text's end go on with what they copied."""

    family = LOOKUP

    def shares(self, text: np.ndarray, vocabulary: int) -> np.ndarray:
        return continuations(text, self.block_size - 1, vocabulary)


class Bigram(Baseline):
    """Pair counts draft, such as an n-gram file has. Tokens that were never seen to be followed are followed by every
    token as often as it was seen at all."""

    family = BIGRAM

    def __init__(self, counts: NGram, block_size: int = 8) -> None:
        super().__init__(block_size)
        self.counts = counts

    def check_target(self, target: Target) -> None:
        """Raise ValueError where the counts are of another tokenizer or vocabulary than the target's."""
        counted, vocabulary = self.counts, len(target.head_weight)
        counted.check_digest(target.tokenizer_digest)
        if counted.vocabulary != vocabulary:
            raise ValueError(f"{counted.path}: counts {counted.vocabulary} tokens, the target's head has {vocabulary}")

    def shares(self, text: np.ndarray, vocabulary: int) -> np.ndarray:
        """The marginals of the Markov chain behind the last token: q_1 = P(. | bonus) and
        q_{t+1}(v) = sum_s q_t(s) P(v | s) over the KEPT likeliest s, renormalised."""
        found = [self.after(text[-1:], np.ones(1))]
        for _ in range(self.block_size - 2):
            support = found[-1].nonzero()[0]
            support = support[np.argsort(-found[-1][support], kind="stable")[:KEPT]]
            weights = found[-1][support]
            found.append(self.after(support, weights / weights.sum()))
        return np.stack(found)

    def conditional(self, depth: int, tokens: torch.Tensor) -> torch.Tensor:
        """log P(. | token) after tokens (B, n) int64, float32 (B, n, V): for trees that know every node's own token
        (`infer.trees.fixed.Conditional`)."""
        rows = np.stack([self.after(token[None], np.ones(1)) for token in tokens.flatten().cpu().numpy()])
        return floored(rows).unflatten(0, tokens.shape).to(tokens.device)

    def after(self, tokens: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """sum over s in `tokens` of weights[s] P(. | s): (V,) float64."""
        q = np.zeros(self.counts.vocabulary)
        for token, weight in zip(tokens.tolist(), weights.tolist(), strict=True):
            following, counts = self.counts.continuations((token,))
            if not len(following):
                following, counts = self.counts.continuations(())
            q[following] += weight * counts / counts.sum()
        return q


def floored(shares: np.ndarray) -> torch.Tensor:
    """log of distributions (..., V), mixed with the uniform one: float32."""
    return torch.from_numpy(np.log((1 - FLOOR) * shares + FLOOR / shares.shape[-1])).float()


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

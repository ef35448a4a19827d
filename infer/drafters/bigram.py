"""The bigram drafter: counts of which token follows which, no network. What "Tree-Based Speculative Decoding" for
NanoGPT drafts with, behind the interface that the engine knows.

B rows, n nodes, L drafted positions, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch

from infer.targets.target import Target

KEPT = 64  # likeliest tokens of a position that the next position's marginal is summed over
FLOOR = 1e-4  # share of the uniform distribution in all that is drafted: no token is impossible
CACHED_BYTES = 256 * 2**20  # for finished answers of each kind; text comes back to the same tokens


class Counts(Protocol):
    """What an n-gram model must offer; for `Bigram.check_target` also `path` and `check_digest`."""

    vocabulary: int

    def continuations(self, context: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The tokens seen after `context` (0 or 1 ids), each once, and how often: (C,) int64 both."""


class NoState:
    """A bigram's memory of the texts it drafts for: none, the bonus token is its whole context."""

    @contextmanager
    def add(self, count: int) -> Iterator["NoState"]:
        yield self

    def keep(self, order: list[int]) -> None:
        pass

    def read(self, row: int, start: int, count: int) -> list[torch.Tensor]:
        return []

    def restore(self, row: int, ids: list[int], parts: list[list[torch.Tensor]]) -> None:
        pass


class Bigram:
    """A drafter of blocks of `block_size` from pair counts, such as `infer.ngrams.model.NGram` has. Tokens that were
    never seen to be followed are followed by every token as often as it was seen at all. Raises ValueError for blocks
    without a drafted position."""

    layer_ids: tuple[int, ...] = ()  # no features of the target

    def __init__(self, counts: Counts, block_size: int = 8) -> None:
        if block_size < 2:
            raise ValueError(f"block_size={block_size} drafts nothing: it counts the bonus token, so take 2 or more")
        self.counts, self.block_size, self.vocabulary = counts, block_size, counts.vocabulary
        rows = CACHED_BYTES // (4 * self.vocabulary)
        self._row = lru_cache(max(1, rows))(self._row)
        self._chain = lru_cache(max(1, rows // (block_size - 1)))(self._chain)

    def check_target(self, target: Target) -> None:
        """Raise ValueError where the counts are of another tokenizer or vocabulary than the target's."""
        self.counts.check_digest(target.tokenizer_digest)
        vocabulary = len(target.head_weight)
        if self.vocabulary != vocabulary:
            raise ValueError(f"{self.counts.path}: counts {self.vocabulary} tokens, the target's head has {vocabulary}")

    def to(self, device: torch.device, dtype: torch.dtype) -> "Bigram":
        """Return itself: its marginals are always float32, on the device of the bonus tokens."""
        return self

    def state(self, rows: int, capacity: int) -> NoState:
        return NoState()

    def update_context(self, *committed: object) -> None:
        """Do nothing: there is no context to remember."""

    def draft(self, target: Target, bonus: torch.Tensor, state: NoState) -> torch.Tensor:
        """The marginals of the Markov chain behind the bonus tokens (B,) int64: log space, float32, (B, L, V).

        q_1 = P(. | bonus) and q_{t+1}(v) = sum_s q_t(s) P(v | s) over the KEPT likeliest s, renormalised.
        """
        return torch.stack([self._chain(token) for token in bonus.tolist()]).to(bonus.device)

    def conditional(self, depth: int, tokens: torch.Tensor) -> torch.Tensor:
        """log P(. | token) after tokens (B, n) int64, float32 (B, n, V): for trees that know every node's own token
        (`infer.trees.fixed.Conditional`)."""
        rows = torch.stack([self._row(token) for token in tokens.flatten().tolist()])
        return rows.unflatten(0, tokens.shape).to(tokens.device)

    def _row(self, token: int) -> torch.Tensor:
        """log P(. | token) with the floor, (V,)."""
        return _floored(self._after(np.array([token]), np.ones(1)))

    def _chain(self, bonus: int) -> torch.Tensor:
        """The L marginals behind one bonus token, (L, V)."""
        q, rows = self._after(np.array([bonus]), np.ones(1)), []
        for _ in range(self.block_size - 1):
            rows.append(_floored(q))
            support = q.nonzero()[0]
            support = support[np.argsort(-q[support], kind="stable")[:KEPT]]
            q = self._after(support, q[support] / q[support].sum())
        return torch.stack(rows)

    def _after(self, tokens: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """sum over s in `tokens` of weights[s] P(. | s): (V,) float64."""
        q = np.zeros(self.vocabulary)
        for token, weight in zip(tokens.tolist(), weights.tolist(), strict=True):
            following, counts = self.counts.continuations((token,))
            if not len(following):
                following, counts = self.counts.continuations(())
            q[following] += weight * counts / counts.sum()
        return q


def _floored(q: np.ndarray) -> torch.Tensor:
    """log of q (V,), mixed with the uniform distribution: float32."""
    return torch.from_numpy(np.log((1 - FLOOR) * q + FLOOR / len(q))).float()

"""The formulas of the objective, as two tables: divergences between target and drafter, and weights
of positions.

A divergence is one formula of log-probabilities. Training, the self-check (`train/selfcheck.py`)
and the tests all compute it from here. To add one, write the formula, add a row to DIVERGENCES, and
name it in a file in conf/objective/. Training differentiates the formula with autograd, chunk by
chunk. A row may also have its gradient derived by hand, which is 1.4 to 1.5 times as fast and needs
less memory; the most rows below do.

This module does not import torch, because `train/config.py` checks names against the tables before
torch loads: formulas use methods of the tensors that they are given.

G blocks of L drafted positions, V vocabulary. p is the target's distribution, q the drafter's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ALPHA = 0.5  # D-PACE: the least probability that a draft counts with
TINY = 2.0**-126  # the smallest normal float32: the least overlap whose logarithm is taken


@dataclass
class Chunk:
    """Rows whose divergence is computed by hand. The computation may overwrite p and q."""

    p: "Tensor | None"  # (rows, V); None for a divergence of labels
    q: "Tensor"  # (rows, V)
    negative_entropy: "Tensor | None"  # (rows,) sum_v p log p
    expected_log: "Tensor | None"  # (rows,) sum_v p log q, for divergences that read it
    log_label: "Tensor"  # (rows,) log q of the true token
    label: "Tensor"  # (rows,) the true token


@dataclass(frozen=True)
class Divergence:
    """One row of the table."""

    # log p (..., V), log q (..., V), label (...) -> nats (...)
    formula: "Callable[[Tensor, Tensor, Tensor], Tensor]"
    # (rows,) and d/d logits of the drafter (rows, V)
    by_hand: "Callable[[Chunk], tuple[Tensor, Tensor]] | None" = None
    of_labels: bool = False  # does not read p, so that it is not computed
    reads_log_q: bool = False  # by hand it reads sum_v p log q
    until_gap: bool = (
        False  # a block ends before its first label without loss: what lies behind is not learnt
    )


@dataclass(frozen=True)
class Weighting:
    """How much the positions t = 1 .. L of a block count."""

    by_position: "Callable[[Tensor, object], Tensor]"  # t - 1 (L,), ObjectiveConfig -> (L,)
    # a further factor, known once a block is drafted: the drafter's probability of each label (G,
    # L), which ones count (G, L) -> (G, L)
    by_block: "Callable[[Tensor, Tensor], Tensor] | None" = None


def kl(log_p: "Tensor", log_q: "Tensor", label: "Tensor") -> "Tensor":
    """KL(p || q) (DART section 3.3)."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def kl_by_hand(chunk: Chunk) -> "tuple[Tensor, Tensor]":
    return chunk.negative_entropy - chunk.expected_log, chunk.q.sub_(chunk.p)


def cross_entropy(log_p: "Tensor", log_q: "Tensor", label: "Tensor") -> "Tensor":
    """-log q(label)."""
    return -log_q.gather(-1, label[..., None])[..., 0]


def cross_entropy_by_hand(chunk: Chunk) -> "tuple[Tensor, Tensor]":
    label = chunk.label[:, None]
    delta = chunk.q.scatter_add_(1, label, chunk.q.new_full(label.shape, -1))  # q - onehot(label)
    return -chunk.log_label, delta


def overlap(log_p: "Tensor", log_q: "Tensor") -> "Tensor":
    """a = sum_v min(p, q), the probability that speculative sampling accepts a draft."""
    return log_p.exp().minimum(log_q.exp()).sum(-1).clamp(min=TINY)


def overlap_by_hand(p: "Tensor", q: "Tensor") -> "tuple[Tensor, Tensor]":
    """a, and its gradient q_v (m_v - sum_u q_u m_u), where m marks the tokens with q < p.
    Overwrites q."""
    gained = q * (q < p)
    overlap = p.minimum(q).sum(-1)
    return overlap, gained.sub_(q.mul_(gained.sum(-1, keepdim=True)))


def total_variation(log_p: "Tensor", log_q: "Tensor", label: "Tensor") -> "Tensor":
    """1 - a."""
    return 1 - overlap(log_p, log_q)


def acceptance(log_p: "Tensor", log_q: "Tensor", label: "Tensor") -> "Tensor":
    """-log a."""
    return -overlap(log_p, log_q).log()


def lk(log_p: "Tensor", log_q: "Tensor", label: "Tensor") -> "Tensor":
    """s KL + (1 - s) (1 - a) with s = exp(-3 a), held constant in the gradient: KL while target and
    drafter are far apart, acceptance itself when they are near."""
    accepted = overlap(log_p, log_q)
    share = (-3 * accepted).exp().detach()
    return share * kl(log_p, log_q, label) + (1 - share) * (1 - accepted)


def lk_by_hand(chunk: Chunk) -> "tuple[Tensor, Tensor]":
    overlap, gradient = overlap_by_hand(chunk.p, chunk.q.clone())
    kl, kl_gradient = kl_by_hand(chunk)
    share = (-3 * overlap).exp()
    mixed = kl_gradient.mul_(share[:, None]).sub_(gradient.mul_(1 - share[:, None]))
    return share * kl + (1 - share) * (1 - overlap), mixed


def ce_l1(log_p: "Tensor", log_q: "Tensor", label: "Tensor") -> "Tensor":
    """0.1 CE + 0.9 sum_v |p - q|: DSpark's mixture; the sum is twice the total variation."""
    return 0.1 * cross_entropy(log_p, log_q, label) + 1.8 * total_variation(log_p, log_q, label)


def ce_l1_by_hand(chunk: Chunk) -> "tuple[Tensor, Tensor]":
    overlap, gradient = overlap_by_hand(chunk.p, chunk.q.clone())
    entropy, slope = cross_entropy_by_hand(chunk)
    return 0.1 * entropy + 1.8 * (1 - overlap), slope.mul_(0.1).sub_(gradient, alpha=1.8)


def dpace(likely: "Tensor", counted: "Tensor") -> "Tensor":
    """w_t = sum_{j >= t} prod_{i <= j} s_i, with s = (1 - ALPHA) q + ALPHA and q the drafter's
    probability of the label (D-PACE)."""
    reach = ((1 - ALPHA) * likely + ALPHA).cumprod(1) * counted
    return reach.flip(1).cumsum(1).flip(1)


DIVERGENCES = {
    "kl": Divergence(kl, kl_by_hand, reads_log_q=True),
    "cross_entropy": Divergence(cross_entropy, cross_entropy_by_hand, of_labels=True),
    "tv": Divergence(total_variation),
    "acceptance": Divergence(acceptance),
    "lk": Divergence(lk, lk_by_hand, reads_log_q=True),
    "ce_l1": Divergence(ce_l1, ce_l1_by_hand, until_gap=True),  # as DeepSpec and SpecForge train it
}

WEIGHTS = {
    "gamma": Weighting(lambda steps, config: config.gamma**steps),  # DART section 3.3
    "exponential": Weighting(
        lambda steps, config: (-steps / config.gamma).exp()
    ),  # the DFlash recipe
    "dpace": Weighting(lambda steps, config: steps.new_ones(steps.shape), dpace),
}

"""The formulas of the objective, in two tables: DIVERGENCE_TABLE has the divergences between target
and drafter, POSITION_WEIGHTINGS_BY_NAME has the weights of drafted positions.

A divergence is a formula of log-probabilities. Training, the self-check (`train/selfcheck.py`) and
the tests all use the formulas of this file. To add a divergence, write its formula, add a row to
DIVERGENCE_TABLE, and name the row in a file in conf/objective/. Training differentiates the formula
by autograd. A row of the table may also have a hand-derived gradient, which is 1.4 to 1.5 times as
fast and needs less memory; the rows kl, cross_entropy, lk and ce_l1 have one.

This module does not import torch, because `train/config.py` checks names against the tables before
torch is loaded. The formulas only call methods of their tensor arguments.

p is the target's distribution, q the drafter's. The overlap a = sum_v min(p, q), where v runs over
the vocabulary, is the probability that speculative sampling accepts a draft.

Shapes: G blocks of L drafted positions, V vocabulary, rows = some drafted positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

DPACE_MIN_ACCEPTANCE_PROBABILITY = (
    0.5  # lower bound of a draft's estimated acceptance probability in D-PACE
)
# lower bound of a number before its logarithm is taken or before it divides
SMALLEST_NORMAL_FLOAT32 = 2.0**-126


@dataclass
class DivergenceChunk:
    """The inputs of a divergence's `value_and_gradient`, which may overwrite p and q."""

    p: "Tensor | None"  # (rows, V); None if the divergence does not depend on p
    q: "Tensor"  # (rows, V)
    negative_entropy: "Tensor | None"  # (rows,) sum_v p log p; None if p is None
    # (rows,) sum_v p log q; None unless the divergence has `needs_expected_log_q`
    expected_log_q: "Tensor | None"
    label_log_probs: "Tensor"  # (rows,) log q of the true token
    labels: "Tensor"  # (rows,) the true token


@dataclass(frozen=True)
class Divergence:
    """One divergence between target and drafter, and how it is computed."""

    # Arguments: log p (..., V), log q (..., V) and the true tokens (...). Returns the divergence in
    # nats, (...).
    formula: "Callable[[Tensor, Tensor, Tensor], Tensor]"
    # Returns the divergence in nats (rows,) and its gradient with respect to the drafter's logits
    # (rows, V). None means that autograd differentiates the formula.
    value_and_gradient: "Callable[[DivergenceChunk], tuple[Tensor, Tensor]] | None" = None
    labels_only: bool = False  # whether the divergence does not depend on p
    needs_expected_log_q: bool = False  # whether `value_and_gradient` reads `expected_log_q`
    ends_at_gap: bool = False  # whether a block ends at its first label without loss


@dataclass(frozen=True)
class Weighting:
    """One way to weight the drafted positions t = 1 .. L of a block."""

    # Arguments: t - 1 for each position (L,), and the ObjectiveConfig. Returns the weights (L,).
    position_weights: "Callable[[Tensor, Any], Tensor]"
    # Computes an additional factor of the weights that depends on the drafter. Arguments: the
    # drafter's probability of each label (G, L), and whether each position has a loss (G, L) bool.
    # Returns the factors (G, L). None means that there is no additional factor.
    block_factor: "Callable[[Tensor, Tensor], Tensor] | None" = None


def kl(log_p: "Tensor", log_q: "Tensor", labels: "Tensor") -> "Tensor":
    """Return the Kullback-Leibler divergence KL(p || q) (DART, section 3.3)."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def kl_with_gradient(chunk: DivergenceChunk) -> "tuple[Tensor, Tensor]":
    """Return KL(p || q) and its gradient q - p. The gradient overwrites q."""
    assert chunk.p is not None
    assert chunk.negative_entropy is not None
    assert chunk.expected_log_q is not None
    return chunk.negative_entropy - chunk.expected_log_q, chunk.q.sub_(chunk.p)


def cross_entropy(log_p: "Tensor", log_q: "Tensor", labels: "Tensor") -> "Tensor":
    """Return the cross-entropy -log q(label)."""
    return -log_q.gather(-1, labels[..., None])[..., 0]


def cross_entropy_with_gradient(chunk: DivergenceChunk) -> "tuple[Tensor, Tensor]":
    """Return -log q(label) and its gradient q - onehot(label). The gradient overwrites q."""
    labels = chunk.labels[:, None]
    delta = chunk.q.scatter_add_(1, labels, chunk.q.new_full(labels.shape, -1))
    return -chunk.label_log_probs, delta


def overlap(log_p: "Tensor", log_q: "Tensor") -> "Tensor":
    """Return the overlap a = sum_v min(p, q), the probability that speculative sampling accepts a
    draft."""
    return log_p.exp().minimum(log_q.exp()).sum(-1).clamp(min=SMALLEST_NORMAL_FLOAT32)


def overlap_with_gradient(p: "Tensor", q: "Tensor") -> "tuple[Tensor, Tensor]":
    """Return the overlap a and its gradient with respect to the drafter's logits.

    The gradient at token v is q_v (m_v - sum_u q_u m_u), where m is 1 for tokens with q < p and 0
    for other tokens, and u runs over the vocabulary. The function overwrites q.
    """
    q_below_p = q * (q < p)
    overlap = p.minimum(q).sum(-1)
    return overlap, q_below_p.sub_(q.mul_(q_below_p.sum(-1, keepdim=True)))


def total_variation(log_p: "Tensor", log_q: "Tensor", labels: "Tensor") -> "Tensor":
    """Return the total variation distance between p and q, 1 - a."""
    return 1 - overlap(log_p, log_q)


def negative_log_overlap(log_p: "Tensor", log_q: "Tensor", labels: "Tensor") -> "Tensor":
    """Return -log a, the negative logarithm of the acceptance probability."""
    return -overlap(log_p, log_q).log()


def kl_total_variation_mix(log_p: "Tensor", log_q: "Tensor", labels: "Tensor") -> "Tensor":
    """Return the LK loss s KL(p || q) + (1 - s) (1 - a) with s = exp(-3 a).

    s is treated as a constant in the gradient. The loss is close to KL while target and drafter
    differ much, and close to the total variation when they are similar.
    """
    accepted = overlap(log_p, log_q)
    kl_share = (-3 * accepted).exp().detach()
    return kl_share * kl(log_p, log_q, labels) + (1 - kl_share) * (1 - accepted)


def kl_total_variation_mix_with_gradient(chunk: DivergenceChunk) -> "tuple[Tensor, Tensor]":
    """Return the LK loss (`kl_total_variation_mix`) and its gradient. The gradient overwrites q."""
    assert chunk.p is not None
    overlap, overlap_gradient = overlap_with_gradient(chunk.p, chunk.q.clone())
    kl, kl_gradient = kl_with_gradient(chunk)
    kl_share = (-3 * overlap).exp()
    gradient = kl_gradient.mul_(kl_share[:, None]).sub_(
        overlap_gradient.mul_(1 - kl_share[:, None])
    )
    return kl_share * kl + (1 - kl_share) * (1 - overlap), gradient


def cross_entropy_l1_mix(log_p: "Tensor", log_q: "Tensor", labels: "Tensor") -> "Tensor":
    """Return DSpark's loss 0.1 CE + 0.9 sum_v |p - q|, where CE is the cross-entropy.

    The sum over the vocabulary is twice the total variation.
    """
    return 0.1 * cross_entropy(log_p, log_q, labels) + 1.8 * total_variation(log_p, log_q, labels)


def cross_entropy_l1_mix_with_gradient(chunk: DivergenceChunk) -> "tuple[Tensor, Tensor]":
    """Return DSpark's loss (`cross_entropy_l1_mix`) and its gradient. The gradient overwrites q."""
    assert chunk.p is not None
    overlap, overlap_gradient = overlap_with_gradient(chunk.p, chunk.q.clone())
    entropy, entropy_gradient = cross_entropy_with_gradient(chunk)
    gradient = entropy_gradient.mul_(0.1).sub_(overlap_gradient, alpha=1.8)
    return 0.1 * entropy + 1.8 * (1 - overlap), gradient


def dpace_weights(label_probs: "Tensor", has_loss: "Tensor") -> "Tensor":
    """Return D-PACE's weights of the drafted positions, (G, L).

    The weight of position t is sum_{j >= t} prod_{i <= j} s_i, where s_i = (1 - c) q(label_i) + c
    estimates the probability that draft i is accepted, and c is DPACE_MIN_ACCEPTANCE_PROBABILITY.

    label_probs: (G, L) the drafter's probability of each label. has_loss: (G, L) bool, whether the
    position has a loss.
    """
    survival = (
        (1 - DPACE_MIN_ACCEPTANCE_PROBABILITY) * label_probs + DPACE_MIN_ACCEPTANCE_PROBABILITY
    ).cumprod(1) * has_loss
    return survival.flip(1).cumsum(1).flip(1)


# the divergences by their name, the value of the option objective.divergence
DIVERGENCE_TABLE = {
    "kl": Divergence(kl, kl_with_gradient, needs_expected_log_q=True),
    "cross_entropy": Divergence(cross_entropy, cross_entropy_with_gradient, labels_only=True),
    "tv": Divergence(total_variation),
    "acceptance": Divergence(negative_log_overlap),
    "lk": Divergence(
        kl_total_variation_mix, kl_total_variation_mix_with_gradient, needs_expected_log_q=True
    ),
    # DeepSpec and SpecForge also end a block at its first label without loss.
    "ce_l1": Divergence(cross_entropy_l1_mix, cross_entropy_l1_mix_with_gradient, ends_at_gap=True),
}

# the weightings by their name, the value of the option objective.position_weights
POSITION_WEIGHTINGS_BY_NAME = {
    # DART, section 3.3
    "gamma": Weighting(lambda steps, config: config.gamma**steps),
    # DFlash
    "exponential": Weighting(lambda steps, config: (-steps / config.gamma).exp()),
    "dpace": Weighting(lambda steps, config: steps.new_ones(steps.shape), dpace_weights),
}

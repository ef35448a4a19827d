"""The formulas of the training loss, in two tables: DIVERGENCE_TABLE has the divergences between
target and drafter, POSITION_WEIGHTINGS_BY_NAME has the weights of drafted positions.

Each divergence is a formula of log-probabilities. Training, the self-check (`train/selfcheck.py`)
and the tests all use the formulas of this file. To add a divergence, write its formula, add an
entry to DIVERGENCE_TABLE, and name the entry in a file in conf/objective/. Training differentiates
the formula by autograd. An entry may also have a hand-derived gradient, which is 1.4 to 1.5 times
as fast as autograd and needs less memory. The entries kl, cross_entropy, lk and ce_l1 have one.

This module does not import torch, because `train/config.py` checks names against the tables before
torch is loaded. The formulas only call methods of their tensor arguments.

p is the target's distribution, q the drafter's. The overlap a = sum_v min(p, q), where v runs over
the vocabulary, is the probability that speculative sampling accepts a draft. A row is one drafted
position.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

DPACE_MIN_ACCEPTANCE_PROBABILITY = (
    0.5  # lower bound of a draft's estimated acceptance probability in D-PACE
)
# Numbers are clamped to this minimum before their logarithm is taken or they are used as divisors.
# This prevents infinite results.
SMALLEST_NORMAL_FLOAT32 = 2.0**-126


@dataclass
class DivergenceChunk:
    """The target's distributions p and the drafter's distributions q at some drafted positions
    (rows). `Divergence.value_and_gradient` gets this object and may overwrite p and q."""

    # (num_rows, vocab_size) probabilities of the target; None if the divergence does not use them
    p: "Tensor | None"
    q: "Tensor"  # (num_rows, vocab_size) probabilities of the drafter
    # (num_rows,) sum of p log p over the vocabulary; None if p is None
    negative_entropy: "Tensor | None"
    # (num_rows,) sum of p log q over the vocabulary; None if the divergence does not use it
    # (`Divergence.needs_expected_log_q`)
    expected_log_q: "Tensor | None"
    label_log_probs: "Tensor"  # (num_rows,) log q of the true token
    labels: "Tensor"  # (num_rows,) the true token


@dataclass(frozen=True)
class Divergence:
    """One divergence between the target's distribution p and the drafter's distribution q, and how
    it is computed."""

    # Arguments: log p (..., vocab_size), log q (..., vocab_size) and the true tokens (...). Returns
    # the divergence in nats (...), with the leading dimensions of the arguments.
    formula: "Callable[[Tensor, Tensor, Tensor], Tensor]"
    # Returns the divergence in nats (num_rows,) and its gradient with respect to the drafter's
    # logits (num_rows, vocab_size). None means that autograd differentiates `formula`.
    value_and_gradient: "Callable[[DivergenceChunk], tuple[Tensor, Tensor]] | None" = None
    # whether the divergence depends only on q and the true tokens, not on p
    labels_only: bool = False
    # whether `value_and_gradient` reads `DivergenceChunk.expected_log_q`
    needs_expected_log_q: bool = False
    # whether all positions of a block after its first label without loss have no loss either
    truncate_at_unsupervised: bool = False


@dataclass(frozen=True)
class PositionWeighting:
    """One way to weight the drafted positions of a block in the training loss."""

    # Arguments: the positions' numbers 0, 1, ... (num_drafted,), and the ObjectiveConfig. Returns
    # the weights (num_drafted,).
    position_weights: "Callable[[Tensor, Any], Tensor]"
    # Computes a further factor of the weights, which depends on how well the drafter predicts the
    # block. Arguments: the drafter's probability of each label, and whether each position has a
    # loss (bool). Both arguments and the returned factors have the shape (num_blocks, num_drafted).
    # None means that there is no further factor.
    drafter_dependent_factor: "Callable[[Tensor, Tensor], Tensor] | None" = None


def kl(log_p: "Tensor", log_q: "Tensor", labels: "Tensor") -> "Tensor":
    """Return the Kullback-Leibler divergence KL(p || q) of the target's distribution p and the
    drafter's distribution q (DART, section 3.3)."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def kl_with_gradient(chunk: DivergenceChunk) -> "tuple[Tensor, Tensor]":
    """Return KL(p || q) and its gradient q - p with respect to the drafter's logits. The gradient
    overwrites q."""
    assert chunk.p is not None
    assert chunk.negative_entropy is not None
    assert chunk.expected_log_q is not None
    return chunk.negative_entropy - chunk.expected_log_q, chunk.q.sub_(chunk.p)


def cross_entropy(log_p: "Tensor", log_q: "Tensor", labels: "Tensor") -> "Tensor":
    """Return the cross-entropy -log q(label) of the drafter's distribution q."""
    return -log_q.gather(-1, labels[..., None])[..., 0]


def cross_entropy_with_gradient(chunk: DivergenceChunk) -> "tuple[Tensor, Tensor]":
    """Return -log q(label) and its gradient q - onehot(label) with respect to the drafter's logits.
    The gradient overwrites q."""
    labels = chunk.labels[:, None]
    delta = chunk.q.scatter_add_(1, labels, chunk.q.new_full(labels.shape, -1))
    return -chunk.label_log_probs, delta


def overlap(log_p: "Tensor", log_q: "Tensor") -> "Tensor":
    """Return the sum of min(p, q) over the vocabulary. It is the probability that speculative
    sampling with target p accepts a draft from q."""
    return log_p.exp().minimum(log_q.exp()).sum(-1).clamp(min=SMALLEST_NORMAL_FLOAT32)


def overlap_with_gradient(p: "Tensor", q: "Tensor") -> "tuple[Tensor, Tensor]":
    """Return the overlap sum_v min(p_v, q_v) and its gradient with respect to the drafter's logits.

    p is the target's distribution, q the drafter's; v and u run over the vocabulary. The gradient
    at token v is q_v (m_v - sum_u q_u m_u), where m is 1 for tokens with q < p and 0 for all other
    tokens. The function overwrites q.
    """
    q_below_p = q * (q < p)
    overlap = p.minimum(q).sum(-1)
    return overlap, q_below_p.sub_(q.mul_(q_below_p.sum(-1, keepdim=True)))


def total_variation(log_p: "Tensor", log_q: "Tensor", labels: "Tensor") -> "Tensor":
    """Return the total variation distance between the target's distribution p and the drafter's
    distribution q: 1 - sum_v min(p, q), where v runs over the vocabulary."""
    return 1 - overlap(log_p, log_q)


def negative_log_overlap(log_p: "Tensor", log_q: "Tensor", labels: "Tensor") -> "Tensor":
    """Return the negative logarithm of the probability that speculative sampling with target p
    accepts a draft from q."""
    return -overlap(log_p, log_q).log()


def kl_total_variation_mix(log_p: "Tensor", log_q: "Tensor", labels: "Tensor") -> "Tensor":
    """Return the LK loss s KL(p || q) + (1 - s) (1 - a) with s = exp(-3 a).

    a = sum_v min(p, q) is the probability that a draft is accepted, and 1 - a is the total
    variation distance. s is treated as a constant in the gradient. The loss is close to KL while
    target and drafter differ much, and close to the total variation when they are similar.
    """
    accepted = overlap(log_p, log_q)
    kl_share = (-3 * accepted).exp().detach()
    return kl_share * kl(log_p, log_q, labels) + (1 - kl_share) * (1 - accepted)


def kl_total_variation_mix_with_gradient(chunk: DivergenceChunk) -> "tuple[Tensor, Tensor]":
    """Return the LK loss (`kl_total_variation_mix`) and its gradient with respect to the drafter's
    logits. The gradient overwrites q."""
    assert chunk.p is not None
    overlap, overlap_gradient = overlap_with_gradient(chunk.p, chunk.q.clone())
    kl, kl_gradient = kl_with_gradient(chunk)
    kl_share = (-3 * overlap).exp()
    gradient = kl_gradient.mul_(kl_share[:, None]).sub_(
        overlap_gradient.mul_(1 - kl_share[:, None])
    )
    return kl_share * kl + (1 - kl_share) * (1 - overlap), gradient


def cross_entropy_l1_mix(log_p: "Tensor", log_q: "Tensor", labels: "Tensor") -> "Tensor":
    """Return DSpark's loss 0.1 CE + 0.9 sum_v |p - q|.

    CE is the cross-entropy, and v runs over the vocabulary. The sum is twice the total variation
    distance.
    """
    return 0.1 * cross_entropy(log_p, log_q, labels) + 1.8 * total_variation(log_p, log_q, labels)


def cross_entropy_l1_mix_with_gradient(chunk: DivergenceChunk) -> "tuple[Tensor, Tensor]":
    """Return DSpark's loss (`cross_entropy_l1_mix`) and its gradient with respect to the drafter's
    logits. The gradient overwrites q."""
    assert chunk.p is not None
    overlap, overlap_gradient = overlap_with_gradient(chunk.p, chunk.q.clone())
    entropy, entropy_gradient = cross_entropy_with_gradient(chunk)
    gradient = entropy_gradient.mul_(0.1).sub_(overlap_gradient, alpha=1.8)
    return 0.1 * entropy + 1.8 * (1 - overlap), gradient


def dpace_weights(label_probs: "Tensor", has_loss: "Tensor") -> "Tensor":
    """Return D-PACE's loss weights of the drafted positions, (num_blocks, num_drafted).

    The weight of position t of a block is sum_{j >= t} prod_{i <= j} s_i. Here,
    s_i = (1 - c) q(label_i) + c estimates the probability that draft i is accepted, and the
    constant c is DPACE_MIN_ACCEPTANCE_PROBABILITY.

    label_probs: (num_blocks, num_drafted) the drafter's probability q of each true token.
    has_loss: (num_blocks, num_drafted) bool, whether the position has a loss.
    """
    survival = (
        (1 - DPACE_MIN_ACCEPTANCE_PROBABILITY) * label_probs + DPACE_MIN_ACCEPTANCE_PROBABILITY
    ).cumprod(1) * has_loss
    return survival.flip(1).cumsum(1).flip(1)


# Keys are the values of the option objective.divergence.
DIVERGENCE_TABLE = {
    "kl": Divergence(kl, kl_with_gradient, needs_expected_log_q=True),
    "cross_entropy": Divergence(cross_entropy, cross_entropy_with_gradient, labels_only=True),
    "tv": Divergence(total_variation),
    "acceptance": Divergence(negative_log_overlap),
    "lk": Divergence(
        kl_total_variation_mix, kl_total_variation_mix_with_gradient, needs_expected_log_q=True
    ),
    # As in DeepSpec and SpecForge, the labels after a block's first label without loss have no loss
    # either.
    "ce_l1": Divergence(
        cross_entropy_l1_mix, cross_entropy_l1_mix_with_gradient, truncate_at_unsupervised=True
    ),
}

# Keys are the values of the option objective.position_weights.
POSITION_WEIGHTINGS_BY_NAME = {
    # weights gamma**(t - 1) of DART, section 3.3
    "gamma": PositionWeighting(lambda steps, config: config.gamma**steps),
    # weights exp(-(t - 1) / gamma) of DFlash
    "exponential": PositionWeighting(lambda steps, config: (-steps / config.gamma).exp()),
    "dpace": PositionWeighting(lambda steps, config: steps.new_ones(steps.shape), dpace_weights),
}

"""The objective: how far the drafter's marginals are from the target, in chunks of rows.

G blocks of L drafted positions, R = G * L rows, P teacher rows (context positions), D hidden size, V vocabulary.

Row r compares the drafter's state `hidden[r]` with the target's state `teacher_hidden[teacher_rows[r]]`, each through
its head: the target's frozen one, which DFlash shares, or a trained one of the drafter's (DART). Vocabulary-sized
tensors exist for one chunk of rows at a time: the gradients with respect to `hidden` and to a trained head are formed
in the same pass, and (R, D) and (V, D) are all that is kept for backward. Weights that depend on how well a block was
drafted are known after the last chunk, and applied to those (R, D); for a trained head, which has no rows, a pass
before finds them.
"""

from dataclasses import dataclass

import torch

from infer.targets.support import PLAIN, LogitScale
from train.config import ObjectiveConfig


@dataclass(frozen=True)
class RowLoss:
    """What a batch of blocks costs."""

    loss: torch.Tensor  # () weighted sum of divergences, differentiable with respect to hidden
    rows: torch.Tensor  # (G, L) divergence of every row in nats, 0 where the weight is; detached
    agree: torch.Tensor  # (G, L) bool: drafter and target choose the same token; False where the weight is 0


def position_weights(config: ObjectiveConfig, length: int) -> torch.Tensor:
    """Weights of the L drafted positions t = 1 .. L, (L,) float32, as far as they do not depend on the drafter.

    "gamma": gamma^(t-1) (DART section 3.3); "exponential": exp(-(t-1) / gamma) (the DFlash recipe); "dpace" and
    "multistep": one, see `block_weights`.
    """
    steps = torch.arange(length, dtype=torch.float32)
    if config.weights == "gamma":
        return config.gamma**steps
    return torch.exp(-steps / config.gamma) if config.weights == "exponential" else torch.ones(length)


def block_weights(survival: torch.Tensor, counted: torch.Tensor, config: ObjectiveConfig) -> torch.Tensor:
    """What a position is worth, given how likely the drafts of its block (G, L) survive: (G, L), detached.

    "dpace": w_t = sum_{j >= t} prod_{i <= j} s_i, with s = (1 - alpha) q + alpha and q the drafter's probability of the
    label. "multistep": minus the derivative of the expected number of accepted drafts sum_j prod_{i <= j} a_i with
    respect to a_t, a the overlap with the target. Sums run over `counted` positions.
    """
    if config.weights == "dpace":
        reach = ((1 - config.alpha) * survival + config.alpha).cumprod(1) * counted
        return reach.flip(1).cumsum(1).flip(1)
    before = torch.cat([torch.ones_like(survival[:, :1]), survival[:, :-1]], dim=1).cumprod(1)  # prod_{i < t} a_i
    behind = counted.to(survival.dtype)  # sum_{j >= t} prod_{t < i <= j} a_i, from the last position on
    for t in range(survival.shape[1] - 2, -1, -1):
        behind[:, t] += survival[:, t + 1] * behind[:, t + 1]
    return before * behind


def divergence(
    hidden: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_rows: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    head: torch.Tensor,
    config: ObjectiveConfig,
    own_head: torch.Tensor | None = None,
    scale: LogitScale = PLAIN,
) -> RowLoss:
    """Weighted sum of the rows' divergences to the target's distribution along the true continuation.

    hidden (R, D), teacher_hidden (P, D), head (V, D) in one dtype; teacher_rows, labels (G, L) int64; weights (G, L);
    own_head (V, D): the drafter's, float32, if it is not the target's; scale: what the target does to its head's
    products, and the drafter to its own.
    With p the target's distribution, q the drafter's, and their overlap a = sum_v min(p, q), the probability that
    speculative sampling accepts a draft:
    "kl" is KL(p || q) (DART section 3.3), "cross_entropy" -log q(label), "tv" total variation 1 - a, "acceptance"
    -log a, and "lk" the mixture lambda KL + (1 - lambda) tv with lambda = exp(-3 a), held constant in the gradient: KL
    while the two are far apart, acceptance itself when they are near. With weights "dpace" and "multistep" a row's
    weight is multiplied by `block_weights`; "multistep" is then the loss sum_j (1 - prod_{i <= j} a_i). The arithmetic
    on logits is float32 (float64 for float64 inputs). Rows of weight 0 are dropped before the projection (one
    synchronisation).
    """
    flat = teacher_rows.flatten()
    kept = weights.flatten().nonzero()[:, 0]
    kept = kept[flat[kept].argsort(stable=True)]  # rows that share a teacher row become neighbours
    own_head = head if own_head is None else own_head
    fixed = teacher_hidden, flat, labels.flatten(), weights, head, kept
    return RowLoss(*_Divergence.apply(hidden, own_head, fixed, config, scale))


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, own_head, fixed, config, scale):
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        weights = fixed[3]
        head, counted, by_block = own_head.to(hidden.dtype), weights > 0, config.weights in ("dpace", "multistep")

        def worth_of(survival: torch.Tensor) -> torch.Tensor:
            """Every row's weight, (G, L)."""
            return weights * block_weights(survival, counted, config) if by_block else weights.to(survival.dtype)

        worth = None
        if wants_head:
            worth = worth_of(_scan(hidden, head, fixed, config, scale)[1] if by_block else weights)
        rows, survival, agree, gradient, head_gradient = _scan(hidden, head, fixed, config, scale, wants_hidden, worth)
        if worth is None:
            worth = worth_of(survival)
        loss = (rows * worth).sum()
        if config.weights == "multistep":
            loss = (weights * (1 - survival.cumprod(1))).sum()
        if gradient is not None:
            gradient *= worth.view(-1, 1).to(gradient.dtype)
        ctx.save_for_backward(gradient, head_gradient)
        ctx.mark_non_differentiable(rows, agree)
        return loss, rows, agree

    @staticmethod
    def backward(ctx, upstream, *_):
        gradients = (None if g is None else g * upstream.to(g.dtype) for g in ctx.saved_tensors)
        return *gradients, None, None, None


def _scan(hidden, own_head, fixed, config, scale, wants_hidden=False, worth=None):
    """Chunk by chunk over the rows that count: their divergences and survivals (G, L), whether both choose the same
    token (G, L), the gradients of single rows (R, D), and, if the rows' `worth` (G, L) is given, that of the whole loss
    with respect to the drafter's head (V, D)."""
    teacher_hidden, teacher_rows, labels, weights, head, kept = fixed
    kind = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    rows = torch.zeros(len(hidden), dtype=kind, device=hidden.device)
    survival = torch.ones_like(rows)
    agree = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
    gradient = torch.zeros_like(hidden) if wants_hidden else None
    head_gradient = None if worth is None else torch.zeros_like(own_head, dtype=kind)
    for chunk in kept.split(config.chunk_rows):
        shared, which = teacher_rows[chunk].unique_consecutive(return_inverse=True)
        teacher = scale((teacher_hidden[shared] @ head.T).to(kind))  # (chunk's distinct teacher rows, V)
        student = scale((hidden[chunk] @ own_head.T).to(kind))  # (chunk, V)
        slope = scale.slope(student)
        choice, log_q, q = _softmax(student)
        label = labels[chunk][:, None]
        likely = log_q.gather(1, label)[:, 0]
        if config.divergence == "cross_entropy":
            agree[chunk] = choice == teacher.argmax(-1)[which]
            rows[chunk] = -likely
            delta = q.scatter_add_(1, label, torch.full_like(label, -1, dtype=kind))  # q - onehot(label)
        else:
            wanted, log_p, p = _softmax(teacher)
            agree[chunk] = choice == wanted[which]
            surprise = log_p.mul_(p).sum(-1)  # sum_v p log p
            del teacher, log_p
            rows[chunk], delta = _DISTANCES[config.divergence](p[which], surprise[which], q, log_q)
        if slope is not None:
            delta *= slope  # from here on with respect to the products
        survival[chunk] = 1 - rows[chunk] if config.weights == "multistep" else likely.exp()
        if gradient is not None:
            gradient[chunk] = delta.to(head.dtype) @ own_head
        if head_gradient is not None:
            delta *= worth.flatten()[chunk, None].to(kind)
            head_gradient += delta.T @ hidden[chunk].to(kind)
        del student, log_q, q, delta, slope
    rows, survival, agree = (column.view_as(weights) for column in (rows, survival, agree))
    return rows, survival, agree, gradient, head_gradient


def _softmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The likeliest token (rows,), log-probabilities, in place of the logits (rows, V), and probabilities."""
    top, choice = logits.max(-1, keepdim=True)
    logits -= top
    probabilities = logits.exp()
    total = probabilities.sum(-1, keepdim=True)
    probabilities /= total
    logits -= total.log()
    return choice[:, 0], logits, probabilities


# p (rows, V), sum_v p log p (rows,), q and log q (rows, V), all of which they may overwrite -> the rows' distances,
# (rows,), and their gradient with respect to the drafter's logits, (rows, V)


def _kl(p: torch.Tensor, surprise: torch.Tensor, q: torch.Tensor, log_q: torch.Tensor):
    return surprise - log_q.mul_(p).sum(-1), q.sub_(p)


def _overlap(p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """a = sum_v min(p, q), and its gradient q_v (m_v - sum_u q_u m_u), where m marks the tokens with q < p."""
    gained = q * (q < p)
    overlap = torch.minimum(p, q).sum(-1)
    return overlap, gained.sub_(q.mul_(gained.sum(-1, keepdim=True)))


def _tv(p: torch.Tensor, surprise: torch.Tensor, q: torch.Tensor, log_q: torch.Tensor):
    overlap, gradient = _overlap(p, q)
    return 1 - overlap, gradient.neg_()


def _acceptance(p: torch.Tensor, surprise: torch.Tensor, q: torch.Tensor, log_q: torch.Tensor):
    overlap, gradient = _overlap(p, q)
    overlap.clamp_(min=torch.finfo(overlap.dtype).tiny)
    return -overlap.log(), gradient.div_(-overlap[:, None])


def _lk(p: torch.Tensor, surprise: torch.Tensor, q: torch.Tensor, log_q: torch.Tensor):
    kl, kl_gradient = _kl(p, surprise, q.clone(), log_q)
    overlap, gradient = _overlap(p, q)
    share = (-3 * overlap).exp()
    mixed = kl_gradient.mul_(share[:, None]).sub_(gradient.mul_(1 - share[:, None]))
    return share * kl + (1 - share) * (1 - overlap), mixed


_DISTANCES = {"kl": _kl, "tv": _tv, "acceptance": _acceptance, "lk": _lk}

"""The objective: how far the drafter's marginals are from the target's, in chunks of rows. Its formulas are in
`train/divergences.py`.

G blocks of L drafted positions, R = G * L rows, P teacher rows (context positions), D hidden size, V vocabulary.

Row r compares the drafter's state `hidden[r]` with the target's state `teacher_hidden[teacher_rows[r]]`, each through
its head: the target's frozen one, which DFlash shares, or a trained one of the drafter's (DART). Vocabulary-sized
tensors exist for one chunk of rows at a time: the gradients with respect to `hidden` and to a trained head are formed
in the same pass, and (R, D) and (V, D) are all that is kept for backward. Weights that depend on how well a block was
drafted are known only after the last chunk. They are then applied to the (R, D) gradients of single rows; a trained
head has no such rows, so a first pass computes the weights for it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from infer.targets.support import PLAIN, LogitScale
from train.config import ObjectiveConfig
from train.divergences import DIVERGENCES, WEIGHTS, Chunk, Divergence


class RowLoss(NamedTuple):
    """The loss of a batch of blocks."""

    loss: torch.Tensor  # () weighted sum of divergences, differentiable with respect to hidden
    rows: torch.Tensor  # (G, L) divergence of every row in nats, 0 where the weight is; detached
    agree: torch.Tensor  # (G, L) bool: drafter and target choose the same token; False where the weight is 0


def position_weights(config: ObjectiveConfig, length: int) -> torch.Tensor:
    """Return the weights of the L drafted positions t = 1 .. L, (L,) float32: the part that does not depend on the
    drafter."""
    return WEIGHTS[config.weights].by_position(torch.arange(length, dtype=torch.float32), config)


@dataclass(frozen=True)
class _Batch:
    """What the rows are compared with. Nothing here is trained."""

    teacher_hidden: torch.Tensor  # (P, D)
    teacher_rows: torch.Tensor  # (R,) int64
    labels: torch.Tensor  # (R,) int64
    weights: torch.Tensor  # (G, L)
    head: torch.Tensor  # (V, D) the target's
    kept: torch.Tensor  # rows of weight above 0, those with the same teacher row beside each other
    config: ObjectiveConfig
    scale: LogitScale

    @property
    def dtype(self) -> torch.dtype:
        """Of the arithmetic on logits."""
        return torch.float64 if self.teacher_hidden.dtype == torch.float64 else torch.float32


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
    """Return the weighted sum of the rows' divergences to the target's distribution along the true continuation.

    hidden (R, D), teacher_hidden (P, D), head (V, D) in one dtype; teacher_rows, labels (G, L) int64; weights (G, L);
    own_head (V, D): the drafter's, float32, if it is not the target's; scale: what the target does to its head's
    products, and the drafter to its own. config.divergence names a row of DIVERGENCES, config.weights one of WEIGHTS,
    whose `by_block` multiplies a row's weight. The arithmetic on logits is float32 (float64 for float64 inputs). Rows
    of weight 0 are dropped before the projection (one synchronisation).
    """
    flat = teacher_rows.flatten()
    kept = weights.flatten().nonzero()[:, 0]
    kept = kept[flat[kept].argsort(stable=True)]
    batch = _Batch(teacher_hidden, flat, labels.flatten(), weights, head, kept, config, scale)
    return RowLoss(*_Objective.apply(hidden, head if own_head is None else own_head, batch))


class _Objective(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, own_head, batch: _Batch):
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        head, weights, by_block = own_head.to(hidden.dtype), batch.weights, WEIGHTS[batch.config.weights].by_block

        def row_weights(survival: torch.Tensor) -> torch.Tensor:  # (G, L)
            if by_block is None:
                return weights.to(survival.dtype)
            return weights * by_block(survival, weights > 0, batch.config)

        known = None
        if wants_head:
            known = row_weights(weights if by_block is None else _scan(hidden, head, batch).survival)
        scan = _scan(hidden, head, batch, wants_hidden, known)
        factors = row_weights(scan.survival) if known is None else known
        loss = (scan.rows * factors).sum()
        if batch.config.weights == "multistep":
            loss = (weights * (1 - scan.survival.cumprod(1))).sum()
        if scan.gradient is not None:
            scan.gradient.mul_(factors.view(-1, 1).to(scan.gradient.dtype))
        ctx.save_for_backward(scan.gradient, scan.head_gradient)
        ctx.mark_non_differentiable(scan.rows, scan.agree)
        return RowLoss(loss, scan.rows, scan.agree)

    @staticmethod
    def backward(ctx, upstream, *_):
        gradients = (None if g is None else g * upstream.to(g.dtype) for g in ctx.saved_tensors)
        return *gradients, None


class _Scan(NamedTuple):
    """What a pass over the rows found."""

    rows: torch.Tensor  # (G, L) divergences
    survival: torch.Tensor  # (G, L) the overlap with weights "multistep", else the probability of the label
    agree: torch.Tensor  # (G, L)
    gradient: torch.Tensor | None  # (R, D) of each row's divergence
    head_gradient: torch.Tensor | None  # (V, D) of the whole loss


def _scan(
    hidden, own_head, batch: _Batch, wants_hidden: bool = False, row_weights: torch.Tensor | None = None
) -> _Scan:
    """Go through the rows that count, chunk by chunk. `row_weights` (G, L) are those of the loss, if the gradient with
    respect to the drafter's head is wanted."""
    config, kind = batch.config, DIVERGENCES[batch.config.divergence]
    rows = torch.zeros(len(hidden), dtype=batch.dtype, device=hidden.device)
    survival = torch.ones_like(rows)
    agree = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
    gradient = torch.zeros_like(hidden) if wants_hidden else None
    head_gradient = None if row_weights is None else torch.zeros_like(own_head, dtype=batch.dtype)
    for chunk in batch.kept.split(config.chunk_rows):
        shared, which = batch.teacher_rows[chunk].unique_consecutive(return_inverse=True)
        student = batch.scale((hidden[chunk] @ own_head.T).to(batch.dtype))  # (chunk, V)
        slope = batch.scale.slope(student)
        teacher = batch.scale((batch.teacher_hidden[shared] @ batch.head.T).to(batch.dtype))  # (distinct rows, V)
        compared = _compare(kind, teacher, which, student, batch.labels[chunk])
        del teacher, student
        rows[chunk], agree[chunk], delta = compared.rows, compared.agree, compared.delta
        survival[chunk] = 1 - compared.rows if config.weights == "multistep" else compared.log_label.exp()
        if slope is not None:
            delta *= slope  # from here on with respect to the products
        if gradient is not None:
            gradient[chunk] = delta.to(batch.head.dtype) @ own_head
        if head_gradient is not None:
            delta *= row_weights.flatten()[chunk, None].to(batch.dtype)
            head_gradient += delta.T @ hidden[chunk].to(batch.dtype)
        del compared, delta, slope
    rows, survival, agree = (column.view_as(batch.weights) for column in (rows, survival, agree))
    return _Scan(rows, survival, agree, gradient, head_gradient)


class _Compared(NamedTuple):
    """A chunk's drafter against its target."""

    rows: torch.Tensor  # (rows,) divergences
    delta: torch.Tensor  # (rows, V) their gradient with respect to the drafter's logits
    agree: torch.Tensor  # (rows,) bool
    log_label: torch.Tensor  # (rows,) the drafter's log-probability of the label


def _compare(
    kind: Divergence, teacher: torch.Tensor, which: torch.Tensor, student: torch.Tensor, label: torch.Tensor
) -> _Compared:
    """Compare the drafter's logits (rows, V) with the target's (distinct rows, V), of which `which` (rows,) is each
    row's. Overwrites both."""
    agree = student.argmax(-1) == teacher.argmax(-1)[which]
    if kind.by_hand is None:
        with torch.enable_grad():
            log_q = student.requires_grad_().log_softmax(-1)
            rows = kind.formula(teacher.log_softmax(-1)[which], log_q, label)
            (delta,) = torch.autograd.grad(rows.sum(), student)
        return _Compared(rows.detach(), delta, agree, log_q.detach().gather(1, label[:, None])[:, 0])
    p = negative_entropy = None
    if not kind.of_labels:
        p = _softmax(teacher)  # teacher holds log p from here on
        negative_entropy = teacher.mul_(p).sum(-1)[which]
        p = p[which]
    q = _softmax(student)
    log_label = student.gather(1, label[:, None])[:, 0]
    rows, delta = kind.by_hand(Chunk(p, negative_entropy, q, student, label))
    return _Compared(rows, delta, agree, log_label)


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the probabilities (rows, V), and turn the logits into log-probabilities in place."""
    logits -= logits.amax(-1, keepdim=True)
    probabilities = logits.exp()
    total = probabilities.sum(-1, keepdim=True)
    probabilities /= total
    logits -= total.log()
    return probabilities

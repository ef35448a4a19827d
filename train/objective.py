"""The objective: how far the drafter's marginals are from the target's, in chunks of rows. Its formulas are in
`train/divergences.py`.

G blocks of L drafted positions, R = G * L rows, P teacher rows (context positions), D hidden size, V vocabulary.

Row r compares the drafter's state `hidden[r]` with the target's state `teacher_hidden[teacher_rows[r]]`, each through
its head: the target's frozen one, which DFlash shares, or a trained one of the drafter's (DART). Vocabulary-sized
tensors exist for one chunk of rows at a time: the gradients with respect to `hidden` and to a trained head are formed
in the same pass, and (R, D) and (V, D) are all that is kept for backward. Weights that depend on how well a block was
drafted are known only after the last chunk. They are then applied to the (R, D) gradients of single rows; a trained
head has no such rows, so a first pass computes the weights for it.

A conditional head adds `out @ correction[r]` to a row's logits (`Correction`; `infer/drafters/heads/base.py`): the
divergence is then that of the distribution behind the true token before, and the gradients with respect to `out` (V, r)
and the corrections (R, r) come about in the same pass. So all heads are trained here, under every divergence.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from infer.targets.support import PLAIN, LogitScale
from train.config import ObjectiveConfig
from train.divergences import DIVERGENCES, WEIGHTS, Chunk, Divergence

IMPOSSIBLE = -1e4  # logit of a token that a selector does not choose among: its probability is 0, its logarithm finite


class RowLoss(NamedTuple):
    """The loss of a batch of blocks."""

    loss: torch.Tensor  # () weighted sum of divergences, differentiable with respect to hidden
    rows: torch.Tensor  # (G, L) divergence of every row in nats, 0 where the weight is; detached
    agree: torch.Tensor  # (G, L) bool: drafter and target choose the same token; False where the weight is 0
    overlap: torch.Tensor | None = None  # (G, L) sum_v min(p, q), detached; only where it was asked for


class Correction(NamedTuple):
    """What a conditional head adds to the logits of rows."""

    rows: torch.Tensor  # (R, r)
    out: torch.Tensor  # (V, r) trained
    top_k: int = 0  # the distribution is one over so many of a row's likeliest tokens without it, and the label; 0: all


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
    top_k: int = 0  # of the correction
    overlap: bool = False  # is asked for

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
    correction: Correction | None = None,
    overlap: bool = False,
) -> RowLoss:
    """Return the weighted sum of the rows' divergences to the target's distribution along the true continuation.

    hidden (R, D), teacher_hidden (P, D), head (V, D) in one dtype; teacher_rows, labels (G, L) int64; weights (G, L);
    own_head (V, D): the drafter's, float32, if it is not the target's; scale: what the target does to its head's
    products, and the drafter to its own; correction: of a conditional head, behind the scale. config.unary adds so
    many times the divergence without corrections. config.divergence names a row of DIVERGENCES, config.weights one
    of WEIGHTS, whose `by_block` multiplies a row's weight. The arithmetic on logits is float32 (float64 for float64
    inputs). Rows of weight 0 are dropped before the projection (one synchronisation).
    """
    flat = teacher_rows.flatten()
    kept = weights.flatten().nonzero()[:, 0]
    kept = kept[flat[kept].argsort(stable=True)]
    rows, out, top_k = (None, None, 0) if correction is None else correction
    batch = _Batch(teacher_hidden, flat, labels.flatten(), weights, head, kept, config, scale, top_k, overlap)
    return RowLoss(*_Objective.apply(hidden, head if own_head is None else own_head, rows, out, batch))


class _Objective(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, own_head, correction, out, batch: _Batch):
        wants = ctx.needs_input_grad
        head, weights, by_block = own_head.to(hidden.dtype), batch.weights, WEIGHTS[batch.config.weights].by_block

        def row_weights(survival: torch.Tensor) -> torch.Tensor:  # (G, L)
            if by_block is None:
                return weights.to(survival.dtype)
            return weights * by_block(survival, weights > 0, batch.config)

        drafted, known = _Drafted(hidden, head, correction, None if out is None else out.to(hidden.dtype)), None
        if wants[1] or wants[3]:
            known = row_weights(weights if by_block is None else _scan(drafted, batch).survival)
        scan = _scan(drafted, batch, wants, known)
        factors = row_weights(scan.survival) if known is None else known
        loss = (scan.rows * factors).sum()
        if batch.config.weights == "multistep":
            loss = (weights * (1 - scan.survival.cumprod(1))).sum()
        for gradient in (scan.gradients.hidden, scan.gradients.correction):
            if gradient is not None:
                gradient.mul_(factors.view(-1, 1).to(gradient.dtype))
        ctx.save_for_backward(*scan.gradients)
        ctx.mark_non_differentiable(scan.rows, scan.agree, *[scan.overlap] * batch.overlap)
        return RowLoss(loss, scan.rows, scan.agree, scan.overlap)

    @staticmethod
    def backward(ctx, upstream, *_):
        gradients = (None if g is None else g * upstream.to(g.dtype) for g in ctx.saved_tensors)
        return *gradients, None


class _Drafted(NamedTuple):
    """What is trained, or the gradients with respect to it."""

    hidden: torch.Tensor | None  # (R, D)
    head: torch.Tensor | None  # (V, D)
    correction: torch.Tensor | None = None  # (R, r)
    out: torch.Tensor | None = None  # (V, r)


class _Scan(NamedTuple):
    """What a pass over the rows found."""

    rows: torch.Tensor  # (G, L) divergences
    survival: torch.Tensor  # (G, L) the overlap with weights "multistep", else the probability of the label
    agree: torch.Tensor  # (G, L)
    overlap: torch.Tensor | None  # (G, L)
    gradients: _Drafted  # of each row's divergence; of matrices: of the whole loss


def _scan(
    drafted: _Drafted, batch: _Batch, wants: tuple[bool, ...] = (False,) * 4, row_weights: torch.Tensor | None = None
) -> _Scan:
    """Go through the rows that count, chunk by chunk. `wants`: with respect to which parts of `drafted` gradients are
    wanted; `row_weights` (G, L) are those of the loss, needed for matrices."""
    config, hidden = batch.config, drafted.hidden
    rows = torch.zeros(len(hidden), dtype=batch.dtype, device=hidden.device)
    survival = torch.ones_like(rows)
    agree = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
    overlap = torch.zeros_like(rows) if batch.overlap else None
    kinds = None, batch.dtype, None, batch.dtype
    gradients = _Drafted(
        *(
            torch.zeros_like(part, dtype=kind) if wanted else None
            for part, wanted, kind in zip(drafted, wants, kinds, strict=False)
        )
    )
    for chunk in batch.kept.split(config.chunk_rows):
        found = _chunk(drafted, chunk, batch, overlap)
        compared, slope, delta = found.compared, found.slope, found.compared.delta
        rows[chunk], agree[chunk] = compared.rows, compared.agree
        survival[chunk] = 1 - compared.rows if config.weights == "multistep" else compared.log_label.exp()
        weights = None if row_weights is None else row_weights.flatten()[chunk, None].to(batch.dtype)
        if gradients.correction is not None:
            gradients.correction[chunk] = (delta.to(drafted.out.dtype) @ drafted.out).to(gradients.correction.dtype)
        if gradients.out is not None:
            gradients.out.add_((delta * weights).T @ drafted.correction[chunk].to(batch.dtype))
        if found.unary is not None:
            rows[chunk] += config.unary * found.unary.rows
            delta.add_(found.unary.delta, alpha=config.unary)
        if slope is not None:
            delta *= slope  # from here on with respect to the products
        if gradients.hidden is not None:
            gradients.hidden[chunk] = delta.to(batch.head.dtype) @ drafted.head
        if gradients.head is not None:
            delta *= weights
            gradients.head.add_(delta.T @ hidden[chunk].to(batch.dtype))
        del found, compared, delta, slope
    rows, survival, agree = (column.view_as(batch.weights) for column in (rows, survival, agree))
    return _Scan(rows, survival, agree, None if overlap is None else overlap.view_as(batch.weights), gradients)


class _Chunk(NamedTuple):
    """Rows of a chunk, compared."""

    compared: "_Compared"
    unary: "_Compared | None"  # without corrections, where that counts too
    slope: torch.Tensor | None  # (rows, V) of the scale


def _chunk(drafted: _Drafted, chunk: torch.Tensor, batch: _Batch, overlap: torch.Tensor | None) -> _Chunk:
    """Compare the rows `chunk` (rows,) with their target; write their overlaps to `overlap` (R,), if there is one."""
    kind, label, unary = DIVERGENCES[batch.config.divergence], batch.labels[chunk], None
    shared, which = batch.teacher_rows[chunk].unique_consecutive(return_inverse=True)
    student = batch.scale((drafted.hidden[chunk] @ drafted.head.T).to(batch.dtype))  # (chunk, V)
    slope = batch.scale.slope(student)
    teacher = batch.scale((batch.teacher_hidden[shared] @ batch.head.T).to(batch.dtype))  # (distinct rows, V)
    if drafted.correction is not None:
        alone = student
        student = alone + (drafted.correction[chunk].to(drafted.out.dtype) @ drafted.out.T).to(batch.dtype)
        chosen = teacher.argmax(-1)[which]
        if batch.config.unary:
            unary = _compare(kind, teacher.clone(), which, alone.clone(), label)
        if batch.top_k:
            teacher, which = teacher[which], torch.arange(len(chunk), device=chunk.device)
            outside = _outside(alone, label, batch.top_k)
            student.masked_fill_(outside, IMPOSSIBLE), teacher.masked_fill_(outside, IMPOSSIBLE)
    if overlap is not None:
        p = teacher.softmax(-1)[which]
        overlap[chunk] = p.minimum(student.softmax(-1)).sum(-1)
    compared = _compare(kind, teacher, which, student, label)
    if drafted.correction is not None and batch.top_k:
        compared = compared._replace(agree=compared.choice == chosen)
    return _Chunk(compared, unary, slope)


def _outside(alone: torch.Tensor, label: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return which tokens (rows, V) are none of a row's `top_k` candidates: the likeliest by the logits (rows, V), the
    weakest of them replaced by the label (rows,) if that is none."""
    order = alone.topk(top_k, dim=-1).indices  # (rows, k)
    missing = (order != label[:, None]).all(-1)
    order[:, -1] = torch.where(missing, label, order[:, -1])
    return torch.ones_like(alone, dtype=torch.bool).scatter_(1, order, False)


class _Compared(NamedTuple):
    """A chunk's drafter against its target."""

    rows: torch.Tensor  # (rows,) divergences
    delta: torch.Tensor  # (rows, V) their gradient with respect to the drafter's logits
    agree: torch.Tensor  # (rows,) bool
    choice: torch.Tensor  # (rows,) the drafter's likeliest token
    log_label: torch.Tensor  # (rows,) the drafter's log-probability of the label


def _compare(
    kind: Divergence, teacher: torch.Tensor, which: torch.Tensor, student: torch.Tensor, label: torch.Tensor
) -> _Compared:
    """Compare the drafter's logits (rows, V) with the target's (distinct rows, V), of which `which` (rows,) is each
    row's. Overwrites both."""
    choice = student.argmax(-1)
    agree = choice == teacher.argmax(-1)[which]
    if kind.by_hand is None:
        with torch.enable_grad():
            log_q = student.requires_grad_().log_softmax(-1)
            rows = kind.formula(teacher.log_softmax(-1)[which], log_q, label)
            (delta,) = torch.autograd.grad(rows.sum(), student)
        return _Compared(rows.detach(), delta, agree, choice, log_q.detach().gather(1, label[:, None])[:, 0])
    p = negative_entropy = None
    if not kind.of_labels:
        p = _softmax(teacher)  # teacher holds log p from here on
        negative_entropy = teacher.mul_(p).sum(-1)[which]
        p = p[which]
    q = _softmax(student)
    log_label = student.gather(1, label[:, None])[:, 0]
    rows, delta = kind.by_hand(Chunk(p, negative_entropy, q, student, label))
    return _Compared(rows, delta, agree, choice, log_label)


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the probabilities (rows, V), and turn the logits into log-probabilities in place."""
    logits -= logits.amax(-1, keepdim=True)
    probabilities = logits.exp()
    total = probabilities.sum(-1, keepdim=True)
    probabilities /= total
    logits -= total.log()
    return probabilities

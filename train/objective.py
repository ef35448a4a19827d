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
from train.divergences import DIVERGENCES, TINY, WEIGHTS, Chunk, Divergence

CACHED = 1 << 18  # logits of as many rows as go through the arithmetic together on a CPU
IMPOSSIBLE = -1e4  # logit of a token that a selector does not choose among: its probability is 0, its logarithm finite


class RowLoss(NamedTuple):
    """The loss of a batch of blocks."""

    loss: torch.Tensor  # () weighted sum of divergences, differentiable with respect to hidden
    rows: torch.Tensor  # (G, L) divergence of every row in nats, 0 where the weight is; detached
    agree: torch.Tensor  # (G, L) bool: the target's choice is the drafter's likeliest token; False at weight 0
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
class RowPlan:
    """The rows of weight above 0, those with the same teacher row beside each other, and how they are cut into chunks.
    Where blocks are laid out on the host it is made there, and no device is asked for sizes."""

    kept: torch.Tensor  # (n,) int64 rows
    teachers: torch.Tensor  # (m,) int64 their teacher rows, each once
    which: torch.Tensor  # (n,) int64 of these, each row's
    chunks: list[tuple[int, int, int, int]]  # first row and the one behind the last, the same of teacher rows

    def to(self, device: torch.device) -> "RowPlan":
        """Return the same on another device."""
        moved = (part.to(device, non_blocking=True) for part in (self.kept, self.teachers, self.which))
        return RowPlan(*moved, self.chunks)

    def pinned(self) -> "RowPlan":
        """Return the same in memory that a GPU reads by itself."""
        return RowPlan(*(part.pin_memory() for part in (self.kept, self.teachers, self.which)), self.chunks)


def plan_rows(teacher_rows: torch.Tensor, weights: torch.Tensor, chunk_rows: int) -> RowPlan:
    """Plan the rows of a batch from their teacher rows and weights, (R,) or (G, L) each (two synchronisations on
    CUDA)."""
    flat = teacher_rows.flatten()
    kept = weights.flatten().nonzero()[:, 0]
    kept = kept[flat[kept].argsort(stable=True)]
    teachers, which = flat[kept].unique_consecutive(return_inverse=True)
    starts = range(0, len(kept), chunk_rows)
    ends = [min(start + chunk_rows, len(kept)) for start in starts]
    edges = which[[at for start, end in zip(starts, ends, strict=True) for at in (start, end - 1)]].tolist()
    chunks = [
        (start, end, edges[2 * i], edges[2 * i + 1] + 1)
        for i, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]
    return RowPlan(kept, teachers, which, chunks)


@dataclass(frozen=True)
class _Batch:
    """What the rows are compared with. Nothing here is trained."""

    teacher_hidden: torch.Tensor  # (P, D)
    labels: torch.Tensor  # (R,) int64
    weights: torch.Tensor  # (G, L)
    head: torch.Tensor  # (V, D) the target's
    plan: RowPlan
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
    plan: RowPlan | None = None,
) -> RowLoss:
    """Return the weighted sum of the rows' divergences to the target's distribution along the true continuation.

    hidden (R, D), teacher_hidden (P, D), head (V, D) in one dtype; teacher_rows, labels (G, L) int64; weights (G, L);
    own_head (V, D): the drafter's, float32, if it is not the target's; scale: what the target does to its head's
    products, and the drafter to its own; correction: of a conditional head, behind the scale. config.unary adds so
    many times the divergence without corrections. config.divergence names a row of DIVERGENCES, config.weights one
    of WEIGHTS, whose `by_block` multiplies a row's weight. The arithmetic on logits is float32 (float64 for float64
    inputs). Rows of weight 0 are dropped before the projection; plan: `plan_rows` of the same, if it was made before.
    """
    plan = plan_rows(teacher_rows, weights, config.chunk_rows) if plan is None else plan
    rows, out, top_k = (None, None, 0) if correction is None else correction
    batch = _Batch(teacher_hidden, labels.flatten(), weights, head, plan, config, scale, top_k, overlap)
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
    space = _space(batch)
    for place in batch.plan.chunks:
        chunk = batch.plan.kept[place[0] : place[1]]
        found = _chunk(drafted, chunk, place, batch, space)
        compared = found.compared
        rows[chunk], agree[chunk] = compared.rows, compared.agree
        survival[chunk] = 1 - compared.rows if config.weights == "multistep" else compared.log_label.exp()
        if overlap is not None:
            overlap[chunk] = compared.overlap
        weights = None if row_weights is None else row_weights.flatten()[chunk, None].to(batch.dtype)
        _add_gradients(gradients, found, drafted, chunk, weights, batch)
        del found
    rows, survival, agree = (column.view_as(batch.weights) for column in (rows, survival, agree))
    return _Scan(rows, survival, agree, None if overlap is None else overlap.view_as(batch.weights), gradients)


class _Space(NamedTuple):
    """Where the logits of one chunk after the other are written: fresh memory costs a CPU as much as the arithmetic."""

    student: torch.Tensor  # (rows, V)
    teacher: torch.Tensor  # (distinct rows, V)


def _space(batch: _Batch) -> _Space:
    """Return room for the largest chunk."""
    sizes = [(end - begin, last - first) for begin, end, first, last in batch.plan.chunks] or [(0, 0)]
    like = {"dtype": batch.dtype, "device": batch.head.device}
    return _Space(*(torch.empty(max(column), len(batch.head), **like) for column in zip(*sizes, strict=True)))


def _logits(states: torch.Tensor, head: torch.Tensor, scale: LogitScale, space: torch.Tensor) -> torch.Tensor:
    """Return the logits (rows, V) of states (rows, D), in `space` unless the target scales them."""
    out = space[: len(states)]
    if states.dtype == head.dtype == out.dtype:  # what autocast would cast, `out=` refuses
        torch.mm(states, head.T, out=out)
    else:
        out.copy_(states @ head.T)
    return scale(out)


class _Chunk(NamedTuple):
    """Rows of a chunk, compared."""

    compared: "_Compared"
    delta: torch.Tensor  # (rows, V) gradient of their divergences with respect to the drafter's logits
    unary: torch.Tensor | None  # (rows, V) more of it, with respect to the logits without corrections
    slope: torch.Tensor | float | None  # (rows, V) of the scale


def _add_gradients(
    gradients: _Drafted,
    found: _Chunk,
    drafted: _Drafted,
    chunk: torch.Tensor,
    weights: torch.Tensor | None,
    batch: _Batch,
) -> None:
    """Add a chunk's share to the gradients that are wanted; chunk (rows,), weights (rows, 1). Overwrites `found`."""
    delta = found.delta
    if gradients.correction is not None:
        gradients.correction[chunk] = (delta.to(drafted.out.dtype) @ drafted.out).to(gradients.correction.dtype)
    if gradients.out is not None:
        gradients.out.addmm_(delta.T, drafted.correction[chunk].to(batch.dtype) * weights)
    if found.unary is not None:
        delta.add_(found.unary)
    if found.slope is not None:
        delta.mul_(found.slope)  # from here on with respect to the products
    if gradients.hidden is not None:
        gradients.hidden[chunk] = delta.to(batch.head.dtype) @ drafted.head
    if gradients.head is not None:
        gradients.head.addmm_(delta.T, drafted.hidden[chunk].to(batch.dtype) * weights)


def _chunk(
    drafted: _Drafted, chunk: torch.Tensor, place: tuple[int, int, int, int], batch: _Batch, space: _Space
) -> _Chunk:
    """Compare the rows `chunk` (rows,), which lie at `place` in the plan, with their target."""
    config, label = batch.config, batch.labels[chunk]
    kind, (begin, end, first, last) = DIVERGENCES[config.divergence], place
    which = batch.plan.which[begin:end] - first
    student = _logits(drafted.hidden[chunk], drafted.head, batch.scale, space.student)  # (rows, V)
    slope = batch.scale.slope(student)
    states = batch.teacher_hidden[batch.plan.teachers[first:last]]
    teacher = _read_teacher(_logits(states, batch.head, batch.scale, space.teacher), kind, batch.overlap)
    unary, rows, outside = None, 0, None
    if drafted.correction is not None:
        if batch.top_k:
            outside = _outside(student, label, batch.top_k)
        if config.unary:
            unary = student.clone()
            rows = config.unary * _compare(kind, teacher, which, unary, label, None, False).rows
            unary *= config.unary
        student = _corrected(student, drafted.correction[chunk].to(drafted.out.dtype), drafted.out)
    compared = _compare(kind, teacher, which, student, label, outside, batch.overlap)
    return _Chunk(compared._replace(rows=compared.rows + rows), student, unary, slope)


def _corrected(student: torch.Tensor, correction: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Add the corrections (rows, r) by `out` (V, r) to logits (rows, V), in place where the dtypes are one."""
    if out.dtype == student.dtype:
        return student.addmm_(correction, out.T)
    return student.add_((correction @ out.T).to(student.dtype))


def _outside(alone: torch.Tensor, label: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return which tokens (rows, V) are none of a row's `top_k` candidates: the likeliest by the logits (rows, V), the
    weakest of them replaced by the label (rows,) if that is none."""
    order = alone.topk(top_k, dim=-1).indices  # (rows, k)
    missing = (order != label[:, None]).all(-1)
    order[:, -1] = torch.where(missing, label, order[:, -1])
    return torch.ones_like(alone, dtype=torch.bool).scatter_(1, order, False)


class _Teacher(NamedTuple):
    """The target's side of a chunk, once for each teacher row."""

    scores: torch.Tensor  # (distinct rows, V) probabilities; logits for a formula without a gradient by hand
    negative_entropy: torch.Tensor | None  # (distinct rows,) sum_v p log p
    choice: torch.Tensor  # (distinct rows,) its likeliest token


def _read_teacher(logits: torch.Tensor, kind: Divergence, overlap: bool) -> _Teacher:
    """Return the target's side from its logits (distinct rows, V), which are overwritten."""
    choice = logits.argmax(-1)
    if kind.by_hand is None or (kind.of_labels and not overlap):
        return _Teacher(logits, None, choice)
    negative_entropy = torch.cat([_to_probabilities(part) for part in logits.split(_slice_rows(logits))])
    return _Teacher(logits, negative_entropy, choice)


def _to_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Turn logits (rows, V) into probabilities in place; return sum_v p log p, (rows,)."""
    logits -= logits.amax(-1, keepdim=True)
    p = logits.softmax(-1)
    negative_entropy = torch.linalg.vecdot(p, logits) + p.amax(-1).log()  # largest logit 0: log p = logit + this
    logits.copy_(p)
    return negative_entropy


def _slice_rows(logits: torch.Tensor) -> int:
    """Return how many rows of logits (rows, V) go through all arithmetic together: on a CPU those that its caches
    hold, so that main memory is read and written once."""
    return max(1, CACHED // logits.shape[1]) if logits.device.type == "cpu" else max(1, len(logits))


class _Compared(NamedTuple):
    """Rows of the drafter against their target."""

    rows: torch.Tensor  # (rows,) divergences
    agree: torch.Tensor  # (rows,) bool
    log_label: torch.Tensor  # (rows,) the drafter's log-probability of the label
    overlap: torch.Tensor | None  # (rows,)


def _compare(
    kind: Divergence,
    teacher: _Teacher,
    which: torch.Tensor,
    student: torch.Tensor,
    label: torch.Tensor,
    outside: torch.Tensor | None,
    overlap: bool,
) -> _Compared:
    """Compare the drafter's logits (rows, V) with the target's, of which `which` (rows,) is each row's; neither counts
    the tokens `outside` (rows, V). Writes the divergences' gradients with respect to the logits over these."""
    step, found = _slice_rows(student), []
    for start in range(0, len(student), step):
        part = slice(start, start + step)
        hidden = None if outside is None else outside[part]
        found.append(_compare_slice(kind, teacher, which[part], student[part], label[part], hidden, overlap))
    columns = zip(*found, strict=True)
    return _Compared(*(None if column[0] is None else torch.cat(column) for column in columns))


def _compare_slice(kind, teacher, which, student, label, outside, overlap) -> _Compared:
    """Compare some rows: see `_compare`."""
    if outside is not None:
        student.masked_fill_(outside, IMPOSSIBLE)
    top = student.amax(-1, keepdim=True)
    agree = student.gather(1, teacher.choice[which, None]) == top
    if kind.by_hand is None:
        return _by_formula(kind, teacher.scores.index_select(0, which), student, label, outside, overlap, agree[:, 0])
    p = negative_entropy = cross = None
    if teacher.negative_entropy is not None:
        p, negative_entropy = teacher.scores.index_select(0, which), teacher.negative_entropy[which]
        if outside is not None:
            p.masked_fill_(outside, 0)
            p /= p.sum(-1, keepdim=True).clamp_(min=TINY)
            negative_entropy = torch.special.xlogy(p, p).sum(-1)
    student -= top
    if kind.reads_log_q:
        cross = torch.linalg.vecdot(p, student)
    log_label = student.gather(1, label[:, None])[:, 0]
    q = torch.softmax(student, -1, out=student)
    log_largest = q.amax(-1).log()  # the largest logit is 0 now: log q = logit + this
    log_label = log_label + log_largest
    shared = p.minimum(q).sum(-1) if overlap else None
    rows, delta = kind.by_hand(
        Chunk(p, q, negative_entropy, None if cross is None else cross + log_largest, log_label, label)
    )
    if delta.data_ptr() != student.data_ptr():
        student.copy_(delta)
    return _Compared(rows, agree[:, 0], log_label, shared)


def _by_formula(kind, logits, student, label, outside, overlap, agree) -> _Compared:
    """Compare rows by the formula alone, with autograd's gradient; logits (rows, V) are the target's, a copy."""
    if outside is not None:
        logits.masked_fill_(outside, IMPOSSIBLE)
    log_p, trained = logits.log_softmax(-1), student.detach().clone()
    with torch.enable_grad():
        log_q = trained.requires_grad_().log_softmax(-1)
        rows = kind.formula(log_p, log_q, label)
        (delta,) = torch.autograd.grad(rows.sum(), trained)
    student.copy_(delta)
    log_q = log_q.detach()
    shared = log_p.exp().minimum(log_q.exp()).sum(-1) if overlap else None
    return _Compared(rows.detach(), agree, log_q.gather(1, label[:, None])[:, 0], shared)

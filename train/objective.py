"""The objective: how far the drafter's marginals are from the target's, in chunks of rows. Its
formulas are in `train/divergences.py`.

G blocks of L drafted positions, R = G * L rows, P teacher rows (context positions), D hidden size,
V vocabulary.

Row r compares the drafter's state `hidden[r]` with the target's state
`teacher_hidden[teacher_rows[r]]`, each through its head: the target's frozen one, which DFlash
shares, or a trained one of the drafter's (DART). Vocabulary-sized tensors exist for one chunk of
rows at a
time: the gradients with respect to `hidden` and to a trained head are formed in the same pass, and
    (R,
D) and (V, D) are all that is kept for backward. Weights that depend on how well a block was drafted
are known only after the last chunk. They are then applied to the (R, D) gradients of single rows; a
trained head has no such rows, so a first pass computes the weights for it.

A conditional head adds `out @ correction[r]` to a row's logits (`Correction`;
`infer/drafters/heads/base.py`): the divergence is then that of the distribution behind the true
token before, and the gradients with respect to `out` (V, r) and the corrections (R, r) come about
in the same pass. So all heads are trained here, under every divergence.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from infer.targets.support import PLAIN, LogitScale
from train.config import ObjectiveConfig
from train.divergences import DIVERGENCES, TINY, WEIGHTS, Chunk, Divergence

CACHED = 1 << 18  # logits of as many rows as go through the arithmetic together on a CPU
# logit of a token that a selector does not choose among: its probability is 0, its logarithm finite
IMPOSSIBLE = -1e4


class RowLoss(NamedTuple):
    """The loss of a batch of blocks."""

    loss: torch.Tensor  # () weighted sum of divergences, differentiable with respect to hidden
    rows: torch.Tensor  # (G, L) divergence of every row in nats, 0 where the weight is; detached
    agree: (
        torch.Tensor
    )  # (G, L) bool: the target's choice is the drafter's likeliest token; False at weight 0
    overlap: torch.Tensor | None = (
        None  # (G, L) sum_v min(p, q), detached; 0 unless it was asked for
    )


class Correction(NamedTuple):
    """What a conditional head adds to the logits of rows."""

    rows: torch.Tensor  # (R, r)
    out: torch.Tensor  # (V, r) trained


def position_weights(config: ObjectiveConfig, length: int) -> torch.Tensor:
    """Return the weights of the L drafted positions t = 1 .. L, (L,) float32: the part that does
    not depend on the drafter."""
    return WEIGHTS[config.position_weights].by_position(
        torch.arange(length, dtype=torch.float32), config
    )


class RowPlan(NamedTuple):
    """The rows of weight above 0, those with the same teacher row beside each other, and how they
    are cut into chunks. Where blocks are laid out on the host it is made there, and no device is
    asked for sizes."""

    kept: torch.Tensor  # (n,) int64 rows
    teachers: torch.Tensor  # (m,) int64 their teacher rows, each once
    which: torch.Tensor  # (n,) int64 of these, each row's
    chunks: list[
        tuple[int, int, int, int]
    ]  # first row and the one behind the last, the same of teacher rows


def plan_rows(teacher_rows: torch.Tensor, weights: torch.Tensor, chunk_rows: int) -> RowPlan:
    """Plan the rows of a batch from their teacher rows and weights, (R,) or (G, L) each (two
    synchronisations on CUDA)."""
    flat = teacher_rows.flatten()
    kept = weights.flatten().nonzero()[:, 0]
    kept = kept[flat[kept].argsort(stable=True)]
    teachers, which = flat[kept].unique_consecutive(return_inverse=True)
    starts = range(0, len(kept), chunk_rows)
    ends = [min(start + chunk_rows, len(kept)) for start in starts]
    edges = which[
        [at for start, end in zip(starts, ends, strict=True) for at in (start, end - 1)]
    ].tolist()
    chunks = [
        (start, end, edges[2 * i], edges[2 * i + 1] + 1)
        for i, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]
    return RowPlan(kept, teachers, which, chunks)


@dataclass(frozen=True)
class Batch:
    """What drafted rows are compared with. Nothing here is trained."""

    teacher_hidden: torch.Tensor  # (P, D)
    teacher_rows: torch.Tensor  # (G, L) int64 of these, each row's
    labels: (
        torch.Tensor
    )  # (G, L) int64; -1, at weight 0, for a token that the drafter does not know
    weights: torch.Tensor  # (G, L)
    head: torch.Tensor  # (V, D) the target's
    config: ObjectiveConfig
    scale: LogitScale = (
        PLAIN  # what the target does to its head's products, and the drafter to its own
    )
    # with corrections, distributions are over so many of a row's likeliest tokens without, and the
    # label; 0: all
    top_k: int = 0
    overlap: bool = False  # is asked for
    plan: RowPlan | None = None  # `plan_rows` of teacher rows and weights, if it was made before

    @property
    def dtype(self) -> torch.dtype:
        """Of the arithmetic on logits."""
        return torch.float64 if self.teacher_hidden.dtype == torch.float64 else torch.float32


def divergence(
    hidden: torch.Tensor,
    batch: Batch,
    own_head: torch.Tensor | None = None,
    correction: Correction | None = None,
) -> RowLoss:
    """Return the weighted sum of the rows' divergences to the target's distribution along the true
    continuation.

    hidden (R, D), in the dtype of teacher and head; own_head (V, D): the drafter's, float32, if it
    is not the target's; correction: of a conditional head, behind the scale. config.marginal_weight adds so
    many times the divergence without corrections. config.divergence names a row of DIVERGENCES,
    config.position_weights one of WEIGHTS, whose `by_block` multiplies a row's weight. The arithmetic on
    logits is float32 (float64 for float64 inputs). Rows of weight 0 are dropped before the
    projection.
    """
    plan = batch.plan or plan_rows(batch.teacher_rows, batch.weights, batch.config.chunk_rows)
    batch = replace(batch, labels=batch.labels.flatten(), plan=plan)
    own_head = batch.head if own_head is None else own_head
    return RowLoss(*_Objective.apply(hidden, own_head, *(correction or (None, None)), batch))


class _Objective(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, own_head, correction, out, batch: Batch):
        wants = ctx.needs_input_grad
        head, weights, by_block = (
            own_head.to(hidden.dtype),
            batch.weights,
            WEIGHTS[batch.config.position_weights].by_block,
        )

        def row_weights(likely: torch.Tensor) -> torch.Tensor:  # (G, L)
            return (
                weights.to(likely.dtype)
                if by_block is None
                else weights * by_block(likely, weights > 0)
            )

        drafted = _Drafted(hidden, head, correction, None if out is None else out.to(hidden.dtype))
        known = None
        if wants[1] or wants[3]:
            known = row_weights(weights if by_block is None else _Scan(drafted, batch).likely)
        scan = _Scan(drafted, batch, wants, known)
        factors = row_weights(scan.likely) if known is None else known
        loss = (scan.rows * factors).sum()
        for gradient in (scan.gradients.hidden, scan.gradients.correction):
            if gradient is not None:
                gradient.mul_(factors.view(-1, 1).to(gradient.dtype))
        ctx.save_for_backward(*scan.gradients)
        ctx.mark_non_differentiable(scan.rows, scan.agree, scan.overlap)
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


class _Scan:
    """A pass over the rows that count, chunk by chunk. wants: with respect to which parts of
    `drafted` gradients are formed: of each row's divergence; of matrices of the whole loss, whose
    `row_weights` (G, L) are needed then.

    Found for every row, (G, L): `rows`, its divergence; `likely`, the drafter's probability of the
    label; `agree`; `overlap`, where that is asked for.
    """

    def __init__(
        self,
        drafted: _Drafted,
        batch: Batch,
        wants: tuple[bool, ...] = (False,) * 4,
        row_weights=None,
    ) -> None:
        self.drafted = drafted
        self.batch = batch
        self.row_weights = row_weights
        self.kind = DIVERGENCES[batch.config.divergence]
        self.rows = torch.zeros(
            batch.weights.shape, dtype=batch.dtype, device=drafted.hidden.device
        )
        self.likely = (batch.labels >= 0).view_as(self.rows).to(self.rows)
        self.overlap = torch.zeros_like(self.rows)
        self.agree = torch.zeros_like(self.rows, dtype=torch.bool)
        kinds = None, batch.dtype, None, batch.dtype
        parts = zip(drafted, wants, kinds, strict=False)
        zeros = (
            torch.zeros_like(part, dtype=kind) if wanted else None for part, wanted, kind in parts
        )
        self.gradients = _Drafted(*zeros)
        # where the logits of one chunk after the other are written: fresh memory costs a CPU as
        # much as the arithmetic
        sizes = [(end - begin, last - first) for begin, end, first, last in batch.plan.chunks] or [
            (0, 0)
        ]
        like = {"dtype": batch.dtype, "device": batch.head.device}
        self.room = [
            torch.empty(max(column), len(batch.head), **like) for column in zip(*sizes, strict=True)
        ]
        for place in batch.plan.chunks:
            self.add(*place)

    def add(self, begin: int, end: int, first: int, last: int) -> None:
        """Compare the rows that lie between `begin` and `end` in the plan with their target; their
        teacher rows lie between `first` and `last`."""
        batch, drafted, unary = self.batch, self.drafted, self.batch.config.marginal_weight
        chunk = batch.plan.kept[begin:end]
        which = batch.plan.which[begin:end] - first
        label = batch.labels[chunk]
        outside = more = None
        student = _logits(
            drafted.hidden[chunk], drafted.head, batch.scale, self.room[0]
        )  # (rows, V)
        slope = batch.scale.slope(student)
        states = batch.teacher_hidden[batch.plan.teachers[first:last]]
        teacher = _read_teacher(
            _logits(states, batch.head, batch.scale, self.room[1]), self.kind, batch.overlap
        )
        if drafted.correction is not None:
            outside = _outside(student, label, batch.top_k) if batch.top_k else None
            if unary:
                more = student.clone()
                alone = _compare(self.kind, teacher, which, more, label, None, False)
                self.rows.view(-1)[chunk] = unary * alone.rows
                more *= unary
            correction = drafted.correction[chunk].to(drafted.out.dtype)  # (rows, r)
            if drafted.out.dtype == student.dtype:  # in place
                student.addmm_(correction, drafted.out.T)
            else:
                student.add_((correction @ drafted.out.T).to(student.dtype))
        found = _compare(self.kind, teacher, which, student, label, outside, batch.overlap)
        self.rows.view(-1)[chunk] += found.rows
        self.agree.view(-1)[chunk] = found.agree
        self.likely.view(-1)[chunk] = found.log_label.exp()
        if batch.overlap:
            self.overlap.view(-1)[chunk] = found.overlap
        self.differentiate(chunk, student, more, slope)

    def differentiate(
        self,
        chunk: torch.Tensor,
        delta: torch.Tensor,
        more: torch.Tensor | None,
        slope: torch.Tensor | float | None,
    ) -> None:
        """Add the share of the rows `chunk` to the gradients that are wanted. delta (rows, V): the
        gradient of their divergences with respect to the drafter's logits, overwritten; more (rows,
        V): with respect to those without corrections alone; slope: of the scale."""
        gradients = self.gradients
        drafted = self.drafted
        dtype = self.batch.dtype
        weights = None
        if self.row_weights is not None:
            weights = self.row_weights.flatten()[chunk, None].to(dtype)  # (rows, 1)
        if gradients.correction is not None:
            gradients.correction[chunk] = (delta.to(drafted.out.dtype) @ drafted.out).to(
                gradients.correction.dtype
            )
        if gradients.out is not None:
            gradients.out.addmm_(delta.T, drafted.correction[chunk].to(dtype) * weights)
        if more is not None:
            delta.add_(more)
        if slope is not None:
            delta.mul_(slope)  # from here on with respect to the products
        if gradients.hidden is not None:
            gradients.hidden[chunk] = delta.to(self.batch.head.dtype) @ drafted.head
        if gradients.head is not None:
            gradients.head.addmm_(delta.T, drafted.hidden[chunk].to(dtype) * weights)


def _logits(
    states: torch.Tensor, head: torch.Tensor, scale: LogitScale, room: torch.Tensor
) -> torch.Tensor:
    """Return the logits (rows, V) of states (rows, D), in `room` unless the target scales them."""
    out = room[: len(states)]
    if states.dtype == head.dtype == out.dtype:  # what autocast would cast, `out=` refuses
        torch.mm(states, head.T, out=out)
    else:
        out.copy_(states @ head.T)
    return scale(out)


def _outside(alone: torch.Tensor, label: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return which tokens (rows, V) are none of a row's `top_k` candidates: the likeliest by the
    logits (rows, V), the weakest of them replaced by the label (rows,) if that is none."""
    order = alone.topk(top_k, dim=-1).indices  # (rows, k)
    missing = (order != label[:, None]).all(-1)
    order[:, -1] = torch.where(missing, label, order[:, -1])
    return torch.ones_like(alone, dtype=torch.bool).scatter_(1, order, False)


class _Teacher(NamedTuple):
    """The target's side of a chunk, once for each teacher row."""

    scores: (
        torch.Tensor
    )  # (distinct rows, V) probabilities; logits for a formula without a gradient by hand
    negative_entropy: torch.Tensor | None  # (distinct rows,) sum_v p log p
    choice: torch.Tensor  # (distinct rows,) its likeliest token


def _read_teacher(logits: torch.Tensor, kind: Divergence, overlap: bool) -> _Teacher:
    """Return the target's side from its logits (distinct rows, V), which are overwritten."""
    choice = logits.argmax(-1)
    if kind.by_hand is None or (kind.of_labels and not overlap):
        return _Teacher(logits, None, choice)
    negative_entropy = torch.cat(
        [_to_probabilities(part) for part in logits.split(_slice_rows(logits))]
    )
    return _Teacher(logits, negative_entropy, choice)


def _to_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Turn logits (rows, V) into probabilities in place; return sum_v p log p, (rows,)."""
    logits -= logits.amax(-1, keepdim=True)
    p = logits.softmax(-1)
    # largest logit 0: log p = logit + this
    negative_entropy = torch.linalg.vecdot(p, logits) + p.amax(-1).log()
    logits.copy_(p)
    return negative_entropy


def _slice_rows(logits: torch.Tensor) -> int:
    """Return how many rows of logits (rows, V) go through all arithmetic together: on a CPU those
    that its caches hold, so that main memory is read and written once."""
    return max(1, CACHED // logits.shape[1]) if logits.device.type == "cpu" else max(1, len(logits))


class _Compared(NamedTuple):
    """Rows of the drafter against their target."""

    rows: torch.Tensor  # (rows,) divergences
    agree: torch.Tensor  # (rows,) bool
    log_label: torch.Tensor  # (rows,) the drafter's log-probability of the label
    overlap: torch.Tensor | None  # (rows,)


def _compare(
    kind: Divergence, teacher: _Teacher, which, student, label, outside, overlap: bool
) -> _Compared:
    """Compare the drafter's logits (rows, V) with the target's, of which `which` (rows,) is each
    row's; neither counts the tokens `outside` (rows, V). Writes the divergences' gradients with
    respect to the logits over these."""
    step = _slice_rows(student)
    found = []
    for start in range(0, len(student), step):
        part = slice(start, start + step)
        hidden = None if outside is None else outside[part]
        found.append(
            _compare_slice(kind, teacher, which[part], student[part], label[part], hidden, overlap)
        )
    columns = zip(*found, strict=True)
    return _Compared(*(None if column[0] is None else torch.cat(column) for column in columns))


def _compare_slice(kind, teacher, which, student, label, outside, overlap) -> _Compared:
    """Compare some rows: see `_compare`."""
    if outside is not None:
        student.masked_fill_(outside, IMPOSSIBLE)
    top = student.amax(-1, keepdim=True)
    agree = student.gather(1, teacher.choice[which, None]) == top
    if kind.by_hand is None:
        return _by_formula(
            kind,
            teacher.scores.index_select(0, which),
            student,
            label,
            outside,
            overlap,
            agree[:, 0],
        )
    p = negative_entropy = cross = None
    if teacher.negative_entropy is not None:
        p = teacher.scores.index_select(0, which)
        negative_entropy = teacher.negative_entropy[which]
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
        Chunk(
            p, q, negative_entropy, None if cross is None else cross + log_largest, log_label, label
        )
    )
    if delta.data_ptr() != student.data_ptr():
        student.copy_(delta)
    return _Compared(rows, agree[:, 0], log_label, shared)


def _by_formula(kind, logits, student, label, outside, overlap, agree) -> _Compared:
    """Compare rows by the formula alone, with autograd's gradient; logits (rows, V) are the
    target's, a copy."""
    if outside is not None:
        logits.masked_fill_(outside, IMPOSSIBLE)
    log_p = logits.log_softmax(-1)
    trained = student.detach().clone()
    with torch.enable_grad():
        log_q = trained.requires_grad_().log_softmax(-1)
        rows = kind.formula(log_p, log_q, label)
        (delta,) = torch.autograd.grad(rows.sum(), trained)
    student.copy_(delta)
    log_q = log_q.detach()
    shared = log_p.exp().minimum(log_q.exp()).sum(-1) if overlap else None
    return _Compared(rows.detach(), agree, log_q.gather(1, label[:, None])[:, 0], shared)

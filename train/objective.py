"""The training objective: a weighted sum of divergences between drafter and target. It is computed
in chunks of rows.

The formulas are in `train/divergences.py`, the comparison of one chunk in `train/comparison.py`.

A row is one drafted position of one block. Row i compares the drafter's hidden state `hidden[i]`
with the target's hidden state `teacher_hidden[teacher_rows[i]]`. The target's hidden state is
multiplied by the target's frozen head. The drafter's hidden state is multiplied by the same head
(DFlash), or by a trained head of the drafter (DART).

Logits exist for one chunk of rows at a time. The forward pass already computes the gradients with
respect to `hidden` and to a trained head, and saves only these for the backward pass. D-PACE's
weights depend on how well a block was drafted, so they are known only after the last chunk. They
can still be applied to the gradients of `hidden`, row by row. The gradient of a trained head is a
sum over rows; in this case an additional pass computes the weights first.

A conditional head adds the correction `out @ vectors[i]` to the logits of row i (`LogitCorrection`,
see `infer/drafters/heads/base.py`). The divergence is then that of the corrected distribution. The
gradients with respect to `out` and `vectors` are computed in the same pass. This works for every
conditional head and every divergence.

Shapes: G blocks of L drafted positions, R = G * L rows, P context positions of the target, D hidden
size, V vocabulary, r rank of a conditional head's correction, rows = rows of one chunk.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from infer.targets.support import IDENTITY_LOGIT_SCALE, LogitScale
from train.chunk_plan import ChunkBounds, ChunkPlan, plan_chunks
from train.comparison import compare_rows, prepare_teacher
from train.config import ObjectiveConfig
from train.divergences import DIVERGENCE_TABLE, POSITION_WEIGHTINGS_BY_NAME


class BlockLoss(NamedTuple):
    """The loss of a batch of blocks."""

    loss: torch.Tensor  # scalar: weighted sum of the divergences, with gradient
    divergences: torch.Tensor  # (G, L) nats, without gradient; 0 where the weight is 0
    # (G, L) bool: whether drafter and target have the same likeliest token; False where the weight
    # is 0
    agrees: torch.Tensor
    # (G, L) overlap of the distributions, sum_v min(p, q), without gradient; 0 unless
    # `DivergenceInputs.needs_overlap`
    overlap: torch.Tensor | None = None


class LogitCorrection(NamedTuple):
    """The correction of a conditional head: `out @ vectors[i]` is added to the logits of row i."""

    vectors: torch.Tensor  # (R, r) one vector per row
    out: torch.Tensor  # (V, r) weight matrix of the conditional head


def position_weights(config: ObjectiveConfig, num_drafted: int) -> torch.Tensor:
    """Return the weights of the drafted positions of a block, (num_drafted,) float32.

    They do not include D-PACE's factor, which depends on the drafter (`Weighting.block_factor`).
    """
    steps = torch.arange(num_drafted, dtype=torch.float32)
    return POSITION_WEIGHTINGS_BY_NAME[config.position_weights].position_weights(steps, config)


@dataclass(frozen=True)
class DivergenceInputs:
    """The inputs of the objective that are not trained: the target's part, and how to compare."""

    teacher_hidden: torch.Tensor  # (P, D) the target's hidden states
    teacher_rows: torch.Tensor  # (G, L) int64: for each row, its index in `teacher_hidden`
    # (G, L) int64 true tokens. A token that is not in the drafter's vocabulary is -1 and must have
    # the weight 0.
    labels: torch.Tensor
    weights: torch.Tensor  # (G, L) weights of the drafted positions, from `position_weights`
    head: torch.Tensor  # (V, D) the target's head
    config: ObjectiveConfig
    scale: LogitScale = IDENTITY_LOGIT_SCALE  # applied to the logits of target and drafter
    # If there is a correction, both distributions are limited to candidates: the `top_k` likeliest
    # tokens of the uncorrected logits, and the label. 0 means no limit.
    top_k: int = 0
    needs_overlap: bool = False  # whether to compute `BlockLoss.overlap`
    # result of `plan_chunks` for `teacher_rows` and `weights`; None means that it is computed here
    chunk_plan: ChunkPlan | None = None

    @property
    def logits_dtype(self) -> torch.dtype:
        """The dtype of logits and probabilities: float64 for float64 hidden states, otherwise
        float32."""
        if self.teacher_hidden.dtype == torch.float64:
            return torch.float64
        return torch.float32


def compute_divergence(
    hidden: torch.Tensor,
    inputs: DivergenceInputs,
    drafter_head: torch.Tensor | None = None,
    correction: LogitCorrection | None = None,
) -> BlockLoss:
    """Return the training loss: the weighted sum of the divergences of all rows.

    hidden: (R, D) the drafter's hidden states, in the dtype of `inputs.teacher_hidden` and
        `inputs.head`.
    drafter_head: (V, D) float32, the drafter's own head. None means that the drafter uses the
        target's head.
    correction: the correction of a conditional head, which is added to the scaled logits.

    `inputs.config` selects the divergence and the position weights. If its `marginal_weight` is not
    0, the divergence of the uncorrected logits times `marginal_weight` is added. Logits and
    probabilities are float32, or float64 for float64 inputs. Rows of weight 0 are not computed.
    """
    chunk_plan = inputs.chunk_plan
    if chunk_plan is None:
        chunk_plan = plan_chunks(inputs.teacher_rows, inputs.weights, inputs.config.chunk_rows)
    inputs = replace(inputs, labels=inputs.labels.flatten(), chunk_plan=chunk_plan)
    if drafter_head is None:
        drafter_head = inputs.head
    vectors = out = None
    if correction is not None:
        vectors, out = correction
    return BlockLoss(*_DivergenceFunction.apply(hidden, drafter_head, vectors, out, inputs))


class _DivergenceFunction(torch.autograd.Function):
    """The autograd function of the objective. Its forward pass already computes all gradients."""

    @staticmethod
    def forward(ctx, hidden, drafter_head, vectors, out, inputs: DivergenceInputs):
        needs_gradient = ctx.needs_input_grad[:4]
        needs_matrix_gradient = needs_gradient[1] or needs_gradient[3]
        weights = inputs.weights
        block_factor = POSITION_WEIGHTINGS_BY_NAME[inputs.config.position_weights].block_factor

        def compute_row_weights(label_probs: torch.Tensor) -> torch.Tensor:  # (G, L)
            if block_factor is None:
                return weights.to(label_probs.dtype)
            return weights * block_factor(label_probs, weights > 0)

        drafted = _TrainedTensors(
            hidden,
            drafter_head.to(hidden.dtype),
            vectors,
            None if out is None else out.to(hidden.dtype),
        )
        row_weights = None
        if needs_matrix_gradient and block_factor is None:
            row_weights = compute_row_weights(weights)
        elif needs_matrix_gradient:
            row_weights = compute_row_weights(_ChunkedPass(drafted, inputs).label_probs)

        chunked = _ChunkedPass(drafted, inputs, needs_gradient, row_weights)
        if row_weights is None:
            row_weights = compute_row_weights(chunked.label_probs)
        loss = (chunked.divergences * row_weights).sum()
        for gradient in (chunked.gradients.hidden, chunked.gradients.vectors):
            if gradient is not None:
                gradient.mul_(row_weights.view(-1, 1).to(gradient.dtype))
        ctx.save_for_backward(*chunked.gradients)
        ctx.mark_non_differentiable(chunked.divergences, chunked.agrees, chunked.overlap)
        return BlockLoss(loss, chunked.divergences, chunked.agrees, chunked.overlap)

    @staticmethod
    def backward(ctx, *grad_outputs):
        grad_loss = grad_outputs[0]
        gradients = (None if g is None else g * grad_loss.to(g.dtype) for g in ctx.saved_tensors)
        return *gradients, None


class _TrainedTensors(NamedTuple):
    """The inputs of the objective that can have gradients."""

    hidden: torch.Tensor  # (R, D) the drafter's hidden states
    head: torch.Tensor  # (V, D) the head that the drafter uses
    vectors: torch.Tensor | None = None  # (R, r) see LogitCorrection
    out: torch.Tensor | None = None  # (V, r) see LogitCorrection


class _Gradients(NamedTuple):
    """The gradients with respect to the fields of `_TrainedTensors`. A field is None if its
    gradient is not needed."""

    hidden: torch.Tensor | None
    head: torch.Tensor | None
    vectors: torch.Tensor | None
    out: torch.Tensor | None


class _ChunkedPass:
    """A pass over all rows of positive weight, chunk by chunk. The constructor runs the pass.

    drafted: the drafter's tensors, see `_TrainedTensors`.
    needs_gradient: for each field of `drafted`, whether to compute its gradient. The gradients of
        `hidden` and `vectors` are those of the unweighted divergences. The gradients of `head` and
        `out` are those of the weighted sum.
    row_weights: (G, L) the weights of that sum; needed for gradients of `head` and `out`.

    The results are attributes of shape (G, L), and `gradients`. `divergences`, `agrees` and
    `overlap` are those of `BlockLoss`; `label_probs` is the drafter's probability of the label.
    """

    def __init__(
        self,
        drafted: _TrainedTensors,
        inputs: DivergenceInputs,
        needs_gradient: tuple[bool, ...] = (False,) * 4,
        row_weights: torch.Tensor | None = None,
    ) -> None:
        assert inputs.chunk_plan is not None
        dtype = inputs.logits_dtype
        self.drafted = drafted
        self.inputs = inputs
        self.plan = inputs.chunk_plan
        self.row_weights = row_weights
        self.divergence = DIVERGENCE_TABLE[inputs.config.divergence]
        self.divergences = torch.zeros(
            inputs.weights.shape, dtype=dtype, device=drafted.hidden.device
        )
        has_label = (inputs.labels >= 0).view_as(self.divergences)
        self.label_probs = has_label.to(self.divergences)
        self.overlap = torch.zeros_like(self.divergences)
        self.agrees = torch.zeros_like(self.divergences, dtype=torch.bool)

        # gradients of `head` and `out` are sums over rows, which are computed in the logits' dtype
        gradient_dtypes = (None, dtype, None, dtype)
        gradients = []
        for tensor, needed, gradient_dtype in zip(
            drafted, needs_gradient, gradient_dtypes, strict=True
        ):
            gradient = None
            if needed:
                assert tensor is not None
                gradient = torch.zeros_like(tensor, dtype=gradient_dtype)
            gradients.append(gradient)
        self.gradients = _Gradients(*gradients)

        # All chunks write their logits into the same buffers, because on a CPU the allocation of
        # new memory takes as long as the computation.
        max_rows = max_teacher_rows = 0
        for bounds in self.plan.chunks:
            max_rows = max(max_rows, bounds.row_end - bounds.row_start)
            max_teacher_rows = max(max_teacher_rows, bounds.teacher_end - bounds.teacher_start)
        device = inputs.head.device
        vocabulary = len(inputs.head)
        self.student_buffer = torch.empty(max_rows, vocabulary, dtype=dtype, device=device)
        self.teacher_buffer = torch.empty(max_teacher_rows, vocabulary, dtype=dtype, device=device)
        for bounds in self.plan.chunks:
            self.add_chunk(bounds)

    def add_chunk(self, bounds: ChunkBounds) -> None:
        """Compare the rows of one chunk with the target, and store the results and gradients in the
        attributes of this object."""
        inputs = self.inputs
        drafted = self.drafted
        unary = inputs.config.marginal_weight
        rows = self.plan.rows[bounds.row_start : bounds.row_end]
        teacher_indices = self.plan.teacher_indices[bounds.row_start : bounds.row_end]
        teacher_indices = teacher_indices - bounds.teacher_start
        labels = inputs.labels[rows]
        excluded = unary_delta = None

        student = _compute_logits(
            drafted.hidden[rows], drafted.head, inputs.scale, self.student_buffer
        )  # (rows, V)
        scale_slope = inputs.scale.derivative(student)
        teacher_rows = self.plan.teacher_rows[bounds.teacher_start : bounds.teacher_end]
        teacher_logits = _compute_logits(
            inputs.teacher_hidden[teacher_rows], inputs.head, inputs.scale, self.teacher_buffer
        )
        teacher = prepare_teacher(teacher_logits, self.divergence, inputs.needs_overlap)

        if drafted.vectors is not None:
            assert drafted.out is not None
            if inputs.top_k:
                excluded = _find_excluded_tokens(student, labels, inputs.top_k)
            if unary:
                unary_delta = student.clone()
                uncorrected = compare_rows(
                    self.divergence, teacher, teacher_indices, unary_delta, labels, None, False
                )
                self.divergences.view(-1)[rows] = unary * uncorrected.divergences
                unary_delta *= unary
            vectors = drafted.vectors[rows].to(drafted.out.dtype)  # (rows, r)
            if drafted.out.dtype == student.dtype:  # the product needs no further memory
                student.addmm_(vectors, drafted.out.T)
            else:
                student.add_((vectors @ drafted.out.T).to(student.dtype))

        comparison = compare_rows(
            self.divergence,
            teacher,
            teacher_indices,
            student,
            labels,
            excluded,
            inputs.needs_overlap,
        )
        self.divergences.view(-1)[rows] += comparison.divergences
        self.agrees.view(-1)[rows] = comparison.agrees
        self.label_probs.view(-1)[rows] = comparison.label_log_probs.exp()
        if inputs.needs_overlap:
            assert comparison.overlap is not None
            self.overlap.view(-1)[rows] = comparison.overlap
        self.add_gradients(rows, student, unary_delta, scale_slope)

    def add_gradients(
        self,
        rows: torch.Tensor,
        delta: torch.Tensor,
        unary_delta: torch.Tensor | None,
        scale_slope: torch.Tensor | float | None,
    ) -> None:
        """Add the contribution of a chunk's rows to the gradients.

        rows: (rows,) int64 indices of the chunk's rows.
        delta: (rows, V) gradient of the divergences with respect to the logits; overwritten.
        unary_delta: (rows, V) gradient of the added loss term (`marginal_weight`) with respect to
            the uncorrected logits; None without this term.
        scale_slope: derivative of the logit scale; None if the derivative is 1.
        """
        gradients = self.gradients
        drafted = self.drafted
        dtype = self.inputs.logits_dtype
        weights = None
        if self.row_weights is not None:
            weights = self.row_weights.flatten()[rows, None].to(dtype)  # (rows, 1)

        # The correction is added to the scaled logits, so its gradients need no derivative of the
        # logit scale.
        if gradients.vectors is not None:
            assert drafted.out is not None
            vector_gradient = delta.to(drafted.out.dtype) @ drafted.out
            gradients.vectors[rows] = vector_gradient.to(gradients.vectors.dtype)
        if gradients.out is not None:
            assert drafted.vectors is not None
            assert weights is not None
            gradients.out.addmm_(delta.T, drafted.vectors[rows].to(dtype) * weights)

        # from here on, `delta` is the gradient with respect to the unscaled logits
        if unary_delta is not None:
            delta.add_(unary_delta)
        if scale_slope is not None:
            delta.mul_(scale_slope)
        if gradients.hidden is not None:
            gradients.hidden[rows] = delta.to(self.inputs.head.dtype) @ drafted.head
        if gradients.head is not None:
            assert weights is not None
            gradients.head.addmm_(delta.T, drafted.hidden[rows].to(dtype) * weights)


def _compute_logits(
    states: torch.Tensor, head: torch.Tensor, scale: LogitScale, buffer: torch.Tensor
) -> torch.Tensor:
    """Return the scaled logits (rows, V) of hidden states (rows, D). The logits are written to
    `buffer`, unless `scale` creates a new tensor."""
    logits = buffer[: len(states)]
    if states.dtype == head.dtype == logits.dtype:
        torch.mm(states, head.T, out=logits)
    else:  # torch.mm does not accept `out=` if autocast would have to cast the inputs
        logits.copy_(states @ head.T)
    return scale(logits)


def _find_excluded_tokens(
    uncorrected: torch.Tensor, labels: torch.Tensor, top_k: int
) -> torch.Tensor:
    """Return for each row which tokens are not candidates, (rows, V) bool.

    uncorrected: (rows, V) the logits without the correction. labels: (rows,) the true tokens.

    The candidates of a row are the `top_k` likeliest tokens of the uncorrected logits. If the label
    is not among them, it replaces the least likely candidate.
    """
    candidates = uncorrected.topk(top_k, dim=-1).indices  # (rows, top_k)
    label_missing = (candidates != labels[:, None]).all(-1)
    candidates[:, -1] = torch.where(label_missing, labels, candidates[:, -1])
    return torch.ones_like(uncorrected, dtype=torch.bool).scatter_(1, candidates, False)

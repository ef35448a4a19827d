"""The training objective: weighted divergences between drafter and target, in chunks of rows.

The formulas are in `train/divergences.py`, the comparison of one chunk in `train/comparison.py`.

Shapes: G blocks of L drafted positions, R = G * L rows (one for each drafted position), P teacher
rows (context positions), D hidden size, V vocabulary, r rank of a conditional head.

Row i compares the drafter's state `hidden[i]` with the target's state
`teacher_hidden[teacher_rows[i]]`. Each state is projected by its own head: the target's frozen
head, which DFlash shares, or a trained head of the drafter (DART).

Tensors of vocabulary size exist for one chunk of rows at a time. The gradients with respect to
`hidden` (R, D) and to a trained head (V, D) are computed in the forward pass, and only they are
saved for the backward pass. Weights that depend on how well a block was drafted (D-PACE) are known
only after the last chunk. They are then applied to the gradients of `hidden`, row by row. The
gradient of a trained head is a sum over rows, so an additional pass computes the weights first.

A conditional head adds `out @ vectors[i]` to the logits of row i (`LogitCorrection`, see
`infer/drafters/heads/base.py`). The divergence is then that of the corrected distribution, and the
gradients with respect to `out` (V, r) and `vectors` (R, r) are computed in the same pass. This
works for every conditional head and every divergence.
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

    loss: torch.Tensor  # () weighted sum of the divergences, differentiable
    divergences: torch.Tensor  # (G, L) nats, 0 where the weight is 0; detached
    # (G, L) bool: drafter and target have the same likeliest token; False where the weight is 0
    agrees: torch.Tensor
    # (G, L) sum_v min(p, q), detached; 0 unless `DivergenceInputs.needs_overlap`
    overlap: torch.Tensor | None = None


class LogitCorrection(NamedTuple):
    """What a conditional head adds to the logits: `out @ vectors[i]` in row i."""

    vectors: torch.Tensor  # (R, r)
    out: torch.Tensor  # (V, r) trained


def position_weights(config: ObjectiveConfig, num_drafted: int) -> torch.Tensor:
    """Return the weights of the drafted positions t = 1 .. L, (L,) float32, without the factor
    that depends on the drafter (`Weighting.block_factor`)."""
    steps = torch.arange(num_drafted, dtype=torch.float32)
    return POSITION_WEIGHTINGS_BY_NAME[config.position_weights].position_weights(steps, config)


@dataclass(frozen=True)
class DivergenceInputs:
    """What the drafter is compared with, and how. Nothing in it is trained."""

    teacher_hidden: torch.Tensor  # (P, D)
    teacher_rows: torch.Tensor  # (G, L) int64 index into `teacher_hidden`
    # (G, L) int64; -1, with weight 0, for a token that is not in the drafter's vocabulary
    labels: torch.Tensor
    weights: torch.Tensor  # (G, L)
    head: torch.Tensor  # (V, D) the target's
    config: ObjectiveConfig
    scale: LogitScale = IDENTITY_LOGIT_SCALE  # applied to the logits of target and drafter
    # With a correction, the distributions are limited to the `top_k` likeliest tokens of the
    # uncorrected logits, and the label. 0: all tokens.
    top_k: int = 0
    needs_overlap: bool = False
    chunk_plan: ChunkPlan | None = None  # `plan_chunks` of teacher rows and weights; None: computed

    @property
    def logits_dtype(self) -> torch.dtype:
        """The dtype of logits and probabilities."""
        if self.teacher_hidden.dtype == torch.float64:
            return torch.float64
        return torch.float32


def compute_divergence(
    hidden: torch.Tensor,
    inputs: DivergenceInputs,
    drafter_head: torch.Tensor | None = None,
    correction: LogitCorrection | None = None,
) -> BlockLoss:
    """Return the weighted sum of all rows' divergences from the target's distribution.

    hidden: (R, D) in the dtype of teacher states and head.
    drafter_head: (V, D) float32, the drafter's own head; None: it uses the target's.
    correction: of a conditional head, added to the scaled logits.

    `config.divergence` selects a row of DIVERGENCE_TABLE, `config.weights` one of
    POSITION_WEIGHTINGS_BY_NAME. `config.unary` times the divergence of the uncorrected logits is
    added. Logits and probabilities are float32, or float64 for float64 inputs. Rows of weight 0 are
    not computed.
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
    """Autograd function whose forward pass already computes all gradients."""

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
    """The differentiable inputs."""

    hidden: torch.Tensor  # (R, D)
    head: torch.Tensor  # (V, D)
    vectors: torch.Tensor | None = None  # (R, r)
    out: torch.Tensor | None = None  # (V, r)


class _Gradients(NamedTuple):
    """The gradients with respect to `_TrainedTensors`; None where none is needed."""

    hidden: torch.Tensor | None
    head: torch.Tensor | None
    vectors: torch.Tensor | None
    out: torch.Tensor | None


class _ChunkedPass:
    """One pass over all rows of positive weight, chunk by chunk.

    needs_gradient: for each field of `drafted`, whether to compute its gradient. Gradients of
        `hidden` and `vectors` are those of the unweighted divergences; gradients of the matrices
        are those of the weighted sum, which needs `row_weights` (G, L).

    Results, each (G, L): `divergences`; `label_probs`, the drafter's probability of the label;
    `agrees`; `overlap`, if `inputs.needs_overlap`.
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

        # gradients of matrices are summed over rows in the dtype of the logits
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

        # All chunks write their logits into the same buffers, because allocating fresh memory takes
        # a CPU as long as the arithmetic.
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
        """Compare the rows of one chunk with the target, and store results and gradients."""
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
            if drafted.out.dtype == student.dtype:  # in place
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

        delta: (rows, V) gradient of the divergences with respect to the logits; overwritten.
        unary_delta: (rows, V) the same for the divergences of the uncorrected logits.
        scale_slope: derivative of the logit scale.
        """
        gradients = self.gradients
        drafted = self.drafted
        dtype = self.inputs.logits_dtype
        weights = None
        if self.row_weights is not None:
            weights = self.row_weights.flatten()[rows, None].to(dtype)  # (rows, 1)

        # the correction is added to the scaled logits
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
    """Return the scaled logits (rows, V) of states (rows, D). They are written to `buffer`, unless
    the scale creates a new tensor."""
    logits = buffer[: len(states)]
    if states.dtype == head.dtype == logits.dtype:
        torch.mm(states, head.T, out=logits)
    else:  # `out=` does not accept dtypes that autocast would cast
        logits.copy_(states @ head.T)
    return scale(logits)


def _find_excluded_tokens(
    uncorrected: torch.Tensor, labels: torch.Tensor, top_k: int
) -> torch.Tensor:
    """Return which tokens are not among a row's candidates, (rows, V) bool.

    The candidates are the `top_k` likeliest tokens of the uncorrected logits (rows, V). If the
    label (rows,) is not among them, it replaces the least likely one.
    """
    candidates = uncorrected.topk(top_k, dim=-1).indices  # (rows, k)
    label_missing = (candidates != labels[:, None]).all(-1)
    candidates[:, -1] = torch.where(label_missing, labels, candidates[:, -1])
    return torch.ones_like(uncorrected, dtype=torch.bool).scatter_(1, candidates, False)

"""The training loss: a weighted sum of divergences between drafter and target. It is computed in
chunks of rows.

`train/divergences.py` has the formulas, `train/comparison.py` compares one chunk of rows.

A row is one drafted position of one block. At row i, two distributions are compared: the drafter's,
from its hidden state `hidden[i]`, and the target's, from its hidden state
`teacher_hidden[teacher_rows[i]]`. The target's hidden state is multiplied by the target's frozen
language model head. The drafter's hidden state is multiplied by the same head (DFlash), or by a
trained head of the drafter (DART).

Logits exist for one chunk of rows at a time. The forward pass already computes the gradients with
respect to `hidden` and to a trained head, and saves only these gradients for the backward pass.
D-PACE's weights of a block depend on the drafter's predictions for the whole block, so they are
known only after the last chunk. The gradient with respect to `hidden` has one vector per row and
can be multiplied by the weights afterwards. The gradient with respect to a trained head is a sum
over rows, so weights cannot be applied to it afterwards. For a trained head, an additional forward
pass therefore computes the weights first.

A conditional head adds the correction `correction_matrix @ vectors[i]` to the logits of row i (see
`LogitCorrection` and `infer/drafters/heads/base.py`). The divergence is then computed from the
corrected logits. The gradients with respect to `correction_matrix` and `vectors` are computed in
the same pass.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from infer.targets.support import IDENTITY_LOGIT_SCALE, LogitScale
from train.chunk_plan import ChunkBounds, ChunkPlan, plan_chunks
from train.comparison import compute_row_divergences_and_gradients, prepare_teacher_distributions
from train.config import ObjectiveConfig
from train.divergences import DIVERGENCE_TABLE, POSITION_WEIGHTINGS_BY_NAME


class BlockLoss(NamedTuple):
    """The training loss of a batch of blocks, and statistics of each drafted position, without
    gradient. All tensors but the loss have the shape (num_blocks, num_drafted)."""

    loss: torch.Tensor  # scalar: weighted sum of the divergences, with gradient
    # the divergence of drafter and target in nats; 0 where the position's weight is 0
    divergences: torch.Tensor
    # bool: whether drafter and target have the same likeliest token; False where the weight is 0
    agrees: torch.Tensor
    # the sum of min(p, q) over the vocabulary, for the target's distribution p and the drafter's q;
    # 0 if `DivergenceInputs.needs_overlap` is False
    overlap: torch.Tensor | None = None


class LogitCorrection(NamedTuple):
    """The low-rank correction of the logits by a conditional head: `correction_matrix @ vectors[i]`
    is added to the logits of row (drafted position) i."""

    vectors: torch.Tensor  # (num_rows, rank) one vector per drafted position
    correction_matrix: torch.Tensor  # (vocab_size, rank) weight matrix of the conditional head


def position_weights(config: ObjectiveConfig, num_drafted: int) -> torch.Tensor:
    """Return the weights that the drafted positions of a block have in the training loss,
    (num_drafted,) float32.

    With position_weights=dpace, this function returns only ones. D-PACE's real weights depend on
    the drafter's predictions and are computed later (`PositionWeighting.drafter_dependent_factor`).
    """
    steps = torch.arange(num_drafted, dtype=torch.float32)
    return POSITION_WEIGHTINGS_BY_NAME[config.position_weights].position_weights(steps, config)


@dataclass(frozen=True)
class DivergenceInputs:
    """The inputs of the training loss that are not trained: the target's hidden states and head,
    the labels and weights, and options."""

    teacher_hidden: torch.Tensor  # (num_context_positions, hidden_size) the target's hidden states
    # (num_blocks, num_drafted) int64: for each drafted position, the index in `teacher_hidden` of
    # the hidden state to compare with
    teacher_rows: torch.Tensor
    # (num_blocks, num_drafted) int64 true tokens. A token that is not in the drafter's vocabulary
    # is -1 and must have the weight 0.
    labels: torch.Tensor
    # (num_blocks, num_drafted) weights of the drafted positions: the result of `position_weights`,
    # and 0 at positions without loss
    weights: torch.Tensor
    target_head: (
        torch.Tensor
    )  # (vocab_size, hidden_size) weight of the target's language model head
    config: ObjectiveConfig
    logit_scale: LogitScale = IDENTITY_LOGIT_SCALE  # applied to the logits of target and drafter
    # With a conditional head, target and drafter are compared only on the `top_k` likeliest tokens
    # of the drafter's logits before the head's correction, and on the true token. 0 means no limit.
    top_k: int = 0
    needs_overlap: bool = False  # whether to compute `BlockLoss.overlap`
    # the result of `plan_chunks` for `teacher_rows` and `weights`; if None,
    # `compute_divergence_loss` calls `plan_chunks`
    chunk_plan: ChunkPlan | None = None

    @property
    def logits_dtype(self) -> torch.dtype:
        """The dtype in which logits and probabilities are computed: float64 for float64 hidden
        states, otherwise float32."""
        if self.teacher_hidden.dtype == torch.float64:
            return torch.float64
        return torch.float32


def compute_divergence_loss(
    hidden: torch.Tensor,
    inputs: DivergenceInputs,
    drafter_head: torch.Tensor | None = None,
    correction: LogitCorrection | None = None,
) -> BlockLoss:
    """Return the training loss: the weighted sum of the divergences between target and drafter at
    all drafted positions.

    hidden: (num_blocks * num_drafted, hidden_size) the drafter's hidden states, in the dtype of
        `inputs.teacher_hidden` and `inputs.target_head`.
    drafter_head: (vocab_size, hidden_size) float32, weight of the drafter's own language model
        head. None means that the drafter uses the target's head.
    correction: what a conditional head adds to the drafter's logits, after `inputs.logit_scale` is
        applied. None without such a head.

    `inputs.config` selects the divergence and the position weights. If `marginal_weight` is not 0,
    a second divergence is added to the loss with this weight: that of the logits before the
    correction. Logits are float32, or float64 for float64 inputs. Nothing is computed for drafted
    positions of weight 0.
    """
    chunk_plan = inputs.chunk_plan
    if chunk_plan is None:
        chunk_plan = plan_chunks(inputs.teacher_rows, inputs.weights, inputs.config.chunk_rows)
    inputs = replace(inputs, labels=inputs.labels.flatten(), chunk_plan=chunk_plan)
    if drafter_head is None:
        drafter_head = inputs.target_head
    vectors = out = None
    if correction is not None:
        vectors, out = correction
    return BlockLoss(*_DivergenceFunction.apply(hidden, drafter_head, vectors, out, inputs))


class _DivergenceFunction(torch.autograd.Function):
    """The autograd function of the training loss. Its forward pass also computes all gradients; the
    backward pass only multiplies them by the gradient of the loss."""

    @staticmethod
    def forward(ctx, hidden, drafter_head, vectors, out, inputs: DivergenceInputs):
        needs_gradient = ctx.needs_input_grad[:4]
        needs_matrix_gradient = needs_gradient[1] or needs_gradient[3]
        weights = inputs.weights
        block_factor = POSITION_WEIGHTINGS_BY_NAME[
            inputs.config.position_weights
        ].drafter_dependent_factor

        # argument and result: (num_blocks, num_drafted)
        def compute_row_weights(label_probs: torch.Tensor) -> torch.Tensor:
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
            row_weights = compute_row_weights(_ChunkedDivergence(drafted, inputs).label_probs)

        chunked = _ChunkedDivergence(drafted, inputs, needs_gradient, row_weights)
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
    """The inputs of the training loss for which gradients can be computed."""

    hidden: torch.Tensor  # (num_rows, hidden_size) the drafter's hidden states
    # (vocab_size, hidden_size) weight of the drafter's language model head
    head: torch.Tensor
    vectors: torch.Tensor | None = None  # (num_rows, rank) LogitCorrection.vectors
    out: torch.Tensor | None = None  # (vocab_size, rank) LogitCorrection.correction_matrix


class _Gradients(NamedTuple):
    """The gradients of the loss with respect to the fields of `_TrainedTensors`; None where not
    needed."""

    hidden: torch.Tensor | None
    head: torch.Tensor | None
    vectors: torch.Tensor | None
    out: torch.Tensor | None


class _ChunkedDivergence:
    """Compares drafter and target at all rows (drafted positions) of positive weight, chunk by
    chunk, and computes gradients. The constructor does the whole computation.

    drafted: the drafter's tensors, see `_TrainedTensors`.
    needs_gradient: for each field of `drafted`, whether to compute its gradient. For `hidden` and
        `vectors`, these are gradients of the unweighted divergences. For `head` and `out`, these
        are gradients of the sum of the divergences, weighted by `row_weights`.
    row_weights: (num_blocks, num_drafted), needed for the gradients of `head` and `out`.

    The results are the attributes `gradients`, `divergences`, `agrees`, `overlap` (as in
    `BlockLoss`) and `label_probs` (the drafter's probability of each true token).
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

        # The gradients of `head` and `out` are sums over many rows and are computed in the dtype of
        # the logits. The other gradients have the dtype of their tensor.
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
        device = inputs.target_head.device
        vocabulary = len(inputs.target_head)
        self.student_buffer = torch.empty(max_rows, vocabulary, dtype=dtype, device=device)
        self.teacher_buffer = torch.empty(max_teacher_rows, vocabulary, dtype=dtype, device=device)
        for bounds in self.plan.chunks:
            self.add_chunk(bounds)

    def add_chunk(self, bounds: ChunkBounds) -> None:
        """Compare drafter and target at the rows (drafted positions) of one chunk, and store the
        results and gradients in the attributes of this object."""
        inputs = self.inputs
        drafted = self.drafted
        unary = inputs.config.marginal_weight
        rows = self.plan.rows[bounds.row_start : bounds.row_end]
        teacher_indices = self.plan.teacher_indices[bounds.row_start : bounds.row_end]
        teacher_indices = teacher_indices - bounds.teacher_start
        labels = inputs.labels[rows]
        excluded = unary_delta = None

        student = _compute_logits(
            drafted.hidden[rows], drafted.head, inputs.logit_scale, self.student_buffer
        )  # (num_rows, vocab_size)
        scale_slope = inputs.logit_scale.derivative(student)
        teacher_rows = self.plan.teacher_rows[bounds.teacher_start : bounds.teacher_end]
        teacher_logits = _compute_logits(
            inputs.teacher_hidden[teacher_rows],
            inputs.target_head,
            inputs.logit_scale,
            self.teacher_buffer,
        )
        teacher = prepare_teacher_distributions(
            teacher_logits, self.divergence, inputs.needs_overlap
        )

        if drafted.vectors is not None:
            assert drafted.out is not None
            if inputs.top_k:
                excluded = _find_excluded_tokens(student, labels, inputs.top_k)
            if unary:
                unary_delta = student.clone()
                uncorrected = compute_row_divergences_and_gradients(
                    self.divergence, teacher, teacher_indices, unary_delta, labels, None, False
                )
                self.divergences.view(-1)[rows] = unary * uncorrected.divergences
                unary_delta *= unary
            vectors = drafted.vectors[rows].to(drafted.out.dtype)  # (num_rows, rank)
            if drafted.out.dtype == student.dtype:  # add in place, without a temporary tensor
                student.addmm_(vectors, drafted.out.T)
            else:
                student.add_((vectors @ drafted.out.T).to(student.dtype))

        comparison = compute_row_divergences_and_gradients(
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
        logit_gradient: torch.Tensor,
        marginal_logit_gradient: torch.Tensor | None,
        logit_scale_derivative: torch.Tensor | float | None,
    ) -> None:
        """Add the contribution of a chunk's rows (drafted positions) to the gradients.

        rows: (num_rows,) int64 indices of the chunk's rows.
        logit_gradient: (num_rows, vocab_size) gradient of the divergences between drafter and
            target with respect to the logits after the conditional head's correction. This method
            overwrites the tensor.
        marginal_logit_gradient: (num_rows, vocab_size) gradient of the loss term that the option
            marginal_weight adds, with respect to the logits before the conditional head's
            correction. None if this term is not used.
        logit_scale_derivative: derivative of the logits after `inputs.logit_scale` with respect to
            the logits before it. None if the derivative is 1.
        """
        gradients = self.gradients
        drafted = self.drafted
        dtype = self.inputs.logits_dtype
        weights = None
        if self.row_weights is not None:
            weights = self.row_weights.flatten()[rows, None].to(dtype)  # (num_rows, 1)

        # The conditional head's correction is added after the scaling of the logits. The gradients
        # of `vectors` and `out` therefore do not contain `logit_scale_derivative`.
        if gradients.vectors is not None:
            assert drafted.out is not None
            vector_gradient = logit_gradient.to(drafted.out.dtype) @ drafted.out
            gradients.vectors[rows] = vector_gradient.to(gradients.vectors.dtype)
        if gradients.out is not None:
            assert drafted.vectors is not None
            assert weights is not None
            gradients.out.addmm_(logit_gradient.T, drafted.vectors[rows].to(dtype) * weights)

        # The next lines turn `logit_gradient` into the gradient with respect to the unscaled
        # logits.
        if marginal_logit_gradient is not None:
            logit_gradient.add_(marginal_logit_gradient)
        if logit_scale_derivative is not None:
            logit_gradient.mul_(logit_scale_derivative)
        if gradients.hidden is not None:
            gradients.hidden[rows] = logit_gradient.to(self.inputs.target_head.dtype) @ drafted.head
        if gradients.head is not None:
            assert weights is not None
            gradients.head.addmm_(logit_gradient.T, drafted.hidden[rows].to(dtype) * weights)


def _compute_logits(
    states: torch.Tensor, head: torch.Tensor, scale: LogitScale, buffer: torch.Tensor
) -> torch.Tensor:
    """Return the logits (num_rows, vocab_size) of hidden states (num_rows, hidden_size), after
    scaling and soft-capping by `scale`.

    head: (vocab_size, hidden_size) weight of the language model head. buffer: memory for the
    logits; the result uses it unless `scale` creates a new tensor.
    """
    logits = buffer[: len(states)]
    if states.dtype == head.dtype == logits.dtype:
        torch.mm(states, head.T, out=logits)
    else:  # torch.mm does not accept `out=` if autocast has to cast the inputs
        logits.copy_(states @ head.T)
    return scale(logits)


def _find_excluded_tokens(
    uncorrected: torch.Tensor, labels: torch.Tensor, top_k: int
) -> torch.Tensor:
    """Return which tokens are excluded from the divergence between target and drafter, because they
    are not among the `top_k` candidates. The result has the shape (num_rows, vocab_size) bool.

    uncorrected: (num_rows, vocab_size) the drafter's logits before the conditional head's
    correction. labels: (num_rows,) the true tokens.

    The candidates of a row are the `top_k` tokens with the largest uncorrected logits. If the true
    token is not among these tokens, it replaces the last of them.
    """
    candidates = uncorrected.topk(top_k, dim=-1).indices  # (num_rows, top_k)
    label_missing = (candidates != labels[:, None]).all(-1)
    candidates[:, -1] = torch.where(label_missing, labels, candidates[:, -1])
    return torch.ones_like(uncorrected, dtype=torch.bool).scatter_(1, candidates, False)

"""The objective: how far the drafter's marginals are from the target, in chunks of rows.

R supervised rows (block positions), P teacher rows (context positions), D hidden size, V vocabulary.

Row r compares the drafter's state `hidden[r]` with the target's state `teacher_hidden[teacher_rows[r]]` through the one
frozen head that both share. Vocabulary-sized tensors exist for one chunk of rows at a time: the gradient with respect
to `hidden` is formed in the same pass, and (R, D) is all that is kept for backward.
"""

from dataclasses import dataclass

import torch

from train.config import ObjectiveConfig


@dataclass(frozen=True)
class RowLoss:
    """What a batch of rows costs."""

    loss: torch.Tensor  # () sum of weight * divergence, differentiable with respect to hidden
    rows: torch.Tensor  # (R,) divergence of every row in nats, 0 where the weight is; detached
    agree: torch.Tensor  # (R,) bool: drafter and target choose the same token; False where the weight is 0


def position_weights(config: ObjectiveConfig, length: int) -> torch.Tensor:
    """Weights of the L drafted positions t = 1 .. L, (L,) float32.

    "gamma": gamma^(t-1) (DART section 3.3); "exponential": exp(-(t-1) / gamma) (the DFlash recipe).
    """
    steps = torch.arange(length, dtype=torch.float32)
    return config.gamma**steps if config.weights == "gamma" else torch.exp(-steps / config.gamma)


def divergence(
    hidden: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_rows: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    head: torch.Tensor,
    config: ObjectiveConfig,
) -> RowLoss:
    """Weighted sum of the rows' divergences to the target's distribution along the true continuation.

    hidden (R, D), teacher_hidden (P, D), head (V, D) in one dtype; teacher_rows, labels (R,) int64; weights (R,).
    "kl" is KL(target || drafter) (DART section 3.3), "cross_entropy" -log q(label). The arithmetic on logits is
    float32 (float64 for float64 inputs). Rows of weight 0 are dropped before the projection (one synchronisation).
    """
    kept = weights.nonzero()[:, 0]
    kept = kept[teacher_rows[kept].argsort(stable=True)]  # rows that share a teacher row become neighbours
    return RowLoss(*_Divergence.apply(hidden, teacher_hidden, teacher_rows, labels, weights, head, kept, config))


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, teacher_hidden, teacher_rows, labels, weights, head, kept, config):
        kind = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        rows = torch.zeros(len(hidden), dtype=kind, device=hidden.device)
        agree = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
        gradient = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        for chunk in kept.split(config.chunk_rows):
            shared, which = teacher_rows[chunk].unique_consecutive(return_inverse=True)
            teacher = (teacher_hidden[shared] @ head.T).to(kind)  # (chunk's distinct teacher rows, V)
            student = (hidden[chunk] @ head.T).to(kind)  # (chunk, V)
            agree[chunk] = student.argmax(-1) == teacher.argmax(-1)[which]
            student -= student.logsumexp(-1, keepdim=True)  # log q
            weight = weights[chunk].to(kind)
            label = labels[chunk][:, None]
            if config.divergence == "cross_entropy":
                rows[chunk] = -student.gather(1, label)[:, 0]
                delta = student.exp_()  # q - onehot(label), the gradient with respect to the logits
                delta.scatter_add_(1, label, torch.full_like(label, -1, dtype=kind))
            else:
                teacher -= teacher.logsumexp(-1, keepdim=True)  # log p
                log_p = teacher[which]
                p = log_p.exp()
                rows[chunk] = log_p.sub_(student).mul_(p).sum(-1)
                del log_p
                delta = student.exp_().sub_(p)  # q - p
                del p
            if gradient is not None:
                gradient[chunk] = delta.mul_(weight[:, None]).to(head.dtype) @ head
            del teacher, student, delta
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(rows, agree)
        return (rows * weights).sum(), rows, agree

    @staticmethod
    def backward(ctx, upstream, *_):
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), *[None] * 7

"""Compute the divergences between target and drafter at one chunk of drafted positions, and the
gradients of the divergences.

A row is one drafted position. A row's teacher row is the context position whose hidden state gives
the target's distribution for the row. Several rows can have the same teacher row. p is the target's
distribution, q the drafter's.
"""

from typing import NamedTuple

import torch

from train.divergences import SMALLEST_NORMAL_FLOAT32, Divergence, DivergenceChunk

# number of logits that are processed together on a CPU; they fit into the CPU's caches
LOGITS_PER_CPU_LOSS_SLICE = 1 << 18
# Replaces the logits of tokens that are excluded from the divergence. After softmax, the
# probability of these tokens is rounded to 0, and their log-probability is finite.
LOGIT_OF_NON_CANDIDATE_TOKENS = -1e4


class TeacherChunk(NamedTuple):
    """The target's next-token distributions for one chunk of drafted positions. Drafted positions
    with the same target context share one distribution."""

    # (num_distributions, vocab_size) probabilities p, or logits if no probabilities are needed
    scores: torch.Tensor
    # (num_distributions,) sum of p log p over the vocabulary; None if `scores` are logits
    negative_entropy: torch.Tensor | None
    likeliest_tokens: torch.Tensor  # (num_distributions,) token ids


def prepare_teacher_distributions(
    logits: torch.Tensor, divergence: Divergence, needs_overlap: bool
) -> TeacherChunk:
    """Return the target's distributions in the form that `compute_row_divergences_and_gradients`
    needs for `divergence`: as probabilities, or as the logits themselves.

    logits: (num_distributions, vocab_size) the target's logits. This function overwrites the
    tensor. needs_overlap: whether `compute_row_divergences_and_gradients` will also compute the
    overlap sum_v min(p, q) of target and drafter.
    """
    likeliest_tokens = logits.argmax(-1)
    reads_probabilities = needs_overlap or not divergence.labels_only
    if divergence.value_and_gradient is None or not reads_probabilities:
        return TeacherChunk(logits, None, likeliest_tokens)
    slices = logits.split(_count_slice_rows(logits))
    negative_entropy = torch.cat([_softmax_in_place_with_negative_entropy(rows) for rows in slices])
    return TeacherChunk(logits, negative_entropy, likeliest_tokens)


def _softmax_in_place_with_negative_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Replace logits (num_rows, vocab_size) by probabilities p in place. Return the sum of p log p
    over the vocabulary, (num_rows,)."""
    logits -= logits.amax(-1, keepdim=True)
    p = logits.softmax(-1)
    # The largest logit is 0 now. Therefore log p = logit + log(largest p).
    negative_entropy = torch.linalg.vecdot(p, logits) + p.amax(-1).log()
    logits.copy_(p)
    return negative_entropy


def _count_slice_rows(logits: torch.Tensor) -> int:
    """Return how many rows of `logits` (num_rows, vocab_size) are processed at a time.

    On a CPU, this is the number of rows that fit into the caches. Each row is then read from main
    memory once and written to main memory once. On other devices, all rows are processed at once.
    """
    if logits.device.type == "cpu":
        return max(1, LOGITS_PER_CPU_LOSS_SLICE // logits.shape[1])
    return max(1, len(logits))


class RowComparison(NamedTuple):
    """The divergences between target and drafter at some drafted positions, and further statistics
    of these positions. Each tensor has one entry per position."""

    divergences: torch.Tensor  # in nats
    agrees: torch.Tensor  # bool: whether drafter and target have the same likeliest token
    label_log_probs: torch.Tensor  # the drafter's log-probability of the true token
    # The sum of min(p, q) over the vocabulary, for the target's distribution p and the drafter's q.
    # None if it was not computed.
    overlap: torch.Tensor | None


def compute_row_divergences_and_gradients(
    divergence: Divergence,
    teacher: TeacherChunk,
    teacher_indices: torch.Tensor,
    student_logits: torch.Tensor,
    labels: torch.Tensor,
    excluded: torch.Tensor | None,
    needs_overlap: bool,
) -> RowComparison:
    """Compare the drafter's distributions with the target's at the rows (drafted positions) of a
    chunk.

    teacher: the result of `prepare_teacher_distributions`.
    teacher_indices: (num_rows,) for each row, the index of the target's distribution in `teacher`.
    student_logits: (num_rows, vocab_size) the drafter's logits. They are overwritten by the
        gradients of the divergences with respect to the logits.
    labels: (num_rows,) the true tokens.
    excluded: (num_rows, vocab_size) bool, tokens that get the probability 0 in both distributions.
        None excludes no token.
    needs_overlap: whether to compute the overlap of the two distributions.
    """
    slice_rows = _count_slice_rows(student_logits)
    comparisons = []
    for start in range(0, len(student_logits), slice_rows):
        rows = slice(start, start + slice_rows)
        comparison = _compute_slice_divergences_and_gradients(
            divergence,
            teacher,
            teacher_indices[rows],
            student_logits[rows],
            labels[rows],
            None if excluded is None else excluded[rows],
            needs_overlap,
        )
        comparisons.append(comparison)
    fields = zip(*comparisons, strict=True)
    return RowComparison._make(None if field[0] is None else torch.cat(field) for field in fields)


def _compute_slice_divergences_and_gradients(
    divergence: Divergence,
    teacher: TeacherChunk,
    teacher_indices: torch.Tensor,
    student: torch.Tensor,
    labels: torch.Tensor,
    excluded: torch.Tensor | None,
    needs_overlap: bool,
) -> RowComparison:
    """Do the same as `compute_row_divergences_and_gradients` for a slice of its rows. The arguments
    contain only these rows."""
    if excluded is not None:
        student.masked_fill_(excluded, LOGIT_OF_NON_CANDIDATE_TOKENS)
    max_logits = student.amax(-1, keepdim=True)
    target_tokens = teacher.likeliest_tokens[teacher_indices, None]
    agrees = student.gather(1, target_tokens) == max_logits
    if divergence.value_and_gradient is None:
        teacher_logits = teacher.scores.index_select(0, teacher_indices)
        return _differentiate_by_autograd(
            divergence, teacher_logits, student, labels, excluded, needs_overlap, agrees[:, 0]
        )

    p = negative_entropy = None
    if teacher.negative_entropy is not None:
        p = teacher.scores.index_select(0, teacher_indices)
        negative_entropy = teacher.negative_entropy[teacher_indices]
        if excluded is not None:
            p.masked_fill_(excluded, 0)
            p /= p.sum(-1, keepdim=True).clamp_(min=SMALLEST_NORMAL_FLOAT32)
            negative_entropy = torch.special.xlogy(p, p).sum(-1)

    student -= max_logits
    expected_logit = None
    if divergence.needs_expected_log_q:
        assert p is not None
        expected_logit = torch.linalg.vecdot(p, student)
    label_logits = student.gather(1, labels[:, None])[:, 0]
    q = torch.softmax(student, -1, out=student)
    # The largest logit is 0 now. Therefore log q = logit + log(largest q).
    log_max_q = q.amax(-1).log()
    label_log_probs = label_logits + log_max_q
    expected_log_q = None if expected_logit is None else expected_logit + log_max_q
    overlap = None
    if needs_overlap:
        assert p is not None
        overlap = p.minimum(q).sum(-1)

    chunk = DivergenceChunk(p, q, negative_entropy, expected_log_q, label_log_probs, labels)
    divergences, delta = divergence.value_and_gradient(chunk)
    if delta.data_ptr() != student.data_ptr():
        student.copy_(delta)
    return RowComparison(divergences, agrees[:, 0], label_log_probs, overlap)


def _differentiate_by_autograd(
    divergence: Divergence,
    teacher_logits: torch.Tensor,
    student: torch.Tensor,
    labels: torch.Tensor,
    excluded: torch.Tensor | None,
    needs_overlap: bool,
    agrees: torch.Tensor,
) -> RowComparison:
    """Compute the divergences by the formula of `divergence`, and their gradients by autograd.

    teacher_logits: (num_rows, vocab_size) the target's logits. This function overwrites the tensor.
    agrees: (num_rows,) bool, whether drafter and target have the same likeliest token. The function
        returns this tensor as a field of the result.

    The other arguments and the result are those of `compute_row_divergences_and_gradients`.
    """
    if excluded is not None:
        teacher_logits.masked_fill_(excluded, LOGIT_OF_NON_CANDIDATE_TOKENS)
    log_p = teacher_logits.log_softmax(-1)
    trained_logits = student.detach().clone()
    with torch.enable_grad():
        log_q = trained_logits.requires_grad_().log_softmax(-1)
        divergences = divergence.formula(log_p, log_q, labels)
        (delta,) = torch.autograd.grad(divergences.sum(), trained_logits)
    student.copy_(delta)
    log_q = log_q.detach()
    overlap = None
    if needs_overlap:
        overlap = log_p.exp().minimum(log_q.exp()).sum(-1)
    label_log_probs = log_q.gather(1, labels[:, None])[:, 0]
    return RowComparison(divergences.detach(), agrees, label_log_probs, overlap)

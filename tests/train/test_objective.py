"""The chunked objective gives the loss and the gradients of a dense computation."""

import math
from dataclasses import replace

import pytest
import torch

from infer.targets.support import LogitScale
from train.config import ObjectiveConfig
from train.divergences import DIVERGENCE_TABLE
from train.objective import (
    BlockLoss,
    DivergenceInputs,
    LogitCorrection,
    _compute_logits,
    compute_divergence_loss,
    position_weights,
)

NUM_BLOCKS = 8  # G
NUM_DRAFTED = 3  # L
NUM_TEACHER_ROWS = 9  # P
HIDDEN_SIZE = 6  # D
VOCABULARY_SIZE = 31  # V
NUM_ROWS = NUM_BLOCKS * NUM_DRAFTED  # R


def make_case(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Return random inputs of the objective; about a third of the weights are 0."""
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_BLOCKS, NUM_DRAFTED)

    def random_matrix(rows: int) -> torch.Tensor:
        matrix = torch.randn(rows, HIDDEN_SIZE, generator=generator, dtype=torch.float64)
        return matrix.to(dtype)

    weights = torch.rand(*shape, generator=generator, dtype=torch.float32)
    weights[torch.rand(*shape, generator=generator) < 0.3] = 0
    return {
        "hidden": random_matrix(NUM_ROWS).requires_grad_(),
        "teacher_hidden": random_matrix(NUM_TEACHER_ROWS),
        "teacher_rows": torch.randint(NUM_TEACHER_ROWS, shape, generator=generator),
        "labels": torch.randint(VOCABULARY_SIZE, shape, generator=generator),
        "weights": weights,
        "target_head": random_matrix(VOCABULARY_SIZE),
    }


def compute_chunked(hidden, drafter_head=None, correction=None, **inputs) -> BlockLoss:
    return compute_divergence_loss(hidden, DivergenceInputs(**inputs), drafter_head, correction)


def compute_dense(
    hidden, teacher_hidden, teacher_rows, labels, weights, target_head, divergence: str
):
    """Return loss, divergences and agreement from all logits at once."""
    shape = (NUM_BLOCKS, NUM_DRAFTED, VOCABULARY_SIZE)
    log_q = (hidden @ target_head.T).log_softmax(-1).view(shape)
    log_p = (teacher_hidden @ target_head.T).log_softmax(-1)[teacher_rows]
    agrees = log_q.argmax(-1) == log_p.argmax(-1)
    divergences = DIVERGENCE_TABLE[divergence].formula(log_p, log_q, labels)
    return (divergences * weights).sum(), divergences, agrees


def test_every_formula_matches_its_definition():
    """In plain Python, token by token."""
    p = [0.5, 0.3, 0.2]
    q = [0.1, 0.6, 0.3]
    label = 1
    kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    overlap = 0.1 + 0.3 + 0.2
    kl_share = math.exp(-3 * overlap)
    expected = {
        "kl": kl,
        "cross_entropy": -math.log(0.6),
        "tv": 1 - overlap,
        "acceptance": -math.log(overlap),
        "lk": kl_share * kl + (1 - kl_share) * (1 - overlap),
        "ce_l1": -0.1 * math.log(0.6) + 0.9 * (0.4 + 0.3 + 0.1),
    }
    log_p = torch.tensor(p, dtype=torch.float64).log()
    log_q = torch.tensor(q, dtype=torch.float64).log()
    actual = {
        name: DIVERGENCE_TABLE[name].formula(log_p, log_q, torch.tensor(label)).item()
        for name in expected
    }
    assert actual == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "divergence", [name for name, row in DIVERGENCE_TABLE.items() if row.value_and_gradient]
)
@pytest.mark.parametrize("has_drafter_head", [False, True])
def test_hand_derived_gradients_equal_those_of_autograd(divergence, has_drafter_head, monkeypatch):
    case = make_case(9)
    inputs = [case["hidden"]]
    drafter_head = None
    if has_drafter_head:
        drafter_head = (case["target_head"] + 0.1).requires_grad_()
        inputs.append(drafter_head)
    config = ObjectiveConfig(divergence=divergence, chunk_rows=5)
    row = DIVERGENCE_TABLE[divergence]
    results = []
    for tested_row in (row, replace(row, value_and_gradient=None)):
        monkeypatch.setitem(DIVERGENCE_TABLE, divergence, tested_row)
        result = compute_chunked(**case, config=config, drafter_head=drafter_head)
        gradients = torch.autograd.grad(result.loss, inputs)
        values = [result.loss.detach(), result.divergences, result.agrees.double()]
        results.append([*values, *gradients])
    for by_hand, by_autograd in zip(*results, strict=True):
        assert torch.allclose(by_hand, by_autograd, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("divergence", DIVERGENCE_TABLE)
@pytest.mark.parametrize("chunk_rows", [1, 4, 24, 100])
def test_equals_the_dense_objective(divergence, chunk_rows):
    case = make_case()
    expected_loss, expected_divergences, expected_agrees = compute_dense(
        **case, divergence=divergence
    )
    (expected_loss * 1.7).backward()
    expected_gradient = case["hidden"].grad.clone()
    case["hidden"].grad = None

    config = ObjectiveConfig(divergence=divergence, chunk_rows=chunk_rows)
    result = compute_chunked(**case, config=config)
    (result.loss * 1.7).backward()
    gradient = case["hidden"].grad
    has_weight = case["weights"] > 0
    assert 0 < has_weight.sum() < NUM_ROWS
    assert result.divergences.shape == result.agrees.shape == (NUM_BLOCKS, NUM_DRAFTED)
    # weights are float32
    assert result.loss.item() == pytest.approx(expected_loss.item(), rel=1e-7)
    assert torch.allclose(gradient, expected_gradient, rtol=1e-10, atol=1e-12)
    assert torch.allclose(
        result.divergences[has_weight], expected_divergences[has_weight], rtol=1e-10
    )
    assert torch.equal(result.agrees[has_weight], expected_agrees[has_weight])
    assert not result.divergences[~has_weight].any()
    assert not result.agrees[~has_weight].any()
    assert not gradient.view(NUM_BLOCKS, NUM_DRAFTED, HIDDEN_SIZE)[~has_weight].any()


@pytest.mark.parametrize("has_drafter_head", [False, True])
def test_dpace_weights_a_position_by_all_later_positions(has_drafter_head):
    """The weights are constant in the gradient, and known only for a complete block."""
    case = make_case(5)
    case["weights"] = (case["weights"] > 0).float()
    inputs = [case["hidden"]]
    drafter_head = None
    if has_drafter_head:
        drafter_head = case["target_head"].flip(0).requires_grad_()
        inputs.append(drafter_head)
    head = case["target_head"] if drafter_head is None else drafter_head
    shape = (NUM_BLOCKS, NUM_DRAFTED, VOCABULARY_SIZE)
    log_q = (case["hidden"] @ head.T).log_softmax(-1).view(shape)
    log_p = (case["teacher_hidden"] @ case["target_head"].T).log_softmax(-1)[case["teacher_rows"]]
    label_probs = log_q.exp().gather(-1, case["labels"][..., None])[..., 0]
    divergences = (log_p.exp() * (log_p - log_q)).sum(-1)

    expected_loss = 0
    for block in range(NUM_BLOCKS):
        positions = [t for t in range(NUM_DRAFTED) if case["weights"][block, t]]
        smoothed = [0.5 * label_probs[block, t].item() + 0.5 for t in positions]
        for k, position in enumerate(positions):
            weight = sum(math.prod(smoothed[: j + 1]) for j in range(k, len(positions)))
            expected_loss = expected_loss + weight * divergences[block, position]
    config = ObjectiveConfig(position_weights="dpace", chunk_rows=7)
    result = compute_chunked(**case, config=config, drafter_head=drafter_head)
    assert result.loss.item() == pytest.approx(expected_loss.item(), rel=1e-12)
    gradients = torch.autograd.grad(result.loss, inputs)
    expected_gradients = torch.autograd.grad(expected_loss, inputs)
    for actual, expected in zip(gradients, expected_gradients, strict=True):
        assert torch.allclose(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "scale", [LogitScale(cap=1.5), LogitScale(divisor=4.0), LogitScale(0.5, 3.0)]
)
@pytest.mark.parametrize("divergence", ["kl", "cross_entropy", "tv", "acceptance"])
def test_scaled_logits_of_both_models_and_their_gradients(divergence, scale):
    """With the target's head and a head of the drafter."""
    case = make_case(8)
    case["weights"] = case["weights"].double()
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(VOCABULARY_SIZE, HIDDEN_SIZE, dtype=torch.float64, generator=generator)
    drafter_head = (case["target_head"] + 0.5 * noise).requires_grad_()
    shape = (NUM_BLOCKS, NUM_DRAFTED, VOCABULARY_SIZE)
    log_q = scale(case["hidden"] @ drafter_head.T).log_softmax(-1).view(shape)
    teacher_logits = scale(case["teacher_hidden"] @ case["target_head"].T)
    log_p = teacher_logits.log_softmax(-1)[case["teacher_rows"]]
    divergences = DIVERGENCE_TABLE[divergence].formula(log_p, log_q, case["labels"])
    expected_loss = (divergences * case["weights"]).sum()
    inputs = [case["hidden"], drafter_head]
    expected_gradients = torch.autograd.grad(expected_loss, inputs)

    config = ObjectiveConfig(chunk_rows=5, divergence=divergence)
    result = compute_chunked(**case, config=config, drafter_head=drafter_head, logit_scale=scale)
    assert result.loss.item() == pytest.approx(expected_loss.item(), rel=1e-10)
    gradients = torch.autograd.grad(result.loss, inputs)
    for actual, expected in zip(gradients, expected_gradients, strict=True):
        assert torch.allclose(actual, expected, rtol=1e-9, atol=1e-12)


def test_the_loss_is_zero_without_supervised_positions():
    case = make_case()
    case["weights"] = torch.zeros(NUM_BLOCKS, NUM_DRAFTED)
    result = compute_chunked(**case, config=ObjectiveConfig())
    result.loss.backward()
    assert result.loss.item() == 0
    assert not case["hidden"].grad.any()
    empty = {}
    for name, tensor in case.items():
        empty[name] = tensor[:0] if len(tensor) in (NUM_BLOCKS, NUM_ROWS) else tensor
    assert compute_chunked(**empty, config=ObjectiveConfig()).loss.item() == 0


def test_bfloat16_is_close_to_float64():
    config = ObjectiveConfig(chunk_rows=6)
    bfloat16_result = compute_chunked(**make_case(2, torch.bfloat16), config=config)
    float64_result = compute_chunked(**make_case(2), config=config)
    assert bfloat16_result.divergences.dtype == torch.float32
    assert bfloat16_result.loss.item() == pytest.approx(float64_result.loss.item(), rel=0.05)


def test_shared_teacher_rows_are_projected_once(monkeypatch):
    """All rows share two teacher rows: with one chunk, two teacher rows are projected."""
    case = make_case(3)
    case["weights"] = torch.ones(NUM_BLOCKS, NUM_DRAFTED)
    case["teacher_rows"] = torch.arange(NUM_ROWS).view(NUM_BLOCKS, NUM_DRAFTED) % 2 * 5
    projected_rows = []
    original_mm = torch.mm

    def count_rows(a, b, **options):
        projected_rows.append(len(a))
        return original_mm(a, b, **options)

    monkeypatch.setattr(torch, "mm", count_rows)
    compute_chunked(**case, config=ObjectiveConfig(chunk_rows=100))
    assert sorted(projected_rows) == [2, NUM_ROWS]


def test_position_weights():
    gamma = position_weights(ObjectiveConfig(gamma=0.6), 3)
    exponential = position_weights(ObjectiveConfig(position_weights="exponential", gamma=4.0), 3)
    dpace = position_weights(ObjectiveConfig(position_weights="dpace"), 3)
    assert torch.allclose(gamma, torch.tensor([1, 0.6, 0.36]))
    assert torch.allclose(exponential, torch.exp(torch.tensor([0, -0.25, -0.5])))
    assert dpace.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"divergence": "l2"}, "l2"),
        ({"position_weights": "linear"}, "linear"),
        ({"gamma": 0.0}, "gamma=0.0"),
        ({"gamma": 1.5}, "gamma=1.5"),
        ({"chunk_rows": 0}, "chunk_rows=0"),
    ],
)
def test_invalid_objectives_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ObjectiveConfig(**options).check()


@pytest.mark.parametrize("top_k", [0, 7])
@pytest.mark.parametrize("unary", [0.0, 0.6])
@pytest.mark.parametrize("divergence", DIVERGENCE_TABLE)
def test_a_conditional_head_gets_the_gradients_of_its_distribution(divergence, unary, top_k):
    """For its vectors, its matrix, the states, and the drafter's head; over all tokens, or over a
    row's candidates and the label, with the target's distribution over the same tokens."""
    case = make_case(10)
    case["weights"] = case["weights"].double()
    generator = torch.Generator().manual_seed(12)
    rank = 5
    vectors = torch.randn(NUM_ROWS, rank, generator=generator, dtype=torch.float64)
    out = torch.randn(VOCABULARY_SIZE, rank, generator=generator, dtype=torch.float64)
    correction = LogitCorrection(vectors.requires_grad_(), out.requires_grad_())
    drafter_head = (case["target_head"] + 0.1).requires_grad_()

    uncorrected = case["hidden"] @ drafter_head.T
    corrected = uncorrected + correction.vectors @ correction.correction_matrix.T
    teacher_logits = case["teacher_hidden"] @ case["target_head"].T
    teacher_logits = teacher_logits[case["teacher_rows"].flatten()]
    labels = case["labels"].flatten()
    agrees = corrected.argmax(-1) == teacher_logits.argmax(-1)
    formula = DIVERGENCE_TABLE[divergence].formula
    log_p = teacher_logits.log_softmax(-1)
    divergences = unary * formula(log_p, uncorrected.log_softmax(-1), labels)
    if top_k:
        for row in range(NUM_ROWS):
            candidates = uncorrected[row].topk(top_k).indices.tolist()
            if labels[row] not in candidates:
                candidates[-1] = int(labels[row])
            likeliest = candidates[int(corrected[row, candidates].argmax())]
            agrees[row] = likeliest == teacher_logits[row].argmax()
            candidate_log_p = teacher_logits[row, candidates].log_softmax(-1)
            candidate_log_q = corrected[row, candidates].log_softmax(-1)
            label = torch.tensor(candidates.index(labels[row]))
            divergences[row] = divergences[row] + formula(candidate_log_p, candidate_log_q, label)
    else:
        divergences = divergences + formula(log_p, corrected.log_softmax(-1), labels)
    weighted = divergences.view(NUM_BLOCKS, NUM_DRAFTED) * case["weights"]
    expected_loss = weighted.sum()
    inputs = [case["hidden"], drafter_head, *correction]
    expected_gradients = torch.autograd.grad(1.7 * expected_loss, inputs)

    result = compute_chunked(
        **case,
        config=ObjectiveConfig(divergence=divergence, marginal_weight=unary, chunk_rows=5),
        drafter_head=drafter_head,
        correction=correction,
        top_k=top_k,
        needs_overlap=True,
    )
    has_weight = case["weights"] > 0
    assert result.loss.item() == pytest.approx(expected_loss.item(), rel=1e-9)
    expected_agrees = agrees.view(NUM_BLOCKS, NUM_DRAFTED)
    assert torch.equal(result.agrees[has_weight], expected_agrees[has_weight])
    gradients = torch.autograd.grad(1.7 * result.loss, inputs)
    for actual, expected in zip(gradients, expected_gradients, strict=True):
        assert torch.allclose(actual, expected, rtol=1e-9, atol=1e-11)
    if not top_k:
        overlap = torch.minimum(teacher_logits.softmax(-1), corrected.softmax(-1)).sum(-1)
        overlap = overlap.view(NUM_BLOCKS, NUM_DRAFTED)
        assert torch.allclose(result.overlap[has_weight], overlap[has_weight], rtol=1e-10)


def test_logits_of_float32_states_and_a_bfloat16_head_under_autocast():
    """As behind a float32 norm: autocast casts matrix products, but not those with `out=`."""
    states = torch.ones(3, 4)
    head = torch.eye(5, 4, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        logits = _compute_logits(states, head, LogitScale(), torch.empty(8, 5))
    assert torch.equal(logits, torch.ones(3, 4) @ head.float().T)

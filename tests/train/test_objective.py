"""The chunked objective against the dense one."""

import math
from dataclasses import replace

import pytest
import torch

from infer.targets.support import LogitScale
from train.config import ObjectiveConfig
from train.divergences import DIVERGENCES
from train.objective import (
    Batch,
    Correction,
    RowLoss,
    _logits,
    divergence as divergence_of,
    position_weights,
)

G = 8
L = 3
P = 9
D = 6
V = 31
R = G * L


def case(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(G, L, generator=generator, dtype=torch.float32)
    weights[torch.rand(G, L, generator=generator) < 0.3] = 0
    return {
        "hidden": torch.randn(R, D, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_(),
        "teacher_hidden": torch.randn(P, D, generator=generator, dtype=torch.float64).to(dtype),
        "teacher_rows": torch.randint(P, (G, L), generator=generator),
        "labels": torch.randint(V, (G, L), generator=generator),
        "weights": weights,
        "head": torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype),
    }


def divergence(hidden, own_head=None, correction=None, **batch) -> RowLoss:
    return divergence_of(hidden, Batch(**batch), own_head, correction)


def dense(hidden, teacher_hidden, teacher_rows, labels, weights, head, kind: str):
    log_q = (hidden @ head.T).log_softmax(-1).view(G, L, V)
    log_p = (teacher_hidden @ head.T).log_softmax(-1)[teacher_rows]
    agree = log_q.argmax(-1) == log_p.argmax(-1)
    rows = DIVERGENCES[kind].formula(log_p, log_q, labels)
    return (rows * weights).sum(), rows, agree


def test_every_formula_is_what_its_definition_says():
    """In plain Python, token by token."""
    p = [0.5, 0.3, 0.2]
    q = [0.1, 0.6, 0.3]
    label = 1
    kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    overlap = 0.1 + 0.3 + 0.2
    share = math.exp(-3 * overlap)
    expected = {
        "kl": kl,
        "cross_entropy": -math.log(0.6),
        "tv": 1 - overlap,
        "acceptance": -math.log(overlap),
        "lk": share * kl + (1 - share) * (1 - overlap),
        "ce_l1": -0.1 * math.log(0.6) + 0.9 * (0.4 + 0.3 + 0.1),
    }
    log_p, log_q = (torch.tensor(x, dtype=torch.float64).log() for x in (p, q))
    found = {
        name: DIVERGENCES[name].formula(log_p, log_q, torch.tensor(label)).item()
        for name in expected
    }
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", [kind for kind, row in DIVERGENCES.items() if row.by_hand])
@pytest.mark.parametrize("own", [False, True])
def test_gradients_by_hand_are_those_of_autograd(kind, own, monkeypatch):
    args = case(9)
    results = []
    head = (args["head"] + 0.1).requires_grad_() if own else None
    for row in (DIVERGENCES[kind], replace(DIVERGENCES[kind], by_hand=None)):
        monkeypatch.setitem(DIVERGENCES, kind, row)
        result = divergence(
            **args, config=ObjectiveConfig(divergence=kind, chunk_rows=5), own_head=head
        )
        grads = torch.autograd.grad(
            result.loss, [args["hidden"], head] if own else [args["hidden"]]
        )
        results.append([result.loss.detach(), result.rows, result.agree.double(), *grads])
    for by_hand, automatic in zip(*results, strict=True):
        assert torch.allclose(by_hand, automatic, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("chunk", [1, 4, 24, 100])
def test_equals_the_dense_objective(kind, chunk):
    args = case()
    expected, rows, agree = dense(**args, kind=kind)
    (expected * 1.7).backward()
    gradient = args["hidden"].grad.clone()
    args["hidden"].grad = None
    result = divergence(**args, config=ObjectiveConfig(divergence=kind, chunk_rows=chunk))
    (result.loss * 1.7).backward()
    live = args["weights"] > 0
    assert 0 < live.sum() < R
    assert result.rows.shape == result.agree.shape == (G, L)
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-7)  # weights are float32
    assert torch.allclose(args["hidden"].grad, gradient, rtol=1e-10, atol=1e-12)
    assert torch.allclose(result.rows[live], rows[live], rtol=1e-10)
    assert torch.equal(result.agree[live], agree[live])
    assert not result.rows[~live].any()
    assert not result.agree[~live].any()
    assert not args["hidden"].grad.view(G, L, D)[~live].any()


@pytest.mark.parametrize("own", [False, True])
def test_dpace_weighs_every_position_with_what_lies_behind_it(own):
    """Its weights are constant in the gradient, and known only when a whole block is."""
    args = case(5)
    args["weights"] = (args["weights"] > 0).float()
    head = args["head"].flip(0).requires_grad_()
    log_q = (args["hidden"] @ (head if own else args["head"]).T).log_softmax(-1).view(G, L, V)
    log_p = (args["teacher_hidden"] @ args["head"].T).log_softmax(-1)[args["teacher_rows"]]
    likely = log_q.exp().gather(-1, args["labels"][..., None])[..., 0]
    rows = (log_p.exp() * (log_p - log_q)).sum(-1)
    expected = 0
    inputs = [args["hidden"], head] if own else [args["hidden"]]
    for g in range(G):
        live = [t for t in range(L) if args["weights"][g, t]]
        s = [0.5 * likely[g, t].item() + 0.5 for t in live]
        for k in range(len(live)):
            worth = sum(math.prod(s[: j + 1]) for j in range(k, len(live)))
            expected = expected + worth * rows[g, live[k]]
    config = ObjectiveConfig(position_weights="dpace", chunk_rows=7)
    result = divergence(**args, config=config, own_head=head if own else None)
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for found, wanted in zip(
        *(torch.autograd.grad(loss, inputs) for loss in (result.loss, expected)), strict=True
    ):
        assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-12)


OWN = [{"divergence": kind} for kind in ("kl", "cross_entropy", "tv", "acceptance")]


@pytest.mark.parametrize(
    "scale", [LogitScale(cap=1.5), LogitScale(divisor=4.0), LogitScale(0.5, 3.0)]
)
@pytest.mark.parametrize("options", OWN)
def test_scaled_logits_are_those_of_both_and_pass_the_gradient_on(options, scale):
    """Softmax of what the scale makes of the products, of a shared head and of one of the drafter's
    own."""
    args = case(8)
    args["weights"] = args["weights"].double()
    own = args["head"] + 0.5 * torch.randn(
        V, D, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    own.requires_grad_()
    log_q = scale(args["hidden"] @ own.T).log_softmax(-1).view(G, L, V)
    log_p = scale(args["teacher_hidden"] @ args["head"].T).log_softmax(-1)[args["teacher_rows"]]
    rows = DIVERGENCES[options["divergence"]].formula(log_p, log_q, args["labels"])
    expected = (rows * args["weights"]).sum()
    expected.backward()
    gradients = args["hidden"].grad.clone(), own.grad.clone()
    args["hidden"].grad = own.grad = None
    config = ObjectiveConfig(chunk_rows=5, **options)
    result = divergence(**args, config=config, own_head=own, scale=scale)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-10)
    assert torch.allclose(args["hidden"].grad, gradients[0], rtol=1e-9, atol=1e-12)
    assert torch.allclose(own.grad, gradients[1], rtol=1e-9, atol=1e-12)


def test_nothing_supervised_costs_nothing():
    args = case()
    args["weights"] = torch.zeros(G, L)
    result = divergence(**args, config=ObjectiveConfig())
    result.loss.backward()
    assert result.loss.item() == 0
    assert not args["hidden"].grad.any()
    empty = {k: v[:0] if len(v) in (G, R) else v for k, v in args.items()}
    assert divergence(**empty, config=ObjectiveConfig()).loss.item() == 0


def test_bfloat16_is_close_and_finite():
    half = divergence(**case(2, torch.bfloat16), config=ObjectiveConfig(chunk_rows=6))
    full = divergence(**case(2), config=ObjectiveConfig(chunk_rows=6))
    assert half.rows.dtype == torch.float32
    assert half.loss.item() == pytest.approx(full.loss.item(), rel=0.05)


def test_shared_teacher_rows_are_projected_once(monkeypatch):
    """All rows of weight share two teacher rows: with one chunk, two teacher rows are projected."""
    args = case(3)
    args["weights"] = torch.ones(G, L)
    args["teacher_rows"] = torch.arange(R).view(G, L) % 2 * 5
    projected = []
    real = torch.mm

    def spy(a, b, **rest):
        projected.append(len(a))
        return real(a, b, **rest)

    monkeypatch.setattr(torch, "mm", spy)
    divergence(**args, config=ObjectiveConfig(chunk_rows=100))
    assert sorted(projected) == [2, R]


def test_position_weights():
    assert torch.allclose(
        position_weights(ObjectiveConfig(gamma=0.6), 3), torch.tensor([1, 0.6, 0.36])
    )
    exponential = position_weights(ObjectiveConfig(position_weights="exponential", gamma=4.0), 3)
    assert position_weights(ObjectiveConfig(position_weights="dpace"), 3).tolist() == [1, 1, 1]
    assert torch.allclose(exponential, torch.exp(torch.tensor([0, -0.25, -0.5])))


@pytest.mark.parametrize(
    "options, word",
    [
        ({"divergence": "l2"}, "l2"),
        ({"position_weights": "linear"}, "linear"),
        ({"gamma": 0.0}, "gamma=0.0"),
        ({"gamma": 1.5}, "gamma=1.5"),
        ({"chunk_rows": 0}, "chunk_rows=0"),
    ],
)
def test_bad_objectives_are_refused(options, word):
    with pytest.raises(ValueError, match=word):
        ObjectiveConfig(**options).check()


def corrected(args: dict, rank: int = 5) -> dict:
    """Corrections of a conditional head, and its matrix, both trained."""
    generator = torch.Generator().manual_seed(12)
    rows = torch.randn(R, rank, generator=generator, dtype=torch.float64).requires_grad_()
    return {
        "rows": rows,
        "out": torch.randn(V, rank, generator=generator, dtype=torch.float64).requires_grad_(),
    }


@pytest.mark.parametrize("top_k", [0, 7])
@pytest.mark.parametrize("unary", [0.0, 0.6])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_a_conditional_head_gets_the_gradients_of_its_distribution(kind, unary, top_k):
    """Its corrections, its matrix, the states, and a head of the drafter's own; over all tokens, or
    over a row's candidates and the label, with the target's distribution among these."""
    args = case(10)
    parts = corrected(case(10))
    args["weights"] = args["weights"].double()
    own = (args["head"] + 0.1).requires_grad_()
    alone = args["hidden"] @ own.T
    scores = alone + parts["rows"] @ parts["out"].T
    teacher = args["teacher_hidden"] @ args["head"].T
    teacher = teacher[args["teacher_rows"].flatten()]
    labels = args["labels"].flatten()
    agree = scores.argmax(-1) == teacher.argmax(-1)
    formula = DIVERGENCES[kind].formula
    log_p = teacher.log_softmax(-1)
    rows = unary * formula(log_p, alone.log_softmax(-1), labels)
    if top_k:
        for r in range(R):
            chosen = alone[r].topk(top_k).indices.tolist()
            if labels[r] not in chosen:
                chosen[-1] = int(labels[r])
            agree[r] = chosen[int(scores[r, chosen].argmax())] == teacher[r].argmax()
            among = (x[r, chosen].log_softmax(-1) for x in (teacher, scores))
            rows[r] = rows[r] + formula(*among, torch.tensor(chosen.index(labels[r])))
    else:
        rows = rows + formula(log_p, scores.log_softmax(-1), labels)
    expected = (rows.view(G, L) * args["weights"]).sum()
    inputs = [args["hidden"], own, parts["rows"], parts["out"]]
    gradients = torch.autograd.grad(1.7 * expected, inputs)
    config = ObjectiveConfig(divergence=kind, marginal_weight=unary, chunk_rows=5)
    result = divergence(
        **args,
        config=config,
        own_head=own,
        correction=Correction(**parts),
        top_k=top_k,
        overlap=True,
    )
    live = args["weights"] > 0
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-9)
    assert torch.equal(result.agree[live], agree.view(G, L)[live])
    for found, wanted in zip(
        torch.autograd.grad(1.7 * result.loss, inputs), gradients, strict=True
    ):
        assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-11)
    if not top_k:
        overlap = torch.minimum(teacher.softmax(-1), scores.softmax(-1)).sum(-1).view(G, L)
        assert torch.allclose(result.overlap[live], overlap[live], rtol=1e-10)


def test_logits_of_states_and_head_of_two_precisions_under_autocast():
    """States behind a float32 norm meet a bfloat16 head: autocast casts products, but none that
    writes to room."""
    states = torch.ones(3, 4)
    head = torch.eye(5, 4, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        found = _logits(states, head, LogitScale(), torch.empty(8, 5))
    assert torch.equal(found, torch.ones(3, 4) @ head.float().T)

"""Muon with wide products against torch's own."""

import pytest
import torch

from train import optim
from train.config import OptimConfig


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_a_wide_muon_steps_as_torchs_does(shape, monkeypatch):
    """Several steps of both: the same but for bfloat16's rounding, and nearer to torch's own in
    float32."""

    def steps(make) -> torch.Tensor:
        generator = torch.Generator().manual_seed(3)
        weight = torch.nn.Parameter(torch.randn(shape, generator=generator))
        optimizer = make([weight], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        for _ in range(4):
            weight.grad = torch.randn(shape, generator=generator)
            optimizer.step()
        return weight.detach()

    ours = steps(optim.WideMuon)
    theirs = steps(torch.optim.Muon)
    assert (ours - theirs).norm() < 0.02 * (
        theirs - steps(lambda *a, **b: torch.optim.SGD(*a, lr=0))
    ).norm()
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
    torch.testing.assert_close(ours, steps(torch.optim.Muon), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("precision", "able"), [("auto", False), ("auto", True), ("float32", True)]
)
def test_bfloat16_is_for_cpus_that_have_it(precision, able, monkeypatch):
    monkeypatch.setattr(optim, "has_bfloat16", lambda: able)
    made = optim.make_optimizer(
        torch.nn.Linear(8, 8), OptimConfig(name="muon", precision=precision)
    )
    assert (type(made.parts[0]) is torch.optim.Muon) == (able and precision == "auto")

"""Muon in the gradients' dtype takes the steps of torch's Muon."""

import pytest
import torch

from train import optim
from train.config import OptimConfig


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_muon_in_float32_steps_like_torchs_muon(shape, monkeypatch):
    """After several steps they differ by bfloat16's rounding, and by nothing if torch's Muon uses
    float32, too."""

    def train_weight(make_optimizer) -> torch.Tensor:
        generator = torch.Generator().manual_seed(3)
        weight = torch.nn.Parameter(torch.randn(shape, generator=generator))
        optimizer = make_optimizer(
            [weight], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
        )
        for _ in range(4):
            weight.grad = torch.randn(shape, generator=generator)
            optimizer.step()
        return weight.detach()

    def make_idle_optimizer(parameters, **options):
        return torch.optim.SGD(parameters, lr=0)

    float32_weight = train_weight(optim.GradientDtypeMuon)
    torch_weight = train_weight(torch.optim.Muon)
    initial_weight = train_weight(make_idle_optimizer)
    total_change = (torch_weight - initial_weight).norm()
    assert (float32_weight - torch_weight).norm() < 0.02 * total_change
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
    torch.testing.assert_close(float32_weight, train_weight(torch.optim.Muon), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("precision", "has_bfloat16"), [("auto", False), ("auto", True), ("float32", True)]
)
def test_bfloat16_is_used_on_cpus_that_support_it(precision, has_bfloat16, monkeypatch):
    monkeypatch.setattr(optim, "has_amx_bfloat16", lambda: has_bfloat16)
    config = OptimConfig(name="muon", precision=precision)
    optimizer = optim.make_optimizer(torch.nn.Linear(8, 8), config)
    uses_bfloat16 = type(optimizer.optimizers[0]) is torch.optim.Muon
    assert uses_bfloat16 == (has_bfloat16 and precision == "auto")

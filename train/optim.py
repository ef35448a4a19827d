"""The optimiser: AdamW, or Muon for matrices and AdamW for everything else."""

from collections.abc import Callable

import torch
from torch import nn

from train.config import OptimConfig


class MuonAdamW(torch.optim.Optimizer):
    """Muon and AdamW as one optimiser. Muon orthogonalises the momentum of every matrix; its steps are scaled to the
    size that AdamW's have, so that both take the same learning rate."""

    def __init__(self, matrices: list[torch.Tensor], others: list[torch.Tensor], config: OptimConfig) -> None:
        self.parts = [
            torch.optim.Muon(matrices, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=config.lr, betas=tuple(config.betas), weight_decay=0.0),
        ]
        super().__init__([group for part in self.parts for group in part.param_groups], {"lr": config.lr})
        self.param_groups = [group for part in self.parts for group in part.param_groups]  # theirs, not copies
        for part in self.parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One step of both."""
        for part in self.parts:
            part.step()


def make_optimizer(drafter: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """The optimiser that the configuration names; matrices decay, vectors do not. A head is a table of vectors, one a
    token, rather than a matrix to Muon."""
    named = list(drafter.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and not (config.name == "muon" and name == "lm_head.weight")]
    others = [p for _, p in named if all(p is not matrix for matrix in matrices)]
    if config.name == "muon":
        return MuonAdamW(matrices, others, config)
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=tuple(config.betas))

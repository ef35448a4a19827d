"""The optimiser: AdamW, or Muon for matrices and AdamW for everything else."""

from collections.abc import Callable

import torch
from torch import nn

from train.config import OptimConfig

TABLES = ("embed_tokens.weight", "lm_head.weight")


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


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """The optimiser that the configuration names, for a drafter or a whole model; matrices decay, vectors do not. An
    embedding and a head are tables of vectors, one a token, and no matrices to Muon."""
    named, tables = list(model.named_parameters()), TABLES if config.name == "muon" else ()
    matrices = [p for name, p in named if p.ndim == 2 and not name.endswith(tables)]
    others = [p for name, p in named if p.ndim != 2 or name.endswith(tables)]
    if config.name == "muon":
        return MuonAdamW(matrices, others, config)
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=tuple(config.betas))

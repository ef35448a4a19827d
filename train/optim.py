"""The optimiser (AdamW, or Muon for matrices and AdamW for everything else) and the schedules of
its rate."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from infer.drafters.heads import table as heads
from train.config import OptimConfig

TABLES = ("embed_tokens.weight", "lm_head.weight", "layer_fusion_weights", *heads.TABLES)


def has_bfloat16() -> bool:
    """Return whether this CPU multiplies matrices of bfloat16 (AMX). With AVX-512's BF16 alone a
    training pass takes 1.8 times as long as in float32."""
    return bool(getattr(torch.cpu, "get_capabilities", dict)().get("amx_bf16"))


def orthogonalised(matrix: torch.Tensor, group: dict) -> torch.Tensor:
    """Return the nearest matrix with orthogonal rows or columns, roughly, in the matrix's dtype:
    Muon's Newton-Schulz iteration (https://kellerjordan.github.io/posts/muon) with the coefficients
    and steps of a parameter group."""
    a, b, c = group["ns_coefficients"]
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class WideMuon(torch.optim.Muon):
    """Muon with products in the gradients' dtype: torch's are in bfloat16, which takes a CPU
    without such products seven times as long as float32."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step, as torch's but for the dtype."""
        for group in self.param_groups:
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                state = self.state[weight]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(weight)
                momentum = state["momentum_buffer"].lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonalised(weight.grad.lerp(momentum, group["momentum"]), group)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(weight.shape)))


class MuonAdamW(torch.optim.Optimizer):
    """Muon and AdamW as one optimiser. Muon orthogonalises the momentum of every matrix; its steps
    are scaled to the size that AdamW's have, so that both take the same learning rate."""

    def __init__(
        self,
        matrices: list[torch.Tensor],
        others: list[torch.Tensor],
        config: OptimConfig,
        decay: float,
    ) -> None:
        half = (
            matrices[0].is_cuda or (config.precision != "float32" and has_bfloat16())
            if matrices
            else True
        )
        kind = torch.optim.Muon if half else WideMuon
        muon = partial(kind, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        adamw = partial(torch.optim.AdamW, betas=tuple(config.betas), weight_decay=0.0)
        shares = ((muon, matrices), (adamw, others))
        self.parts = [make(share, lr=config.lr) for make, share in shares if share]
        super().__init__(
            [group for part in self.parts for group in part.param_groups], {"lr": config.lr}
        )
        self.param_groups = [
            group for part in self.parts for group in part.param_groups
        ]  # theirs, not copies
        for part in self.parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One step of both."""
        for part in self.parts:
            part.step()


def make_optimizer(
    model: nn.Module, config: OptimConfig, decay: float = 0.0
) -> torch.optim.Optimizer:
    """Make the optimiser that the configuration names, for a drafter or a whole model; `decay`:
    weight decay of Muon's matrices. An embedding and a head count as tables of vectors, one for
    each token, and not as matrices of Muon. What is frozen is left out."""
    named = [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    matrices = [p for name, p in named if p.ndim == 2 and not name.endswith(TABLES)]
    others = [p for name, p in named if p.ndim != 2 or name.endswith(TABLES)]
    if config.name == "muon":
        return MuonAdamW(matrices, others, config, decay)
    # there a quarter of the time; CUDA's is torch's choice
    fused = True if next(model.parameters()).is_cpu else None
    return torch.optim.AdamW(
        [*matrices, *others], lr=config.lr, betas=tuple(config.betas), weight_decay=0, fused=fused
    )


def learning_rate(optim: OptimConfig, step: float, total: float) -> float:
    """Return the rate of a step, counted from 0, or of one that begins after so many of `total`
    seconds: linear warm-up, then half a cosine to zero."""
    warmup = max(1, round(optim.warmup_ratio * total))
    if step < warmup:
        return optim.lr * min(1.0, (step + 1) / warmup)
    return optim.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def trapezoid(step: int, total: int, warmup: float, decay: float) -> float:
    """Return the share of the peak rate at a step, counted from 0: linear warm-up, plateau, linear
    decay to zero; warmup and decay are shares of all steps."""
    return min((step + 1) / max(1, warmup * total), 1.0, (total - step) / max(1, decay * total))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> float:
    """Give all parameters one learning rate, and return it."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate

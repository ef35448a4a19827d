"""The optimisers (AdamW, or Muon for matrices and AdamW for all other weights), and learning-rate
schedules."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from infer.drafters.heads import table as heads
from train.config import OptimConfig

# endings of the names of weights with one vector per token or layer, which Muon does not treat as
# matrices
ADAMW_TOKEN_TABLE_NAMES = (
    "embed_tokens.weight",
    "lm_head.weight",
    "layer_fusion_weights",
    *heads.HEAD_TOKEN_TABLE_WEIGHT_NAMES,
)


def has_fast_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 matrices in hardware (AMX). With AVX-512's BF16
    instructions alone, a training step takes 1.8 times as long as in float32."""
    return bool(getattr(torch.cpu, "get_capabilities", dict)().get("amx_bf16"))


def orthogonalise(matrix: torch.Tensor, group: dict) -> torch.Tensor:
    """Return an approximation of the nearest matrix with orthogonal rows or columns.

    This is Muon's Newton-Schulz iteration (https://kellerjordan.github.io/posts/muon) in the
    matrix's dtype. The parameter group `group` has its coefficients and number of steps.
    """
    a, b, c = group["ns_coefficients"]
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


class GradientDtypeMuon(torch.optim.Muon):
    """Muon with matrix products in the gradients' dtype. Those of torch are in bfloat16, which is
    seven times as slow as float32 on a CPU without bfloat16 hardware."""

    @torch.no_grad()
    def step(  # ty: ignore[incompatible-method-override]
        self, closure: Callable[[], float] | None = None
    ) -> None:
        """Take one step, as torch's Muon except for the dtype."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)

    def _update(self, weight: torch.Tensor, group: dict) -> None:
        """Update one matrix in place."""
        gradient = weight.grad
        assert gradient is not None
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = orthogonalise(gradient.lerp(momentum, group["momentum"]), group)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(weight.shape)))


class MuonAdamW(torch.optim.Optimizer):
    """Muon for matrices and AdamW for all other weights, as one optimiser.

    Muon's updates are scaled to the size of AdamW's, so that both use the same learning rate.
    """

    def __init__(
        self,
        matrices: list[nn.Parameter],
        others: list[nn.Parameter],
        config: OptimConfig,
        weight_decay: float,
    ) -> None:
        muon_class = torch.optim.Muon
        use_bfloat16 = config.precision != "float32" and has_fast_bfloat16()
        if matrices and not matrices[0].is_cuda and not use_bfloat16:
            muon_class = GradientDtypeMuon
        make_muon = partial(
            muon_class, lr=config.lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        make_adamw = partial(
            torch.optim.AdamW, lr=config.lr, betas=tuple(config.betas), weight_decay=0.0
        )

        self.optimizers: list[torch.optim.Optimizer] = []
        if matrices:
            self.optimizers.append(make_muon(matrices))
        if others:
            self.optimizers.append(make_adamw(others))
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        super().__init__(groups, {"lr": config.lr})

        # both optimisers share this one's parameter groups and state
        self.param_groups = groups
        for optimizer in self.optimizers:
            optimizer.state = self.state

    @torch.no_grad()
    def step(  # ty: ignore[incompatible-method-override]
        self, closure: Callable[[], float] | None = None
    ) -> None:
        """Take one step of both optimisers."""
        for optimizer in self.optimizers:
            optimizer.step()


def make_optimizer(
    model: nn.Module, config: OptimConfig, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    """Create the optimiser that the configuration names, for all trainable weights of a model.

    weight_decay: of the matrices that Muon trains. Muon does not train embeddings and heads,
    although they are matrices: they are tables of one vector per token.
    """
    matrices = []
    others = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim == 2 and not name.endswith(ADAMW_TOKEN_TABLE_NAMES):
            matrices.append(parameter)
        else:
            others.append(parameter)
    if config.name == "muon":
        return MuonAdamW(matrices, others, config, weight_decay)

    # on a CPU, the fused step takes a quarter of the time; on CUDA torch chooses
    fused = True if next(model.parameters()).is_cpu else None
    return torch.optim.AdamW(
        [*matrices, *others], lr=config.lr, betas=tuple(config.betas), weight_decay=0, fused=fused
    )


def cosine_learning_rate(optim: OptimConfig, elapsed: float, total: float) -> float:
    """Return the learning rate of the next step: linear warm-up, then half a cosine to zero.

    elapsed, total: steps taken and steps of the run, or both in seconds.
    """
    warmup = max(1, round(optim.warmup_ratio * total))
    if elapsed < warmup:
        return optim.lr * min(1.0, (elapsed + 1) / warmup)
    return optim.lr * 0.5 * (1 + math.cos(math.pi * (elapsed - warmup) / max(1, total - warmup)))


def warmup_decay_factor(step: int, total: int, warmup: float, decay: float) -> float:
    """Return the learning rate of a step as a fraction of the peak rate: linear warm-up, constant,
    linear decay to zero.

    step: counted from 0, of `total`. warmup, decay: fractions of all steps.
    """
    return min((step + 1) / max(1, warmup * total), 1.0, (total - step) / max(1, decay * total))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate

"""The optimisers and learning-rate schedules of training. The optimiser is AdamW, or Muon for
matrices and AdamW for all other weights."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from infer.drafters.heads import table as heads
from train.config import OptimConfig

# With optim.name=muon, AdamW trains the matrices whose names end with one of these strings. Such a
# matrix is a table with one vector per token or per layer.
ADAMW_MATRIX_NAME_SUFFIXES = (
    "embed_tokens.weight",
    "lm_head.weight",
    "layer_fusion_weights",
    *heads.HEAD_TOKEN_TABLE_WEIGHT_NAMES,
)


def has_amx_bfloat16() -> bool:
    """Return whether this CPU has AMX, Intel's instructions that multiply bfloat16 matrices.

    False for a CPU that has only the bfloat16 instructions of AVX-512. With these, a training step
    takes 1.8 times as long as in float32.
    """
    return bool(getattr(torch.cpu, "get_capabilities", dict)().get("amx_bf16"))


def orthogonalise(matrix: torch.Tensor, group: dict) -> torch.Tensor:
    """Run Muon's Newton-Schulz iteration: return approximately the semi-orthogonal matrix that is
    nearest to `matrix`.

    See https://kellerjordan.github.io/posts/muon. The computation uses the dtype of `matrix`.
    group: the optimiser's parameter group, which has the coefficients and the number of steps of
    the iteration.
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
    """The Muon optimiser with matmuls in the dtype of the gradients.

    torch's Muon computes its matmuls in bfloat16. On a CPU without bfloat16 hardware, these take
    seven times as long as matmuls in float32.
    """

    @torch.no_grad()
    def step(  # ty: ignore[incompatible-method-override]
        self, closure: Callable[[], float] | None = None
    ) -> None:
        """Take one optimiser step, the same as that of torch's Muon except for the dtype of the
        matmuls. `closure` is ignored."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)

    def _update(self, weight: torch.Tensor, group: dict) -> None:
        """Update one weight matrix in place. group: the matrix's parameter group, which has the
        learning rate, momentum and weight decay."""
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
    """Muon for matrices and AdamW for all other weights, combined into one optimiser.

    Muon's updates are scaled to the size of AdamW's updates, so that both can use the same learning
    rate.

    matrices: the parameters that Muon trains. others: the parameters that AdamW trains.
    weight_decay: weight decay of the matrices. The other parameters have no weight decay.
    """

    def __init__(
        self,
        matrices: list[nn.Parameter],
        others: list[nn.Parameter],
        config: OptimConfig,
        weight_decay: float,
    ) -> None:
        muon_class = torch.optim.Muon
        use_bfloat16 = config.precision != "float32" and has_amx_bfloat16()
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

        # This optimiser shares its parameter groups and its state with Muon and AdamW.
        self.param_groups = groups
        for optimizer in self.optimizers:
            optimizer.state = self.state

    @torch.no_grad()
    def step(  # ty: ignore[incompatible-method-override]
        self, closure: Callable[[], float] | None = None
    ) -> None:
        """Take one step with Muon and one with AdamW, each on its own weights. `closure` is
        ignored."""
        for optimizer in self.optimizers:
            optimizer.step()


def make_optimizer(
    model: nn.Module, config: OptimConfig, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    """Create the optimiser `config.name` for all trainable weights of a model.

    weight_decay: weight decay of the matrices that Muon trains. Weights that AdamW trains have no
    weight decay. AdamW also trains embeddings and heads, whose matrices have one vector per token.
    """
    matrices = []
    others = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim == 2 and not name.endswith(ADAMW_MATRIX_NAME_SUFFIXES):
            matrices.append(parameter)
        else:
            others.append(parameter)
    if config.name == "muon":
        return MuonAdamW(matrices, others, config, weight_decay)

    # On a CPU, a fused step of AdamW takes a quarter of the time of an unfused step. On a GPU, None
    # lets torch choose.
    fused = True if next(model.parameters()).is_cpu else None
    return torch.optim.AdamW(
        [*matrices, *others], lr=config.lr, betas=tuple(config.betas), weight_decay=0, fused=fused
    )


def cosine_learning_rate(optim: OptimConfig, elapsed: float, total: float) -> float:
    """Return the learning rate of the next step. It rises linearly (warm-up), and then falls along
    half a cosine to zero.

    elapsed: the number of completed steps, or their duration in seconds. total: the length of the
    whole run, in the same unit as `elapsed`.
    """
    warmup = max(1, round(optim.warmup_ratio * total))
    if elapsed < warmup:
        return optim.lr * min(1.0, (elapsed + 1) / warmup)
    return optim.lr * 0.5 * (1 + math.cos(math.pi * (elapsed - warmup) / max(1, total - warmup)))


def warmup_decay_factor(step: int, total: int, warmup_share: float, decay_share: float) -> float:
    """Return the learning rate of a step as a fraction of the peak rate. It rises linearly, stays
    constant, and falls linearly to zero.

    step: number of the step, counted from 0. total: number of all steps. warmup_share: fraction of
    all steps in which the rate rises. decay_share: fraction of all steps in which the rate falls.
    """
    return min(
        (step + 1) / max(1, warmup_share * total), 1.0, (total - step) / max(1, decay_share * total)
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameter groups of an optimiser."""
    for group in optimizer.param_groups:
        group["lr"] = rate

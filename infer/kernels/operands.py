"""What operations take beside activations: weights in the form that the operations read."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class Norm:
    """The weight of an RMS norm, (D,), or (L, heads, E) of the heads of L layers. It is float32
    where the module multiplies by one more than it has (Gemma)."""

    weight: torch.Tensor
    eps: float

    @cached_property
    def float32_weight(self) -> torch.Tensor:
        """The weight in float32 or more, contiguous, for compiled loops."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        return self.weight.detach().to(wide).contiguous()


@dataclass(frozen=True)
class Linear:
    """The weights of a linear layer."""

    weight: torch.Tensor  # (inputs, outputs)
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class Activation:
    """The activation function of a gated MLP. `coefficients` (a, b) are given where it is
    x * sigmoid(a x + b x^3), which compiled loops compute."""

    function: Callable[[torch.Tensor], torch.Tensor]
    coefficients: tuple[float, float] | None = None


SILU_COEFFICIENTS = 1.0, 0.0
TANH_GELU_COEFFICIENTS = 1.59576912, 1.59576912 * 0.044715

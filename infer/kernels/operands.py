"""Weights and activation functions, as arguments of the operations of `infer.kernels`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class RMSNormWeights:
    """The weight and epsilon of an RMS norm.

    The weight of a norm of hidden states has the shape (hidden size,). The weight of norms of query
    and key heads has the shape (layers, heads, head size). Some modules (Gemma) multiply by
    1 + weight; for these modules, `weight` here is 1 + weight in float32.
    """

    weight: torch.Tensor
    eps: float

    @cached_property
    def float32_weight(self) -> torch.Tensor:
        """The weight as a contiguous tensor in float32 (or float64), for compiled kernels."""
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        return self.weight.detach().to(dtype).contiguous()


@dataclass(frozen=True)
class LinearWeights:
    """The weight and bias of a linear layer."""

    transposed_weight: torch.Tensor  # (inputs, outputs), the transpose of nn.Linear.weight
    bias: torch.Tensor | None = None  # (outputs,)


@dataclass(frozen=True)
class Activation:
    """The activation function of a gated MLP.

    coefficients: (a, b) if the function is x * sigmoid(a * x + b * x^3), otherwise None. Compiled
        kernels can only compute functions of this form.
    """

    function: Callable[[torch.Tensor], torch.Tensor]
    coefficients: tuple[float, float] | None = None


SILU_COEFFICIENTS = (1.0, 0.0)
TANH_GELU_COEFFICIENTS = (1.59576912, 1.59576912 * 0.044715)

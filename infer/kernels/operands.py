"""Weights and activation functions in the form that the operations of `infer.kernels` read.

Dimensions: D hidden size or input size, O output size, L layers, E head size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class RMSNormWeights:
    """The weight and epsilon of an RMS norm.

    The weight has the shape (D,) for a norm of hidden states, and the shape (L, heads, E) for norms
    of the query and key heads of L layers. For modules that multiply by 1 + weight (Gemma), it is
    this sum in float32.
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

    weight: torch.Tensor  # (D, O)
    bias: torch.Tensor | None = None  # (O,)


@dataclass(frozen=True)
class Activation:
    """The activation function of a gated MLP.

    `coefficients` is (a, b) if the function has the form x * sigmoid(a * x + b * x^3), and None
    otherwise. Compiled kernels can only compute functions of this form.
    """

    function: Callable[[torch.Tensor], torch.Tensor]
    coefficients: tuple[float, float] | None = None


SILU_COEFFICIENTS = (1.0, 0.0)
TANH_GELU_COEFFICIENTS = (1.59576912, 1.59576912 * 0.044715)

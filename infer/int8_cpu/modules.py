"""Linear layers and embeddings over int8 codes, as modules that take the place of a model's own.

N positions, D inputs, O outputs of a linear layer, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from infer.int8_cpu.kernels import linear
from infer.int8_cpu.weights import Int8Weights, round_to_nearest


class Int8Linear(nn.Module):
    """A linear layer over int8 codes."""

    def __init__(self, inputs: int, outputs: int, bias: bool, digits: int = 1) -> None:
        super().__init__()
        self.digits = digits  # of activations
        self.codes = nn.Parameter(
            torch.empty(outputs, inputs, dtype=torch.int8), requires_grad=False
        )
        self.scales = nn.Parameter(torch.empty(outputs), requires_grad=False)
        self.smooth = nn.Parameter(
            torch.empty(inputs), requires_grad=False
        )  # activations are multiplied by it
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None

    @classmethod
    def of(
        cls,
        linear: nn.Linear,
        codes: torch.Tensor,
        scales: torch.Tensor,
        smooth: torch.Tensor,
        digits: int,
    ):
        """Return what takes a linear layer's place."""
        new = cls(linear.in_features, linear.out_features, linear.bias is not None, digits)
        new.codes.data = codes
        new.scales.data = scales
        new.smooth.data = smooth
        if linear.bias is not None:
            new.bias.data = linear.bias.detach().float()
        return new

    @property
    def weight(self) -> torch.Tensor:
        """The weight that the codes stand for, (O, D) float32, made anew."""
        return self.operand.weight.t()

    @property
    def operand(self) -> Int8Weights:
        bias = None if self.bias is None else self.bias.data
        return Int8Weights(self.codes.data, self.scales.data, self.smooth.data, self.digits, bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the outputs (..., O) for states (..., D)."""
        if states.requires_grad:
            return F.linear(states, self.weight, self.bias)
        return linear(states.reshape(-1, states.shape[-1]), self.operand).view(
            *states.shape[:-1], -1
        )

    def joins(self, others: list[nn.Module]) -> bool:
        """Return whether one matmul can compute this layer and others that read the same states."""
        alike = [type(other) is Int8Linear and other.digits == self.digits for other in others]
        return all(alike) and all(other.smooth.equal(self.smooth) for other in others)

    @staticmethod
    def join(
        modules: list["Int8Linear"], join_weights: Callable[[list[nn.Parameter]], torch.Tensor]
    ) -> Int8Weights:
        """Return the operand of layers that read the same states (`joins`). join_weights: a
        function from parameters to one tensor of all their rows."""
        first = modules[0]
        bias = None if first.bias is None else join_weights([module.bias for module in modules])
        codes = join_weights([module.codes for module in modules])
        scales = join_weights([module.scales for module in modules])
        return Int8Weights(codes.detach(), scales.detach(), first.smooth.data, first.digits, bias)


class Int8Embedding(nn.Module):
    """An embedding over int8 codes with a scale for each token."""

    def __init__(self, tokens: int, size: int) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.empty(tokens, size, dtype=torch.int8), requires_grad=False)
        self.scales = nn.Parameter(torch.empty(tokens, 1), requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:
        """(V, D) float32, made anew."""
        return self.codes * self.scales

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.codes[ids] * self.scales[ids]


def round_linear(linear: nn.Linear, digits: int = 1) -> Int8Linear:
    """Return what takes a linear layer's place, without calibration; `digits` of its
    activations."""
    codes, scales = round_to_nearest(linear.weight.detach().float())
    return Int8Linear.of(linear, codes, scales.flatten(), torch.ones(linear.in_features), digits)

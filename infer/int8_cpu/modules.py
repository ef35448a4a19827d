"""Modules with int8 weights that replace the linear layers and the embedding of a model."""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

from infer.int8_cpu.kernels import linear
from infer.int8_cpu.weights import Int8Weights, round_weight_to_nearest


class Int8Linear(nn.Module):
    """A linear layer with int8 weights. `Int8Weights` explains the parameters."""

    def __init__(
        self, inputs: int, outputs: int, bias: bool, codes_per_activation: int = 1
    ) -> None:
        super().__init__()
        self.codes_per_activation = codes_per_activation
        # The attributes codes, scales, smooth and bias must not be renamed, because tensors in
        # checkpoints have the same names.
        self.codes = nn.Parameter(
            torch.empty(outputs, inputs, dtype=torch.int8), requires_grad=False
        )
        self.scales = nn.Parameter(torch.empty(outputs), requires_grad=False)
        self.smooth = nn.Parameter(torch.empty(inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        codes: torch.Tensor,
        scales: torch.Tensor,
        smoothing: torch.Tensor,
        codes_per_activation: int,
    ) -> "Int8Linear":
        """Return an int8 layer with the given int8 weights, and the shape and bias of `linear`.

        codes, scales, smoothing, codes_per_activation: see `Int8Weights`
        """
        bias = linear.bias
        layer = cls(linear.in_features, linear.out_features, bias is not None, codes_per_activation)
        layer.codes.data = codes
        layer.scales.data = scales
        layer.smooth.data = smoothing
        if layer.bias is not None:
            layer.bias.data = bias.detach().float()
        return layer

    @property
    def weight(self) -> torch.Tensor:
        """The dequantised weight, (outputs, inputs) float32. It is computed on each access."""
        return self.int8_weights.transposed_weight.t()

    @property
    def int8_weights(self) -> Int8Weights:
        """The layer's parameters as an `Int8Weights` object, without a copy."""
        return Int8Weights(
            codes=self.codes.data,
            scales=self.scales.data,
            smoothing=self.smooth.data,
            codes_per_activation=self.codes_per_activation,
            bias=None if self.bias is None else self.bias.data,
        )

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the outputs (..., outputs) of the layer for hidden states (..., inputs)."""
        if states.requires_grad:
            return F.linear(states, self.weight, self.bias)
        outputs = linear(states.reshape(-1, states.shape[-1]), self.int8_weights)
        return outputs.view(*states.shape[:-1], -1)

    def can_join(self, others: Sequence[nn.Module]) -> bool:
        """Return whether one matmul can compute this layer and the layers `others`, which read the
        same input.

        This is possible if all layers are int8 layers with the same smoothing factors and the same
        number of codes per activation.
        """
        if not all(type(other) is Int8Linear for other in others):
            return False
        layers = cast(Sequence[Int8Linear], others)
        if any(layer.codes_per_activation != self.codes_per_activation for layer in layers):
            return False
        return all(layer.smooth.equal(self.smooth) for layer in layers)

    @staticmethod
    def join(
        layers: list["Int8Linear"], join_weights: Callable[[list[nn.Parameter]], torch.Tensor]
    ) -> Int8Weights:
        """Return the weights of one matmul that computes several layers, which read the same input.

        layers: layers for which `can_join` returned True
        join_weights: function that concatenates parameters along the output dimension
        """
        first = layers[0]
        bias = None
        if first.bias is not None:
            bias = join_weights([cast(nn.Parameter, layer.bias) for layer in layers])
        codes = join_weights([layer.codes for layer in layers])
        scales = join_weights([layer.scales for layer in layers])
        return Int8Weights(
            codes=codes.detach(),
            scales=scales.detach(),
            smoothing=first.smooth.data,
            codes_per_activation=first.codes_per_activation,
            bias=bias,
        )


class Int8Embedding(nn.Module):
    """An embedding with int8 codes and one scale for each token."""

    def __init__(self, vocabulary: int, size: int) -> None:
        super().__init__()
        self.codes = nn.Parameter(
            torch.empty(vocabulary, size, dtype=torch.int8), requires_grad=False
        )
        self.scales = nn.Parameter(torch.empty(vocabulary, 1), requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:
        """The dequantised weight, (vocabulary size, embedding size) float32, computed on access."""
        return self.codes * self.scales

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.codes[ids] * self.scales[ids]


def quantise_linear(linear: nn.Linear, codes_per_activation: int = 1) -> Int8Linear:
    """Return an int8 layer with the weights of a linear layer, without calibration.

    The weights are rounded to the nearest int8 code, and all smoothing factors are 1.
    """
    codes, scales = round_weight_to_nearest(linear.weight.detach().float())
    smoothing = torch.ones(linear.in_features)
    return Int8Linear.from_linear(linear, codes, scales.flatten(), smoothing, codes_per_activation)

"""The weights of linear layers as int8 codes.

A weight is approximately its int8 code times a scale. A layer has one scale for each output.
Activations (the inputs of the layer) are quantised too, with one scale for each token. Before an
activation is quantised, it is multiplied by a smoothing factor. A layer has one smoothing factor
for each input. Smoothing factors move outliers from the activations to the weights (SmoothQuant,
arXiv 2211.10438, section 4).

An activation is quantised to one or two int8 codes. The second code is the quantised rounding error
of the first code. The activations of a layer have two codes if calibration shows that one code is
not accurate enough.
"""

from dataclasses import dataclass

import torch

MAX_INT8_CODE = 127


@dataclass(frozen=True)
class Int8Weights:
    """The quantised weights of a linear layer, an argument of `infer.int8_cpu.kernels.linear`."""

    codes: torch.Tensor  # (outputs, inputs) int8
    scales: torch.Tensor  # (outputs,) float32: factors of the codes
    # (inputs,) float32: factors by which activations are multiplied before they are quantised.
    smoothing: torch.Tensor
    codes_per_activation: int  # number of int8 codes per activation, 1 or 2
    bias: torch.Tensor | None = None  # (outputs,) float32

    @property
    def transposed_weight(self) -> torch.Tensor:
        """The dequantised weight, (inputs, outputs) float32. It is computed on each access."""
        return (self.codes * self.scales[:, None] * self.smoothing).t()


def compute_weight_scales(weight: torch.Tensor) -> torch.Tensor:
    """Return a scale for each output of a linear layer, (outputs, 1).

    weight: (outputs, inputs)

    Weights divided by these scales are between -MAX_INT8_CODE and MAX_INT8_CODE.
    """
    return weight.abs().amax(1, keepdim=True).clamp(min=1e-30) / MAX_INT8_CODE


def round_weight_to_nearest(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the weight of a linear layer or an embedding, rounding to the nearest int8 code.

    weight: (outputs, inputs), or (vocabulary size, embedding size)

    Returns int8 codes in the shape of the weight, and the scales of its rows, (rows, 1).
    """
    scales = compute_weight_scales(weight)
    return (weight / scales).round().to(torch.int8), scales

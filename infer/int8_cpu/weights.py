"""Weights as int8 codes.

A weight matrix has a scale for each output. An activation has a scale for each token; before it is
quantised, it is multiplied by a smoothing factor for each input, which moves outliers from
activations to weights (SmoothQuant, 2211.10438, section 4).

An activation is quantised to one int8 code, or to two codes: the second one is the code of the
first one's rounding error. Layers get two codes if one loses too much accuracy in calibration.

D inputs, O outputs of a linear layer.
"""

from dataclasses import dataclass

import torch

MAX_INT8_CODE = 127


@dataclass(frozen=True)
class Int8Weights:
    """The quantised weights of a linear layer, as this package's `linear` reads them."""

    codes: torch.Tensor  # (O, D) int8
    scales: torch.Tensor  # (O,) float32, of the codes
    smoothing: torch.Tensor  # (D,) float32, factors of the activations
    codes_per_activation: int  # 1 or 2
    bias: torch.Tensor | None = None  # (O,) float32

    @property
    def weight(self) -> torch.Tensor:
        """The dequantised weight, (D, O) float32 as in `LinearWeights`; computed on each access."""
        return (self.codes * self.scales[:, None] * self.smoothing).t()


def compute_weight_scales(weight: torch.Tensor) -> torch.Tensor:
    """Return a scale for each output, (O, 1), of a weight (O, D), so that its codes stay within
    MAX_INT8_CODE."""
    return weight.abs().amax(1, keepdim=True).clamp(min=1e-30) / MAX_INT8_CODE


def round_weight_to_nearest(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes (O, D) int8 and scales (O, 1) of a weight (O, D), with each entry rounded to
    the nearest code."""
    scales = compute_weight_scales(weight)
    return (weight / scales).round().to(torch.int8), scales

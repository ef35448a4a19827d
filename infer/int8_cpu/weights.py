"""Weights as int8 codes.

A weight is approximately its int8 code times a scale. A layer has one scale for each output.
Activations are quantised too, with one scale for each token. Before an activation is quantised, it
is multiplied by the smoothing factor of its input. The smoothing factors move outliers from the
activations to the weights (SmoothQuant, 2211.10438, section 4).

An activation is quantised to one or two int8 codes. The second code is the quantised rounding error
of the first code. The activations of a layer get two codes if calibration shows that one code is
not accurate enough.

Dimensions: D inputs and O outputs of a linear layer.
"""

from dataclasses import dataclass

import torch

MAX_INT8_CODE = 127


@dataclass(frozen=True)
class Int8Weights:
    """The quantised weights of a linear layer, as `infer.int8_cpu.kernels.linear` reads them."""

    codes: torch.Tensor  # (O, D) int8
    scales: torch.Tensor  # (O,) float32, factors of the codes
    smoothing: torch.Tensor  # (D,) float32, factors of the activations before quantisation
    codes_per_activation: int  # 1 or 2
    bias: torch.Tensor | None = None  # (O,) float32

    @property
    def weight(self) -> torch.Tensor:
        """The dequantised weight, (D, O) float32 like that of `LinearWeights`.

        It is computed on each access.
        """
        return (self.codes * self.scales[:, None] * self.smoothing).t()


def compute_weight_scales(weight: torch.Tensor) -> torch.Tensor:
    """Return scales (O, 1), one for each output of a weight (O, D).

    With these scales the codes are from -MAX_INT8_CODE to MAX_INT8_CODE.
    """
    return weight.abs().amax(1, keepdim=True).clamp(min=1e-30) / MAX_INT8_CODE


def round_weight_to_nearest(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a weight (O, D) by rounding each entry to the nearest code.

    Returns the codes (O, D) int8 and the scales (O, 1).
    """
    scales = compute_weight_scales(weight)
    return (weight / scales).round().to(torch.int8), scales

"""Weights as int8 codes.

A weight has a scale for each output. Activations have a step for each token, after a factor for
each input that moves what is large from activations to weights (SmoothQuant, 2211.10438, section
4). Matmuls whose activations lose most, by measured error, have two digits for each activation.

D inputs, O outputs of a linear layer.
"""

from dataclasses import dataclass

import torch

MAX_CODE = 127


@dataclass(frozen=True)
class Int8Weights:
    """What `linear` of this package reads of a linear layer."""

    codes: torch.Tensor  # (O, D) int8
    scales: torch.Tensor  # (O,) of the codes
    smooth: torch.Tensor  # (D,) that activations are multiplied by
    digits: int  # of activations
    bias: torch.Tensor | None = None

    @property
    def weight(self) -> torch.Tensor:
        """What the codes stand for, made anew, as `infer.kernels.operands.Linear` has it: (D, O)
        float32."""
        return (self.codes * self.scales[:, None] * self.smooth).t()


def scales_of(weight: torch.Tensor) -> torch.Tensor:
    """Return the scale of every output, (O, 1), of a weight (O, D) whose codes keep within
    MAX_CODE."""
    return weight.abs().amax(1, keepdim=True).clamp(min=1e-30) / MAX_CODE


def round_to_nearest(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes (O, D) int8 and scales (O, 1) of a weight (O, D), each entry rounded by
    itself."""
    scales = scales_of(weight)
    return (weight / scales).round().to(torch.int8), scales

"""The operations of targets and drafters with int8 weights, for `infer.kernels.table`.

Linear layers multiply int8 codes, and attention has a fixed summation order. The other operations
are those of `infer.kernels.cpu` in float32.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import torch
from torch import nn

from infer.int8_cpu.attention import attend
from infer.int8_cpu.matmul import count_padded_rows, matmul
from infer.int8_cpu.quantisation import argmax_outputs, dequantise_outputs, quantise_activations
from infer.int8_cpu.weights import Int8Weights
from infer.kernels import cpu, reference
from infer.kernels.operands import LinearWeights
from infer.kernels.table import FastKernels
from infer.kernels.validation import (
    WRONG_KERNEL_TOKENS_MESSAGE,
    describe_difference,
    make_normal_tensor,
)


def compute_accumulators(
    states: torch.Tensor, weights: Int8Weights
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise hidden states, and multiply their int8 codes by the codes of the weights.

    states: (positions, inputs)

    Returns the int32 results, (codes per activation * positions, outputs), and the scales of the
    hidden states' codes, (positions,).
    """
    rows = weights.codes_per_activation * len(states)
    padded_rows = count_padded_rows(rows, weights.codes)
    codes, scales = quantise_activations(
        states, weights.smoothing, weights.codes_per_activation, padded_rows
    )
    return matmul(codes, weights.codes, rows), scales


def linear(states: torch.Tensor, weights: Int8Weights | LinearWeights) -> torch.Tensor:
    """Implement `infer.kernels.reference.linear` for int8 weights.

    For weights that are not quantised (`LinearWeights`), the reference implementation is used.
    """
    if not isinstance(weights, Int8Weights):
        return reference.linear(states, weights)
    accumulators, scales = compute_accumulators(states, weights)
    return dequantise_outputs(accumulators, scales, weights)


def argmax_head(states: torch.Tensor, head: nn.Module) -> torch.Tensor:
    """Implement `infer.kernels.reference.argmax_head` for a head that is an `Int8Linear`."""
    weights = cast(Int8Weights, head.int8_weights)
    accumulators, scales = compute_accumulators(states.flatten(0, -2), weights)
    return argmax_outputs(accumulators, scales, weights).view(states.shape[:-1])


def make_random_weights(outputs: int) -> Int8Weights:
    """Return random int8 weights of a linear layer with 48 inputs, for the checks in this
    module."""
    generator = torch.Generator().manual_seed(outputs)
    codes = torch.randint(-127, 128, (outputs, 48), dtype=torch.int8, generator=generator)
    scales = torch.rand(outputs, generator=generator) / 127
    smoothing = torch.rand(48, generator=generator) + 0.5
    bias = torch.randn(outputs, generator=generator)
    return Int8Weights(codes, scales, smoothing, codes_per_activation=2, bias=bias)


def check_int8_linear(operation: Callable, device: torch.device) -> str:
    """Compare an implementation of `linear` for int8 weights with a matmul of dequantised weights.

    Returns a description of the difference, or "" if the results agree.
    """
    weights = make_random_weights(20)
    states = make_normal_tensor(device, 5, 48)
    dequantised = LinearWeights(weights.transposed_weight, weights.bias)
    return describe_difference(operation(states, weights), reference.linear(states, dequantised))


def check_int8_argmax_head(operation: Callable, device: torch.device) -> str:
    """Compare an implementation of `argmax_head` for int8 weights with the argmax of `linear`.

    Returns a description of the difference, or "" if the results agree.
    """
    weights = make_random_weights(2500)
    states = make_normal_tensor(device, 2, 5, 48)
    expected = linear(states.flatten(0, 1), weights).argmax(-1).view(2, 5)
    if torch.equal(operation(states, SimpleNamespace(int8_weights=weights)), expected):
        return ""
    return WRONG_KERNEL_TOKENS_MESSAGE


CPU_INT8_FAST_KERNELS = FastKernels(
    operations=cpu.CPU_FUNCTIONS_BY_OPERATION
    | {"linear": linear, "argmax_head": argmax_head, "attend": attend},
    checks={"linear": check_int8_linear, "argmax_head": check_int8_argmax_head},
    extra_fields={
        "supports_ragged": True,
        "recording_decoder": "infer.int8_cpu.recording:RecordingDecoder",
    },
)

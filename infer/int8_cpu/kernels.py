"""The operations of int8 layers, for the table of `infer.kernels`: those of the CPU in float32,
attention whose sums have one order, and matmuls of codes."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import nn

from infer.int8_cpu.attention import attend
from infer.int8_cpu.matmul import matmul, padded_rows
from infer.int8_cpu.rows import argmax_of_sums, dequantise_sums, quantise
from infer.int8_cpu.weights import Int8Weights
from infer.kernels import cpu, reference
from infer.kernels.operands import Linear
from infer.kernels.validation import difference, normal


def code_sums(states: torch.Tensor, weights: Int8Weights) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums (digits N, O) int32 of states (N, D), as codes, times the weights' codes; and
    the steps (N,) of the states' codes."""
    rows = weights.digits * len(states)
    codes, steps = quantise(
        states, weights.smooth, weights.digits, padded_rows(rows, weights.codes)
    )
    return matmul(codes, weights.codes, rows), steps


def linear(states: torch.Tensor, weights: Int8Weights | Linear) -> torch.Tensor:
    """See `infer.kernels.reference.linear`."""
    if not isinstance(weights, Int8Weights):
        return reference.linear(states, weights)
    return dequantise_sums(*code_sums(states, weights), weights)


def argmax_head(states: torch.Tensor, head: nn.Module) -> torch.Tensor:
    """See `infer.kernels.reference.argmax_head`; head: an `Int8Linear`."""
    weights = head.operand
    flat = states.flatten(0, -2)
    return argmax_of_sums(*code_sums(flat, weights), weights).view(states.shape[:-1])


def example_weights(outputs: int) -> Int8Weights:
    """Return the operand of a linear layer of random codes."""
    generator = torch.Generator().manual_seed(outputs)
    codes = torch.randint(-127, 128, (outputs, 48), dtype=torch.int8, generator=generator)
    scales = torch.rand(outputs, generator=generator) / 127
    smooth = torch.rand(48, generator=generator) + 0.5
    bias = torch.randn(outputs, generator=generator)
    return Int8Weights(codes, scales, smooth, 2, bias)


def check_linear(operation: Callable, device: torch.device) -> str:
    """Compare with the matmul of the floats that the codes stand for."""
    weights = example_weights(20)
    states = normal(device, 5, 48)
    return difference(operation(states, weights), reference.linear(states, weights))


def check_argmax_head(operation: Callable, device: torch.device) -> str:
    """Compare with the largest of the floats that `linear` returns."""
    weights = example_weights(2500)
    states = normal(device, 2, 5, 48)
    expected = linear(states.flatten(0, 1), weights).argmax(-1).view(2, 5)
    same = torch.equal(operation(states, SimpleNamespace(operand=weights)), expected)
    return "" if same else "it finds other tokens than the reference"


OPERATIONS = cpu.OPERATIONS | {"linear": linear, "argmax_head": argmax_head, "attend": attend}
FEATURES = {"ragged": True, "recording_decoder": "infer.int8_cpu.recording:RecordedDecoder"}
CHECKS = {
    "linear": check_linear,
    "argmax_head": check_argmax_head,
}  # instead of those for float32 weights

"""The Triton kernels between the matmuls of a layer compute what their references compute, on a GPU
or in Triton's interpreter.

N positions, L layers, H query heads, K key heads, E head size, R rotated features.
"""

import os
import random

import pytest
import torch
from torch.nn import functional as F

from infer.attention.kv_cache import KVCache
from infer.kernels import reference
from infer.kernels.operands import (
    SILU_COEFFICIENTS,
    TANH_GELU_COEFFICIENTS,
    Activation,
    RMSNormWeights,
)

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device, or Triton with TRITON_INTERPRET=1", allow_module_level=True)
from infer.kernels import triton_rows  # noqa: E402
from infer.kernels.validation import (  # noqa: E402
    check_add_rms_norm,
    check_gated_activation,
    check_qk_norm_rope_write,
    check_rms_norm,
)

ROWS_TEST_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter truncates to bfloat16 instead of rounding.
RTOL_BY_DTYPE = {torch.float32: 1e-6, torch.bfloat16: 4e-3 if torch.cuda.is_available() else 9e-3}
HIDDEN_SIZES = [64, 96, 576, 2560, 2880]  # of SmolLM2, Qwen3-4B, gpt-oss and made-up models
# (H, K, E, R), of Qwen3, SmolLM2, Phi (part of the features rotated), MHA and without rotation
HEAD_SHAPES = [(32, 8, 128, 128), (9, 3, 64, 64), (4, 1, 80, 40), (8, 8, 96, 96), (14, 2, 64, 0)]
PROMPT_POSITIONS = 150  # positions of a prefill, in each of two batch rows


def make_normal_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(ROWS_TEST_DEVICE, dtype)


def assert_close_in_norm(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that the relative error, in the 2-norm over all entries, is only rounding."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    error = (actual.double() - expected.double()).norm()
    assert error <= RTOL_BY_DTYPE[actual.dtype] * expected.double().norm()


def make_norm(*shape: int, dtype: torch.dtype) -> RMSNormWeights:
    return RMSNormWeights(make_normal_tensor(*shape, dtype=dtype), 1e-5)


def test_the_kernels_pass_their_validation():
    assert check_rms_norm(triton_rows.rms_norm, ROWS_TEST_DEVICE) == ""
    assert check_add_rms_norm(triton_rows.add_rms_norm, ROWS_TEST_DEVICE) == ""
    assert check_gated_activation(triton_rows.gated_activation, ROWS_TEST_DEVICE) == ""
    assert check_qk_norm_rope_write(triton_rows.qk_norm_rope_write, ROWS_TEST_DEVICE) == ""


@pytest.mark.parametrize("dtype", RTOL_BY_DTYPE, ids=str)
@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
def test_norms(hidden_size, dtype):
    positions = random.Random(hidden_size).randrange(2, 9)
    states = make_normal_tensor(positions, hidden_size, dtype=dtype)
    sublayer_output = make_normal_tensor(positions + 1, hidden_size, dtype=dtype)[1:]
    for weight_dtype in (dtype, torch.float32):  # Gemma's norms have float32 weights
        norm = make_norm(hidden_size, dtype=weight_dtype)
        # The reference in float32, so that only the kernel rounds.
        wide_norm = RMSNormWeights(norm.weight.float(), norm.eps)
        assert_close_in_norm(
            triton_rows.rms_norm(states, norm),
            reference.rms_norm(states.float(), wide_norm).to(dtype),
        )
        for scale in (1.0, 0.22):
            summed, normed = triton_rows.add_rms_norm(states, sublayer_output, norm, scale)
            expected_sum = (states.float() + scale * sublayer_output.float()).to(dtype)
            assert_close_in_norm(summed, expected_sum)
            expected = reference.rms_norm(expected_sum.float(), wide_norm).to(dtype)
            assert_close_in_norm(normed, expected)
            # The first position alone has the same bits.
            alone = triton_rows.add_rms_norm(states[:1], sublayer_output[:1], norm, scale)
            assert torch.equal(alone[0], summed[:1])
            assert torch.equal(alone[1], normed[:1])


@pytest.mark.parametrize("dtype", RTOL_BY_DTYPE, ids=str)
@pytest.mark.parametrize("mlp_size", [96, 1536, 2731])
def test_gated_activation(mlp_size, dtype):
    gate_up = 5 * make_normal_tensor(4, 2 * mlp_size, dtype=dtype)

    def tanh_gelu(states: torch.Tensor) -> torch.Tensor:
        return F.gelu(states, approximate="tanh")

    silu = Activation(F.silu, SILU_COEFFICIENTS)
    gelu = Activation(tanh_gelu, TANH_GELU_COEFFICIENTS)
    for activation in (silu, gelu):
        actual = triton_rows.gated_activation(gate_up, activation)
        expected = reference.gated_activation(gate_up.float(), activation).to(dtype)
        assert_close_in_norm(actual, expected)
        assert torch.equal(triton_rows.gated_activation(gate_up[:1], activation), actual[:1])


def test_an_activation_of_another_form_is_computed_by_the_reference():
    gate_up = make_normal_tensor(3, 128)
    activation = Activation(F.relu)
    expected = reference.gated_activation(gate_up, activation)
    assert torch.equal(triton_rows.gated_activation(gate_up, activation), expected)


def run_qk_norm_rope_write(operation, projected, key_heads, norm, rotation, width):
    """Return the queries, and the cache contents, of two batch rows with `width` new positions."""
    layers, _, head_size = projected.shape[1:]
    sizes = dict.fromkeys(range(layers + 1), ((key_heads, head_size),) * 2)
    cache = KVCache(sizes, 3, 2 * width + 12, projected.dtype, ROWS_TEST_DEVICE)
    with cache.add_rows(2) as rows:
        rows.advance_lengths([5, 9])
        layer_cache = rows.make_view(width).layer_views()[1]
        queries = operation(projected.clone(), key_heads, norm, rotation, layer_cache)
    assert not cache.buffer[:2].any(), "another layer's memory was written to"
    return queries, cache.buffer.clone()


@pytest.mark.parametrize("dtype", RTOL_BY_DTYPE, ids=str)
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("shape", HEAD_SHAPES, ids=str)
def test_qk_norm_rope_write(shape, layers, has_norm, dtype):
    heads, key_heads, head_size, rotated_size = shape
    heads = heads if layers == 1 else 0  # several layers: a drafter's context, without queries
    width = 3
    projected_shape = (2 * width, layers, heads + 2 * key_heads, head_size)
    projected = make_normal_tensor(*projected_shape, dtype=dtype)
    norm = make_norm(layers, heads + key_heads, head_size, dtype=dtype) if has_norm else None
    rotation = None
    if rotated_size:
        angles = make_normal_tensor(2 * width, 1, rotated_size)
        rotation = angles.cos().to(dtype), angles.sin().to(dtype)

    arguments = (key_heads, norm, rotation, width)
    actual = run_qk_norm_rope_write(triton_rows.qk_norm_rope_write, projected, *arguments)
    wide_norm = norm and RMSNormWeights(norm.weight.float(), norm.eps)
    wide_rotation = rotation and (rotation[0].float(), rotation[1].float())
    wide = (key_heads, wide_norm, wide_rotation, width)
    expected = run_qk_norm_rope_write(reference.qk_norm_rope_write, projected.float(), *wide)
    for actual_part, expected_part in zip(actual, expected, strict=True):
        assert_close_in_norm(actual_part, expected_part.to(dtype))


def test_a_position_has_the_same_bits_beside_hundreds_of_others():
    projected = make_normal_tensor(2 * PROMPT_POSITIONS, 1, 8, 32)
    norm = make_norm(1, 6, 32, dtype=torch.float32)
    angles = make_normal_tensor(2 * PROMPT_POSITIONS, 1, 32)
    rotation = angles.cos(), angles.sin()
    operation = triton_rows.qk_norm_rope_write
    many, _ = run_qk_norm_rope_write(operation, projected, 2, norm, rotation, PROMPT_POSITIONS)
    first_rows = [0, PROMPT_POSITIONS]
    first_rotation = angles[first_rows].cos(), angles[first_rows].sin()
    few, _ = run_qk_norm_rope_write(
        operation, projected[first_rows], 2, norm, first_rotation, width=1
    )
    assert torch.equal(many[first_rows], few)

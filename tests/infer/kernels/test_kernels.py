"""Fast versions of operations against their references.

N positions, L layers, H query heads, K key/value heads, E head size, R rotated features.
"""

from dataclasses import replace
from pkgutil import resolve_name

import pytest
import torch

from infer.attention.kv_cache import KVCache
from infer.kernels import cpu, reference, table
from infer.kernels.operands import (
    SILU_COEFFICIENTS,
    TANH_GELU_COEFFICIENTS,
    Activation,
    RMSNormWeights,
)
from infer.kernels.validation import KERNEL_CHECKS_BY_OPERATION

CPU_DEVICE = torch.device("cpu")


def make_normal_tensor(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", [(3, 40), (2, 3, 192)])
def test_rms_norm(shape):
    norm = RMSNormWeights(make_normal_tensor(shape[-1]), 1e-5)
    states = 0.01 * make_normal_tensor(*shape)
    actual = cpu.rms_norm(states, norm)
    torch.testing.assert_close(actual, reference.rms_norm(states, norm))
    torch_output = torch.nn.functional.rms_norm(states, shape[-1:], norm.weight, 1e-5)
    torch.testing.assert_close(actual, torch_output)


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_add_rms_norm(scale):
    norm = RMSNormWeights(make_normal_tensor(40), 1e-5)
    states = make_normal_tensor(3, 40)
    sublayer_output = make_normal_tensor(4, 40)[1:]
    summed, normed = cpu.add_rms_norm(states, sublayer_output, norm, scale)
    expected_sum = states + scale * sublayer_output
    torch.testing.assert_close(summed, expected_sum)
    torch.testing.assert_close(normed, reference.rms_norm(expected_sum, norm))


def test_gated_activation():
    gate_up = 30 * make_normal_tensor(3, 128)
    silu = Activation(torch.nn.functional.silu, SILU_COEFFICIENTS)
    torch.testing.assert_close(
        cpu.gated_activation(gate_up, silu), reference.gated_activation(gate_up, silu)
    )

    def tanh_gelu(states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(states, approximate="tanh")

    gelu = Activation(tanh_gelu, TANH_GELU_COEFFICIENTS)
    expected = reference.gated_activation(gate_up, gelu)
    torch.testing.assert_close(cpu.gated_activation(gate_up, gelu), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("heads", "key_heads", "layers", "has_norm", "rotated_size"),
    [
        (6, 2, 1, True, 8),
        (4, 4, 1, False, 4),
        (6, 1, 1, True, 0),
        (3, 3, 1, False, 0),
        (0, 2, 3, True, 8),
    ],
)
def test_qk_norm_rope_write(heads, key_heads, layers, has_norm, rotated_size):
    rows = 2
    width = 3
    size = 8
    norm = None
    if has_norm:
        norm = RMSNormWeights(make_normal_tensor(layers, heads + key_heads, size), 1e-5)
    rotation = None
    if rotated_size:
        angles = make_normal_tensor(rows * width, 1, rotated_size)
        rotation = angles, angles.clone()
    results = []
    for operation in (cpu.qk_norm_rope_write, reference.qk_norm_rope_write):
        sizes = dict.fromkeys(range(4), ((key_heads, size),) * 2)
        cache = KVCache(sizes, rows + 1, 20, torch.float32, CPU_DEVICE)
        with cache.add_rows(2) as new_rows:  # their memory does not start where the cache's does
            new_rows.advance_lengths([5, 9])
            layer_cache = new_rows.make_view(width).layer_views()[1]
            projected = make_normal_tensor(rows * width, layers, heads + 2 * key_heads, size)
            queries = operation(projected, key_heads, norm, rotation, layer_cache)
        results.append((queries, cache.buffer.clone()))
        assert not cache.buffer[:2].any(), "another layer's memory was written to"
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("entry", table.FAST_KERNEL_TABLE_PATHS.values())
def test_every_fast_version_has_a_check(entry):
    pytest.importorskip(entry.partition(":")[0], exc_type=ImportError)
    operations = resolve_name(entry).operations
    assert operations.keys() <= KERNEL_CHECKS_BY_OPERATION.keys()
    assert KERNEL_CHECKS_BY_OPERATION.keys() <= set(table.Kernels.__dataclass_fields__)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=["float32", "int8"])
def test_fast_versions_that_compute_the_same_are_used(dtype):
    operations = resolve_name(table.FAST_KERNEL_TABLE_PATHS["cpu", dtype]).operations
    kernels = table.select_kernels(CPU_DEVICE, dtype)
    assert all(getattr(kernels, name) is operation for name, operation in operations.items())


def scaled_rms_norm(states, norm):
    return 1.1 * reference.rms_norm(states, norm)


def failing_rms_norm(*_):
    raise AssertionError  # an exception without a message


@pytest.mark.parametrize("operation", [scaled_rms_norm, failing_rms_norm])
def test_a_fast_version_that_differs_or_fails_is_not_used(operation, monkeypatch):
    operations = cpu.CPU_FUNCTIONS_BY_OPERATION | {"rms_norm": operation}
    wrong_kernels = replace(cpu.CPU_FAST_KERNELS, operations=operations)
    monkeypatch.setattr(cpu, "CPU_FAST_KERNELS", wrong_kernels)
    monkeypatch.setattr(table, "VALIDATED_KERNELS_CACHE", {})
    with pytest.warns(UserWarning, match="the PyTorch implementation of rms_norm is used"):
        kernels = table.select_kernels(CPU_DEVICE, torch.float32)
    assert kernels.rms_norm is reference.rms_norm
    assert kernels.add_rms_norm is cpu.add_rms_norm

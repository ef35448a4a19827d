"""Fast versions of operations against their references."""

import pytest
import torch

from infer.attention.kv_cache import KVCache
from infer.kernels import cpu, reference, table
from infer.kernels.operands import SILU_COEFFICIENTS, TANH_GELU_COEFFICIENTS, Activation, Norm
from infer.kernels.validation import CHECKS

CPU = torch.device("cpu")


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", [(3, 40), (2, 3, 192)])
def test_norms(shape):
    norm = Norm(normal(shape[-1]), 1e-5)
    states = 0.01 * normal(*shape)
    found = cpu.rms_norm(states, norm)
    torch.testing.assert_close(found, reference.rms_norm(states, norm))
    torch.testing.assert_close(
        found, torch.nn.functional.rms_norm(states, shape[-1:], norm.weight, 1e-5)
    )


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_added_norms(scale):
    norm = Norm(normal(40), 1e-5)
    states = normal(3, 40)
    change = normal(4, 40)[1:]
    summed, normed = cpu.add_rms_norm(states, change, norm, scale)
    torch.testing.assert_close(summed, states + scale * change)
    torch.testing.assert_close(normed, reference.rms_norm(states + scale * change, norm))


def test_gated_activations():
    both = 30 * normal(3, 128)
    silu = Activation(torch.nn.functional.silu, SILU_COEFFICIENTS)
    torch.testing.assert_close(
        cpu.gated_activation(both, silu), reference.gated_activation(both, silu)
    )

    def tanh_gelu(states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(states, approximate="tanh")

    gelu = Activation(tanh_gelu, TANH_GELU_COEFFICIENTS)
    expected = reference.gated_activation(both, gelu)
    torch.testing.assert_close(cpu.gated_activation(both, gelu), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("heads", "key_heads", "layers", "normed", "rotated"),
    [
        (6, 2, 1, True, 8),
        (4, 4, 1, False, 4),
        (6, 1, 1, True, 0),
        (3, 3, 1, False, 0),
        (0, 2, 3, True, 8),
    ],
)
def test_heads_on_their_way_into_attention(heads, key_heads, layers, normed, rotated):
    rows = 2
    width = 3
    size = 8
    norm = Norm(normal(layers, heads + key_heads, size), 1e-5) if normed else None
    rotation = None
    if rotated:
        rotation = normal(rows * width, 1, rotated), normal(rows * width, 1, rotated)
    results = []
    for operation in (cpu.qk_norm_rope_write, reference.qk_norm_rope_write):
        sizes = dict.fromkeys(range(4), ((key_heads, size),) * 2)
        cache = KVCache(sizes, rows + 1, 20, torch.float32, CPU)
        with cache.add(2) as part:  # its memory begins in the middle of the cache's
            part.advance([5, 9])
            memory = part.window(width).layers()[1]
            projected = normal(rows * width, layers, heads + 2 * key_heads, size)
            queries = operation(projected, key_heads, norm, rotation, memory)
        results.append((queries, cache.buffer.clone()))
        assert not cache.buffer[:2].any(), "another layer's memory was written to"
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("module", table.FAST_VERSIONS.values())
def test_every_fast_version_has_a_check(module):
    pytest.importorskip(module, exc_type=ImportError)
    operations = table.import_module(module).OPERATIONS
    assert operations.keys() <= CHECKS.keys() <= set(table.Kernels.__dataclass_fields__)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=["float32", "int8"])
def test_fast_versions_that_compute_the_same_are_used(dtype):
    operations = table.import_module(table.FAST_VERSIONS["cpu", dtype]).OPERATIONS
    kernels = table.kernels_for(CPU, dtype)
    assert all(getattr(kernels, name) is operation for name, operation in operations.items())


def fail(*_):
    raise AssertionError  # without a word


@pytest.mark.parametrize(
    "operation", [lambda states, norm: 1.1 * reference.rms_norm(states, norm), fail]
)
def test_a_fast_version_that_differs_or_fails_is_not_used(operation, monkeypatch):
    monkeypatch.setattr(cpu, "OPERATIONS", cpu.OPERATIONS | {"rms_norm": operation})
    monkeypatch.setattr(table, "VALIDATED", {})
    with pytest.warns(UserWarning, match="rms_norm runs without its fast version"):
        kernels = table.kernels_for(CPU, torch.float32)
    assert kernels.rms_norm is reference.rms_norm
    assert kernels.add_rms_norm is cpu.add_rms_norm

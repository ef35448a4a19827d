"""The compiled loops of the lean pass against tensor operations."""

import pytest
import torch

from infer.attention.kv_cache import KVCache
from infer.targets.lean import Layer, Norm
from infer.trees import compiled


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", [(3, 40), (2, 3, 192)])
def test_norms(shape, monkeypatch):
    norm, states = Norm(normal(shape[-1]), 1e-5), 0.01 * normal(*shape)
    found = norm(states)
    monkeypatch.setattr(compiled, "available", lambda tensor: False)
    torch.testing.assert_close(found, norm(states))
    torch.testing.assert_close(norm(states), torch.nn.functional.rms_norm(states, shape[-1:], norm.weight, 1e-5))


@pytest.mark.parametrize(
    ("heads", "shared", "normed", "rotated"), [(6, 2, True, 8), (4, 4, False, 4), (6, 1, True, 0), (3, 3, False, 0)]
)
def test_heads_on_their_way_into_attention(heads, shared, normed, rotated, monkeypatch):
    rows, width, size, count = 2, 3, 8, heads + 2 * shared
    qk_norm = Norm(normal(heads + shared, size), 1e-5) if normed else None
    layer = Layer("", heads, shared, (), None, None, qk_norm, None, None, None, 1.0, 1.0, rotates=rotated > 0)
    rotation = normal(rows * width, 1, rotated), normal(rows * width, 1, rotated)
    found = []
    for available in (True, False):
        monkeypatch.setattr(compiled, "available", lambda tensor, here=available: here)
        cache = KVCache(
            dict.fromkeys(range(2), ((shared, size),) * 2), rows + 1, 20, torch.float32, torch.device("cpu")
        )
        with cache.add(2) as part:  # its memory begins in the middle of the cache's
            part.advance([5, 9])
            memory = part.window(width).layers()[1]
            heads_of_two = normal(rows * width, 2, count, size)  # layers, side by side
            queries = layer.place(heads_of_two[:, 1], rotation, memory)
            found.append((queries, memory.keys.clone(), memory.values.clone()))
        assert not cache.buffer[:2].any(), "another layer's memory was written to"
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)

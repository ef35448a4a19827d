"""The compiled loops of the lean pass against tensor operations."""

import pytest
import torch
from transformers import Qwen3Config

from infer.attention.kv_cache import KVCache
from infer.targets import loops
from infer.targets.lean import Layer, Norm, Product
from infer.trees import compiled
from infer.utils import jit

pytestmark = pytest.mark.skipif(not jit.AVAILABLE, reason="numba is not installed")


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 17, loops.ROWS])
def test_products_of_few_rows(rows):
    states, weight, bias, before = normal(rows, 40), normal(40, 96), normal(96), normal(rows, 96)
    plain, biased = Product(weight).turned(), Product(weight, bias).turned()
    assert plain.compiled(states) and not plain.compiled(normal(loops.ROWS + 1, 40))
    kept = before.clone()
    expected = states.double() @ weight.double()
    for found, more in ((plain(states), 0), (biased(states), bias), (plain.onto(before, states, 1.0), before)):
        torch.testing.assert_close(found, (expected + more).float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(before, kept), "what was there before is another's"
    alone = torch.cat([plain(row[None]) for row in states])
    assert torch.equal(alone, plain(states)), "a row depends on those beside it"
    turned = plain(states.t().contiguous().t())
    assert torch.equal(turned, plain(states)), "strides were not looked at"


def test_products_that_have_no_panels():
    for weight in (normal(40, 97), normal(40, 96).double(), normal(40, 96).bfloat16()):
        product = Product(weight.t().contiguous().t()).turned()
        assert product.panels is None and product.weight.is_contiguous()


def test_large_products_are_left_to_all_threads():
    product = Product(normal(1024, 640)).turned()
    assert product.compiled(normal(7, 1024)) and not product.compiled(normal(8, 1024))


def test_a_head_is_compiled_unless_someone_replaced_what_it_does(random_target):
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32, "head_dim": 8}
    for replaced in (False, True):
        target = random_target(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2))
        head, states = target.model.lm_head, normal(1, 3, 32)
        expected = states @ head.weight.t()
        if replaced:
            head.forward = lambda states, found=expected: found + 1
        torch.testing.assert_close(target.head(states), expected + replaced)


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
        cache = KVCache(2, rows + 1, 20, shared, size, torch.float32, torch.device("cpu"))
        with cache.add(2) as part:  # its memory begins in the middle of the cache's
            part.advance([5, 9])
            memory = part.window(width).layers()[1]
            heads_of_two = normal(rows * width, 2, count, size)  # layers, side by side
            queries = layer.place(heads_of_two[:, 1], rotation, memory)
            found.append((queries, memory.keys.clone(), memory.values.clone()))
        assert not cache.buffer[:2].any(), "another layer's memory was written to"
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)

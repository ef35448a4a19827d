"""Checks of fast versions against the reference, on small random inputs, when they are selected.
Each check takes an operation and a device, and returns what differs, or an empty string."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch.nn import functional as F

from infer.attention.kv_cache import KVCache, Window
from infer.attention.masks import tree_mask
from infer.kernels import reference
from infer.kernels.operands import SILU_COEFFICIENTS, Activation, Linear, Norm
from infer.kernels.reference_search import search_by_depth

MAX_DIFFERENCE = 1e-2


def normal(device: torch.device, *shape: int) -> torch.Tensor:
    """Return the same normal numbers for the same shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device)


def difference(found: torch.Tensor, expected: torch.Tensor) -> str:
    """Return a sentence if two results differ by more than rounding."""
    largest = float((found - expected).abs().max())
    return (
        ""
        if largest < MAX_DIFFERENCE
        else f"its results differ from the reference by {largest:.3g}"
    )


def check_rms_norm(operation: Callable, device: torch.device) -> str:
    states = normal(device, 5, 48)
    norm = Norm(normal(device, 48), 1e-5)
    return difference(operation(states, norm), reference.rms_norm(states, norm))


def check_add_rms_norm(operation: Callable, device: torch.device) -> str:
    states = normal(device, 5, 48)
    change = normal(device, 6, 48)[1:]
    norm = Norm(normal(device, 48), 1e-5)
    expected = reference.add_rms_norm(states, change, norm, 0.5)
    return difference(torch.cat(operation(states, change, norm, 0.5)), torch.cat(expected))


def check_gated_activation(operation: Callable, device: torch.device) -> str:
    both = normal(device, 5, 48)
    activation = Activation(F.silu, SILU_COEFFICIENTS)
    return difference(operation(both, activation), reference.gated_activation(both, activation))


def check_linear(operation: Callable, device: torch.device) -> str:
    states = normal(device, 5, 48)
    weights = Linear(normal(device, 48, 20), normal(device, 20))
    return difference(operation(states, weights), reference.linear(states, weights))


def cache_window(device: torch.device, width: int) -> Window:
    """Return a window of `width` new positions of a small cache of two layers, two heads of 24 and
    two batch rows."""
    cache = KVCache(dict.fromkeys(range(2), ((2, 24), (2, 24))), 2, 90, torch.float32, device)
    with cache.add(2) as rows:
        rows.advance([75, 3])
    cache.buffer.copy_(normal(device, *cache.buffer.shape))
    return cache.window(width)


def check_qk_norm_rope_write(operation: Callable, device: torch.device) -> str:
    projected = normal(device, 12, 1, 10, 24)
    rotation = normal(device, 12, 1, 24), normal(device, 13, 1, 24)[1:]
    norm = Norm(normal(device, 1, 8, 24), 1e-5)
    results = []
    for run in (operation, reference.qk_norm_rope_write):
        window = cache_window(device, 6)
        queries = run(projected.clone(), 2, norm, rotation, window.layers()[1])
        results.append(torch.cat([queries.flatten(), window.cache.buffer.flatten()]))
    return difference(*results)


def check_attend(operation: Callable, device: torch.device) -> str:
    return check_tree_attention(
        device, lambda *given: (operation(*given), reference.attend(*given))
    )


def check_attention(operation: Callable, device: torch.device) -> str:
    def run_both(queries, memory, mask, scale):
        found = reference.attend_by(operation, queries, memory, mask, scale)
        return found, reference.attend(queries, memory, mask, scale)

    return check_tree_attention(device, run_both)


def check_tree_attention(device: torch.device, run_both: Callable) -> str:
    """Compare two results of attention over a cache under a tree's mask with a window."""
    window = cache_window(device, 6)
    inside = torch.eye(6, dtype=torch.bool) | (normal(torch.device("cpu"), 2, 6, 6) < 0).tril()
    steps = torch.tensor([0, 1, 1, 2, 3, 3], device=device)
    ends = window.cache.ends
    mask = tree_mask(ends, ends[:, None] + steps, inside.to(device), window.extent, 9)
    return difference(*run_both(normal(device, 12, 6, 24), window.layers()[1], mask, 0.2))


def check_argmax_head(operation: Callable, device: torch.device) -> str:
    states = normal(device, 2, 5, 48)
    weight = normal(device, 48, 20)

    def head(states: torch.Tensor) -> torch.Tensor:
        return states @ weight

    if torch.equal(operation(states, head), reference.argmax_head(states, head)):
        return ""
    return "it finds other tokens than the reference"


def check_best_first_search(operation: Callable, device: torch.device) -> str:
    first = normal(device, 2, 5).sort(dim=1, descending=True).values
    others = normal(device, 2, 3, 5, 5)
    tokens = torch.arange(40, device=device).view(2, 4, 5)
    candidates = SimpleNamespace(tokens=tokens, table=(first - 3, others - 3), recurrent=False)
    found = operation(candidates, 9)
    expected = search_by_depth(candidates, 9)
    if all(map(torch.equal, found[:3], expected[:3])):
        return difference(found[3], expected[3])
    return "it finds other nodes than the reference"


CHECKS = {
    "rms_norm": check_rms_norm,
    "add_rms_norm": check_add_rms_norm,
    "qk_norm_rope_write": check_qk_norm_rope_write,
    "attend": check_attend,
    "attention": check_attention,
    "gated_activation": check_gated_activation,
    "linear": check_linear,
    "argmax_head": check_argmax_head,
    "best_first_search": check_best_first_search,
}

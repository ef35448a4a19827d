"""Check fast versions of operations against the reference implementations in PyTorch, on small
random inputs.

`infer.kernels.table` runs these checks before it selects a fast version. Each check has two
arguments: an implementation of an operation, and a device. It returns a sentence that describes how
the results differ from those of the reference implementation, or "" if the results agree.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
from torch.nn import functional as F

from infer.attention.kv_cache import CacheView, KVCache
from infer.attention.masks import build_tree_mask
from infer.kernels import reference
from infer.kernels.operands import SILU_COEFFICIENTS, Activation, LinearWeights, RMSNormWeights
from infer.kernels.reference_search import search_tree_by_depth

MAX_KERNEL_OUTPUT_DIFFERENCE = 1e-2
WRONG_KERNEL_TOKENS_MESSAGE = "the fast version returns other tokens than the reference"
WRONG_KERNEL_NODES_MESSAGE = "the fast version finds other tree nodes than the reference"


def make_normal_tensor(device: torch.device, *shape: int) -> torch.Tensor:
    """Return normally distributed float32 values, always the same values for a shape."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device)


def describe_difference(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """Return a sentence that describes how two results differ, or "" if they only differ by
    rounding errors."""
    largest = float((actual - expected).abs().max())
    if largest < MAX_KERNEL_OUTPUT_DIFFERENCE:
        return ""
    return f"the results of the fast version differ from the reference by up to {largest:.3g}"


def check_rms_norm(operation: Callable, device: torch.device) -> str:
    """Compare an implementation of `rms_norm` with the PyTorch implementation, on five rows."""
    states = make_normal_tensor(device, 5, 48)
    norm = RMSNormWeights(make_normal_tensor(device, 48), 1e-5)
    return describe_difference(operation(states, norm), reference.rms_norm(states, norm))


def check_add_rms_norm(operation: Callable, device: torch.device) -> str:
    """Compare an implementation of `add_rms_norm` with the PyTorch implementation, on five rows."""
    states = make_normal_tensor(device, 5, 48)
    sublayer_output = make_normal_tensor(device, 6, 48)[1:]
    norm = RMSNormWeights(make_normal_tensor(device, 48), 1e-5)
    actual = operation(states, sublayer_output, norm, 0.5)
    expected = reference.add_rms_norm(states, sublayer_output, norm, 0.5)
    return describe_difference(torch.cat(actual), torch.cat(expected))


def check_gated_activation(operation: Callable, device: torch.device) -> str:
    """Compare an implementation of `gated_activation` with the PyTorch implementation, for SiLU."""
    gate_up = make_normal_tensor(device, 5, 48)
    activation = Activation(F.silu, SILU_COEFFICIENTS)
    expected = reference.gated_activation(gate_up, activation)
    return describe_difference(operation(gate_up, activation), expected)


def check_linear(operation: Callable, device: torch.device) -> str:
    """Compare an implementation of `linear` with the PyTorch implementation, for a layer with
    bias."""
    states = make_normal_tensor(device, 5, 48)
    weights = LinearWeights(make_normal_tensor(device, 48, 20), make_normal_tensor(device, 20))
    return describe_difference(operation(states, weights), reference.linear(states, weights))


def make_random_cache_view(device: torch.device, width: int) -> CacheView:
    """Return a view of a small KV cache with random contents.

    width: number of new positions per batch row

    The cache has two layers with two heads of size 24. Its two batch rows have 75 and 3 cached
    positions.
    """
    cache = KVCache(dict.fromkeys(range(2), ((2, 24), (2, 24))), 2, 90, torch.float32, device)
    with cache.add_rows(2) as rows:
        rows.advance_lengths([75, 3])
    cache.buffer.copy_(make_normal_tensor(device, *cache.buffer.shape))
    return cache.make_view(width)


def check_qk_norm_rope_write(operation: Callable, device: torch.device) -> str:
    """Compare an implementation of `qk_norm_rope_write` with the PyTorch implementation.

    Both the queries returned and the cache contents are compared.
    """
    projected = make_normal_tensor(device, 12, 1, 10, 24)
    cosines = make_normal_tensor(device, 12, 1, 24)
    sines = make_normal_tensor(device, 13, 1, 24)[1:]
    norm = RMSNormWeights(make_normal_tensor(device, 1, 8, 24), 1e-5)
    results = []
    for implementation in (operation, reference.qk_norm_rope_write):
        window = make_random_cache_view(device, 6)
        layer_cache = window.layer_views()[1]
        queries = implementation(projected.clone(), 2, norm, (cosines, sines), layer_cache)
        results.append(torch.cat([queries.flatten(), window.cache.buffer.flatten()]))
    return describe_difference(*results)


def check_attend(operation: Callable, device: torch.device) -> str:
    """Compare an implementation of `attend` with the PyTorch implementation.

    The mask combines a draft-tree mask and a sliding window.
    """
    window = make_random_cache_view(device, 6)
    random_pairs = make_normal_tensor(torch.device("cpu"), 2, 6, 6) < 0
    inside = torch.eye(6, dtype=torch.bool) | random_pairs.tril()
    steps = torch.tensor([0, 1, 1, 2, 3, 3], device=device)
    ends = window.cache.device_lengths
    mask = build_tree_mask(ends, ends[:, None] + steps, inside.to(device), window.visible_end, 9)

    queries = make_normal_tensor(device, 12, 6, 24)
    layer_cache = window.layer_views()[1]
    actual = operation(queries, layer_cache, mask, 0.2)
    return describe_difference(actual, reference.attend(queries, layer_cache, mask, 0.2))


def check_attention(operation: Callable, device: torch.device) -> str:
    """Compare an implementation of `attention` with the PyTorch implementation, for queries over a
    KV cache."""
    return check_attend(partial(reference.attend_with, operation), device)


def check_argmax_head(operation: Callable, device: torch.device) -> str:
    """Compare the tokens that an implementation of `argmax_head` returns with those of the PyTorch
    implementation."""
    states = make_normal_tensor(device, 2, 5, 48)
    weight = make_normal_tensor(device, 48, 20)

    def head(states: torch.Tensor) -> torch.Tensor:
        return states @ weight

    if torch.equal(operation(states, head), reference.argmax_head(states, head)):
        return ""
    return WRONG_KERNEL_TOKENS_MESSAGE


def check_best_first_search(operation: Callable, device: torch.device) -> str:
    """Compare an implementation of `best_first_search` with the PyTorch implementation, on two
    small trees."""
    first = make_normal_tensor(device, 2, 5).sort(dim=1, descending=True).values
    others = make_normal_tensor(device, 2, 3, 5, 5)
    tokens = torch.arange(40, device=device).view(2, 4, 5)
    candidates = SimpleNamespace(
        tokens=tokens, candidate_log_probs=(first - 3, others - 3), recurrent=False
    )
    actual = operation(candidates, 9)
    expected = search_tree_by_depth(candidates, 9)
    if all(map(torch.equal, actual[:3], expected[:3])):
        return describe_difference(actual[3], expected[3])
    return WRONG_KERNEL_NODES_MESSAGE


# Key: name of an operation, which is a field of `infer.kernels.table.Kernels`. Value: its check.
KERNEL_CHECKS_BY_OPERATION = {
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

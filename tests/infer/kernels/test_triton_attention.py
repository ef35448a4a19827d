"""Tree attention in Triton equals SDPA under the dense mask (on a GPU or in the interpreter)."""

import os

import pytest
import torch
from torch.nn import functional as F

from infer.attention.masks import build_tree_mask

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device, or Triton with TRITON_INTERPRET=1", allow_module_level=True)
from infer.kernels.cuda import attend, attention  # noqa: E402
from infer.kernels.validation import check_attend, check_attention  # noqa: E402

ATTENTION_TEST_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CACHE_CAPACITY = 400
SLIDING_WINDOW = 40


def test_the_kernel_passes_its_validation():
    assert check_attention(attention, ATTENTION_TEST_DEVICE) == ""
    assert check_attend(attend, ATTENTION_TEST_DEVICE) == ""


def make_random_trees(
    rows: int, nodes: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which nodes each node of a random tree sees, (rows, nodes, nodes) bool, and the depths
    (rows, nodes)."""
    parents = (torch.rand(rows, nodes, generator=generator) * torch.arange(nodes)).long()
    ancestors = torch.eye(nodes, dtype=torch.bool).repeat(rows, 1, 1)
    depths = torch.zeros(rows, nodes, dtype=torch.long)
    for row in range(rows):
        for node in range(1, nodes):
            parent = parents[row, node]
            ancestors[row, node] |= ancestors[row, parent]
            depths[row, node] = depths[row, parent] + 1
    return ancestors, depths


@pytest.mark.parametrize(
    ("rows", "heads", "groups", "nodes", "size", "dtype"),
    [
        (3, 2, 1, 1, 16, torch.float32),
        (2, 2, 4, 17, 128, torch.float32),  # several splits of the keys, several query tiles
        (1, 1, 7, 30, 80, torch.float32),
        pytest.param(2, 8, 4, 65, 128, torch.bfloat16, marks=NEEDS_CUDA),
    ],
)
def test_trees_over_rows_of_all_lengths(rows, heads, groups, nodes, size, dtype):
    device = ATTENTION_TEST_DEVICE
    generator = torch.Generator().manual_seed(nodes)
    keys_values = torch.randn(2, rows, heads, CACHE_CAPACITY, size, generator=generator)
    keys, values = keys_values.to(device, dtype)
    queries = torch.randn(rows, heads, groups * nodes, size, generator=generator).to(device, dtype)
    ancestors, depths = make_random_trees(rows, nodes, generator)
    ancestors = ancestors.to(device)
    lengths = torch.tensor([0, 300, 63][:rows], device=device)
    positions = lengths[:, None] + depths.to(device)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    for window in (None, SLIDING_WINDOW):
        mask = build_tree_mask(lengths, positions, ancestors, CACHE_CAPACITY, window)
        actual = attention(queries, keys, values, mask, size**-0.5)
        dense_mask = mask.dense.repeat(1, 1, groups, 1)
        expected = F.scaled_dot_product_attention(queries, keys, values, attn_mask=dense_mask)
        assert (actual - expected).abs().max() < tolerance

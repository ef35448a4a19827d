"""Attention over a tree in Triton equals SDPA under the dense mask: on a GPU, elsewhere in Triton's
interpreter."""

import os

import pytest
import torch
from torch.nn import functional as F

from infer.attention.masks import tree_mask

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
ON_GPU = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device, or Triton with TRITON_INTERPRET=1", allow_module_level=True)
from infer.kernels.cuda import attention  # noqa: E402
from infer.kernels.triton_attention import tree_attention  # noqa: E402
from infer.kernels.validation import check_attention  # noqa: E402


def test_the_check_at_the_start_passes():
    assert check_attention(attention, DEVICE) == ""


@pytest.mark.parametrize(
    ("rows", "heads", "groups", "nodes", "size", "dtype"),
    [
        (3, 2, 1, 1, 16, torch.float32),
        (2, 8, 4, 17, 128, torch.float32),  # several parts of the keys, several tiles of queries
        (1, 1, 7, 70, 80, torch.float32),
        pytest.param(2, 8, 4, 65, 128, torch.bfloat16, marks=ON_GPU),
    ],
)
def test_trees_over_rows_of_all_lengths(rows, heads, groups, nodes, size, dtype):
    generator = torch.Generator().manual_seed(nodes)
    both = torch.randn(2, rows, heads, 400, size, generator=generator).to(DEVICE, dtype)
    queries = torch.randn(rows, heads, groups * nodes, size, generator=generator).to(DEVICE, dtype)
    parents = (torch.rand(rows, nodes, generator=generator) * torch.arange(nodes)).long()
    inside = torch.eye(nodes, dtype=torch.bool).repeat(rows, 1, 1)
    depths = torch.zeros(rows, nodes, dtype=torch.long)
    for row in range(rows):
        for node in range(1, nodes):
            inside[row, node] |= inside[row, parents[row, node]]
            depths[row, node] = depths[row, parents[row, node]] + 1
    ends = torch.tensor([0, 300, 63][:rows])
    for window in (None, 40):
        mask = tree_mask(
            *(part.to(DEVICE) for part in (ends, ends[:, None] + depths, inside)), 400, window
        )
        found = tree_attention(queries, *both, mask, size**-0.5)
        expected = F.scaled_dot_product_attention(
            queries, *both, attn_mask=mask.dense.repeat(1, 1, groups, 1)
        )
        assert (found - expected).abs().max() < (2e-5 if dtype == torch.float32 else 2e-2)

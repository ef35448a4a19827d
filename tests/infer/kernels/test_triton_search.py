"""The best-first search in Triton finds the nodes of the reference, on a GPU or in Triton's
interpreter.

B batch rows, L drafted positions, M candidates per position.
"""

import os
from types import SimpleNamespace

import pytest
import torch

from infer.kernels.reference_search import search_tree_by_depth

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device, or Triton with TRITON_INTERPRET=1", allow_module_level=True)

SEARCH_TEST_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCORE_KINDS = ["random", "ties", "forbidden"]


def make_log_probs(shape: tuple[int, ...], kind: str, seed: int) -> torch.Tensor:
    """Return log q: random; with ties; or with all but one token forbidden, in the second row
    all."""
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if kind == "forbidden":
        scores[..., 1:] = -torch.inf
        scores[1] = -torch.inf
        return scores.clamp(max=0)
    if kind == "ties":
        scores = scores.round()
    return scores.log_softmax(-1)


@pytest.mark.parametrize("kind", SCORE_KINDS)
@pytest.mark.parametrize(("length", "ranks", "budget"), [(1, 5, 4), (5, 9, 9), (15, 32, 32)])
def test_marginals(length, ranks, budget, kind):
    log_q = make_log_probs((2, length, ranks), kind, budget)
    log_q, tokens = log_q.sort(dim=-1, descending=True, stable=True)
    assert_same_nodes(tokens, (log_q[:, 0], log_q[:, 1:, None]), budget)


@pytest.mark.parametrize("kind", SCORE_KINDS)
@pytest.mark.parametrize(("length", "count", "budget"), [(1, 6, 6), (4, 3, 40), (6, 8, 20)])
def test_tables_of_a_conditional_head(length, count, budget, kind):
    first = make_log_probs((2, count), kind, count)
    others = make_log_probs((2, length - 1, count, count), kind, 1)
    generator = torch.Generator().manual_seed(count)
    tokens = torch.randint(1000, (2, length, count), generator=generator)
    assert_same_nodes(tokens, (first, others), budget)


def assert_same_nodes(
    tokens: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor], budget: int
) -> None:
    """Compare both searches over candidates (B, L, M) with tables of log q."""
    from infer.kernels.triton_search import best_first_search

    candidates = SimpleNamespace(recurrent=False, tokens=tokens, candidate_log_probs=table)
    device_table = tuple(log_q.to(SEARCH_TEST_DEVICE) for log_q in table)
    device_candidates = SimpleNamespace(
        tokens=tokens.to(SEARCH_TEST_DEVICE), candidate_log_probs=device_table
    )
    actual = best_first_search(device_candidates, budget)
    expected = search_tree_by_depth(candidates, budget)
    for actual_column, expected_column in zip(actual, expected, strict=True):
        assert torch.equal(actual_column.cpu(), expected_column)

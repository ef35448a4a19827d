"""The best-first search in Triton finds what the tensor version finds: on a GPU, elsewhere in
Triton's interpreter."""

import os
from types import SimpleNamespace

import pytest
import torch

from infer.kernels.reference_search import search_by_depth

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device, or Triton with TRITON_INTERPRET=1", allow_module_level=True)


KINDS = ["random", "ties", "forbidden"]


def same(found, expected) -> bool:
    return all(
        torch.equal(ours.cpu(), theirs) for ours, theirs in zip(found, expected, strict=True)
    )


def drawn(shape: tuple[int, ...], kind: str, seed: int) -> torch.Tensor:
    """Random log q; with ties; or all but one token forbidden, in the second row all."""
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if kind == "forbidden":
        scores[..., 1:], scores[1] = -torch.inf, -torch.inf
        return scores.clamp(max=0)
    return (scores.round() if kind == "ties" else scores).log_softmax(-1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("length", "ranks", "budget"), [(1, 5, 4), (5, 9, 9), (15, 32, 32)])
def test_marginals(length, ranks, budget, kind):
    top, tokens = drawn((2, length, ranks), kind, budget).sort(dim=-1, descending=True, stable=True)
    check(
        SimpleNamespace(recurrent=False, tokens=tokens, table=(top[:, 0], top[:, 1:, None])), budget
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("length", "count", "budget"), [(1, 6, 6), (4, 3, 40), (6, 8, 20)])
def test_tables_of_a_conditional_head(length, count, budget, kind):
    first = drawn((2, count), kind, count)
    steps = drawn((2, length - 1, count, count), kind, 1)
    tokens = torch.randint(1000, (2, length, count), generator=torch.Generator().manual_seed(count))
    check(SimpleNamespace(recurrent=False, tokens=tokens, table=(first, steps)), budget)


def check(steps: SimpleNamespace, budget: int) -> None:
    from infer.kernels.triton_search import best_first_search

    table = tuple(part.to(DEVICE) for part in steps.table)
    found = best_first_search(SimpleNamespace(tokens=steps.tokens.to(DEVICE), table=table), budget)
    assert same(found, search_by_depth(steps, budget))

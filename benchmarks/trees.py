"""How long a draft tree takes to build on one CPU core: microseconds, medians, batch 1.

    python benchmarks/trees.py

"lists": from the sorted top-K lists; "vocabulary": from the marginals, the top-K over all tokens included; "ancestors":
the tree's attention mask. "heap" is algorithm 1 of the DDTree paper, compiled; "by depth" are tensor operations, what
a GPU runs; "python" is the same heap in plain Python, as the paper's own script has it.
"""

import argparse
import heapq
import statistics
import time
from collections.abc import Callable

import torch

from infer.trees.ddtree import best_first, by_depth, ddtree
from infer.trees.tree import Proposal


def python_heap(top: torch.Tensor, ids: torch.Tensor, budget: int) -> list[tuple[float, tuple[int, ...]]]:
    """Algorithm 1 written plainly, one row: (log-probability, ranks) of the best prefixes, best first."""
    scores = top[0].tolist()
    length, ranks = len(scores), len(scores[0])
    heap, best = [(-scores[0][0], (0,))], []
    while heap and len(best) < budget:
        cost, prefix = heapq.heappop(heap)
        best.append((-cost, prefix))
        depth, last = len(prefix), prefix[-1]
        if last + 1 < ranks:
            sibling = cost + scores[depth - 1][last] - scores[depth - 1][last + 1]
            heapq.heappush(heap, (sibling, (*prefix[:-1], last + 1)))
        if depth < length:
            heapq.heappush(heap, (cost - scores[depth][0], (*prefix, 0)))
    return best


def microseconds(repeats: int, run: Callable[..., object], *arguments: object) -> float:
    """Median over `repeats` calls."""
    seconds = []
    for _ in range(repeats + 3):
        mark = time.perf_counter()
        run(*arguments)
        seconds.append(time.perf_counter() - mark)
    return 1e6 * statistics.median(seconds[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=15, help="drafted positions, L")
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 64, 256, 512])
    parser.add_argument("--repeats", type=int, default=301)
    args = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    marginals = (torch.randn(1, args.length, args.vocabulary, generator=generator) * 3).log_softmax(-1)
    bonus = torch.tensor([1])
    print(f"L = {args.length}, vocabulary {args.vocabulary}, one core; microseconds, medians of {args.repeats}")
    print(f"{'nodes':>6}{'heap, lists':>13}{'by depth':>10}{'python':>9}{'vocabulary':>12}{'ancestors':>11}  exact")
    for budget in args.budgets:
        top, ids = marginals.topk(budget, dim=-1)
        tree = ddtree(Proposal(bonus, marginals, budget))
        heap = microseconds(args.repeats, best_first, top, ids, budget)
        tensors = microseconds(args.repeats, by_depth, top, ids, budget)
        plain = microseconds(31, python_heap, top, ids, budget)
        whole = microseconds(31, ddtree, Proposal(bonus, marginals, budget))
        mask = microseconds(args.repeats, tree.ancestors)
        expected = torch.tensor([score for score, _ in python_heap(top, ids, budget)])
        exact = torch.allclose(tree.log_probs[0, 1:], expected, atol=1e-4)
        line = f"{budget:>6}{heap:>13.1f}{tensors:>10.0f}{plain:>9.0f}{whole:>12.0f}{mask:>11.1f}"
        print(f"{line}  {'yes' if exact else 'NO'}")


if __name__ == "__main__":
    main()

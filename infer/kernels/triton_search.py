"""The best-first search for the likeliest prefixes, in one launch on a GPU: what
`infer.kernels.cpu_search.search` does on the CPU, in Triton.

One program searches one row's tree. Entry n is the best child of node n that is not in the tree
yet; each step takes the best entry.

B rows, L drafted positions, M candidates a position, N nodes.
"""

import torch
import triton
import triton.language as tl

from infer.kernels.reference_search import Candidates, Nodes, comparable, node_count, one_table


@triton.jit
def _next(row, above, score, rank, count, COUNT: tl.constexpr):
    """Return the score and the rank of what comes behind an entry with this score and rank in a row
    of candidates whose parent scores `above`: the highest of the rest, of equal ones the first;
    COUNT for its rank where there is none."""
    index = tl.arange(0, COUNT)
    scores = above + tl.load(row + index, mask=index < count, other=-float("inf"))
    scores = tl.where(scores == scores, scores, -float("inf"))  # a NaN drafts badly, and no worse
    rest = (index < count) & ((scores < score) | ((scores == score) & (index > rank)))
    best = tl.max(tl.where(rest, scores, -float("inf")), 0)
    return best, tl.min(tl.where(rest & (scores == best), index, COUNT), 0)


@triton.jit(do_not_specialize=["length", "count", "budget", "rows"])
def _search(
    table, candidates, tokens, parents, depths, scores, length, count, budget, rows,
    NODES: tl.constexpr, COUNT: tl.constexpr, CONDITIONAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    table += row * rows * count
    entry = tl.arange(0, NODES)
    zero = tl.zeros([NODES], tl.int32)
    best, which = _next(table, 0.0, float("inf"), -1, count, COUNT)
    key = tl.where(entry == 0, best, -float("inf"))  # of entry n
    rank = tl.where(entry == 0, which, zero)  # its candidate
    depth = tl.where(entry == 0, 1, zero)  # 0: there is no such entry yet, or it has no child left
    # of node n: where its children's row is, and its score
    place = zero
    score = tl.zeros([NODES], tl.float32)
    for node in range(1, budget + 1):
        highest = tl.max(tl.where(depth > 0, key, -float("inf")), 0)
        # of equal ones the shallowest, then the first
        order = tl.where(
            (depth > 0) & (key == highest), depth * NODES + entry, (length + 1) * NODES
        )
        here = entry == tl.min(order, 0) % NODES
        at = tl.sum(tl.where(here, entry, 0), 0)
        level = tl.sum(tl.where(here, depth, 0), 0)
        own = tl.sum(tl.where(here, rank, 0), 0)
        above = tl.sum(tl.where(here, score, 0.0), 0)
        to = row * budget + node - 1
        tl.store(tokens + to, tl.load(candidates + (row * length + level - 1) * count + own))
        tl.store(parents + to, at.to(tl.int64))
        tl.store(depths + to, level.to(tl.int64))
        tl.store(scores + to, highest)
        siblings = tl.sum(tl.where(here, place, 0), 0)
        best, which = _next(table + siblings * count, above, highest, own, count, COUNT)
        key = tl.where(here, best, key)
        rank = tl.where(here, which, rank)
        depth = tl.where(here & (which == COUNT), 0, depth)
        deeper = level < length
        children = level
        if CONDITIONAL:
            children = 1 + (level - 1) * count + own
        children = tl.where(deeper, children, 0)
        best, which = _next(table + children * count, highest, float("inf"), -1, count, COUNT)
        new = entry == node
        score = tl.where(new, highest, score)
        place = tl.where(new, children, place)
        key = tl.where(new, tl.where(deeper, best, -float("inf")), key)
        rank = tl.where(new, which, rank)
        depth = tl.where(new & deeper, level + 1, depth)


def best_first_search(candidates: Candidates, budget: int) -> Nodes:
    """See `infer.kernels.reference_search.search_by_depth`. For candidates that are not
    recurrent."""
    rows, length, count = candidates.tokens.shape
    table = comparable(one_table(candidates))
    number = node_count(length, count, budget)
    places = torch.empty(3, rows, number, dtype=torch.long, device=table.device)
    scores = torch.empty(rows, number, device=table.device)
    _search[rows,](
        table.contiguous(), candidates.tokens.contiguous(), *places, scores, length, count, number, table.shape[1],
        NODES=triton.next_power_of_2(number + 1), COUNT=triton.next_power_of_2(count),
        CONDITIONAL=candidates.table[1].shape[2] > 1,
    )  # fmt: skip
    return Nodes(*places, scores)

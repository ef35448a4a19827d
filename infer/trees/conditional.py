"""DDTree's tree where a token's probability depends on the tokens before it: the B likeliest prefixes of a drafter with
a conditional head.

The score of a node is its parent's plus log q of its token behind its own path, at most 0, so that a prefix never
scores above its parent: DDTree's lemma 1 and proposition 1 hold with conditionals for marginals, and the best B
prefixes are found exactly. Two ways to the same nodes in the same order: best first over the table of a first-order
head, compiled for the CPU and for GPUs; and depth by depth with the best B prefixes kept, in tensor operations of fixed
shapes, wherever neither is at hand and for recurrent heads, whose memories the kept prefixes carry.

Of equal scores the shallower prefix goes first, then the one whose parent does, then the candidate that is likelier by
itself: the first of two equal candidates.

B rows, L drafted positions, M candidates a position, N nodes, P prefixes, S entries of a memory.
"""

from collections.abc import Callable

import numpy as np
import torch

from infer.attention.attend import has_kernel
from infer.trees import compiled
from infer.trees.tree import DraftTree, Nodes, Proposal, Steps, behind, comparable, node_count
from infer.utils.jit import njit

# (slot, prefix (B, P), which (B, P), log q (B, P, M)) -> log q: kept prefix p grew out of prefix[p] of the depth above,
# by its candidate which[p]
Judge = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def conditional_ddtree(proposal: Proposal) -> DraftTree:
    """Return the top `budget` prefixes of the candidates (all of them, if there are fewer), in descending order of
    their conditional probability: the first n nodes are the tree of budget n."""
    steps = proposal.steps
    fast = compiled.available(proposal.bonus) or has_kernel(proposal.bonus.device)
    search = best_first if fast and not steps.recurrent else by_depth
    return behind(proposal.bonus, search(steps, proposal.budget), steps.tokens.shape[1])


def best_first(steps: Steps, budget: int) -> Nodes:
    """Search best first, on the host with a heap: the drafted nodes, best first. For heads that are not recurrent."""
    rows, length, count = steps.tokens.shape
    if has_kernel(steps.tokens.device):
        from infer.trees import search_kernel

        return search_kernel.best_first(*steps.table, steps.tokens, node_count(length, count, budget))
    nodes = torch.empty(3, rows, node_count(length, count, budget), dtype=torch.long)
    scores = torch.empty(nodes.shape[1:], dtype=torch.float32)
    first, others = (comparable(part.float()).contiguous().numpy() for part in steps.table)
    search(first, others, steps.tokens.numpy(), nodes.numpy(), scores.numpy())
    return Nodes(*nodes, scores)


def by_depth(steps: Steps, budget: int, judge: Judge | None = None) -> Nodes:
    """Find the same nodes depth by depth on the candidates' device: extend the best prefixes of a depth by all
    candidates, keep the best of these, and at the end take the best of all depths.

    Exact: a prefix among the best B has its parent among them. Sorting is stable, so that equal scores stay in order.
    `judge` may change log q behind the kept prefixes, step by step.
    """
    _, length, count = steps.tokens.shape
    log_q, memory = steps.begin()  # (B, 1, M), (B, 1, S)
    scores, levels, first = torch.zeros_like(log_q[:, :, 0]), [], 0
    prefix = which = torch.zeros_like(scores, dtype=torch.long)  # (B, P) of the depth above; the last candidate
    for slot in range(length):
        if slot:
            log_q, memory = steps.extend(slot, which, memory)
        if judge is not None:
            log_q = judge(slot, prefix, which, log_q)
        extended = (scores[:, :, None] + comparable(log_q)).flatten(1)  # (B, P M)
        scores, order = extended.sort(dim=1, descending=True, stable=True)
        scores, order = scores[:, :budget], order[:, :budget]  # (B, P)
        which, prefix = order % count, order // count
        if memory is not None:
            memory = memory.gather(1, prefix[..., None].expand(-1, -1, memory.shape[-1]))
        parents = prefix + first - levels[-1][0].shape[1] if slot else torch.full_like(prefix, -1)
        first += order.shape[1]
        tokens = steps.tokens[:, slot].gather(1, which)
        levels.append((scores, tokens, parents, torch.full_like(tokens, slot + 1)))
    return best_of_levels(levels, budget)


def best_of_levels(levels: list[tuple[torch.Tensor, ...]], budget: int) -> Nodes:
    """Return the best `budget` prefixes of all depths, best first. Of every depth, best first and (B, P) each: scores,
    tokens, parents among the prefixes of all depths (-1 for the root), and depths."""
    scores, tokens, parents, depths = (torch.cat(column, 1) for column in zip(*levels, strict=True))
    order = scores.sort(dim=1, descending=True, stable=True).indices
    node = order.argsort(1) + 1  # of every kept prefix, by its place in the order; the root is node 0
    order = order[:, :budget]
    parents = parents.gather(1, order)
    parents = torch.where(parents < 0, 0, node.gather(1, parents.clamp(min=0)))
    return Nodes(tokens.gather(1, order), parents, depths.gather(1, order), scores.gather(1, order))


@njit
def next_best(above, row, score, index):
    """Return the index of the best entry of row (M,) that ranks behind an entry with this score and index, -1 if there
    is none: the highest of the rest, of equal ones the first. Scores are `above + row`, float32: sums may be equal
    where entries are not. Rows need not be sorted, as few of their entries are asked for."""
    best, highest = -1, np.float32(-np.inf)
    for i in range(len(row)):
        found = above + row[i]
        if (found < score or (found == score and i > index)) and (best < 0 or found > highest):
            best, highest = i, found
    return best


@njit
def ahead(key, depth, parent, a, b):
    """Return whether entry a goes before entry b: two children of one parent are never in the heap together."""
    if key[a] != key[b]:
        return key[a] > key[b]
    if depth[a] != depth[b]:
        return depth[a] < depth[b]
    return parent[a] < parent[b]


@njit
def search(first, steps, candidates, nodes, scores):
    """Search every row of first (R, M) and steps (R, L - 1, M, M), log q, for the best prefixes of candidates
    (R, L, M): fill nodes (3, R, N), that is tokens, parents and depths, and scores (R, N), all of them.

    A heap entry is the best child of a node that is not in the tree yet: its next sibling takes its place when it is
    taken, and its own first child is added."""
    rows, budget = scores.shape
    length = candidates.shape[1]
    key, heap = np.empty(budget + 1, np.float32), np.empty(budget + 1, np.int64)  # entry n: a child of node n
    parent, depth = np.arange(budget + 1), np.empty(budget + 1, np.int64)
    which, last = np.empty(budget + 1, np.int64), np.empty(budget + 1, np.int64)  # of the child; of the node itself
    for row in range(rows):
        size, last[0] = 1, 0
        which[0], depth[0], heap[0] = next_best(np.float32(0), first[row], np.float32(np.inf), -1), 1, 0
        key[0] = first[row, which[0]]
        for node in range(1, budget + 1):
            at = heap[0]
            level = depth[at]
            nodes[0, row, node - 1], nodes[1, row, node - 1] = candidates[row, level - 1, which[at]], at
            nodes[2, row, node - 1], scores[row, node - 1] = level, key[at]
            last[node] = which[at]
            steps_of = first[row] if level == 1 else steps[row, level - 2, last[at]]
            above = np.float32(0.0) if at == 0 else scores[row, at - 1]
            sibling = next_best(above, steps_of, key[at], which[at])
            if sibling >= 0:
                which[at], key[at] = sibling, above + steps_of[sibling]
            else:
                size -= 1
                heap[0] = heap[size]
            sift_down(key, depth, parent, heap, size)
            if level < length:
                behind_it = steps[row, level - 1, last[node]]
                child = next_best(scores[row, node - 1], behind_it, np.float32(np.inf), -1)
                which[node], depth[node], key[node] = child, level + 1, scores[row, node - 1] + behind_it[child]
                heap[size] = node
                size += 1
                sift_up(key, depth, parent, heap, size - 1)


@njit
def sift_down(key, depth, parent, heap, size):
    """Put the top of a heap of `size` entries where it belongs."""
    hole = 0
    if size == 0:
        return
    moving = heap[0]
    while True:
        child = 2 * hole + 1
        if child >= size:
            break
        if child + 1 < size and ahead(key, depth, parent, heap[child + 1], heap[child]):
            child += 1
        if not ahead(key, depth, parent, heap[child], moving):
            break
        heap[hole] = heap[child]
        hole = child
    heap[hole] = moving


@njit
def sift_up(key, depth, parent, heap, hole):
    """Put the entry at `hole`, the last one of a heap, where it belongs."""
    moving = heap[hole]
    while hole > 0 and ahead(key, depth, parent, moving, heap[(hole - 1) // 2]):
        heap[hole] = heap[(hole - 1) // 2]
        hole = (hole - 1) // 2
    heap[hole] = moving

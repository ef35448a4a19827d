"""Tree loops compiled by numba, for the CPU; elsewhere callers have tensor versions.

B rows, L drafted positions, M tokens a position or nodes with the root, N drafted nodes.
"""

import numpy as np
import torch

from infer.trees.ngram_factor import judge_children, row_of
from infer.utils.jit import njit


def available(tensor: torch.Tensor) -> bool:
    """Return whether the loops of this module serve for a tensor: it is on the CPU."""
    return tensor.device.type == "cpu"


@njit
def search(log_q, tokens, length, before, guide, nodes, scores):
    """Run algorithm 1 of DDTree section 4.3 for one row: fill nodes (3, N), that is tokens, parents and depths, and
    scores (N,), best first, all of them: there must be so many prefixes.

    Without a guide, log q is a table (1 + (L - 1) before, M) over tokens (L, M): of the first position, then of the
    others behind each candidate of the one before; with before = 1 behind any, likeliest first. With a guide
    (`ngram_factor.Guide`) both are (N, M) and hold a row for each node, filled when the node is opened; before is 0.

    A heap entry is the best child of a node that is not in the tree yet: its next sibling takes its place when it is
    taken, and its own first child is added."""
    budget = len(scores)
    key, heap, size = np.empty(budget, scores.dtype), np.empty(budget, np.int64), 0  # entry n: a child of node n
    which, row = np.empty(budget, np.int64), np.empty(budget, np.int64)  # that child; where node n's children are
    line = np.empty(budget, np.int64)  # ... and where their tokens are
    score, depth = np.zeros(budget + 1, scores.dtype), np.zeros(budget + 1, np.int64)  # of node n
    parent, last = 0, np.zeros(budget + 1, np.int64)  # which of its siblings node n is
    ranked = before == 1
    for node in range(budget):  # open the newest node, then take the best entry
        level = depth[node]
        if level < length:
            line[node], row[node] = level, row_of(level, before, last[node])
            if guide is not None:
                line[node] = row[node] = node
                judge_children(guide, node, level, parent, last[node], log_q, tokens)
            children = log_q[row[node]]
            which[node] = next_best(score[node], children, np.inf, -1, ranked)
            key[node], heap[size] = score[node] + children[which[node]], node
            sift_up(key, depth, heap, size)
            size += 1
        parent = heap[0]
        child, level = which[parent], depth[parent] + 1
        nodes[0, node], nodes[1, node], nodes[2, node] = tokens[line[parent], child], parent, level
        scores[node] = score[node + 1] = key[parent]
        depth[node + 1], last[node + 1] = level, child
        siblings = log_q[row[parent]]
        sibling = next_best(score[parent], siblings, np.float64(key[parent]), child, ranked)
        if sibling >= 0:
            which[parent], key[parent] = sibling, score[parent] + siblings[sibling]
        else:
            size -= 1
            heap[0] = heap[size]
        sift_down(key, depth, heap, size)


@njit
def next_best(above, row, score, index, ranked):
    """Return the index of the best entry of row (M,) that ranks behind an entry with this score and index, -1 if there
    is none: the highest of the rest, of equal ones the first; NaN is none. Scores are `above + row`, rounded as these
    are: sums may be equal where entries are not. Rows need not be sorted, as few of their entries are asked for; in
    those that are (`ranked`), it is the next."""
    if ranked:
        return index + 1 if index + 1 < len(row) else -1
    best, highest = -1, -np.inf
    for i in range(len(row)):
        found = above + row[i]
        if (found < score or (found == score and i > index)) and (best < 0 or found > highest):
            best, highest = i, found
    return best


@njit
def ahead(key, depth, a, b):
    """Return whether entry a goes before entry b: two children of one parent are never in the heap together."""
    if key[a] != key[b]:
        return key[a] > key[b]
    if depth[a] != depth[b]:
        return depth[a] < depth[b]
    return a < b


@njit
def sift_down(key, depth, heap, size):
    """Put the top of a heap of `size` entries where it belongs."""
    hole, moving = 0, heap[0]
    while True:
        child = 2 * hole + 1
        if child >= size:
            break
        if child + 1 < size and ahead(key, depth, heap[child + 1], heap[child]):
            child += 1
        if not ahead(key, depth, heap[child], moving):
            break
        heap[hole] = heap[child]
        hole = child
    heap[hole] = moving


@njit
def sift_up(key, depth, heap, hole):
    """Put the entry at `hole`, the last one of a heap, where it belongs."""
    moving = heap[hole]
    while hole > 0 and ahead(key, depth, moving, heap[(hole - 1) // 2]):
        heap[hole] = heap[(hole - 1) // 2]
        hole = (hole - 1) // 2
    heap[hole] = moving


@njit
def parent_before(parents, row, node):
    """Return the parent of a node, one before it whatever parents (R, M) hold; the root's is itself."""
    return max(0, min(parents[row, node], node - 1))


@njit
def ancestors(parents, mask):
    """Fill mask (R, M, M) bool: a node sees what its parent sees, and itself. parents (R, M), the root first."""
    rows, nodes = parents.shape
    for row in range(rows):
        for node in range(nodes):
            of_node, of_parent = mask[row, node], mask[row, parent_before(parents, row, node)]
            for above in range(node):  # one by one: assigning whole rows takes seconds to compile
                of_node[above] = of_parent[above]
            of_node[node] = True
            of_node[node + 1 :] = False


@njit
def walk(tokens, parents, depths, chosen, accepted):
    """Follow what the target chose at the nodes down every row's tree, tokens, parents, depths and chosen (R, M) int64.
    Fill accepted (R, 2 + W) int64: how many nodes the path has, the token after it, and its nodes from the root down,
    the last one repeated."""
    rows, nodes = tokens.shape
    reached = np.empty(nodes, np.bool_)
    for row in range(rows):
        reached[0], last = True, 0
        for node in range(1, nodes):
            parent = parent_before(parents, row, node)
            reached[node] = reached[parent] and tokens[row, node] == chosen[row, parent]
            if reached[node] and depths[row, node] > depths[row, last]:
                last = node
        length = depths[row, last] + 1
        accepted[row, 0], accepted[row, 1] = length, chosen[row, last]
        for depth in range(accepted.shape[1] - 3, -1, -1):
            accepted[row, 2 + depth] = last
            if depth < length:
                last = parent_before(parents, row, last)

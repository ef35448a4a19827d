"""Tree loops compiled by numba, for the CPU. Where `available` says no, callers use their tensor versions.

R rows, L drafted positions, K tokens a position, M nodes with the root.
"""

import numpy as np
import torch

from infer.utils import jit


def available(tensor: torch.Tensor) -> bool:
    """Return whether the loops of this module serve for a tensor: numba is installed, and the tensor is on the CPU."""
    return tensor.device.type == "cpu" and jit.AVAILABLE


@jit.njit
def best_first(top, ids, nodes, scores):
    """Run algorithm 1 of DDTree section 4.3 for every row of top (R, L, K) float32, sorted, and ids (R, L, K): fill
    nodes (3, R, M - 1), that is tokens, parents and depths, and scores (R, M - 1), all of them.

    A heap entry is a prefix that is not in the tree yet. Instead of popping the best prefix and pushing its next
    sibling, the sibling takes its place; then the first child is pushed.
    """
    rows, length, ranks = top.shape
    budget = scores.shape[1]
    key = np.empty(budget + 2, np.float32)  # the heap: scores ...
    entry = np.empty(budget + 2, np.int32)  # ... and where their prefixes stand below
    parent_of = np.empty(budget + 2, np.int32)
    depth_of = np.empty(budget + 2, np.int32)
    rank_of = np.empty(budget + 2, np.int32)
    for row in range(rows):
        key[0], entry[0], size, entries = top[row, 0, 0], 0, 1, 1
        parent_of[0], depth_of[0], rank_of[0] = 0, 1, 0
        for node in range(1, budget + 1):
            score, at = key[0], entry[0]
            parent, depth, rank = parent_of[at], depth_of[at], rank_of[at]
            nodes[0, row, node - 1] = ids[row, depth - 1, rank]
            nodes[1, row, node - 1] = parent
            nodes[2, row, node - 1] = depth
            scores[row, node - 1] = score
            if rank + 1 < ranks:
                above = np.float32(0.0) if parent == 0 else scores[row, parent - 1]
                rank_of[at] = rank + 1
                moving, mover = above + top[row, depth - 1, rank + 1], at
            else:
                size -= 1
                moving, mover = key[size], entry[size]
            hole = 0  # sift down
            while True:
                child = 2 * hole + 1
                if child >= size:
                    break
                if child + 1 < size and key[child + 1] > key[child]:
                    child += 1
                if key[child] <= moving:
                    break
                key[hole], entry[hole] = key[child], entry[child]
                hole = child
            key[hole], entry[hole] = moving, mover
            if depth < length:
                parent_of[entries], depth_of[entries], rank_of[entries] = node, depth + 1, 0
                moving = score + top[row, depth, 0]
                hole = size  # sift up
                while hole > 0 and key[(hole - 1) // 2] < moving:
                    key[hole], entry[hole] = key[(hole - 1) // 2], entry[(hole - 1) // 2]
                    hole = (hole - 1) // 2
                key[hole], entry[hole] = moving, entries
                size += 1
                entries += 1


@jit.njit
def parent_before(parents, row, node):
    """Return the parent of a node, one before it whatever parents (R, M) hold; the root's is itself."""
    return max(0, min(parents[row, node], node - 1))


@jit.njit
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


@jit.njit
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

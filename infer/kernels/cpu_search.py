"""The best-first search, compiled by numba for the CPU.

B rows, L drafted positions, M tokens a position, N drafted nodes.
"""

import numpy as np
import torch

from infer.kernels.reference_search import Candidates, Nodes, comparable, node_count, one_table
from infer.ngrams.factor import judge_children, row_of
from infer.utils.jit import njit


def best_first_search(candidates: Candidates, budget: int) -> Nodes:
    """See `infer.kernels.reference_search.search_by_depth`. For candidates that are not
    recurrent."""
    rows, length, count = candidates.tokens.shape
    table = comparable(one_table(candidates))
    before = candidates.table[1].shape[2]
    number = node_count(length, count, budget)
    nodes = torch.empty(rows, 3, number, dtype=torch.long)
    scores = torch.empty(rows, number)
    arrays = (part.contiguous().numpy() for part in (table, candidates.tokens, nodes, scores))
    for log_q, tokens, *outputs in zip(*arrays, strict=True):
        search(log_q, tokens, length, before, None, *outputs)
    return Nodes(*nodes.unbind(1), scores)


@njit
def search(log_q, tokens, length, before, guide, nodes, scores):
    """Run algorithm 1 of DDTree section 4.3 for one row: fill nodes (3, N), that is tokens, parents
    and depths, and scores (N,), best first, all of them: there must be so many prefixes.

    Without a guide, log q is a table (1 + (L - 1) before, M) over tokens (L, M): of the first
    position, then of the others behind each candidate of the one before; with before = 1 behind
    any, likeliest first. With a guide (`infer.ngrams.factor.Guide`) both are (N, M) and hold a row
    for each node, filled when the node is opened; before is 0.

    Entry n is the best child of node n that is not in the tree yet: its next sibling takes its
    place when it is taken. Of equal entries that of the shallowest, then the first node goes
    first."""
    budget = len(scores)
    # of entry n: its score, which child; -1: none
    key = np.empty(budget, scores.dtype)
    which = np.full(budget, -1)
    # where node n's children are, and their tokens
    row = np.zeros(budget, np.int64)
    line = np.zeros(budget, np.int64)
    # of node n
    score = np.zeros(budget + 1, scores.dtype)
    depth = np.zeros(budget + 1, np.int64)
    # which of its siblings node n is
    parent = depth[0]
    last = np.zeros(budget + 1, np.int64)
    # arguments below are no literals: for those numba would compile what is called once more
    ranked = before == 1
    for node in range(budget):  # open the newest node, then take the best entry
        level = depth[node]
        if level < length:
            line[node], row[node] = level, row_of(level, before, last[node])
            if guide is not None:
                line[node] = row[node] = node
                judge_children(guide, node, level, parent, last[node], log_q, tokens)
            children = log_q[row[node]]
            which[node] = next_best(score[node], children, np.inf, which[node], ranked)
            key[node] = score[node] + children[which[node]]
        parent = best_entry(key, which, depth, node)
        child = which[parent]
        level = depth[parent] + 1
        nodes[0, node], nodes[1, node], nodes[2, node] = tokens[line[parent], child], parent, level
        scores[node] = score[node + 1] = key[parent]
        depth[node + 1], last[node + 1] = level, child
        siblings = log_q[row[parent]]
        which[parent] = next_best(score[parent], siblings, np.float64(key[parent]), child, ranked)
        key[parent] = score[parent] + siblings[which[parent]]


@njit
def best_entry(key, which, depth, newest):
    """Return which of the entries 0 .. newest goes first."""
    best = 0
    for n in range(1, newest + 1):
        ahead = key[n] > key[best] or (key[n] == key[best] and depth[n] < depth[best])
        if which[n] >= 0 and (which[best] < 0 or ahead):
            best = n
    return best


@njit
def next_best(above, row, score, index, ranked):
    """Return the index of the best entry of row (M,) that ranks behind an entry with this score and
    index, -1 if there is none: the highest of the rest, of equal ones the first; NaN is none.
    Scores are `above + row`, rounded as these are: sums may be equal where entries are not. Rows
    need not be sorted, as few of their entries are asked for; in those that are (`ranked`), it is
    the next."""
    if ranked:
        return index + 1 if index + 1 < len(row) else -1
    best = -1
    highest = -np.inf
    for i in range(len(row)):
        found = above + row[i]
        if (found < score or (found == score and i > index)) and (best < 0 or found > highest):
            best = i
            highest = found
    return best

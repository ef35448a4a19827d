"""The best-first search for the nodes of a draft tree on the CPU, compiled by numba.

The search finds the most probable sequences of drafted tokens (prefixes). Each node of the tree
stands for the prefix that ends at it. For each node, the search stores the node's best child that
is not in the tree yet, called the node's entry. All entries together are the frontier. Each step
adds the best entry to the tree, and the next sibling of the added node becomes the new entry of its
parent. Of entries with equal scores, the one with the smallest depth is added first. Of these, the
one whose parent was added first is added first.
"""

import numpy as np
import torch

from infer.kernels.reference_search import (
    CandidateTables,
    DraftNodes,
    count_tree_nodes,
    replace_nan_log_probs,
    stack_log_prob_tables,
)
from infer.ngrams.rescoring import NGramSearchBuffers, get_log_prob_row, score_node_children
from infer.utils.jit import njit


def best_first_search(candidates: CandidateTables, budget: int) -> DraftNodes:
    """Find the `budget` most probable sequences of drafted tokens (prefixes) of each batch row.
    Return them as the nodes of draft trees.

    The result is that of `infer.kernels.reference_search.search_tree_by_depth`. Candidates of a
    recurrent conditional head are not supported.
    """
    rows, length, candidate_count = candidates.tokens.shape
    table = replace_nan_log_probs(stack_log_prob_tables(candidates))
    rows_per_position = candidates.candidate_log_probs[1].shape[2]
    num_nodes = count_tree_nodes(length, candidate_count, budget)
    nodes = torch.empty(rows, 3, num_nodes, dtype=torch.long)
    scores = torch.empty(rows, num_nodes)

    arrays = (tensor.contiguous().numpy() for tensor in (table, candidates.tokens, nodes, scores))
    for row_log_q, row_tokens, *row_outputs in zip(*arrays, strict=True):
        search_tree(row_log_q, row_tokens, length, rows_per_position, None, *row_outputs)
    return DraftNodes(*nodes.unbind(1), scores)


@njit
def search_tree(
    log_q: np.ndarray, tokens: np.ndarray, length: int, rows_per_position: int,
    rescorer: NGramSearchBuffers | None, nodes: np.ndarray, scores: np.ndarray,
) -> None:  # fmt: skip
    """Find the most probable token sequences (prefixes) of a batch row (DDTree algorithm 1).

    log_q: table of the candidates' log-probabilities, from `stack_log_prob_tables`
    tokens: (length, candidates per position), token ids of the candidates
    rows_per_position: number of table rows for each position after the first. If it is 1, each row
        must be in descending order. It is 0 with a rescorer.
    rescorer: None, or an n-gram model that computes the candidates after each node. With an n-gram
        model, log_q and tokens are scratch memory, with a row for each node.
    nodes, scores: outputs; tokens, parents and depths (3, nodes), and log-probabilities (nodes,)
    """
    budget = len(scores)
    # For each node, its best child that is not in the tree yet: the child's score, and its index
    # among the children of the node (-1 if all children are in the tree).
    entry_score = np.empty(budget, scores.dtype)
    entry_child = np.full(budget, -1)
    # For each node, the row of `log_q` and the row of `tokens` that contain its children.
    log_q_row = np.zeros(budget, np.int64)
    token_row = np.zeros(budget, np.int64)
    node_score = np.zeros(budget + 1, scores.dtype)
    node_depth = np.zeros(budget + 1, np.int64)
    parent = node_depth[0]
    node_child = np.zeros(budget + 1, np.int64)  # each node's index among its parent's children
    # This is a variable because numba would compile the functions again for a literal argument.
    sorted_rows = rows_per_position == 1

    for node in range(budget):
        depth = node_depth[node]
        if depth < length:
            token_row[node] = depth
            log_q_row[node] = get_log_prob_row(depth, rows_per_position, node_child[node])
            if rescorer is not None:
                token_row[node] = node
                log_q_row[node] = node
                score_node_children(rescorer, node, depth, parent, node_child[node], log_q, tokens)
            children = log_q[log_q_row[node]]
            entry_child[node] = find_next_best_child(
                node_score[node], children, np.inf, entry_child[node], sorted_rows
            )
            entry_score[node] = node_score[node] + children[entry_child[node]]

        parent = find_next_parent(entry_score, entry_child, node_depth, node)
        child = entry_child[parent]
        depth = node_depth[parent] + 1
        nodes[0, node] = tokens[token_row[parent], child]
        nodes[1, node] = parent
        nodes[2, node] = depth
        scores[node] = entry_score[parent]
        node_score[node + 1] = entry_score[parent]
        node_depth[node + 1] = depth
        node_child[node + 1] = child

        siblings = log_q[log_q_row[parent]]
        entry_child[parent] = find_next_best_child(
            node_score[parent], siblings, np.float64(entry_score[parent]), child, sorted_rows
        )
        entry_score[parent] = node_score[parent] + siblings[entry_child[parent]]


@njit
def find_next_parent(
    entry_score: np.ndarray, entry_child: np.ndarray, node_depth: np.ndarray, newest: int
) -> int:
    """Return the parent of the node that the search must add next.

    entry_score: for each node, score of its best child that is not in the tree yet
    entry_child: for each node, index of this child among its children; -1 if there is none
    node_depth: depth of each node
    newest: number of the newest node; only nodes 0 to `newest` are considered
    """
    best = 0
    for n in range(1, newest + 1):
        is_better = entry_score[n] > entry_score[best] or (
            entry_score[n] == entry_score[best] and node_depth[n] < node_depth[best]
        )
        if entry_child[n] >= 0 and (entry_child[best] < 0 or is_better):
            best = n
    return best


@njit
def find_next_best_child(
    parent_score: float,
    log_q: np.ndarray,
    previous_score: float,
    previous_index: int,
    is_sorted: bool,
) -> int:
    """Return the index of the child that comes after the previous child in the order of scores.

    Children are ordered from the highest score to the lowest. Of children with equal scores, the
    one with the lower index comes first. Returns -1 if no child comes after the previous child.

    parent_score: log-probability of the prefix that ends at the parent
    log_q: (children,), log-probabilities of the children given the parent; NaN for no child. They
        need not be sorted, because the search reads few children of most nodes.
    previous_score, previous_index: score and index of the previous child; with a score of infinity
        the first child is returned
    is_sorted: whether log_q is in descending order, so that the next child has the next index

    The score of a child is the rounded sum `parent_score + log_q`, so two scores may be equal even
    if the values of log_q differ.
    """
    if is_sorted:
        return previous_index + 1 if previous_index + 1 < len(log_q) else -1
    best = -1
    highest = -np.inf
    for i in range(len(log_q)):
        score = parent_score + log_q[i]
        follows_previous = score < previous_score or (
            score == previous_score and i > previous_index
        )
        if follows_previous and (best < 0 or score > highest):
            best = i
            highest = score
    return best

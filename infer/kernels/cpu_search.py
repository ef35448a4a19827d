"""The best-first search on the CPU, compiled by numba.

Entry n of the search's frontier is the best child of node n that is not in the tree yet. When it is
taken, its next sibling replaces it. Among equal entries the shallowest wins, then the first.

B batch rows, L drafted positions, M candidates per position, R rows of a conditional table per
position, N drafted nodes.
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
from infer.ngrams.rescoring import NGramRescorer, get_table_row, score_node_children
from infer.utils.jit import njit


def best_first_search(candidates: CandidateTables, budget: int) -> DraftNodes:
    """Implement `infer.kernels.reference_search.search_tree_by_depth` for candidates that are not
    recurrent."""
    rows, length, candidate_count = candidates.tokens.shape
    table = replace_nan_log_probs(stack_log_prob_tables(candidates))
    rows_per_position = candidates.table[1].shape[2]
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
    rescorer: NGramRescorer | None, nodes: np.ndarray, scores: np.ndarray,
) -> None:  # fmt: skip
    """Find the N most probable prefixes of one batch row (DDTree section 4.3, algorithm 1).

    Fills nodes (3, N), that is tokens, parents and depths, and scores (N,), best first.

    Without a rescorer, log_q is a table (1 + (L - 1) R, M) over tokens (L, M), as
    `stack_log_prob_tables` returns it, and rows_per_position is R; with R = 1 its rows are sorted
    in descending order. With a rescorer (`infer.ngrams.rescoring.NGramRescorer`), log_q and tokens
    are (N, candidates), with a row for each node that is filled when the node is opened, and
    rows_per_position is 0.
    """
    budget = len(scores)
    # Of the frontier's entry n: the score, and which child of node n it is (-1: none).
    entry_score = np.empty(budget, scores.dtype)
    entry_child = np.full(budget, -1)
    # Of node n: the row of log_q and the row of tokens that hold its children.
    log_q_row = np.zeros(budget, np.int64)
    token_row = np.zeros(budget, np.int64)
    node_score = np.zeros(budget + 1, scores.dtype)
    node_depth = np.zeros(budget + 1, np.int64)
    parent = node_depth[0]
    # Which child of its parent node n is.
    node_child = np.zeros(budget + 1, np.int64)
    # The calls below take no literals as arguments: numba would compile a callee again for them.
    sorted_rows = rows_per_position == 1

    for node in range(budget):  # open the newest node, then take the best entry
        depth = node_depth[node]
        if depth < length:
            token_row[node] = depth
            log_q_row[node] = get_table_row(depth, rows_per_position, node_child[node])
            if rescorer is not None:
                token_row[node] = node
                log_q_row[node] = node
                score_node_children(rescorer, node, depth, parent, node_child[node], log_q, tokens)
            children = log_q[log_q_row[node]]
            entry_child[node] = find_next_best(
                node_score[node], children, np.inf, entry_child[node], sorted_rows
            )
            entry_score[node] = node_score[node] + children[entry_child[node]]

        parent = find_best_entry(entry_score, entry_child, node_depth, node)
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
        entry_child[parent] = find_next_best(
            node_score[parent], siblings, np.float64(entry_score[parent]), child, sorted_rows
        )
        entry_score[parent] = node_score[parent] + siblings[entry_child[parent]]


@njit
def find_best_entry(
    entry_score: np.ndarray, entry_child: np.ndarray, node_depth: np.ndarray, newest: int
) -> int:
    """Return the index of the frontier's best entry among entries 0 .. newest."""
    best = 0
    for n in range(1, newest + 1):
        is_better = entry_score[n] > entry_score[best] or (
            entry_score[n] == entry_score[best] and node_depth[n] < node_depth[best]
        )
        if entry_child[n] >= 0 and (entry_child[best] < 0 or is_better):
            best = n
    return best


@njit
def find_next_best(
    parent_score: float,
    log_q: np.ndarray,
    previous_score: float,
    previous_index: int,
    is_sorted: bool,
) -> int:
    """Return the index of the child that follows another child in descending order of score.

    log_q (M,) are the children's scores relative to their parent, NaN for no child. The previous
    child is given by its score and index; a score of infinity asks for the first child. Among equal
    scores the lower index comes first. Returns -1 if no child is left.

    Scores are computed as `parent_score + log_q` and rounded, so that sums may be equal where log_q
    is not. log_q need not be sorted, because a search reads few children of most nodes; if it is
    (`is_sorted`), the next child is the next index.
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

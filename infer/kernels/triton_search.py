"""The best-first search for the nodes of a draft tree on a GPU, in one launch of a Triton kernel.

Each program searches the tree of one batch row. For each node of the tree, it stores the node's
best child that is not in the tree yet, called the node's entry. All entries together are the
frontier. Each step adds the best entry to the tree. The CPU version of the algorithm is
`infer.kernels.cpu_search.search_tree`.
"""

import torch
import triton
import triton.language as tl

from infer.kernels.reference_search import (
    CandidateTables,
    DraftNodes,
    count_tree_nodes,
    replace_nan_log_probs,
    stack_log_prob_tables,
)


@triton.jit
def _find_next_best(
    log_q, parent_score, previous_score, previous_index, num_candidates, BLOCK_M: tl.constexpr
):
    """Return the score and index of the child that comes after the previous child in the order of
    scores.

    Children are ordered from the highest score to the lowest. Of children with equal scores, the
    one with the lower index comes first. If no child is left, the returned index is BLOCK_M.

    log_q: pointer to the log-probabilities of the children given the parent, one for each candidate
    """
    index = tl.arange(0, BLOCK_M)
    log_q_values = tl.load(log_q + index, mask=index < num_candidates, other=-float("inf"))
    scores = parent_score + log_q_values
    scores = tl.where(scores == scores, scores, -float("inf"))  # NaN counts as minus infinity
    is_left = (index < num_candidates) & (
        (scores < previous_score) | ((scores == previous_score) & (index > previous_index))
    )
    best = tl.max(tl.where(is_left, scores, -float("inf")), 0)
    return best, tl.min(tl.where(is_left & (scores == best), index, BLOCK_M), 0)


@triton.jit(do_not_specialize=["length", "num_candidates", "budget", "table_rows"])
def _search_tree(
    table, candidates, tokens, parents, depths, scores, length, num_candidates, budget, table_rows,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, CONDITIONAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    table += row * table_rows * num_candidates
    entry = tl.arange(0, BLOCK_N)
    zero = tl.zeros([BLOCK_N], tl.int32)
    best, best_index = _find_next_best(table, 0.0, float("inf"), -1, num_candidates, BLOCK_M)
    # For each node, its best child that is not in the tree yet: score, candidate index and depth.
    # The depth is 0 if the node does not exist yet, or if all its children are in the tree.
    entry_score = tl.where(entry == 0, best, -float("inf"))
    entry_candidate = tl.where(entry == 0, best_index, zero)
    entry_depth = tl.where(entry == 0, 1, zero)
    # For each node, the row of `table` with the log-probabilities of its children, and its score.
    child_row = zero
    node_score = tl.zeros([BLOCK_N], tl.float32)
    for node in range(1, budget + 1):
        score = tl.max(tl.where(entry_depth > 0, entry_score, -float("inf")), 0)
        # Of entries with equal scores, the one with the smallest depth is added first, then the
        # one whose parent was added first.
        order = tl.where(
            (entry_depth > 0) & (entry_score == score),
            entry_depth * BLOCK_N + entry,
            (length + 1) * BLOCK_N,
        )
        is_parent = entry == tl.min(order, 0) % BLOCK_N
        parent = tl.sum(tl.where(is_parent, entry, 0), 0)
        depth = tl.sum(tl.where(is_parent, entry_depth, 0), 0)
        candidate = tl.sum(tl.where(is_parent, entry_candidate, 0), 0)
        parent_score = tl.sum(tl.where(is_parent, node_score, 0.0), 0)
        out_index = row * budget + node - 1
        token = tl.load(candidates + (row * length + depth - 1) * num_candidates + candidate)
        tl.store(tokens + out_index, token)
        tl.store(parents + out_index, parent.to(tl.int64))
        tl.store(depths + out_index, depth.to(tl.int64))
        tl.store(scores + out_index, score)
        # The next sibling of the new node becomes the entry of their parent.
        siblings = table + tl.sum(tl.where(is_parent, child_row, 0), 0) * num_candidates
        best, best_index = _find_next_best(
            siblings, parent_score, score, candidate, num_candidates, BLOCK_M
        )
        entry_score = tl.where(is_parent, best, entry_score)
        entry_candidate = tl.where(is_parent, best_index, entry_candidate)
        entry_depth = tl.where(is_parent & (best_index == BLOCK_M), 0, entry_depth)
        # The entry of the new node is its best child.
        has_children = depth < length
        children = depth
        if CONDITIONAL:
            children = 1 + (depth - 1) * num_candidates + candidate
        children = tl.where(has_children, children, 0)
        best, best_index = _find_next_best(
            table + children * num_candidates, score, float("inf"), -1, num_candidates, BLOCK_M
        )
        is_node = entry == node
        node_score = tl.where(is_node, score, node_score)
        child_row = tl.where(is_node, children, child_row)
        entry_score = tl.where(is_node, tl.where(has_children, best, -float("inf")), entry_score)
        entry_candidate = tl.where(is_node, best_index, entry_candidate)
        entry_depth = tl.where(is_node & has_children, depth + 1, entry_depth)


def best_first_search(candidates: CandidateTables, budget: int) -> DraftNodes:
    """Find the `budget` most probable sequences of drafted tokens (prefixes) of each batch row.
    Return them as the nodes of draft trees.

    The result is that of `infer.kernels.reference_search.search_tree_by_depth`. Candidates of a
    recurrent conditional head are not supported.
    """
    rows, length, num_candidates = candidates.tokens.shape
    table = replace_nan_log_probs(stack_log_prob_tables(candidates))
    num_nodes = count_tree_nodes(length, num_candidates, budget)
    # The three tensors are the tokens, the parents and the depths of the nodes.
    nodes = torch.empty(3, rows, num_nodes, dtype=torch.long, device=table.device)
    scores = torch.empty(rows, num_nodes, device=table.device)
    _search_tree[rows,](
        table.contiguous(),
        candidates.tokens.contiguous(),
        *nodes,
        scores,
        length,
        num_candidates,
        num_nodes,
        table.shape[1],
        BLOCK_N=triton.next_power_of_2(num_nodes + 1),
        BLOCK_M=triton.next_power_of_2(num_candidates),
        CONDITIONAL=candidates.candidate_log_probs[1].shape[2] > 1,
    )
    return DraftNodes(*nodes, scores)

"""Rescore the candidates of a draft tree with n-gram statistics. The code is compiled for the CPU.

A drafter's marginals at different positions are independent of each other, but n-grams count which
token follows which (DART section 4). A candidate's probability is multiplied by its n-gram
probability after the path. The products are then scaled, so that the candidates have the same total
probability as under the drafter. The log-probability of a step is at most 0, so scores decrease
along a path, and DDTree's search finds the best prefixes exactly, as with marginals alone. The
n-gram probabilities of the corpus are corrected by those of the sequence itself
(`apply_context_counts`), because a text repeats names and phrases.

When a path grows by a token, the node of each of its suffixes is replaced by a child of this node
in the trie. The search therefore stores the nodes of O - 1 suffixes with each path.
`suffix_nodes[k]` is the node of the last k + 1 tokens, or -1 if these were not counted. A step
looks up children of these nodes, and never looks up a context from the root of the trie.

Arrays are copied in loops, element by element, since assignments to slices double the compilation
time. Callers pass contiguous arrays of the same types, so that each search is compiled once.

L drafted positions, K candidates per position, R rows of a table of conditional probabilities per
position, N drafted nodes, O order of the n-gram model, T tokens of the sequence, V vocabulary size
of the target. A column is the index of a candidate in the drafter's list for a position. log q is
the log-probability under the drafter.
"""

from typing import NamedTuple

import numpy as np

from infer.ngrams.model import (
    Int64,
    TrieArrays,
    extend_path,
    fill_unigram_probabilities,
    find_suffix_nodes,
    get_child_range,
    get_node_token,
)
from infer.utils.jit import njit

NGRAM_PROBABILITY_EPSILON = (
    1e-5  # added to n-gram probabilities, so that the log-probability of unseen tokens is finite
)
MAX_NGRAM_CANDIDATES_ADDED_PER_NODE = (
    16  # tokens per node that n-grams add to the drafter's candidates
)
MAX_CHILDREN_FOR_NGRAM_CANDIDATES = (
    64  # a trie node with more children predicts little, so it adds no candidates
)
MAX_NGRAM_PATH_SUFFIX_TOKENS = (
    8  # at most so many last tokens of a path are searched in the sequence
)
# The log-probability of tokens that a sampling filter forbids. It is finite, but below all others.
FORBIDDEN_TOKEN_LOG_PROBABILITY = -1e30


class NGramRescorer(NamedTuple):
    """The inputs of a search with n-grams for one batch row, and the search's memory for each node
    that it opens. To open a node is to compute the candidates that may come next, and their scores.

    A candidate's column is its index on the last axis of `log_prob_table`.
    """

    trie: TrieArrays
    num_tokens: int  # number of tokens of the n-gram model's corpus
    weight: float  # exponent of the n-gram probabilities
    vocabulary: int  # V, the target's vocabulary size
    rows_per_position: int  # R: K if a token's probability depends on the previous token, else 1
    sequence: np.ndarray  # (T,) int64, the bonus token included
    candidate_tokens: np.ndarray  # (L, K) int64, ascending at each position
    sorted_columns: np.ndarray  # (L, K) int64: the columns of `candidate_tokens`
    # (1 + (L - 1) R, K) float32: log q of the candidates. The first row is the first position. Each
    # other position has R rows, one for each candidate of the previous position if R = K.
    log_prob_table: np.ndarray
    # (L, V) float32: marginal log q of each token; or (L, 1): one value for all added tokens.
    marginal_log_probs: np.ndarray
    # The following arrays are the memory of the search. The entry of a node is filled when the node
    # is opened. (N, K + MAX_NGRAM_CANDIDATES_ADDED_PER_NODE) int64: columns of a node's candidates,
    # -1 for added candidates
    candidate_columns: np.ndarray
    suffix_nodes: np.ndarray  # (N, O - 1) int64: suffix nodes of the node's path
    # (N, O, K + MAX_NGRAM_CANDIDATES_ADDED_PER_NODE) int64: suffix nodes of the path extended by
    # each candidate
    child_suffix_nodes: np.ndarray
    # (N, MAX_NGRAM_PATH_SUFFIX_TOKENS) int64: the last tokens of the node's path, newest first
    recent_tokens: np.ndarray


@njit
def fill_recent_tokens(sequence: np.ndarray, recent_tokens: np.ndarray) -> None:
    """Fill recent_tokens (MAX_NGRAM_PATH_SUFFIX_TOKENS,) with the last tokens of sequence (T,)
    int64, newest first. If the sequence is too short, the remaining entries are -1."""
    length = len(sequence)
    for k in range(len(recent_tokens)):
        recent_tokens[k] = sequence[length - 1 - k] if k < length else -1


@njit
def find_path_matches(
    sequence: np.ndarray,
    recent_tokens: np.ndarray,
    match_ends: np.ndarray,
    match_lengths: np.ndarray,
) -> Int64:
    """Find earlier occurrences of the last tokens of a path in sequence (T,) int64. Return the
    number of occurrences.

    recent_tokens (MAX_NGRAM_PATH_SUFFIX_TOKENS,): the last tokens of the path, newest first.
    match_ends (T,) is filled with the positions where the path's last token occurs, latest first.
    match_lengths (T,) is filled with the number of tokens that match at each of these positions.
    """
    count = 0
    for end in range(len(sequence) - 2, -1, -1):
        if sequence[end] != recent_tokens[0]:
            continue
        length = 1
        while (
            length < min(len(recent_tokens), end + 1)
            and sequence[end - length] == recent_tokens[length]
        ):
            length += 1
        match_ends[count] = end
        match_lengths[count] = length
        count += 1
    return count


@njit
def apply_context_counts(
    sequence: np.ndarray,
    match_ends: np.ndarray,
    match_lengths: np.ndarray,
    num_matches: Int64,
    tokens: np.ndarray,
    probabilities: np.ndarray,
) -> None:
    """Correct the n-gram probabilities of tokens by what followed the path's last tokens earlier in
    the sequence.

    sequence (T,) int64. match_ends, match_lengths: the result of `find_path_matches`, with
    num_matches entries. tokens (K,) int64: ascending. probabilities (K,): corrected in place.

    This is prediction by partial matching (Cleary and Witten 1984). It is repeated for contexts of
    1, 2, .. MAX_NGRAM_PATH_SUFFIX_TOKENS tokens. Each time, probability p of a token becomes (n +
    p) / (m + 1), where the context occurred m times before, and the token followed it n times.
    """
    occurrences = np.zeros(MAX_NGRAM_PATH_SUFFIX_TOKENS)
    follow_counts = np.zeros((MAX_NGRAM_PATH_SUFFIX_TOKENS, len(tokens)))
    for match in range(num_matches):
        next_token = sequence[match_ends[match] + 1]
        i = np.searchsorted(tokens, next_token)
        is_candidate = i < len(tokens) and tokens[i] == next_token
        for k in range(match_lengths[match]):
            occurrences[k] += 1
            if is_candidate:
                follow_counts[k, i] += 1
    for k in range(MAX_NGRAM_PATH_SUFFIX_TOKENS):
        if occurrences[k] == 0:
            break
        for i in range(len(tokens)):
            probabilities[i] = (follow_counts[k, i] + probabilities[i]) / (occurrences[k] + 1)


@njit
def insert_candidate(token: Int64, tokens: np.ndarray, columns: np.ndarray, count: Int64) -> Int64:
    """Insert a token into the first `count` entries of `tokens`, which are in ascending order,
    unless these contain the token already. Its entry in `columns` is -1. Return the new number of
    tokens."""
    position = np.searchsorted(tokens[:count], token)
    if position < count and tokens[position] == token:
        return count
    for i in range(count, position, -1):
        tokens[i] = tokens[i - 1]
        columns[i] = columns[i - 1]
    tokens[position] = token
    columns[position] = -1
    return count + 1


@njit
def add_ngram_candidates(
    trie: TrieArrays,
    suffix_nodes: np.ndarray,
    vocabulary: Int64,
    sequence: np.ndarray,
    match_ends: np.ndarray,
    num_matches: Int64,
    tokens: np.ndarray,
    columns: np.ndarray,
    num_drafted: Int64,
) -> Int64:
    """Add up to MAX_NGRAM_CANDIDATES_ADDED_PER_NODE tokens to the drafter's candidates after a
    path. Return the new number of candidates.

    tokens and columns (K + MAX_NGRAM_CANDIDATES_ADDED_PER_NODE,) begin with the drafter's
    `num_drafted` candidates. The added tokens are below `vocabulary`. They are tokens that followed
    the path
    before: first in the sequence, after the positions `match_ends`; then in the corpus, after the
    suffixes of the path, longest first, until a suffix has more than
    MAX_CHILDREN_FOR_NGRAM_CANDIDATES children.
    """
    count = num_drafted
    max_candidates = len(tokens)
    for match in range(num_matches):
        token = sequence[match_ends[match] + 1]
        if count == max_candidates:
            return count
        if 0 <= token < vocabulary:
            count = insert_candidate(token, tokens, columns, count)
    for k in range(len(suffix_nodes) - 1, -1, -1):
        first, end = get_child_range(trie, suffix_nodes[k])
        if end - first > MAX_CHILDREN_FOR_NGRAM_CANDIDATES:
            return count
        for child in range(first, end):
            if count == max_candidates:
                return count
            token = get_node_token(trie, child)
            if token < vocabulary:
                count = insert_candidate(token, tokens, columns, count)
    return count


@njit
def rescore_candidates(log_q: np.ndarray, probabilities: np.ndarray, weight: float) -> None:
    """Combine the drafter's log-probabilities log_q (K,) of candidates with n-gram probabilities
    (K,), in place.

    `weight` times the n-gram log-probability is added to each log-probability. Then a constant is
    subtracted, so that the candidates have the same total probability as under the drafter.
    Log-probabilities are at least FORBIDDEN_TOKEN_LOG_PROBABILITY, so that all results are finite,
    even if a sampling filter forbids all candidates.
    """
    highest = -np.inf
    rescored_total = 0.0
    drafter_total = 0.0
    for i in range(len(log_q)):
        drafter_total += np.exp(log_q[i])
        log_q[i] += max(
            weight * np.log(probabilities[i] + NGRAM_PROBABILITY_EPSILON),
            FORBIDDEN_TOKEN_LOG_PROBABILITY,
        )
        highest = max(highest, log_q[i])
    for i in range(len(log_q)):
        rescored_total += np.exp(log_q[i] - highest)
    log_drafter_total = (
        min(np.log(drafter_total), 0.0) if drafter_total > 0 else FORBIDDEN_TOKEN_LOG_PROBABILITY
    )
    norm = highest + np.log(rescored_total) - log_drafter_total
    for i in range(len(log_q)):
        log_q[i] = min(log_q[i] - norm, 0.0)


@njit
def get_table_row(depth: Int64, rows_per_position: Int64, candidate: Int64) -> Int64:
    """Return the row of `NGramRescorer.log_prob_table` for the position at `depth`, after candidate
    number `candidate` of the previous position. rows_per_position is R."""
    return max(0, 1 + (depth - 1) * rows_per_position + min(candidate, rows_per_position - 1))


@njit
def fill_drafter_log_probs(
    rescorer: NGramRescorer,
    depth: Int64,
    previous_column: Int64,
    tokens: np.ndarray,
    columns: np.ndarray,
    log_q: np.ndarray,
) -> None:
    """Fill log_q (K,) with the drafter's log-probabilities of the candidates at `depth`.

    tokens, columns (K,): the ids and the columns of the candidates; the column is -1 for candidates
    that n-grams added. previous_column: the column of the path's last token, or -1 if n-grams added
    this token.
    """
    has_row = depth == 0 or previous_column >= 0 or rescorer.rows_per_position == 1
    for i in range(len(tokens)):
        marginal = max(0, min(tokens[i], rescorer.marginal_log_probs.shape[1] - 1))
        value = rescorer.marginal_log_probs[depth, marginal]
        if columns[i] >= 0 and has_row:
            row = get_table_row(depth, rescorer.rows_per_position, max(previous_column, 0))
            value = rescorer.log_prob_table[row, columns[i]]
        log_q[i] = (
            value if value > FORBIDDEN_TOKEN_LOG_PROBABILITY else FORBIDDEN_TOKEN_LOG_PROBABILITY
        )  # NaN becomes FORBIDDEN_TOKEN_LOG_PROBABILITY too


@njit
def score_node_children(
    rescorer: NGramRescorer, node: Int64, depth: Int64, parent: Int64, child: Int64,
    log_q: np.ndarray, tokens: np.ndarray,
) -> None:  # fmt: skip
    """Open a node: compute the candidates that may come after it, and their scores.

    Row `node` of tokens (N, K + MAX_NGRAM_CANDIDATES_ADDED_PER_NODE) is filled with the candidates
    in ascending order. Row `node` of log_q, which has the same shape, is filled with their scores,
    and with NaN after the last candidate. `depth` is the depth of the node, 0 for the root.
    `parent` is the node's parent, and `child` is the node's index among the parent's candidates.
    """
    sequence = rescorer.sequence
    columns = rescorer.candidate_columns[node]
    suffix_nodes = rescorer.suffix_nodes[node]
    recent_tokens = rescorer.recent_tokens[node]
    num_drafted = rescorer.candidate_tokens.shape[1]
    previous_column = -1
    if depth == 0:
        find_suffix_nodes(rescorer.trie, sequence, suffix_nodes)
        fill_recent_tokens(sequence, recent_tokens)
    else:
        previous_column = rescorer.candidate_columns[parent, child]
        for k in range(len(suffix_nodes)):
            suffix_nodes[k] = rescorer.child_suffix_nodes[parent, k, child]
        recent_tokens[0] = tokens[parent, child]
        for k in range(1, MAX_NGRAM_PATH_SUFFIX_TOKENS):
            recent_tokens[k] = rescorer.recent_tokens[parent, k - 1]
    for i in range(num_drafted):
        tokens[node, i] = rescorer.candidate_tokens[depth, i]
        columns[i] = rescorer.sorted_columns[depth, i]

    probabilities = np.empty(len(columns))
    unigram_probabilities = np.empty(len(columns))
    match_ends = np.empty(len(sequence), np.int64)
    match_lengths = np.empty(len(sequence), np.int64)
    num_matches = find_path_matches(sequence, recent_tokens, match_ends, match_lengths)
    count = add_ngram_candidates(
        rescorer.trie, suffix_nodes, rescorer.vocabulary, sequence, match_ends, num_matches,
        tokens[node], columns, num_drafted,
    )  # fmt: skip
    candidates = tokens[node, :count]
    fill_unigram_probabilities(
        rescorer.trie, rescorer.num_tokens, candidates, unigram_probabilities
    )
    extend_path(
        rescorer.trie,
        suffix_nodes,
        candidates,
        unigram_probabilities,
        rescorer.child_suffix_nodes[node],
        probabilities,
    )
    apply_context_counts(
        sequence, match_ends, match_lengths, num_matches, candidates, probabilities
    )
    fill_drafter_log_probs(rescorer, depth, previous_column, candidates, columns, log_q[node])
    rescore_candidates(log_q[node, :count], probabilities, rescorer.weight)
    for i in range(count, len(columns)):
        log_q[node, i] = np.nan

"""Rescore the candidate tokens of a draft tree with n-gram statistics. The code is compiled for the
CPU.

A drafter's marginal probabilities at different positions are independent of each other. N-grams
predict which token follows which (DART section 4). A candidate is a token that the drafter proposes
at a position. Its probability is multiplied by its n-gram probability after the path. The products
are then scaled, so that the candidates have the same total probability as under the drafter.

The score of a node is at most that of its parent, because log-probabilities are at most 0. DDTree's
search therefore finds the nodes with the highest scores exactly, as it does without n-grams. A text
repeats names and phrases, so the n-gram probabilities of the corpus are corrected by counts in the
sequence itself (`blend_sequence_counts`).

For each path of the draft tree, the search stores nodes of the n-gram trie: `suffix_nodes[k]` is
the trie node of the path's last k + 1 tokens, or -1 if this n-gram does not occur in the corpus.
When a path grows by a token, each of these trie nodes is replaced by one of its children, so that
no n-gram is looked up from the root of the trie.

Arrays are copied in loops, element by element, since assignments to slices double the compilation
time. Callers pass contiguous arrays of the same types, so that each search is compiled once.

Names: a candidate's column is its index in the drafter's list of candidates for a position. log_q
is a log-probability under the drafter.
"""

from typing import NamedTuple

import numpy as np

from infer.ngrams.model import (
    Int64,
    TrieArrays,
    compute_next_token_probabilities,
    fill_unigram_probabilities,
    find_suffix_nodes,
    get_child_range,
    get_node_token,
)
from infer.utils.jit import njit

# This is added to n-gram probabilities, so that the log-probability of a token with the count 0 is
# finite.
NGRAM_PROBABILITY_EPSILON = 1e-5
# Maximum number of tokens that n-grams add to the drafter's candidates after a node of the draft
# tree.
MAX_NGRAM_CANDIDATES_ADDED_PER_NODE = 16
# If a trie node has more children than this, they are not added as candidates, because such a node
# predicts little about the next token.
MAX_CHILDREN_FOR_NGRAM_CANDIDATES = 64
# Number of tokens of the longest suffix of a path that is searched in the sequence.
MAX_NGRAM_PATH_SUFFIX_TOKENS = 8
# Log-probability of tokens that a sampling filter such as top-k excludes: finite, but below the
# log-probability of any other token.
FORBIDDEN_TOKEN_LOG_PROBABILITY = -1e30


class NGramSearchBuffers(NamedTuple):
    """The inputs and buffers of the search for the draft tree of one sequence, with n-gram scores.

    The buffers have one entry for each node of the draft tree. An entry is filled when the
    search computes the candidates for the token after the node, and their scores.
    """

    trie: TrieArrays
    num_tokens: int  # number of tokens of the n-gram model's corpus
    weight: float  # n-gram probabilities are raised to this power
    vocabulary: int  # the target's vocabulary size
    # number of rows of `log_prob_table` for each position after the first: one per candidate of the
    # previous position if probabilities depend on the previous token, else 1
    rows_per_position: int
    sequence: np.ndarray  # (number of tokens,) int64: committed tokens, then the bonus token
    # (positions, candidates) int64: token ids of the candidates, ascending at each position
    candidate_tokens: np.ndarray
    # (positions, candidates) int64: index of each of `candidate_tokens` in the drafter's list of
    # candidates, which is sorted by probability
    sorted_columns: np.ndarray
    # (1 + (positions - 1) * rows_per_position, candidates) float32: the drafter's log-probabilities
    # of the candidates. Row 0 is the first position; `get_log_prob_row` gives the rows of the
    # others.
    log_prob_table: np.ndarray
    # (positions, vocabulary) float32: the drafter's marginal log-probability of each token; or
    # (positions, 1): one log-probability for all tokens that n-grams add
    marginal_log_probs: np.ndarray
    # Buffer, (nodes, maximum number of candidates) int64: index of each candidate in the drafter's
    # list of candidates, -1 for candidates that n-grams added
    candidate_columns: np.ndarray
    # Buffer, (draft nodes, order - 1) int64: for each node of the draft tree, the trie nodes of the
    # last 1, 2, .. order - 1 tokens of the path to the draft node. Trie nodes are n-grams.
    suffix_nodes: np.ndarray
    # Buffer, (draft nodes, order, maximum number of candidates) int64: for each candidate after
    # each node of the draft tree, the trie nodes of the last 1, 2, .. order tokens of the path that
    # ends with the candidate
    child_suffix_nodes: np.ndarray
    # Buffer, (nodes, MAX_NGRAM_PATH_SUFFIX_TOKENS) int64: last tokens of the path to each node of
    # the draft tree, newest first
    recent_tokens: np.ndarray


@njit
def fill_recent_tokens(sequence: np.ndarray, recent_tokens: np.ndarray) -> None:
    """Fill `recent_tokens` (MAX_NGRAM_PATH_SUFFIX_TOKENS,) with the last token ids of `sequence`,
    newest first. If the sequence is too short, the remaining entries are -1."""
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
    """Find the positions at which the last tokens of a path of the draft tree occur in the
    sequence. Return the number of these positions.

    sequence: int64, the tokens of the sequence, without drafted tokens
    recent_tokens: (MAX_NGRAM_PATH_SUFFIX_TOKENS,), the last tokens of the path, newest first
    match_ends: as long as `sequence`, filled with the positions where the path's last token occurs,
        latest first
    match_lengths: as long as `sequence`, filled with how many tokens up to each of these positions
        match the end of the path
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
def blend_sequence_counts(
    sequence: np.ndarray,
    match_ends: np.ndarray,
    match_lengths: np.ndarray,
    num_matches: Int64,
    tokens: np.ndarray,
    probabilities: np.ndarray,
) -> None:
    """Correct n-gram probabilities by counts in the sequence itself: how often each token has
    followed the last tokens of the path earlier in the sequence.

    sequence: (number of tokens,) int64
    match_ends, match_lengths: the result of `find_path_matches`, with num_matches entries
    tokens: (K,) int64, the K tokens, ascending
    probabilities: (K,), corrected in place

    This is prediction by partial matching (Cleary and Witten 1984), with the last 1, 2, ..
    MAX_NGRAM_PATH_SUFFIX_TOKENS tokens of the path as contexts, one after the other. For a context
    that occurred m times and was followed by the token n times, the token's probability p becomes
    (n + p) / (m + 1).
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
    """Insert a token into a sorted list of candidates, unless it is already there. Return the new
    number of candidates.

    tokens: the first `count` entries are the candidates' ids, ascending. columns: index of each
    candidate in the drafter's list; the inserted token gets -1, because it is not in that list.
    """
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
    """Add tokens that n-grams predict after a path to the drafter's candidates, at most
    MAX_NGRAM_CANDIDATES_ADDED_PER_NODE. Return the new number of candidates.

    First, the tokens that follow the positions `match_ends` in the sequence are added. Then the
    tokens that follow a suffix of the path in the corpus are added, for the longest suffix first.
    This ends at the first suffix with more than MAX_CHILDREN_FOR_NGRAM_CANDIDATES children. Only
    token ids below `vocabulary` are added.

    tokens, columns: (num_drafted + MAX_NGRAM_CANDIDATES_ADDED_PER_NODE,), extended in place, see
        `insert_candidate`; they begin with the drafter's `num_drafted` candidates
    suffix_nodes: trie nodes of the suffixes of the path, shortest first
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
    """Combine the drafter's log-probabilities of K candidates with their n-gram probabilities.

    log_q: (K,), the drafter's log-probabilities, changed in place
    probabilities: (K,), the n-gram probabilities

    `weight` times the n-gram log-probability is added to each log-probability. Then a constant is
    subtracted, so that the candidates have the same total probability as under the drafter. The
    results are finite, even if a sampling filter excludes all candidates.
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
def get_log_prob_row(depth: Int64, rows_per_position: Int64, candidate: Int64) -> Int64:
    """Return the row of `NGramSearchBuffers.log_prob_table` for the drafted position `depth`, if
    the previous token is candidate number `candidate` of the previous position."""
    return max(0, 1 + (depth - 1) * rows_per_position + min(candidate, rows_per_position - 1))


@njit
def fill_drafter_log_probs(
    rescorer: NGramSearchBuffers,
    depth: Int64,
    previous_column: Int64,
    tokens: np.ndarray,
    columns: np.ndarray,
    log_q: np.ndarray,
) -> None:
    """Fill `log_q` with the drafter's log-probabilities of the candidates at the drafted position
    `depth`.

    tokens, columns: the candidates' ids, and their indices in the drafter's list of candidates, or
        -1 for candidates that n-grams added
    previous_column: index of the path's last token in the drafter's list for the position before,
        or -1 if n-grams added this token
    """
    has_row = depth == 0 or previous_column >= 0 or rescorer.rows_per_position == 1
    for i in range(len(tokens)):
        marginal = max(0, min(tokens[i], rescorer.marginal_log_probs.shape[1] - 1))
        value = rescorer.marginal_log_probs[depth, marginal]
        if columns[i] >= 0 and has_row:
            row = get_log_prob_row(depth, rescorer.rows_per_position, max(previous_column, 0))
            value = rescorer.log_prob_table[row, columns[i]]
        log_q[i] = (
            value if value > FORBIDDEN_TOKEN_LOG_PROBABILITY else FORBIDDEN_TOKEN_LOG_PROBABILITY
        )  # a comparison with NaN is false, so NaN becomes FORBIDDEN_TOKEN_LOG_PROBABILITY too


@njit
def score_node_children(
    rescorer: NGramSearchBuffers, node: Int64, depth: Int64, parent: Int64, child: Int64,
    log_q: np.ndarray, tokens: np.ndarray,
) -> None:  # fmt: skip
    """Compute the candidates for the next token after a node of the draft tree, and their scores.

    depth: depth of the node, 0 for the root. parent: the node's parent. child: the node's index
    among the parent's candidates. tokens, log_q: (nodes, maximum number of candidates); row `node`
    is filled with the candidates' ids in ascending order, and with their scores. Unused entries of
    log_q are NaN.
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
    compute_next_token_probabilities(
        rescorer.trie,
        suffix_nodes,
        candidates,
        unigram_probabilities,
        rescorer.child_suffix_nodes[node],
        probabilities,
    )
    blend_sequence_counts(
        sequence, match_ends, match_lengths, num_matches, candidates, probabilities
    )
    fill_drafter_log_probs(rescorer, depth, previous_column, candidates, columns, log_q[node])
    rescore_candidates(log_q[node, :count], probabilities, rescorer.weight)
    for i in range(count, len(columns)):
        log_q[node, i] = np.nan

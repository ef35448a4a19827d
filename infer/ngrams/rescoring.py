"""Rescoring the candidates of a draft tree with n-gram statistics, compiled for the CPU.

The marginals of different positions are independent; n-grams count which token follows which (DART
section 4). A candidate's probability is multiplied by its n-gram probability after the path, and
the products are normalised over the candidates to the total probability that these have under the
drafter. A step is at most 0 in log space, so that scores fall along a path and DDTree's search
finds the best prefixes exactly, as with marginals alone. The n-gram probabilities of the corpus are
corrected by those of the sequence itself (`apply_context_counts`), because a text repeats its own
names and phrases.

When a path grows by a token, each of its suffixes moves to a child in the trie. So a path carries
the nodes of its O - 1 suffixes (`suffix_nodes[k]` is the node of the last k + 1 tokens, -1 if they
were not counted), and a step looks up the children of each, never a context from the root.

Arrays are copied in loops, element by element: assignments to slices double the compilation time.
Callers pass contiguous arrays of the same types, so that every search is compiled once.

L drafted positions, K candidates per position, R rows of a conditional table per position, N
drafted nodes, O order of the n-gram model, T tokens of the sequence, V vocabulary of the target.
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
    1e-5  # added to n-gram probabilities, so that unseen tokens have a score
)
MAX_NGRAM_CANDIDATES_ADDED_PER_NODE = (
    16  # per node: tokens that n-grams add to those of the drafter
)
MAX_CHILDREN_FOR_NGRAM_CANDIDATES = (
    64  # a trie node with more children says little and adds no candidates
)
MAX_NGRAM_PATH_SUFFIX_TOKENS = (
    8  # the longest end of a path that is searched for earlier in the sequence
)
FORBIDDEN_TOKEN_LOG_PROBABILITY = (
    -1e30
)  # of tokens that a sampling filter forbids: below all others, and finite


class NGramRescorer(NamedTuple):
    """The inputs of a search with n-grams for one batch row, and its memory per opened node.

    A candidate's column is its index on the last axis of `log_prob_table`.
    """

    trie: TrieArrays
    num_tokens: int  # of the corpus of the n-gram model
    weight: float  # exponent of the n-gram probabilities
    vocabulary: int  # V
    rows_per_position: int  # R: 1, or K if the distribution depends on the token before
    sequence: np.ndarray  # (T,) int64, the bonus token included
    candidate_tokens: np.ndarray  # (L, K) int64, ascending at each position
    sorted_columns: np.ndarray  # (L, K) int64: the columns of candidate_tokens
    # (1 + (L - 1) R, K) float32: log q of the first position, and of the others after each
    # candidate of the position before
    log_prob_table: np.ndarray
    # (L, V) float32: log q of every token by itself; or (L, 1): log q of all unlisted tokens
    marginal_log_probs: np.ndarray
    # Memory of the search, filled for each node when it is opened:
    # (N, K + MAX_NGRAM_CANDIDATES_ADDED_PER_NODE) int64: columns of a node's candidates, -1 for added ones
    candidate_columns: np.ndarray
    suffix_nodes: np.ndarray  # (N, O - 1) int64
    # (N, O, K + MAX_NGRAM_CANDIDATES_ADDED_PER_NODE) int64: suffix nodes after each of a node's candidates
    child_suffix_nodes: np.ndarray
    recent_tokens: np.ndarray  # (N, MAX_NGRAM_PATH_SUFFIX_TOKENS) int64: `fill_recent_tokens`


@njit
def fill_recent_tokens(sequence: np.ndarray, recent_tokens: np.ndarray) -> None:
    """Fill recent_tokens (MAX_NGRAM_PATH_SUFFIX_TOKENS,) with the last tokens of a sequence (T,) int64, the
    newest first, -1 where the sequence is too short."""
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
    """Find earlier occurrences of the last tokens of a path in the sequence (T,) int64.

    recent_tokens (MAX_NGRAM_PATH_SUFFIX_TOKENS,): the path's last tokens, the newest first. Fills match_ends
    (T,) with the positions of the path's last token, the latest first, and match_lengths (T,) with
    the number of tokens that match there. Returns the number of occurrences.
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
    """Correct probabilities (K,) of tokens (K,) int64, ascending, by the tokens that followed the
    earlier occurrences of the path's last tokens (`find_path_matches`).

    Prediction by partial matching (Cleary and Witten 1984): for the last token, the last two, up to
    the last MAX_NGRAM_PATH_SUFFIX_TOKENS, p becomes (times the token followed + p) / (occurrences + 1).
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
    """Insert a token, with column -1, into the first `count` of tokens, ascending, unless it is
    there already. Return the number of tokens after that."""
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
    """Insert up to MAX_NGRAM_CANDIDATES_ADDED_PER_NODE tokens below `vocabulary` that the drafter did not list.

    tokens and columns (K + MAX_NGRAM_CANDIDATES_ADDED_PER_NODE,) start with the drafter's `num_drafted`
    candidates. The tokens inserted are those that followed the path: first in the sequence, at
    `match_ends`, the latest first; then in the corpus, after the longest suffix of the path whose
    trie node has few children. Returns the number of candidates.
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
    """Add `weight` times the n-gram log-probabilities to log_q (K,), and subtract the constant that
    leaves the candidates the total probability that they have under the drafter.

    Log-probabilities are at least FORBIDDEN_TOKEN_LOG_PROBABILITY, so that all results are finite, even if every
    candidate is forbidden.
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
    """Return the row of a table (1 + (L - 1) R, K) for the position at `depth`, after `candidate`
    of the position before. rows_per_position: R."""
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

    tokens, columns: (K,) of the candidates, columns -1 for those that n-grams added.
    previous_column: column of the path's last token at the position before, -1 if n-grams added
    it.
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
        )  # also for NaN


@njit
def score_node_children(
    rescorer: NGramRescorer, node: Int64, depth: Int64, parent: Int64, child: Int64,
    log_q: np.ndarray, tokens: np.ndarray,
) -> None:  # fmt: skip
    """Open a node: fill its rows of tokens (N, K + MAX_NGRAM_CANDIDATES_ADDED_PER_NODE) with its candidates,
    ascending, and of log_q (the same shape, float64) with their scores, NaN after the last one.

    The node is at `depth` (0: the root) and is the candidate with index `child` of its parent.
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

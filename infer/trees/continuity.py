"""DART's continuity-aware tree: a beam search over the drafter's likeliest tokens.

The score of a token combines its probability under the drafter with its n-gram probability. The
n-gram probability measures how often the token followed the previous tokens in a corpus. The search
is DART algorithm 1, with the scores of appendix D.

Two details are not in the paper and follow the authors' code. A token that was never seen after
any suffix of its path has the n-gram probability 0. The drafter's probabilities are normalised over
the candidates (the likeliest tokens) of a position.
"""

import numpy as np
import torch

from infer.kernels.cpu_search import find_next_best_child
from infer.kernels.reference_search import replace_nan_log_probs
from infer.ngrams.model import compute_next_token_probabilities, find_suffix_nodes
from infer.ngrams.rescoring import FORBIDDEN_TOKEN_LOG_PROBABILITY
from infer.trees.guided import DRAFTER_CANDIDATES_WITH_NGRAMS, get_contexts
from infer.trees.tree import DraftNodes, DraftTree, Proposal, add_roots
from infer.utils.jit import njit

# The beam width and the weights of the score in DART appendix D.
DART_BEAM_WIDTH_PREFIXES = 20  # number of prefixes that are kept at each depth
DART_LOGIT_DECAY_PER_POSITION = 0.9  # the drafter's score at position i is multiplied by 0.9 ** i
DART_NGRAM_WEIGHT = 0.5
DART_DEPTH_WEIGHT_EXPONENT = -0.7

# Added to probabilities under the drafter and to n-gram probabilities before their logarithm is
# taken, as in the DART authors' code.
DART_PROBABILITY_EPSILON = 1e-10
DART_UNSEEN_NGRAM_LOG_PROBABILITY = np.log(DART_PROBABILITY_EPSILON)
# In the choice of the prefixes to extend, this value is subtracted from the scores of prefixes that
# end with an EOS token, so that other prefixes are extended first. It is larger than any score.
DART_END_TOKEN_SCORE_PENALTY = 1e6


def build_continuity_tree(proposal: Proposal) -> DraftTree:
    """Build the draft trees of DART algorithm 1.

    At each position, the beam search extends prefixes by the DRAFTER_CANDIDATES_WITH_NGRAMS
    likeliest tokens. A tree consists of the visited prefixes with the highest scores, up to the
    node budget, in descending order of score. The `log_probs` of the tree are the log-probabilities
    under the drafter alone.

    As in the authors' code, n-grams do not affect the scores of the first position, and a prefix
    that ends with an EOS token is extended only if fewer than DART_BEAM_WIDTH_PREFIXES prefixes of
    the same length end with another token.
    """
    assert proposal.marginals is not None and proposal.ngram is not None
    count = min(DRAFTER_CANDIDATES_WITH_NGRAMS, proposal.marginals.shape[-1])
    top_log_q, columns = proposal.marginals.topk(count, dim=-1)
    tokens, token_order = proposal.vocabulary.columns_to_ids(columns).cpu().sort(-1)
    log_q = (
        replace_nan_log_probs(top_log_q.cpu().double())
        .gather(-1, token_order)
        .clamp(min=FORBIDDEN_TOKEN_LOG_PROBABILITY)
    )
    rows, length, num_candidates = tokens.shape

    decay = DART_LOGIT_DECAY_PER_POSITION ** np.arange(length)[:, None]
    drafter_scores = decay * np.log(log_q.softmax(-1).numpy() + DART_PROBABILITY_EPSILON)
    is_end = np.isin(tokens.numpy(), list(proposal.eos_token_ids))

    num_visited = count_visited_prefixes(length, num_candidates)
    num_nodes = min(proposal.budget, num_visited)
    suffixes = np.empty((DART_BEAM_WIDTH_PREFIXES, max(proposal.ngram.order - 1, 1)), np.int64)
    nodes = torch.empty(rows, 3, num_nodes, dtype=torch.long)
    log_probs = torch.empty(rows, num_nodes)
    for row, context in enumerate(get_contexts(proposal)):
        prefixes = np.empty((3, num_visited), np.int64)
        scores = np.empty((2, num_visited))
        search_beam(
            proposal.ngram.trie,
            tokens.numpy()[row],
            log_q.numpy()[row],
            drafter_scores[row],
            is_end[row],
            context,
            suffixes,
            prefixes,
            scores,
        )
        order = np.argsort(-scores[0], kind="stable")[:num_nodes]
        # Index: number of a visited prefix. Value: the node number of the prefix, or 0 if the tree
        # does not contain it. The last entry is the root's node number 0, because parents use the
        # index -1 for the root.
        node_of_prefix = np.zeros(num_visited + 1, np.int64)
        node_of_prefix[order] = np.arange(1, num_nodes + 1)
        prefixes[1] = node_of_prefix[prefixes[1]]
        nodes[row] = torch.from_numpy(prefixes[:, order])
        log_probs[row] = torch.from_numpy(scores[1, order])
    return add_roots(proposal.bonus_tokens, DraftNodes(*nodes.unbind(1), log_probs), length)


def count_visited_prefixes(length: int, num_candidates: int) -> int:
    """Return how many prefixes the beam search visits.

    length: number of drafted positions
    num_candidates: number of candidates per position
    """
    num_visited = 0
    num_active = 1
    for _ in range(length):
        num_visited = num_visited + num_active * num_candidates
        num_active = min(DART_BEAM_WIDTH_PREFIXES, num_active * num_candidates)
    return num_visited


@njit
def ngram_log_prob(probability: float) -> float:
    """Return the logarithm of an n-gram probability; for probability 0, return
    DART_UNSEEN_NGRAM_LOG_PROBABILITY."""
    if probability:
        return np.log(probability + DART_PROBABILITY_EPSILON)
    return DART_UNSEEN_NGRAM_LOG_PROBABILITY


@njit
def search_beam(trie, tokens, log_q, drafter_scores, is_end, context, suffixes, prefixes, scores):
    """Run DART's beam search for one batch row, and write the visited prefixes and their scores.

    trie: the trie of the n-gram model
    tokens, log_q, drafter_scores, is_end: (positions, candidates): token ids in ascending order,
        log-probabilities, the drafter's scores, and whether a candidate is an EOS token
    context: the last tokens of the sequence, including the bonus token
    suffixes: (beam width, n-gram order - 1), scratch memory for trie nodes: row i is for the last
        tokens of the i-th prefix of the beam
    prefixes: (3, prefixes), output: tokens, parents (index of a prefix, -1 for the root), depths
    scores: (2, prefixes), output: scores with n-grams, and log-probabilities under the drafter
    """
    length, num_candidates = tokens.shape
    width, max_suffixes = suffixes.shape
    active = np.empty(width, np.int64)
    extension_scores = np.empty(width * num_candidates)
    extended_suffixes = np.empty((width, max_suffixes + 1, num_candidates), np.int64)
    probabilities = np.empty(num_candidates)
    unigrams = np.zeros(num_candidates)  # the n-gram probability of unseen tokens is 0
    active[0] = -1  # the first prefix to extend is the root, -1
    num_active = 1
    size = 0
    find_suffix_nodes(trie, context, suffixes[0])
    for level in range(length):
        level_weight = (level + 1.0) ** DART_DEPTH_WEIGHT_EXPONENT
        level_start = size
        for b in range(num_active):
            compute_next_token_probabilities(
                trie, suffixes[b], tokens[level], unigrams, extended_suffixes[b], probabilities
            )
            parent = active[b]
            for i in range(num_candidates):
                step = drafter_scores[level, i]
                if level > 0:
                    step += DART_NGRAM_WEIGHT * ngram_log_prob(probabilities[i])
                parent_score = scores[0, parent] if parent >= 0 else 0.0
                parent_log_q = scores[1, parent] if parent >= 0 else 0.0
                # The minimum with 0 ensures that a child never scores higher than its parent.
                scores[0, size] = min(step * level_weight, 0.0) + parent_score
                scores[1, size] = log_q[level, i] + parent_log_q
                extension_scores[size - level_start] = scores[0, size] - (
                    DART_END_TOKEN_SCORE_PENALTY if is_end[level, i] else 0.0
                )
                prefixes[0, size] = tokens[level, i]
                prefixes[1, size] = parent
                prefixes[2, size] = level + 1
                size += 1

        # Keep the prefixes of this depth with the highest scores, in descending order.
        best_score = np.inf
        best = np.int64(-1)
        num_active = min(width, size - level_start)
        for b in range(num_active):
            best = find_next_best_child(
                0.0, extension_scores[: size - level_start], best_score, best, False
            )
            best_score = extension_scores[best]
            active[b] = level_start + best
            for k in range(max_suffixes):
                suffixes[b, k] = extended_suffixes[best // num_candidates, k, best % num_candidates]

"""DDTree with n-grams: an n-gram model rescores each drafted token, given the tokens before it.

`infer.ngrams.rescoring` computes the scores. The n-gram model is in CPU memory, so these trees are
built on the CPU. If the drafter runs on a GPU, the likeliest tokens of each position are copied to
the CPU for every new block.
"""

import numpy as np
import torch

from infer.kernels import cpu_search
from infer.kernels.reference_search import count_tree_nodes, stack_log_prob_tables
from infer.ngrams.rescoring import (
    MAX_NGRAM_CANDIDATES_ADDED_PER_NODE,
    MAX_NGRAM_PATH_SUFFIX_TOKENS,
    NGramSearchBuffers,
)
from infer.trees.ddtree import MarginalConditionals
from infer.trees.tree import Conditionals, DraftNodes, DraftTree, Proposal, add_roots

# number of the drafter's likeliest tokens that are considered at each position (DART appendix D)
DRAFTER_CANDIDATES_WITH_NGRAMS = 25


def build_guided_ddtree(proposal: Proposal) -> DraftTree:
    """Return draft trees of the likeliest prefixes under the drafter and an n-gram model together.

    The probability of a token after its path is proportional to the product of two factors: the
    drafter's probability, and the n-gram probability to the power of `proposal.ngram_weight`. The
    drafter's probability is the conditional one if there is a conditional head that is not
    recurrent; otherwise it is the marginal one. The n-gram model combines the counts of the corpus
    with the counts of the sequence itself.

    The first n nodes are the tree for a budget of n nodes. The tree's `log_probs` include the
    n-gram probabilities.
    """
    conditionals = proposal.conditionals
    if conditionals is None or conditionals.recurrent:
        assert proposal.marginals is not None
        conditionals = MarginalConditionals(
            proposal.marginals, DRAFTER_CANDIDATES_WITH_NGRAMS, proposal.vocabulary
        )
    rows, length, num_candidates = conditionals.tokens.shape
    num_nodes = count_tree_nodes(length, num_candidates, proposal.budget)
    nodes = torch.empty(rows, 3, num_nodes, dtype=torch.long)  # axis 1: token, parent, depth
    scores = torch.empty(rows, num_nodes, dtype=torch.float64)

    guides = make_ngram_search_buffers(proposal, conditionals, num_nodes)
    for guide, row_nodes, row_scores in zip(guides, nodes.numpy(), scores.numpy(), strict=True):
        # When the search adds a node to the tree, it fills one row of `log_q` and one row of
        # `tokens` with the children of the node.
        log_q = np.empty(guide.candidate_columns.shape)
        tokens = np.empty_like(guide.candidate_columns)
        cpu_search.search_tree(log_q, tokens, length, 0, guide, row_nodes, row_scores)
    return add_roots(proposal.bonus_tokens, DraftNodes(*nodes.unbind(1), scores.float()), length)


def make_ngram_search_buffers(
    proposal: Proposal, conditionals: MarginalConditionals | Conditionals, num_nodes: int
) -> list[NGramSearchBuffers]:
    """Return one `NGramSearchBuffers` for each batch row. It contains the inputs of the tree search
    (the candidates with their log-probabilities, and the n-gram model) and scratch arrays for
    `num_nodes` tree nodes.

    The n-gram model may add tokens to the drafter's candidates. The drafter's probability of an
    added token is its marginal probability, if two conditions hold: the drafter scores this token,
    and the drafter runs on the CPU. Otherwise it is the marginal probability of the least likely
    candidate of the position.
    """
    ngram = proposal.ngram
    marginals = proposal.marginals
    vocabulary = proposal.vocabulary
    assert ngram is not None and marginals is not None

    last_columns = vocabulary.ids_to_columns(conditionals.tokens[..., -1:])
    unlisted_log_q = marginals.gather(-1, last_columns)  # (batch rows, positions, 1)
    if marginals.device.type == "cpu":
        unlisted_log_q = vocabulary.expand_to_full(marginals, unlisted_log_q)

    # (batch rows, positions, candidates) each: the candidates in ascending order of id, and their
    # indices in `conditionals.tokens`.
    sorted_tokens, candidate_indices = conditionals.tokens.cpu().sort(-1)
    table = stack_log_prob_tables(conditionals).float().cpu().contiguous()
    unlisted_log_q = unlisted_log_q.float().cpu().contiguous()

    num_candidates = conditionals.tokens.shape[2] + MAX_NGRAM_CANDIDATES_ADDED_PER_NODE
    max_suffixes = max(ngram.order - 1, 1)
    vocab_size = vocabulary.target_vocab_size or marginals.shape[-1]
    candidates_before = conditionals.candidate_log_probs[1].shape[2]
    guides = []
    for context, row_tokens, row_indices, row_table, row_unlisted in zip(
        get_contexts(proposal),
        sorted_tokens.numpy(),
        candidate_indices.numpy(),
        table.numpy(),
        unlisted_log_q.numpy(),
        strict=True,
    ):
        guide = NGramSearchBuffers(
            ngram.trie,
            ngram.num_tokens,
            float(proposal.ngram_weight),
            vocab_size,
            candidates_before,
            context,
            row_tokens,
            row_indices,
            row_table,
            row_unlisted,
            candidate_columns=np.empty((num_nodes, num_candidates), np.int64),
            suffix_nodes=np.empty((num_nodes, max_suffixes), np.int64),
            child_suffix_nodes=np.empty((num_nodes, max_suffixes + 1, num_candidates), np.int64),
            recent_tokens=np.empty((num_nodes, MAX_NGRAM_PATH_SUFFIX_TOKENS), np.int64),
        )
        guides.append(guide)
    return guides


def get_contexts(proposal: Proposal) -> list[np.ndarray]:
    """Return the last tokens of the sequence in each batch row, as int64 arrays."""
    return [np.asarray(context, np.int64) for context in proposal.contexts]

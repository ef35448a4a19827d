"""DDTree with scores that depend on the path: an n-gram model rescores each drafted token after the
tokens before it (`infer.ngrams.rescoring`).

The n-gram model is in host memory, so these trees are built on the host. On a GPU a round therefore
copies the likeliest tokens of each position to the host.

B batch rows, L drafted positions, K candidates per position, C tokens of context, V vocabulary
size.
"""

import numpy as np
import torch

from infer.kernels import cpu_search
from infer.kernels.reference_search import count_tree_nodes, stack_log_prob_tables
from infer.ngrams.rescoring import (
    MAX_NGRAM_CANDIDATES_ADDED_PER_NODE,
    MAX_NGRAM_PATH_SUFFIX_TOKENS,
    NGramRescorer,
)
from infer.trees.ddtree import MarginalConditionals
from infer.trees.tree import Conditionals, DraftNodes, DraftTree, Proposal, with_root

# So many of the likeliest tokens are considered at each position, as in DART appendix D.
NGRAM_CANDIDATES_PER_POSITION = 25


def build_guided_ddtree(proposal: Proposal) -> DraftTree:
    """Return trees of the `budget` likeliest prefixes under the drafter and an n-gram model
    together.

    The probability of a token after its path is proportional to its marginal probability, times its
    n-gram probability to the power of `proposal.weight`. With a conditional head that is not
    recurrent, the token's conditional probability replaces the marginal. The n-gram counts of the
    corpus are corrected by those of the sequence itself. The first n nodes are the tree for a
    budget of n nodes. The tree's `log_probs` include the n-gram probabilities.
    """
    conditionals = proposal.conditionals
    if conditionals is None or conditionals.recurrent:
        assert proposal.marginals is not None
        conditionals = MarginalConditionals(
            proposal.marginals, NGRAM_CANDIDATES_PER_POSITION, proposal.vocabulary
        )
    rows, length, num_candidates = conditionals.tokens.shape
    num_nodes = count_tree_nodes(length, num_candidates, proposal.budget)
    nodes = torch.empty(rows, 3, num_nodes, dtype=torch.long)  # tokens, parents, depths
    scores = torch.empty(rows, num_nodes, dtype=torch.float64)

    guides = make_ngram_guides(proposal, conditionals, num_nodes)
    for guide, row_nodes, row_scores in zip(guides, nodes.numpy(), scores.numpy(), strict=True):
        # The search fills one row of `log_q` and one row of `tokens` for each node that it opens.
        log_q = np.empty(guide.candidate_columns.shape)
        tokens = np.empty_like(guide.candidate_columns)
        cpu_search.search_tree(log_q, tokens, length, 0, guide, row_nodes, row_scores)
    return with_root(proposal.bonus, DraftNodes(*nodes.unbind(1), scores.float()), length)


def make_ngram_guides(
    proposal: Proposal, conditionals: MarginalConditionals | Conditionals, num_nodes: int
) -> list[NGramRescorer]:
    """Return the input of the search for each batch row: the candidates with their
    log-probabilities, the n-gram model, and scratch arrays for `num_nodes` nodes.

    The n-gram model may add tokens that are not candidates. On the CPU an added token is scored
    with its marginal probability. On other devices the marginals are not copied to the host, and an
    added token is scored with the marginal probability of the position's last candidate. The same
    applies to tokens that the drafter does not propose.
    """
    ngram = proposal.ngram
    marginals = proposal.marginals
    vocabulary = proposal.vocabulary
    assert ngram is not None and marginals is not None

    last_columns = vocabulary.ids_to_columns(conditionals.tokens[..., -1:])
    unlisted_log_q = marginals.gather(-1, last_columns)  # (B, L, 1)
    if marginals.device.type == "cpu":
        unlisted_log_q = vocabulary.expand_to_full(marginals, unlisted_log_q)  # (B, L, V)

    # (B, L, K) each: the candidates in ascending order of id, and their indices in the table
    sorted_tokens, candidate_indices = conditionals.tokens.cpu().sort(-1)
    table = stack_log_prob_tables(conditionals).float().cpu().contiguous()
    unlisted_log_q = unlisted_log_q.float().cpu().contiguous()

    num_candidates = conditionals.tokens.shape[2] + MAX_NGRAM_CANDIDATES_ADDED_PER_NODE
    max_suffixes = max(ngram.order - 1, 1)
    vocab_size = vocabulary.size or marginals.shape[-1]
    candidates_before = conditionals.table[1].shape[2]
    guides = []
    for context, row_tokens, row_indices, row_table, row_unlisted in zip(
        get_contexts(proposal),
        sorted_tokens.numpy(),
        candidate_indices.numpy(),
        table.numpy(),
        unlisted_log_q.numpy(),
        strict=True,
    ):
        guide = NGramRescorer(
            ngram.trie,
            ngram.num_tokens,
            float(proposal.weight),
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
    """Return the last tokens of each row's sequence as arrays, each (C,) int64."""
    return [np.asarray(context, np.int64) for context in proposal.contexts]

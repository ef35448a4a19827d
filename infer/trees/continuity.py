"""DART's continuity-aware tree: a beam over the drafter's tokens, scored by the drafter and by how
often a token followed the ones before it in a corpus (algorithm 1; scores as in appendix D, what
that leaves open as in the authors' code: a token never seen behind any suffix of the path has
probability 0, and the drafter's probabilities are those among the likeliest tokens of the
position).

L drafted positions, K tokens a position, S prefixes seen, W width of the beam.
"""

import numpy as np
import torch

from infer.kernels.cpu_search import next_best
from infer.kernels.reference_search import comparable
from infer.ngrams.factor import LOWEST
from infer.ngrams.model import begin, extend
from infer.trees.guided import RANKS, contexts
from infer.trees.tree import DraftTree, Nodes, Proposal, behind
from infer.utils.jit import njit

BEAM = 20  # DART appendix D: prefixes kept at a depth
# DART appendix D
LOGIT_DECAY = 0.9
NGRAM_WEIGHT = 0.5
LEVEL_POWER = -0.7
EPSILON = 1e-10  # of the authors' code: added to both probabilities
UNSEEN = np.log(EPSILON)
ENDED = 1e6  # more than any score: a prefix that ends its text is extended after all others


def continuity(proposal: Proposal) -> DraftTree:
    """Run DART algorithm 1: a beam over the 25 likeliest tokens of every position of the marginals
    (B, L, V), and of all prefixes seen the `budget` best, in descending order of score. log_probs
    are the drafter's alone."""
    top, columns = proposal.marginals.topk(min(RANKS, proposal.marginals.shape[-1]), dim=-1)
    tokens, by_token = proposal.vocabulary.ids(columns).cpu().sort(-1)
    log_q = comparable(top.cpu().double()).gather(-1, by_token).clamp(min=LOWEST)
    rows, length, ranks = tokens.shape
    of_logit = LOGIT_DECAY ** np.arange(length)[:, None] * np.log(
        log_q.softmax(-1).numpy() + EPSILON
    )
    candidates = (
        tokens.numpy(),
        log_q.numpy(),
        of_logit,
        np.isin(tokens.numpy(), list(proposal.ends)),
    )
    seen = 0
    active = 1
    for _ in range(length):
        seen = seen + active * ranks
        active = min(BEAM, active * ranks)
    size = min(proposal.budget, seen)
    suffixes = np.empty((BEAM, max(proposal.ngram.order - 1, 1)), np.int64)
    nodes = torch.empty(rows, 3, size, dtype=torch.long)
    log_probs = torch.empty(rows, size)
    for row, (context, *some) in enumerate(zip(contexts(proposal), *candidates, strict=True)):
        prefixes = np.empty((3, seen), np.int64)
        scores = np.empty((2, seen))
        beam(proposal.ngram.arrays, *some, context, suffixes, prefixes, scores)
        order = np.argsort(-scores[0], kind="stable")[:size]
        place = np.zeros(seen + 1, np.int64)  # of a prefix among the nodes; its last: of the root
        place[order] = np.arange(1, size + 1)
        prefixes[1] = place[prefixes[1]]
        nodes[row], log_probs[row] = (
            torch.from_numpy(prefixes[:, order]),
            torch.from_numpy(scores[1, order]),
        )
    return behind(proposal.bonus, Nodes(*nodes.unbind(1), log_probs), length)


@njit
def beam(arrays, tokens, log_q, of_logit, ends, context, suffixes, nodes, scores):
    """Run the beam for one row: tokens (L, K) int64, ascending in each position, log_q and what
    scores make of it, of_logit, (L, K) float64, ends (L, K) bool, a context (C,) int64 that ends
    with the bonus token. suffixes (W, O - 1) int64 is scratch. Fills nodes (3, S), that is tokens,
    parents among all prefixes, -1 for the root, and depths, and scores (2, S), theirs and the
    drafter's alone.

    As in the authors' code: the first position is judged by the drafter alone, and a prefix that
    ends its text is extended only where others are lacking. A step is at most 0, which rounding
    could
    exceed: no child before its parent."""
    length, ranks = tokens.shape
    width, longest = suffixes.shape
    active = np.empty(width, np.int64)
    hopes = np.empty(width * ranks)
    grown = np.empty((width, longest + 1, ranks), np.int64)
    probabilities = np.empty(ranks)
    unseen = np.zeros(ranks)
    active[0], count, size = -1, 1, 0
    begin(arrays, context, suffixes[0])
    for level in range(length):
        level_weight = (level + 1.0) ** LEVEL_POWER
        first = size
        for b in range(count):
            extend(arrays, suffixes[b], tokens[level], unseen, grown[b], probabilities)
            above = active[b]
            for i in range(ranks):
                step = of_logit[level, i]
                if level > 0:
                    step += NGRAM_WEIGHT * (
                        np.log(probabilities[i] + EPSILON) if probabilities[i] else UNSEEN
                    )
                scores[0, size] = min(step * level_weight, 0.0) + (
                    scores[0, above] if above >= 0 else 0.0
                )
                scores[1, size] = log_q[level, i] + (scores[1, above] if above >= 0 else 0.0)
                hopes[size - first] = scores[0, size] - (ENDED if ends[level, i] else 0.0)
                nodes[0, size], nodes[1, size], nodes[2, size] = tokens[level, i], above, level + 1
                size += 1
        hope = np.inf
        at = np.int64(-1)
        count = min(width, size - first)
        for b in range(count):
            at = next_best(0.0, hopes[: size - first], hope, at, False)
            hope, active[b] = hopes[at], first + at
            for k in range(longest):
                suffixes[b, k] = grown[at // ranks, k, at % ranks]

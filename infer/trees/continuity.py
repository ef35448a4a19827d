"""DART's continuity-aware tree, and DDTree's tree on path-conditioned scores: both ask an n-gram model which of the
drafted tokens go together (see `infer.trees.guided` for the searches, `infer.ngrams.model` for the model).

The model lies in the host's memory, so the trees are built there: on a GPU a round has one more copy to the host, of
the K likeliest tokens of every position.
"""

import torch

from infer.ngrams.model import NGram
from infer.trees import guided
from infer.trees.ddtree import node_count
from infer.trees.tree import DraftTree

RANKS, BEAM = 25, 20  # DART appendix D: tokens looked at a position, prefixes that are gone on with


def continuity(
    bonus: torch.Tensor, marginals: torch.Tensor, budget: int, ngram: NGram, contexts: list[list[int]]
) -> DraftTree:
    """DART algorithm 1: a beam over the 25 likeliest tokens of every position of marginals (B, L, V), in log space, and
    of all prefixes seen the `budget` best, in descending order of score, behind bonus (B,). contexts: the end of every
    row's text, the bonus token included. log_probs are the drafter's alone."""
    top, ids = _likeliest(marginals)
    rows, length, ranks = top.shape
    seen, active = 0, 1
    for _ in range(length):
        seen, active = seen + active * ranks, min(BEAM, active * ranks)
    nodes = torch.empty(3, rows, min(budget, seen), dtype=torch.long)
    log_probs = torch.empty(nodes.shape[1:], dtype=torch.float32)
    for row, context in enumerate(_contexts(contexts, ngram)):
        guided.beam(
            ngram.arrays,
            ngram.tokens,
            ngram.order,
            top[row].numpy(),
            ids[row].numpy(),
            context.numpy(),
            BEAM,
            nodes[:, row].numpy(),
            log_probs[row].numpy(),
        )
    return _tree(bonus, nodes, log_probs, length)


def guided_ddtree(
    bonus: torch.Tensor,
    marginals: torch.Tensor,
    budget: int,
    ngram: NGram,
    contexts: list[list[int]],
    weight: float = 1.0,
) -> DraftTree:
    """The top `budget` prefixes when a token's probability behind a path is proportional to its marginal times its
    n-gram probability to the power of `weight`, arguments else as in `continuity`. The first n nodes are the tree of
    budget n; log_probs are these path-conditioned ones."""
    top, ids = _likeliest(marginals)
    rows, length, ranks = top.shape
    nodes = torch.empty(3, rows, node_count(length, ranks, budget), dtype=torch.long)
    scores = torch.empty(nodes.shape[1:], dtype=torch.float64)
    for row, context in enumerate(_contexts(contexts, ngram)):
        guided.best_first(
            ngram.arrays,
            ngram.tokens,
            ngram.order,
            weight,
            top[row].numpy(),
            ids[row].numpy(),
            context.numpy(),
            nodes[:, row].numpy(),
            scores[row].numpy(),
        )
    return _tree(bonus, nodes, scores.float(), length)


def _likeliest(marginals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and ids (B, L, K) of every position's likeliest tokens, on the host."""
    top, ids = marginals.topk(min(RANKS, marginals.shape[-1]), dim=-1)
    return top.float().cpu(), ids.cpu()


def _contexts(contexts: list[list[int]], ngram: NGram) -> list[torch.Tensor]:
    """As much of every row's text as the model looks at."""
    return [torch.tensor(context[max(0, len(context) - ngram.order + 1) :]) for context in contexts]


def _tree(bonus: torch.Tensor, nodes: torch.Tensor, log_probs: torch.Tensor, length: int) -> DraftTree:
    """Tokens, parents and depths (3, B, M - 1) of drafted nodes behind bonus tokens (B,), on their device."""
    tokens, parents, depths = nodes.to(bonus.device)
    zeros = torch.zeros_like(bonus)[:, None]
    log_probs = log_probs.to(bonus.device)
    return DraftTree(
        tokens=torch.cat([bonus[:, None], tokens], 1),
        parents=torch.cat([zeros, parents], 1),
        depths=torch.cat([zeros, depths], 1),
        log_probs=torch.cat([zeros.to(log_probs.dtype), log_probs], 1),
        max_depth=length,
    )

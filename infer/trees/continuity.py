"""DART's continuity-aware tree, and DDTree's tree on path-conditioned scores: in both an n-gram model judges which
drafted tokens follow each other (the searches are in `infer.trees.guided`, the model in `infer.ngrams.model`).

The model is in the host's memory, so the trees are built there: on a GPU a round has one more copy to the host, of the
K likeliest tokens of every position.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from infer.trees import guided
from infer.trees.conditional import by_depth
from infer.trees.tree import DraftTree, Nodes, Proposal, behind, comparable, node_count

Columns = TypeVar("Columns", guided.Candidates, guided.Judged, guided.Table)
RANKS, BEAM = 25, 20  # DART appendix D: tokens considered at a position, prefixes kept at a depth


@dataclass(frozen=True)
class Scoring:
    """Choices about a token's score that DART's appendix D leaves open."""

    epsilon: float  # added to its probability under the drafter, and to that under the n-gram model
    renormalised: bool  # the drafter's probabilities are those among the likeliest tokens of the position
    unigrams: bool  # a token never seen behind any suffix of the path has its share of the corpus, instead of 0


AUTHORS = Scoring(epsilon=1e-10, renormalised=True, unigrams=False)
SMOOTHED = Scoring(epsilon=1e-5, renormalised=False, unigrams=True)


def continuity(proposal: Proposal) -> DraftTree:
    """DART algorithm 1 as its authors' code has it: a beam over the 25 likeliest tokens of every position of the
    marginals (B, L, V), and of all prefixes seen the `budget` best, in descending order of score. log_probs are the
    drafter's alone."""
    return _beam(proposal, AUTHORS)


def continuity_unigrams(proposal: Proposal) -> DraftTree:
    """Run the same search with smoother scores: unigrams for what was never seen, and all of the drafter's softmax."""
    return _beam(proposal, SMOOTHED)


def _beam(proposal: Proposal, scoring: Scoring) -> DraftTree:
    """Run the beam for every row."""
    candidates = likeliest(proposal, scoring.unigrams)
    judged = judge(candidates, scoring, proposal.ends)
    rows, length, ranks = candidates.tokens.shape
    seen, active = 0, 1
    for _ in range(length):
        seen, active = seen + active * ranks, min(BEAM, active * ranks)
    nodes = torch.empty(rows, 3, min(proposal.budget, seen), dtype=torch.long)
    log_probs = torch.empty(rows, nodes.shape[2], dtype=torch.float64)
    common = proposal.ngram.arrays, proposal.ngram.order, scoring.epsilon
    for row, context in enumerate(_contexts(proposal)):
        filled = nodes[row].numpy(), log_probs[row].numpy()
        guided.beam(*common, of_row(candidates, row), of_row(judged, row), context, BEAM, *filled)
    return behind(proposal.bonus, Nodes(*nodes.unbind(1), log_probs.float()), length)


def guided_ddtree(proposal: Proposal) -> DraftTree:
    """Return the top `budget` prefixes when a token's probability behind a path is proportional to its marginal times
    its n-gram probability to the power of `weight`; the n-gram model's counts are corrected by those of the text
    itself. The first n nodes are the tree of budget n; log_probs are these path-conditioned ones. With a conditional
    head a token's probability behind its path takes its marginal's place."""
    if proposal.steps is not None and proposal.steps.recurrent:
        return guided_by_depth(proposal)
    table, ngram = choices(proposal), proposal.ngram
    counted = ngram.arrays, ngram.tokens, ngram.order, proposal.marginals.shape[-1]
    rows, length, ranks = table.tokens.shape
    nodes = torch.empty(rows, 3, node_count(length, ranks, proposal.budget), dtype=torch.long)
    scores = torch.empty(rows, nodes.shape[2], dtype=torch.float64)
    for row, context in enumerate(_contexts(proposal)):
        filled = nodes[row].numpy(), scores[row].numpy()
        guided.best_first(*counted, proposal.weight, of_row(table, row), context, *filled)
    return behind(proposal.bonus, Nodes(*nodes.unbind(1), scores.float()), length)


def choices(proposal: Proposal) -> guided.Table:
    """Return what the best-first search of every row chooses from: the likeliest tokens of the marginals, or a
    conditional head's candidates. What n-grams add has its marginal, on the host; elsewhere the vocabulary stays where
    it is, and what is not listed counts as the last that is."""
    marginals = proposal.marginals
    if proposal.steps is None:
        top, ids = marginals.topk(min(RANKS, marginals.shape[-1]), dim=-1)
        first, steps = top[:, 0], top[:, 1:, None]
    else:
        ids, (first, steps) = proposal.steps.tokens, proposal.steps.table
    alone = marginals if marginals.device.type == "cpu" else marginals.gather(-1, ids[..., -1:])
    return guided.Table(ids.cpu().numpy(), *(part.float().cpu().numpy() for part in (first, steps, alone)))


def guided_by_depth(proposal: Proposal) -> DraftTree:
    """Do as `guided_ddtree` does for a head whose answer depends on all tokens before: depth by depth, the best
    prefixes kept."""
    ngram, steps = proposal.ngram, proposal.steps
    rows, length, count = steps.tokens.shape
    ascending = steps.tokens.cpu().sort(-1)  # (B, L, M)
    shares, longest = unigram_shares(ascending.values, proposal), max(ngram.order - 1, 1)
    suffixes, grown, texts = np.empty((rows, 1, longest), np.int64), None, _contexts(proposal)
    recent = np.empty((rows, 1, guided.REACH), np.int64)
    for row, text in enumerate(texts):
        guided.begin(ngram.arrays, text, suffixes[row, 0])
        guided.newest(text, recent[row, 0])

    def judge(slot: int, prefix: torch.Tensor, which: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
        nonlocal suffixes, grown, recent
        if slot:
            place = ascending.indices[:, slot - 1].argsort(-1).gather(1, which.cpu())  # of the candidate
            paths = np.arange(rows)[:, None], prefix.cpu().numpy()
            suffixes = grown[(*paths, slice(0, longest), place.numpy())]
            last = ascending.values[:, slot - 1].gather(1, place).numpy()[..., None]  # (B, P, 1)
            recent = np.concatenate([last, recent[paths][..., :-1]], -1)
        order = ascending.indices[:, slot, None].expand(-1, log_q.shape[1], -1)  # (B, P, M)
        judged = comparable(log_q.cpu().double()).clamp(min=guided.LOWEST).gather(2, order)
        grown = np.empty((*judged.shape[:2], longest + 1, count), np.int64)
        for row in range(rows):
            tokens = ascending.values[row, slot].numpy()
            alike = ngram.arrays, proposal.weight, texts[row], tokens, shares[row, slot]
            paths = np.ascontiguousarray(suffixes[row]), recent[row]
            guided.judge_level(*alike, judged[row].numpy(), *paths, grown[row])
        return torch.empty_like(judged).scatter_(2, order, judged).to(log_q)

    return behind(proposal.bonus, by_depth(steps, proposal.budget, judge), length)


def unigram_shares(tokens: torch.Tensor, proposal: Proposal) -> np.ndarray:
    """Return the share of the corpus that each of tokens (B, L, K) has, on the host."""
    shares = np.zeros(tokens.shape)
    guided.unigrams(proposal.ngram.arrays, proposal.ngram.tokens, tokens.numpy().reshape(-1), shares.reshape(-1))
    return shares


def likeliest(proposal: Proposal, unigrams: bool) -> guided.Candidates:
    """Return the likeliest tokens of every row's positions, (B, L, K) each, on the host; `unigrams`: with their shares
    of the corpus, else these are 0."""
    marginals = proposal.marginals
    top, ids = marginals.topk(min(RANKS, marginals.shape[-1]), dim=-1)
    tokens, by_token = ids.cpu().sort(-1)
    log_q = comparable(top.cpu().double()).gather(-1, by_token).clamp(min=guided.LOWEST)
    shares = unigram_shares(tokens, proposal) if unigrams else np.zeros(tokens.shape)
    return guided.Candidates(tokens.numpy(), log_q.numpy(), shares)


def judge(candidates: guided.Candidates, scoring: Scoring, ends: Collection[int]) -> guided.Judged:
    """Return what the beam needs besides the candidates (B, L, K)."""
    log_q = torch.from_numpy(candidates.log_q)
    q = log_q.softmax(-1) if scoring.renormalised else log_q.exp()
    return guided.Judged(q.numpy(), np.isin(candidates.tokens, list(ends)))


def of_row(columns: Columns, row: int) -> Columns:
    """Return one row's part of `Candidates`, `Judged` or a `Table`."""
    return type(columns)(*(array[row] for array in columns))


def _contexts(proposal: Proposal) -> list[np.ndarray]:
    """Return every row's text: (C,) int64 each."""
    return [np.asarray(context, np.int64) for context in proposal.contexts]

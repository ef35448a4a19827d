"""Draft trees of sequences that must follow a grammar. The trees consist of the likeliest prefixes
that the grammar allows.

If the grammar allows only some tokens after a prefix, the drafter's distribution is renormalised
over the allowed tokens: q(v | prefix, grammar) for token v. A prefix never has a higher score than
its parent, so DDTree's best-first search finds the best nodes here too. Tokens that the grammar
forces after the root come first, with probability 1.

L drafted positions, V vocabulary size, M nodes including the root, C candidates per position. log q
is a log-probability under the drafter.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from infer.trees.tree import DraftNodes, DraftTree, Proposal

# A conditional head gives probabilities of its candidates only. The candidates are used if the
# allowed candidates have at least this total probability. Otherwise the whole vocabulary is
# searched.
MIN_ALLOWED_HEAD_CANDIDATES_PROBABILITY = 1e-3


class TokenScores(NamedTuple):
    """Candidate tokens in descending order of probability, with their log-probabilities log q."""

    log_q: np.ndarray  # (C,)
    tokens: np.ndarray  # (C,) int64


@dataclass(frozen=True)
class GrammarRule:
    """What the grammar of one batch row allows and forces after the row's root."""

    # Takes the drafted tokens after the root. Returns which tokens may come next, (V,) bool.
    allowed: Callable[[list[int]], np.ndarray]
    forced: list[int]  # tokens that the grammar forces after the root


def build_constrained_trees(
    tree: DraftTree, proposal: Proposal, rules: dict[int, GrammarRule], branches: bool
) -> DraftTree:
    """Return the trees of all batch rows. The trees of the rows in `rules` are rebuilt under their
    grammars; the other trees are unchanged.

    `rules` maps batch rows to grammars. Without `branches` the rebuilt trees are chains. The shapes
    of the tensors stay the same: if a rebuilt tree has fewer nodes, the unused nodes become
    children of the root with probability 0.
    """
    tokens = tree.tokens.clone()
    parents = tree.parents.clone()
    depths = tree.depths.clone()
    log_probs = tree.log_probs.clone()
    for row, rule in rules.items():
        nodes = search_constrained(proposal, row, tree.max_drafted, rule, branches)
        end = len(nodes.tokens) + 1
        tokens[row, 1:] = proposal.bonus[row]
        parents[row, 1:] = 0
        depths[row, 1:] = 1
        log_probs[row, 1:] = -torch.inf
        tokens[row, 1:end] = nodes.tokens.to(tokens)
        parents[row, 1:end] = nodes.parents.to(parents)
        depths[row, 1:end] = nodes.depths.to(depths)
        log_probs[row, 1:end] = nodes.log_probs.to(log_probs)
    return DraftTree(tokens, parents, depths, log_probs, max_depth=tree.max_depth)


class RowDistributions:
    """The drafter's distributions of one batch row. `best_children` restricts them to the allowed
    tokens."""

    def __init__(self, proposal: Proposal, row: int) -> None:
        assert proposal.marginals is not None
        self.num_top_tokens = 4 * proposal.budget
        log_q = proposal.vocabulary.expand_to_full(proposal.marginals[row])
        self.log_q = log_q.float().cpu().numpy()  # (L, V)
        self.top_tokens = cache(self._find_top_tokens)

        self.candidates: np.ndarray | None = None  # (L, C) the conditional head's candidates
        conditionals = proposal.conditionals
        if conditionals is not None and not conditionals.recurrent:
            first, others = conditionals.table
            self.candidates = conditionals.tokens[row].cpu().numpy()
            self.first_table = first[row].float().cpu().numpy()  # (C,)
            self.table = others[row].float().cpu().numpy()  # (L - 1, C, C)

    def best_children(self, path: list[int], allowed: np.ndarray, count: int) -> TokenScores:
        """Return the `count` likeliest allowed tokens after a path. `allowed` (V,) bool marks the
        allowed tokens, and log q is renormalised over all of them."""
        slot = len(path)
        allowed = allowed[: self.log_q.shape[1]]

        candidates = self._candidates_after(path)
        usable = allowed[candidates.tokens] & (candidates.log_q > -np.inf)
        if np.exp(candidates.log_q[usable]).sum() > MIN_ALLOWED_HEAD_CANDIDATES_PROBABILITY:
            return normalise_and_keep_top(
                candidates.log_q[usable], candidates.tokens[usable], count
            )

        # Usually `count` of the likeliest tokens are allowed. The vocabulary is then not sorted.
        log_q = self.log_q[slot]
        top_tokens, probabilities = self.top_tokens(slot)
        tokens = top_tokens[allowed[top_tokens]][:count]
        if len(tokens) == count and log_q[tokens[-1]] > -np.inf:
            log_total = np.log(probabilities @ allowed.astype(np.float32))
            return TokenScores(log_q[tokens] - log_total, tokens)

        tokens = np.flatnonzero(allowed & (log_q > -np.inf))
        return normalise_and_keep_top(log_q[tokens], tokens, count)

    def _candidates_after(self, path: list[int]) -> TokenScores:
        """Return the conditional head's candidates after a path, with their log q. Return no tokens
        if there is no conditional head, or if the path's last token is not one of its
        candidates."""
        slot = len(path)
        nothing = TokenScores(np.empty(0), np.empty(0, np.int64))
        if self.candidates is None:
            return nothing
        if slot == 0:
            return TokenScores(self.first_table, self.candidates[0])
        table_rows = np.flatnonzero(self.candidates[slot - 1] == path[-1])
        if not len(table_rows):
            return nothing
        return TokenScores(self.table[slot - 1, table_rows[0]], self.candidates[slot])

    def _find_top_tokens(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the likeliest tokens of a drafted position (slot) in descending order of marginal
        probability, and the marginal probabilities of all tokens (V,)."""
        log_q = self.log_q[slot]
        count = min(self.num_top_tokens, len(log_q) - 1)
        top_tokens = np.argpartition(-log_q, count)[:count]
        order = np.argsort(-log_q[top_tokens], kind="stable")
        return top_tokens[order], np.exp(log_q)


def normalise_and_keep_top(log_q: np.ndarray, tokens: np.ndarray, count: int) -> TokenScores:
    """Return the `count` likeliest of the given tokens. `log_q` are the log-probabilities of the
    tokens; they are normalised over all given tokens."""
    order = np.argsort(-log_q, kind="stable")[:count]
    return TokenScores(log_q[order] - np.logaddexp.reduce(log_q), tokens[order])


class ConstrainedSearch:
    """The state of a best-first search over the allowed prefixes of one batch row."""

    def __init__(
        self, proposal: Proposal, row: int, budget: int, rule: GrammarRule, branches: bool
    ) -> None:
        assert proposal.marginals is not None
        self.distributions = RowDistributions(proposal, row)
        self.max_depth = proposal.marginals.shape[1]
        self.eos_token_ids = proposal.eos_token_ids
        self.budget = budget
        self.rule = rule
        self.branches = branches
        self.paths: list[list[int]] = [[]]  # for each node its tokens after the root; root first
        self.nodes: list[tuple[int, int, int, float]] = []  # token, parent, depth, log-probability
        # Entries: negative log-probability, depth of the parent, parent, index of the child.
        self.heap: list[tuple[float, int, int, int]] = []
        # Key: node. Value: its allowed children, with the log-probabilities of their whole
        # prefixes.
        self.children: dict[int, TokenScores] = {}

    @property
    def newest_node(self) -> int:
        """The number of the node that was added last; 0 is the root."""
        return len(self.nodes)

    @property
    def is_full(self) -> bool:
        return len(self.nodes) == self.budget

    def add_node(self, token: int, parent: int, log_prob: float) -> None:
        """Add a node with this token below node `parent`. `log_prob` is that of the whole
        prefix."""
        path = [*self.paths[parent], token]
        self.paths.append(path)
        self.nodes.append((token, parent, len(path), log_prob))

    def open_newest_node(self, log_prob: float, excluded_token: int | None = None) -> None:
        """Compute the allowed children of the newest node, and queue the best child. `log_prob` is
        the log-probability of the node's prefix. A child with the token `excluded_token` is left
        out, since it is added to the tree separately."""
        node = self.newest_node
        path = self.paths[node]
        ends_sequence = bool(path) and path[-1] in self.eos_token_ids
        if len(path) == self.max_depth or self.is_full or ends_sequence:
            return

        count = self.budget - len(self.nodes) if self.branches else 1
        log_q, tokens = self.distributions.best_children(path, self.rule.allowed(path), count)
        if excluded_token is not None:
            log_q = log_q[tokens != excluded_token]
            tokens = tokens[tokens != excluded_token]
        self.children[node] = TokenScores(log_prob + log_q, tokens)
        self.queue_child(node, 0)

    def queue_child(self, node: int, index: int) -> None:
        """Queue child number `index` of a node, if the node has that many children."""
        if index < len(self.children[node].tokens):
            log_prob = float(self.children[node].log_q[index])
            heapq.heappush(self.heap, (-log_prob, len(self.paths[node]), node, index))

    def add_best_child(self) -> None:
        """Move the likeliest queued child into the tree. Queue its next sibling and its own best
        child."""
        negative_log_prob, _, parent, index = heapq.heappop(self.heap)
        self.add_node(int(self.children[parent].tokens[index]), parent, -negative_log_prob)
        self.queue_child(parent, index + 1)
        self.open_newest_node(-negative_log_prob)


def search_constrained(
    proposal: Proposal, row: int, budget: int, rule: GrammarRule, branches: bool
) -> DraftNodes:
    """Search for the likeliest prefixes of a batch row that the grammar allows, best first.

    Return at most `budget` nodes (M - 1,), fewer if the grammar allows no more. A node with an end
    token has no children. Without `branches` the nodes form a chain.
    """
    search = ConstrainedSearch(proposal, row, budget, rule, branches)
    for token in rule.forced[: min(search.max_depth, budget)]:
        parent = search.newest_node
        if branches:
            search.open_newest_node(0.0, excluded_token=token)
        search.add_node(token, parent, 0.0)
    search.open_newest_node(0.0)
    while search.heap and not search.is_full:
        search.add_best_child()

    return DraftNodes(
        torch.tensor([token for token, _, _, _ in search.nodes]),
        torch.tensor([parent for _, parent, _, _ in search.nodes]),
        torch.tensor([depth for _, _, depth, _ in search.nodes]),
        torch.tensor([log_prob for _, _, _, log_prob in search.nodes]),
    )

"""Draft trees of sequences that must follow a grammar. The trees consist of the likeliest prefixes
that the grammar allows. A prefix is a sequence of drafted tokens; a tree node represents the prefix
that ends at the node.

If the grammar allows only some tokens after a prefix, the drafter's probabilities are renormalised
over the allowed tokens. A prefix is never more probable than its parent, so DDTree's best-first
search also finds the likeliest allowed prefixes. Tokens that the grammar forces after the root have
probability 1, so they are the first nodes.

log q is a log-probability under the drafter.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from infer.trees.tree import DraftNodes, DraftTree, Proposal

# A conditional head predicts probabilities of its candidate tokens only. If the candidates that the
# grammar allows have a total probability below this value, the drafter's marginal probabilities of
# the whole vocabulary are used instead.
MIN_ALLOWED_HEAD_CANDIDATES_PROBABILITY = 1e-3


class TokenScores(NamedTuple):
    """Tokens in descending order of probability, and their log-probabilities under the drafter."""

    log_q: np.ndarray  # (number of tokens,) log-probabilities
    tokens: np.ndarray  # (number of tokens,) int64 token ids


@dataclass(frozen=True)
class GrammarRule:
    """What a grammar allows in one draft tree: a function that returns the allowed tokens, and the
    tokens that the grammar forces after the root."""

    # A function. Argument: the drafted tokens after the root. Returns a bool array of the shape
    # (vocabulary size,), which is true for the tokens that may come next.
    get_allowed_tokens: Callable[[list[int]], np.ndarray]
    forced_tokens: list[int]  # tokens that must follow the root, one after the other


def build_constrained_trees(
    tree: DraftTree, proposal: Proposal, rules: dict[int, GrammarRule], branches: bool
) -> DraftTree:
    """Rebuild the draft trees of batch rows that have a grammar, using only allowed tokens.

    tree: the draft trees of all batch rows, built without grammars
    proposal: the drafter's distributions from which `tree` was built
    rules: keys are batch rows, values are their grammars; other rows keep their trees
    branches: whether a rebuilt tree may have branches; otherwise it is a chain

    The tensors keep their shapes. If a rebuilt tree has fewer nodes than before, the unused nodes
    become children of the root with probability 0.
    """
    tokens = tree.tokens.clone()
    parents = tree.parents.clone()
    depths = tree.depths.clone()
    log_probs = tree.log_probs.clone()
    for row, rule in rules.items():
        nodes = search_constrained(proposal, row, tree.max_drafted, rule, branches)
        end = len(nodes.tokens) + 1
        tokens[row, 1:] = proposal.bonus_tokens[row]
        parents[row, 1:] = 0
        depths[row, 1:] = 1
        log_probs[row, 1:] = -torch.inf
        tokens[row, 1:end] = nodes.tokens.to(tokens)
        parents[row, 1:end] = nodes.parents.to(parents)
        depths[row, 1:end] = nodes.depths.to(depths)
        log_probs[row, 1:end] = nodes.log_probs.to(log_probs)
    return DraftTree(tokens, parents, depths, log_probs, max_depth=tree.max_depth)


class RowDistributions:
    """The drafter's token probabilities for one batch row, restricted to the tokens that the
    grammar allows."""

    def __init__(self, proposal: Proposal, row: int) -> None:
        assert proposal.marginals is not None
        self.num_top_tokens = 4 * proposal.budget
        log_q = proposal.vocabulary.expand_to_full(proposal.marginals[row])
        self.log_q = log_q.float().cpu().numpy()  # (drafted positions, vocabulary size)
        self.top_tokens = cache(self._find_top_tokens_and_probabilities)

        # (drafted positions, candidates): token ids of the conditional head's candidates
        self.candidates: np.ndarray | None = None
        conditionals = proposal.conditionals
        if conditionals is not None and not conditionals.recurrent:
            first, others = conditionals.candidate_log_probs
            self.candidates = conditionals.tokens[row].cpu().numpy()
            # Log-probabilities of the candidates of the first position.
            self.first_table = first[row].float().cpu().numpy()
            # (drafted positions - 1, candidates, candidates): log-probabilities of the candidates
            # of the other positions, given the candidate at the previous position.
            self.table = others[row].float().cpu().numpy()

    def best_children(self, path: list[int], allowed: np.ndarray, count: int) -> TokenScores:
        """Return the `count` likeliest allowed tokens after a path.

        path: the drafted tokens after the root
        allowed: (vocabulary size,) bool, true for the allowed tokens

        The log-probabilities returned are normalised over all allowed tokens.
        """
        slot = len(path)
        allowed = allowed[: self.log_q.shape[1]]

        candidates = self._get_head_candidates_after(path)
        usable = allowed[candidates.tokens] & (candidates.log_q > -np.inf)
        if np.exp(candidates.log_q[usable]).sum() > MIN_ALLOWED_HEAD_CANDIDATES_PROBABILITY:
            return normalise_and_keep_top(
                candidates.log_q[usable], candidates.tokens[usable], count
            )

        # Usually, enough of the likeliest tokens are allowed. Then the whole vocabulary need not be
        # sorted.
        log_q = self.log_q[slot]
        top_tokens, probabilities = self.top_tokens(slot)
        tokens = top_tokens[allowed[top_tokens]][:count]
        if len(tokens) == count and log_q[tokens[-1]] > -np.inf:
            log_total = np.log(probabilities @ allowed.astype(np.float32))
            return TokenScores(log_q[tokens] - log_total, tokens)

        tokens = np.flatnonzero(allowed & (log_q > -np.inf))
        return normalise_and_keep_top(log_q[tokens], tokens, count)

    def _get_head_candidates_after(self, path: list[int]) -> TokenScores:
        """Return the conditional head's candidates after a path, and their log-probabilities.

        No tokens are returned if there is no conditional head, or if the last token of the path is
        not one of the head's candidates.
        """
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

    def _find_top_tokens_and_probabilities(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the `num_top_tokens` likeliest tokens of a drafted position, and the probabilities
        of all tokens.

        slot: index of the drafted position

        The likeliest tokens are in descending order of their marginal probability. The second
        result is the marginal probabilities, (vocabulary size,).
        """
        log_q = self.log_q[slot]
        count = min(self.num_top_tokens, len(log_q) - 1)
        top_tokens = np.argpartition(-log_q, count)[:count]
        order = np.argsort(-log_q[top_tokens], kind="stable")
        return top_tokens[order], np.exp(log_q)


def normalise_and_keep_top(log_q: np.ndarray, tokens: np.ndarray, count: int) -> TokenScores:
    """Normalise the log-probabilities `log_q` of tokens; return the `count` likeliest tokens.

    The log-probabilities are normalised over all given tokens, not only over those returned.
    """
    order = np.argsort(-log_q, kind="stable")[:count]
    return TokenScores(log_q[order] - np.logaddexp.reduce(log_q), tokens[order])


class ConstrainedSearch:
    """A best-first search for the likeliest prefixes that the grammar of one batch row allows."""

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
        # For each node, starting with the root: the tokens on the path from the root to the node,
        # without the root's token.
        self.paths: list[list[int]] = [[]]
        # For each drafted node: (token, parent, depth, log-probability of the whole prefix).
        self.nodes: list[tuple[int, int, int, float]] = []
        # For each node, its best child that is not in the tree yet, as (negative log-probability of
        # the whole prefix, depth of the parent, parent, index of the child in `children[parent]`).
        self.heap: list[tuple[float, int, int, int]] = []
        # Key: node. Value: the tokens of its allowed children, with the log-probabilities of the
        # whole prefixes that end at these children.
        self.children: dict[int, TokenScores] = {}

    @property
    def newest_node(self) -> int:
        """The number of the node that was added last. The root has number 0."""
        return len(self.nodes)

    @property
    def is_full(self) -> bool:
        return len(self.nodes) == self.budget

    def add_node(self, token: int, parent: int, log_prob: float) -> None:
        """Add a child with this token to the node `parent`.

        log_prob: log-probability of the whole prefix that ends at the new node
        """
        path = [*self.paths[parent], token]
        self.paths.append(path)
        self.nodes.append((token, parent, len(path), log_prob))

    def expand_newest_node(self, log_prob: float, excluded_token: int | None = None) -> None:
        """Compute the allowed children of the newest node, and add the best one to the heap.

        log_prob: log-probability of the whole prefix that ends at the newest node
        excluded_token: this token is not used as a child, because the caller adds a node with this
            token; None for no such token
        """
        node = self.newest_node
        path = self.paths[node]
        ends_sequence = bool(path) and path[-1] in self.eos_token_ids
        if len(path) == self.max_depth or self.is_full or ends_sequence:
            return

        count = self.budget - len(self.nodes) if self.branches else 1
        log_q, tokens = self.distributions.best_children(
            path, self.rule.get_allowed_tokens(path), count
        )
        if excluded_token is not None:
            log_q = log_q[tokens != excluded_token]
            tokens = tokens[tokens != excluded_token]
        self.children[node] = TokenScores(log_prob + log_q, tokens)
        self.queue_child(node, 0)

    def queue_child(self, node: int, index: int) -> None:
        """Add child number `index` of a node to the heap, if the node has such a child."""
        if index < len(self.children[node].tokens):
            log_prob = float(self.children[node].log_q[index])
            heapq.heappush(self.heap, (-log_prob, len(self.paths[node]), node, index))

    def add_best_child(self) -> None:
        """Move the likeliest child from the heap to the tree.

        Then add two nodes to the heap: the next sibling and the best child of the moved node.
        """
        negative_log_prob, _, parent, index = heapq.heappop(self.heap)
        self.add_node(int(self.children[parent].tokens[index]), parent, -negative_log_prob)
        self.queue_child(parent, index + 1)
        self.expand_newest_node(-negative_log_prob)


def search_constrained(
    proposal: Proposal, row: int, budget: int, rule: GrammarRule, branches: bool
) -> DraftNodes:
    """Return the `budget` likeliest prefixes that a grammar allows, for one batch row.

    row: index of the batch row in `proposal`
    budget: maximum number of nodes that are returned
    rule: the grammar of the batch row
    branches: whether the tree may have branches; otherwise the nodes form a chain

    Fewer nodes are returned if the grammar allows fewer prefixes. A node with an EOS token has no
    children.
    """
    search = ConstrainedSearch(proposal, row, budget, rule, branches)
    for token in rule.forced_tokens[: min(search.max_depth, budget)]:
        parent = search.newest_node
        if branches:
            search.expand_newest_node(0.0, excluded_token=token)
        search.add_node(token, parent, 0.0)
    search.expand_newest_node(0.0)
    while search.heap and not search.is_full:
        search.add_best_child()

    return DraftNodes(
        torch.tensor([token for token, _, _, _ in search.nodes]),
        torch.tensor([parent for _, parent, _, _ in search.nodes]),
        torch.tensor([depth for _, _, depth, _ in search.nodes]),
        torch.tensor([log_prob for _, _, _, log_prob in search.nodes]),
    )

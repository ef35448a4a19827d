"""Draft trees of texts that must follow a grammar: the likeliest prefixes among those that it
allows.

Where only some tokens may follow a prefix, the drafter's distribution over these, normalised, takes
the place of its own: q(v | prefix, grammar). A prefix never scores above its parent, so that
DDTree's best-first search finds the best nodes here too. What the grammar forces behind the root,
as the tokenizer writes it, comes first: it has probability 1.

L drafted positions, V vocabulary, M nodes, C candidates of a position.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from infer.trees.tree import DraftTree, Nodes, Proposal

Pairs = tuple[np.ndarray, np.ndarray]  # log-probabilities and tokens, likeliest first
# probability of the allowed candidates of a conditional drafter below which all tokens are looked
# at
TRUST = 1e-3


@dataclass(frozen=True)
class Rule:
    """What a row's grammar says."""

    allowed: Callable[
        [list[int]], np.ndarray
    ]  # drafted tokens behind the root -> which may follow, (V,) bool
    forced: list[int]  # tokens that write what must follow the root


def constrain(
    tree: DraftTree, proposal: Proposal, rows: dict[int, Rule], branches: bool
) -> DraftTree:
    """Return the trees with those of some rows built anew, of the same size, from what their
    grammars
    allow: best first, or the likeliest path alone if not `branches`."""
    parts = [part.clone() for part in (tree.tokens, tree.parents, tree.depths, tree.log_probs)]
    for row, rule in rows.items():
        nodes = search(proposal, row, tree.budget, rule, branches)
        for part, new, left_over in zip(
            parts, nodes, (proposal.bonus[row], 0, 1, -torch.inf), strict=True
        ):
            part[row, 1:] = left_over  # an unlikely child
            part[row, 1 : len(new) + 1] = new.to(part)
    return DraftTree(*parts, max_depth=tree.max_depth)


class RowScores:
    """A row's distributions, narrowed to what may follow."""

    def __init__(self, proposal: Proposal, row: int) -> None:
        self.many = 4 * proposal.budget
        self.log_q = (
            proposal.vocabulary.whole(proposal.marginals[row]).float().cpu().numpy()
        )  # (L, V)
        self.likely = cache(self._likely)
        steps = proposal.steps
        self.tokens = None
        if steps is not None and not steps.recurrent:
            self.tokens = steps.tokens[row].cpu().numpy()  # (L, C)
            # (C,), (L - 1, C, C)
            self.first, self.table = (part[row].float().cpu().numpy() for part in steps.table)

    def children(self, path: list[int], allowed: np.ndarray, most: int) -> Pairs:
        """Return the `most` likeliest tokens behind a path, and their log q among those that are
        allowed."""
        slot = len(path)
        allowed = allowed[: self.log_q.shape[1]]
        log_q, tokens = self._candidates(path)
        may = allowed[tokens] & (log_q > -np.inf)
        if np.exp(log_q[may]).sum() > TRUST:
            return normalised(log_q[may], tokens[may], most)
        log_q, (top, q) = self.log_q[slot], self.likely(slot)
        tokens = top[allowed[top]][:most]
        if len(tokens) == most and log_q[tokens[-1]] > -np.inf:
            return log_q[tokens] - np.log(q @ allowed.astype(np.float32)), tokens
        tokens = np.flatnonzero(allowed & (log_q > -np.inf))
        return normalised(log_q[tokens], tokens, most)

    def _candidates(self, path: list[int]) -> Pairs:
        """Return a head's table behind a path; nothing where it has no row for that."""
        slot = len(path)
        which = (
            []
            if self.tokens is None or not slot
            else np.flatnonzero(self.tokens[slot - 1] == path[-1])
        )
        if self.tokens is None or (slot and not len(which)):
            return np.empty(0), np.empty(0, np.int64)
        return self.table[slot - 1, which[0]] if slot else self.first, self.tokens[slot]

    def _likely(self, slot: int) -> Pairs:
        """Return the likeliest tokens of a slot's marginals, likeliest first, and all probabilities
        (V,)."""
        log_q = self.log_q[slot]
        count = min(self.many, len(log_q) - 1)
        top = np.argpartition(-log_q, count)[:count]
        return top[np.argsort(-log_q[top], kind="stable")], np.exp(log_q)


def normalised(log_q: np.ndarray, tokens: np.ndarray, most: int) -> Pairs:
    """Return the `most` likeliest of tokens, and their log q among all of these."""
    order = np.argsort(-log_q, kind="stable")[:most]
    return log_q[order] - np.logaddexp.reduce(log_q), tokens[order]


def search(proposal: Proposal, row: int, budget: int, rule: Rule, branches: bool) -> Nodes:
    """Search for a row's likeliest prefixes best first: nodes (M - 1,), fewer than `budget` where
    no more are allowed. Nothing follows a token that ends the text."""
    scores = RowScores(proposal, row)
    length = proposal.marginals.shape[1]
    paths: list[list[int]] = [[]]
    found: list[tuple[int, int, int, float]] = []
    heap: list[
        tuple[float, int, int, int]
    ] = []  # minus the score, depth, parent, which of its children
    children: dict[int, Pairs] = {}  # of a node: log q of their paths, and tokens

    def open_node(node: int, score: float, spine: int | None = None) -> None:
        path = paths[node]
        if len(path) == length or len(found) == budget or (path and path[-1] in proposal.ends):
            return
        values, tokens = scores.children(
            path, rule.allowed(path), budget - len(found) if branches else 1
        )
        if spine is not None:
            values = values[tokens != spine]
            tokens = tokens[tokens != spine]
        children[node] = score + values, tokens
        push(node, 0)

    def push(node: int, which: int) -> None:
        if which < len(children[node][1]):
            heapq.heappush(heap, (-float(children[node][0][which]), len(paths[node]), node, which))

    def add(token: int, parent: int, score: float) -> None:
        paths.append([*paths[parent], token])
        found.append((token, parent, len(paths[-1]), score))

    for token in rule.forced[: min(length, budget)]:
        if branches:
            open_node(len(found), 0.0, token)
        add(token, len(found), 0.0)
    open_node(len(found), 0.0)
    while heap and len(found) < budget:
        minus, _, parent, which = heapq.heappop(heap)
        add(int(children[parent][1][which]), parent, -minus)
        push(parent, which + 1)
        open_node(len(found), -minus)
    tokens, parents, depths, log_probs = zip(*found, strict=True) if found else ((),) * 4
    return Nodes(
        torch.tensor(tokens), torch.tensor(parents), torch.tensor(depths), torch.tensor(log_probs)
    )

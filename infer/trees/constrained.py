"""Draft trees of texts that must follow a grammar: the likeliest prefixes among those that it allows.

Where only some tokens may follow a prefix, the drafter's distribution over these, normalised, takes the place of its
own: q(v | prefix, grammar). A prefix never scores above its parent, so that DDTree's best-first search finds the best
nodes here too. What the grammar forces behind the root, as the tokenizer writes it, comes first: it has probability 1.

L drafted positions, V vocabulary, M nodes, C candidates of a position.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from infer.trees.tree import DraftTree, Nodes, Proposal

Pairs = tuple[np.ndarray, np.ndarray]  # log-probabilities and tokens, likeliest first
TRUST = 1e-3  # probability of the allowed candidates of a conditional drafter below which all tokens are looked at


@dataclass(frozen=True)
class Rule:
    """What a row's grammar says."""

    allowed: Callable[[list[int]], np.ndarray]  # drafted tokens behind the root -> which may follow, (V,) bool
    forced: list[int]  # tokens that write what must follow the root


def constrain(tree: DraftTree, proposal: Proposal, rows: dict[int, Rule], branches: bool) -> DraftTree:
    """Return the trees with those of some rows built anew, of the same size, from what their grammars allow: best
    first, or the likeliest path alone if not `branches`."""
    parts = [part.clone() for part in (tree.tokens, tree.parents, tree.depths, tree.log_probs)]
    for row, rule in rows.items():
        fill(parts, row, proposal.bonus[row], search(proposal, row, tree.budget, rule, branches))
    return DraftTree(*parts, max_depth=tree.max_depth)


def forced_chains(forced: list[list[int]], proposal: Proposal) -> DraftTree:
    """Return chains of what grammars force behind every root: nothing is drafted."""
    rows, longest = len(forced), max(map(len, forced))
    empty = torch.zeros(rows, longest + 1, dtype=torch.long, device=proposal.bonus.device)
    parts = [empty.clone(), empty.clone(), empty.clone(), empty.float()]
    for row, tokens in enumerate(forced):
        steps = torch.arange(len(tokens))
        fill(parts, row, proposal.bonus[row], Nodes(torch.tensor(tokens), steps, steps + 1, torch.zeros(len(tokens))))
    return DraftTree(*parts, max_depth=longest)


def fill(parts: list[torch.Tensor], row: int, bonus: torch.Tensor, nodes: Nodes) -> None:
    """Write a row's nodes behind its root into the parts of a tree, (B, M) each."""
    count = nodes.tokens.shape[0]
    parts[0][row], parts[1][row], parts[2][row] = bonus, 0, 1  # what is left over: an unlikely child
    parts[2][row, 0], parts[3][row] = 0, -torch.inf
    for part, new in zip(parts, nodes, strict=True):
        part[row, 1 : count + 1] = new.to(part)
    parts[3][row, 0] = 0.0


class RowScores:
    """A row's distributions, narrowed to what may follow."""

    def __init__(self, proposal: Proposal, row: int) -> None:
        self.many, self.slots = 4 * proposal.budget, {}
        self.log_q = proposal.marginals[row].float().cpu().numpy()  # (L, V)
        steps, self.tokens = proposal.steps, None
        if steps is not None and not steps.recurrent:
            self.tokens = steps.tokens[row].cpu().numpy()  # (L, C)
            self.first, self.table = (part[row].float().cpu().numpy() for part in steps.table)  # (C,), (L - 1, C, C)

    def children(self, path: list[int], allowed: np.ndarray, most: int) -> Pairs:
        """Return the `most` likeliest tokens behind a path, and their log q among those that are allowed."""
        slot, allowed = len(path), allowed[: self.log_q.shape[1]]
        found = self._candidates(path, allowed, most) or self._likeliest(slot, allowed, most)
        if found is None:
            tokens = np.flatnonzero(allowed & (self.log_q[slot] > -np.inf))
            found = normalised(self.log_q[slot, tokens], tokens, most)
        return found

    def _candidates(self, path: list[int], allowed: np.ndarray, most: int) -> Pairs | None:
        """Return the same for the candidates of a head's table; None where it has none for the path, or hardly any that
        is allowed."""
        if self.tokens is None:
            return None
        slot = len(path)
        log_q, tokens = self.first, self.tokens[slot]
        if slot:
            which = np.flatnonzero(self.tokens[slot - 1] == path[-1])
            if not len(which):
                return None
            log_q = self.table[slot - 1, which[0]]
        may = allowed[tokens] & (log_q > -np.inf)
        log_q, tokens = log_q[may], tokens[may]
        return normalised(log_q, tokens, most) if np.exp(log_q).sum() > TRUST else None

    def _likeliest(self, slot: int, allowed: np.ndarray, most: int) -> Pairs | None:
        """Return the same for a slot's marginals, where enough of its likeliest tokens are allowed; else None."""
        log_q = self.log_q[slot]
        if slot not in self.slots:
            count = min(self.many, len(log_q) - 1)
            top = np.argpartition(-log_q, count)[:count]
            self.slots[slot] = top[np.argsort(-log_q[top], kind="stable")], np.exp(log_q)
        top, q = self.slots[slot]  # likeliest tokens first; (V,)
        tokens = top[allowed[top]][:most]
        if len(tokens) < most or log_q[tokens[-1]] == -np.inf:
            return None
        return log_q[tokens] - np.log(q @ allowed.astype(np.float32)), tokens


def normalised(log_q: np.ndarray, tokens: np.ndarray, most: int) -> Pairs:
    """Return the `most` likeliest of tokens, and their log q among all of these."""
    order = np.argsort(-log_q, kind="stable")[:most]
    return log_q[order] - np.logaddexp.reduce(log_q), tokens[order]


def search(proposal: Proposal, row: int, budget: int, rule: Rule, branches: bool) -> Nodes:
    """Search for a row's likeliest prefixes best first: nodes (M - 1,), fewer than `budget` where no more are allowed.
    Nothing follows a token that ends the text."""
    scores, length = RowScores(proposal, row), proposal.marginals.shape[1]
    paths: list[list[int]] = [[]]
    found: list[tuple[int, int, int, float]] = []
    heap: list[tuple[float, int, int, int]] = []  # minus the score, depth, parent, which of its children
    children: dict[int, Pairs] = {}  # of a node: log q of their paths, and tokens

    def open_node(node: int, score: float, spine: int | None = None) -> None:
        path = paths[node]
        if len(path) == length or len(found) == budget or (path and path[-1] in proposal.ends):
            return
        values, tokens = scores.children(path, rule.allowed(path), budget - len(found) if branches else 1)
        if spine is not None:
            values, tokens = values[tokens != spine], tokens[tokens != spine]
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
    return Nodes(torch.tensor(tokens), torch.tensor(parents), torch.tensor(depths), torch.tensor(log_probs))

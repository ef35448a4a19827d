"""A node budget for the machine and its load: measures how long a pass takes at every size, notes what rounds really
take and commit, and picks the fastest size of a round, down to none at all.

B rows, M tree nodes.
"""

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from infer.drafters.base import Drafter
from infer.targets.target import Target
from infer.trees.ddtree import ddtree
from infer.trees.joint import expected
from infer.trees.tree import DraftTree, Proposal, root_only

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # node counts to choose among
CONTEXT = 128  # positions in the cache while measuring
FIRST = 16  # nodes of the first round at most, before anything is known
POSITIONS = 4096  # most positions of all rows that a target pass computes, roots and nodes
TRIAL = 8  # rounds that draft before it is asked whether to
OTHER = 100  # of rounds of the kind that seems slower, what is lost is one in so many
SOON = 4  # rounds between two of that kind at least
BESIDE = 16  # rounds between two whose trees are a size larger or smaller than seems best
SHARE = 0.05  # of a round in its cost, once there are enough
MEMORY = 200  # rows of drafting rounds in the averages of what trees promise and keep
NEAR = 16  # how many rounds of twice the rows or nodes say as much of a cost as one of the same


@dataclass(frozen=True)
class BudgetRule:
    """Seconds of a target pass by the positions it computes, and of everything else in a round."""

    positions: tuple[int, ...]
    seconds: tuple[float, ...]
    other: float

    @property
    def largest(self) -> int:
        return SIZES[-1]

    def cost(self, positions: int) -> float:
        """Return the seconds of a round whose target pass computes this many positions, all rows together: interpolated
        between measurements, and extrapolated linearly beyond them."""
        i = min(max(1, bisect_left(self.positions, positions)), len(self.positions) - 1)
        left, right = self.positions[i - 1], self.positions[i]
        slope = (self.seconds[i] - self.seconds[i - 1]) / (right - left)
        return self.seconds[i - 1] + slope * (positions - left) + self.other


class Pace:
    """What rounds cost and commit lately, by which each round's nodes are chosen: a tree's, or none, where plain
    decoding is faster, as it is when many rows share the machine. A round of the other kind now and then keeps both
    known.

    A tree of n nodes commits what the drafter promises, the sum of their probabilities, times how much of such promises
    was kept. Among the sizes of a tree that is there, the next nodes are worth their time where they commit more than
    rounds do in that time on average: as many as possible a second over all rounds, not in each by itself.

    Where rows share their budgets (`joint`), nodes are those that a row has on average.

    Averages are exponential, over about `MEMORY` rows of drafting rounds, costs over 1 / SHARE rounds. Costs are ratios
    to the rule's, by rows (to the next power of two) and nodes; those of like rows and nodes lean on each other, so
    that a size need not be tried often. The first round of each does not count once there is a second: it may have
    waited for what is made once.
    """

    def __init__(self, rule: BudgetRule, most: int, joint: bool = False) -> None:
        self.rule, self.joint = rule, joint
        self.sizes = sorted({size for size in SIZES if size < most} | {most})
        # by bits of rows and place of the nodes among the sizes, none at 0 (32, S + 1): seconds over the rule's
        self.ratios = np.ones((32, len(self.sizes) + 1))
        self.known = np.zeros_like(self.ratios)  # how many rounds these are of
        nodes = np.log2([1, *(size + 1 for size in self.sizes)])
        self._near = float(NEAR) ** -abs(nodes[:, None] - nodes)  # (S + 1, S + 1) weight of a size for another
        self._means: dict[int, list[float]] = {}  # bits of rows -> means of the ratios, by place
        self.promised = [0.0]  # by place, as far as was found: tokens that a row expected beside the bonus token
        self.kept = [(1.0, 1.0)]  # by place, as far as was verified: such tokens committed, and expected of these trees
        self.rate = 0.0  # tokens a second that a row commits; 0: not known yet
        self._expected = [1.0]  # of the tree that was chosen last, by nodes
        self.rounds = self.alike = 0  # all, and those since one of the kind that seems slower
        self.texts = 0  # rows of all rounds that drafted
        self.last = most  # nodes of the last round

    def cost(self, rows: int, nodes: int) -> float:
        """Return the seconds of a round of so many rows and drafted nodes; without nodes nothing is drafted."""
        return self._by_rule(rows, nodes) * self._ratios(rows.bit_length())[self._place(nodes)]

    def _place(self, nodes: int) -> int:
        """Return the place of the largest size of at most so many nodes, from 1; 0 for none."""
        return bisect_right(self.sizes, nodes)

    def _by_rule(self, rows: int, nodes: int) -> float:
        return self.rule.cost(rows * (nodes + 1)) - (0 if nodes else self.rule.other)

    def _ratios(self, bits: int) -> list[float]:
        """Return the means of the known ratios, by place: one of twice the rows or nodes weighs a NEAR-th."""
        if bits not in self._means:
            rows = float(NEAR) ** -abs(np.arange(len(self.known)) - bits)
            weights = rows[:, None] * np.minimum(self.known, 1 / SHARE)
            total = weights.sum(0) @ self._near
            means = np.divide((weights * self.ratios).sum(0) @ self._near, total, np.ones_like(total), where=total > 0)
            self._means[bits] = means.tolist()
        return self._means[bits]

    def trust(self, nodes: int) -> float:
        """Return how many tokens so many nodes commit for every one that is expected of them; beyond what was tried, as
        many as of the largest trees."""
        committed, promised = self.kept[min(self._place(nodes), len(self.kept) - 1)]
        return committed / promised

    def length(self, nodes: int) -> float:
        """Return how many tokens a row commits with so many nodes; beyond what was found, no more."""
        return 1 + self.promised[min(self._place(nodes), len(self.promised) - 1)] * self.trust(nodes)

    def most_nodes(self, rows: int, most: int, full: int | None = None) -> int:
        """Return how many nodes the next round drafts, at most so many, and no more than it is worth; 0: none. `full`:
        how many rows there would soon be if nothing was drafted, where texts wait and those in work end too soon for
        prompts to keep up."""
        self.rounds += 1
        sizes = [size for size in self._up_to(most) if rows * (size + 1) <= POSITIONS] or self.sizes[:1]
        if self.rounds <= TRIAL or len(self.kept) == 1:
            return next((size for size in reversed(sizes) if size <= FIRST), sizes[0])
        best = max(sizes, key=lambda size: self.length(size) / self.cost(rows, size))
        full, drafting, plain = full or rows, self.cost(rows, best), self.cost(rows, 0)
        self.rate = max(self.length(best) / drafting, 1 / plain)
        gain = rows * self.length(best) / drafting * self.cost(full, 0) / full  # over drafting nothing
        other = self.alike >= self._patience(rows, gain, plain / drafting if gain > 1 else drafting / plain)
        self.alike = 0 if other else self.alike + 1
        if (gain > 1) == other:
            return 0
        return next((size for size in sizes if size >= 2 * best), sizes[-1])  # this round's tree may deserve more

    def _patience(self, rows: int, gain: float, cost: float) -> float:
        """Return how many rounds of the better kind come between two of the other, of which one costs so much more;
        few where nothing is known of it."""
        rounds = max(SOON, OTHER * cost * (1 - min(gain, 1 / gain)))
        known = self.known[rows.bit_length()]
        return rounds if (known[:1] if gain > 1 else known[1:]).any() else min(rounds, BESIDE)

    def nodes(self, log_probs: torch.Tensor, most: int) -> int:
        """Return the size, at most so many nodes, that commits most tokens a second over all rounds, for ranked trees
        with log-probabilities (B, M), or such as `infer.trees.joint.by_place` returns: the first n nodes are the best
        tree of n, whose expected acceptance length is the sum of their probabilities (DDTree proposition 1), which is
        corrected by how right they were lately. All rows get the same size, or share it."""
        self._expected = self._by_size(log_probs)
        return self._best(len(log_probs), most)

    def _by_size(self, log_probs: torch.Tensor) -> list[float]:
        """Return the tokens that a row is expected to commit with 0, 1, ... nodes, from log-probabilities (B, M)."""
        if self.joint:
            return expected(log_probs).tolist()
        return log_probs.float().exp().cumsum(1).mean(0).tolist()

    def nodes_ahead(self, rows: int, most: int) -> int:
        """Return the size of the next trees, at most so many nodes, before they are drafted: as if their probabilities
        were those of the last ones."""
        known = len(self._expected) - 1
        return self._best(rows, min(most, known)) if known else min(most, FIRST)

    def _up_to(self, most: int) -> list[int]:
        """Return the sizes to choose among where so many nodes are the most."""
        return [*(size for size in self.sizes if size < most), most]

    def grown(self, nodes: int) -> int:
        """Return how many nodes are to be found where so many are verified: what more would be worth shows so."""
        return next((size for size in self.sizes if size >= 2 * nodes), self.sizes[-1])

    def expect(self, log_probs: list[list[int]]) -> None:
        """Take note of the log-probabilities of all nodes found, the bits of float32, a list for every row."""
        if len(log_probs[0]) > 1:
            self._expected = self._by_size(torch.tensor(log_probs, dtype=torch.int32).view(torch.float32))

    def _best(self, rows: int, most: int) -> int:
        """Return the best size of at most so many nodes by what is expected of each."""
        expected = self._expected + self._expected[-1:] * (most + 1 - len(self._expected))  # by nodes and the root
        sizes = self._up_to(most)
        worth = [(expected[size] - 1) * self.trust(size) - self.rate * self.cost(rows, size) for size in sizes]
        best = worth.index(max(worth))
        turn, last = divmod(self.rounds, BESIDE)
        if last == BESIDE - 1:  # what the sizes beside it cost and commit is found out by taking them
            best = max(0, min(len(sizes) - 1, best + (1 if turn % 2 else -1)))
        return sizes[best]

    def note(self, seconds: float, nodes: int, paths: list[list[int]]) -> None:
        """Take note of a round: its drafted nodes, and the nodes of every row's accepted path, the root left out; where
        rows share their budgets, the size that each of them needs."""
        rows, self.last = len(paths), nodes
        key, ratio = (rows.bit_length(), self._place(nodes)), seconds / self._by_rule(rows, nodes)
        self.known[key] += 1
        known = ratio if self.known[key] < 3 else self.ratios[key]
        share = max(SHARE, 1 / self.known[key])
        self.ratios[key] = known + share * (min(ratio, 3 * known) - known)  # a pause is not the machine's pace
        self._means.clear()
        if not nodes:
            return
        self.texts += rows
        share, keep = rows / min(rows + MEMORY - 1, self.texts), MEMORY / (rows + MEMORY)  # many rows say more
        for place, size in enumerate(self.sizes[: self._place(len(self._expected) - 1)], 1):
            promised = self._expected[size] - 1
            if place == len(self.promised):
                self.promised.append(promised)
            self.promised[place] += share * (promised - self.promised[place])
            if size <= nodes:
                if place == len(self.kept):
                    self.kept.append((1.0, 1.0))  # to begin with, as if one was right
                committed = sum(node <= size for path in paths for node in path)
                before, expected = self.kept[place]
                self.kept[place] = keep * before + committed, keep * expected + rows * promised


@torch.inference_mode()
def calibrate(target: Target, drafter: Drafter, clock: Callable[[], float], repeats: int = 7) -> BudgetRule:
    """Measure one draft and target passes of all sizes in turns: medians of `repeats`. About a second on a laptop."""
    cache, state = target.cache(1, CONTEXT + SIZES[-1] + 1), drafter.state(1, CONTEXT)
    prompt = [i % target.config.vocab_size for i in range(CONTEXT)]
    with cache.add(1) as row:
        features = target.extend([prompt], row, drafter.layer_ids)
    with state.add(1) as row:
        drafter.update_context(target, features.context, torch.tensor([prompt], device=target.device), [CONTEXT], row)
    bonus = torch.zeros(1, dtype=torch.long, device=target.device)

    def draft() -> DraftTree:
        state.cache.advance([-2])
        drafter.update_context(target, features.context[:, :2], bonus.repeat(1, 2), [2], state)
        if not getattr(drafter, "conditioned", False):
            return ddtree(Proposal(bonus, drafter.draft(target, bonus, state), SIZES[-1]))
        block = drafter.draft_block(target, bonus, state)
        steps = drafter.conditional_draft(target, bonus, block)
        return ddtree(Proposal(bonus, block.marginals, SIZES[-1], steps=steps))

    tree = draft()
    trees = [root_only(bonus)] + [tree.first(size) for size in SIZES]
    drafts, passes = [], [[] for _ in trees]
    for repeat in range(repeats + 2):  # the first two warm up
        mark = clock()
        draft()
        now = clock()
        if repeat >= 2:
            drafts.append(now - mark)
        for i, tree in enumerate(trees):
            mark = clock()
            ancestors = tree.ancestors()
            target.head(target.verify(tree, ancestors, cache, drafter.layer_ids).last).argmax(-1)
            now = clock()
            if repeat >= 2:
                passes[i].append(now - mark)
    seconds, highest = [], 0.0
    for samples in passes:
        highest = max(highest, statistics.median(samples))  # more nodes never cost less
        seconds.append(highest)
    return BudgetRule(tuple(tree.budget + 1 for tree in trees), tuple(seconds), statistics.median(drafts))

"""A node budget for the machine and its load: measures how long a pass takes at every size, notes what
rounds really take and commit, and picks the fastest size of a round, down to none at all.

B rows, M tree nodes, S sizes.
"""

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from timeit import timeit

import numpy as np
import torch

from infer.config import EngineConfig
from infer.drafters.base import Drafter
from infer.drafters.heads.draft import propose
from infer.engine.choices import likeliest
from infer.targets.target import Target, takes_uneven
from infer.trees.ddtree import ddtree
from infer.trees.tree import DraftTree

# node counts to choose among: with the root most fill blocks of rows, as products take them
SIZES = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63, 95, 127, 191, 255)
CONTEXT = 128  # positions in the cache while measuring
DRAFTS = 16  # drafts while measuring, at most; each sees two more positions
FIRST = 15  # nodes of the first rounds at most, before anything is known
TRIED = 2  # plain rounds that one of the first may take by the rule, where one node does not take more
DEAR = 4  # plain passes that a pass costs at which larger ones are not measured
POSITIONS = 4096  # most positions of all rows that a target pass computes, roots and nodes
TRIAL = 8  # rounds that draft before it is asked whether to
OTHER = 300  # exploring plain decoding, or drafting, may cost 1/300 of throughput
# rounds between two that explore: at least; and at most, of a kind of which nothing is known
SOON, UNKNOWN = 4, 16
BESIDE = 64  # rounds between two that verify a size more than seems best: what that costs may have changed
DOUBT = 4  # promised tokens that count as kept before any is known
BITS = 24  # bins of nodes, by the whole bits of their log-probabilities
SHARE = 0.05  # of a round in its cost, once there are enough
PAUSE = 1.5  # times what was thought that a round counts as at most: it may have waited for what is made once
MEMORY = 200  # rows of drafting rounds in the averages of what trees promise and keep
LN2 = math.log(2)
NOTHING = 1e-30  # weight of the rule's own guess
NEAR = 16.0  # how many rounds of twice the rows or nodes say as much of a cost as one of the same


@dataclass(frozen=True)
class BudgetRule:
    """Seconds of a target pass by the positions it computes, and of everything else in a round."""

    positions: tuple[int, ...]
    seconds: tuple[float, ...]  # of a pass over these positions of one row
    other: float  # of one row's draft

    def cost(self, positions: int, drafts: bool = True) -> float:
        """Return the seconds of a round whose target pass computes this many positions, all rows
        together: interpolated between measurements, and extrapolated linearly beyond them."""
        i = min(max(1, bisect_left(self.positions, positions)), len(self.positions) - 1)
        left, right = self.positions[i - 1], self.positions[i]
        slope = (self.seconds[i] - self.seconds[i - 1]) / (right - left)
        return self.seconds[i - 1] + slope * (positions - left) + (self.other if drafts else 0.0)


class Budget:
    """The same number of nodes in every round."""

    adapts = False  # to the log-probabilities of the nodes that are found

    def __init__(self, most: int) -> None:
        self.most = self.last = most  # nodes of a row's tree at most; and of the last round

    def most_nodes(self, rows: int | torch.Tensor, most: int) -> int:
        return most

    nodes_ahead = most_nodes

    def grown(self, nodes: int) -> int:
        return nodes

    def cut(self, tree: DraftTree) -> DraftTree:
        """Return what is verified of ranked trees."""
        return tree

    def note(self, seconds: float, nodes: int, paths: list[list[int]], promised: list[list[float]]) -> None:
        pass


class BudgetController(Budget):
    """What rounds cost and commit lately, by which each round's nodes are chosen: a tree's, or none,
    where plain decoding is faster, as it is when many rows share the machine. A round of the other kind
    now and then keeps both known.

    As CaDDTree (arXiv:2606.01813) does, it searches a tree and then decides how much of it to verify, by
    what its nodes are worth in this round. A node commits what the drafter promises, its probability,
    times how much was kept lately of promises like it, by the bits of its log-probability. The next
    nodes are worth their time where they commit more than rounds do in that time on average: as many
    tokens as possible a second over all rounds, not in each by itself.

    Where rows may be `uneven`, nodes of all rows compete: those that are likeliest are verified, wherever
    they are, and a size is a row's on average.

    Averages are exponential. Costs are ratios to the rule's, by rows (to the next power of two) and
    size; those of like rows and sizes lean on each other.
    """

    adapts = True

    def __init__(self, rule: BudgetRule, most: int, uneven: bool = False) -> None:
        super().__init__(most)
        self.uneven, self.limit = uneven, most  # of a row on average in the next round
        sizes = [0, *sorted({size for size in SIZES if size < most} | {most})]
        self.sizes = sizes
        # of one row of a size's nodes, or none: by rows, so that the rule is asked once
        self.by_rule = cache(lambda rows: np.array([rule.cost(rows * (n + 1), n > 0) for n in sizes]))
        apart = np.log2(np.add(sizes, 1))
        self.near = NEAR ** -abs(apart[:, None] - apart)  # (S, S) weight of a size for another
        self.ratios = np.ones((32, len(sizes)))  # by bits of rows and size: seconds over the rule's
        self.known = np.zeros_like(self.ratios)  # how many rounds these are of
        self._costs: dict[int, np.ndarray] = {}  # by rows, until the next round is noted
        # tokens that a row expected of a size's nodes behind the size before
        self.promised = np.zeros(len(sizes) - 1)
        self.found = np.zeros_like(self.promised)  # rows that these are of
        self.verified = np.zeros((2, BITS))  # by bits of verified nodes: tokens promised, and committed
        self.rate = 0.0  # tokens a second that a row commits; 0: not known yet
        self.likely = np.zeros((1, 0))  # (B, M) the drafter's probabilities of the drafted nodes found last
        self.own = self.bits = np.zeros((1, 0), int)  # the bins of these, by rows and as they compete
        self.expected = np.zeros(1)  # of a row's, by nodes: tokens beside the bonus token
        self.rounds = self.alike = 0  # all, and those since one of the kind that seems slower

    def place(self, nodes: int) -> int:
        """Return which is the largest size within so many nodes."""
        return bisect_right(self.sizes, nodes) - 1

    def costs(self, rows: int) -> np.ndarray:
        """Return the seconds of a round of so many rows, by size, (S,); without nodes nothing is
        drafted. A known ratio of twice the rows or nodes weighs a NEAR-th of one of the same."""
        if rows not in self._costs:
            weights = NEAR ** -abs(np.arange(len(self.known)) - rows.bit_length())  # of numbers of rows
            total, seen = (weights @ of @ self.near + NOTHING for of in (self.known * self.ratios, self.known))
            self._costs[rows] = total / seen * self.by_rule(rows)
        return self._costs[rows]

    def most_nodes(self, rows: int, most: int) -> int:
        """Return how many nodes the next round finds, at most so many: more than are worth their time on
        average, as this round's may be worth more; 0: none."""
        self.rounds += 1
        last = self.place(max(1, min(most, POSITIONS // rows - 1)))
        self.limit = self.sizes[last]
        if self.rounds <= TRIAL or not self.promised.any():
            costs = self.by_rule(rows)
            cheap = int((costs <= TRIED * costs[0]).sum()) - 1
            return min(self.sizes[max(1, min(cheap, last))], FIRST)
        costs = self.costs(rows)
        rates = (1 + np.append(0.0, self.promised[:last].cumsum())) / costs[: last + 1]
        best = 1 + int(rates[1:].argmax())
        gain = rates[best] / rates[0]  # over drafting nothing
        self.rate = float(max(rates[0], rates[best]))
        other = self.alike >= self._patience(rows, gain, costs[0] / costs[best])
        self.alike = 0 if other else self.alike + 1
        found = self.grown(self.sizes[best])
        found = max(found, FIRST) if self.uneven and rows > 1 else min(found, self.limit)  # sure rows have many
        return 0 if (gain > 1) == other else min(found, self.most)

    def _patience(self, rows: int, gain: float, cost: float) -> float:
        """Return how many rounds of the better kind come between two of the other, where a plain round
        costs so much of one that drafts; few where nothing is known of it."""
        rounds = max(SOON, OTHER * (cost * (1 - 1 / gain) if gain > 1 else (1 - gain) / cost))
        known = self.known[rows.bit_length()]
        return rounds if (known[:1] if gain > 1 else known[1:]).any() else min(rounds, UNKNOWN)

    def cut(self, tree: DraftTree) -> DraftTree:
        nodes = self.nodes(tree.log_probs, min(self.limit, tree.budget))
        return tree.likeliest(nodes) if self.uneven and len(tree.tokens) > 1 else tree.first(nodes)

    def nodes(self, log_probs: torch.Tensor, most: int) -> int:
        """Return the size, at most so many nodes, that commits most tokens a second over all rounds,
        for ranked trees with log-probabilities (B, M): the first n nodes are the best tree of n, whose
        expected acceptance length is the sum of their probabilities (DDTree proposition 1), which are
        calibrated by what was accepted lately."""
        self._expect(log_probs.double().numpy(force=True))
        return self._best(len(log_probs), most)

    def _expect(self, log_probs: np.ndarray) -> None:
        """Take note of what trees with log-probabilities (B, M) promise."""
        self.likely = np.exp(log_probs[:, 1:])
        self.own = self.bits = np.minimum(abs(log_probs[:, 1:]) / LN2, BITS - 1).astype(int)
        if self.uneven:  # the likeliest B of all rows are in the first column, those behind in the next
            order = self.likely.ravel().argsort()[::-1]
            self.likely, self.bits = (x.ravel()[order].reshape(x.shape[::-1]).T for x in (self.likely, self.bits))
        # bins in which little was verified are as right as all nodes are
        promised, kept = self.verified
        factors = (kept + DOUBT * (kept.sum() + DOUBT) / (promised.sum() + DOUBT)) / (promised + DOUBT)
        each = np.minimum(self.likely * factors[self.bits], 1).mean(0)
        self.expected = np.append(0.0, each.cumsum())

    def nodes_ahead(self, rows: int, most: int) -> int:
        """Return the size of the next trees, at most so many nodes, before they are drafted: as if
        their probabilities were those of the last ones."""
        known = len(self.expected) - 1
        return self._best(rows, min(most, known)) if known else min(most, FIRST)

    def grown(self, nodes: int) -> int:
        """Return how many nodes are to be found where so many are worth it: what more would be worth
        shows so."""
        return next((size for size in self.sizes if size >= 2 * nodes), self.sizes[-1])

    def _best(self, rows: int, most: int) -> int:
        """Return the best size of at most so many nodes by what is expected of each."""
        last = self.place(min(most, len(self.expected) - 1))
        worth = self.expected[self.sizes[: last + 1]] - self.rate * self.costs(rows)[: last + 1]
        best = 1 + int(worth[1:].argmax())
        return self.sizes[min(best + (self.rounds % BESIDE == 0), last)]

    def note(self, seconds, nodes, paths, promised=None) -> None:
        """Take note of a round: its drafted nodes, and the nodes of every row's accepted path, the root
        left out; `promised`: the log-probabilities of all nodes found, where `nodes` was not told
        them."""
        self.last, rows, place = nodes, len(paths), self.place(nodes)
        key = rows.bit_length(), place
        # a pause is not the machine's pace; the first round of a size makes its tape
        seconds = min(seconds, (PAUSE if self.known[key] else 1) * self.costs(rows)[place])
        self.known[key] = min(self.known[key] + 1, 1 / SHARE)
        self.ratios[key] += (seconds / self.by_rule(rows)[place] - self.ratios[key]) / self.known[key]
        self._costs.clear()
        if promised and len(promised[0]) > 1:
            self._expect(np.array(promised))
        if not nodes:
            return
        keep = MEMORY / (rows + MEMORY)
        sizes = self.sizes[: 1 + self.place(min(len(self.expected) - 1, self.most))]
        here = slice(len(sizes) - 1)
        self.found[here] = keep * self.found[here] + rows
        self.promised[here] += rows / self.found[here] * (np.diff(self.expected[sizes]) - self.promised[here])
        kept = [self.own[row, node - 1] for row, path in enumerate(paths) for node in path]
        bits, likely = (x[:, :nodes].ravel() for x in (self.bits, self.likely))
        self.verified = keep * self.verified + [np.bincount(bits, likely, BITS), np.bincount(kept, minlength=BITS)]


def rule_of(target: Target, drafter: Drafter, clock: Callable[[], float]) -> BudgetRule:
    """Return what `calibrate` measures, once for a target and a drafter: the target keeps it as long as
    there is the drafter."""
    if drafter not in target.budget_rules:
        target.budget_rules[drafter] = calibrate(target, drafter, clock)
    return target.budget_rules[drafter]


@torch.inference_mode()
def calibrate(target: Target, drafter: Drafter, clock: Callable[[], float], repeats: int = 3) -> BudgetRule:
    """Measure one row's draft and its target passes behind `CONTEXT` positions, size by size until one
    costs `DEAR` plain ones, in turns: medians of `repeats`. About a second on a laptop."""
    cache, state = target.cache(1, CONTEXT + SIZES[-1] + 1), drafter.state(1, CONTEXT + 2 * DRAFTS)
    prompt = [i % target.config.vocab_size for i in range(CONTEXT)]
    with cache.add(1) as new:
        features = target.extend([prompt], new, drafter.layer_ids)
    tokens, bonus = (torch.tensor(ids, device=target.device) for ids in ([prompt], [0]))
    with state.add(1) as new:
        drafter.update_context(target, features.context, tokens, [CONTEXT], new)

    def draft(nodes: int) -> DraftTree:
        drafter.update_context(target, features.context[:, :2], tokens[:, :2], [2], state)
        return ddtree(propose(drafter, target, bonus, state, nodes))

    def verify(tree: DraftTree) -> None:
        likeliest(target, target.verify(tree, tree.ancestors(), cache, drafter.layer_ids).last)

    tree = draft(SIZES[-1])
    tasks, sizes, first = [partial(draft, FIRST)], [], 0.0
    for size in sorted({min(size, tree.budget) for size in (0, *SIZES)}):
        tasks.append(partial(verify, tree.first(size)))
        sizes.append(size)
        tasks[-1]()  # warms up
        seconds = timeit(tasks[-1], timer=clock, number=1)
        first = first or seconds
        if seconds > DEAR * first:
            break
    samples = [[timeit(task, timer=clock, number=1) for task in tasks] for _ in range(repeats)]
    other, *passes = map(statistics.median, zip(*samples, strict=True))
    return BudgetRule(tuple(size + 1 for size in sizes), tuple(accumulate(passes, max)), other)


def make_budget(target: Target, drafter: Drafter | None, options: EngineConfig, clock: Callable[[], float]) -> Budget:
    """Make the node budget that options ask for."""
    if drafter is None:
        return Budget(0)
    method, adapts = options.tree, options.budget == "auto"
    most = SIZES[-1] if adapts else options.budget
    if method.most_nodes is not None:
        most = min(most, method.most_nodes(drafter.block_size))
    if not adapts:
        return Budget(most)
    return BudgetController(rule_of(target, drafter, clock), most, method.ranked and takes_uneven(target))

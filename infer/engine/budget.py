"""A node budget for the machine and its load: measures how long a pass takes at every size, notes what rounds really
take and commit, and picks the fastest size of a round, down to none at all.

B rows, M tree nodes.
"""

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from math import exp

import numpy as np
import torch

from infer.drafters.base import Drafter
from infer.drafters.heads.draft import propose
from infer.targets.target import Target
from infer.trees.ddtree import ddtree
from infer.trees.tree import DraftTree

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # node counts to choose among
CONTEXT = 128  # positions in the cache while measuring
DRAFTS = 16  # drafts while measuring, at most; each sees two more positions
FIRST = 16  # nodes of the first round at most, before anything is known
DEAR = 4  # plain passes that a pass costs at which larger ones are not measured
POSITIONS = 4096  # most positions of all rows that a target pass computes, roots and nodes
TRIAL = 8  # rounds that draft before it is asked whether to
OTHER = 300  # of rounds of the kind that seems slower, what is lost is one in so many
SOON = 4  # rounds between two of that kind at least
BESIDE = 32  # rounds between two whose trees are a size larger than seems best
DOUBT = 4  # promised tokens that count as kept before any is known
SHARE = 0.05  # of a round in its cost, once there are enough
PAUSE = 1.5  # times what was thought that a round counts as at most: it may have waited for what is made once
MEMORY = 200  # rows of drafting rounds in the averages of what trees promise and keep
REFRESH = 16  # rounds until a new plan, and between two of a kind of which nothing is known at most
NEAR = 16  # how many rounds of twice the rows or nodes say as much of a cost as one of the same


@dataclass(frozen=True)
class BudgetRule:
    """Seconds of a target pass by the positions it computes, and of everything else in a round."""

    positions: tuple[int, ...]
    seconds: tuple[float, ...]  # of a pass over these positions of one row
    other: float  # of one row's draft
    row: float = 0.0  # more of a pass for each further row that has these positions
    row_drafts: float = 0.0  # and of the draft

    def cost(self, positions: int, rows: int = 1, drafts: bool = True) -> float:
        """Return the seconds of a round whose target pass computes this many positions, all rows together: interpolated
        between measurements, and extrapolated linearly beyond them."""
        i = min(max(1, bisect_left(self.positions, positions)), len(self.positions) - 1)
        left, right = self.positions[i - 1], self.positions[i]
        slope = (self.seconds[i] - self.seconds[i - 1]) / (right - left)
        seconds = self.seconds[i - 1] + slope * (positions - left) + self.row * (rows - 1)
        return seconds + (self.other + self.row_drafts * (rows - 1) if drafts else 0.0)


@dataclass(frozen=True)
class BudgetPlan:
    """What rounds do until costs are looked at again."""

    best: int  # place of the best size of a tree
    rate: float  # tokens a second that a row commits
    drafts: bool  # better than drafting nothing
    patience: float  # rounds between two of the kind that seems slower


class Budget:
    """The same number of nodes in every round."""

    adapts = False  # to the log-probabilities of the nodes that are found

    def __init__(self, most: int) -> None:
        self.most = self.last = most  # nodes of a row's tree at most; and of the last round

    def most_nodes(self, rows: int, most: int, full: int | None = None) -> int:
        return most

    def nodes(self, log_probs: torch.Tensor, most: int) -> int:
        return most

    def nodes_ahead(self, rows: int, most: int) -> int:
        return most

    def grown(self, nodes: int) -> int:
        return nodes

    def note(self, seconds: float, nodes: int, paths: list[list[int]], promised: list[list[float]]) -> None:
        pass


class BudgetController(Budget):
    """What rounds cost and commit lately, by which each round's nodes are chosen: a tree's, or none, where plain
    decoding is faster, as it is when many rows share the machine. A round of the other kind now and then keeps both
    known, and one of a size larger than seems best what that would bring.

    A node commits what the drafter promises, its probability, times how much of such promises was kept. Among the sizes
    of a tree that is there, the next nodes are worth their time where they commit more than rounds do in that time on
    average: as many as possible a second over all rounds, not in each by itself.

    Averages are exponential, over about `MEMORY` rows of drafting rounds, costs over 1 / SHARE rounds. Costs are ratios
    to the rule's, by rows (to the next power of two) and nodes; those of like rows and nodes lean on each other. What
    follows from them is kept for `REFRESH` rounds.
    """

    adapts = True

    def __init__(self, rule: BudgetRule, most: int) -> None:
        super().__init__(most)
        self.rule = rule
        self.sizes = sorted({size for size in SIZES if size < most} | {most})
        # a size's place is its number, from 1; at 0 there are no nodes
        self._place = [bisect_right(self.sizes, nodes) for nodes in range(most + 1)]  # of the largest size within
        # by bits of rows and place (32, S + 1): seconds over the rule's
        self.ratios = np.ones((32, len(self.sizes) + 1))
        self.known = np.zeros_like(self.ratios)  # how many rounds these are of
        nodes = np.log2([1, *(size + 1 for size in self.sizes)])
        self._near = float(NEAR) ** -abs(nodes[:, None] - nodes)  # (S + 1, S + 1) weight of a size for another
        self._costs: dict[int, list[float]] = {}  # rows -> seconds of a round, by place
        self._plans: dict[tuple[int, int, int], BudgetPlan] = {}  # rows, largest place, rows without drafts
        self.promised: list[float] = []  # tokens that a row expected of a size's nodes behind the size before, averages
        self.found: list[float] = []  # rows that these are of
        self.kept = self.verified = 0.0  # tokens committed beside bonus tokens, and expected in the same rounds
        self.rate = 0.0  # tokens a second that a row commits; 0: not known yet
        self._expected = [0.0]  # of the tree that was chosen last, by nodes: tokens beside the bonus token
        self.rounds = self.alike = 0  # all, and those since one of the kind that seems slower

    @property
    def trust(self) -> float:
        """What is committed for every token that is expected."""
        return (self.kept + DOUBT) / (self.verified + DOUBT)

    def costs(self, rows: int) -> list[float]:
        """Return the seconds of a round of so many rows, by place; without nodes nothing is drafted. A known ratio
        of twice the rows or nodes weighs a NEAR-th of one of the same."""
        if rows not in self._costs:
            near = float(NEAR) ** -abs(np.arange(len(self.known)) - rows.bit_length())  # (32,)
            weights = near[:, None] * np.minimum(self.known, 1 / SHARE)
            total = weights.sum(0) @ self._near
            ratios = np.divide((weights * self.ratios).sum(0) @ self._near, total, np.ones_like(total), where=total > 0)
            self._costs[rows] = [
                ratio * self._by_rule(rows, size) for ratio, size in zip(ratios.tolist(), (0, *self.sizes), strict=True)
            ]
        return self._costs[rows]

    def _by_rule(self, rows: int, nodes: int) -> float:
        return self.rule.cost(rows * (nodes + 1), rows, nodes > 0)

    def most_nodes(self, rows: int, most: int, full: int | None = None) -> int:
        """Return how many nodes the next round drafts, at most so many, and no more than it is worth; 0: none. `full`:
        how many rows there would soon be if nothing was drafted, where texts wait and those in work end too soon for
        prompts to keep up."""
        self.rounds += 1
        if self.rounds % REFRESH == 0 or self.rounds < REFRESH:
            self._costs.clear()
            self._plans.clear()
        last = self._place[max(1, min(most, POSITIONS // rows - 1))]
        if self.rounds <= TRIAL or not self.promised:
            return min(self.sizes[last - 1], FIRST)
        key = rows, last, full or rows
        if key not in self._plans:
            self._plans[key] = self._plan(*key)
        plan = self._plans[key]
        self.rate = plan.rate
        other = self.alike >= plan.patience
        self.alike = 0 if other else self.alike + 1
        return 0 if plan.drafts == other else self.sizes[min(plan.best + self._looks, last) - 1]

    def _plan(self, rows: int, last: int, full: int) -> BudgetPlan:
        """Return what rounds of so many rows, with trees up to a place, do best."""
        costs, trust = self.costs(rows), self.trust
        lengths = accumulate((trust * promised for promised in self.promised[:last]), initial=1.0)
        plain, *rates = (length / cost for length, cost in zip(lengths, costs, strict=False))
        drafting = max(rates)
        best = 1 + rates.index(drafting)
        gain = rows * drafting * self.costs(full)[0] / full  # over drafting nothing
        return BudgetPlan(best, max(plain, drafting), gain > 1, self._patience(rows, gain, costs[0] / costs[best]))

    @property
    def _looks(self) -> bool:
        """Whether this round takes a size larger than seems best, to see what that commits."""
        return self.rounds % BESIDE == BESIDE - 1

    def _patience(self, rows: int, gain: float, cost: float) -> float:
        """Return how many rounds of the better kind come between two of the other, where a plain round costs so much of
        one that drafts; few where nothing is known of it."""
        rounds = max(SOON, OTHER * (cost * (1 - 1 / gain) if gain > 1 else (1 - gain) / cost))
        known = self.known[rows.bit_length()]
        return rounds if (known[:1] if gain > 1 else known[1:]).any() else min(rounds, REFRESH)

    def nodes(self, log_probs: torch.Tensor, most: int) -> int:
        """Return the size, at most so many nodes, that commits most tokens a second over all rounds, for ranked trees
        with log-probabilities (B, M): the first n nodes are the best tree of n, whose expected acceptance length is the
        sum of their probabilities (DDTree proposition 1), which is corrected by how right they were lately. All rows
        get the same size."""
        self._expect(log_probs.tolist())
        return self._best(len(log_probs), most)

    def _expect(self, log_probs: list[list[float]]) -> None:
        """Take note of the tokens that a row is expected to commit beside the bonus token with 0, 1, ... nodes, from
        log-probabilities (B, M)."""
        ranks = zip(*log_probs, strict=True)  # few numbers: in Python alone
        next(ranks)
        self._expected = list(accumulate((sum(map(exp, rank)) / len(rank) for rank in ranks), initial=0.0))

    def nodes_ahead(self, rows: int, most: int) -> int:
        """Return the size of the next trees, at most so many nodes, before they are drafted: as if their probabilities
        were those of the last ones."""
        known = len(self._expected) - 1
        return self._best(rows, min(most, known)) if known else min(most, FIRST)

    def grown(self, nodes: int) -> int:
        """Return how many nodes are to be found where so many are verified: what more would be worth shows so."""
        return next((size for size in self.sizes if size >= 2 * nodes), self.sizes[-1])

    def _best(self, rows: int, most: int) -> int:
        """Return the best size of at most so many nodes by what is expected of each."""
        last = self._place[min(most, len(self._expected) - 1)]
        if self._looks:
            return self.sizes[last - 1]
        costs, trust = self.costs(rows), self.trust
        worth = [trust * self._expected[size] - self.rate * costs[i] for i, size in enumerate(self.sizes[:last], 1)]
        return self.sizes[worth.index(max(worth))]

    def note(
        self, seconds: float, nodes: int, paths: list[list[int]], promised: list[list[float]] | None = None
    ) -> None:
        """Take note of a round: its drafted nodes, and the nodes of every row's accepted path, the root left out;
        `promised`: the log-probabilities of all nodes found, where `nodes` was not told them."""
        self.last = nodes
        if promised and len(promised[0]) > 1:
            self._expect(promised)
        rows = len(paths)
        self._note_cost(rows, self._place[nodes], seconds)
        if not nodes:
            return
        found = self._place[min(len(self._expected) - 1, self.most)]
        more = [0.0] * (found - len(self.found))
        self.promised, self.found = self.promised + more, self.found + more
        keep = MEMORY / (rows + MEMORY)
        for i, (before, size) in enumerate(pairwise((0, *self.sizes[:found]))):
            self.found[i] = keep * self.found[i] + rows
            self.promised[i] += (
                rows / self.found[i] * (self._expected[size] - self._expected[before] - self.promised[i])
            )
        self.kept = keep * self.kept + sum(map(len, paths))
        self.verified = keep * self.verified + rows * self._expected[min(nodes, len(self._expected) - 1)]

    def _note_cost(self, rows: int, place: int, seconds: float) -> None:
        """Take note of what a round took."""
        key, cost = (rows.bit_length(), place), self.costs(rows)[place]
        # a pause is not the machine's pace
        ratio = min(seconds, PAUSE * cost) / self._by_rule(rows, ([0] + self.sizes)[place])
        self.known[key] += 1
        self.ratios[key] += max(SHARE, 1 / self.known[key]) * (ratio - self.ratios[key])


def rule_of(target: Target, drafter: Drafter, clock: Callable[[], float], rows: int) -> BudgetRule:
    """Return what `calibrate` measures, once for a target, a drafter and so many rows: the target keeps it as long as
    there is the drafter."""
    rules = target.budget_rules.setdefault(drafter, {})
    if rows not in rules:
        rules[rows] = calibrate(target, drafter, clock, rows)
    return rules[rows]


@torch.inference_mode()
def calibrate(
    target: Target, drafter: Drafter, clock: Callable[[], float], rows: int = 1, repeats: int = 7
) -> BudgetRule:
    """Measure one row's draft and its target passes, size by size until one costs `DEAR` plain ones, and where there
    may be more `rows` the draft and the plain pass of all of them, in turns: medians of `repeats`. About a second on a
    laptop."""
    draft, verify = _scratch(target, drafter, 1)
    tree = draft(SIZES[-1])
    trees, seconds = [tree.first(size) for size in sorted({min(size, tree.budget) for size in (0, *SIZES)})], []
    for tree in trees:
        verify(tree)  # warms up
        seconds.append(_timed(clock, partial(verify, tree)))
        if seconds[-1] > DEAR * seconds[0]:
            break
    tasks = [partial(draft, FIRST)] + [partial(verify, tree) for tree in trees[: len(seconds)]]
    if rows > 1:
        draft_all, verify_all = _scratch(target, drafter, rows)
        tasks += [partial(draft_all, FIRST), partial(verify_all, draft_all(1).first(0))]
        [task() for task in tasks]
    samples = [[_timed(clock, task) for task in tasks] for _ in range(repeats)]
    other, *passes = map(statistics.median, zip(*samples, strict=True))
    row = row_drafts = 0.0
    if rows > 1:
        *passes, drafts_all, passes_all = passes
        row_drafts = max(0.0, drafts_all - other) / (rows - 1)
    rule = BudgetRule(tuple(tree.budget + 1 for tree in trees[: len(passes)]), tuple(accumulate(passes, max)), other)
    if rows > 1:  # more nodes never cost less, nor do more rows
        row = max(0.0, passes_all - rule.cost(rows, drafts=False)) / (rows - 1)
    return replace(rule, row=row, row_drafts=row_drafts)


def _timed(clock: Callable[[], float], task: Callable[[], object]) -> float:
    """Return the seconds of a task."""
    mark = clock()
    task()
    return clock() - mark


def _scratch(target: Target, drafter: Drafter, rows: int) -> tuple[Callable[[int], DraftTree], Callable]:
    """Return what drafts a tree of so many nodes behind scratch rows of `CONTEXT` positions, and what verifies one."""
    cache, state = target.cache(rows, CONTEXT + SIZES[-1] + 1), drafter.state(rows, CONTEXT + 2 * DRAFTS)
    prompts = [[i % target.config.vocab_size for i in range(CONTEXT)]] * rows
    with cache.add(rows) as new:
        features = target.extend(prompts, new, drafter.layer_ids)
    with state.add(rows) as new:
        tokens = torch.tensor(prompts, device=target.device)
        drafter.update_context(target, features.context, tokens, [CONTEXT] * rows, new)
    bonus = torch.zeros(rows, dtype=torch.long, device=target.device)

    def draft(nodes: int) -> DraftTree:
        drafter.update_context(target, features.context[:, :2], tokens[:, :2], [2] * rows, state)
        return ddtree(propose(drafter, target, bonus, state, nodes))

    def verify(tree: DraftTree) -> None:
        target.head(target.verify(tree, tree.ancestors(), cache, drafter.layer_ids).last).argmax(-1)

    return draft, verify

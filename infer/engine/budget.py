"""The node budget: how many drafted nodes of each row a round verifies.

`Budget` is a fixed number. `AutoBudget` (decoding.budget=auto) looks for the number that commits
most tokens per second, plain decoding (0 nodes) included. It keeps

- `CostTable`: seconds of a round by number of rows and of nodes, calibrated when the engine is made
  and updated by every round;
- `AcceptanceTable`: how often nodes were accepted, by their log-probability under the drafter; and
- what trees promised on average, size by size.

Nodes are sorted by probability, so that the first n nodes of a tree are the best tree of n nodes,
and the expected number of accepted ones is the sum of their probabilities (DDTree proposition 1). A
round finds twice the nodes that pay on average, and verifies as many of these as pay in this round
(CaDDTree, arXiv:2606.01813). Every now and then it tries plain decoding where drafting is faster,
drafting where plain decoding is, and the next larger number of nodes.

B rows, N drafted nodes of a row, S sizes.
"""

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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

# Node counts to choose from. With the root most of them fill blocks of rows, as matrix products
# take them.
SIZES = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63, 95, 127, 191, 255)
MAX_PASS_POSITIONS = 4096  # of all rows in one target pass, roots included

CALIBRATION_CONTEXT = 128  # positions in the cache while costs are calibrated
CALIBRATION_DRAFTS = 16  # drafts during calibration, at most; each adds two positions
CALIBRATION_COST_RATIO = (
    4  # calibrate no larger pass than one that costs so many passes without nodes
)

WARMUP_ROUNDS = 8  # rounds that draft before anything is compared
WARMUP_NODES = 15  # of such a round, at most
WARMUP_COST_RATIO = 2  # of such a round to a plain one by calibration, at most

MAX_EXPLORE_COST = (
    1 / 300
)  # share of throughput that exploring the slower of drafting and plain decoding may cost
MIN_EXPLORE_INTERVAL = 4  # rounds
UNMEASURED_EXPLORE_INTERVAL = 16  # rounds at most, while the slower one was never measured
NEIGHBOUR_INTERVAL = 64  # rounds between two that verify the next larger number of nodes

COST_EMA_ALPHA = 0.05  # weight of a round in its cost, once twenty were measured
OUTLIER_CLIP = 1.5  # a measured round counts as at most this many times its expected cost
DISTANCE_DECAY = 1 / 16  # weight of costs measured with twice or half the rows or nodes
CALIBRATION_WEIGHT = (
    1e-30  # of the calibrated cost, in rounds: it counts where nothing near was measured
)
EMA_ROWS = 200  # rows of drafting rounds that averages of trees and acceptance go over
ACCEPTANCE_BINS = 24  # bin i: log2 probabilities in (-i - 1, -i]
PRIOR_TOKENS = 4  # expected tokens that count as accepted, before any are known


class Budget:
    """The same number of nodes in every round."""

    adapts = False  # whether it needs the log-probabilities of nodes

    def __init__(self, most: int) -> None:
        self.most = most  # nodes of a row, at most
        self.last = most  # nodes that the last round verified, a row on average

    def choose_nodes(self, rows: int, most: int) -> int:
        """Return how many nodes of each of `rows` rows the next round verifies, at most `most`; 0:
        it drafts nothing."""
        return most

    def nodes_to_find(self, rows: int, nodes: int) -> int:
        """Return how many nodes trees are built of, where `nodes` are to be verified."""
        return nodes

    def cut(self, tree: DraftTree) -> DraftTree:
        """Return what is verified of trees, where the host can look at them."""
        return tree

    def note(
        self,
        seconds: float,
        drafted: list[int],
        paths: list[list[int]],
        log_probs: list[list[float]] | None = None,
    ) -> None:
        """Take note of a round: its seconds, and by row the number of verified nodes, the accepted
        path without the root, and the log-probabilities of all nodes that were found, root
        included; these are None where `cut` has seen the trees."""


class CostTable:
    """Seconds of a round by number of rows (in powers of two) and by size.

    Kept as ratios to what calibration expects. A cost that was not measured takes over the ratio of
    costs near it, so that what one number of rows or nodes shows about a machine helps the others.
    """

    def __init__(self, calibration: "Calibration", sizes: list[int]) -> None:
        self.calibration = calibration
        self.sizes = sizes
        steps = np.log2(np.add(sizes, 1))
        self.size_weights = DISTANCE_DECAY ** abs(steps[:, None] - steps)  # (S, S)
        self.ratios = np.ones((32, len(sizes)))  # by `row_bucket`
        self.counts = np.zeros_like(self.ratios)  # measured rounds, at most 1 / COST_EMA_ALPHA
        self._expected: dict[int, np.ndarray] = {}  # by rows, (S,)
        self._costs: dict[int, np.ndarray] = {}  # the same, until the next `update`

    def expected(self, rows: int) -> np.ndarray:
        """Return what calibration expects of so many rows, in seconds by size, (S,)."""
        if rows not in self._expected:
            costs = [self.calibration.cost(rows * (size + 1), size > 0) for size in self.sizes]
            self._expected[rows] = np.array(costs)
        return self._expected[rows]

    def costs(self, rows: int) -> np.ndarray:
        """Return the seconds of a round of so many rows, by size, (S,)."""
        if rows not in self._costs:
            row_weights = DISTANCE_DECAY ** abs(np.arange(len(self.counts)) - row_bucket(rows))
            counts = row_weights @ self.counts @ self.size_weights + CALIBRATION_WEIGHT
            ratios = (
                row_weights @ (self.counts * self.ratios) @ self.size_weights + CALIBRATION_WEIGHT
            )
            self._costs[rows] = ratios / counts * self.expected(rows)
        return self._costs[rows]

    def measured(self, rows: int) -> np.ndarray:
        """Return which sizes were measured with about so many rows, (S,) bool."""
        return self.counts[row_bucket(rows)] > 0

    def update(self, rows: int, size_index: int, seconds: float) -> None:
        """Take note of a measured round."""
        key = row_bucket(rows), size_index
        # The first round of its size compiles and allocates; others may wait for another process.
        clip = OUTLIER_CLIP if self.counts[key] else 1
        seconds = min(seconds, clip * self.costs(rows)[size_index])
        self.counts[key] = min(self.counts[key] + 1, 1 / COST_EMA_ALPHA)
        self.ratios[key] += (
            seconds / self.expected(rows)[size_index] - self.ratios[key]
        ) / self.counts[key]
        self._costs.clear()


def row_bucket(rows: int) -> int:
    """Return the exponent of the next power of two: captured rounds have so many rows."""
    return (rows - 1).bit_length()


class AcceptanceTable:
    """How often verified nodes were accepted, by bins of their log-probability: the calibration of
    the drafter's probabilities."""

    def __init__(self) -> None:
        self.promised = np.zeros(ACCEPTANCE_BINS)  # sum of probabilities of verified nodes
        self.accepted = np.zeros(ACCEPTANCE_BINS)  # how many of these were accepted
        self.factors = np.ones(ACCEPTANCE_BINS)  # from promised to accepted

    def calibrate(self, log_probs: np.ndarray) -> np.ndarray:
        """Return the probabilities that nodes with these log-probabilities are accepted."""
        return np.minimum(np.exp(log_probs) * self.factors[bins_of(log_probs)], 1)

    def update(self, log_probs: np.ndarray, drafted: list[int], paths: list[list[int]]) -> None:
        """Take note of a round: log-probabilities (B, N) of the drafted nodes, of which each row
        has verified the first, and the accepted nodes, numbered from 1."""
        bins = bins_of(log_probs)
        verified = np.arange(log_probs.shape[1]) < np.array(drafted)[:, None]
        accepted = [bins[row, node - 1] for row, path in enumerate(paths) for node in path]
        decay = EMA_ROWS / (len(paths) + EMA_ROWS)
        promised = np.bincount(bins[verified], np.exp(log_probs[verified]), ACCEPTANCE_BINS)
        self.promised = decay * self.promised + promised
        self.accepted = decay * self.accepted + np.bincount(accepted, minlength=ACCEPTANCE_BINS)
        # Where little was verified, a bin is as good as all bins together.
        overall = (self.accepted.sum() + PRIOR_TOKENS) / (self.promised.sum() + PRIOR_TOKENS)
        self.factors = (self.accepted + PRIOR_TOKENS * overall) / (self.promised + PRIOR_TOKENS)


def bins_of(log_probs: np.ndarray) -> np.ndarray:
    """Return the bins of log-probabilities, whole bits."""
    return np.minimum(-log_probs / math.log(2), ACCEPTANCE_BINS - 1).astype(int)


class AutoBudget(Budget):
    """The number of nodes that commits most tokens per second, round by round.

    `ragged`: rows may verify different numbers of nodes, so that those of all rows compete: the
    likeliest are verified, in whichever rows they are, and a size is a row's on average.
    """

    adapts = True

    def __init__(self, calibration: "Calibration", most: int, ragged: bool = False) -> None:
        super().__init__(most)
        self.ragged = ragged
        self.sizes = [0, *(size for size in SIZES if size < most), most]
        self.costs = CostTable(calibration, self.sizes)
        self.acceptance = AcceptanceTable()
        # What trees promise of each size beyond the size before: accepted tokens of a row, on
        # average.
        self.promised = np.zeros(len(self.sizes))
        self.promised_rows = np.zeros(len(self.sizes))  # rows that these are averages of
        self.rate = 0.0  # tokens per second and row that rounds commit on average
        self.max_nodes = most  # of the next round
        self.log_probs = np.zeros((1, 0))  # (B, N) of the drafted nodes of the last trees
        self.expected = np.zeros(1)  # what these trees promise: accepted tokens of a row, by size
        self.rounds = 0
        self.since_explored = 0  # rounds since the slower of drafting and plain decoding was tried

    def index(self, nodes: int) -> int:
        """Return the index of the largest size of at most so many nodes."""
        return bisect_right(self.sizes, nodes) - 1

    def choose_nodes(self, rows: int, most: int) -> int:
        self.rounds += 1
        last = self.index(max(1, min(most, MAX_PASS_POSITIONS // rows - 1)))
        self.max_nodes = self.sizes[last]
        if self.rounds <= WARMUP_ROUNDS or not self.promised_rows.any():
            expected = self.costs.expected(rows)
            cheap = self.index(WARMUP_NODES)
            while cheap > 1 and expected[cheap] > WARMUP_COST_RATIO * expected[0]:
                cheap -= 1
            self.max_nodes = self.sizes[min(cheap, last)]
            return self.max_nodes

        costs = self.costs.costs(rows)[: last + 1]
        rates = (
            1 + self.promised[: last + 1].cumsum()
        ) / costs  # the bonus token and accepted nodes
        drafting = 1 + int(rates[1:].argmax())
        faster, slower = (drafting, 0) if rates[drafting] > rates[0] else (0, drafting)
        self.rate = float(rates[faster])
        if self.since_explored >= self._explore_interval(rows, costs, rates, faster, slower):
            self.since_explored = 0
            return self.sizes[slower]
        self.since_explored += 1
        if faster and self._tries_neighbour():
            faster = min(faster + 1, last)
        return self.sizes[faster]

    def _explore_interval(
        self, rows: int, costs: np.ndarray, rates: np.ndarray, faster: int, slower: int
    ) -> float:
        """Return the rounds between two of the slower kind, plain decoding or drafting: so many
        that what these lose is MAX_EXPLORE_COST of all time."""
        loss = (
            costs[slower] / costs[faster] * (1 - rates[slower] / rates[faster])
        )  # in rounds of the faster kind
        interval = max(MIN_EXPLORE_INTERVAL, loss / MAX_EXPLORE_COST)
        measured = self.costs.measured(rows)
        known = measured[1:].any() if slower else measured[0]
        return interval if known else min(interval, UNMEASURED_EXPLORE_INTERVAL)

    def _tries_neighbour(self) -> bool:
        """Return whether this round verifies one size more than pays: what that costs may have
        changed."""
        return self.rounds % NEIGHBOUR_INTERVAL == 0

    def nodes_to_find(self, rows: int, nodes: int) -> int:
        """Twice the nodes: what more of them would be worth shows so. Where nodes of all rows
        compete, rows of which the drafter is sure need some more."""
        if not nodes:
            return 0
        least = max(2 * nodes, WARMUP_NODES) if self.ragged and rows > 1 else 2 * nodes
        return self.sizes[min(bisect_left(self.sizes, least), len(self.sizes) - 1)]

    def cut(self, tree: DraftTree) -> DraftTree:
        rows = len(tree.tokens)
        self._look_at(tree.log_probs.double().numpy(force=True))
        nodes = self._paying_nodes(rows, min(self.max_nodes, tree.budget))
        return tree.likeliest(nodes) if self.ragged and rows > 1 else tree.first(nodes)

    def _paying_nodes(self, rows: int, most: int) -> int:
        """Return how many nodes of the last trees pay, at most `most`: as long as they commit more
        tokens than rounds do on average in the same time."""
        last = self.index(most)
        worth = self.expected[: last + 1] - self.rate * self.costs.costs(rows)[: last + 1]
        best = 1 + int(worth[1:].argmax())
        if self._tries_neighbour():
            best = min(best + 1, last)
        return self.sizes[best]

    def _look_at(self, log_probs: np.ndarray) -> None:
        """Take note of trees with log-probabilities (B, N + 1), root included."""
        self.log_probs = log_probs[:, 1:]
        rows, nodes = self.log_probs.shape
        probabilities = self.acceptance.calibrate(self.log_probs)
        if self.ragged and rows > 1:
            ranked = probabilities.ravel()[self.log_probs.ravel().argsort()[::-1]]
        else:
            ranked = probabilities.T.ravel()
        sums = np.append(0.0, ranked.cumsum())  # of the first nodes, of all rows
        sizes = self.sizes[: self.index(nodes) + 1]
        self.expected = sums[np.multiply(sizes, rows)] / rows

    def note(
        self,
        seconds: float,
        drafted: list[int],
        paths: list[list[int]],
        log_probs: list[list[float]] | None = None,
    ) -> None:
        rows = len(paths)
        self.last = sum(drafted) // rows
        self.costs.update(rows, self.index(self.last), seconds)
        if not self.last:
            return
        if log_probs is not None:
            self._look_at(np.array(log_probs))
        promised = np.diff(self.expected, prepend=0)
        found = slice(len(promised))
        self.promised_rows *= EMA_ROWS / (rows + EMA_ROWS)
        self.promised_rows[found] += rows
        self.promised[found] += rows / self.promised_rows[found] * (promised - self.promised[found])
        self.acceptance.update(self.log_probs, drafted, paths)


@dataclass(frozen=True)
class Calibration:
    """Seconds of a target pass by the positions that it computes, and of everything else in a
    round."""

    positions: tuple[int, ...]
    seconds: tuple[float, ...]  # of a pass over these positions of one row
    draft: float  # of one row's draft

    def cost(self, positions: int, drafts: bool = True) -> float:
        """Return the seconds of a round whose target pass computes so many positions, all rows
        together: interpolated between measurements, and extrapolated linearly beyond them."""
        i = min(max(1, bisect_left(self.positions, positions)), len(self.positions) - 1)
        left = self.positions[i - 1]
        right = self.positions[i]
        slope = (self.seconds[i] - self.seconds[i - 1]) / (right - left)
        return self.seconds[i - 1] + slope * (positions - left) + (self.draft if drafts else 0.0)


@torch.inference_mode()
def calibrate(
    target: Target, drafter: Drafter, clock: Callable[[], float], repeats: int = 3
) -> Calibration:
    """Measure one row's draft and its target passes behind CALIBRATION_CONTEXT positions, size by
    size until one costs CALIBRATION_COST_RATIO plain ones, interleaved: medians of `repeats`. About
    a second on a laptop."""
    cache = target.cache(1, CALIBRATION_CONTEXT + SIZES[-1] + 1)
    state = drafter.state(1, CALIBRATION_CONTEXT + 2 * CALIBRATION_DRAFTS)
    prompt = [i % target.config.vocab_size for i in range(CALIBRATION_CONTEXT)]
    with cache.add(1) as new:
        features = target.extend([prompt], new, drafter.layer_ids)
    tokens = torch.tensor([prompt], device=target.device)
    bonus = torch.tensor([0], device=target.device)
    with state.add(1) as new:
        drafter.update_context(target, features.context, tokens, [CALIBRATION_CONTEXT], new)

    def draft(nodes: int) -> DraftTree:
        drafter.update_context(target, features.context[:, :2], tokens[:, :2], [2], state)
        return ddtree(propose(drafter, target, bonus, state, nodes))

    def verify(tree: DraftTree) -> None:
        likeliest(target, target.verify(tree, tree.ancestors(), cache, drafter.layer_ids).last)

    tree = draft(SIZES[-1])
    tasks = [partial(draft, WARMUP_NODES)]
    sizes = []
    plain_seconds = 0.0
    for size in sorted({min(size, tree.budget) for size in (0, *SIZES)}):
        task = partial(verify, tree.first(size))
        tasks.append(task)
        sizes.append(size)
        task()  # warms up
        seconds = timeit(task, timer=clock, number=1)
        plain_seconds = plain_seconds or seconds
        if seconds > CALIBRATION_COST_RATIO * plain_seconds:
            break
    samples = [[timeit(task, timer=clock, number=1) for task in tasks] for _ in range(repeats)]
    draft_seconds, *pass_seconds = map(statistics.median, zip(*samples, strict=True))
    return Calibration(
        tuple(size + 1 for size in sizes), tuple(accumulate(pass_seconds, max)), draft_seconds
    )


def calibration_of(target: Target, drafter: Drafter, clock: Callable[[], float]) -> Calibration:
    """Return what `calibrate` measures, once for a target and a drafter: the target keeps it as
    long as there is the drafter."""
    if drafter not in target.calibrations:
        target.calibrations[drafter] = calibrate(target, drafter, clock)
    return target.calibrations[drafter]


def make_budget(
    target: Target, drafter: Drafter | None, options: EngineConfig, clock: Callable[[], float]
) -> Budget:
    """Make the node budget that options ask for. The drafter is None where nothing is drafted."""
    if drafter is None:
        return Budget(0)
    method = options.tree
    adapts = options.budget == "auto"
    most = SIZES[-1] if adapts else options.budget
    if method.most_nodes is not None:
        most = min(most, method.most_nodes(drafter.block_size))
    if not adapts:
        return Budget(most)
    return AutoBudget(
        calibration_of(target, drafter, clock), most, method.ranked and takes_uneven(target)
    )

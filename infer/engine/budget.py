"""The node budget: how many drafted nodes per batch row the target verifies in a round.

`NodeBudget` is a fixed number. `AutoNodeBudget` (decoding.budget=auto) maximises the committed
tokens per second; 0 nodes, baseline decoding, is one of its choices. It keeps

- `RoundCostTable`: seconds of a round by number of rows and of nodes, calibrated when the engine is
  made and updated after every round;
- `AcceptanceTable`: how often nodes were accepted, by their log-probability under the drafter; and
- the expected number of accepted tokens of the average tree, by number of nodes.

Nodes are sorted by probability, so the first n nodes of a tree are the best tree of n nodes, and
the expected number of accepted nodes is the sum of their probabilities (DDTree proposition 1). A
round builds a tree of twice the nodes that pay off on average, and verifies those that pay off in
this round (CaDDTree, arXiv:2606.01813). From time to time a round explores: baseline decoding if
drafting is faster, drafting if baseline decoding is faster, or the next larger number of nodes.

B batch rows, N drafted nodes of a row, S node counts to choose from.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable

import numpy as np

from infer.config import EngineConfig
from infer.drafters.base import Drafter
from infer.engine.round_cost import (
    CANDIDATE_DRAFTED_NODE_COUNTS,
    Calibration,
    RoundCostTable,
    get_calibration,
)
from infer.targets.target import Target, supports_ragged
from infer.trees.tree import DraftTree

MAX_VERIFIED_POSITIONS_OF_ALL_ROWS = (
    4096  # positions of all rows in one target pass, roots included
)

ROUNDS_BEFORE_SPEED_COMPARISON = 8  # rounds that draft before speeds are compared
MAX_NODES_BEFORE_SPEED_COMPARISON = 15  # maximum number of nodes of such a round
MAX_COST_RATIO_BEFORE_SPEED_COMPARISON = (
    2  # maximum calibrated cost of such a round, relative to a baseline round
)

# Share of throughput that exploring the slower of drafting and baseline decoding may cost.
MAX_THROUGHPUT_SHARE_LOST_EXPLORING = 1 / 300
MIN_ROUNDS_BETWEEN_EXPLORATIONS = 4  # rounds
# Maximum number of rounds between explorations until the slower one has been measured.
MAX_ROUNDS_BETWEEN_UNMEASURED_EXPLORATIONS = 16
ROUNDS_BETWEEN_LARGER_BUDGET_TRIALS = (
    64  # rounds between explorations of the next larger number of nodes
)

ACCEPTANCE_MOVING_AVERAGE_ROWS = (
    200  # rows of drafting rounds that acceptance statistics average over
)
# Bin i contains log2 probabilities in (-i - 1, -i], the last bin all lower ones.
ACCEPTANCE_BINS = 24
ACCEPTANCE_PRIOR_PSEUDO_COUNT = 4  # pseudo-count of expected and accepted tokens


class NodeBudget:
    """A fixed number of nodes in every round."""

    needs_log_probs = False  # whether `record_round` needs the log-probabilities of nodes

    def __init__(self, max_nodes: int) -> None:
        self.max_nodes = max_nodes  # per row
        self.last_nodes = max_nodes  # verified by the last round, per row on average

    def choose_nodes(self, rows: int, max_nodes: int) -> int:
        """Return how many nodes per row the next round verifies, at most `max_nodes`. With 0 it
        does not draft."""
        return max_nodes

    def count_nodes_to_build(self, rows: int, num_nodes: int) -> int:
        """Return the number of nodes that trees are built of, if `num_nodes` are verified."""
        return num_nodes

    def prune(self, tree: DraftTree) -> DraftTree:
        """Return the nodes that are verified, chosen on the host."""
        return tree

    def record_round(
        self,
        seconds: float,
        drafted_counts: list[int],
        paths: list[list[int]],
        node_log_probs: list[list[float]] | None = None,
    ) -> None:
        """Record a finished round.

        By row: number of verified nodes, accepted nodes without the root, and log-probabilities of
        all built nodes, root included. The last are None if `prune` has seen the tree.
        """


class AcceptanceTable:
    """How often verified nodes were accepted, by bins of their log-probability. It calibrates the
    drafter's probabilities."""

    def __init__(self) -> None:
        self.expected = np.zeros(ACCEPTANCE_BINS)  # sum of probabilities of verified nodes
        self.accepted = np.zeros(ACCEPTANCE_BINS)  # number of accepted nodes
        self.factors = np.ones(ACCEPTANCE_BINS)  # from expected to accepted

    def calibrate(self, log_probs: np.ndarray) -> np.ndarray:
        """Return the estimated probabilities that nodes with these log-probabilities are
        accepted."""
        return np.minimum(np.exp(log_probs) * self.factors[bin_indices(log_probs)], 1)

    def update(
        self, log_probs: np.ndarray, drafted_counts: list[int], paths: list[list[int]]
    ) -> None:
        """Record a round: log-probabilities (B, N) of the built nodes; by row the number of
        verified nodes, which are the first ones, and the accepted nodes, numbered from 1."""
        bins = bin_indices(log_probs)
        is_verified = np.arange(log_probs.shape[1]) < np.array(drafted_counts)[:, None]
        accepted_bins = [bins[row, node - 1] for row, path in enumerate(paths) for node in path]
        decay = ACCEPTANCE_MOVING_AVERAGE_ROWS / (len(paths) + ACCEPTANCE_MOVING_AVERAGE_ROWS)
        probabilities = np.exp(log_probs[is_verified])
        expected = np.bincount(bins[is_verified], probabilities, ACCEPTANCE_BINS)
        accepted = np.bincount(accepted_bins, minlength=ACCEPTANCE_BINS)
        self.expected = decay * self.expected + expected
        self.accepted = decay * self.accepted + accepted
        # A bin with few verified nodes gets the factor of all bins together.
        overall = (self.accepted.sum() + ACCEPTANCE_PRIOR_PSEUDO_COUNT) / (
            self.expected.sum() + ACCEPTANCE_PRIOR_PSEUDO_COUNT
        )
        self.factors = (self.accepted + ACCEPTANCE_PRIOR_PSEUDO_COUNT * overall) / (
            self.expected + ACCEPTANCE_PRIOR_PSEUDO_COUNT
        )


def bin_indices(log_probs: np.ndarray) -> np.ndarray:
    """Return the bins of log-probabilities, one bin per bit."""
    return np.minimum(-log_probs / math.log(2), ACCEPTANCE_BINS - 1).astype(int)


class AutoNodeBudget(NodeBudget):
    """The number of nodes that maximises tokens per second, chosen anew in every round.

    With `ragged`, rows may verify different numbers of nodes: the likeliest nodes of all rows
    together are verified, and a node count is the average of the rows.
    """

    needs_log_probs = True

    def __init__(self, calibration: Calibration, max_nodes: int, ragged: bool = False) -> None:
        super().__init__(max_nodes)
        self.ragged = ragged
        smaller_counts = [count for count in CANDIDATE_DRAFTED_NODE_COUNTS if count < max_nodes]
        self.node_counts = [0, *smaller_counts, max_nodes]
        self.costs = RoundCostTable(calibration, self.node_counts)
        self.acceptance = AcceptanceTable()
        # By node count: expected accepted tokens of the average row, beyond those of the next
        # smaller node count; and the number of rows of this average.
        self.gains = np.zeros(len(self.node_counts))
        self.gain_rows = np.zeros(len(self.node_counts))
        self.tokens_per_second = 0.0  # per row, of the fastest kind of round
        self.max_round_nodes = max_nodes  # of the next round
        self.log_probs = np.zeros((1, 0))  # (B, N) of the drafted nodes of the last trees
        # By node count: expected accepted tokens per row of the last trees.
        self.expected_tokens = np.zeros(1)
        self.num_rounds = 0
        # Rounds since the slower of drafting and baseline decoding was explored.
        self.rounds_since_explored = 0

    def index_of(self, num_nodes: int) -> int:
        """Return the index of the largest node count of at most `num_nodes`."""
        return bisect_right(self.node_counts, num_nodes) - 1

    def choose_nodes(self, rows: int, max_nodes: int) -> int:
        self.num_rounds += 1
        pass_nodes = MAX_VERIFIED_POSITIONS_OF_ALL_ROWS // rows - 1
        last = self.index_of(max(1, min(max_nodes, pass_nodes)))
        self.max_round_nodes = self.node_counts[last]
        if self.num_rounds <= ROUNDS_BEFORE_SPEED_COMPARISON or not self.gain_rows.any():
            self.max_round_nodes = self.node_counts[min(self._warmup_index(rows), last)]
            return self.max_round_nodes

        costs = self.costs.costs(rows)[: last + 1]
        tokens = 1 + self.gains[: last + 1].cumsum()  # the bonus token and accepted nodes
        speeds = tokens / costs
        drafting = 1 + int(speeds[1:].argmax())
        if speeds[drafting] > speeds[0]:
            faster = drafting
            slower = 0
        else:
            faster = 0
            slower = drafting
        self.tokens_per_second = float(speeds[faster])
        if self.rounds_since_explored >= self._explore_interval(
            rows, costs, speeds, faster, slower
        ):
            self.rounds_since_explored = 0
            return self.node_counts[slower]
        self.rounds_since_explored += 1
        if faster and self._explores_neighbour():
            faster = min(faster + 1, last)
        return self.node_counts[faster]

    def _warmup_index(self, rows: int) -> int:
        """Return the index of the node count of warm-up rounds."""
        costs = self.costs.calibrated_costs(rows)
        index = self.index_of(MAX_NODES_BEFORE_SPEED_COMPARISON)
        while index > 1 and costs[index] > MAX_COST_RATIO_BEFORE_SPEED_COMPARISON * costs[0]:
            index -= 1
        return index

    def _explore_interval(
        self, rows: int, costs: np.ndarray, speeds: np.ndarray, faster: int, slower: int
    ) -> float:
        """Return the number of rounds between explorations of the slower of baseline decoding and
        drafting, so that they cost MAX_THROUGHPUT_SHARE_LOST_EXPLORING of the throughput.

        `faster` and `slower` are indices into the costs and speeds of all node counts.
        """
        loss = costs[slower] / costs[faster] * (1 - speeds[slower] / speeds[faster])  # in rounds
        interval = max(MIN_ROUNDS_BETWEEN_EXPLORATIONS, loss / MAX_THROUGHPUT_SHARE_LOST_EXPLORING)
        is_measured = self.costs.is_measured(rows)
        slower_is_measured = is_measured[1:].any() if slower else is_measured[0]
        if slower_is_measured:
            return interval
        return min(interval, MAX_ROUNDS_BETWEEN_UNMEASURED_EXPLORATIONS)

    def _explores_neighbour(self) -> bool:
        """Return whether this round verifies the next larger node count than the fastest, whose
        cost may have changed."""
        return self.num_rounds % ROUNDS_BETWEEN_LARGER_BUDGET_TRIALS == 0

    def count_nodes_to_build(self, rows: int, num_nodes: int) -> int:
        """Return about twice `num_nodes`, so that the value of more nodes becomes known. With
        `ragged`, rows with a confident drafter need more nodes than the average."""
        if not num_nodes:
            return 0
        min_nodes = 2 * num_nodes
        if self.ragged and rows > 1:
            min_nodes = max(min_nodes, MAX_NODES_BEFORE_SPEED_COMPARISON)
        index = min(bisect_left(self.node_counts, min_nodes), len(self.node_counts) - 1)
        return self.node_counts[index]

    def prune(self, tree: DraftTree) -> DraftTree:
        rows = len(tree.tokens)
        self._estimate_tokens(tree.log_probs.double().numpy(force=True))
        max_nodes = min(self.max_round_nodes, tree.max_drafted)
        num_nodes = self._count_paying_nodes(rows, max_nodes)
        if self.ragged and rows > 1:
            return tree.keep_likeliest(num_nodes)
        return tree.keep_first(num_nodes)

    def _count_paying_nodes(self, rows: int, max_nodes: int) -> int:
        """Return how many nodes of the last trees pay off, at most `max_nodes`: their expected
        tokens exceed the average number of tokens in the time that they cost."""
        last = self.index_of(max_nodes)
        average_tokens = self.tokens_per_second * self.costs.costs(rows)[: last + 1]
        surplus = self.expected_tokens[: last + 1] - average_tokens
        best = 1 + int(surplus[1:].argmax())
        if self._explores_neighbour():
            best = min(best + 1, last)
        return self.node_counts[best]

    def _estimate_tokens(self, log_probs: np.ndarray) -> None:
        """Estimate the accepted tokens by node count, of trees with log-probabilities (B, N + 1)
        including the root."""
        self.log_probs = log_probs[:, 1:]
        rows, num_nodes = self.log_probs.shape
        probabilities = self.acceptance.calibrate(self.log_probs)
        if self.ragged and rows > 1:
            likeliest_first = self.log_probs.ravel().argsort()[::-1]
            probabilities = probabilities.ravel()[likeliest_first]
        else:
            probabilities = probabilities.T.ravel()
        # (rows * N + 1,) expected tokens of all rows by number of nodes of all rows
        totals = np.append(0.0, probabilities.cumsum())
        node_counts = self.node_counts[: self.index_of(num_nodes) + 1]
        self.expected_tokens = totals[np.multiply(node_counts, rows)] / rows

    def record_round(
        self,
        seconds: float,
        drafted_counts: list[int],
        paths: list[list[int]],
        node_log_probs: list[list[float]] | None = None,
    ) -> None:
        rows = len(paths)
        self.last_nodes = sum(drafted_counts) // rows
        self.costs.update(rows, self.index_of(self.last_nodes), seconds)
        if not self.last_nodes:
            return
        if node_log_probs is not None:
            self._estimate_tokens(np.array(node_log_probs))

        gains = np.diff(self.expected_tokens, prepend=0)
        seen = slice(len(gains))  # node counts up to the size of the trees
        self.gain_rows *= ACCEPTANCE_MOVING_AVERAGE_ROWS / (rows + ACCEPTANCE_MOVING_AVERAGE_ROWS)
        self.gain_rows[seen] += rows
        self.gains[seen] += rows / self.gain_rows[seen] * (gains - self.gains[seen])
        self.acceptance.update(self.log_probs, drafted_counts, paths)


def make_node_budget(
    target: Target, drafter: Drafter | None, options: EngineConfig, clock: Callable[[], float]
) -> NodeBudget:
    """Make the node budget of the options. `drafter` is None if nothing is drafted."""
    if drafter is None:
        return NodeBudget(0)
    method = options.tree
    is_auto = options.budget == "auto"
    if is_auto:
        max_nodes = CANDIDATE_DRAFTED_NODE_COUNTS[-1]
    else:
        assert isinstance(options.budget, int)
        max_nodes = options.budget
    if method.max_nodes_for_block is not None:
        max_nodes = min(max_nodes, method.max_nodes_for_block(drafter.block_size))
    if not is_auto:
        return NodeBudget(max_nodes)
    calibration = get_calibration(target, drafter, clock)
    return AutoNodeBudget(calibration, max_nodes, ragged=method.ranked and supports_ragged(target))

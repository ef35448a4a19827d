"""The node budget: how many drafted nodes per batch row the target verifies in a round.

`NodeBudget` is a fixed number of nodes. `AutoNodeBudget` (decoding.budget=auto) chooses the number
of nodes that maximises the committed tokens per second. It may choose 0 nodes, which is baseline
decoding. `AutoNodeBudget` keeps

- `RoundCostTable`: the seconds that a round takes, for each number of batch rows and each number of
  nodes. They are calibrated when the engine is created, and updated after every round.
- `AcceptanceTable`: how often nodes were accepted, for each range of log-probabilities under the
  drafter.
- `mean_token_gains`: for each number of nodes, how many more accepted tokens it gives on average
  than the next smaller number.

Nodes are sorted by probability. The first n nodes of a tree are therefore the best tree of n nodes.
Its expected number of accepted nodes is the sum of the nodes' probabilities (DDTree proposition 1).

A round chooses the number of nodes with the most tokens per second on average, and builds trees of
twice this size. It then verifies only those nodes that are expected to raise the tokens per second
of this round (CaDDTree, arXiv:2606.01813). Now and then a round tries what was slower in earlier
rounds, because the speeds may have changed: drafting if baseline decoding was faster, baseline
decoding if drafting was faster, or the next larger number of nodes.

A node count is a number of drafted nodes per batch row.
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
from infer.targets.target import Target, supports_ragged_trees
from infer.trees.tree import DraftTree

# Maximum number of positions in one target pass: the nodes of all batch rows together, roots
# included.
MAX_VERIFIED_POSITIONS_OF_ALL_ROWS = 4096

# Number of warm-up rounds. They always draft; the speeds of drafting and baseline decoding are
# compared only after them.
WARMUP_ROUNDS = 8
# maximum number of drafted nodes per batch row in a warm-up round
MAX_WARMUP_NODES = 15
MAX_WARMUP_COST_RATIO = (
    2  # a warm-up round may cost at most this many times as much as a baseline round
)

# The slower of drafting and baseline decoding is tried again now and then. These trials may cost at
# most this share of the throughput.
MAX_THROUGHPUT_SHARE_LOST_TRYING_SLOWER_MODE = 1 / 300
# After a trial of the slower of drafting and baseline decoding, it is not tried again for at least
# this many rounds.
MIN_ROUNDS_BETWEEN_SLOWER_MODE_TRIALS = 4
# The slower of drafting and baseline decoding is tried again after at most this many rounds, as
# long as no round has measured its cost.
MAX_ROUNDS_BETWEEN_UNMEASURED_MODE_TRIALS = 16
# once in this many rounds, the next larger number of nodes is verified, to measure its cost again
ROUNDS_BETWEEN_LARGER_BUDGET_TRIALS = 64

# Acceptance statistics are moving averages over about this many samples. One batch row in one round
# is one sample.
ACCEPTANCE_MOVING_AVERAGE_ROWS = 200
# Number of bins. Bin i covers log2-probabilities in (-i - 1, -i]; the last bin also covers all
# lower log2-probabilities.
ACCEPTANCE_BINS = 24
ACCEPTANCE_PRIOR_PSEUDO_COUNT = (
    4  # smoothing: added to both numbers in the ratio of accepted to expected nodes
)


class NodeBudget:
    """A fixed number of drafted nodes per batch row, the same in every round."""

    needs_log_probs = False  # whether `record_round` needs the log-probabilities of the nodes

    def __init__(self, max_nodes: int) -> None:
        self.max_nodes = max_nodes  # maximum number of drafted nodes per batch row
        # number of nodes that the last round verified, averaged over batch rows
        self.last_nodes = max_nodes

    def choose_num_nodes(self, rows: int, max_nodes: int) -> int:
        """Return how many drafted nodes per batch row the next round verifies, at most `max_nodes`.
        `rows` is the number of batch rows. If the result is 0, the round does not draft."""
        return max_nodes

    def count_nodes_to_build(self, rows: int, num_nodes: int) -> int:
        """Return how many drafted nodes per batch row are built if about `num_nodes` of them will
        be verified; `prune` removes the others."""
        return num_nodes

    def prune(self, tree: DraftTree) -> DraftTree:
        """Return the draft trees without the nodes that are not worth the time of verifying them.
        This runs on the host."""
        return tree

    def record_round(
        self,
        seconds: float,
        drafted_counts: list[int],
        paths: list[list[int]],
        node_log_probs: list[list[float]] | None = None,
    ) -> None:
        """Update the statistics with a finished round, which took `seconds`. Each list has one
        entry per batch row.

        drafted_counts: number of verified drafted nodes
        paths: indices of the accepted nodes, without the root
        node_log_probs: log-probabilities of all nodes before pruning, root included. None if
            `prune` was called in this round, because it gets them from the trees.
        """


class AcceptanceTable:
    """Counts how often verified nodes were accepted, separately for each range (bin) of the
    drafter's log-probability. Converts the drafter's probability of a node to the estimated
    probability that the target accepts the node."""

    def __init__(self) -> None:
        # for each bin: expected number of accepted nodes, which is the sum of the nodes'
        # probabilities
        self.expected = np.zeros(ACCEPTANCE_BINS)
        self.accepted = np.zeros(ACCEPTANCE_BINS)  # for each bin: number of accepted nodes
        self.factors = np.ones(ACCEPTANCE_BINS)  # for each bin: ratio of accepted to expected nodes

    def estimate_acceptance_probs(self, log_probs: np.ndarray) -> np.ndarray:
        """Return the estimated probabilities that nodes are accepted. `log_probs` are the nodes'
        log-probabilities under the drafter."""
        return np.minimum(np.exp(log_probs) * self.factors[bin_indices(log_probs)], 1)

    def update(
        self, log_probs: np.ndarray, drafted_counts: list[int], paths: list[list[int]]
    ) -> None:
        """Update the statistics with a round.

        log_probs: (B, num_nodes), log-probabilities of all nodes before pruning, root excluded
        drafted_counts: number of verified nodes of each batch row; these are the row's first nodes
        paths: for each batch row, the indices of the accepted nodes; the root has index 0
        """
        bins = bin_indices(log_probs)
        is_verified = np.arange(log_probs.shape[1]) < np.array(drafted_counts)[:, None]
        accepted_bins = [bins[row, node - 1] for row, path in enumerate(paths) for node in path]
        decay = ACCEPTANCE_MOVING_AVERAGE_ROWS / (len(paths) + ACCEPTANCE_MOVING_AVERAGE_ROWS)
        probabilities = np.exp(log_probs[is_verified])
        expected = np.bincount(bins[is_verified], probabilities, ACCEPTANCE_BINS)
        accepted = np.bincount(accepted_bins, minlength=ACCEPTANCE_BINS)
        self.expected = decay * self.expected + expected
        self.accepted = decay * self.accepted + accepted
        # Smoothing: the fewer verified nodes a bin has, the closer its ratio of accepted to
        # expected nodes is to the ratio of all bins together.
        overall = (self.accepted.sum() + ACCEPTANCE_PRIOR_PSEUDO_COUNT) / (
            self.expected.sum() + ACCEPTANCE_PRIOR_PSEUDO_COUNT
        )
        self.factors = (self.accepted + ACCEPTANCE_PRIOR_PSEUDO_COUNT * overall) / (
            self.expected + ACCEPTANCE_PRIOR_PSEUDO_COUNT
        )


def bin_indices(log_probs: np.ndarray) -> np.ndarray:
    """Return the bin index of each log-probability. A bin is one bit wide: it covers a factor of 2
    in probability."""
    return np.minimum(-log_probs / math.log(2), ACCEPTANCE_BINS - 1).astype(int)


class AutoNodeBudget(NodeBudget):
    """Chooses in every round the number of nodes that maximises tokens per second.

    If `ragged` is true, batch rows may verify different numbers of nodes: the likeliest nodes of
    all rows together are verified. The number of nodes per batch row is then an average over the
    rows.
    """

    needs_log_probs = True

    def __init__(self, calibration: Calibration, max_nodes: int, ragged: bool = False) -> None:
        super().__init__(max_nodes)
        self.ragged = ragged
        smaller_counts = [count for count in CANDIDATE_DRAFTED_NODE_COUNTS if count < max_nodes]
        self.node_counts = [0, *smaller_counts, max_nodes]
        self.costs = RoundCostTable(calibration, self.node_counts)
        self.acceptance = AcceptanceTable()
        # `mean_token_gains[i]`: how many more accepted tokens per batch row are expected with
        # node_counts[i] nodes than with node_counts[i - 1] nodes. It is an average over
        # `gain_rows[i]` batch rows.
        self.mean_token_gains = np.zeros(len(self.node_counts))
        self.gain_rows = np.zeros(len(self.node_counts))
        self.tokens_per_second = 0.0  # tokens per second of a batch row with the fastest node count
        self.max_round_nodes = max_nodes  # largest node count that the next round may verify
        # (B, num_nodes): log-probabilities of the nodes of the last trees, without roots
        self.log_probs = np.zeros((1, 0))
        # For each node count: expected number of accepted tokens per batch row of the last trees.
        self.expected_tokens = np.zeros(1)
        self.num_rounds = 0
        # Number of rounds since the slower of drafting and baseline decoding was last tried.
        self.rounds_since_explored = 0

    def find_count_index(self, num_nodes: int) -> int:
        """Return the index in `node_counts` of the largest count that is at most `num_nodes`."""
        return bisect_right(self.node_counts, num_nodes) - 1

    def choose_num_nodes(self, rows: int, max_nodes: int) -> int:
        self.num_rounds += 1
        pass_nodes = MAX_VERIFIED_POSITIONS_OF_ALL_ROWS // rows - 1
        last = self.find_count_index(max(1, min(max_nodes, pass_nodes)))
        self.max_round_nodes = self.node_counts[last]
        if self.num_rounds <= WARMUP_ROUNDS or not self.gain_rows.any():
            self.max_round_nodes = self.node_counts[min(self._warmup_index(rows), last)]
            return self.max_round_nodes

        costs = self.costs.costs(rows)[: last + 1]
        # expected tokens of a round: the bonus token and the accepted nodes
        tokens = 1 + self.mean_token_gains[: last + 1].cumsum()
        speeds = tokens / costs
        drafting = 1 + int(speeds[1:].argmax())
        if speeds[drafting] > speeds[0]:
            faster = drafting
            slower = 0
        else:
            faster = 0
            slower = drafting
        self.tokens_per_second = float(speeds[faster])
        if self.rounds_since_explored >= self._rounds_between_slower_mode_trials(
            rows, costs, speeds, faster, slower
        ):
            self.rounds_since_explored = 0
            return self.node_counts[slower]
        self.rounds_since_explored += 1
        if faster and self._tries_larger_budget():
            faster = min(faster + 1, last)
        return self.node_counts[faster]

    def _warmup_index(self, rows: int) -> int:
        """Return how many nodes a warm-up round verifies, as an index in `node_counts`."""
        costs = self.costs.calibrated_costs(rows)
        index = self.find_count_index(MAX_WARMUP_NODES)
        while index > 1 and costs[index] > MAX_WARMUP_COST_RATIO * costs[0]:
            index -= 1
        return index

    def _rounds_between_slower_mode_trials(
        self, rows: int, costs: np.ndarray, speeds: np.ndarray, faster: int, slower: int
    ) -> float:
        """Return after how many rounds the slower of baseline decoding and drafting is tried again.
        Once its cost has been measured, these trials lose at most the share
        MAX_THROUGHPUT_SHARE_LOST_TRYING_SLOWER_MODE of the throughput.

        costs: seconds of a round for each node count
        speeds: tokens per second for each node count
        faster: index in `node_counts` of the fastest way to decode; 0 is baseline decoding
        slower: index of the alternative: 0 if drafting is faster, otherwise the fastest node count
            with drafting
        """
        # Time that one trial costs, divided by the time of a round with the faster node count.
        loss = costs[slower] / costs[faster] * (1 - speeds[slower] / speeds[faster])
        interval = max(
            MIN_ROUNDS_BETWEEN_SLOWER_MODE_TRIALS,
            loss / MAX_THROUGHPUT_SHARE_LOST_TRYING_SLOWER_MODE,
        )
        is_measured = self.costs.is_measured(rows)
        slower_is_measured = is_measured[1:].any() if slower else is_measured[0]
        if slower_is_measured:
            return interval
        return min(interval, MAX_ROUNDS_BETWEEN_UNMEASURED_MODE_TRIALS)

    def _tries_larger_budget(self) -> bool:
        """Return whether this round verifies more nodes than the number that is expected to be
        fastest, namely the next larger number in `node_counts`. The cost of the larger number is
        then measured again, because it may have changed."""
        return self.num_rounds % ROUNDS_BETWEEN_LARGER_BUDGET_TRIALS == 0

    def count_nodes_to_build(self, rows: int, num_nodes: int) -> int:
        """Return at least twice `num_nodes`, or the largest node count if that is smaller. The
        additional nodes show how many more tokens a larger budget would give.

        With `ragged` and several batch rows, the result is at least
        MAX_WARMUP_NODES, because rows in which the drafter is confident may verify
        more nodes than the average row.
        """
        if not num_nodes:
            return 0
        min_nodes = 2 * num_nodes
        if self.ragged and rows > 1:
            min_nodes = max(min_nodes, MAX_WARMUP_NODES)
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
        """Return how many nodes per batch row of the last trees are worth verifying, at most
        `max_nodes`.

        Nodes are worth verifying if the additional time that they take gives more expected tokens
        than the same time gives on average.
        """
        last = self.find_count_index(max_nodes)
        average_tokens = self.tokens_per_second * self.costs.costs(rows)[: last + 1]
        surplus = self.expected_tokens[: last + 1] - average_tokens
        best = 1 + int(surplus[1:].argmax())
        if self._tries_larger_budget():
            best = min(best + 1, last)
        return self.node_counts[best]

    def _estimate_tokens(self, log_probs: np.ndarray) -> None:
        """Estimate, for each number of nodes in `node_counts`, how many tokens per batch row would
        be accepted if the trees had only this many nodes. Store the estimates in `expected_tokens`.

        `log_probs` (B, 1 + num_nodes) are the log-probabilities of the trees' nodes, root first.
        """
        self.log_probs = log_probs[:, 1:]
        rows, num_nodes = self.log_probs.shape
        probabilities = self.acceptance.estimate_acceptance_probs(self.log_probs)
        if self.ragged and rows > 1:
            likeliest_first = self.log_probs.ravel().argsort()[::-1]
            probabilities = probabilities.ravel()[likeliest_first]
        else:
            probabilities = probabilities.T.ravel()
        # (rows * num_nodes + 1,): entry n is the expected number of accepted tokens of all rows
        # together if n nodes are verified.
        totals = np.append(0.0, probabilities.cumsum())
        node_counts = self.node_counts[: self.find_count_index(num_nodes) + 1]
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
        self.costs.update(rows, self.find_count_index(self.last_nodes), seconds)
        if not self.last_nodes:
            return
        if node_log_probs is not None:
            self._estimate_tokens(np.array(node_log_probs))

        gains = np.diff(self.expected_tokens, prepend=0)
        seen = slice(len(gains))  # the node counts that are not larger than the trees
        self.gain_rows *= ACCEPTANCE_MOVING_AVERAGE_ROWS / (rows + ACCEPTANCE_MOVING_AVERAGE_ROWS)
        self.gain_rows[seen] += rows
        self.mean_token_gains[seen] += (
            rows / self.gain_rows[seen] * (gains - self.mean_token_gains[seen])
        )
        self.acceptance.update(self.log_probs, drafted_counts, paths)


def make_node_budget(
    target: Target, drafter: Drafter | None, options: EngineConfig, clock: Callable[[], float]
) -> NodeBudget:
    """Create the node budget that `options.budget` asks for: fixed or automatic. Without a drafter,
    the budget is 0 nodes. `clock` returns the time in seconds; the automatic budget uses it for
    calibration."""
    if drafter is None:
        return NodeBudget(0)
    method = options.tree_method
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
    return AutoNodeBudget(
        calibration,
        max_nodes,
        ragged=method.sorts_nodes_by_probability and supports_ragged_trees(target),
    )

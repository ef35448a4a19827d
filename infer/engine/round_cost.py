"""The cost of a round: calibrated by timing a target and its drafter, and corrected by the rounds
that follow.

S node counts to choose from.
"""

import statistics
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from timeit import timeit

import numpy as np
import torch

from infer.drafters.base import Drafter
from infer.drafters.heads.draft import draft_proposal
from infer.engine.verification import argmax_tokens
from infer.targets.target import Target
from infer.trees.ddtree import build_ddtree
from infer.trees.tree import DraftTree

# Numbers of drafted nodes to choose from. Together with the root, most of them are multiples of the
# block sizes of GEMM kernels.
CANDIDATE_DRAFTED_NODE_COUNTS = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63, 95, 127, 191, 255)

COST_CALIBRATION_CONTEXT_TOKENS = 128  # positions in the cache during calibration
MAX_COST_CALIBRATION_DRAFT_CALLS = 16  # each adds two positions to the drafter's cache
COST_CALIBRATION_NODES_PER_DRAFT = 15
# Calibration stops at a target pass that costs so many times the pass without drafted nodes.
COST_CALIBRATION_STOP_RATIO = 4

COST_EMA_ALPHA = 0.05  # weight of a round in its measured cost, after the first twenty rounds
MAX_MEASURED_TO_EXPECTED_ROUND_COST = (
    1.5  # a measured round counts as at most this many times its expected cost
)
COST_WEIGHT_DECAY_PER_DOUBLING = (
    1 / 16
)  # weight of costs measured with twice or half the rows or nodes
# Weight of the calibrated cost, in rounds. It matters only if no similar round was measured.
CALIBRATED_COST_WEIGHT_IN_ROUNDS = 1e-30


@dataclass(frozen=True)
class Calibration:
    """Seconds of a target pass by its number of positions, and of everything else in a round."""

    positions: tuple[int, ...]  # of one row, ascending
    seconds: tuple[float, ...]  # of a target pass over that many positions
    draft_seconds: float  # of drafting one row and building its tree

    def cost(self, positions: int, drafts: bool = True) -> float:
        """Return the seconds of a round whose target pass computes `positions` positions of all
        rows together: interpolated between measurements, extrapolated linearly beyond them."""
        index = bisect_left(self.positions, positions)
        index = min(max(1, index), len(self.positions) - 1)
        left = self.positions[index - 1]
        right = self.positions[index]
        slope = (self.seconds[index] - self.seconds[index - 1]) / (right - left)
        pass_seconds = self.seconds[index - 1] + slope * (positions - left)
        return pass_seconds + (self.draft_seconds if drafts else 0.0)


@torch.inference_mode()
def calibrate(
    target: Target, drafter: Drafter, clock: Callable[[], float], repeats: int = 3
) -> Calibration:
    """Measure drafting and target passes of one row after COST_CALIBRATION_CONTEXT_TOKENS positions.

    Target passes grow until one costs COST_CALIBRATION_STOP_RATIO times the pass without drafted nodes.
    All are measured `repeats` times, interleaved, and the medians are returned. This takes about a
    second on a laptop.
    """
    context_length = COST_CALIBRATION_CONTEXT_TOKENS
    cache = target.allocate_cache(1, context_length + CANDIDATE_DRAFTED_NODE_COUNTS[-1] + 1)
    draft_state = drafter.allocate_state(1, context_length + 2 * MAX_COST_CALIBRATION_DRAFT_CALLS)
    prompt = [i % target.config.vocab_size for i in range(context_length)]
    with cache.add_rows(1) as new_row:
        features = target.extend_cache([prompt], new_row, drafter.layer_ids)
    tokens = torch.tensor([prompt], device=target.device)
    bonus = torch.tensor([0], device=target.device)
    with draft_state.add(1) as new_row:
        drafter.update_context(target, features.context, tokens, [context_length], new_row)

    def draft(num_nodes: int) -> DraftTree:
        context = features.context[:, :2]
        drafter.update_context(target, context, tokens[:, :2], [2], draft_state)
        return build_ddtree(draft_proposal(drafter, target, bonus, draft_state, num_nodes))

    def verify(tree: DraftTree) -> None:
        features = target.verify(tree, tree.ancestors(), cache, drafter.layer_ids)
        argmax_tokens(target, features.last_hidden_states)

    tree = draft(CANDIDATE_DRAFTED_NODE_COUNTS[-1])
    tasks: list[Callable[[], object]] = [partial(draft, COST_CALIBRATION_NODES_PER_DRAFT)]
    measured_counts = []
    baseline_seconds = 0.0
    for count in sorted(
        {min(count, tree.max_drafted) for count in (0, *CANDIDATE_DRAFTED_NODE_COUNTS)}
    ):
        task = partial(verify, tree.keep_first(count))
        tasks.append(task)
        measured_counts.append(count)
        task()  # warm up
        seconds = timeit(task, timer=clock, number=1)
        if not baseline_seconds:
            baseline_seconds = seconds
        if seconds > COST_CALIBRATION_STOP_RATIO * baseline_seconds:
            break

    samples = [[timeit(task, timer=clock, number=1) for task in tasks] for _ in range(repeats)]
    draft_seconds, *pass_seconds = map(statistics.median, zip(*samples, strict=True))
    positions = tuple(count + 1 for count in measured_counts)
    increasing_seconds = tuple(accumulate(pass_seconds, max))
    return Calibration(positions, increasing_seconds, draft_seconds)


def get_calibration(target: Target, drafter: Drafter, clock: Callable[[], float]) -> Calibration:
    """Return the result of `calibrate`, measured once per target and drafter and kept by the
    target as long as the drafter exists."""
    if drafter not in target.cost_calibrations:
        target.cost_calibrations[drafter] = calibrate(target, drafter, clock)
    return target.cost_calibrations[drafter]


class RoundCostTable:
    """Seconds of a round by number of rows (in powers of two) and of nodes.

    Costs are stored as ratios to the calibrated cost. A cost that was not measured takes the ratio
    of measured costs near it, so measurements of one batch size improve the estimates of others.
    """

    def __init__(self, calibration: Calibration, node_counts: list[int]) -> None:
        self.calibration = calibration
        self.node_counts = node_counts
        log_counts = np.log2(np.add(node_counts, 1))
        distances = abs(log_counts[:, None] - log_counts)
        self.count_weights = COST_WEIGHT_DECAY_PER_DOUBLING**distances  # (S, S)
        self.ratios = np.ones((32, len(node_counts)))  # by `get_row_bucket`
        # Measured rounds, at most 1 / COST_EMA_ALPHA.
        self.num_measured = np.zeros_like(self.ratios)
        self._calibrated_costs: dict[int, np.ndarray] = {}  # by rows, (S,)
        self._costs: dict[int, np.ndarray] = {}  # by rows, (S,), until the next `update`

    def calibrated_costs(self, rows: int) -> np.ndarray:
        """Return the calibrated seconds of a round of `rows` rows by node count, (S,)."""
        if rows not in self._calibrated_costs:
            costs = [
                self.calibration.cost(rows * (count + 1), drafts=count > 0)
                for count in self.node_counts
            ]
            self._calibrated_costs[rows] = np.array(costs)
        return self._calibrated_costs[rows]

    def costs(self, rows: int) -> np.ndarray:
        """Return the estimated seconds of a round of `rows` rows by node count, (S,)."""
        if rows not in self._costs:
            row_distances = abs(np.arange(len(self.num_measured)) - get_row_bucket(rows))
            row_weights = COST_WEIGHT_DECAY_PER_DOUBLING**row_distances
            weights = (
                row_weights @ self.num_measured @ self.count_weights
                + CALIBRATED_COST_WEIGHT_IN_ROUNDS
            )
            weighted_ratios = (
                row_weights @ (self.num_measured * self.ratios) @ self.count_weights
                + CALIBRATED_COST_WEIGHT_IN_ROUNDS
            )
            self._costs[rows] = weighted_ratios / weights * self.calibrated_costs(rows)
        return self._costs[rows]

    def is_measured(self, rows: int) -> np.ndarray:
        """Return which node counts were measured with about `rows` rows, (S,) bool."""
        return self.num_measured[get_row_bucket(rows)] > 0

    def update(self, rows: int, count_index: int, seconds: float) -> None:
        """Record a measured round with node_counts[count_index] nodes per row."""
        key = (get_row_bucket(rows), count_index)
        # The first round of a shape compiles and allocates. Others may be delayed by other
        # processes.
        clip = MAX_MEASURED_TO_EXPECTED_ROUND_COST if self.num_measured[key] else 1
        seconds = min(seconds, clip * self.costs(rows)[count_index])
        self.num_measured[key] = min(self.num_measured[key] + 1, 1 / COST_EMA_ALPHA)
        ratio = seconds / self.calibrated_costs(rows)[count_index]
        self.ratios[key] += (ratio - self.ratios[key]) / self.num_measured[key]
        self._costs.clear()


def get_row_bucket(rows: int) -> int:
    """Return the exponent of the next power of two, the number of rows of a captured round."""
    return (rows - 1).bit_length()

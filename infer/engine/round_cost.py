"""Estimate how many seconds a round takes. The first estimates come from timing a target and its
drafter once (calibration). Later estimates also use the measured seconds of rounds.

A node count is a number of drafted nodes per batch row.
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

# Numbers of drafted nodes per batch row that the automatic node budget chooses from. With the root
# added, most of them are multiples of the tile sizes of GEMM kernels.
CANDIDATE_DRAFTED_NODE_COUNTS = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63, 95, 127, 191, 255)

COST_CALIBRATION_CONTEXT_TOKENS = 128  # number of positions in the KV caches during the timing
# Maximum number of drafting calls during the timing. Each call adds two positions to the drafter's
# cache, which has space for this many calls.
MAX_COST_CALIBRATION_DRAFT_CALLS = 16
COST_CALIBRATION_NODES_PER_DRAFT = 15
# Larger trees are not timed once a target pass takes this many times as long as one without drafted
# nodes.
COST_CALIBRATION_STOP_RATIO = 4

# Weight of a new measurement in the moving average. The first 20 measurements have equal weights.
COST_EMA_ALPHA = 0.05
MAX_MEASURED_TO_EXPECTED_ROUND_COST = (
    1.5  # a measurement is clipped to this many times the expected seconds
)
# An estimate also uses measurements with other numbers of batch rows or nodes. Their weight is
# multiplied by this constant for each factor of 2 between those numbers and the numbers of the
# estimate.
COST_WEIGHT_DECAY_PER_DOUBLING = 1 / 16
# Weight of the calibrated cost, relative to 1 for each measured round. It is so small that the
# calibrated cost matters only if no similar round was measured.
CALIBRATED_COST_WEIGHT_IN_ROUNDS = 1e-30


@dataclass(frozen=True)
class Calibration:
    """Timing of a target and its drafter: seconds of target passes over several numbers of
    positions, and seconds of drafting."""

    # numbers of positions (a root and drafted nodes) that were timed, ascending
    positions: tuple[int, ...]
    pass_seconds: tuple[float, ...]  # entry i: seconds of a target pass over positions[i] positions
    draft_seconds: float  # seconds of drafting for one batch row and building the tree

    def estimate_round_seconds(self, positions: int, drafts: bool = True) -> float:
        """Estimate the seconds of a round. `positions` is the number of positions that the target
        pass computes, in all batch rows together. `drafts` tells whether the round drafts.

        The seconds are interpolated linearly between the measurements, and extrapolated linearly
        beyond them.
        """
        index = bisect_left(self.positions, positions)
        index = min(max(1, index), len(self.positions) - 1)
        left = self.positions[index - 1]
        right = self.positions[index]
        slope = (self.pass_seconds[index] - self.pass_seconds[index - 1]) / (right - left)
        pass_seconds = self.pass_seconds[index - 1] + slope * (positions - left)
        return pass_seconds + (self.draft_seconds if drafts else 0.0)


@torch.inference_mode()
def calibrate(
    target: Target, drafter: Drafter, clock: Callable[[], float], repeats: int = 3
) -> Calibration:
    """Measure how long drafting and target passes of several sizes take, for one batch row with
    COST_CALIBRATION_CONTEXT_TOKENS positions in the cache. `clock` returns the time in seconds.

    The target passes get larger until one takes COST_CALIBRATION_STOP_RATIO times as long as the
    pass without drafted nodes. Drafting and all passes are measured `repeats` times, interleaved,
    and the medians are returned. This takes about a second on a laptop.
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
        drafter.update_context(target, features.layer_features, tokens, [context_length], new_row)

    def draft(num_nodes: int) -> DraftTree:
        context = features.layer_features[:, :2]
        drafter.update_context(target, context, tokens[:, :2], [2], draft_state)
        return build_ddtree(draft_proposal(drafter, target, bonus, draft_state, num_nodes))

    def verify(tree: DraftTree) -> None:
        features = target.verify(tree, tree.build_ancestor_mask(), cache, drafter.layer_ids)
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
        task()  # not timed: the first call also compiles and allocates
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
    """Return the result of `calibrate`, which runs once per pair of target and drafter. The target
    stores the result for as long as the drafter exists. `clock` returns the time in seconds."""
    if drafter not in target.cost_calibrations:
        target.cost_calibrations[drafter] = calibrate(target, drafter, clock)
    return target.cost_calibrations[drafter]


class RoundCostTable:
    """Estimates the seconds of a round for each number of batch rows and each node count (number of
    drafted nodes per batch row).

    The table stores the ratio of measured to calibrated seconds for each node count and each power
    of two of batch rows; other numbers of rows are rounded up. An estimate is the calibrated
    seconds times a weighted average of these ratios, with the highest weights for similar numbers
    of rows and nodes. Measurements with one batch size therefore improve the estimates for other
    batch sizes.
    """

    def __init__(self, calibration: Calibration, node_counts: list[int]) -> None:
        self.calibration = calibration
        self.node_counts = node_counts
        log_counts = np.log2(np.add(node_counts, 1))
        distances = abs(log_counts[:, None] - log_counts)
        # [i, j]: weight of measurements with node_counts[i] nodes in the estimate for
        # node_counts[j]
        self.count_weights = COST_WEIGHT_DECAY_PER_DOUBLING**distances
        # ratio of measured to calibrated seconds; row i is for 2 ** i batch rows, columns are node
        # counts
        self.ratios = np.ones((32, len(node_counts)))
        # Number of measured rounds for each entry of `ratios`, at most 1 / COST_EMA_ALPHA.
        self.num_measured = np.zeros_like(self.ratios)
        # keys: numbers of batch rows; values: the results of `calibrated_costs`
        self._calibrated_costs: dict[int, np.ndarray] = {}
        # keys: numbers of batch rows; values: the results of `costs`, until the next `update`
        self._costs: dict[int, np.ndarray] = {}

    def calibrated_costs(self, rows: int) -> np.ndarray:
        """Return the calibrated seconds of a round with `rows` batch rows, one value for each entry
        of `node_counts`."""
        if rows not in self._calibrated_costs:
            costs = [
                self.calibration.estimate_round_seconds(rows * (count + 1), drafts=count > 0)
                for count in self.node_counts
            ]
            self._calibrated_costs[rows] = np.array(costs)
        return self._calibrated_costs[rows]

    def costs(self, rows: int) -> np.ndarray:
        """Return the estimated seconds of a round with `rows` batch rows, one value for each entry
        of `node_counts`."""
        if rows not in self._costs:
            row_distances = abs(np.arange(len(self.num_measured)) - ceil_log2(rows))
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
        """Return, for each entry of `node_counts`, whether a round with this many drafted nodes per
        batch row and about `rows` batch rows was measured. Numbers of batch rows are compared after
        rounding up to a power of two."""
        return self.num_measured[ceil_log2(rows)] > 0

    def update(self, rows: int, count_index: int, seconds: float) -> None:
        """Record that a round of `rows` batch rows with node_counts[count_index] nodes per row took
        `seconds`."""
        key = (ceil_log2(rows), count_index)
        # Clip outliers: the first round with new tensor shapes also compiles and allocates, and
        # other processes may delay any round.
        clip = MAX_MEASURED_TO_EXPECTED_ROUND_COST if self.num_measured[key] else 1
        seconds = min(seconds, clip * self.costs(rows)[count_index])
        self.num_measured[key] = min(self.num_measured[key] + 1, 1 / COST_EMA_ALPHA)
        ratio = seconds / self.calibrated_costs(rows)[count_index]
        self.ratios[key] += (ratio - self.ratios[key]) / self.num_measured[key]
        self._costs.clear()


def ceil_log2(rows: int) -> int:
    """Return the exponent of the smallest power of two that is at least `rows`. Rounds that run as
    CUDA graphs are padded to this power of two batch rows."""
    return (rows - 1).bit_length()

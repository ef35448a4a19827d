"""A node budget for the machine: measures how long a pass takes at every size, and picks the fastest size of a round.

B rows, M tree nodes.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from infer.drafters.base import Drafter
from infer.targets.target import Target
from infer.trees.ddtree import ddtree
from infer.trees.tree import DraftTree, Proposal, root_only

SIZES = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # node counts to choose among
CONTEXT = 128  # positions in the cache while measuring


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
        i = next((i for i, p in enumerate(self.positions) if p >= positions), len(self.positions) - 1)
        i = max(1, i)
        left, right = self.positions[i - 1], self.positions[i]
        slope = (self.seconds[i] - self.seconds[i - 1]) / (right - left)
        return self.seconds[i - 1] + slope * (positions - left) + self.other

    def nodes(self, tree: DraftTree) -> int:
        """Return the size whose expected tokens per second are highest, for a ranked tree: its first n nodes are the
        best tree of n, whose expected acceptance length is the sum of their probabilities (DDTree proposition 1). All
        rows get the same size."""
        rows, most = tree.log_probs.shape
        expected = tree.log_probs.float().exp().cumsum(1).sum(0).tolist()  # by nodes, the root included
        sizes = [size for size in SIZES if size < most] or [most - 1]
        return max(sizes, key=lambda size: expected[size] / self.cost(rows * (size + 1)))


@torch.inference_mode()
def calibrate(
    target: Target, drafter: Drafter, clock: Callable[[], float], static: bool = False, repeats: int = 7
) -> BudgetRule:
    """Measure one draft and target passes of all sizes in turns: medians of `repeats`. About a second on a laptop, more
    with the compiling that `static` asks for."""
    cache, state = target.cache(1, CONTEXT + SIZES[-1] + 1, static), drafter.state(1, CONTEXT, static)
    prompt = [i % target.config.vocab_size for i in range(CONTEXT)]
    with cache.add(1) as row:
        features = target.extend([prompt], row, drafter.layer_ids)
    with state.add(1) as row:
        drafter.update_context(target, features.context, torch.tensor([prompt], device=target.device), [CONTEXT], row)
    bonus = torch.zeros(1, dtype=torch.long, device=target.device)

    def draft() -> DraftTree:
        state.cache.advance([-2])
        drafter.update_context(target, features.context[:, :2], bonus.repeat(1, 2), [2], state)
        if getattr(drafter, "head_row", None) is None:
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

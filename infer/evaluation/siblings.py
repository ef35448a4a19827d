"""Do trees pay? How good a drafter's first choices are behind first choices and behind siblings, and
what the best order of the same candidates would give: replayed (`infer.evaluation.replay`) on the
greedy texts of an evaluation.

L drafted positions, n texts.
"""

from collections.abc import Sequence
from itertools import product

import numpy as np

from infer.drafters.base import Drafter
from infer.evaluation.replay import Order, ReplayedText, Text, replay, tau
from infer.evaluation.results import FirstChoices, ReplayedOrder, TreeStudy
from infer.evaluation.ruler import interval
from infer.targets.target import Target

BEHIND = ("first choices", "a sibling")


def replay_trees(target: Target, drafter: Drafter, texts: Sequence[Text], budgets: Sequence[int]) -> list[ReplayedText]:
    """Replay chains, DDTrees of every budget by head, marginals and the best order; look at first
    choices in the rounds of the largest."""
    ways = ("drafter", "ideal") if drafter.head_row is None else ("drafter", "marginals", "ideal")
    orders = [Order("chain", drafter.block_size - 1, by) for by in ways if by != "ideal"]
    orders += [Order("ddtree", budget, by) for budget, by in product(sorted(set(budgets)), ways)]
    return replay(target, drafter, texts, orders, reference=Order("ddtree", max(budgets)))


def study_of(texts: Sequence[ReplayedText]) -> TreeStudy:
    """Return the figures of replayed texts, with intervals over texts."""
    orders = [ReplayedOrder(*order, *tau([text.commits[order] for text in texts])) for order in texts[0].commits]
    choices = []
    for by in next((text.choices for text in texts if text.choices), {}):
        counts = np.stack([text.choices[by] for text in texts if text.choices])  # (n, 4, L)
        for behind, asked, right in zip(
            BEHIND, counts[:, ::2].swapaxes(0, 1), counts[:, 1::2].swapaxes(0, 1), strict=True
        ):
            pairs = [(asked.sum(1), right.sum(1)), *zip(asked.T, right.T, strict=True)]  # (n,) each
            whole, *depths = [share_interval(*pair) for pair in pairs]
            choices.append(FirstChoices(by, behind, asked.sum(0).tolist(), right.sum(0).tolist(), depths, whole))
    return TreeStudy(max(order.nodes for order in texts[0].commits if order.method == "ddtree"), choices, orders)


def share_interval(asked: np.ndarray, right: np.ndarray) -> list[float] | None:
    """Return the interval of a share over texts with these counts (n,), None where nothing was asked."""
    if not asked.any():
        return None
    return interval(lambda drawn: right[drawn].sum(-1) / np.maximum(asked[drawn].sum(-1), 1), len(asked))

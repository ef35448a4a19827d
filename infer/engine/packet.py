"""What a round tells the host: everything in one copy.

B rows, M tree nodes, W = max depth + 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infer.config import TextOptions
from infer.engine.choices import logprobs_of
from infer.engine.controls import most_logprobs
from infer.engine.round import RoundResult
from infer.targets.target import Target
from infer.trees.tree import DraftTree


@dataclass(frozen=True)
class Told:
    """A row of a round, on the host."""

    tokens: list[int]  # committed, the bonus token last
    path: list[int]  # the accepted nodes, the root left out
    log_probs: list[float]  # of all nodes that were found, if they were asked for
    logprobs: list[list[float]]  # of every committed token, see `logprobs_of`, if a row asks for them


def pack(target: Target, found: RoundResult, options: Sequence[TextOptions], promises: bool) -> torch.Tensor:
    """Return a round as numbers (B, n) float64, which holds token ids as they are: lengths, bonus tokens, tokens and
    nodes of the paths; `promises`: log-probabilities of all nodes found; the target's, where a text asks for them."""
    accepted = found.accepted
    drafted = found.tree.tokens.gather(1, accepted.path)  # (B, W)
    columns = [accepted.lengths[:, None], accepted.bonus[:, None], drafted, accepted.path]
    if promises:
        columns.append(found.whole.log_probs)
    most = most_logprobs(options)
    if most is not None:
        last = found.features.last
        along = last.gather(1, accepted.path[..., None].expand(-1, -1, last.shape[-1]))
        logprobs = logprobs_of(target, along, found.chosen.gather(1, accepted.path), most)
        columns.append(logprobs.flatten(1))
    return torch.cat([column.double() for column in columns], 1)


def unpack(numbers: list[float], width: int, promised: int) -> Told:
    """Read a row of `pack`, of a path of `width` nodes at most and so many nodes found."""
    length, bonus, *ids = map(int, numbers[: 2 + 2 * width])
    end = 2 + 2 * width + promised
    each = (len(numbers) - end) // width
    logprobs = [numbers[end + each * place :][:each] for place in range(length)] if each else []
    return Told([*ids[1:length], bonus], ids[width + 1 : width + length], numbers[2 + 2 * width : end], logprobs)


def rejected_path(tree: DraftTree, row: int, node: int) -> list[int]:
    """Return the likeliest rejected path of a row: from the last accepted node on, each node's first child (siblings
    are sorted by probability)."""
    tokens, parents, rejected = tree.tokens[row].tolist(), tree.parents[row].tolist(), []
    while node in parents[node + 1 :]:
        node = parents.index(node, node + 1)
        rejected.append(tokens[node])
    return rejected

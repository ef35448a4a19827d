"""What a round tells the host: everything in one copy.

B rows, M tree nodes, W = max depth + 1.
"""

from dataclasses import dataclass

import torch

from infer.engine.choices import Accepted
from infer.engine.sequence import Sequence, TokenLogprob
from infer.targets.target import Target
from infer.trees.tree import DraftTree


@dataclass(frozen=True)
class Told:
    """A row of a round, on the host."""

    tokens: list[int]  # committed, the bonus token last
    path: list[int]  # the accepted nodes, the root left out
    log_probs: list[float]  # of all nodes that were found, if they were asked for
    logprobs: list[
        list[float]
    ]  # of every committed token, see `logprobs_of`, if a row asks for them


def pack(
    target: Target,
    tree: DraftTree,
    last: torch.Tensor,
    chosen: torch.Tensor,
    accepted: Accepted,
    most: int | None,
    log_probs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a round as numbers (B, n) float64, which holds token ids as they are: lengths, bonus
    tokens, tokens and nodes of the paths; the log-probabilities (B, n) of nodes that the host asks
    for; unless `most` is None, `logprobs_of`. `last` (B, M, D) and `chosen` (B, M) are of all
    nodes."""
    drafted = tree.tokens.gather(1, accepted.path)  # (B, W)
    columns = [accepted.lengths[:, None], accepted.bonus[:, None], drafted, accepted.path]
    if log_probs is not None:
        columns.append(log_probs)
    if most is not None:
        along = last.gather(1, accepted.path[..., None].expand(-1, -1, last.shape[-1]))
        logprobs = logprobs_of(target, along, chosen.gather(1, accepted.path), most)
        columns.append(logprobs.flatten(1))
    return torch.cat([column.double() for column in columns], 1)


def unpack(numbers: list[float], width: int, promised: int) -> Told:
    """Read a row of `pack`, of a path of `width` nodes at most and so many nodes found."""
    length, bonus, *ids = map(int, numbers[: 2 + 2 * width])
    end = 2 + 2 * width + promised
    each = (len(numbers) - end) // width
    logprobs = [numbers[end + each * place :][:each] for place in range(length)] if each else []
    return Told(
        [*ids[1:length], bonus],
        ids[width + 1 : width + length],
        numbers[2 + 2 * width : end],
        logprobs,
    )


def logprobs_of(
    target: Target, last: torch.Tensor, chosen: torch.Tensor, most: int
) -> torch.Tensor:
    """Return the target's own log-probabilities at places with final states (B, W, D): of the token
    that was chosen there, (B, W), then of the k = `most` likeliest, then their ids: (B, W, 1 + 2 k)
    float64."""
    log_probs = target.head(last).float().log_softmax(-1)
    top, ids = log_probs.topk(most, dim=-1)
    return torch.cat([log_probs.gather(2, chosen[..., None]), top, ids.double()], -1)


def note_logprobs(text: Sequence, places: list[list[float]]) -> None:
    """Give a text that asks for them the `logprobs_of` its committed tokens."""
    for of_chosen, *likeliest in places if text.options.logprobs is not None else ():
        half = len(likeliest) // 2
        ranked = zip(map(int, likeliest[half:]), likeliest[:half], strict=True)
        text.logprobs.append(TokenLogprob(of_chosen, list(ranked)[: text.options.logprobs]))


def rejected_path(tree: DraftTree, row: int, node: int) -> list[int]:
    """Return the likeliest rejected path of a row: from the last accepted node on, each node's
    first child (siblings are sorted by probability)."""
    tokens = tree.tokens[row].tolist()
    parents = tree.parents[row, : tree.budgets[row] + 1].tolist()
    rejected = []
    while node in parents[node + 1 :]:
        node = parents.index(node, node + 1)
        rejected.append(tokens[node])
    return rejected

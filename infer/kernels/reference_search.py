"""The search for the likeliest prefixes in tensor operations of fixed shapes, depth by depth: the
reference of `best_first_search`, and what recurrent heads need, whose memories the kept prefixes
carry.

Of equal scores the shallower prefix goes first, then the one whose parent does, then the candidate
that is likelier by
itself: the first of two equal candidates.

B batch rows, L drafted positions, M candidates of a position, N nodes, P prefixes, S entries of a
memory.
"""

from typing import NamedTuple, Protocol

import torch


class Nodes(NamedTuple):
    """Drafted nodes, the root left out: tokens, parents and depths int64, log-probabilities of the
    whole prefixes."""

    tokens: torch.Tensor  # (B, M - 1)
    parents: torch.Tensor  # (B, M - 1) node numbers, 0 is the root
    depths: torch.Tensor  # (B, M - 1)
    log_probs: torch.Tensor  # (B, M - 1)


class Candidates(Protocol):
    """Conditional distributions over M candidates of a position
    (`infer.trees.tree.Conditionals`)."""

    recurrent: bool
    tokens: torch.Tensor  # (B, L, M)
    table: tuple[
        torch.Tensor, torch.Tensor
    ]  # log q (B, M) of the first slot, (B, L - 1, R, M) of the others


def comparable(log_q: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities with minus infinity for NaN: a drafter that answers with NaN drafts
    badly, and no worse, as searches count on an order."""
    return log_q.nan_to_num(nan=-torch.inf, neginf=-torch.inf)


def node_count(length: int, ranks: int, budget: int) -> int:
    """Return the number of nodes: `budget`, or all prefixes of `length` positions of `ranks` tokens
    if fewer."""
    total = 0
    level = 1
    for _ in range(length):
        level = min(level * ranks, budget)
        total = min(total + level, budget)
    return total


def one_table(steps: Candidates) -> torch.Tensor:
    """Return log q (B, 1 + (L - 1) R, M) float32 of the first slot's candidates, and of the others'
    behind each of the R of the one before."""
    first, others = steps.table
    return torch.cat([first[:, None], others.flatten(1, 2)], 1).float()


def search_by_depth(steps: Candidates, budget: int) -> Nodes:
    """Find the same nodes depth by depth on the candidates' device: extend the best prefixes of a
    depth by all candidates, keep the best of these, and at the end take the best of all depths.

    Exact: a prefix among the best B has its parent among them. Sorting is stable, so that equal
        scores stay in order.
    """
    rows, length, count = steps.tokens.shape
    scores = torch.zeros(rows, 1, device=steps.tokens.device)
    levels = []
    first = 0
    memory = None
    which = torch.zeros_like(scores, dtype=torch.long)  # (B, P) the last candidate of every prefix
    for slot in range(length):
        log_q, memory = behind_candidates(steps, slot, which, memory)
        extended = (scores[:, :, None] + comparable(log_q)).flatten(1)  # (B, P M)
        scores, order = extended.sort(dim=1, descending=True, stable=True)
        # (B, P)
        scores = scores[:, :budget]
        order = order[:, :budget]
        which = order % count
        prefix = order // count
        if memory is not None:
            memory = memory.gather(1, prefix[..., None].expand(-1, -1, memory.shape[-1]))
        parents = prefix + first - levels[-1][0].shape[1] if slot else torch.full_like(prefix, -1)
        first += order.shape[1]
        tokens = steps.tokens[:, slot].gather(1, which)
        levels.append((scores, tokens, parents, torch.full_like(tokens, slot + 1)))
    return best_of_levels(levels, budget)


def behind_candidates(
    steps: Candidates, slot: int, which: torch.Tensor, memory: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log q (B, P, M) of a slot behind candidates `which` (B, P) of the one before; and a
    recurrent head's memory."""
    if steps.recurrent:
        return steps.extend(slot, which, memory) if slot else steps.begin()
    first, others = steps.table
    if slot == 0:
        return first[:, None], None
    rows = which.clamp(max=others.shape[2] - 1)[..., None]  # of marginals there is one
    return others[:, slot - 1].gather(1, rows.expand(-1, -1, others.shape[3])), None


def best_of_levels(levels: list[tuple[torch.Tensor, ...]], budget: int) -> Nodes:
    """Return the best `budget` prefixes of all depths, best first. Of every depth, best first and
    (B, P) each: scores, tokens, parents among the prefixes of all depths (-1 for the root), and
    depths."""
    scores, tokens, parents, depths = (torch.cat(column, 1) for column in zip(*levels, strict=True))
    order = scores.sort(dim=1, descending=True, stable=True).indices
    node = (
        order.argsort(1) + 1
    )  # of every kept prefix, by its place in the order; the root is node 0
    order = order[:, :budget]
    parents = parents.gather(1, order)
    parents = torch.where(parents < 0, 0, node.gather(1, parents.clamp(min=0)))
    return Nodes(tokens.gather(1, order), parents, depths.gather(1, order), scores.gather(1, order))

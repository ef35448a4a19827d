"""The search for the most probable prefixes, level by level, in tensor operations of fixed shapes.

It is the reference of the operation `best_first_search`. It is also the only search that supports
recurrent conditional heads, because it keeps the recurrent state of each prefix.

Of prefixes with equal scores, the shorter prefix comes first. Of those with the same length, the
one whose parent comes first does. Of those with the same parent, the one whose last token has the
higher conditional log-probability does, and finally the one whose candidate has the lower index.

Dimensions: B batch rows, L drafted positions, M candidates per position, R rows of a conditional
table per position (M, or 1 if a position does not depend on the candidate before it), N drafted
nodes, P prefixes, S size of a recurrent state.
"""

from typing import NamedTuple, Protocol, cast

import torch


class DraftNodes(NamedTuple):
    """The drafted nodes of B draft trees, numbered from 1. The root, node 0, is not included."""

    tokens: torch.Tensor  # (B, N) int64
    parents: torch.Tensor  # (B, N) int64, node number of the parent
    depths: torch.Tensor  # (B, N) int64
    log_probs: torch.Tensor  # (B, N), log-probability of the prefix that ends at the node


class CandidateTables(Protocol):
    """A drafter's distributions over M candidates per position (`infer.trees.tree.Conditionals`).

    recurrent: whether the candidates are of a recurrent conditional head (`RecurrentCandidates`)
    """

    recurrent: bool
    tokens: torch.Tensor  # (B, L, M)

    @property
    def table(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The log-probabilities of the candidates that the drafter predicts.

        The shapes are (B, M) for the first position and (B, L - 1, R, M) for the other positions.
        Row r of a position is for candidate r of the position before it.
        """
        ...


class RecurrentCandidates(CandidateTables, Protocol):
    """Candidates of a recurrent conditional head.

    The distribution at a position depends on all tokens of the prefix, so there is no table.
    """

    def begin(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the log-probabilities (B, 1, M) of slot 0, and the recurrent state (B, 1, S)."""
        ...

    def extend(
        self, slot: int, last_candidates: torch.Tensor, recurrent_state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the log-probabilities (B, P, M) of a slot, and the new recurrent states (B, P, S).

        last_candidates: (B, P), index of the candidate with which each prefix ends
        """
        ...


def replace_nan_log_probs(log_q: torch.Tensor) -> torch.Tensor:
    """Replace NaN in log-probabilities by minus infinity.

    A search needs log-probabilities that can be ordered. With this replacement, a drafter that
    returns NaN drafts badly but the output of the target stays correct.
    """
    return log_q.nan_to_num(nan=-torch.inf, neginf=-torch.inf)


def count_tree_nodes(length: int, candidates_per_position: int, budget: int) -> int:
    """Return the number of drafted nodes of a tree.

    This is the node budget, or the number of all possible prefixes of up to `length` positions if
    there are fewer of them.
    """
    total = 0
    level_nodes = 1
    for _ in range(length):
        level_nodes = min(level_nodes * candidates_per_position, budget)
        total = min(total + level_nodes, budget)
    return total


def stack_log_prob_tables(candidates: CandidateTables) -> torch.Tensor:
    """Return all log-probabilities of candidates as one float32 table (B, 1 + (L - 1) * R, M).

    Row 0 is for position 0. Row 1 + (k - 1) * R + r is for position k if candidate r was chosen at
    the position before it. If R is 1, row k is for position k after any candidate.
    """
    first, others = candidates.table
    return torch.cat([first[:, None], others.flatten(1, 2)], 1).float()


def search_tree_by_depth(candidates: CandidateTables, budget: int) -> DraftNodes:
    """Find the `budget` most probable prefixes, level by level, on the device of the candidates.

    At each level, the best `budget` prefixes of the level before are extended by all candidates,
    and the best `budget` of the extended prefixes are kept. At the end the best `budget` prefixes
    of all levels are returned. The result is exact, because a prefix is never more probable than
    its parent. Sorting is stable, so prefixes with equal scores keep their order.
    """
    rows, length, num_candidates = candidates.tokens.shape
    scores = torch.zeros(rows, 1, device=candidates.tokens.device)
    levels = []
    num_prefixes = 0  # of all levels so far
    recurrent_state = None
    # (B, P), the index of the last candidate of each prefix
    last_candidates = torch.zeros_like(scores, dtype=torch.long)

    for slot in range(length):
        log_q, recurrent_state = compute_slot_log_probs(
            candidates, slot, last_candidates, recurrent_state
        )
        extended = (scores[:, :, None] + replace_nan_log_probs(log_q)).flatten(1)  # (B, P * M)
        scores, order = extended.sort(dim=1, descending=True, stable=True)
        scores = scores[:, :budget]  # (B, P), of the new level
        order = order[:, :budget]
        last_candidates = order % num_candidates
        parent = order // num_candidates
        if recurrent_state is not None:
            state_index = parent[..., None].expand(-1, -1, recurrent_state.shape[-1])
            recurrent_state = recurrent_state.gather(1, state_index)

        if slot == 0:
            parents = torch.full_like(parent, -1)
        else:
            parents = parent + num_prefixes - levels[-1][0].shape[1]
        num_prefixes += order.shape[1]
        tokens = candidates.tokens[:, slot].gather(1, last_candidates)
        levels.append((scores, tokens, parents, torch.full_like(tokens, slot + 1)))

    return select_best_nodes(levels, budget)


def compute_slot_log_probs(
    candidates: CandidateTables,
    slot: int,
    last_candidates: torch.Tensor,
    recurrent_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-probabilities of the candidates at a block slot, and the recurrent state.

    last_candidates: (B, P), index of the candidate with which each prefix ends
    recurrent_state: (B, P, S) of a recurrent conditional head; None for other drafters

    The log-probabilities have the shape (B, P, M), and (B, 1, M) at slot 0. The recurrent state is
    None if the candidates are not recurrent.
    """
    if candidates.recurrent:
        recurrent_candidates = cast(RecurrentCandidates, candidates)
        if slot == 0:
            return recurrent_candidates.begin()
        return recurrent_candidates.extend(slot, last_candidates, recurrent_state)

    first, others = candidates.table
    if slot == 0:
        return first[:, None], None
    table_rows = last_candidates.clamp(max=others.shape[2] - 1)[..., None]  # all 0 if R is 1
    return others[:, slot - 1].gather(1, table_rows.expand(-1, -1, others.shape[3])), None


def select_best_nodes(levels: list[tuple[torch.Tensor, ...]], budget: int) -> DraftNodes:
    """Return the `budget` prefixes with the highest scores of all levels, the highest first.

    levels: for each depth a tuple (scores, tokens, parents, depths) of tensors (B, P), the highest
        scores first. A parent is an index among the prefixes of all levels, or -1 for the root.
    """
    scores, tokens, parents, depths = (torch.cat(column, 1) for column in zip(*levels, strict=True))
    order = scores.sort(dim=1, descending=True, stable=True).indices
    # The node number of each prefix is its rank + 1; the root is node 0.
    node_numbers = order.argsort(1) + 1

    order = order[:, :budget]
    parents = parents.gather(1, order)
    parent_nodes = node_numbers.gather(1, parents.clamp(min=0))
    parents = torch.where(parents < 0, 0, parent_nodes)
    return DraftNodes(
        tokens.gather(1, order), parents, depths.gather(1, order), scores.gather(1, order)
    )

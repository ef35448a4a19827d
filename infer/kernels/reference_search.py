"""The search for the most probable prefixes, level by level, in tensor operations of fixed shapes.

It is the reference of `best_first_search`, and the only search for recurrent conditional heads,
because it carries the recurrent state of each prefix.

Of prefixes with equal scores the shallower one comes first, then the one whose parent comes first,
then the candidate with the higher score of its own, then the candidate with the lower index.

B batch rows, L drafted positions, M candidates per position, R rows of a conditional table per
position, N drafted nodes, P prefixes, S size of a recurrent state.
"""

from typing import NamedTuple, Protocol, cast

import torch


class DraftNodes(NamedTuple):
    """The drafted nodes of B trees, without the root. tokens, parents and depths are int64."""

    tokens: torch.Tensor  # (B, N)
    parents: torch.Tensor  # (B, N) node numbers; 0 is the root
    depths: torch.Tensor  # (B, N)
    log_probs: torch.Tensor  # (B, N) log-probability of the prefix that ends at the node


class CandidateTables(Protocol):
    """Conditional distributions over M candidates per position
    (`infer.trees.tree.Conditionals`)."""

    recurrent: bool
    tokens: torch.Tensor  # (B, L, M)

    @property
    def table(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Log q of the first position, (B, M), and of the others, (B, L - 1, R, M)."""
        ...


class RecurrentCandidates(CandidateTables, Protocol):
    """Candidates of a recurrent head, whose distributions depend on all tokens of a prefix. They
    have no table."""

    def begin(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return log q (B, 1, M) of slot 0 and the recurrent state (B, 1, S)."""
        ...

    def extend(
        self, slot: int, last_candidates: torch.Tensor, recurrent_state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return log q (B, P, M) of a slot and the recurrent states (B, P, S), for prefixes that
        end with candidates (B, P)."""
        ...


def replace_nan_log_probs(log_q: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities with minus infinity instead of NaN.

    The searches need an order. A drafter that returns NaN then only drafts badly.
    """
    return log_q.nan_to_num(nan=-torch.inf, neginf=-torch.inf)


def count_tree_nodes(length: int, candidates_per_position: int, budget: int) -> int:
    """Return the number of drafted nodes: `budget`, or the number of all prefixes of up to `length`
    positions with `candidates_per_position` tokens each if that is smaller."""
    total = 0
    level_nodes = 1
    for _ in range(length):
        level_nodes = min(level_nodes * candidates_per_position, budget)
        total = min(total + level_nodes, budget)
    return total


def stack_log_prob_tables(candidates: CandidateTables) -> torch.Tensor:
    """Return log q as one table, (B, 1 + (L - 1) R, M) float32.

    Row 0 is the first position. Row 1 + (k - 1) R + r is position k after candidate r of the
    position before it (R = 1: after any candidate).
    """
    first, others = candidates.table
    return torch.cat([first[:, None], others.flatten(1, 2)], 1).float()


def search_tree_by_depth(candidates: CandidateTables, budget: int) -> DraftNodes:
    """Find the `budget` most probable prefixes, level by level, on the candidates' device.

    Each level extends the best prefixes of the level before by all candidates and keeps the best
    `budget` of them; at the end the best of all levels are kept. This is exact: the parent of a
    prefix among the best `budget` is also among them. Sorting is stable, so that equal scores keep
    their order.
    """
    rows, length, num_candidates = candidates.tokens.shape
    scores = torch.zeros(rows, 1, device=candidates.tokens.device)
    levels = []
    num_prefixes = 0  # of the levels so far
    recurrent_state = None
    # (B, P): the index of the last candidate of each prefix
    last_candidates = torch.zeros_like(scores, dtype=torch.long)

    for slot in range(length):
        log_q, recurrent_state = compute_slot_log_probs(
            candidates, slot, last_candidates, recurrent_state
        )
        extended = (scores[:, :, None] + replace_nan_log_probs(log_q)).flatten(1)  # (B, P M)
        scores, order = extended.sort(dim=1, descending=True, stable=True)
        scores = scores[:, :budget]  # (B, P) of the new level
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
    """Return log q (B, P, M) at a block slot, and the state of a recurrent head.

    last_candidates: (B, P), the candidate that each prefix chose at the slot before. The log
    q returned is (B, 1, M) at slot 0.
    """
    if candidates.recurrent:
        recurrent_candidates = cast(RecurrentCandidates, candidates)
        if slot == 0:
            return recurrent_candidates.begin()
        return recurrent_candidates.extend(slot, last_candidates, recurrent_state)

    first, others = candidates.table
    if slot == 0:
        return first[:, None], None
    table_rows = last_candidates.clamp(max=others.shape[2] - 1)[..., None]  # marginals have one row
    return others[:, slot - 1].gather(1, table_rows.expand(-1, -1, others.shape[3])), None


def select_best_nodes(levels: list[tuple[torch.Tensor, ...]], budget: int) -> DraftNodes:
    """Return the best `budget` prefixes of all levels, best first.

    levels: for each depth the prefixes, best first, as (B, P) scores, tokens, parents (indices
    among the prefixes of all levels, -1 for the root) and depths.
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

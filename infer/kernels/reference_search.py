"""The search for the nodes of a draft tree, one depth after the other, in PyTorch operations.

The search finds the most probable sequences of drafted tokens (prefixes). It is the reference
implementation of the operation `best_first_search`. It is also the only search that supports
recurrent conditional heads, because it keeps the recurrent state of each prefix.

Prefixes with equal scores are ordered by these rules; the first rule that distinguishes them
decides:

1. The prefix with the smaller depth comes first.
2. The prefix whose parent comes earlier comes first.
3. The prefix whose last token has the higher log-probability after its parent comes first.
4. The prefix whose last token has the lower index among the candidates comes first.
"""

from typing import NamedTuple, Protocol, cast

import torch


class DraftNodes(NamedTuple):
    """The drafted nodes of the draft trees of a batch. In each tree they are numbered from 1; the
    root has number 0."""

    tokens: torch.Tensor  # (batch rows, drafted nodes) int64
    parents: torch.Tensor  # (batch rows, drafted nodes) int64: node number of the parent
    depths: torch.Tensor  # (batch rows, drafted nodes) int64: 1 for children of the root
    # (batch rows, drafted nodes): log-probability of the prefix that ends at the node.
    log_probs: torch.Tensor


class CandidateTables(Protocol):
    """A drafter's candidate tokens for each position, and their log-probabilities.

    This is the part of `infer.trees.tree.Conditionals` that a search reads.

    recurrent: whether the drafter has a recurrent conditional head, see `RecurrentCandidates`
    """

    recurrent: bool
    tokens: torch.Tensor  # (batch rows, drafted positions, candidates)

    @property
    def candidate_log_probs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The log-probabilities of all candidates.

        The first tensor is for the first position and has the shape (B, candidates). The second
        tensor is for the other positions and has the shape (B, positions - 1, previous candidates,
        candidates). The size of its third axis is 1 if the log-probabilities do not depend on the
        previous candidate.
        """
        ...


class RecurrentCandidates(CandidateTables, Protocol):
    """Candidates of a recurrent conditional head, whose predictions depend on the whole prefix.

    A table of the log-probabilities would be too large, so methods compute them.
    """

    def compute_first_log_probs(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the log-probabilities of the first position, and the initial recurrent state.

        The shapes are (B, 1, candidates) and (B, 1, state size).
        """
        ...

    def compute_next_log_probs(
        self, slot: int, last_candidates: torch.Tensor, recurrent_state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the log-probabilities of a position after each prefix, and the new state of the
        conditional head.

        slot: index of the drafted position
        last_candidates: (B, prefixes), index of the candidate with which each prefix ends
        recurrent_state: (B, prefixes, state size), the state before these candidates

        The log-probabilities have the shape (B, prefixes, candidates).
        """
        ...


def replace_nan_log_probs(log_q: torch.Tensor) -> torch.Tensor:
    """Replace NaN in log-probabilities by minus infinity.

    NaN would break the order of the scores. If a drafter returns NaN, its drafts are bad, but the
    search does not fail.
    """
    return log_q.nan_to_num(nan=-torch.inf, neginf=-torch.inf)


def count_tree_nodes(length: int, candidates_per_position: int, budget: int) -> int:
    """Return the number of drafted nodes of a tree: the node budget, or the number of prefixes of
    up to `length` candidates if this is smaller."""
    total = 0
    level_nodes = 1
    for _ in range(length):
        level_nodes = min(level_nodes * candidates_per_position, budget)
        total = min(total + level_nodes, budget)
    return total


def stack_log_prob_tables(candidates: CandidateTables) -> torch.Tensor:
    """Return the log-probabilities of all candidate tokens as one table, (B, rows, candidates)
    float32.

    Row 0 is for position 0. Each other position has R rows. Row 1 + (k - 1) * R + r is for position
    k if candidate r was chosen at position k - 1. R is the number of candidates, or 1 if the
    log-probabilities do not depend on the previous candidate.
    """
    first, others = candidates.candidate_log_probs
    return torch.cat([first[:, None], others.flatten(1, 2)], 1).float()


def search_tree_by_depth(candidates: CandidateTables, budget: int) -> DraftNodes:
    """Return the `budget` most probable sequences of drafted tokens (prefixes) of each batch row,
    as the nodes of draft trees.

    At each depth, all candidates are appended to the best `budget` prefixes of the previous depth,
    and the best `budget` of the new prefixes are kept. At the end the best `budget` prefixes of all
    depths are returned. The result is exact, because a prefix is never more probable than its
    parent.
    """
    rows, length, num_candidates = candidates.tokens.shape
    scores = torch.zeros(rows, 1, device=candidates.tokens.device)
    levels = []
    num_prefixes = 0  # number of prefixes in `levels` per batch row
    recurrent_state = None
    # (batch rows, prefixes): the index of the last candidate of each prefix.
    last_candidates = torch.zeros_like(scores, dtype=torch.long)

    for slot in range(length):
        log_q, recurrent_state = compute_position_log_probs(
            candidates, slot, last_candidates, recurrent_state
        )
        # (batch rows, prefixes * candidates)
        extended = (scores[:, :, None] + replace_nan_log_probs(log_q)).flatten(1)
        scores, order = extended.sort(dim=1, descending=True, stable=True)
        scores = scores[:, :budget]
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


def compute_position_log_probs(
    candidates: CandidateTables,
    slot: int,
    last_candidates: torch.Tensor,
    recurrent_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-probabilities of a position's candidates after each prefix, and the new state
    of the conditional head.

    slot: index of the drafted position
    last_candidates: (B, prefixes), index of the candidate with which each prefix ends
    recurrent_state: (B, prefixes, state size) for a recurrent conditional head, otherwise None

    The log-probabilities have the shape (B, prefixes, candidates). At position 0, there is one
    prefix, the root. The new state is None if the head is not recurrent.
    """
    if candidates.recurrent:
        recurrent_candidates = cast(RecurrentCandidates, candidates)
        if slot == 0:
            return recurrent_candidates.compute_first_log_probs()
        return recurrent_candidates.compute_next_log_probs(slot, last_candidates, recurrent_state)

    first, others = candidates.candidate_log_probs
    if slot == 0:
        return first[:, None], None
    table_rows = last_candidates.clamp(max=others.shape[2] - 1)[..., None]
    return others[:, slot - 1].gather(1, table_rows.expand(-1, -1, others.shape[3])), None


def select_best_nodes(levels: list[tuple[torch.Tensor, ...]], budget: int) -> DraftNodes:
    """Return the `budget` prefixes with the highest scores of all depths, in descending order.

    levels: for each depth a tuple (scores, tokens, parents, depths) of tensors (B, prefixes), in
        descending order of scores. A parent is an index among the prefixes of all depths, or -1 for
        the root.
    """
    scores, tokens, parents, depths = (torch.cat(column, 1) for column in zip(*levels, strict=True))
    order = scores.sort(dim=1, descending=True, stable=True).indices
    # The node number of a prefix is its position in the sorted order plus 1; the root is node 0.
    node_numbers = order.argsort(1) + 1

    order = order[:, :budget]
    parents = parents.gather(1, order)
    parent_nodes = node_numbers.gather(1, parents.clamp(min=0))
    parents = torch.where(parents < 0, 0, parent_nodes)
    return DraftNodes(
        tokens.gather(1, order), parents, depths.gather(1, order), scores.gather(1, order)
    )

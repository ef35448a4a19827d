"""The positions that a drafter is trained at: anchors, the blocks after them, their labels and
teacher rows.

B rows, T packed length, N anchor slots, K block size, L = K - 1 drafted positions, H heads, E head
size.
"""

from typing import NamedTuple

import torch


class Blocks(NamedTuple):
    """The blocks of a batch. Slots without an anchor (too few candidates in a row) carry no
    weight."""

    anchors: torch.Tensor  # (B, N) positions in the row, sorted
    valid: torch.Tensor  # (B, N) bool
    labels: torch.Tensor  # (B, N, L) the true tokens after the anchor
    supervised: torch.Tensor  # (B, N, L) bool: inside the document, loss allowed
    teacher_rows: (
        torch.Tensor
    )  # (B, N, L) row of the flattened (B*T) target states that predicts the label


def anchor_candidates(loss: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """Return where anchors may stand in rows (B, T): bool. An anchor's token and its successor both
    carry loss; these two and the token before them belong to one document, since a bonus token
    always follows a prompt."""
    candidate = torch.zeros_like(loss)
    same = documents[:, :-1] == documents[:, 1:]
    candidate[:, 1:-1] = loss[:, 1:-1] & loss[:, 2:] & same[:, 1:] & same[:, :-1]
    return candidate


def anchor_room(
    loss: torch.Tensor, documents: torch.Tensor, per_document: int | None = None
) -> torch.Tensor:
    """Return how many anchors each row has room for, (B,): its candidates, at most so many of each
    document."""
    candidate = anchor_candidates(loss, documents)
    if per_document is None:
        return candidate.sum(1)
    own = documents + 1  # padding has number 0
    return (
        torch.zeros_like(own).scatter_add(1, own, candidate.long()).clamp(max=per_document).sum(1)
    )


def draw_anchors(
    loss: torch.Tensor,
    documents: torch.Tensor,
    jitter: torch.Tensor,
    per_document: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return anchor positions (B, N) int64, sorted, and whether each slot is used (B, N), from
    jitter (B, N) in [0, 1).

    Slot j draws uniformly from the j-th of N equal strata of a row's `anchor_candidates`, and takes
    the next free one where its neighbour has drawn the same: no candidate is drawn twice, each
    document gets its share of the slots, the list is sorted as drawn, and shapes are fixed. With
    `per_document`, a document's share is at most so many. Slots that are more than there is to draw
    (`anchor_room`) go unused.
    """
    candidate = anchor_candidates(loss, documents)  # (B, T)
    counts = candidate.sum(1, keepdim=True)  # (B, 1)
    place = torch.arange(jitter.shape[1], device=loss.device)  # (N,)
    order = candidate.cumsum(1) - 1  # (B, T) rank of each candidate
    if per_document is None:
        wanted = ((place + jitter) * counts / len(place)).long()  # (B, N) ranks
    else:
        wanted = _ranks_by_document(candidate, documents, place + jitter, per_document)
    wanted = (wanted - place).cummax(1).values + place  # each at least one more than the one before
    valid = wanted < counts
    wanted = torch.minimum(wanted, (counts - 1).clamp(min=0))
    anchors = torch.searchsorted(order, wanted, side="left").clamp(max=loss.shape[1] - 1)
    return anchors, valid


def _ranks_by_document(
    candidate: torch.Tensor, documents: torch.Tensor, drawn: torch.Tensor, most: int
) -> torch.Tensor:
    """Return the ranks of candidates (B, T) that slots draw where a document has at most `most` of
    them; drawn (B, N): the slot's number and its jitter. Ranks of slots that are not needed lie
    behind the last candidate."""
    own = documents + 1  # padding has number 0
    # of each token's document
    sizes = torch.zeros_like(own).scatter_add(1, own, candidate.long()).gather(1, own)
    share = (most / sizes.clamp(min=1)).clamp(max=1).double() * candidate  # (B, T)
    mass = share.cumsum(1)
    total = mass[:, -1:].round()  # anchors that the documents may have together
    stride = (total / drawn.shape[1]).clamp(min=1)
    where = torch.searchsorted(mass, (drawn * stride).double(), side="right")  # (B, N) positions
    ranks = torch.cat(
        [candidate.cumsum(1) - 1, candidate.sum(1, keepdim=True)], 1
    )  # behind the row: none
    return torch.where(
        drawn * stride < total, ranks.gather(1, where), candidate.sum(1, keepdim=True)
    )


def lay_out(
    columns: dict[str, torch.Tensor],
    anchors: torch.Tensor,
    valid: torch.Tensor,
    block_size: int,
    until_gap: bool = False,
) -> Blocks:
    """Return the blocks behind anchors (B, N) of packed rows with columns ids, documents and loss,
    (B, T) each. Labels beyond the document's end are not supervised, nor, `until_gap`, those behind
    a label without loss."""
    ids, documents, loss = (columns[name] for name in ("ids", "documents", "loss"))
    rows, length = ids.shape
    ahead = anchors[..., None] + torch.arange(1, block_size, device=ids.device)  # (B, N, L)
    safe = ahead.clamp(max=length - 1)

    def at(values: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        return values.gather(1, where.flatten(1)).view(where.shape)

    same_document = at(documents, safe) == at(documents, anchors)[..., None]
    supervised = valid[..., None] & (ahead < length) & same_document & at(loss, safe)
    if until_gap:
        supervised = supervised.long().cumprod(-1).bool()
    row = torch.arange(rows, device=ids.device).view(-1, 1, 1)
    return Blocks(
        anchors=anchors,
        valid=valid,
        labels=at(ids, safe),
        supervised=supervised,
        teacher_rows=row * length + safe - 1,
    )

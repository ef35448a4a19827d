"""The blocks that a drafter is trained on: anchors, labels, and the teacher rows of the labels.

Shapes: B packed sequences, T tokens each, N anchor slots, K block size, L = K - 1 drafted
positions.
"""

from typing import NamedTuple

import torch


class Blocks(NamedTuple):
    """The blocks of a batch. Anchor slots without an anchor have no supervised position."""

    anchors: torch.Tensor  # (B, N) token positions in the packed sequence, sorted
    valid: torch.Tensor  # (B, N) bool: whether the slot has an anchor
    labels: torch.Tensor  # (B, N, L) the true tokens after the anchor
    supervised: torch.Tensor  # (B, N, L) bool: in the anchor's document, and its loss counts
    # (B, N, L) index into the flattened (B*T) target states of the state that predicts the label
    teacher_rows: torch.Tensor


def find_anchor_candidates(loss: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """Return where anchors are allowed in packed sequences, (B, T) bool.

    loss (B, T) bool: tokens to learn. documents (B, T): document number of each token, -1 for
    padding. The anchor and the next token must be learned, and both must belong to the document of
    the previous token, because in decoding a bonus token always follows a prompt.
    """
    candidates = torch.zeros_like(loss)
    same_document = documents[:, :-1] == documents[:, 1:]
    candidates[:, 1:-1] = loss[:, 1:-1] & loss[:, 2:] & same_document[:, 1:] & same_document[:, :-1]
    return candidates


def count_available_anchors(
    loss: torch.Tensor, documents: torch.Tensor, max_per_document: int | None = None
) -> torch.Tensor:
    """Return how many anchors each packed sequence can have, (B,): its candidates, limited to
    `max_per_document` of each document."""
    candidates = find_anchor_candidates(loss, documents)
    if max_per_document is None:
        return candidates.sum(1)
    document_index = documents + 1  # padding becomes document 0
    counts = torch.zeros_like(document_index).scatter_add(1, document_index, candidates.long())
    return counts.clamp(max=max_per_document).sum(1)


def draw_anchors(
    loss: torch.Tensor,
    documents: torch.Tensor,
    jitter: torch.Tensor,
    max_per_document: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return anchor positions (B, N) int64, sorted, and whether each slot has one, (B, N) bool.

    jitter: (B, N) uniform random numbers in [0, 1).

    The sampling is stratified: slot j draws uniformly from the j-th of N equal strata of the
    candidates, or takes the next free candidate if its neighbour drew the same one. So no candidate
    is drawn twice, every document gets its share of the slots, and shapes are fixed. Slots beyond
    `count_available_anchors` stay empty.
    """
    candidates = find_anchor_candidates(loss, documents)  # (B, T)
    counts = candidates.sum(1, keepdim=True)  # (B, 1)
    num_slots = jitter.shape[1]
    slots = torch.arange(num_slots, device=loss.device)  # (N,)
    candidate_ranks = candidates.cumsum(1) - 1  # (B, T)
    if max_per_document is None:
        ranks = ((slots + jitter) * counts / num_slots).long()  # (B, N)
    else:
        ranks = _draw_ranks_by_document(candidates, documents, slots + jitter, max_per_document)

    ranks = (ranks - slots).cummax(1).values + slots  # each at least one above the previous one
    valid = ranks < counts
    ranks = torch.minimum(ranks, (counts - 1).clamp(min=0))
    anchors = torch.searchsorted(candidate_ranks, ranks, side="left").clamp(max=loss.shape[1] - 1)
    return anchors, valid


def _draw_ranks_by_document(
    candidates: torch.Tensor,
    documents: torch.Tensor,
    slot_offsets: torch.Tensor,
    max_per_document: int,
) -> torch.Tensor:
    """Return the candidate rank that each slot draws, (B, N), with a limit for each document.

    candidates: (B, T) bool. slot_offsets: (B, N) slot number plus jitter. Slots that are not
    needed get the number of candidates as their rank.
    """
    document_index = documents + 1  # padding becomes document 0
    counts = torch.zeros_like(document_index).scatter_add(1, document_index, candidates.long())
    document_sizes = counts.gather(1, document_index)  # (B, T) candidates in a token's document

    # a candidate's expected number of anchors, below 1 in documents above the limit
    density = (max_per_document / document_sizes.clamp(min=1)).clamp(max=1).double() * candidates
    cumulative_density = density.cumsum(1)  # (B, T)
    num_anchors = cumulative_density[:, -1:].round()  # (B, 1)
    stride = (num_anchors / slot_offsets.shape[1]).clamp(min=1)
    targets = slot_offsets * stride
    positions = torch.searchsorted(cumulative_density, targets.double(), side="right")  # (B, N)

    num_candidates = candidates.sum(1, keepdim=True)
    ranks_or_end = torch.cat([candidates.cumsum(1) - 1, num_candidates], 1)  # (B, T + 1)
    return torch.where(targets < num_anchors, ranks_or_end.gather(1, positions), num_candidates)


def build_blocks(
    batch: dict[str, torch.Tensor],
    anchors: torch.Tensor,
    valid: torch.Tensor,
    block_size: int,
    ends_at_gap: bool = False,
) -> Blocks:
    """Return the blocks behind anchors (B, N) in packed sequences.

    batch: the columns ids, documents and loss, (B, T) each. Labels beyond the end of the anchor's
    document are not supervised. With `ends_at_gap`, neither are labels behind the block's first
    label without loss.
    """
    ids = batch["ids"]
    documents = batch["documents"]
    loss = batch["loss"]
    batch_size, length = ids.shape
    positions = anchors[..., None] + torch.arange(1, block_size, device=ids.device)  # (B, N, L)
    clamped_positions = positions.clamp(max=length - 1)

    def gather_tokens(values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return values.gather(1, indices.flatten(1)).view(indices.shape)

    anchor_documents = gather_tokens(documents, anchors)[..., None]
    same_document = gather_tokens(documents, clamped_positions) == anchor_documents
    has_loss = gather_tokens(loss, clamped_positions)
    supervised = valid[..., None] & (positions < length) & same_document & has_loss
    if ends_at_gap:
        supervised = supervised.long().cumprod(-1).bool()

    batch_row = torch.arange(batch_size, device=ids.device).view(-1, 1, 1)
    return Blocks(
        anchors=anchors,
        valid=valid,
        labels=gather_tokens(ids, clamped_positions),
        supervised=supervised,
        teacher_rows=batch_row * length + clamped_positions - 1,
    )

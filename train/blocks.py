"""The training blocks of a drafter.

A block starts at an anchor, a token position of a packed sequence. The drafter gets the anchor's
token and predicts the tokens after it, the labels. The tensors have the same number of slots for
every packed sequence. A slot holds one block or is empty.

Shapes: B packed sequences, T tokens each.
"""

from typing import NamedTuple

import torch


class Blocks(NamedTuple):
    """The training blocks of a batch of packed sequences. Each sequence has the same number of
    slots for blocks; a slot without a block has no loss."""

    # (B, num_slots) the blocks' start positions in the packed sequence, sorted
    anchors: torch.Tensor
    # (B, num_slots) bool: whether the slot has a block; a sequence can have fewer blocks than slots
    valid: torch.Tensor
    # (B, num_slots, block_size - 1) the true tokens after the anchor
    labels: torch.Tensor
    # Whether the label has a loss: bool, same shape as `labels`. Only labels in the anchor's
    # document can have a loss.
    supervised: torch.Tensor
    # Index of the target's hidden state that predicts the label: same shape as `labels`. It is an
    # index into the hidden states of all tokens of the batch, flattened to (B * tokens).
    teacher_rows: torch.Tensor


def find_anchor_candidates(loss: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """Return at which tokens of packed sequences a training block may start.

    loss: (B, num_tokens) bool, whether the token has a loss. documents: (B, num_tokens) document
    number of each token, -1 for padding. Returns (B, num_tokens) bool.

    The block's first token (the anchor) and the token after it must have a loss. The tokens before
    and after the anchor must belong to the anchor's document. The token before the anchor is
    required because in decoding a block never starts at the first token of a sequence.
    """
    candidates = torch.zeros_like(loss)
    same_document = documents[:, :-1] == documents[:, 1:]
    candidates[:, 1:-1] = loss[:, 1:-1] & loss[:, 2:] & same_document[:, 1:] & same_document[:, :-1]
    return candidates


def count_available_anchors(
    loss: torch.Tensor, documents: torch.Tensor, max_per_document: int | None = None
) -> torch.Tensor:
    """Return how many anchors (start positions of training blocks) each packed sequence can have,
    (B,) int64.

    This is the number of tokens at which `find_anchor_candidates` allows an anchor. A document
    counts with at most `max_per_document` anchors.
    """
    candidates = find_anchor_candidates(loss, documents)
    if max_per_document is None:
        return candidates.sum(1)
    document_index = documents + 1  # padding has the document number -1 and gets the index 0
    counts = torch.zeros_like(document_index).scatter_add(1, document_index, candidates.long())
    return counts.clamp(max=max_per_document).sum(1)


def draw_anchors(
    loss: torch.Tensor,
    documents: torch.Tensor,
    jitter: torch.Tensor,
    max_per_document: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw random anchors (start positions of training blocks) in packed sequences.

    loss: (B, num_tokens) bool, whether the token has a loss.
    documents: (B, num_tokens) document number of each token, -1 for padding.
    jitter: (B, num_slots) uniform random numbers in [0, 1), one per slot. A slot gets at most one
    anchor.
    max_per_document: maximum number of anchors in a document, None for no limit.

    Returns two tensors of shape (B, num_slots): the token positions of the anchors (int64, sorted),
    and whether each slot has an anchor (bool).

    The sampling is stratified. The tokens at which an anchor is allowed (the candidates) are
    divided into num_slots consecutive ranges of equal size. The anchor of slot j is drawn uniformly
    from range j. Neighbouring ranges can share a candidate, because their size need not be an
    integer. If the shared candidate is already the anchor of slot j - 1, slot j gets the next
    candidate. No candidate is drawn twice. The number of anchors in a document is proportional to
    the number of its candidates. If a sequence has fewer candidates than slots, its last slots stay
    empty.
    """
    candidates = find_anchor_candidates(loss, documents)  # (B, T)
    counts = candidates.sum(1, keepdim=True)  # (B, 1)
    num_slots = jitter.shape[1]
    slots = torch.arange(num_slots, device=loss.device)  # (num_slots,)
    candidate_ranks = candidates.cumsum(1) - 1  # (B, T)
    if max_per_document is None:
        ranks = ((slots + jitter) * counts / num_slots).long()  # (B, num_slots)
    else:
        ranks = _draw_ranks_by_document(candidates, documents, slots + jitter, max_per_document)

    # Make the ranks strictly increasing over the slots, so that no candidate is drawn twice.
    ranks = (ranks - slots).cummax(1).values + slots
    valid = ranks < counts
    ranks = torch.minimum(ranks, (counts - 1).clamp(min=0))
    anchors = torch.searchsorted(candidate_ranks, ranks, side="left").clamp(max=loss.shape[1] - 1)
    return anchors, valid


def _draw_ranks_by_document(
    candidates: torch.Tensor,
    documents: torch.Tensor,
    jittered_slots: torch.Tensor,
    max_per_document: int,
) -> torch.Tensor:
    """Draw a candidate (a token at which a training block may start) for each slot, at most
    `max_per_document` in each document.

    candidates: (B, num_tokens) bool, whether the token is a candidate.
    documents: (B, num_tokens) document numbers, -1 for padding.
    jittered_slots: (B, num_slots) slot number plus a random number in [0, 1).

    Returns the rank of each slot's candidate among the candidates of its sequence, (B, num_slots).
    A slot that stays empty gets the number of candidates instead of a rank.
    """
    document_index = documents + 1  # padding has the document number -1 and gets the index 0
    counts = torch.zeros_like(document_index).scatter_add(1, document_index, candidates.long())
    # (B, T) number of candidates in the token's document
    document_sizes = counts.gather(1, document_index)

    # The expected number of anchors at a candidate. It is below 1 if the candidate's document has
    # more candidates than `max_per_document`.
    density = (max_per_document / document_sizes.clamp(min=1)).clamp(max=1).double() * candidates
    cumulative_density = density.cumsum(1)  # (B, T)
    num_anchors = cumulative_density[:, -1:].round()  # (B, 1)
    stride = (num_anchors / jittered_slots.shape[1]).clamp(min=1)
    targets = jittered_slots * stride
    # (B, num_slots)
    positions = torch.searchsorted(cumulative_density, targets.double(), side="right")

    num_candidates = candidates.sum(1, keepdim=True)
    ranks_or_end = torch.cat([candidates.cumsum(1) - 1, num_candidates], 1)  # (B, T + 1)
    return torch.where(targets < num_anchors, ranks_or_end.gather(1, positions), num_candidates)


def build_blocks(
    batch: dict[str, torch.Tensor],
    anchors: torch.Tensor,
    valid: torch.Tensor,
    block_size: int,
    truncate_at_unsupervised: bool = False,
) -> Blocks:
    """Return the training blocks that start at given positions (anchors) of packed sequences.

    batch: the columns ids, documents and loss of the packed sequences, (B, num_tokens) each.
    anchors, valid: (B, num_slots), the result of `draw_anchors`.
    block_size: number of tokens of a block: the anchor's token and the labels after it.
    truncate_at_unsupervised: whether labels after a block's first label without loss have no loss
        either.

    Labels beyond the end of the anchor's document have no loss.
    """
    ids = batch["ids"]
    documents = batch["documents"]
    loss = batch["loss"]
    batch_size, length = ids.shape
    # (B, num_slots, block_size - 1)
    positions = anchors[..., None] + torch.arange(1, block_size, device=ids.device)
    clamped_positions = positions.clamp(max=length - 1)

    def gather_tokens(values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return values.gather(1, indices.flatten(1)).view(indices.shape)

    anchor_documents = gather_tokens(documents, anchors)[..., None]
    same_document = gather_tokens(documents, clamped_positions) == anchor_documents
    has_loss = gather_tokens(loss, clamped_positions)
    supervised = valid[..., None] & (positions < length) & same_document & has_loss
    if truncate_at_unsupervised:
        supervised = supervised.long().cumprod(-1).bool()

    batch_row = torch.arange(batch_size, device=ids.device).view(-1, 1, 1)
    return Blocks(
        anchors=anchors,
        valid=valid,
        labels=gather_tokens(ids, clamped_positions),
        supervised=supervised,
        teacher_rows=batch_row * length + clamped_positions - 1,
    )

"""The blocks that a drafter is trained on.

A block starts at an anchor, a token position of a packed sequence. The drafter gets the anchor's
token and predicts the tokens after it, the labels. Each packed sequence has a fixed number of
anchor slots, some of which can be empty.

Shapes: B packed sequences, T tokens each, N anchor slots, K block size, L = K - 1 drafted
positions.
"""

from typing import NamedTuple

import torch


class Blocks(NamedTuple):
    """The blocks of a batch. Empty anchor slots have no supervised position."""

    anchors: torch.Tensor  # (B, N) token positions in the packed sequence, sorted
    valid: torch.Tensor  # (B, N) bool: whether the slot has an anchor
    labels: torch.Tensor  # (B, N, L) the true tokens after the anchor
    # (B, N, L) bool: whether the label has a loss; only labels in the anchor's document have one
    supervised: torch.Tensor
    # (B, N, L) index of the target's hidden state that predicts the label, in the hidden states of
    # all tokens of the batch, flattened to (B * T)
    teacher_rows: torch.Tensor


def find_anchor_candidates(loss: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """Return at which tokens of packed sequences an anchor is allowed, (B, T) bool.

    loss: (B, T) bool, whether the token is to be learned. documents: (B, T) document number of each
    token, -1 for padding.

    The anchor and the token after it must be tokens to learn. The tokens before and after the
    anchor must belong to the anchor's document: in decoding, too, the first token of a block is
    never the first token of the text, because a prompt precedes it.
    """
    candidates = torch.zeros_like(loss)
    same_document = documents[:, :-1] == documents[:, 1:]
    candidates[:, 1:-1] = loss[:, 1:-1] & loss[:, 2:] & same_document[:, 1:] & same_document[:, :-1]
    return candidates


def count_available_anchors(
    loss: torch.Tensor, documents: torch.Tensor, max_per_document: int | None = None
) -> torch.Tensor:
    """Return how many anchors each packed sequence can have, (B,) int64.

    This is the number of tokens at which an anchor is allowed. With `max_per_document`, each
    document counts with at most that many.
    """
    candidates = find_anchor_candidates(loss, documents)
    if max_per_document is None:
        return candidates.sum(1)
    document_index = documents + 1  # padding, which is document -1, gets the index 0
    counts = torch.zeros_like(document_index).scatter_add(1, document_index, candidates.long())
    return counts.clamp(max=max_per_document).sum(1)


def draw_anchors(
    loss: torch.Tensor,
    documents: torch.Tensor,
    jitter: torch.Tensor,
    max_per_document: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw random anchors in packed sequences.

    loss: (B, T) bool, whether the token is to be learned. documents: (B, T) document number of each
    token, -1 for padding. jitter: (B, N) uniform random numbers in [0, 1). max_per_document:
    maximum number of anchors in a document, None for no limit.

    Returns the anchors' token positions (B, N) int64, sorted, and whether each slot has an anchor,
    (B, N) bool.

    The sampling is stratified. The tokens at which an anchor is allowed (the candidates) are
    divided into N equal strata, and slot j draws uniformly from stratum j. If the slot before it
    drew the same candidate, slot j takes the next free candidate. No candidate is therefore drawn
    twice, and the number of anchors in a document is proportional to its candidates. Slots beyond
    the number that `count_available_anchors` returns stay empty.
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

    # make each rank larger than the rank of the slot before
    ranks = (ranks - slots).cummax(1).values + slots
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
    """Return which candidate each slot draws if the number of anchors per document is limited.

    candidates: (B, T) bool, tokens at which an anchor is allowed. documents: (B, T) document
    numbers, -1 for padding. slot_offsets: (B, N) slot number plus jitter.

    Returns the rank of the drawn candidate among the candidates of its sequence, (B, N). Slots that
    stay empty get the number of candidates instead of a rank.
    """
    document_index = documents + 1  # padding, which is document -1, gets the index 0
    counts = torch.zeros_like(document_index).scatter_add(1, document_index, candidates.long())
    document_sizes = counts.gather(1, document_index)  # (B, T) candidates in a token's document

    # the expected number of anchors at a candidate: below 1 if its document has more candidates
    # than `max_per_document`
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
    """Return the blocks behind anchors in packed sequences.

    batch: the columns ids, documents and loss of packed sequences, (B, T) each. anchors, valid:
    (B, N), the result of `draw_anchors`. ends_at_gap: whether a block ends at its first label
    without loss.

    Labels beyond the end of the anchor's document or of the block are not supervised.
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

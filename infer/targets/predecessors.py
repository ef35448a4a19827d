"""The predecessor of each new position of a forward pass, which recurrent layers need
(`infer.targets.recurrent`). New positions form draft trees, chains or packed sequences.

A chain consists of consecutive tokens that follow a cached sequence. A packed sequence is one row
of training data that contains several documents. The committed state of a sequence is the state of
a recurrent layer after the sequence's cached tokens.

Dimension letters in this module: B batch rows, Q new positions, n new positions of one segment, M
tree nodes, T length of a packed sequence, W kernel size of a convolution.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch

# number of a chain's positions that the recurrence is solved for at once
RECURRENCE_SEGMENT_POSITIONS = 64
# Values of `Predecessors.previous` for a position that has no predecessor among the new positions.
CACHED_STATE_PREDECESSOR_INDEX = -1  # the position continues the committed state
NO_PREDECESSOR_INDEX = -2  # the position is the first token of a document


@dataclass(frozen=True)
class RecurrenceSegment:
    """New positions for which the recurrence is computed at once. Every predecessor comes before
    its successors."""

    positions: slice
    # (B, 1, n, n) bool: entry [t, j] is true if position j is position t or comes before t on t's
    # path
    ancestors: torch.Tensor
    # (B, 1, n, 1) bool: whether a position continues the state before the segment. None means that
    # all positions do.
    continues_state: torch.Tensor | None


@dataclass(frozen=True)
class Predecessors:
    """The predecessor of each of Q new positions in every batch row."""

    # (B, Q) int64: index of the predecessor among the new positions, CACHED_STATE_PREDECESSOR_INDEX
    # or NO_PREDECESSOR_INDEX
    previous: torch.Tensor
    # only for trees: (B, Q, Q) bool; parents come before children
    ancestors: torch.Tensor | None = None
    # only for packed sequences: (B, Q) int64, document numbers
    documents: torch.Tensor | None = None
    # only for chains: (B,) int64, number of positions without the padding on the right
    counts: torch.Tensor | None = None
    # by kernel size W
    _conv_input_indices: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def of_trees(cls, parents: torch.Tensor, ancestors: torch.Tensor) -> "Predecessors":
        """Return the predecessors in draft trees whose roots continue the committed states.

        parents: (B, M) int64, index of every node's parent
        ancestors: (B, M, M) bool, see `DraftTree.ancestors`
        """
        is_root = torch.zeros_like(parents)
        is_root[:, 0] = 1
        return cls(torch.where(is_root.bool(), CACHED_STATE_PREDECESSOR_INDEX, parents), ancestors)

    @classmethod
    def of_chains(cls, counts: list[int], width: int, device: torch.device) -> "Predecessors":
        """Return the predecessors in chains that continue the committed states. Batch row b has
        counts[b] tokens and is padded on the right to `width` positions."""
        previous = torch.arange(-1, width - 1, device=device)
        previous_rows = previous.expand(len(counts), -1)
        return cls(previous_rows, counts=torch.tensor(counts, device=device))

    @classmethod
    def of_packed_rows(cls, documents: torch.Tensor) -> "Predecessors":
        """Return the predecessors in packed sequences, where the first token of a document has no
        predecessor.

        documents: (B, T) int64, document numbers
        """
        previous = torch.arange(-1, documents.shape[1] - 1, device=documents.device)
        previous = previous.expand_as(documents)
        is_first = torch.ones_like(documents, dtype=torch.bool)
        is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
        return cls(torch.where(is_first, NO_PREDECESSOR_INDEX, previous), documents=documents)

    @cached_property
    def segments(self) -> list[RecurrenceSegment]:
        """Return the segments of the new positions in order. A draft tree is one segment."""
        if self.ancestors is not None:
            return [RecurrenceSegment(slice(None), self.ancestors[:, None], None)]
        rows, width = self.previous.shape
        device = self.previous.device
        segments = []
        for start in range(0, width, RECURRENCE_SEGMENT_POSITIONS):
            size = min(RECURRENCE_SEGMENT_POSITIONS, width - start)
            ancestors = torch.ones(size, size, dtype=torch.bool, device=device).tril()
            ancestors = ancestors.expand(rows, 1, -1, -1)
            continues_state = None
            if self.documents is not None:
                documents = self.documents[:, start : start + size]
                same_document = documents[:, None, :, None] == documents[:, None, None, :]
                ancestors = ancestors & same_document
                if start:
                    continues = self.documents[:, start - 1 : start] == documents
                else:
                    continues = torch.zeros_like(documents, dtype=torch.bool)
                continues_state = continues[:, None, :, None]
            segments.append(
                RecurrenceSegment(slice(start, start + size), ancestors, continues_state)
            )
        return segments

    @cached_property
    def valid_mask(self) -> torch.Tensor | None:
        """Return which positions are not padding, (B, Q) bool. None means that there is no
        padding."""
        if self.counts is None:
            return None
        positions = torch.arange(self.previous.shape[1], device=self.counts.device)
        return positions < self.counts[:, None]

    def conv_input_indices(self, kernel_size: int) -> list[torch.Tensor]:
        """Return the indices of the inputs that a causal convolution with W = `kernel_size` entries
        reads.

        The list has one tensor (B, 1, Q) for each entry of the kernel, last entry first: the index
        of the position itself, then of its predecessor, and so on. The indices refer to the
        concatenation [one zero | W - 1 inputs from the state | Q new inputs].
        """
        if kernel_size in self._conv_input_indices:
            return self._conv_input_indices[kernel_size]
        rows, width = self.previous.shape
        device = self.previous.device
        previous_new = torch.where(
            self.previous >= 0,
            self.previous + kernel_size,
            self.previous.eq(CACHED_STATE_PREDECESSOR_INDEX) * (kernel_size - 1),
        )
        previous_old = torch.arange(-1, kernel_size - 1, device=device).clamp(min=0)
        previous = torch.cat([previous_old.expand(rows, -1), previous_new], 1)  # (B, W + Q)
        current = torch.arange(kernel_size, kernel_size + width, device=device)
        indices = [current.expand(rows, -1)]
        for _ in range(kernel_size - 1):
            indices.append(previous.gather(1, indices[-1]))
        self._conv_input_indices[kernel_size] = [index[:, None] for index in indices]
        return self._conv_input_indices[kernel_size]

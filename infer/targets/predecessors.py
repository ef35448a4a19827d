"""The predecessor of each new position of a forward pass. A recurrent layer
(`infer.targets.recurrent`) computes the state of a position from the state of its predecessor.

The new positions are nodes of draft trees, chains or packed sequences. A chain consists of
consecutive tokens that follow a cached sequence. A packed sequence is one row of training data that
contains several documents. The committed state of a sequence is the state of a recurrent layer
after the sequence's cached tokens.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch

# Number of positions of a chain or packed sequence for which the recurrence is solved in one step.
RECURRENCE_SEGMENT_POSITIONS = 64
# Values of `Predecessors.previous` for positions without a predecessor among the new positions.
CACHED_STATE_PREDECESSOR_INDEX = -1  # the position continues the cached state
NO_PREDECESSOR_INDEX = -2  # the position begins a document


@dataclass(frozen=True)
class RecurrenceSegment:
    """Consecutive new positions for which the recurrence is solved in one step. Every predecessor
    comes before its successors."""

    positions: slice
    # (B, 1, length, length) bool: entry [b, 0, i, j] is true if position j is position i or
    # precedes it on its path.
    ancestors: torch.Tensor
    # (B, 1, length, 1) bool: whether a position continues the state before the segment. It does not
    # if its document begins within the segment. None means that all positions continue that state.
    continues_state: torch.Tensor | None


@dataclass(frozen=True)
class Predecessors:
    """The predecessor of each new position, in every batch row. The positions are either all nodes
    of draft trees, or chains, or packed sequences."""

    # (B, num_positions) int64: index of the predecessor among the new positions, or
    # CACHED_STATE_PREDECESSOR_INDEX or NO_PREDECESSOR_INDEX.
    previous: torch.Tensor
    # Only for trees: (B, num_positions, num_positions) bool, entry [b, i, j] is true if node j is
    # node i or an ancestor of node i. Parents come before children.
    ancestors: torch.Tensor | None = None
    # Only for packed sequences: (B, num_positions) int64, each position's document number.
    document_ids: torch.Tensor | None = None
    # Only for chains: (B,) int64, number of positions without padding.
    chain_lengths: torch.Tensor | None = None
    # Cached results of `conv_input_indices`. Keys are kernel sizes.
    _conv_input_indices: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def of_trees(cls, parents: torch.Tensor, ancestors: torch.Tensor) -> "Predecessors":
        """Return the predecessors of the nodes of draft trees. A root's predecessor is the
        committed state, which is the layer's state after the cached tokens.

        parents: (B, num_nodes) int64, index of every node's parent
        ancestors: (B, num_nodes, num_nodes) bool; entry [b, i, j] is true if node j is node i or an
            ancestor of node i
        """
        is_root = torch.zeros_like(parents)
        is_root[:, 0] = 1
        return cls(torch.where(is_root.bool(), CACHED_STATE_PREDECESSOR_INDEX, parents), ancestors)

    @classmethod
    def of_chains(cls, counts: list[int], width: int, device: torch.device) -> "Predecessors":
        """Return the predecessors in chains of consecutive tokens that follow the cached tokens.

        counts: number of tokens in the chain of each batch row
        width: number of positions to which chains are padded on the right
        """
        previous = torch.arange(-1, width - 1, device=device)
        previous_rows = previous.expand(len(counts), -1)
        return cls(previous_rows, chain_lengths=torch.tensor(counts, device=device))

    @classmethod
    def of_packed_sequences(cls, documents: torch.Tensor) -> "Predecessors":
        """Return the predecessors in packed sequences, where the first token of a document has no
        predecessor.

        documents: (B, length) int64, number of the document that each token belongs to
        """
        previous = torch.arange(-1, documents.shape[1] - 1, device=documents.device)
        previous = previous.expand_as(documents)
        is_first = torch.ones_like(documents, dtype=torch.bool)
        is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
        return cls(torch.where(is_first, NO_PREDECESSOR_INDEX, previous), document_ids=documents)

    @cached_property
    def segments(self) -> list[RecurrenceSegment]:
        """Return the segments (consecutive positions) into which the new positions are divided, in
        order. The recurrence is solved for one segment after the other. A draft tree is one
        segment."""
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
            if self.document_ids is not None:
                documents = self.document_ids[:, start : start + size]
                same_document = documents[:, None, :, None] == documents[:, None, None, :]
                ancestors = ancestors & same_document
                if start:
                    continues = self.document_ids[:, start - 1 : start] == documents
                else:
                    continues = torch.zeros_like(documents, dtype=torch.bool)
                continues_state = continues[:, None, :, None]
            segments.append(
                RecurrenceSegment(slice(start, start + size), ancestors, continues_state)
            )
        return segments

    @cached_property
    def valid_mask(self) -> torch.Tensor | None:
        """Return which new positions are not padding, (B, num_positions) bool. None means that
        there is no padding."""
        if self.chain_lengths is None:
            return None
        positions = torch.arange(self.previous.shape[1], device=self.chain_lengths.device)
        return positions < self.chain_lengths[:, None]

    def conv_input_indices(self, kernel_size: int) -> list[torch.Tensor]:
        """Return the indices of the inputs that a causal convolution reads for each new position.

        The list has one tensor (B, 1, num_positions) for each weight of the kernel, last weight
        first: the index of the position itself, then of its predecessor, and so on. The indices are
        those of a concatenation of three parts: a zero, the kernel_size - 1 inputs in the
        convolution state, and the new inputs.
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
        # (B, kernel_size + num_positions)
        previous = torch.cat([previous_old.expand(rows, -1), previous_new], 1)
        current = torch.arange(kernel_size, kernel_size + width, device=device)
        indices = [current.expand(rows, -1)]
        for _ in range(kernel_size - 1):
            indices.append(previous.gather(1, indices[-1]))
        self._conv_input_indices[kernel_size] = [index[:, None] for index in indices]
        return self._conv_input_indices[kernel_size]

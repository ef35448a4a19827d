"""The state of the batch on the device: the KV caches, and the bonus token of every batch row in
use. `PrefillBatch` holds the batch rows whose prompts are still being prefilled.

A round's bonus token is the target's token after the last accepted node. It becomes the root of the
next round's draft tree.

In shapes, B is the number of batch rows.
"""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from infer.drafters.base import Drafter
from infer.engine.prefix_cache import PREFIX_CACHE_BLOCK_TOKENS, BlockTensors
from infer.engine.sequence import Sequence
from infer.engine.verification import AcceptedPath
from infer.targets.target import Features, Target, pad_token_ids
from infer.trees.tree import DraftTree

# Positions of at most this many rounds may be missing in the drafter's cache, if each of these
# rounds committed only the root. One call of the drafter then adds all of them to its cache.
MAX_ROUNDS_MISSING_IN_DRAFTER_CACHE = 32


@dataclass
class PendingDrafterPositions:
    """Positions of committed tokens that are not in the drafter's cache yet."""

    # (B, num_positions, feature_size): the target's hidden states that the drafter is conditioned
    # on
    context: torch.Tensor
    tokens: torch.Tensor  # (B, num_positions): the token at each position
    # (B,): number of positions of each batch row; the remaining positions of a row are padding
    lengths_on_device: torch.Tensor
    # `lengths_on_device` as a list on the host; None if the host does not know the numbers yet
    lengths: list[int] | None = None


class BatchState:
    """The KV caches of target and drafter, and the bonus token of every batch row.

    The batch rows in use are always the first rows of the caches. A row has space for a sequence of
    `capacity` tokens, and for a draft tree of `max_nodes` nodes after the sequence. `drafter` is
    None in baseline decoding. If `keeps_prefixes` is true, the drafter's cache keeps all positions
    of a sequence, so that they can be copied to the prefix cache.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        rows: int,
        capacity: int,
        max_nodes: int,
        keeps_prefixes: bool,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.feature_layers = () if drafter is None else drafter.layer_ids
        self.cache = target.allocate_cache(rows, capacity + max_nodes + 1)
        # The drafter's cache needs space for `max_nodes` positions more than `capacity`: a round
        # writes the same number of positions to every batch row, some of them padding.
        self.draft_state = (
            None
            if drafter is None
            else drafter.allocate_state(rows, capacity + max_nodes, keeps_prefixes)
        )
        self._bonus_buffer = torch.zeros(rows, dtype=torch.long, device=target.device)
        self.pending: list[PendingDrafterPositions] = []

    @property
    def bonus_tokens(self) -> torch.Tensor:
        """The bonus tokens (B,) of the batch rows in use, as a view of the buffer for all rows."""
        return self._bonus_buffer[: self.cache.padded_batch_size or len(self.cache.lengths)]

    @contextmanager
    def fix_batch_size(self, rows: int) -> Generator[None]:
        """Pad every decoding round inside this context to exactly `rows` batch rows, so that tensor
        shapes do not depend on how many rows are in use."""
        with ExitStack() as stack:
            stack.enter_context(self.cache.fix_batch_size(rows))
            if self.draft_state is not None:
                stack.enter_context(self.draft_state.cache.fix_batch_size(rows))
            yield

    def set_bonus_tokens(self, rows: range, bonus: torch.Tensor) -> None:
        """Set the bonus tokens of the batch rows in the range `rows`. `bonus` has one token per
        row."""
        self._bonus_buffer[rows.start : rows.stop] = bonus

    def commit(self, tree: DraftTree, features: Features, accepted: AcceptedPath) -> None:
        """Keep the accepted nodes of a round in the target's cache, queue their features for the
        drafter's cache, and store the new bonus tokens. `features` are the target's hidden states
        at all nodes.

        This method runs on the device, without a GPU-to-CPU synchronisation. The caller must call
        `record_committed_counts` next.
        """
        path = accepted.path
        self.cache.commit(path, accepted.lengths)
        if self.draft_state is not None:
            path_index = path[..., None].expand(-1, -1, features.layer_features.shape[-1])
            context = features.layer_features.gather(
                1, path_index
            )  # (B, path_length, feature_size)
            path_tokens = tree.tokens.gather(1, path)
            self._queue_for_drafter(PendingDrafterPositions(context, path_tokens, accepted.lengths))
        # Set the bonus tokens last, because the root tokens of the tree may be views of this
        # buffer.
        self._bonus_buffer[: len(accepted.bonus)] = accepted.bonus

    def record_committed_counts(self, counts: list[int]) -> None:
        """Record on the host how many positions the last round committed in each batch row."""
        self.cache.update_host_lengths(counts)
        if self.pending:
            self.pending[-1].lengths = counts
        elif self.draft_state is not None:
            self.draft_state.cache.update_host_lengths(counts)

    def _queue_for_drafter(self, positions: PendingDrafterPositions) -> None:
        """Queue the positions that a round committed. They are added to the drafter's cache later.

        The queue can hold several rounds if each of them committed only the root of each tree, but
        at most MAX_ROUNDS_MISSING_IN_DRAFTER_CACHE rounds. Otherwise the queue is flushed before
        the new positions are put into it. Inside `fix_batch_size` the new positions are flushed at
        once, because the next round may be padded to another number of rows.
        """
        has_drafted = (
            bool(self.pending) and positions.tokens.shape[1] + self.pending[0].tokens.shape[1] > 2
        )
        if has_drafted or len(self.pending) == MAX_ROUNDS_MISSING_IN_DRAFTER_CACHE:
            self.flush_to_drafter()
        self.pending.append(positions)
        if self.cache.padded_batch_size:
            self.flush_to_drafter()

    def flush_to_drafter(self) -> None:
        """Add all queued positions to the drafter's cache, and empty the queue. The positions of
        several rounds are added in one call of the drafter."""
        pending = self.pending
        self.pending = []
        if len(pending) > 1:
            pending = [concatenate_roots(pending)]
        for positions in pending:
            assert self.drafter is not None and self.draft_state is not None
            self.drafter.update_context(
                self.target,
                positions.context,
                positions.tokens,
                positions.lengths,
                self.draft_state,
                positions.lengths_on_device,
            )

    def keep_and_reorder_rows(self, order: list[int]) -> None:
        """Move batch row order[i] to row i for each i, and release all rows that are not in
        `order`."""
        self.flush_to_drafter()
        self.cache.keep_rows(order)
        if self.draft_state is not None:
            self.draft_state.keep(order)
        rows = torch.tensor(order, dtype=torch.long, device=self._bonus_buffer.device)
        self._bonus_buffer[: len(order)] = self._bonus_buffer[rows]

    def copy_block(self, row: int, start: int) -> tuple[BlockTensors, BlockTensors]:
        """Return copies of the keys and values at PREFIX_CACHE_BLOCK_TOKENS positions of batch row
        `row`, from position `start` on.

        The first list is from the target's cache, the second from the drafter's cache. The second
        is empty if there is no drafter.
        """
        target_block = self.cache.copy_keys_values(row, start, PREFIX_CACHE_BLOCK_TOKENS)
        if self.draft_state is None:
            return target_block, []
        return target_block, self.draft_state.read_cached_states(
            row, start, PREFIX_CACHE_BLOCK_TOKENS
        )


def concatenate_roots(pending: list[PendingDrafterPositions]) -> PendingDrafterPositions:
    """Join the pending positions of several rounds, in the order of the rounds, into one
    `PendingDrafterPositions`. Each round must have committed exactly one position per batch row:
    the root of the row's tree."""
    context = torch.cat([positions.context for positions in pending], 1)
    tokens = torch.cat([positions.tokens for positions in pending], 1)
    count = len(pending)
    lengths_on_device = torch.full_like(tokens[:, 0], count)
    return PendingDrafterPositions(context, tokens, lengths_on_device, [count] * len(tokens))


class PrefillBatch:
    """Sequences whose prompts are being prefilled. Their batch rows do not take part in decoding
    rounds until `finish` is called."""

    def __init__(self, state: BatchState, sequences: list[Sequence]) -> None:
        self.batch_state = state
        self.sequences = sequences
        # These contexts keep the batch rows out of decoding rounds until they are closed.
        self.row_contexts = ExitStack()
        self.cache = self.row_contexts.enter_context(state.cache.add_rows(len(sequences)))
        self.draft_state = None
        if state.draft_state is not None:
            self.draft_state = self.row_contexts.enter_context(
                state.draft_state.add(len(sequences))
            )
        # For each sequence: the target's final hidden state (hidden_size,) at the prompt's last
        # token. None if it has not been computed yet.
        self.last_hidden: list[torch.Tensor | None] = [None] * len(sequences)
        for row, sequence in enumerate(sequences):
            self._restore_prefix(row, sequence)

    def _restore_prefix(self, row: int, sequence: Sequence) -> None:
        """Copy a sequence's blocks from the prefix cache into the sequence's batch row of the KV
        caches."""
        blocks = sequence.prefix_blocks
        sequence.prefix_blocks = []
        if not blocks:
            return
        self.cache.restore_keys_values(row, [block.target_tensors for block in blocks])
        if self.draft_state is not None:
            prefix = sequence.token_ids[: sequence.cached_length]
            self.draft_state.restore_row(row, prefix, [block.drafter_tensors for block in blocks])

    def run_chunk(self, start: int, length: int) -> int:
        """Run the next `length` positions of each prompt through target and drafter, and return the
        number of computed positions, padding included.

        `start` is the number of positions of each prompt that earlier chunks have computed.
        Positions from the prefix cache are not counted in `start`.
        """
        state = self.batch_state
        first_positions = [sequence.cached_length + start for sequence in self.sequences]
        chunks = [
            sequence.token_ids[first : first + length]
            for sequence, first in zip(self.sequences, first_positions, strict=True)
        ]
        features = state.target.extend_cache(chunks, self.cache, state.feature_layers)
        if self.draft_state is not None:
            assert state.drafter is not None
            tokens = pad_token_ids(chunks, features.layer_features.device)
            chunk_lengths = [len(chunk) for chunk in chunks]
            state.drafter.update_context(
                state.target, features.layer_features, tokens, chunk_lengths, self.draft_state
            )

        for row, (sequence, chunk) in enumerate(zip(self.sequences, chunks, strict=True)):
            is_complete = first_positions[row] + len(chunk) == len(sequence.token_ids)
            if chunk and is_complete:
                self.last_hidden[row] = features.last_hidden_states[row, len(chunk) - 1]
        return len(chunks) * max(len(chunk) for chunk in chunks)

    def finish(self) -> torch.Tensor:
        """Make the batch rows of these sequences take part in all later decoding rounds. Return the
        final hidden states (B, 1, hidden_size) of the last token of each prompt."""
        self.batch_state.flush_to_drafter()
        self.row_contexts.close()
        last_hidden = [hidden for hidden in self.last_hidden if hidden is not None]
        assert len(last_hidden) == len(self.sequences)
        return torch.stack(last_hidden)[:, None]

"""The scheduler: which sequences wait, which are prefilled in this step and how far, and how large
the trees of the running ones may be."""

import itertools
import math
from collections import deque
from typing import TYPE_CHECKING

from infer.engine.sequence import Sequence

if TYPE_CHECKING:
    from infer.engine.runner import Runner

# Prompt positions per row and forward pass. It bounds the attention mask of a long prompt.
MAX_PREFILL_CHUNK_TOKENS = 1024
# Positions that a step may prefill where a prefill takes as long as several captured rounds, for
# each of these rounds.
MIN_PREFILL_POSITIONS_PER_GRAPH_ROUND = 256
# Sequences are admitted after so many times the rounds of a prefill, even if few rows are idle.
MAX_ADMISSION_DELAY_IN_PREFILLS = 8


class Scheduler:
    """The queue of an engine, and the work of each step.

    A step has at most `positions` positions of the target, shared between the trees of running
    sequences and chunks of prompts. Large batches therefore get small trees, which is also fastest
    on a compute-bound target. A position after a long context counts more, see `_position_cost`.
    None: no limit.

    The runner's `budget` chooses the number of tree nodes. Its `find_cached_prefix` sets the
    `cached_length` of a sequence. It returns a key of the first block that is not cached, or None;
    sequences with the same key are not prefilled together, since the second can use the block.
    """

    def __init__(self, runner: "Runner") -> None:
        self.runner = runner
        self.budget = runner.budget
        self.rows = runner.options.max_num_seqs
        self.positions = runner.options.max_num_batched_tokens
        self.max_running = self.rows  # fewer after a step that raised an exception
        self.waiting: deque[Sequence] = deque()
        self._arrivals = itertools.count()
        self.reset()

    def reset(self) -> None:
        """Drop all sequences except the waiting ones."""
        self.running: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.prefilled_positions = 0  # of each prompt in `prefilling`, without cached positions
        self.idle_row_rounds = 0  # rows that waiting sequences could have used, summed over rounds
        # Cost of the prefill in this step, in positions without context: still possible, and done.
        self.prefill_allowance = 0.0
        self.prefill_cost = 0.0

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to the queue."""
        sequence.arrival_index = next(self._arrivals)
        self.waiting.append(sequence)

    def begin_step(self) -> list[Sequence]:
        """Mark cancelled sequences as finished, and set how much may be prefilled in this step. The
        prefill is unlimited while no sequence is running. Return all sequences."""
        sequences = [*self.running, *self.prefilling, *self.waiting]
        for sequence in sequences:
            if sequence.cancelled:
                sequence.finish_reason = "cancelled"
        self.waiting = deque(
            sequence for sequence in self.waiting if sequence.finish_reason is None
        )

        self.prefill_allowance = math.inf
        self.prefill_cost = 0.0
        running = [sequence for sequence in self.running if sequence.finish_reason is None]
        if running and self.positions is not None:
            tree_positions = min(self.max_tree_positions(running, 1), self.budget.last_nodes + 1)
            tree_cost = (
                len(running) * tree_positions * self._position_cost(max_context_length(running))
            )
            self.prefill_allowance = max(
                min(self.positions - tree_cost, self.positions * 2 / 3),
                tree_cost / 2,
                # Prefills are launched kernel by kernel where rounds are replayed as CUDA graphs;
                # so many positions take about as long there as one.
                MIN_PREFILL_POSITIONS_PER_GRAPH_ROUND * self.runner.rounds_per_prefill,
            )
        return sequences

    @property
    def num_admissible(self) -> int:
        """Number of waiting sequences for which there is a free row."""
        free_rows = self.max_running - len(self.running)
        return max(0, min(free_rows, len(self.waiting)))

    @property
    def can_admit(self) -> bool:
        """Whether waiting sequences may be admitted.

        Where a prefill takes as long as several rounds (`Runner.rounds_per_prefill`), admission
        waits until idle rows have cost as much as one prefill, or for eight times these rounds.
        """
        delay = min(len(self.running), MAX_ADMISSION_DELAY_IN_PREFILLS * self.num_admissible)
        is_due = self.idle_row_rounds >= self.runner.rounds_per_prefill * delay
        return self.num_admissible > 0 and is_due

    def choose_chunk_length(self) -> int:
        """Return how many positions of each prompt in `prefilling` are computed next, 0 for none.
        Waiting sequences are admitted first if possible."""
        if self.prefill_allowance <= 0 or not (self.prefilling or self.can_admit):
            return 0
        if not self.prefilling:
            count = self._count_admitted()
            self.prefilling = [self.waiting.popleft() for _ in range(count)]
            self.prefilled_positions = 0

        allowance = self.prefill_allowance / len(self.prefilling)
        length = min(MAX_PREFILL_CHUNK_TOKENS, allowance)
        if allowance < math.inf:
            length /= self._position_cost(self._prefilled_context + int(length))
        return max(1, int(length))

    def record_chunk(self, length: int, computed_positions: int) -> bool:
        """Record a prefilled chunk of `length` positions per prompt, for which
        `computed_positions` were computed, padding included. Return whether all prompts are
        complete."""
        self.prefilled_positions += length
        cost = computed_positions * self._position_cost(self._prefilled_context)
        self.prefill_allowance -= cost
        self.prefill_cost += cost
        longest = max(
            len(sequence.token_ids) - sequence.cached_length for sequence in self.prefilling
        )
        return self.prefilled_positions >= longest

    def max_tree_positions(self, running: list[Sequence], prefill_cost: float) -> int:
        """Return the maximum number of positions of a row's tree, its root included, in a round
        before which prompts of this cost are prefilled.

        The prefill is rounded up to whole thirds of the limit and leaves at least one third; rows
        are rounded up to a power of two. So there are few tree sizes, and few CUDA graphs.
        """
        full_tree = self.budget.max_nodes + 1
        if self.positions is None:
            return full_tree
        position_cost = self._position_cost(max_context_length(running))
        limit = max(self.positions, full_tree * position_cost)
        free_thirds = max(1, 3 - math.ceil(3 * prefill_cost / limit))
        all_rows = int(limit * free_thirds / 3 / position_cost)
        per_row = all_rows >> (len(running) - 1).bit_length()
        return min(full_tree, max(2, per_row))

    def release_finished(self) -> list[int]:
        """Remove finished sequences. Return which row moves into each of the rows that are left:
        the last rows fill the holes."""
        sequences = self.running
        num_finished = sum(
            sequence.finish_reason is not None for sequence in (*sequences, *self.prefilling)
        )
        self.max_running = min(self.rows, self.max_running + num_finished)

        order = [row for row, sequence in enumerate(sequences) if sequence.finish_reason is None]
        num_left = len(order)
        for row in range(num_left):
            if sequences[row].finish_reason is not None:
                order.insert(row, order.pop())
        self.running = [sequences[row] for row in order]

        # The prompts of a batch are prefilled together or not at all.
        if any(sequence.finish_reason is not None for sequence in self.prefilling):
            unfinished = [
                sequence for sequence in self.prefilling if sequence.finish_reason is None
            ]
            self.waiting.extendleft(reversed(unfinished))
            self.prefilling = []
        return order

    def preempt_all(self) -> list[Sequence]:
        """Remove and return all unfinished sequences that have a row. They can be added to the
        queue again."""
        sequences = [
            sequence
            for sequence in (*self.running, *self.prefilling)
            if sequence.finish_reason is None
        ]
        self.running = []
        self.prefilling = []
        for sequence in sequences:
            # An interrupted round may have appended log-probabilities of uncommitted tokens.
            del sequence.logprobs[len(sequence.ids) :]
        return sequences

    def recover_from_error(self) -> Sequence | None:
        """Return the sequences of a step that raised an exception to the queue.

        They continue from their tokens, but only half as many run at the same time. Each sequence
        that finishes raises this number by one. Expensive and new sequences, which are the likely
        cause, are admitted first. If only one sequence was running, it is returned instead of
        queued, and all rows may be used again. The caller has to call the engine's `reset` next.
        """
        sequences = self.preempt_all()
        sequences.sort(
            key=lambda sequence: (
                sequence.options.temperature > 0 or sequence.options.logprobs is not None,
                sequence.arrival_index,
            )
        )
        if len(sequences) < 2:
            self.max_running = self.rows
            return sequences[0] if sequences else None
        self.waiting.extendleft(sequences)
        self.max_running = max(1, min(self.max_running, len(sequences)) // 2)
        return None

    def _position_cost(self, context: int) -> float:
        """Return the cost of a position after `context` positions, in positions without context.
        It is a multiple of one half, so that there are few tree sizes."""
        return 1 + round(2 * context / self.runner.target.attention_break_even_length) / 2

    @property
    def _prefilled_context(self) -> int:
        """Number of positions of the longest prompt in `prefilling` that are in the cache."""
        return self.prefilled_positions + max(
            sequence.cached_length for sequence in self.prefilling
        )

    def _count_admitted(self) -> int:
        """Return how many waiting sequences are prefilled together: as many as have a free row and
        fit into the allowance, padded to one length.

        A longer prompt is prefilled alone, over several rounds. A prompt that shares an uncached
        block with another one is prefilled after it.
        """
        longest = 0
        uncached_keys = set()
        for count in range(self.num_admissible):
            sequence = self.waiting[count]
            uncached_key = self.runner.find_cached_prefix(sequence)
            longest = max(longest, len(sequence.token_ids) - sequence.cached_length)
            is_too_large = (count + 1) * longest > self.prefill_allowance
            if count and (is_too_large or uncached_key in uncached_keys):
                return count
            if uncached_key is not None:
                uncached_keys.add(uncached_key)
        return self.num_admissible


def max_context_length(sequences: list[Sequence]) -> int:
    """Return the length of the longest sequence. Attention over it is computed for every row."""
    return max(len(sequence.prompt) + len(sequence.ids) for sequence in sequences)

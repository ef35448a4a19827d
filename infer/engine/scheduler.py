"""The scheduler decides which sequences wait, which are prefilled in this step and how far, and how
large the trees of the running sequences may be."""

import itertools
import math
from collections import deque
from typing import TYPE_CHECKING

from infer.engine.sequence import Sequence

if TYPE_CHECKING:
    from infer.engine.runner import Runner

# Maximum number of prompt positions per batch row in one forward pass. It limits the size of the
# attention mask of a long prompt.
MAX_PREFILL_CHUNK_TOKENS = 1024
# If rounds run as CUDA graphs, a step may prefill at least this many positions times
# `Runner.rounds_per_prefill`, the number of rounds that take as long as one prefill.
MIN_PREFILL_ALLOWANCE_PER_PREFILL_ROUND = 256
# Waiting sequences are admitted at the latest after the time that this many prefills take.
MAX_ADMISSION_DELAY_IN_PREFILLS = 8


class Scheduler:
    """Holds the queue of an engine, and decides what each step computes.

    In a step the target computes at most `max_batched_positions` positions (option
    max_num_batched_tokens; None means no limit). They are shared between the trees of running
    sequences and chunks of prompts, so large batches get small trees. A position after a long
    context counts as more than one, see `_position_cost`.

    Two waiting sequences may begin with the same block of tokens that is not in the prefix cache
    yet. They are not prefilled together: the second sequence waits, and then uses the block that
    the first has computed.
    """

    def __init__(self, runner: "Runner") -> None:
        self.runner = runner
        self.budget = runner.budget
        self.rows = runner.options.max_num_seqs
        self.max_batched_positions = runner.options.max_num_batched_tokens
        # maximum number of running sequences; lowered after an exception
        self.max_running = self.rows
        self.waiting: deque[Sequence] = deque()
        self._arrivals = itertools.count()
        self.drop_admitted_sequences()

    def drop_admitted_sequences(self) -> None:
        """Remove all sequences except the waiting ones."""
        self.running: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        # number of prefilled positions of each prompt in `prefilling`, without cached prefixes
        self.prefilled_positions = 0
        # Number of idle batch rows that waiting sequences could have used, summed over rounds.
        self.idle_row_rounds = 0
        # How much this step may still prefill, and how much it has prefilled. Both are costs, in
        # units of one position without context.
        self.prefill_allowance = 0.0
        self.prefill_cost = 0.0

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to the end of the queue."""
        sequence.arrival_index = next(self._arrivals)
        self.waiting.append(sequence)

    def begin_step_and_list_sequences(self) -> list[Sequence]:
        """Begin a step: mark cancelled sequences as finished, and set how many positions this step
        may prefill (any number if no sequence is running). Return all sequences that were running,
        prefilling or waiting."""
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
        if running and self.max_batched_positions is not None:
            tree_positions = min(self.max_tree_nodes(running, 1), self.budget.last_nodes + 1)
            tree_cost = (
                len(running)
                * tree_positions
                * self._position_cost(longest_sequence_length(running))
            )
            self.prefill_allowance = max(
                min(self.max_batched_positions - tree_cost, self.max_batched_positions * 2 / 3),
                tree_cost / 2,
                # A prefill always launches its kernels one by one, so on CUDA a small prefill takes
                # as long as one with this many positions.
                MIN_PREFILL_ALLOWANCE_PER_PREFILL_ROUND * self.runner.rounds_per_prefill,
            )
        return sequences

    @property
    def num_admissible(self) -> int:
        """The number of waiting sequences for which there is a free batch row."""
        free_rows = self.max_running - len(self.running)
        return max(0, min(free_rows, len(self.waiting)))

    @property
    def is_admission_due(self) -> bool:
        """Whether waiting sequences may be admitted now.

        During a prefill, which may take as long as several rounds (`Runner.rounds_per_prefill`), no
        sequence decodes. Admission therefore waits until the time lost by free batch rows, summed
        over these rows, equals the time that running sequences would lose during the prefill,
        summed over these sequences. The wait is at most the duration of
        MAX_ADMISSION_DELAY_IN_PREFILLS prefills.
        """
        delay = min(len(self.running), MAX_ADMISSION_DELAY_IN_PREFILLS * self.num_admissible)
        is_due = self.idle_row_rounds >= self.runner.rounds_per_prefill * delay
        return self.num_admissible > 0 and is_due

    def admit_and_choose_chunk_length(self) -> int:
        """Return how many positions of each prompt in `prefilling` are computed next; 0 means that
        this step prefills nothing more. If `prefilling` is empty, waiting sequences are admitted
        first."""
        if self.prefill_allowance <= 0 or not (self.prefilling or self.is_admission_due):
            return 0
        if not self.prefilling:
            count = self._count_sequences_to_admit()
            self.prefilling = [self.waiting.popleft() for _ in range(count)]
            self.prefilled_positions = 0

        allowance = self.prefill_allowance / len(self.prefilling)
        length = min(MAX_PREFILL_CHUNK_TOKENS, allowance)
        if allowance < math.inf:
            length /= self._position_cost(self._prefilling_context_length + int(length))
        return max(1, int(length))

    def record_chunk(self, length: int, computed_positions: int) -> bool:
        """Record that `length` more positions of each prompt in `prefilling` were prefilled. Return
        whether all these prompts are complete.

        `computed_positions` is the number of positions that the target computed in total, padding
        included.
        """
        self.prefilled_positions += length
        cost = computed_positions * self._position_cost(self._prefilling_context_length)
        self.prefill_allowance -= cost
        self.prefill_cost += cost
        longest = max(
            len(sequence.token_ids) - sequence.cached_length for sequence in self.prefilling
        )
        return self.prefilled_positions >= longest

    def max_tree_nodes(self, running: list[Sequence], prefill_cost: float) -> int:
        """Return the maximum number of nodes per tree, root included, in this step's round.

        `prefill_cost` is the cost of this step's prefill, in units of one position without context.
        The trees of all batch rows share the positions that the prefill leaves of
        `max_batched_positions`, but at least a third of `max_batched_positions`. To get few tree
        sizes, and so few CUDA graphs, the cost of the prefill is rounded up to thirds of
        `max_batched_positions`, and the number of batch rows to a power of two.
        """
        full_tree = self.budget.max_nodes + 1
        if self.max_batched_positions is None:
            return full_tree
        position_cost = self._position_cost(longest_sequence_length(running))
        limit = max(self.max_batched_positions, full_tree * position_cost)
        free_thirds = max(1, 3 - math.ceil(3 * prefill_cost / limit))
        all_rows = int(limit * free_thirds / 3 / position_cost)
        per_row = all_rows >> (len(running) - 1).bit_length()
        return min(full_tree, max(2, per_row))

    def release_finished(self) -> list[int]:
        """Remove finished sequences, and return the new order of the batch rows: row order[i] moves
        to row i. The last rows move into the rows that became free."""
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

        # Prompts are prefilled together, in one cache. If one of them is cancelled, restart the
        # others.
        if any(sequence.finish_reason is not None for sequence in self.prefilling):
            unfinished = [
                sequence for sequence in self.prefilling if sequence.finish_reason is None
            ]
            self.waiting.extendleft(reversed(unfinished))
            self.prefilling = []
        return order

    def pop_unfinished_sequences(self) -> list[Sequence]:
        """Remove and return all unfinished sequences that have a batch row. The caller may add them
        to the queue again."""
        sequences = [
            sequence
            for sequence in (*self.running, *self.prefilling)
            if sequence.finish_reason is None
        ]
        self.running = []
        self.prefilling = []
        for sequence in sequences:
            # The interrupted round may have appended log-probabilities for tokens that it did not
            # commit.
            del sequence.logprobs[len(sequence.ids) :]
        return sequences

    def recover_from_error(self) -> Sequence | None:
        """Put all running and prefilling sequences back into the queue after a step that raised an
        exception. The caller must call the engine's `reset` next.

        The sequences later continue from the tokens that they have. From now on, only half as many
        sequences run at the same time as before the exception. Each sequence that finishes raises
        this limit by one. Expensive and new sequences are admitted first, because they are the
        likely cause of the exception.

        If only one sequence was running or prefilling, it is returned and not put into the queue,
        and the limit is lifted. Otherwise None is returned.
        """
        sequences = self.pop_unfinished_sequences()
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

    def _position_cost(self, context_length: int) -> float:
        """Return the cost of computing one position after `context_length` positions, in units of
        one position without context. The result is rounded to a multiple of 0.5, so that there are
        few tree sizes."""
        relative_length = context_length / self.runner.target.context_length_matching_weight_cost
        return 1 + round(2 * relative_length) / 2

    @property
    def _prefilling_context_length(self) -> int:
        """The largest number of prompt positions that a sequence in `prefilling` already has in the
        KV cache."""
        return self.prefilled_positions + max(
            sequence.cached_length for sequence in self.prefilling
        )

    def _count_sequences_to_admit(self) -> int:
        """Return how many sequences at the front of the queue are prefilled together.

        Each needs a free batch row. All their prompts, padded to the longest, must fit into
        `prefill_allowance`; a longer prompt is prefilled alone, over several steps. Two prompts
        that begin with the same uncached block are prefilled one after the other.
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


def longest_sequence_length(sequences: list[Sequence]) -> int:
    """Return the length of the longest sequence. Attention computes this many positions for every
    batch row, because shorter rows are padded."""
    return max(len(sequence.prompt) + len(sequence.ids) for sequence in sequences)

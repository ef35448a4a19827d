"""Who is written when: texts wait, enter while their prompts are computed, are written, and leave
their rows."""

import itertools
import math
from collections import deque
from typing import TYPE_CHECKING

from infer.engine.sequence import Sequence

if TYPE_CHECKING:
    from infer.engine.runner import Runner

# prompt positions of a row per forward pass at most, so that a long prompt's mask stays small
PREFILL_CHUNK = 1024


class Scheduler:
    """The queue of an engine, and what it computes in a step.

    Texts in work never wait for more than `positions` positions of the target, which a round's
    trees share with a piece of the prompts that enter: many rows get small trees each, which is
    also where a target that is short of arithmetic writes most. A position behind a long context
    counts more, see `_weight`. None: no limit.

    The runner's `budget` says how many nodes trees have. Its `find_prefix` notes in `text.reused`
    how many positions of a text need not be computed; it returns what the text is the first to
    compute for others too, None for nothing.
    """

    def __init__(self, runner: "Runner") -> None:
        self.runner, self.budget = runner, runner.budget
        self.rows = runner.options.max_num_seqs
        self.positions = runner.options.max_num_batched_tokens
        self.most = self.rows  # texts side by side: fewer after a step that raised
        self.waiting: deque[Sequence] = deque()
        self._numbers = itertools.count()
        self.reset()

    def reset(self) -> None:
        """Give up all texts in work; those that wait go on waiting."""
        self.entering: list[Sequence] = []  # their prompts are being computed
        self.done = 0  # positions that were computed of each of these prompts
        self.writing: list[Sequence] = []
        self.idle = 0  # rows that waiting texts could have had, summed over rounds
        # cost of what may still be computed of prompts in this step, and of what was, in positions
        # without a context
        self.room = self.computed = 0.0

    def add(self, text: Sequence) -> None:
        """Let a text wait."""
        text.number = next(self._numbers)
        self.waiting.append(text)

    def begin_step(self) -> list[Sequence]:
        """Take note of texts that were given up, and of the room for prompts; return all texts.
        While none is written all that wait may enter, else a piece of them."""
        texts = [*self.writing, *self.entering, *self.waiting]
        for text in texts:
            if text.cancelled:
                text.finish = "cancelled"
        self.waiting = deque(text for text in self.waiting if text.finish is None)
        self.room = math.inf
        self.computed = 0.0
        writing = [text for text in self.writing if text.finish is None]
        if writing and self.positions is not None:
            likely = min(self.tree_positions(writing, 1), self.budget.last + 1)
            trees = len(writing) * likely * self._weight(_context(writing))
            # where prompts are launched, so many positions take about as long as one
            self.room = max(
                min(self.positions - trees, self.positions * 2 / 3),
                trees / 2,
                256 * self.runner.patience,
            )
        return texts

    @property
    def free(self) -> int:
        """How many of the waiting texts have a row."""
        return max(0, min(self.most - len(self.writing), len(self.waiting)))

    @property
    def admits(self) -> bool:
        """Whether waiting texts may enter. Where a pass over prompts takes as long as some rounds
        (`Runner.patience`), they wait for others to enter with until idle rows have lost what the
        pass takes of all, or for eight times as many rounds."""
        return self.free > 0 and self.idle >= self.runner.patience * min(
            len(self.writing), 8 * self.free
        )

    def next_piece(self) -> int:
        """Return how many positions of each prompt of `entering` are computed next in this step, 0
        for none. Waiting texts enter when there is room."""
        if self.room <= 0 or not (self.entering or self.admits):
            return 0
        if not self.entering:
            self.entering = [self.waiting.popleft() for _ in range(self._fitting())]
            self.done = 0
        room = self.room / len(self.entering)
        width = min(PREFILL_CHUNK, room)
        if room < math.inf:
            width /= self._weight(self._reached + int(width))
        return max(1, int(width))

    def note_piece(self, width: int, computed: int) -> bool:
        """Take note of a piece for which so many positions were computed, padding included; return
        whether the prompts are complete."""
        self.done += width
        cost = computed * self._weight(self._reached)
        self.room = self.room - cost
        self.computed = self.computed + cost
        return self.done >= max(len(text.known) - text.reused for text in self.entering)

    def tree_positions(self, writing: list[Sequence], prompts: float) -> int:
        """Return how many positions a row's tree may take, its root included, in a round before
        which prompts of this cost are computed. Prompts count as whole thirds of the limit and
        leave one, rows as a power of two: rounds have few sizes."""
        full = self.budget.most + 1
        if self.positions is None:
            return full
        weight = self._weight(_context(writing))
        limit = max(self.positions, full * weight)
        thirds = max(1, 3 - math.ceil(3 * prompts / limit))
        return min(
            full, max(2, int(limit * thirds / 3 / weight) >> (len(writing) - 1).bit_length())
        )

    def release(self) -> list[int]:
        """Take finished texts out; return which row moves into every row that is left, the last
        ones into holes."""
        texts = self.writing
        finished = sum(text.finish is not None for text in (*texts, *self.entering))
        self.most = min(self.rows, self.most + finished)
        alive = [row for row, text in enumerate(texts) if text.finish is None]
        order = alive[:]
        for hole in [
            row for row, text in enumerate(texts) if text.finish is not None and row < len(alive)
        ]:
            order.insert(hole, order.pop())
        self.writing = [texts[row] for row in order]
        if any(
            text.finish is not None for text in self.entering
        ):  # rows enter together, or not at all
            self.waiting.extendleft(text for text in reversed(self.entering) if text.finish is None)
            self.entering = []
        return order

    def stop(self) -> list[Sequence]:
        """Take all texts out of work, and return them as they are to wait again."""
        texts = [text for text in (*self.writing, *self.entering) if text.finish is None]
        self.writing = []
        self.entering = []
        for text in texts:
            del text.logprobs[len(text.ids) :]  # of tokens that were not committed any more
        return texts

    def retry(self) -> Sequence | None:
        """After a step that raised: let its texts wait again, to go on from the tokens that they
        have, and half as many be written side by side; each text that ends lets one more in. The
        dear and new ones go first, which are the likely cause. A text that failed alone is returned
        instead, and all rows may be used again. The engine's `reset` comes next."""
        texts = self.stop()
        texts.sort(
            key=lambda text: (
                text.options.temperature > 0 or text.options.logprobs is not None,
                text.number,
            )
        )
        if len(texts) < 2:
            self.most = self.rows
            return texts[0] if texts else None
        self.waiting.extendleft(texts)
        self.most = max(1, min(self.most, len(texts)) // 2)
        return None

    def _weight(self, context: int) -> float:
        """Return what a position behind so much context costs, in positions without one. In halves,
        so that rounds have few sizes."""
        return 1 + round(2 * context / self.runner.target.context_reach) / 2

    @property
    def _reached(self) -> int:
        """Return the length of the longest prompt that enters, as far as it is there."""
        return self.done + max(text.reused for text in self.entering)

    def _fitting(self) -> int:
        """Return how many waiting texts enter together: as many as have free rows and prompts that
        fit into the room, padded to one length. A longer prompt enters alone, over several rounds;
        one that begins as another of them does enters after it."""
        longest = 0
        firsts = set()
        for count in range(self.free):
            text = self.waiting[count]
            first = self.runner.find_prefix(text)
            longest = max(longest, len(text.known) - text.reused)
            if count and ((count + 1) * longest > self.room or first in firsts):
                return count
            firsts |= {first} - {None}
        return self.free


def _context(texts: list[Sequence]) -> int:
    """Return the length of the longest text: its row's context is computed for every row."""
    return max(len(text.prompt) + len(text.ids) for text in texts)

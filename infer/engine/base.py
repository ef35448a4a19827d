"""What the engines share: texts wait, are admitted into rows, grow round by round, and give their rows back."""

import itertools
import math
import time
from collections import abc, deque

import torch

from infer.config import EngineConfig, TextOptions
from infer.engine.grammar import follow
from infer.engine.sequence import STAGES, Model, Processor, Sequence, check_prompt, check_text

PREFILL_CHUNK = 1024  # prompt positions of a row per forward pass at most, so that a long prompt's mask stays small


class EngineBase:
    """Writes texts side by side: every row has its own length and end; a row that ends makes room for the next text.

    A text waits, enters while its prompt is computed, and is written. Texts in work never wait for more than
    `options.positions` positions of the target, which a round's trees share with a piece of the prompts that enter:
    many rows get small trees each, which is also where a target that is short of arithmetic writes most. A position
    behind a long context counts more, see `_weight`.

    After a step that raised, `retry` lets its texts wait again, and fewer of them enter together.

    `capacity` is the number of positions a row may take, prompt and answer. `clock` times the stages; on CUDA pass one
    that synchronises. An engine extends `reset`, and adds

    - `_new_sequence(prompt, options, processors)`: a text to be queued; ValueError for what it cannot follow;
    - `_prefill(width)`: the next `width` positions of the prompts of `entering` computed, behind the `done` ones and
      those that need not be; after the last of them the texts are moved on to `writing`. Returns how many positions
      were computed, padding included;
    - `_round()`: one round for all texts of `writing`, where finished ones stay;
    - `_follow_weights()`: everything begun anew that was computed with weights that are others now;
    - `_find_prefix(text)`: how many positions need not be computed noted in `text.reused`; returns what the text is the
      first to compute for others too, None for nothing;
    - `_free(finished)`: these texts taken out of `writing` and `entering`, and their rows given up.
    """

    def __init__(
        self,
        target: Model,
        options: EngineConfig,
        capacity: int,
        clock: abc.Callable[[], float] = time.perf_counter,
    ) -> None:
        EngineConfig.check(options)
        self.target, self.options, self.capacity, self.clock = target, options, capacity, clock
        self.rows = options.rows
        self.most = options.rows  # texts side by side: fewer after a step that raised
        self.nodes = 0  # drafted tokens of a row that a round verifies at most
        self.computed = 0.0  # cost of the prompts in this step, in positions without a context
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.waiting: deque[Sequence] = deque()
        self._numbers = itertools.count()

    def reset(self) -> None:
        """Give up all texts in work; those that wait go on waiting. Caches are allocated anew, since after an error
        their contents are unknown, and the old ones are freed before. After an error here it can be called again."""
        self.entering: list[Sequence] = []  # their prompts are being computed
        self.done = 0  # positions that were computed of each of these prompts
        self.writing: list[Sequence] = []
        self._began: dict[Sequence, tuple[float, dict[str, float]]] = {}  # time and stage seconds at admission

    @property
    def busy(self) -> bool:
        """Whether a text is being written or waits."""
        return bool(self.waiting or self.entering or self.writing)

    def check_text(self, options: TextOptions) -> None:
        """Raise ValueError for options of a text that cannot be followed."""
        check_text(options, self.target)

    def submit(self, prompt: list[int], options: TextOptions, processors: abc.Sequence[Processor] = ()) -> Sequence:
        """Queue a text. Raises ValueError for options or lengths that make no sense."""
        self.check_text(options)
        check_prompt(prompt, options, self.capacity, self.target.head_weight.shape[0])
        text = self._new_sequence(prompt, options, processors)
        text.grammar = follow(options, self.target)
        text.number = next(self._numbers)
        self.waiting.append(text)
        return text

    def warm(
        self,
        report: abc.Callable[[int, int], None] = lambda done, all: None,
        texts: abc.Sequence[TextOptions] = (TextOptions(),),
    ) -> None:
        """Prepare what the first rounds of every size would wait for, of texts with such options, each alone and all
        side by side; `report` is told how far that is."""

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """Admit waiting texts, run one round for all rows, and return the texts that grew or ended."""
        self._follow_weights()
        before = {text: len(text.ids) for text in (*self.writing, *self.entering, *self.waiting)}
        for text in before:
            if text.cancelled:
                text.finish = "cancelled"
        self.waiting = deque(text for text in self.waiting if text.finish is None)
        self._release()
        self._admit()
        if self.writing:
            self._round()
            self._release()
        return [text for text, length in before.items() if text.finish is not None or len(text.ids) > length]

    def retry(self) -> Sequence | None:
        """After a step that raised: let its texts wait again, to go on from the tokens that they have, and half as many
        be written side by side; each text that ends lets one more in. The dear and new ones go first, which are the
        likely cause. A text that failed alone is returned instead, and all rows may be used again. `reset` comes next.
        """
        texts = self._stop_writing()
        texts.sort(key=lambda text: (text.options.temperature > 0 or text.options.logprobs is not None, text.number))
        if len(texts) < 2:
            self.most = self.rows
            return texts[0] if texts else None
        self.waiting.extendleft(texts)
        self.most = max(1, min(self.most, len(texts)) // 2)
        return None

    def _stop_writing(self) -> list[Sequence]:
        """Take all texts out of work, and return them as they are to wait again. `reset` comes next."""
        texts = [text for text in (*self.writing, *self.entering) if text.finish is None]
        self.writing, self.entering = [], []
        for text in texts:
            del text.logprobs[len(text.ids) :]  # of tokens that were not committed any more
            text.states = {}
        return texts

    def _weight(self, context: int) -> float:
        """Return what a position behind so much context costs, in positions without one. In halves, so that rounds
        have few sizes."""
        return 1 + round(2 * context / self.target.context_reach) / 2

    def _tree_positions(self, prompts: float) -> int:
        """Return how many positions a row's tree may take, its root included, in a round before which prompts of this
        cost are computed. Prompts count as whole thirds of the limit and leave one, rows as a power of two: rounds
        have few sizes."""
        full = self.nodes + 1
        if self.options.positions is None or not self.writing:
            return full
        weight = self._weight(self._context())
        limit = max(self.options.positions, full * weight)
        thirds = max(1, 3 - math.ceil(3 * prompts / limit))
        return min(full, max(2, int(limit * thirds / 3 / weight) >> (len(self.writing) - 1).bit_length()))

    def _likely_positions(self) -> int:
        """Return how many positions a row's tree will take, as far as is known, in a round before which prompts are
        computed: what trees leave is theirs."""
        return self._tree_positions(1)

    def _context(self) -> int:
        """Return the length of the longest text in work: its row's context is computed for every row."""
        return max(len(text.prompt) + len(text.ids) for text in self.writing)

    def _admit(self) -> None:
        """Compute prompts of waiting texts: a piece if other texts are being written, else all."""
        room, self.computed = math.inf, 0.0
        if self.writing and self.options.positions is not None:
            trees = len(self.writing) * self._likely_positions() * self._weight(self._context())
            room = max(min(self.options.positions - trees, self.options.positions * 2 / 3), trees / 2, 1)
        while room > 0:
            mark = self.clock()
            if not self.entering:
                self.entering, self.done = [self.waiting.popleft() for _ in range(self._fitting(room))], 0
                self._began |= {text: (mark, dict(self.seconds)) for text in self.entering}
            if not self.entering:
                return
            width = self._piece(room / len(self.entering))
            computed = self._prefill(width)
            self.done += width
            cost = computed * self._weight(self._reached)
            room, self.computed = room - cost, self.computed + cost
            self._lap("prefill", mark)
            self._release()

    @property
    def _reached(self) -> int:
        """Return the length of the longest prompt that enters, as far as it is there."""
        return self.done + max((text.reused for text in self.entering), default=0)

    def _find_prefix(self, text: Sequence) -> object | None:
        return None

    def _follow_weights(self) -> None:
        pass

    def _piece(self, room: float) -> int:
        """Return how many positions of each prompt that enters are computed next, for this cost a prompt."""
        width = min(PREFILL_CHUNK, room)
        return max(1, int(width / (1 if room == math.inf else self._weight(self._reached + int(width)))))

    def _fitting(self, room: float) -> int:
        """Return how many waiting texts enter together: as many as have free rows and prompts that fit into `room`
        positions, padded to one length. A longer prompt enters alone, over several rounds; one that begins as another
        of them does enters after it."""
        free = min(self.most - len(self.writing), len(self.waiting))
        longest, firsts = 0, set()
        for count in range(free):
            text = self.waiting[count]
            first = self._find_prefix(text)
            longest = max(longest, len(text.known) - text.reused)
            if count and ((count + 1) * longest > room or first in firsts):
                return count
            firsts |= {first} - {None}
        return free

    def _lap(self, stage: str, mark: float) -> float:
        """Count the time since `mark` to a stage; return the time."""
        now = self.clock()
        self.seconds[stage] += now - mark
        return now

    def _release(self) -> None:
        """Take finished texts out of their rows, and note what they took."""
        finished = [text for text in (*self.writing, *self.entering) if text.finish is not None]
        if not finished:
            return
        self._free(finished)
        self.most = min(self.rows, self.most + len(finished))
        now = self.clock()
        for text in finished:
            began, before = self._began.pop(text)
            text.stats.tokens, text.stats.seconds = len(text.ids), now - began
            text.stats.stage_seconds = {stage: self.seconds[stage] - before[stage] for stage in STAGES}

"""What the engines share: texts wait, are admitted into rows, grow round by round, and give their rows back."""

import time
from collections import abc, deque

import torch

from infer.config import EngineConfig, TextOptions
from infer.engine.sequence import STAGES, Model, Processor, Sequence, check_prompt, check_text


class EngineBase:
    """Writes texts side by side: every row has its own length and end; a row that ends makes room for the next text.

    `capacity` is the number of positions a row may take, prompt and answer. `clock` times the stages; on CUDA pass one
    that synchronises. An engine adds

    - `_new_sequence(prompt, options, processors)`: a text to be queued; ValueError for what it cannot follow;
    - `_admit(texts)`: rows for texts, and their prompts computed;
    - `_round()`: one round for all texts of `writing`, where finished ones stay;
    - `_free(finished)`: these texts taken out of `writing`, and their rows given up.
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
        self.seconds = dict.fromkeys(STAGES, 0.0)

    def reset(self) -> None:
        """Forget all texts. Caches are allocated anew: after an error their contents are unknown."""
        self.waiting: deque[Sequence] = deque()
        self.writing: list[Sequence] = []
        self._began: dict[Sequence, tuple[float, dict[str, float]]] = {}  # time and stage seconds at admission

    @property
    def busy(self) -> bool:
        """Whether a text is being written or waits."""
        return bool(self.waiting or self.writing)

    def check_text(self, options: TextOptions) -> None:
        """Raise ValueError for options of a text that cannot be followed."""
        check_text(options, self.target)

    def submit(self, prompt: list[int], options: TextOptions, processors: abc.Sequence[Processor] = ()) -> Sequence:
        """Queue a text. Raises ValueError for options or lengths that make no sense."""
        self.check_text(options)
        check_prompt(prompt, options, self.capacity)
        text = self._new_sequence(prompt, options, processors)
        self.waiting.append(text)
        return text

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """Admit waiting texts, run one round for all rows, and return the texts that grew or ended."""
        before = {text: len(text.ids) for text in (*self.writing, *self.waiting)}
        for text in before:
            if text.cancelled:
                text.finish = "cancelled"
        self.waiting = deque(text for text in self.waiting if text.finish is None)
        self._release()
        while free := min(self.rows - len(self.writing), len(self.waiting)):
            mark, texts = self.clock(), [self.waiting.popleft() for _ in range(free)]
            self._began |= {text: (mark, dict(self.seconds)) for text in texts}
            self._admit(texts)
            self.writing += texts
            self._lap("prefill", mark)
            self._release()
        if self.writing:
            self._round()
            self._release()
        return [text for text, length in before.items() if text.finish is not None or len(text.ids) > length]

    def _lap(self, stage: str, mark: float) -> float:
        """Count the time since `mark` to a stage; return the time."""
        now = self.clock()
        self.seconds[stage] += now - mark
        return now

    def _release(self) -> None:
        """Take finished texts out of their rows, and note what they took."""
        finished = [text for text in self.writing if text.finish is not None]
        if not finished:
            return
        self._free(finished)
        now = self.clock()
        for text in finished:
            began, before = self._began.pop(text)
            text.stats.tokens, text.stats.seconds = len(text.ids), now - began
            text.stats.stage_seconds = {stage: self.seconds[stage] - before[stage] for stage in STAGES}

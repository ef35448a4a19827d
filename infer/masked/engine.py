"""Masked diffusion decoding: step by step, and by self speculative decoding (SSD), which writes the
same text sooner.

A text is a prompt and masks. A step predicts the tokens at the masks and writes the most confident
one among the masks of the first unfinished block (SSD section 3.1, LLaDA's low-confidence
remasking). A round of SSD computes several states of the text in one pass, and takes steps as long
as their states were computed (Algorithm 1). Step-by-step decoding is a round that computes the
current text only: one loop for both.

Q outputs asked for, V vocabulary.
"""

import time
from collections import abc

import torch

from infer.config import TextOptions
from infer.engine.budget import Budget
from infer.engine.engine import Engine
from infer.engine.sampling import gumbel_noise
from infer.engine.sequence import Processor, Stopwatch
from infer.masked.config import MaskedConfig, check_masked_text
from infer.masked.drafting import Guesses, as_guesses, follow_steps, pick_states, summarize
from infer.masked.model import MaskedModel
from infer.masked.passes import DualCache, Rows, Task
from infer.masked.sequence import MaskedSequence


class MaskedEngine(Engine):
    """Decodes with a masked model: every row with its own drafts.

    An answer's last block may go beyond `capacity`. A text does not depend on what is written
    beside it, nor on anything that is drafted (float32; lower precisions round differently in other
    batch shapes).
    """

    def __init__(
        self,
        model: MaskedModel,
        options: MaskedConfig,
        capacity: int,
        clock: abc.Callable[[], float] = time.perf_counter,
    ) -> None:
        MaskedConfig.check(options)
        self._run(MaskedRunner(model, options, capacity, Stopwatch(clock)))

    def check_text(self, options: TextOptions) -> None:
        super().check_text(options)
        check_masked_text(options)


class MaskedRunner:
    """Runs what a `Scheduler` decides, as `infer.engine.runner.Runner` does with a causal
    target."""

    def __init__(
        self, model: MaskedModel, options: MaskedConfig, capacity: int, watch: Stopwatch
    ) -> None:
        self.target = model
        self.options = options
        self.capacity = capacity
        self.watch = watch
        self.budget = Budget(0)
        self.patience = 0
        self.reset()

    def reset(self) -> None:
        """Make all memory anew; the old one is freed before."""
        options = self.options
        self.passes = None
        if options.cache == "none":
            self.passes = Rows(self.target, options)
        else:
            self.passes = DualCache(self.target, options, self.capacity + options.room(1) - 1)
        self.free_rows = list(range(options.max_num_seqs))

    def new_text(
        self, prompt: list[int], options: TextOptions, processors: abc.Sequence[Processor]
    ) -> MaskedSequence:
        """Return a text to be queued. Raises ValueError for what it cannot follow."""
        if processors:
            raise ValueError(
                "logits processors: masked diffusion decoding has no prefixes that they could see"
            )
        return MaskedSequence(prompt, options)

    def find_prefix(self, text: MaskedSequence) -> None:
        """Return None: nothing is kept."""

    def weights_changed(self, enters: bool) -> bool:
        return False  # there are no copies of them

    def prefill(self, texts: list[MaskedSequence], done: int, width: int) -> int:
        """Compute nothing: prompts are computed with their answers."""
        return 0

    def begin(self, texts: list[MaskedSequence]) -> None:
        """Lay the texts out."""
        for text in texts:
            text.slot = self.free_rows.pop()
            text.begin(self.target, self.options.room(text.options.max_new_tokens))

    def round(self, texts: list[MaskedSequence], most: int) -> None:
        """Run one pass over the states of all texts, or one for each kind of step."""
        options = self.options
        tasks = []
        for text in texts:
            plan = self.passes.plan(text)
            states = pick_states(text.guesses, plan, options, text.habits)
            tasks.append(Task(text, plan, states, self.passes.asked(text, plan, states)))
        kinds = {self.passes.kind(task.text): None for task in tasks}
        for kind in kinds:
            group = [task for task in tasks if self.passes.kind(task.text) == kind]
            found = self._guesses(group, self.passes.logits(group))
            for task, guesses in zip(group, found, strict=True):
                self._take_steps(task, guesses)

    def _guesses(self, tasks: abc.Sequence[Task], logits: torch.Tensor) -> list[list[Guesses]]:
        """Return what logits (Q, V) say, task by task and state by state. One copy to the host."""
        sizes = [sum(map(len, task.asked)) for task in tasks]
        parts = []
        for task, part in zip(tasks, logits.split(sizes), strict=True):
            temperature = task.text.options.temperature
            noise = None
            if temperature > 0:
                every = task.asked[0]  # of all states: the noise of a position is the same in all
                index = {position: at for at, position in enumerate(every)}
                seed, places = (
                    torch.tensor(x, device=part.device) for x in ([task.text.options.seed], [every])
                )
                which = [index[position] for positions in task.asked for position in positions]
                noise = gumbel_noise(seed, places, part.shape[-1])[0, which]  # (Q of the task, V)
            parts.append(summarize(part, temperature, noise))
        rows = iter(torch.cat(parts).tolist())
        return [
            [as_guesses([next(rows) for _ in asked], asked) for asked in task.asked]
            for task in tasks
        ]

    def _take_steps(self, task: Task, found: list[Guesses]) -> None:
        """Take the steps whose states were computed."""
        text, stats = task.text, task.text.stats
        writes, last = follow_steps(task.states, found, task.plan)
        text.guesses |= found[0] | found[last]  # newer: the last write was chosen by them
        stats.rounds += 1
        stats.written += len(writes)
        stats.histogram[len(writes) - 1] += 1
        text.drafted.append(len(task.states) - 1)
        text.write(writes, self.target)

    def free(
        self, texts: list[MaskedSequence], entering: list[MaskedSequence], order: list[int]
    ) -> None:
        """Give up the rows of finished texts."""
        for text in texts:
            if text.finish is not None:
                text.row = None
                self.free_rows.append(text.slot)

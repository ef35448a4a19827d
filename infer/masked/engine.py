"""Masked diffusion decoding: step by step, and by self speculative decoding (SSD), which writes the same text sooner.

A text is a prompt and masks. A step computes what stands at the masks and writes one token: the one that the model is
surest of, among the masks of the first unfinished block (SSD section 3.1, LLaDA's low-confidence remasking). A round of
SSD computes several states of the text in one pass, and takes as many steps as it finds computed (Algorithm 1).
Step by step is the round that computes the text as it is and nothing else: one loop for both.

Q outputs asked for, V vocabulary.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from infer.config import MASKED_METHODS, EngineConfig, TextOptions, check_masked_text
from infer.engine.sampling import gumbel_noise
from infer.engine.sequence import Processor, check_prompt, check_text, end_cancelled
from infer.masked.drafting import Guesses, as_guesses, pick, read, walk
from infer.masked.model import MaskedModel
from infer.masked.passes import DualCache, Rows, Task
from infer.masked.sequence import MaskedText


class MaskedEngine:
    """Writes texts of a masked model side by side, as `infer.engine.engine.Engine` does those of a causal one: every row with
    its own length, drafts and end; a row that ends makes room for the next waiting text.

    `capacity` is the number of positions a row may take, prompt and answer; an answer's last block may go beyond it. A
    text does not depend on what is written beside it, nor on anything that is drafted (float32; lower precisions round
    differently in other batch shapes). `ranks` likeliest tokens of every position are looked at. Raises ValueError
    where the options do not fit the model.
    """

    def __init__(
        self,
        model: MaskedModel,
        options: EngineConfig,
        capacity: int,
        clock: Callable[[], float] = time.perf_counter,
        ranks: int = 2,
    ) -> None:
        EngineConfig.check(options)
        if options.method not in MASKED_METHODS:
            raise ValueError(
                f"{model.name} is a masked diffusion model, which method={options.method} cannot decode: use "
                f"method={' or '.join(MASKED_METHODS)}"
            )
        self.target, self.options, self.clock, self.ranks = model, options, clock, ranks
        self.capacity = capacity
        self.reset()

    def reset(self) -> None:
        """Forgets all texts. The cache is made anew: after an error nobody knows what it holds."""
        options = self.options
        spare = options.room(1) - 1
        self.passes = (
            Rows(self.target, options)
            if options.cache == "none"
            else DualCache(self.target, options, options.rows, self.capacity + spare)
        )
        self.waiting: deque[MaskedText] = deque()
        self.writing: list[MaskedText] = []
        self.free = list(range(options.rows))

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.writing)

    def check_text(self, options: TextOptions) -> None:
        """Raises ValueError for options of a text that cannot be followed."""
        check_text(options, self.target)
        check_masked_text(options)

    def submit(self, prompt: list[int], options: TextOptions, processors: Sequence[Processor] = ()) -> MaskedText:
        """Queues a text. Raises ValueError for options or lengths that make no sense."""
        self.check_text(options)
        if processors:
            raise ValueError("logits processors: masked diffusion decoding has no prefixes that they could see")
        check_prompt(prompt, options, self.capacity)
        text = MaskedText(prompt, options)
        self.waiting.append(text)
        return text

    @torch.inference_mode()
    def step(self) -> list[MaskedText]:
        """Lets waiting texts in, runs one round for all rows, and returns the texts that grew or ended."""
        changed = end_cancelled(self.waiting, self.writing)
        self._release()
        while self.waiting and self.free:
            text = self.waiting.popleft()
            text.slot, text.began = self.free.pop(), self.clock()
            text.begin(self.target, self.options.room(text.options.max_new_tokens))
            self.writing.append(text)
        if self.writing:
            before = {text: len(text.ids) for text in self.writing}
            self._round()
            changed += [text for text, length in before.items() if text.finish or len(text.ids) > length]
            self._release()
        return changed

    def _round(self) -> None:
        """One round of all rows: a pass over the states of all texts, or one for each kind of step."""
        options, tasks = self.options, []
        for text in self.writing:
            plan, states = self.passes.plan(text), [frozenset()]
            if options.method == "ssd":
                drafting = options.order, options.draft_length, options.nodes
                states = pick(text.guesses, plan, *drafting, text.habits)
            tasks.append(Task(text, plan, states, self.passes.asked(text, plan, states)))
        for group in self.passes.groups(tasks):
            found = self._read(group, self.passes.run(group))
            for task, said in zip(group, found, strict=True):
                self._walk(task, said)

    def _read(self, tasks: Sequence[Task], logits: torch.Tensor) -> list[list[Guesses]]:
        """What logits (Q, V) say, task by task and state by state. One copy to the host."""
        sizes = [sum(map(len, task.asked)) for task in tasks]
        parts = []
        for task, part in zip(tasks, logits.split(sizes), strict=True):
            temperature, noise = task.text.options.temperature, None
            if temperature > 0:
                every = task.asked[0]  # of all states: noise is made once a position
                index = {position: at for at, position in enumerate(every)}
                seed, places = (torch.tensor(x, device=part.device) for x in ([task.text.options.seed], [every]))
                which = [index[position] for positions in task.asked for position in positions]
                noise = gumbel_noise(seed, places, part.shape[-1])[0, which]  # (Q of the task, V)
            parts.append(read(part, temperature, noise, self.ranks))
        rows = iter(torch.cat(parts).tolist())
        return [[as_guesses([next(rows) for _ in asked], asked) for asked in task.asked] for task in tasks]

    def _walk(self, task: Task, found: list[Guesses]) -> None:
        """Takes the steps that were computed."""
        text, stats = task.text, task.text.stats
        walked = walk(task.states, found, task.plan)
        text.guesses.update(found[0])
        text.guesses.update(found[walked.last])  # for free: the last write was chosen by them
        stats.rounds += 1
        stats.written += len(walked.writes)
        stats.histogram[len(walked.writes) - 1] += 1
        stats.states += len(task.states)
        stats.full += text.full
        text.drafted.append(len(task.states) - 1)
        text.write(walked.writes, self.target)

    def _release(self) -> None:
        """Takes finished texts out."""
        now = self.clock()
        for text in self.writing:
            if text.finish is not None:
                text.end(self.target.end_ids, now)
                text.row = None
                self.free.append(text.slot)
        self.writing = [text for text in self.writing if text.finish is None]

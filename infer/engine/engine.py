"""The engine: schedule, run, take note. What is written when is the scheduler's, how it is computed
the runner's."""

import time
from collections import abc
from functools import partial

import torch

from infer.config import TEXT_NGRAMS, EngineConfig, TextOptions
from infer.drafters.base import Drafter
from infer.engine.budget import make_budget
from infer.engine.capture import Columns, Graphs
from infer.engine.grammar import follow
from infer.engine.memory import Memory
from infer.engine.prefixes import Prefixes
from infer.engine.runner import DeviceState, Runner
from infer.engine.scheduler import Scheduler
from infer.engine.sequence import STAGES, Processor, Sequence, Stopwatch, check_prompt, check_text
from infer.ngrams.model import NGram
from infer.targets.target import Target


class Engine:
    """Writes texts side by side: every row has its own length and end; a row that ends makes room
    for the next text.

    A text waits, enters while its prompt is computed, and is written. `capacity` is the number of
    positions a row may take, prompt and answer. `clock` times the stages; on CUDA pass one that
    synchronises.

    A text does not depend on what is written beside it (float32; lower precisions round differently
    in other batch shapes). The drafter may be None for methods that draft nothing. Raises
    ValueError where options do not fit the drafter or the target.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        options: EngineConfig,
        capacity: int,
        clock: abc.Callable[[], float] = time.perf_counter,
    ) -> None:
        EngineConfig.check(options)
        self._run(make_runner(target, drafter, options, capacity, clock))

    def _run(self, runner: Runner) -> None:
        self.runner, self.scheduler = runner, Scheduler(runner)
        self.target = runner.target
        self.options = runner.options
        self.capacity = runner.capacity
        self.clock = runner.watch.clock
        self.seconds = runner.watch.seconds

    def reset(self) -> None:
        """Give up all texts in work; those that wait go on waiting. Caches are allocated anew,
        since after an error their contents are unknown, and the old ones are freed before. After an
        error here it can be called again."""
        self.scheduler.reset()
        self.runner.reset()

    @property
    def busy(self) -> bool:
        """Whether a text is being written or waits."""
        scheduler = self.scheduler
        return bool(scheduler.waiting or scheduler.entering or scheduler.writing)

    def check_text(self, options: TextOptions) -> None:
        """Raise ValueError for options of a text that cannot be followed."""
        check_text(options, self.target)

    def submit(
        self, prompt: list[int], options: TextOptions, processors: abc.Sequence[Processor] = ()
    ) -> Sequence:
        """Queue a text. Raises ValueError for options or lengths that make no sense."""
        self.check_text(options)
        check_prompt(prompt, options, self.capacity, self.target.vocabulary)
        text = self.runner.new_text(prompt, options, processors)
        text.grammar = follow(options, self.target)
        self.scheduler.add(text)
        return text

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """Admit waiting texts, run one round for all rows, and return the texts that grew or
        ended."""
        scheduler = self.scheduler
        runner = self.runner
        if runner.weights_changed(scheduler.admits):
            scheduler.waiting.extendleft(reversed(scheduler.stop()))
            self.reset()
        before = {text: len(text.ids) for text in scheduler.begin_step()}
        self._release()
        while width := scheduler.next_piece():
            self._prefill(width)
        if texts := scheduler.writing:
            most = scheduler.tree_positions(texts, scheduler.computed) - 1
            runner.round(texts, most)
            self._release()
        scheduler.idle = scheduler.idle + scheduler.free if scheduler.free else 0
        return [
            text
            for text, length in before.items()
            if text.finish is not None or len(text.ids) > length
        ]

    def _prefill(self, width: int) -> None:
        """Compute a piece of the prompts that enter; complete ones are written on."""
        scheduler = self.scheduler
        mark = self.runner.watch.start()
        texts = scheduler.entering
        if scheduler.done == 0:
            for text in texts:
                text.began = mark, dict(self.seconds)
        computed = self.runner.prefill(texts, scheduler.done, width)
        if scheduler.note_piece(width, computed):
            self.runner.begin(texts)
            scheduler.writing = scheduler.writing + texts
            scheduler.entering = []
        self.runner.watch.lap("prefill")
        self._release()

    def _release(self) -> None:
        """Take finished texts out of their rows, and note what they took."""
        scheduler, texts = self.scheduler, self.scheduler.writing
        finished = [text for text in (*texts, *scheduler.entering) if text.finish is not None]
        if not finished:
            return
        order = scheduler.release()
        self.runner.free(texts, scheduler.entering, order)
        now = self.clock()
        for text in finished:
            began, before = text.began
            text.stats.tokens = len(text.ids)
            text.stats.seconds = now - began
            text.stats.stage_seconds = {
                stage: self.seconds[stage] - before[stage] for stage in STAGES
            }


def make_runner(
    target: Target,
    drafter: Drafter | None,
    options: EngineConfig,
    capacity: int,
    clock: abc.Callable[[], float],
) -> Runner:
    """Make all that an engine of a causal target consists of. Raises ValueError where options do
    not fit."""
    asked = options.ngrams
    options = options.beside(None if drafter is None else drafter.ngrams)
    check_drafter(target, drafter, options)
    target.follow_weights()
    drafter = drafter if options.drafts else None
    ngram = open_ngrams(target, options, asked) if options.tree.ngrams else None
    budget = make_budget(target, drafter, options, clock)
    make_state = partial(make_device_state, target, drafter, options, capacity, budget.most)
    return Runner(target, drafter, options, capacity, ngram, budget, Stopwatch(clock), make_state)


def make_device_state(
    target: Target, drafter: Drafter | None, options: EngineConfig, capacity: int, nodes: int
) -> DeviceState:
    """Allocate what a runner keeps on the device, for trees of `nodes` nodes at most."""
    megabytes = options.prefix_cache_mib
    # of recurrent layers there would be states to keep, behind every block
    prefixes = Prefixes(megabytes * 2**20) if megabytes and not target.recurrent else None
    models = [target] if drafter is None else [target, drafter]
    return DeviceState(
        Memory(target, drafter, options.max_num_seqs, capacity, nodes, prefixes is not None),
        Graphs(target.device, models),
        Columns(options.max_num_seqs, target.vocabulary, target.device),
        prefixes,
    )


def check_drafter(target: Target, drafter: Drafter | None, options: EngineConfig) -> None:
    """Raise ValueError where there is no drafter, or one of another dtype."""
    if options.drafts and drafter is None:
        raise ValueError(
            f"method={options.method} needs a drafter: load one with load_drafter, or use method=plain"
        )
    if drafter is not None and drafter.dtype not in (None, target.dtype):
        mine, theirs = (
            str(dtype).removeprefix("torch.") for dtype in (drafter.dtype, target.dtype)
        )
        raise ValueError(
            f"the drafter's weights are {mine}, the target's {theirs}: load_drafter(folder, target.dtype)"
        )


def open_ngrams(target: Target, options: EngineConfig, asked: str | None) -> NGram:
    """Return the n-grams that trees ask beside the text's own: those of the file that a user
    `asked` for, none where the text's are to do, else the drafter's."""
    if asked == TEXT_NGRAMS:
        return NGram.uniform(target.vocabulary)
    # a drafter's own belong to its target's ids, whatever template a user gave the tokenizer
    return NGram.open(options.ngrams, target.tokenizer_digest if asked else None)

"""The decoding engine of autoregressive target models. A step schedules sequences, prefills
prompts, runs one decoding round, and releases finished sequences. The scheduler decides what a step
computes, and the runner computes it."""

import time
from collections import abc
from functools import partial

import torch

from infer.config import NGRAMS_OPTION_CURRENT_SEQUENCE, EngineConfig, SamplingOptions
from infer.drafters.base import Drafter
from infer.engine.batch_state import BatchState
from infer.engine.budget import make_node_budget
from infer.engine.capture import CudaGraphs, SamplingBuffers
from infer.engine.grammar import make_grammar_state
from infer.engine.prefix_cache import PrefixCache
from infer.engine.runner import DeviceResources, Runner
from infer.engine.scheduler import Scheduler
from infer.engine.sequence import (
    DECODE_STAGES,
    Admission,
    LogitsProcessor,
    Sequence,
    Stopwatch,
    check_options,
    check_prompt,
)
from infer.ngrams.model import NGramModel
from infer.targets.target import Target


class Engine:
    """Decodes sequences with continuous batching: sequences in a batch may have different lengths,
    and the next waiting sequence takes the batch row of a finished one.

    `capacity` is the maximum number of tokens of a sequence, prompt and output together. `clock`
    returns the time in seconds and is used to time the stages of decoding; on CUDA it must
    synchronise with the device. `drafter` is None for methods without a drafter.

    In float32 the output of a sequence does not depend on the other sequences of the batch. In
    lower precisions it may, because rounding depends on the batch size. Raises ValueError if the
    options do not fit the drafter or the target.
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
        self._use_runner(make_runner(target, drafter, options, capacity, clock))

    def _use_runner(self, runner: Runner) -> None:
        """Set the runner, its scheduler, and the engine's attributes that come from the runner."""
        self.runner = runner
        self.scheduler = Scheduler(runner)
        self.target = runner.target
        self.options = runner.options
        self.capacity = runner.capacity
        self.clock = runner.stopwatch.clock
        self.seconds = runner.stopwatch.seconds

    def reset(self) -> None:
        """Remove all sequences except the waiting ones, and allocate the caches anew.

        This is needed after an exception, because the contents of the caches are then undefined.
        The old caches are freed first. If `reset` itself raises an exception, it can be called
        again.
        """
        self.scheduler.drop_admitted_sequences()
        self.runner.reallocate_device_memory()

    @property
    def has_unfinished_sequences(self) -> bool:
        """Whether there are unfinished sequences."""
        scheduler = self.scheduler
        return bool(scheduler.waiting or scheduler.prefilling or scheduler.running)

    def check_options(self, options: SamplingOptions) -> None:
        """Raise ValueError if the options of a sequence are invalid, or the target does not support
        them."""
        check_options(options, self.target)

    def submit(
        self,
        prompt: list[int],
        options: SamplingOptions,
        processors: abc.Sequence[LogitsProcessor] = (),
    ) -> Sequence:
        """Add a sequence to the queue, and return it. `processors` are Hugging Face logits
        processors. Raises ValueError if the options are invalid, or the prompt is too long."""
        self.check_options(options)
        check_prompt(prompt, options, self.capacity, self.target.vocab_size)
        sequence = self.runner.create_sequence(prompt, options, processors)
        sequence.grammar = make_grammar_state(options, self.target)
        self.scheduler.add(sequence)
        return sequence

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """Prefill waiting sequences, and run one decoding round for all running sequences. Return
        the sequences that received new tokens or finished."""
        scheduler = self.scheduler
        if self.runner.weights_changed(checks_contents=scheduler.is_admission_due):
            self._requeue_all_and_reallocate()
        old_lengths = {
            sequence: len(sequence.ids) for sequence in scheduler.begin_step_and_list_sequences()
        }
        self._release_finished()

        chunk_length = scheduler.admit_and_choose_chunk_length()
        while chunk_length:
            self._prefill_chunk(chunk_length)
            chunk_length = scheduler.admit_and_choose_chunk_length()

        running = scheduler.running
        if running:
            max_positions = scheduler.max_tree_nodes(running, scheduler.prefill_cost)
            self.runner.decode_round(running, max_nodes=max_positions - 1)
            self._release_finished()

        if scheduler.num_admissible:
            scheduler.idle_row_rounds += scheduler.num_admissible
        else:
            scheduler.idle_row_rounds = 0
        return [
            sequence
            for sequence, old_length in old_lengths.items()
            if sequence.finish_reason is not None or len(sequence.ids) > old_length
        ]

    def _requeue_all_and_reallocate(self) -> None:
        """Return all running and prefilling sequences to the queue, and allocate empty caches. This
        is needed when the weights have changed, because the caches were computed with the old
        weights."""
        sequences = self.scheduler.pop_unfinished_sequences()
        self.scheduler.waiting.extendleft(reversed(sequences))
        self.reset()

    def _prefill_chunk(self, length: int) -> None:
        """Prefill the next `length` positions of each admitted prompt. Once all these prompts are
        complete, their sequences become running sequences."""
        scheduler = self.scheduler
        start = self.runner.stopwatch.start()
        sequences = scheduler.prefilling
        if scheduler.prefilled_positions == 0:
            for sequence in sequences:
                sequence.admission = Admission(start, dict(self.seconds))

        computed = self.runner.prefill(sequences, scheduler.prefilled_positions, length)
        if scheduler.record_chunk(length, computed):
            self.runner.prepare_for_decoding(sequences)
            scheduler.running = scheduler.running + sequences
            scheduler.prefilling = []
        self.runner.stopwatch.lap("prefill")
        self._release_finished()

    def _release_finished(self) -> None:
        """Release the batch rows of finished sequences, and record how long each sequence took."""
        scheduler = self.scheduler
        running = scheduler.running
        finished = [
            sequence
            for sequence in (*running, *scheduler.prefilling)
            if sequence.finish_reason is not None
        ]
        if not finished:
            return

        order = scheduler.release_finished()
        self.runner.release_finished_rows(running, scheduler.prefilling, order)
        now = self.clock()
        for sequence in finished:
            admission = sequence.admission
            assert admission is not None
            sequence.stats.tokens = len(sequence.ids)
            sequence.stats.seconds = now - admission.time
            sequence.stats.stage_seconds = {
                stage: self.seconds[stage] - admission.stage_seconds[stage]
                for stage in DECODE_STAGES
            }


def make_runner(
    target: Target,
    drafter: Drafter | None,
    options: EngineConfig,
    capacity: int,
    clock: abc.Callable[[], float],
) -> Runner:
    """Create the runner of a target, together with the runner's node budget and n-gram model.

    `capacity` is the maximum number of tokens of a sequence, and `clock` returns the time in
    seconds. Raises ValueError if the options do not fit the drafter or the target.
    """
    requested_ngrams = options.ngrams
    options = options.with_drafter_ngrams(None if drafter is None else drafter.default_ngram_path)
    check_drafter_presence_and_dtype(target, drafter, options)
    target.drop_decoder_if_weights_changed()
    if not options.uses_drafter:
        drafter = None
    ngram_model = None
    if options.tree_method.needs_ngrams:
        ngram_model = load_ngram_model(target, options, requested_ngrams)
    budget = make_node_budget(target, drafter, options, clock)
    allocate = partial(
        allocate_device_resources, target, drafter, options, capacity, budget.max_nodes
    )
    stopwatch = Stopwatch(clock)
    return Runner(target, drafter, options, capacity, ngram_model, budget, stopwatch, allocate)


def allocate_device_resources(
    target: Target, drafter: Drafter | None, options: EngineConfig, capacity: int, max_nodes: int
) -> DeviceResources:
    """Allocate a runner's device memory, such as the KV caches. `capacity` is the maximum number of
    tokens of a sequence, and `max_nodes` the maximum number of drafted nodes of a tree."""
    prefix_cache = None
    # Targets with recurrent layers have no prefix cache, because it would also have to store the
    # recurrent state after every block.
    if options.prefix_cache_mib and not target.has_recurrent_layers:
        prefix_cache = PrefixCache(max_bytes=options.prefix_cache_mib * 2**20)
    keeps_prefixes = prefix_cache is not None
    models = [target] if drafter is None else [target, drafter]
    return DeviceResources(
        BatchState(target, drafter, options.max_num_seqs, capacity, max_nodes, keeps_prefixes),
        CudaGraphs(target.device, models),
        SamplingBuffers(options.max_num_seqs, target.vocab_size, target.device),
        prefix_cache,
    )


def check_drafter_presence_and_dtype(
    target: Target, drafter: Drafter | None, options: EngineConfig
) -> None:
    """Raise ValueError if the decoding method needs a drafter and there is none, or if drafter and
    target have different dtypes."""
    if options.uses_drafter and drafter is None:
        raise ValueError(
            f"method={options.method} needs a drafter, and none was given; load one with "
            "load_drafter, or use method=plain"
        )
    if drafter is not None and drafter.dtype not in (None, target.dtype):
        drafter_dtype = str(drafter.dtype).removeprefix("torch.")
        target_dtype = str(target.dtype).removeprefix("torch.")
        raise ValueError(
            f"the drafter's weights are {drafter_dtype} and the target's weights are "
            f"{target_dtype}, but both must have the same dtype; load the drafter with "
            "load_drafter(folder, target.dtype)"
        )


def load_ngram_model(
    target: Target, options: EngineConfig, ngrams_option: str | None
) -> NGramModel:
    """Return the n-gram model that the tree method uses. It depends on `ngrams_option`, the user's
    option `ngrams`:

    - NGRAMS_OPTION_CURRENT_SEQUENCE: a uniform model, so that only the n-grams of the sequence
      itself matter
    - the path of an n-gram file: the model in this file
    - None: the model in the drafter's own n-gram file
    """
    if ngrams_option == NGRAMS_OPTION_CURRENT_SEQUENCE:
        return NGramModel.uniform(target.vocab_size)
    assert options.ngrams is not None
    # The tokenizer digest is not checked for the drafter's own n-gram file. The digest includes the
    # chat template, which the user may have changed, but the token ids are those of the target.
    return NGramModel.open(options.ngrams, target.tokenizer_digest if ngrams_option else None)

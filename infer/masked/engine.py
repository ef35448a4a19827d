"""Masked diffusion decoding: step by step, or with self speculative decoding (SSD), which yields
the same output in fewer forward passes.

A sequence consists of a prompt and of mask tokens. A step predicts the tokens of all masked
positions, and writes the most confident prediction of the first unfinished block (SSD section 3.1,
LLaDA's low-confidence remasking).

A round of SSD guesses which tokens the next steps will write. It computes several states of the
sequence, which are copies with some of these tokens written, in one forward pass. It then takes
steps until one leads to a state that was not computed (SSD algorithm 1). Step-by-step decoding is
the same code with rounds that compute only the current sequence.
"""

import time
from collections import abc
from typing import Any, cast

import torch

from infer.config import SamplingOptions
from infer.engine.budget import NodeBudget
from infer.engine.engine import Engine
from infer.engine.sampling import gumbel_noise
from infer.engine.sequence import LogitsProcessor, Stopwatch
from infer.masked.config import MaskedConfig, check_masked_text_options
from infer.masked.drafting import (
    Predictions,
    accept_writes,
    draft_states,
    parse_predictions,
    summarise_logits,
)
from infer.masked.model import MaskedModel
from infer.masked.passes import DualCachePasses, FullRowPasses, SequenceTask
from infer.masked.sequence import MaskedDecodeStats, MaskedSequence


class MaskedEngine(Engine):
    """Decodes sequences with a masked diffusion model. Drafts are made for each sequence
    separately.

    `capacity` is the number of positions of a sequence, for prompt and output together. Only the
    last block of an output may exceed it. In float32 the output of a sequence depends neither on
    the other sequences of the batch nor on the drafts. In lower precisions, rounding depends on the
    shape of the batch.
    """

    def __init__(
        self,
        model: MaskedModel,
        options: MaskedConfig,
        capacity: int,
        clock: abc.Callable[[], float] = time.perf_counter,
    ) -> None:
        MaskedConfig.check(options)
        runner = MaskedRunner(model, options, capacity, Stopwatch(clock))
        # The cast is safe: MaskedRunner has all attributes and methods of `Runner` that `Engine`
        # and `Scheduler` use.
        self._use_runner(cast(Any, runner))

    def check_options(self, options: SamplingOptions) -> None:
        super().check_options(options)
        check_masked_text_options(options)


class MaskedRunner:
    """Runs the decoding rounds of the sequences that a `Scheduler` selects. It has the interface of
    `infer.engine.runner.Runner`, which runs causal targets."""

    def __init__(
        self, model: MaskedModel, options: MaskedConfig, capacity: int, stopwatch: Stopwatch
    ) -> None:
        self.target = model
        self.options = options
        self.capacity = capacity
        self.stopwatch = stopwatch
        self.budget = NodeBudget(0)
        self.rounds_per_prefill = 0
        self.reallocate_device_memory()

    def reallocate_device_memory(self) -> None:
        """Free the KV cache, and allocate it anew."""
        options = self.options
        self.passes: FullRowPasses | DualCachePasses | None = None
        if options.cache == "none":
            self.passes = FullRowPasses(self.target, options)
        else:
            capacity = self.capacity + options.count_output_positions(1) - 1
            self.passes = DualCachePasses(self.target, options, capacity)
        self.free_rows = list(range(options.max_num_seqs))

    def create_sequence(
        self, prompt: list[int], options: SamplingOptions, processors: abc.Sequence[LogitsProcessor]
    ) -> MaskedSequence:
        """Return a sequence that can be added to the scheduler's queue. Raises ValueError if
        `processors` is not empty."""
        if processors:
            raise ValueError(
                "masked diffusion decoding does not support logits processors, since its outputs "
                "do not grow from left to right; leave the logits processors out"
            )
        return MaskedSequence(prompt, options)

    def find_cached_prefix(self, sequence: MaskedSequence) -> None:
        """Do nothing, since masked models have no prefix cache."""

    def weights_changed(self, checks_contents: bool) -> bool:
        """Return False: no sequence has to start again after a change of the weights. A round keeps
        nothing for later rounds that the change would make invalid."""
        return False

    def prefill(self, sequences: list[MaskedSequence], start: int, length: int) -> int:
        """Compute nothing, and return 0 as the number of computed positions. Prompts are computed
        together with their outputs."""
        return 0

    def prepare_for_decoding(self, sequences: list[MaskedSequence]) -> None:
        """Prepare new sequences for decoding: append mask tokens up to the full length, and assign
        a row of the KV cache."""
        for sequence in sequences:
            sequence.cache_row = self.free_rows.pop()
            length = self.options.count_output_positions(sequence.options.max_new_tokens)
            sequence.set_up_row(self.target, length)

    def decode_round(self, sequences: list[MaskedSequence], max_nodes: int) -> None:
        """Run one round for all sequences: draft tokens, compute predictions for drafted copies of
        each sequence, and write the tokens of all decoding steps that follow from these
        predictions.

        Sequences that can share a forward pass are computed together. `max_nodes` is not used.
        """
        passes = self.passes
        assert passes is not None
        groups: dict[int, list[SequenceTask]] = {}
        for sequence in sequences:
            plan = passes.make_plan(sequence)
            states = draft_states(sequence.predictions, plan, self.options, sequence.statistics)
            positions = passes.list_positions_to_predict(sequence, plan, states)
            task = SequenceTask(sequence, plan, states, positions)
            groups.setdefault(passes.get_pass_group(sequence), []).append(task)

        for tasks in groups.values():
            predictions = self._parse_logits(tasks, passes.compute_logits(tasks))
            for task, task_predictions in zip(tasks, predictions, strict=True):
                self._write_steps(task, task_predictions)

    def _parse_logits(
        self, tasks: abc.Sequence[SequenceTask], logits: torch.Tensor
    ) -> list[list[Predictions]]:
        """Return the predictions that follow from the logits of one forward pass: for each task
        (sequence), one dictionary from position to prediction per state (drafted copy of the
        sequence).

        logits: (num_predicted, vocab_size), ordered by task, state and position

        The logits are summarised on the device, so that only a few values per position are copied
        to the host.
        """
        sizes = [sum(len(positions) for positions in task.positions_to_predict) for task in tasks]
        summaries = []
        for task, task_logits in zip(tasks, logits.split(sizes), strict=True):
            temperature = task.sequence.options.temperature
            noise = make_task_noise(task, task_logits) if temperature > 0 else None
            summaries.append(summarise_logits(task_logits, temperature, noise))

        rows = iter(torch.cat(summaries).tolist())
        predictions = []
        for task in tasks:
            task_predictions = []
            for positions in task.positions_to_predict:
                state_rows = [next(rows) for _ in positions]
                task_predictions.append(parse_predictions(state_rows, positions))
            predictions.append(task_predictions)
        return predictions

    def _write_steps(self, task: SequenceTask, predictions: list[Predictions]) -> None:
        """Take the decoding steps of a round for one sequence: write the tokens of these steps into
        the sequence, and update its statistics.

        predictions: one dictionary from position to prediction per state (drafted copy of the
            sequence)
        """
        sequence = task.sequence
        writes, last_state = accept_writes(task.states, predictions, task.plan)
        # If the first and the last state both predict a position, keep the prediction of the last
        # state, because it knows more tokens.
        sequence.predictions |= predictions[0] | predictions[last_state]

        stats = sequence.stats
        assert isinstance(stats, MaskedDecodeStats)
        stats.rounds += 1
        stats.written += len(writes)
        stats.histogram[len(writes) - 1] += 1
        sequence.drafted.append(len(task.states) - 1)
        sequence.write(writes, self.target)

    def release_finished_rows(
        self, sequences: list[MaskedSequence], prefilling: list[MaskedSequence], order: list[int]
    ) -> None:
        """Release the rows of finished sequences in the KV cache. `prefilling` and `order` are not
        used."""
        for sequence in sequences:
            if sequence.finish_reason is not None:
                sequence.token_row = None
                self.free_rows.append(sequence.cache_row)


def make_task_noise(task: SequenceTask, logits: torch.Tensor) -> torch.Tensor:
    """Return the Gumbel noise for all logits of one sampled sequence, (num_predicted, vocab_size).
    A position has the same noise in all states (drafted copies of the sequence).

    logits: (num_predicted, vocab_size), ordered by state and position
    """
    # The first state (the sequence without drafted tokens) predicts every position that another
    # state predicts.
    all_positions = task.positions_to_predict[0]
    index_of_position = {position: index for index, position in enumerate(all_positions)}
    seed = torch.tensor([task.sequence.options.seed], device=logits.device)
    positions = torch.tensor([all_positions], device=logits.device)
    indices = []
    for state_positions in task.positions_to_predict:
        indices += [index_of_position[position] for position in state_positions]
    return gumbel_noise(seed, positions, logits.shape[-1])[0, indices]

"""Decodes the same prompts with several decoding methods, and records outputs and times.

The methods take turns on each prompt. A `DecodingVariant` is a decoding method with its node budget
and options.
"""

import math
import statistics
import time
from collections import abc
from dataclasses import asdict, dataclass, field, replace
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from transformers import GenerationConfig, StoppingCriteriaList

from infer.api import AnyTarget, open_engine
from infer.config import (
    NGRAMS_OPTION_CURRENT_SEQUENCE,
    NGRAMS_OPTION_NONE,
    DecodeOptions,
    EvaluationConfig,
    SamplingOptions,
)
from infer.drafters.base import Drafter
from infer.drafters.families import PROMPT_LOOKUP_FAMILY
from infer.drafters.lookup import PromptLookup
from infer.engine.engine import Engine
from infer.engine.repetition import MAX_LOOP_PERIOD_TOKENS, MIN_LOOP_REPEATS, find_loop_period
from infer.engine.sampling import derive_seed
from infer.engine.sequence import DecodeStats, Sequence, find_sequence_end
from infer.evaluation.acceptance import EvaluationPrompt
from infer.evaluation.metrics import MIN_TIME_RATIO_TO_REMEASURE
from infer.evaluation.replay import ReplayedSequence
from infer.evaluation.results import TRANSFORMERS_BASELINE_METHOD, PromptResult
from infer.evaluation.samples import ReportSamples
from infer.targets.target import Target
from infer.trees.methods import NGRAMS_ALONE_TREE_METHOD, TREE_METHODS, TreeMethod

# Options that are copied from EvaluationConfig to DecodeOptions
OPTIONS_COPIED_TO_VARIANTS = ("max_new_tokens", "temperature")
WARMUP_TOKENS_BEFORE_MEASUREMENT = (
    16  # tokens that each variant generates before the measurement starts
)
# Type of functions that report progress: (finished prompts, all prompts) -> None
ProgressCallback = abc.Callable[[int, int], None]
Decision = TypeVar("Decision")


@dataclass(frozen=True)
class DecodingVariant:
    """A decoding method with its node budget and options.

    budget: number of drafted tree nodes per round. For a masked diffusion model, number of copies
        of the sequence with different masked positions that one forward pass computes
    drafter: None means the drafter that is evaluated
    """

    name: str
    budget: int
    options: DecodeOptions
    drafter: Drafter | PromptLookup | None = None


@dataclass
class VariantMeasurement:
    """The outputs and times of one decoding variant.

    prompt_results: the result of each sequence in `sequences`
    samples: text samples for the report, decoded with the tree method that has the most tokens per
        round. They are stored in the measurement of baseline decoding; None in all others
    replayed: for each greedy output, how many tokens each round would commit with a draft tree, see
        `infer.evaluation.replay`. They are stored in the measurement of baseline decoding; empty in
        all others
    remeasured_prompts: number of prompts that were measured again, because another process slowed
        the first measurement
    """

    variant: DecodingVariant
    sequences: list[Sequence] = field(default_factory=list)
    prompt_results: list[PromptResult] = field(default_factory=list)
    samples: ReportSamples | None = None
    replayed: list[ReplayedSequence] = field(default_factory=list)
    remeasured_prompts: int = 0

    @property
    def seconds(self) -> float:
        """The sum of the decoding times of all prompts, in seconds."""
        return sum(sum(result.seconds) for result in self.prompt_results)

    @property
    def stats(self) -> list[DecodeStats]:
        """The decoding statistics of each sequence."""
        return [sequence.stats for sequence in self.sequences]

    def extend(self, other: "VariantMeasurement") -> None:
        """Append a measurement of the same variant on other prompts."""
        self.sequences += other.sequences
        self.prompt_results += other.prompt_results
        self.samples = self.samples or other.samples
        self.replayed += other.replayed
        self.remeasured_prompts += other.remeasured_prompts

    def find_disturbed_prompts(self) -> list[int]:
        """Return the indices of prompts that took unusually long: their time per token is more than
        MIN_TIME_RATIO_TO_REMEASURE times the median over all prompts.
        """
        seconds_per_token = [
            result.seconds[0] / max(1, result.tokens) for result in self.prompt_results
        ]
        return [
            i
            for i, seconds in enumerate(seconds_per_token)
            if seconds > MIN_TIME_RATIO_TO_REMEASURE * statistics.median(seconds_per_token)
        ]


def merge_measurements(
    measurements_by_group: abc.Iterable[list[VariantMeasurement]],
) -> list[VariantMeasurement]:
    """Merge measurements of the same decoding variants on different prompts.

    measurements_by_group: for each group of prompts, the measurements of all variants. A group is,
        for example, the prompts of one process. A variant that is missing in any group is dropped
    """
    by_variant = []
    for share in measurements_by_group:
        by_variant.append({(each.variant.name, each.variant.budget): each for each in share})
    merged = []
    for key, first in by_variant[0].items():
        if all(key in share for share in by_variant):
            total = VariantMeasurement(first.variant)
            for share in by_variant:
                total.extend(share[key])
            merged.append(total)
    return merged


@dataclass(frozen=True)
class PromptSet:
    """Prompts of an evaluation whose results are reported together, and how they are decoded.

    name: None for the held-out prompts, which are reported first
    prompt_numbers: index of each prompt among all prompts of the evaluation
    time_limit_note: how many prompts were decoded before the time limit; None if all were
    """

    name: str | None
    prompts: list[EvaluationPrompt]
    prompt_numbers: list[int]
    config: EvaluationConfig
    time_limit_note: str | None = None


def list_variants(drafter: Drafter, config: EvaluationConfig) -> list[DecodingVariant]:
    """Return the decoding variants that an evaluation measures. The first is baseline decoding with
    our engine. The others are baseline decoding with transformers, the evaluated methods of
    `TREE_METHODS`, and drafting from n-grams without the drafter.

    Methods that use n-grams are measured with the median node budget only. They read the n-gram
    file `config.ngrams`. If this option is null, DDTree reads the n-gram file beside the drafter's
    weights.
    """
    ngrams = config.ngrams
    budget_for_ngrams = median_budget(config.budgets)
    config_values = asdict(config)
    shared_options = {name: config_values[name] for name in OPTIONS_COPIED_TO_VARIANTS}
    # With max_num_batched_tokens=None, every method uses its whole node budget in each round.
    shared_options |= {
        "loop_period": MAX_LOOP_PERIOD_TOKENS,
        "max_num_seqs": 1,
        "max_num_batched_tokens": None,
    }

    tree_variants = []
    for row in TREE_METHODS.values():
        if not row.in_evaluations:
            continue
        if row.needs_ngrams and not has_ngrams_for(row, drafter, ngrams):
            continue
        options = DecodeOptions(method=row.name, ngrams=NGRAMS_OPTION_NONE, **shared_options)
        if row.needs_ngrams:
            # If evaluation.ngrams is null, method=ddtree makes the engine use the n-gram file
            # beside the drafter's weights.
            method = row.name if ngrams else "ddtree"
            options = replace(options, method=method, ngrams=ngrams)
            budgets = [budget_for_ngrams]
        elif row.max_nodes_for_block is None:
            budgets = config.budgets
        else:
            budgets = [row.max_nodes_for_block(drafter.block_size)]
        for budget in budgets:
            budget_options = replace(options, budget=max(1, budget))
            tree_variants.append(DecodingVariant(row.name, budget, budget_options))

    baseline, *drafting_variants = tree_variants
    transformers_baseline = replace(baseline, name=TRANSFORMERS_BASELINE_METHOD.name)
    if ngrams != NGRAMS_OPTION_NONE and drafter.family is not PROMPT_LOOKUP_FAMILY:
        ngram_file = None if ngrams else drafter.ngram_path
        if not ngrams:
            ngrams = None if ngram_file else NGRAMS_OPTION_CURRENT_SEQUENCE
        options = DecodeOptions(budget=budget_for_ngrams, ngrams=ngrams, **shared_options)
        lookup = PromptLookup(drafter.block_size, ngram_file)
        drafting_variants.append(
            DecodingVariant(NGRAMS_ALONE_TREE_METHOD.name, budget_for_ngrams, options, lookup)
        )
    return [baseline, transformers_baseline, *drafting_variants]


def has_ngrams_for(method: TreeMethod, drafter: Drafter, ngrams: str | None) -> bool:
    """Return whether the n-grams that a tree method needs are available.

    ngrams: the option `ngrams` of EvaluationConfig
    """
    if ngrams is None:
        return method.uses_sequence_ngrams and drafter.default_ngram_path is not None
    return ngrams != NGRAMS_OPTION_NONE and (
        method.uses_sequence_ngrams or ngrams != NGRAMS_OPTION_CURRENT_SEQUENCE
    )


def broadcast_decision(model: AnyTarget, decision: Decision) -> Decision:
    """If the target is sharded over several processes, return the `decision` of the first process
    in all of them. Otherwise return `decision`.

    Processes that share a target compute every forward pass together, so they must make the same
    decisions. Decisions that depend on the time could differ between processes.
    """
    decisions = [decision]
    if cast(Target, model).is_sharded:
        dist.broadcast_object_list(decisions)
    return decisions[0]


def describe_time_limit(minutes: float | None, done: int, total: int) -> str | None:
    """Return a sentence that says how many prompts were decoded before the time limit.

    minutes: the time limit
    done: number of decoded prompts
    total: number of all prompts

    Returns None if all prompts were decoded.
    """
    if done >= total:
        return None
    return f"evaluation.max_minutes={minutes:.3g} had time for {done} of {total} prompts"


def median_budget(budgets: abc.Sequence[int]) -> int:
    """Return the median of the node budgets. For an even number of budgets, return the larger of
    the two middle ones.
    """
    return sorted(budgets)[len(budgets) // 2]


def measure_variants(
    model: AnyTarget,
    drafter: Drafter | None,
    variants: abc.Sequence[DecodingVariant],
    prompts: abc.Sequence[abc.Sequence[int]],
    progress: ProgressCallback = lambda done, total: None,
    prompt_numbers: abc.Sequence[int] | None = None,
    deadline: float = math.inf,
) -> list[VariantMeasurement]:
    """Decode every prompt with every variant, one sequence at a time.

    Each variant has one engine for all prompts, so that CUDA graphs are recorded once. The variant
    that comes first changes from prompt to prompt, so that changes of the machine's speed affect
    all variants equally. At the end, prompts that took unusually long are measured again while
    there is time.

    prompts: token ids of each prompt
    prompt_numbers: index of each prompt among all prompts of the evaluation, from which the
        sampling seed is derived; None means 0, 1, 2, ...
    deadline: a value of time.monotonic(). No prompt is started after this time, except the first

    Returns a measurement for each variant, in the same order.
    """
    device = cast(Target, model).device
    clock = synchronised_clock(device)
    longest_output = max(variant.options.max_new_tokens for variant in variants)
    capacity = max(map(len, prompts), default=0) + longest_output
    numbers = list(range(len(prompts)) if prompt_numbers is None else prompt_numbers)
    engines: dict[int, Engine | None] = {}

    def measure(index: int, number: int, prompt: abc.Sequence[int]) -> VariantMeasurement:
        return measure_prompt(model, engines[index], variants[index], number, list(prompt), clock)

    # The first calls take longer because they compile kernels and record CUDA graphs, so they are
    # not measured.
    for index, variant in enumerate(variants if prompts else ()):
        engines[index] = open_variant_engine(model, drafter, variant, capacity, clock)
        tokens = min(WARMUP_TOKENS_BEFORE_MEASUREMENT, variant.options.max_new_tokens)
        short_options = replace(variant.options, max_new_tokens=tokens)
        short_variant = replace(variant, options=short_options)
        measure_prompt(model, engines[index], short_variant, numbers[0], list(prompts[0]), clock)

    measurements = [VariantMeasurement(variant) for variant in variants]
    for i, (number, prompt) in enumerate(zip(numbers, prompts, strict=True)):
        if i > 0 and broadcast_decision(model, time.monotonic() > deadline):
            break
        for turn in range(len(variants)):
            index = (turn + i) % len(variants)
            measurements[index].extend(measure(index, number, prompt))
        progress(i + 1, len(prompts))

    for index, measurement in enumerate(measurements):
        for i in broadcast_decision(model, measurement.find_disturbed_prompts()):
            if broadcast_decision(model, time.monotonic() > deadline):
                break
            repeated = measure(index, numbers[i], prompts[i])
            measurement.prompt_results[i] = repeated.prompt_results[0]
            measurement.remeasured_prompts += 1
    return measurements


def open_variant_engine(
    model: AnyTarget,
    drafter: Drafter | None,
    variant: DecodingVariant,
    capacity: int,
    clock: abc.Callable[[], float],
) -> Engine | None:
    """Return the engine that decodes a variant; None for `generate` of transformers, which has no
    engine.

    capacity: number of positions in the KV cache
    """
    if variant.name == TRANSFORMERS_BASELINE_METHOD.name:
        return None
    variant_drafter = cast(Drafter | None, variant.drafter or drafter)
    return open_engine(model, variant_drafter, variant.options, capacity, clock)


def measure_prompt(
    model: AnyTarget,
    engine: Engine | None,
    variant: DecodingVariant,
    number: int,
    prompt: list[int],
    clock: abc.Callable[[], float],
) -> VariantMeasurement:
    """Decode one prompt with one variant, and measure the time.

    engine: the result of `open_variant_engine`
    number: index of the prompt in the evaluation, from which the sampling seed is derived
    clock: returns the time in seconds
    """
    options = replace(variant.options, seed=derive_seed(variant.options.seed, number))

    start = clock()
    if engine is None:
        sequence = generate_with_transformers(cast(Target, model), prompt, options)
    else:
        sequence = engine.submit(prompt, options)
        while engine.has_unfinished_sequences:
            engine.step()
    seconds = clock() - start

    loop_tokens = 0
    if sequence.finish_reason == "loop":
        loop_tokens = MIN_LOOP_REPEATS * find_loop_period(
            sequence.ids, len(sequence.ids), MAX_LOOP_PERIOD_TOKENS
        )
    result = PromptResult(
        number=number,
        kind="",
        tokens=sequence.stats.tokens,
        rounds=sequence.stats.rounds,
        seconds=[seconds],
        loop_tokens=loop_tokens,
    )
    return VariantMeasurement(variant, [sequence], [result])


def generate_with_transformers(
    target: Target, prompt: list[int], options: SamplingOptions
) -> Sequence:
    """Generate an output with `generate` of transformers, and return it as a finished sequence.

    The output ends where our engine would end it. Sampled outputs differ from those of our engine,
    because other random numbers are used.
    """
    sampling = {}
    if options.temperature > 0:
        sampling = {
            "temperature": options.temperature,
            "top_k": options.top_k,
            "top_p": options.top_p,
        }
    end_ids = [] if options.ignore_eos else sorted(target.eos_token_ids)
    config = GenerationConfig(
        max_new_tokens=options.max_new_tokens,
        do_sample=options.temperature > 0,
        # `generate` would replace None by the end tokens of the model. To ignore end tokens, give
        # vocab_size, an id that never occurs.
        eos_token_id=end_ids or [target.vocab_size],
        pad_token_id=0,
        repetition_penalty=1.0,
        **sampling,
    )

    def ends_in_loop(ids: torch.Tensor, scores: object, **unused: object) -> torch.Tensor:
        new_ids = ids[0, len(prompt) :].tolist()
        is_loop = bool(new_ids and find_loop_period(new_ids, len(new_ids), options.loop_period))
        return torch.tensor([is_loop], device=ids.device)

    ids = torch.tensor([prompt], device=target.device)
    stopping_criteria = StoppingCriteriaList([ends_in_loop] if options.loop_period else [])
    rng_devices = [target.device] if target.device.type == "cuda" else []
    with torch.random.fork_rng(rng_devices), torch.no_grad():
        torch.manual_seed(options.seed)
        generated = target.model.generate(  # ty: ignore[not-callable]
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            stopping_criteria=stopping_criteria,
        )

    sequence = Sequence(prompt, options)
    new_ids = generated[0, len(prompt) :].tolist()
    length, sequence.finish_reason = find_sequence_end(new_ids, 0, options, target) or (
        len(new_ids),
        "length",
    )
    sequence.ids = new_ids[:length]
    sequence.commits = [1] * length
    sequence.stats.tokens = length
    sequence.stats.rounds = length - 1  # the prefill generates the first token
    sequence.stats.histogram = [length - 1]
    return sequence


def synchronised_clock(device: torch.device) -> abc.Callable[[], float]:
    """Return a clock in seconds that waits for all work on the device before it reads the time."""
    if device.type != "cuda":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock

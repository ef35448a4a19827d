"""Decode the same prompts with several variants in turn, and record outputs and times."""

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
    TextOptions,
)
from infer.drafters.base import Drafter
from infer.drafters.families import PROMPT_LOOKUP_FAMILY
from infer.drafters.lookup import PromptLookup
from infer.engine.repetition import MAX_LOOP_PERIOD_TOKENS, MIN_LOOP_REPEATS, find_loop_period
from infer.engine.sampling import derive_seed
from infer.engine.sequence import DecodeStats, Sequence, find_sequence_end
from infer.evaluation.acceptance import EvaluationPrompt
from infer.evaluation.metrics import REMEASURED_PROMPT_TIME_RATIO
from infer.evaluation.replay import ReplayedSequence
from infer.evaluation.results import TRANSFORMERS_BASELINE, PromptResult
from infer.evaluation.samples import ReportSamples
from infer.targets.target import Target
from infer.trees.methods import NGRAMS_WITHOUT_DRAFTER_METHOD, TREE_METHODS, TreeMethod

# options that EvaluationConfig and DecodeOptions have in common
SHARED_OPTION_NAMES = ("max_new_tokens", "temperature")
WARMUP_TOKENS_BEFORE_MEASUREMENT = 16
ProgressCallback = abc.Callable[[int, int], None]  # called with (prompts done, prompts)
Decision = TypeVar("Decision")


@dataclass(frozen=True)
class DecodingVariant:
    """One way of decoding that is measured."""

    name: str
    budget: int  # drafted nodes per round; for a masked model, states
    options: DecodeOptions
    drafter: Drafter | PromptLookup | None = None  # None: the drafter that is evaluated


@dataclass
class VariantMeasurement:
    """The outputs and times of one variant."""

    variant: DecodingVariant
    sequences: list[Sequence] = field(default_factory=list)
    prompt_results: list[PromptResult] = field(default_factory=list)  # one for each sequence
    # of baseline decoding only: samples of the tree method with the highest acceptance length
    samples: ReportSamples | None = None
    # of baseline decoding only: replays of its greedy outputs with drafts
    replayed: list[ReplayedSequence] = field(default_factory=list)
    # prompts measured again because another process slowed the first measurement
    remeasured_prompts: int = 0

    @property
    def seconds(self) -> float:
        """Seconds of all prompts together."""
        return sum(sum(result.seconds) for result in self.prompt_results)

    @property
    def stats(self) -> list[DecodeStats]:
        """The decoding statistics of each sequence."""
        return [sequence.stats for sequence in self.sequences]

    def extend(self, other: "VariantMeasurement") -> None:
        """Append what was measured of the same variant on other prompts."""
        self.sequences += other.sequences
        self.prompt_results += other.prompt_results
        self.samples = self.samples or other.samples
        self.replayed += other.replayed
        self.remeasured_prompts += other.remeasured_prompts

    def find_disturbed_prompts(self) -> list[int]:
        """Return the indices of the prompts that took more than REMEASURED_PROMPT_TIME_RATIO times
        the median time per token."""
        seconds_per_token = [
            result.seconds[0] / max(1, result.tokens) for result in self.prompt_results
        ]
        return [
            i
            for i, seconds in enumerate(seconds_per_token)
            if seconds > REMEASURED_PROMPT_TIME_RATIO * statistics.median(seconds_per_token)
        ]


def merge_measurements(
    shares: abc.Iterable[list[VariantMeasurement]],
) -> list[VariantMeasurement]:
    """Merge what several processes, or several turns, measured on different prompts. Variants that
    are not in every share are dropped."""
    by_variant = []
    for share in shares:
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
    """Prompts of an evaluation that are reported together, and how they are decoded."""

    name: str | None  # None: the evaluation's own prompts
    prompts: list[EvaluationPrompt]
    prompt_numbers: list[int]  # indices among all prompts of the evaluation
    config: EvaluationConfig
    time_limit_note: str | None = None  # what was left out when evaluation.max_minutes were over


def list_variants(drafter: Drafter, config: EvaluationConfig) -> list[DecodingVariant]:
    """List the variants of an evaluation: our baseline decoding, transformers', the evaluated tree
    methods in the order of their table, and n-grams without the drafter.

    Methods with n-grams are measured with the median budget only. They use the n-gram file of
    `config.continuity`, or else, with DDTree, the one beside the drafter's weights.
    """
    continuity = config.ngrams
    budget_for_ngrams = median_budget(config.budgets)
    config_values = asdict(config)
    shared_options = {name: config_values[name] for name in SHARED_OPTION_NAMES}
    # positions=None: every method gets the budget that is measured
    shared_options |= {
        "loop_period": MAX_LOOP_PERIOD_TOKENS,
        "max_num_seqs": 1,
        "max_num_batched_tokens": None,
    }

    tree_variants = []
    for row in TREE_METHODS.values():
        if not row.in_evaluations:
            continue
        if row.needs_ngrams and not has_ngrams_for(row, drafter, continuity):
            continue
        options = DecodeOptions(method=row.name, ngrams=NGRAMS_OPTION_NONE, **shared_options)
        if row.needs_ngrams:
            # without continuity=, method=ddtree makes the engine use the drafter's n-gram file
            method = row.name if continuity else "ddtree"
            options = replace(options, method=method, ngrams=continuity)
            budgets = [budget_for_ngrams]
        elif row.max_nodes_for_block is None:
            budgets = config.budgets
        else:
            budgets = [row.max_nodes_for_block(drafter.block_size)]
        for budget in budgets:
            budget_options = replace(options, budget=max(1, budget))
            tree_variants.append(DecodingVariant(row.name, budget, budget_options))

    baseline, *drafting_variants = tree_variants
    transformers_baseline = replace(baseline, name=TRANSFORMERS_BASELINE.name)
    if continuity != NGRAMS_OPTION_NONE and drafter.family is not PROMPT_LOOKUP_FAMILY:
        ngram_file = None if continuity else drafter.ngram_path
        if not continuity:
            continuity = None if ngram_file else NGRAMS_OPTION_CURRENT_SEQUENCE
        options = DecodeOptions(budget=budget_for_ngrams, ngrams=continuity, **shared_options)
        lookup = PromptLookup(drafter.block_size, ngram_file)
        drafting_variants.append(
            DecodingVariant(NGRAMS_WITHOUT_DRAFTER_METHOD.name, budget_for_ngrams, options, lookup)
        )
    return [baseline, transformers_baseline, *drafting_variants]


def has_ngrams_for(row: TreeMethod, drafter: Drafter, continuity: str | None) -> bool:
    """Return whether there are n-grams for a tree method that needs them. `continuity`: see
    EvaluationConfig."""
    if continuity is None:
        return row.uses_sequence_ngrams and drafter.ngram_path is not None
    return continuity != NGRAMS_OPTION_NONE and (
        row.uses_sequence_ngrams or continuity != NGRAMS_OPTION_CURRENT_SEQUENCE
    )


def broadcast_decision(model: AnyTarget, decision: Decision) -> Decision:
    """Return the first process's decision if the processes compute every pass of the target
    together (`target.shard`): decisions that depend on a clock must be the same in all of them."""
    decisions = [decision]
    if cast(Target, model).is_sharded:
        dist.broadcast_object_list(decisions)
    return decisions[0]


def describe_time_limit(minutes: float | None, done: int, total: int) -> str | None:
    """Return a sentence about the prompts that the time limit left out, None if it left out
    none."""
    if done >= total:
        return None
    return f"evaluation.max_minutes={minutes:.3g} had time for {done} of {total} prompts"


def median_budget(budgets: abc.Sequence[int]) -> int:
    """Return the median budget; of an even number of budgets, the larger middle one."""
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
    """Decode every prompt with every variant, one sequence at a time, and return a measurement for
    each variant.

    On each prompt another variant begins, so that a noisy machine is equally noisy for all.
    Prompts that were disturbed are measured again while there is time.

    prompts: token ids
    prompt_numbers: indices of the prompts among all prompts of the evaluation; each prompt's
        sampling seed is derived from its number. None: 0, 1, 2, ...
    deadline: value of time.monotonic() after which no prompt but the first is begun
    """
    device = cast(Target, model).device
    clock = synchronised_clock(device)
    longest_output = max(variant.options.max_new_tokens for variant in variants)
    capacity = max(map(len, prompts), default=0) + longest_output
    numbers = list(range(len(prompts)) if prompt_numbers is None else prompt_numbers)

    def measure(
        variant: DecodingVariant, number: int, prompt: abc.Sequence[int]
    ) -> VariantMeasurement:
        return measure_prompt(model, drafter, variant, number, list(prompt), capacity, clock)

    # Warm-up: the first calls pay for allocations and kernels.
    for variant in variants if prompts else ():
        tokens = min(WARMUP_TOKENS_BEFORE_MEASUREMENT, variant.options.max_new_tokens)
        short_options = replace(variant.options, max_new_tokens=tokens)
        measure(replace(variant, options=short_options), numbers[0], prompts[0])

    measurements = [VariantMeasurement(variant) for variant in variants]
    for i, (number, prompt) in enumerate(zip(numbers, prompts, strict=True)):
        if i > 0 and broadcast_decision(model, time.monotonic() > deadline):
            break
        for turn in range(len(variants)):
            measurement = measurements[(turn + i) % len(variants)]
            measurement.extend(measure(measurement.variant, number, prompt))
        progress(i + 1, len(prompts))

    for measurement in measurements:
        for i in broadcast_decision(model, measurement.find_disturbed_prompts()):
            if broadcast_decision(model, time.monotonic() > deadline):
                break
            repeated = measure(measurement.variant, numbers[i], prompts[i])
            measurement.prompt_results[i] = repeated.prompt_results[0]
            measurement.remeasured_prompts += 1
    return measurements


def measure_prompt(
    model: AnyTarget,
    drafter: Drafter | None,
    variant: DecodingVariant,
    number: int,
    prompt: list[int],
    capacity: int,
    clock: abc.Callable[[], float],
) -> VariantMeasurement:
    """Decode one prompt with one variant and measure the time. `number`: the prompt's index, from
    which its seed is derived; `capacity`: positions of the KV cache."""
    options = replace(variant.options, seed=derive_seed(variant.options.seed, number))

    start = clock()
    if variant.name == TRANSFORMERS_BASELINE.name:
        sequence = generate_with_transformers(cast(Target, model), prompt, options)
    else:
        variant_drafter = cast(Drafter | None, variant.drafter or drafter)
        engine = open_engine(model, variant_drafter, options, capacity, clock)
        sequence = engine.submit(prompt, options)
        while engine.busy:
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


def generate_with_transformers(target: Target, prompt: list[int], options: TextOptions) -> Sequence:
    """Continue a prompt with transformers' `generate`, with the same end conditions as the engine.
    Sampled outputs differ from the engine's, as they are drawn with other noise."""
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
        # Without end tokens give an id that cannot occur: `generate` would replace None by the
        # model's own end tokens.
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
    sequence.stats.rounds = length - 1  # the prefill is no round
    sequence.stats.histogram = [length - 1]
    return sequence


def synchronised_clock(device: torch.device) -> abc.Callable[[], float]:
    """Return a clock, in seconds, that synchronises the device before each reading."""
    if device.type != "cuda":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock

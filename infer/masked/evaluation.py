"""Measure the speedup of self speculative decoding on held-out prompts, as in SSD's sections 4.2
and 5.2.

The baseline is step-by-step decoding, which generates one token per forward pass.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from infer.config import EvaluationConfig, SamplingOptions
from infer.evaluation.evaluate import summarise_prompt_set
from infer.evaluation.measurement import (
    DecodingVariant,
    ProgressCallback,
    PromptSet,
    describe_time_limit,
    measure_variants,
)
from infer.evaluation.results import Evaluation, MethodResult
from infer.masked.config import MaskedConfig, MaskedOptions, merge_masked_options
from infer.masked.model import MaskedModel
from infer.masked.sequence import MaskedDecodeStats
from infer.targets.target import Target

# Numbers of drafted tokens per round. With n drafted tokens, a round computes n + 1 states (partly
# masked copies of the sequence).
EVALUATED_DRAFT_LENGTHS = (1, 2, 3, 4, 5)
# The last way of decoding that is measured is 'guided' with the longest drafts and this many states
# per round.
EVALUATED_STATES_OF_GUIDED_ROUND = 16


def make_evaluation_options(evaluation: EvaluationConfig, masked: MaskedConfig) -> MaskedOptions:
    """Return the decoding options of an evaluation. The output length is rounded up to whole
    blocks, and outputs continue after end tokens, so that all outputs have the same length."""
    text = SamplingOptions(
        max_new_tokens=masked.count_output_positions(evaluation.max_new_tokens),
        temperature=evaluation.temperature,
        ignore_eos=True,
    )
    return merge_masked_options(text, replace(masked, max_num_seqs=1))


def make_variants(options: MaskedOptions) -> list[DecodingVariant]:
    """Return the ways of decoding that an evaluation measures: first the baseline, which decodes
    step by step, then each method of self speculative decoding at each of EVALUATED_DRAFT_LENGTHS,
    and last the method 'guided' with more drafted copies of the sequence per round."""
    # DecodingVariant declares the option class of causal targets. The cast permits another class.
    make_variant = cast(Callable[..., DecodingVariant], DecodingVariant)
    variants = [make_variant("step by step", 1, replace(options, method="steps"))]
    for length in EVALUATED_DRAFT_LENGTHS:
        states = length + 1
        for method in ("greedy", "mixed", "guided"):
            method_options = replace(options, method=method, draft_length=length, budget=states)
            variants.append(make_variant(f"{method} {length}", states, method_options))

    length = max(EVALUATED_DRAFT_LENGTHS)
    states = EVALUATED_STATES_OF_GUIDED_ROUND
    guided_options = replace(options, method="guided", draft_length=length, budget=states)
    variants.append(make_variant(f"guided {length}, {states} states", states, guided_options))
    return variants


def evaluate_masked(
    model: MaskedModel,
    prompts: Sequence[Sequence[int]],
    evaluation: EvaluationConfig,
    masked: MaskedConfig,
    progress: ProgressCallback = lambda done, total: None,
) -> Evaluation:
    """Measure the speed of decoding prompts step by step (the baseline: one token per forward
    pass), and with each method of self speculative decoding at each of EVALUATED_DRAFT_LENGTHS.
    After `evaluation.max_minutes`, the remaining prompts are left out."""
    options = make_evaluation_options(evaluation, masked)
    deadline = time.monotonic() + 60 * (evaluation.max_minutes or math.inf)
    target = cast(Target, model)
    measured = measure_variants(
        target, None, make_variants(options), prompts, progress, deadline=deadline
    )
    cut = describe_time_limit(evaluation.max_minutes, len(measured[0].sequences), len(prompts))
    prompt_set = PromptSet(None, [], [], cast(EvaluationConfig, options), cut)
    result = summarise_prompt_set(target, None, prompt_set, measured)
    methods = [
        recompute_tau(method, cast(list[MaskedDecodeStats], variant.stats))
        for method, variant in zip(result.methods, measured, strict=True)
    ]
    return replace(result, methods=methods)


def recompute_tau(method: MethodResult, stats: Sequence[MaskedDecodeStats]) -> MethodResult:
    """Return `method` with τ, the average number of tokens per round, computed again. The τ in
    `method` assumes that the prefill yields the first token, but the rounds of a masked model write
    all tokens."""
    tokens = sum(sequence_stats.tokens for sequence_stats in stats)
    rounds = sum(sequence_stats.rounds for sequence_stats in stats)
    return replace(method, tau=tokens / rounds, tau_interval=None)

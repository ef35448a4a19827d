"""What self speculative decoding saves on held-out prompts: the figures of SSD's sections 4.2 and
5.2.

Every number comes from decoding. Step-by-step decoding is the first method.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from infer.config import EvaluationConfig, TextOptions
from infer.evaluation.evaluate import summarise_part
from infer.evaluation.measuring import Progress, PromptSet, Variant, cut_at, measure
from infer.evaluation.results import Evaluation
from infer.masked.config import MaskedConfig, MaskedOptions, masked_options
from infer.masked.model import MaskedModel

LENGTHS = (1, 2, 3, 4, 5)  # of drafts, each with as many states as a chain has
NODES = 16  # states of a guided round with the longest drafts, the last method


def evaluation_options(evaluation: EvaluationConfig, masked: MaskedConfig) -> MaskedOptions:
    """Return how an evaluation's texts are decoded: whole blocks, and on past end tokens, so that
    all texts are equally long."""
    text = TextOptions(
        max_new_tokens=masked.room(evaluation.max_new_tokens),
        temperature=evaluation.temperature,
        ignore_eos=True,
    )
    return masked_options(text, replace(masked, max_num_seqs=1))


def evaluate_masked(
    model: MaskedModel,
    prompts: Sequence[Sequence[int]],
    evaluation: EvaluationConfig,
    masked: MaskedConfig,
    progress: Progress = lambda done, total: None,
) -> Evaluation:
    """Decode every prompt step by step and with drafts of every length and order, as many as there
    is time for."""
    options = evaluation_options(evaluation, masked)
    drafts = [
        (method, length, length + 1)
        for length in LENGTHS
        for method in ("greedy", "mixed", "guided")
    ]
    variants = [Variant("step by step", 1, replace(options, method="steps"))]
    for method, length, states in [*drafts, ("guided", max(LENGTHS), NODES)]:
        way = replace(options, method=method, draft_length=length, budget=states)
        variants.append(
            Variant(f"{method} {length}" + f", {states} states" * (states == NODES), states, way)
        )
    until = time.monotonic() + 60 * (evaluation.max_minutes or math.inf)
    measured = measure(model, None, variants, prompts, progress, until=until)
    cut = cut_at(evaluation.max_minutes, len(measured[0].texts), len(prompts))
    found = summarise_part(model, None, PromptSet(None, [], [], options, cut), measured)
    methods = [
        replace(  # all tokens are written by rounds, none by a prefill
            method,
            tau=sum(text.tokens for text in one.stats) / sum(text.rounds for text in one.stats),
            tau_interval=None,
        )
        for method, one in zip(found.methods, measured, strict=True)
    ]
    return replace(found, methods=methods)

"""What self speculative decoding saves on held-out prompts: the figures of SSD's sections 4.2 and 5.2.

Every number comes from decoding. Step-by-step decoding is the first method.
"""

from collections.abc import Sequence
from dataclasses import replace

from infer.config import EvaluationConfig, TextOptions
from infer.evaluation.evaluate import describe_device, method_result
from infer.evaluation.measuring import Measured, Progress, Variant, measure
from infer.evaluation.results import Evaluation, MaskedDetails, MethodResult
from infer.evaluation.tables import DASH
from infer.masked.config import MaskedConfig, MaskedOptions, masked_options
from infer.masked.model import MaskedModel

LENGTHS = (1, 2, 3, 4, 5)  # of drafts, each with as many states as a chain has
NODES = 16  # states of a guided round with the longest drafts, the last method


def evaluation_options(evaluation: EvaluationConfig, masked: MaskedConfig) -> MaskedOptions:
    """Return how an evaluation's texts are decoded: whole blocks, and on past end tokens, so that all texts are equally
    long."""
    text = TextOptions(
        max_new_tokens=masked.room(evaluation.max_new_tokens),
        temperature=evaluation.temperature,
        seed=evaluation.seed,
        ignore_eos=True,
    )
    return masked_options(text, replace(masked, rows=evaluation.rows))


def evaluate_masked(
    model: MaskedModel,
    prompts: Sequence[Sequence[int]],
    options: MaskedOptions,
    progress: Progress = lambda done, total: None,
) -> Evaluation:
    """Decode every prompt step by step and with drafts of every length and order. `options` are those that
    `evaluation_options` makes."""
    drafts = [(order, length, length + 1) for length in LENGTHS for order in ("greedy", "mixed", "guided")]
    variants = [Variant("steps", 1, replace(options, method="steps"))] + [
        Variant(order, states, replace(options, method="ssd", order=order, draft_length=length, nodes=states))
        for order, length, states in [*drafts, ("guided", max(LENGTHS), NODES)]
    ]
    measured = measure(model, None, variants, prompts, progress)
    return Evaluation(
        target=model.name,
        device=describe_device(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        prompts=len(prompts),
        rows=options.rows,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        accuracy=[],
        methods=[masked_result(one, measured[0]) for one in measured],
        samples=[],
        masked=MaskedDetails(options.block_length, options.cache),
    )


def masked_result(measured: Measured, plain: Measured) -> MethodResult:
    """Return one row of the table; `tokens` are those before the first end token."""
    options, rounds, tokens = measured.variant.options, measured.total("rounds"), measured.total("valid")
    same = sum(text.writes == other.writes for text, other in zip(measured.texts, plain.texts, strict=True))
    return replace(
        method_result(measured, plain, {}, plain.prompt_results({})),
        tau=measured.total("written") / rounds,
        tokens=tokens,
        tokens_per_second=tokens / measured.seconds,
        identical=same == len(plain.texts),
        same=same,
        draft_length=None if options.method == "steps" else options.draft_length,
        states=measured.total("states") / rounds,
        tau_interval=None,  # of tokens a round behind the prefill, which a masked model has not
        limit=None,
    )


def masked_table(evaluation: Evaluation) -> str:
    """Return the evaluation for a terminal: one line a method (SSD's table 3)."""
    details, plain = evaluation.masked, evaluation.methods[0]
    lines = [
        f"{evaluation.device}, {evaluation.dtype}: {evaluation.prompts} prompts, {evaluation.rows} at a time, "
        f"{evaluation.max_new_tokens} tokens each, {plain.tokens / evaluation.prompts:.1f} of them before an end",
        f"blocks of {details.block_length}, cache={details.cache}, temperature {evaluation.temperature:g}",
        "",
        "drafts  order      states  passes  step reduction  tokens/s  speedup  differ",
    ]
    for method in evaluation.methods:
        lines.append(
            f"{method.draft_length or DASH!s:<8}{method.name:<10}{method.states:>7.1f}{method.rounds:>8}"
            f"{evaluation.step_reduction(method):>16.1%}{method.tokens_per_second:>10.0f}{method.speedup:>8.2f}x"
            f"{evaluation.prompts - method.same:>8}"
        )
    return "\n".join(lines)

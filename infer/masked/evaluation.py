"""What self speculative decoding saves on held-out prompts: the figures of SSD's sections 4.2, 5.1 and 5.2.

Every number comes from decoding. Step-by-step decoding is the first method; its trace bounds what any drafts could
save.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from infer.config import EvaluationConfig, TextOptions
from infer.engine.sampling import derived_seed
from infer.evaluation.evaluate import describe_device, method_result
from infer.evaluation.measuring import Measured, Progress, Variant, measure
from infer.evaluation.results import Evaluation, MaskedDetails, MethodResult
from infer.evaluation.tables import DASH
from infer.masked.config import MaskedConfig, MaskedOptions, masked_options
from infer.masked.drafting import Guesses
from infer.masked.engine import MaskedEngine
from infer.masked.model import MaskedModel
from infer.masked.sequence import MaskedSequence

RANKS = 5  # likeliest tokens of a position that the limits consider (table 2)


@dataclass(frozen=True)
class Trace:
    """A text that was written step by step, and what a draft could have known after each step."""

    text: MaskedSequence
    guesses: list[Guesses]


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
    lengths: Sequence[int] = (1, 2, 3, 4, 5),
    orders: Sequence[str] = ("greedy", "mixed", "tree", "guided"),
    nodes: int = 16,
    progress: Progress = lambda done, total: None,
) -> Evaluation:
    """Decode every prompt step by step and with drafts of every length and order. `options` are those that
    `evaluation_options` makes; `nodes`: states a round of the trees with the longest drafts."""
    measured = measure(model, None, masked_variants(options, lengths, orders, nodes), prompts, progress)
    traces = [
        trace(model, prompt, replace(options, seed=derived_seed(options.seed, number)))
        for number, prompt in enumerate(prompts)
    ]
    steps = measured[0].total("written")
    limits = {
        str(length): [
            1 - sum(fewest_passes(one, options, length, ranks) for one in traces) / steps
            for ranks in range(1, RANKS + 1)
        ]
        for length in lengths
    }
    return masked_evaluation(model, len(prompts), options, measured, limits)


def masked_evaluation(
    model: MaskedModel,
    prompts: int,
    options: MaskedOptions,
    measured: Sequence[Measured],
    limits: dict[str, list[float]],
) -> Evaluation:
    """Return what was measured on so many prompts, the first method the one that the others are compared with."""
    return Evaluation(
        target=model.name,
        device=describe_device(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        prompts=prompts,
        rows=options.rows,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        accuracy=[],
        methods=[masked_result(one, measured[0]) for one in measured],
        samples=[],
        masked=MaskedDetails(options.block_length, options.cache, options.refresh, limits),
    )


def masked_variants(options: MaskedOptions, lengths: Sequence[int], orders: Sequence[str], nodes: int) -> list[Variant]:
    """Return step by step, then drafts of every length: a chain, swapped drafts, trees of as many states as either;
    then trees of `nodes` states with the longest drafts; then drafts whose length follows their probability."""
    ssd = replace(options, method="ssd")
    drafts = [
        (order, length, 2 * length if order == "tree" else length + 1)  # states: as mixed, as greedy
        for length in lengths
        for order in orders
    ]
    trees = [order for order in orders if order in ("tree", "guided")]
    drafts += [(order, max(lengths), nodes) for order in trees]
    drafts += [(order, "auto", ssd.nodes) for order in ("greedy", *trees[-1:])]
    return [Variant("steps", 1, replace(options, method="steps"))] + [
        Variant(order, states, replace(ssd, order=order, draft_length=length, nodes=states))
        for order, length, states in drafts
    ]


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


def trace(model: MaskedModel, prompt: Sequence[int], options: MaskedOptions) -> Trace:
    """Decode step by step and note what a draft could have known. Slower than decoding: for limits, not for times."""
    steps = replace(options, method="steps", rows=1)
    engine = MaskedEngine(model, steps, len(prompt) + options.max_new_tokens, ranks=RANKS)
    text, guesses = engine.submit(list(prompt), steps), []
    while engine.busy:
        engine.step()
        guesses.append(dict(text.guesses))
    return Trace(text, guesses)


def full_steps(options: MaskedOptions) -> list[bool]:
    """Return which steps of a text are full passes, which no draft may reach beyond."""
    length = options.max_new_tokens
    if options.cache == "none":
        return [False] * length
    full, since = [], options.refresh
    for at in range(length):
        full.append(at % options.block_length == 0 or since >= options.refresh)
        since = 1 if full[-1] else since + 1
    return full


def fewest_passes(steps: Trace, options: MaskedOptions, draft_length: int, ranks: int) -> int:
    """Return the fewest passes that SSD can take, whatever states it computes, when drafts are among the `ranks`
    likeliest tokens of the pass before (section 5.1). Rounds may end anywhere, so this is a bound and no estimate."""
    full, start, length = full_steps(options), len(steps.text.prompt), options.max_new_tokens
    passes = [0] * (length + 1)
    for at in reversed(range(length)):
        passes[at] = 1 + passes[at + 1]
        for drafted in range(1, draft_length + 1):
            step = at + drafted - 1  # whose write is the next draft; the step after it needs a computed state
            if at == 0 or step + 1 >= length or full[step + 1]:
                break
            position, token = steps.text.writes[step]
            if token not in steps.guesses[at - 1][start + position].tokens[:ranks]:
                break
            passes[at] = min(passes[at], 1 + passes[step + 2])
    return passes[0]


def masked_table(evaluation: Evaluation) -> str:
    """Return the evaluation for a terminal: one line a method, then the limits (SSD's tables 3 and 2)."""
    details, plain = evaluation.masked, evaluation.methods[0]
    lines = [
        f"{evaluation.device}, {evaluation.dtype}: {evaluation.prompts} prompts, {evaluation.rows} at a time, "
        f"{evaluation.max_new_tokens} tokens each, {plain.tokens / evaluation.prompts:.1f} of them before an end",
        f"{how_cached(details)}, temperature {evaluation.temperature:g}",
        "",
        "drafts  order      states  passes  step reduction  tokens/s  speedup  differ",
    ]
    for method in evaluation.methods:
        lines.append(
            f"{method.draft_length or DASH!s:<8}{method.name:<10}{method.states:>7.1f}{method.rounds:>8}"
            f"{evaluation.step_reduction(method):>16.1%}{method.tokens_per_second:>10.0f}{method.speedup:>8.2f}x"
            f"{evaluation.prompts - method.same:>8}"
        )
    lines += ["", "Limit of the step reduction when drafts are among the model's k likeliest tokens of a position:", ""]
    lines.append(f"{'drafts':<8}" + "".join(f"{f'k = {k}':>9}" for k in range(1, RANKS + 1)) + f"{'all right':>11}")
    for length, limits in details.limits.items():
        bound = int(length) / (int(length) + 1)
        lines.append(f"{length:<8}" + "".join(f"{x:>9.1%}" for x in limits) + f"{bound:>11.1%}")
    return "\n".join(lines)


def how_cached(details: MaskedDetails) -> str:
    """Return the blocks and what is kept of keys and values, in words."""
    policy = "no cache" if details.cache == "none" else f"dual cache, refresh {details.refresh}"
    return f"blocks of {details.block_length}, {policy}"

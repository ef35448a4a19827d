"""What self speculative decoding saves on held-out prompts: the tables of SSD's sections 4.2, 5.1 and 5.2.

Every number comes from decoding; step by step is decoded first, and its trace says what no drafting could beat.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from infer.config import DecodeOptions, EvaluationConfig, MaskedConfig
from infer.evaluation.evaluate import describe_device, synchronised_clock
from infer.masked.drafting import Guesses, Plan
from infer.masked.engine import MaskedEngine
from infer.masked.model import MaskedModel
from infer.masked.sequence import MaskedText

RANKS = 5  # likeliest tokens of a position that the limits look at (table 2)


@dataclass
class Way:
    """One way of decoding, and what came of it on all prompts."""

    name: str
    options: DecodeOptions
    texts: list[MaskedText] = field(default_factory=list)
    seconds: float = 0.0

    def total(self, name: str) -> float:
        """The sum of a statistic over the texts."""
        return sum(getattr(text.stats, name) for text in self.texts)


@dataclass(frozen=True)
class Traced:
    """A text that was written step by step, and what a draft could have known after each step."""

    text: MaskedText
    said: list[Guesses]


def masked_options(evaluation: EvaluationConfig, masked: MaskedConfig) -> DecodeOptions:
    """How an evaluation's texts are decoded: whole blocks, and on past end tokens, so that all texts are as long."""
    options = DecodeOptions(
        method="ssd",
        temperature=evaluation.temperature,
        seed=evaluation.seed,
        rows=evaluation.rows,
        ignore_eos=True,
        block_length=masked.block_length,
        cache=masked.cache,
        refresh=masked.refresh,
    )
    return replace(options, max_new_tokens=options.room(evaluation.max_new_tokens))


def full_steps(options: DecodeOptions) -> list[bool]:
    """Which steps of a text are full passes that a draft may not reach beyond."""
    length = options.max_new_tokens
    if options.cache == "none":
        return [False] * length
    full, since = [], options.refresh
    for at in range(length):
        full.append(at % options.block_length == 0 or since >= options.refresh)
        since = 1 if full[-1] else since + 1
    return full


def fewest_passes(steps: Traced, options: DecodeOptions, draft_length: int, ranks: int) -> int:
    """Passes that SSD cannot go below, whatever states it computes, when drafts are among the `ranks` likeliest tokens
    of the pass before (section 5.1), from a trace of step-by-step decoding. Where a round ends is free, so that this is
    a bound and no estimate."""
    full, start, length = full_steps(options), len(steps.text.prompt), options.max_new_tokens
    passes = [0] * (length + 1)
    for at in reversed(range(length)):
        passes[at] = 1 + passes[at + 1]
        for drafted in range(1, draft_length + 1):
            step = at + drafted - 1  # whose write is the next draft; the step behind it needs a computed state
            if at == 0 or step + 1 >= length or full[step + 1]:
                break
            position, token = steps.text.writes[step]
            if token not in steps.said[at - 1][start + position].tokens[:ranks]:
                break
            passes[at] = min(passes[at], 1 + passes[step + 2])
    return passes[0]


def run(model: MaskedModel, prompts: Sequence[Sequence[int]], way: Way, clock: Callable[[], float]) -> None:
    """Decodes prompts in one way, `options.rows` side by side."""
    began, longest = clock(), max(map(len, prompts)) + way.options.max_new_tokens
    engine = MaskedEngine(model, replace(way.options, rows=min(way.options.rows, len(prompts))), longest, clock)
    way.texts += [engine.submit(list(prompt), way.options) for prompt in prompts]
    while engine.busy:
        engine.step()
    way.seconds += clock() - began


def measure(
    model: MaskedModel,
    prompts: Sequence[Sequence[int]],
    ways: Sequence[Way],
    options: DecodeOptions,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Way:
    """Decodes every prompt step by step and in every way, in turns, so that a noisy machine is equally noisy for all.
    Returns step by step; the ways hold their texts."""
    clock = synchronised_clock(model.device)
    plain = Way("steps", replace(options, method="steps"))
    rows = max(way.options.rows for way in (plain, *ways))
    for way in (plain, *ways):  # warm-up: first calls pay for allocations and kernels
        short = replace(way.options, max_new_tokens=options.block_length)
        run(model, prompts[:rows], Way(way.name, short), clock)
    for first in range(0, len(prompts), rows):
        for way in (plain, *ways):
            run(model, prompts[first : first + rows], way, clock)
        progress(min(first + rows, len(prompts)), len(prompts))
    return plain


def traced(model: MaskedModel, prompt: Sequence[int], options: DecodeOptions) -> Traced:
    """Step by step, with what a draft could have known. Slower: for limits, not for times."""
    steps = replace(options, method="steps", rows=1)
    engine = MaskedEngine(model, steps, len(prompt) + options.max_new_tokens, ranks=RANKS)
    text, said = engine.submit(list(prompt), steps), []
    while engine.busy:
        engine.step()
        said.append(dict(text.guesses))
    return Traced(text, said)


def ways_of(options: DecodeOptions, lengths: Sequence[int], orders: Sequence[str], nodes: int) -> list[Way]:
    """Drafts of every length: a chain, swapped drafts, trees of as many states as either; for the longest drafts trees
    of `nodes` states; and what is as long as it is likely."""
    ssd = replace(options, method="ssd")
    ways = []
    for length in lengths:
        for order in orders:
            states = 2 * length if order == "tree" else length + 1  # as mixed, as greedy
            ways.append(Way(order, replace(ssd, order=order, draft_length=length, nodes=states)))
    trees = [order for order in orders if order in ("tree", "guided")]
    ways += [Way(order, replace(ssd, order=order, draft_length=max(lengths), nodes=nodes)) for order in trees]
    return ways + [Way(order, replace(ssd, order=order, draft_length="auto")) for order in ("greedy", *trees[-1:])]


def smallest_gaps(traces: Sequence[Traced], options: DecodeOptions) -> tuple[float, float]:
    """How near a step ever came to a tie: between the two surest positions of a block (log-odds), and between the two
    likeliest tokens of a position (log-probability). Rounding in another batch shape must stay below these."""
    positions, tokens = math.inf, math.inf
    for trace in traces:
        start = len(trace.text.prompt)
        left = list(range(start, start + options.max_new_tokens))
        for said, (position, _) in zip(trace.said, trace.text.writes, strict=True):
            open_ = Plan(left, start, options.block_length, 0).open(frozenset())
            guesses = [said[position] for position in open_]
            tokens = min(tokens, *(guess.log_shares[0] - guess.log_shares[1] for guess in guesses))
            surest = sorted((guess.confidence for guess in guesses), reverse=True)
            positions = min([positions, *(a - b for a, b in zip(surest[:1], surest[1:], strict=False))])
            left.remove(start + position)
    return positions, tokens


def evaluate_masked(
    model: MaskedModel,
    prompts: Sequence[Sequence[int]],
    options: DecodeOptions,
    lengths: Sequence[int] = (1, 2, 3, 4, 5),
    orders: Sequence[str] = ("greedy", "mixed", "tree", "guided"),
    nodes: int = 16,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict:
    """Every prompt in every way: what `table` prints. The options are such as `masked_options` makes."""
    ways = ways_of(options, lengths, orders, nodes)
    plain = measure(model, prompts, ways, options, progress)
    traces = [traced(model, prompt, options) for prompt in prompts]
    all_steps = plain.total("written")
    rows = []
    for way in ways:
        passes, seconds = way.total("rounds"), way.seconds
        histogram = [sum(counts) for counts in zip(*(text.stats.histogram for text in way.texts), strict=True)]
        rows.append(
            {
                "name": way.name,
                "draft_length": way.options.draft_length,
                "states": way.total("states") / passes,
                "passes": passes,
                "step_reduction": 1 - passes / all_steps,
                "histogram": histogram,
                "seconds": seconds,
                "tokens_per_second": way.total("valid") / seconds,
                "speedup": plain.seconds / seconds,
                "differ": sum(text.writes != other.writes for text, other in zip(way.texts, plain.texts, strict=True)),
            }
        )
    limits = {
        length: [
            1 - sum(fewest_passes(text, options, length, ranks) for text in traces) / all_steps
            for ranks in range(1, RANKS + 1)
        ]
        for length in lengths
    }
    return {
        "model": model.name,
        "device": describe_device(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "prompts": len(prompts),
        "rows": options.rows,
        "length": options.max_new_tokens,
        "block_length": options.block_length,
        "cache": options.cache,
        "refresh": options.refresh,
        "temperature": options.temperature,
        "steps": all_steps,
        "gaps": smallest_gaps(traces, options),
        "valid": plain.total("valid"),
        "tokens_per_second": plain.total("valid") / plain.seconds,
        "ways": rows,
        "limits": limits,
    }


def table(result: dict) -> str:
    """The ways of decoding, then the limits (tables 3 and 2 of the paper)."""
    policy = "no cache" if result["cache"] == "none" else f"dual cache, refresh {result['refresh']}"
    plain = {"draft_length": "-", "name": "steps", "states": 1, "passes": result["steps"], "step_reduction": 0}
    plain |= {"tokens_per_second": result["tokens_per_second"], "speedup": 1, "differ": 0}
    lines = [
        f"{result['device']}, {result['dtype']}: {result['prompts']} prompts, {result['rows']} at a time, "
        f"{result['length']} tokens each, {result['valid'] / result['prompts']:.1f} of them before an end",
        f"blocks of {result['block_length']}, {policy}, temperature {result['temperature']:g}",
        "",
        "drafts  order      states  passes  step reduction  tokens/s  speedup  differ",
    ]
    for way in (plain, *result["ways"]):
        lines.append(
            f"{way['draft_length']!s:<8}{way['name']:<10}{way['states']:>7.1f}{way['passes']:>8}"
            f"{way['step_reduction']:>16.1%}{way['tokens_per_second']:>10.0f}{way['speedup']:>8.2f}x{way['differ']:>8}"
        )
    lines += ["", "Limit of the step reduction when drafts are among the model's k likeliest tokens of a position:", ""]
    lines.append(f"{'drafts':<8}" + "".join(f"{f'k = {k}':>9}" for k in range(1, RANKS + 1)) + f"{'all right':>11}")
    for length, limits in result["limits"].items():
        lines.append(f"{length:<8}" + "".join(f"{x:>9.1%}" for x in limits) + f"{length / (length + 1):>11.1%}")
    lines += ["", "Nearest to a tie: {:.1e} between positions, {:.1e} between tokens".format(*result["gaps"])]
    return "\n".join(lines)

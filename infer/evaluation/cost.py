"""What an evaluation will cost, measured from a few rounds of every method, and its limit: `evaluation.minutes`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from infer.drafters.base import Drafter
from infer.evaluation.measuring import SLOW, PromptSet, Variant, measure, variants
from infer.evaluation.others import OTHERS
from infer.targets.target import Target
from infer.utils.progress import duration

SMALL = 2_000  # tokens of all methods together below which costs are not worth measuring
FIRST, LATER = 4, 16  # tokens of the two texts that a method's cost is measured by
SHORTEST = 64  # tokens to which answers are cut before prompts are left out


@dataclass(frozen=True)
class Cost:
    """Seconds that a method takes for prompts side by side."""

    fixed: float
    token: float  # of an answer

    def of(self, tokens: int) -> float:
        return self.fixed + tokens * self.token


@dataclass(frozen=True)
class Limits:
    """What of an evaluation is decoded."""

    tokens: int  # of an answer at most
    share: float  # of every part's prompts
    seconds: float  # that all as asked would take


def limits_of(
    target: Target, drafter: Drafter, parts: Sequence[PromptSet], others: bool = False, processes: int = 1
) -> Limits | None:
    """Return what fits into `evaluation.minutes`, shorter answers rather than fewer prompts; None for an evaluation so
    small that it is not worth asking. `processes` share the prompts."""
    config = parts[0].config
    every = [variants(target, part.drafter or drafter, part.config, others) for part in parts]
    prompts = [len(part.prompts) * part.config.repeats for part in parts]
    tokens = sum(count * len(methods) for count, methods in zip(prompts, every, strict=True)) * config.max_new_tokens
    if tokens < SMALL:
        return None
    costs = costs_of(target, drafter, every[0], [prompt.ids for prompt in parts[0].prompts[: config.rows]])
    total = Cost(0.0, 0.0)
    for i, (count, methods) in enumerate(zip(prompts, every, strict=True)):
        batches = -(-count // (config.rows * processes))
        for one in methods:
            cost = costs.get((one.name, one.budget))
            if cost is not None and not (i and is_slow(one, cost, costs["plain", 0])):
                total = Cost(total.fixed + batches * cost.fixed, total.token + batches * cost.token)
    return within(total, config.max_new_tokens, None if config.minutes is None else 60 * config.minutes)


def within(total: Cost, tokens: int, limit: float | None) -> Limits:
    """Return what of an evaluation of this cost and length of answers fits into so many seconds."""
    seconds = total.of(tokens)
    if limit is None or seconds <= limit:
        return Limits(tokens, 1.0, seconds)
    fitting = max(min(SHORTEST, tokens), int((limit - total.fixed) / total.token))
    return Limits(fitting, min(1.0, limit / total.of(fitting)), seconds)


def costs_of(
    target: Target, drafter: Drafter, methods: Sequence[Variant], prompts: Sequence[Sequence[int]]
) -> dict[tuple[str, int], Cost]:
    """Return the costs of methods by name and budget, from two short texts behind a warm-up."""

    def seconds(tokens: int) -> list[float]:
        options = {"max_new_tokens": tokens, "ignore_eos": True, "loop_period": 0}
        short = [replace(one, options=replace(one.options, **options)) for one in methods]
        return [one.seconds for one in measure(target, drafter, short, prompts)]

    first, later = seconds(FIRST), seconds(LATER)
    costs = {}
    for one, early, late in zip(methods, first, later, strict=True):
        token = max((late - early) / (LATER - FIRST), late / LATER / 8)  # some, whatever the clock says
        costs[one.name, one.budget] = Cost(max(0.0, late - LATER * token), token)
    return costs


def is_slow(one: Variant, cost: Cost, plain: Cost) -> bool:
    """Return whether it is a plain decoder of transformers that evaluations leave out behind their first part."""
    return one.name in OTHERS and not OTHERS[one.name].row.drafts and cost.token > SLOW * plain.token


def fit(parts: Sequence[PromptSet], limits: Limits | None, say: Callable[[str], None]) -> list[PromptSet]:
    """Return the parts within the limits, and say what they will cost and what is left out."""
    if limits is None:
        return list(parts)
    config, prompts = parts[0].config, sum(len(part.prompts) for part in parts)
    asked = f"{prompts} prompts, answers of {config.max_new_tokens} tokens"
    if limits.share == 1 and limits.tokens == config.max_new_tokens:
        say(f"evaluation: {asked}: about {duration(limits.seconds)}")
        return list(parts)
    cut = []
    for part in parts:
        few = slice(max(1, int(limits.share * len(part.prompts))))
        own = replace(part.config, max_new_tokens=limits.tokens)
        cut.append(replace(part, prompts=part.prompts[few], numbers=part.numbers[few], config=own))
    say(
        f"evaluation: {asked} would take about {duration(limits.seconds)}, more than evaluation.minutes="
        f"{config.minutes:g}: {sum(len(part.prompts) for part in cut)} prompts, answers of {limits.tokens} tokens"
    )
    return cut

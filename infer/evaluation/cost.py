"""What an evaluation will cost, measured from a few rounds of every method, and its limit:
`evaluation.minutes`. Question sets and masked models, whose answers are not shortened, are asked until
it is over."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from infer.drafters.base import Drafter
from infer.evaluation.measuring import PromptSet, measure, synchronised_clock, variants
from infer.evaluation.replay import replay_trees
from infer.targets.target import Target
from infer.utils.progress import duration

SMALL = 2_000  # tokens of all methods together below which costs are not worth measuring
FIRST, LATER = 4, 16  # tokens of the two texts that costs are measured by
SHORTEST = 64  # tokens to which answers are cut before prompts are left out


@dataclass(frozen=True)
class Limits:
    """What of an evaluation is decoded."""

    tokens: int  # of an answer at most
    share: float  # of every part's prompts
    seconds: float  # that all as asked would take


def limits_of(target: Target, drafter: Drafter, parts: Sequence[PromptSet], processes: int = 1) -> Limits | None:
    """Return what fits into `evaluation.minutes`, shorter answers rather than fewer prompts; None for
    an evaluation so small that it is not worth asking. `processes` share the prompts."""
    config, methods, clock = parts[0].config, variants(drafter, parts[0].config), synchronised_clock(target.device)
    # transformers' plain decoding is mostly too slow to be measured behind the first part
    counts = [len(variants(drafter, part.config)) - (part is not parts[0]) for part in parts]
    answers = sum(len(part.prompts) * count for part, count in zip(parts, counts, strict=True))
    if answers * config.max_new_tokens < SMALL:
        return None

    def seconds(tokens: int) -> float:
        options = {"max_new_tokens": tokens, "ignore_eos": True, "loop_period": 0}
        short = [replace(one, options=replace(one.options, **options)) for one in methods]
        measured = measure(target, drafter, short, [parts[0].prompts[0].ids])
        began = clock()
        replay_trees(target, drafter, measured[0].texts, config)
        replayed = (clock() - began) * len(parts[0].prompts) * len(methods) / answers  # of the first part alone
        return sum(one.seconds for one in measured) + replayed

    first, later = seconds(FIRST), seconds(LATER)
    token = max((later - first) / (LATER - FIRST), later / LATER / 8)  # some, whatever the clock says
    turns = answers / len(methods) / processes  # of all methods
    fixed = turns * max(0.0, later - LATER * token)
    return within(fixed, turns * token, config.max_new_tokens, config.minutes)


def within(fixed: float, token: float, tokens: int, minutes: float | None) -> Limits:
    """Return what of an evaluation that takes `fixed` seconds, and `token` for every token of an
    answer, fits into so many minutes."""
    seconds = fixed + token * tokens
    if minutes is None or seconds <= 60 * minutes:
        return Limits(tokens, 1.0, seconds)
    fitting = max(min(SHORTEST, tokens), int((60 * minutes - fixed) / token))
    return Limits(fitting, min(1.0, 60 * minutes / (fixed + token * fitting)), seconds)


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
    told = (
        f"{asked} would take about {duration(limits.seconds)}, more than evaluation.minutes={config.minutes:g}: "
        f"{sum(len(part.prompts) for part in cut)} prompts, answers of {limits.tokens} tokens"
    )
    say(f"evaluation: {told}")
    return [replace(part, cut=told) for part in cut]


def cut_at(minutes: float | None, done: int, asked: int) -> str | None:
    """Return the sentence about prompts that a deadline left out, None where there are none."""
    return f"evaluation.minutes={minutes:.3g} had time for {done} of {asked} prompts" if done < asked else None

"""Ways of decoding, measured on the same prompts in turn: what each wrote, and how long it took."""

import statistics
import time
from collections import abc
from dataclasses import dataclass, field, replace

import torch

from infer.api import AnyTarget, open_engine
from infer.config import NO_NGRAMS, TEXT_NGRAMS, DecodeOptions, EvaluationConfig
from infer.drafters.base import Drafter
from infer.drafters.families import LOOKUP
from infer.drafters.lookup import Lookup
from infer.engine.loops import LONGEST_PERIOD, TIMES, loop_period
from infer.engine.sampling import derived_seed
from infer.engine.sequence import STAGES, Sequence
from infer.evaluation.acceptance import AnyPrompt
from infer.evaluation.others import OTHERS, decode_by_generate
from infer.evaluation.results import PromptResult
from infer.evaluation.ruler import DISTURBED
from infer.evaluation.showing import Shown
from infer.targets.target import Target
from infer.trees.methods import ALONE, TREES, TreeMethod
from infer.utils.together import agreed

SHARED = ("max_new_tokens", "temperature", "seed", "rows", "compile")  # with DecodeOptions
SLOW = 1.25  # plain decoders that take so many times as long as the fastest are measured on the first part alone
Progress = abc.Callable[[int, int], None]  # (prompts done, prompts)


@dataclass(frozen=True)
class Variant:
    """One way of decoding that is measured."""

    name: str
    budget: int  # drafted nodes a round; for a masked model, states
    options: DecodeOptions
    arguments: dict[str, object] = field(default_factory=dict)  # of transformers' `generate`, for rows of OTHERS
    drafter: Lookup | None = None  # in the place of the one that is evaluated


@dataclass
class Batch:
    """Prompts that were decoded side by side, and how long it took."""

    number: int  # of its first prompt
    size: int
    seconds: list[float] = field(default_factory=list)  # a repeat each
    stages: dict[str, float] = field(default_factory=dict)  # of the fastest repeat

    def add(self, seconds: float, stages: dict[str, float]) -> None:
        """Add a repeat."""
        if not self.seconds or seconds < min(self.seconds):
            self.stages = stages
        self.seconds.append(seconds)


@dataclass
class Measured:
    """What one variant wrote, and how long it took."""

    variant: Variant
    texts: list[Sequence] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)  # of the texts' prompts, see `measure`
    batches: list[Batch] = field(default_factory=list)  # of the texts, in their order
    guesses: list[list[int]] = field(default_factory=list)  # of plain decoding, see `count_right_guesses`
    again: int = 0  # batches that were disturbed and measured again
    shown: Shown | None = None  # of plain decoding: texts of the tree with the highest acceptance length

    @property
    def seconds(self) -> float:
        """The seconds of all prompts, each batch's in its fastest repeat."""
        return sum(min(batch.seconds) for batch in self.batches)

    @property
    def stages(self) -> dict[str, float]:
        """The same by stage of a round."""
        return {stage: sum(batch.stages.get(stage, 0.0) for batch in self.batches) for stage in STAGES}

    def total(self, name: str) -> float:
        """Return the sum of a statistic over the texts."""
        return sum(getattr(text.stats, name) for text in self.texts)

    def add_guesses(self, counts: torch.Tensor) -> None:
        """Add counts (L, 2) of guesses."""
        self.guesses = (counts.cpu() + torch.tensor(self.guesses or 0)).tolist()

    def prompt_results(self, kinds: abc.Mapping[int, str]) -> list[PromptResult]:
        """Return what every prompt took. `kinds`: those of the prompts by their numbers."""
        places = [batch for batch in self.batches for _ in range(batch.size)]
        return [
            PromptResult(
                number=number,
                kind=kinds.get(number, ""),
                batch=batch.number,
                tokens=text.stats.tokens,
                rounds=text.stats.rounds,
                seconds=[seconds / batch.size for seconds in batch.seconds],
                looped=TIMES * loop_period(text.ids, len(text.ids), LONGEST_PERIOD) if text.finish == "loop" else 0,
            )
            for text, number, batch in zip(self.texts, self.numbers, places, strict=True)
        ]

    @staticmethod
    def joined(shares: "abc.Sequence[Measured]") -> "Measured":
        """Join what was measured of one variant in turn, or by several processes, each on its share of the prompts."""
        result = Measured(shares[0].variant)
        for share in shares:
            result.texts += share.texts
            result.numbers += share.numbers
            result.batches += share.batches
            result.again += share.again
            if share.guesses:
                result.add_guesses(torch.tensor(share.guesses))
            result.shown = result.shown or share.shown
        return result


def join(shares: abc.Sequence[list[Measured]]) -> list[Measured]:
    """Join what several processes measured of a part: the variants that none of them found too slow."""
    of_one = [{(one.variant.name, one.variant.budget): one for one in share} for share in shares]
    return [Measured.joined([each[key] for each in of_one]) for key in of_one[0] if all(key in each for each in of_one)]


@dataclass(frozen=True)
class PromptSet:
    """The prompts of an evaluation that are reported together, and how they are decoded."""

    what: str | None  # what is different from the evaluation's own prompts; None: these are they
    prompts: list[AnyPrompt]
    numbers: list[int]  # of the prompts among all
    config: EvaluationConfig
    drafter: Drafter | None = None  # None: the one that is evaluated


def variants(target: Target, drafter: Drafter, config: EvaluationConfig, others: bool = False) -> list[Variant]:
    """Return plain decoding, transformers' (if `others`, also by its own ways of drafting), then the other evaluated
    rows of the table of tree methods, in its order."""
    plain, *rows = [row for row in TREES.values() if row.evaluated and asks(row, drafter, config)]
    shared = {name: getattr(config, name) for name in SHARED} | {"loop_period": LONGEST_PERIOD}
    theirs = {
        name: other.arguments(target, drafter)
        for name, other in OTHERS.items()
        if not other.row.drafts or (others and config.rows == 1)
    }
    beside = [
        Variant(name, 0, DecodeOptions(method=plain.name, **shared), arguments)
        for name, arguments in theirs.items()
        if arguments is not None
    ]
    trees = [
        Variant(row.name, budget, tree_options(row, budget, config, shared))
        for row in (plain, *rows)
        for budget in budgets_of(row, drafter, config)
    ]
    return [*trees[:1], *beside, *trees[1:], *ngrams_alone(drafter, config, shared)]


def asks(row: TreeMethod, drafter: Drafter, config: EvaluationConfig) -> bool:
    """Return whether a row's n-grams, if it has any, are measured: those that the user asked for; else, of DDTree,
    those that lie beside the drafter's weights."""
    if not row.ngrams:
        return True
    if config.continuity is None:
        return row.recalls and drafter.ngrams is not None
    return config.continuity != NO_NGRAMS and (row.recalls or config.continuity != TEXT_NGRAMS)


def budgets_of(row: TreeMethod, drafter: Drafter, config: EvaluationConfig) -> list[int]:
    """Return the budgets that a row is measured with: n-grams that nobody asked for with the middle one alone."""
    if not row.by_budget:
        return [row.most_nodes(drafter.block_size)]
    return [middle(config.budgets)] if row.ngrams and config.continuity is None else config.budgets


def middle(budgets: abc.Sequence[int]) -> int:
    """Return the budget in the middle, of two the larger one."""
    return sorted(budgets)[len(budgets) // 2]


def tree_options(row: TreeMethod, budget: int, config: EvaluationConfig, shared: dict[str, object]) -> DecodeOptions:
    """Return how a row's trees are decoded. Without n-grams unless it is a row of them."""
    own = row.ngrams and config.continuity is None  # the engine takes the drafter's
    return DecodeOptions(
        method="ddtree" if own else row.name,
        budget=max(1, budget),
        continuity=config.continuity if row.ngrams else NO_NGRAMS,
        positions=None,  # every row gets the budget that is measured
        **shared,
    )


def ngrams_alone(drafter: Drafter, config: EvaluationConfig, shared: dict[str, object]) -> list[Variant]:
    """Return DDTree over the same n-grams without the drafter, or over the text's own where there are no others; none
    where the evaluation is to have no n-grams, or the drafter is that already."""
    if config.continuity == NO_NGRAMS or drafter.family is LOOKUP:
        return []
    file = drafter.ngrams if config.continuity is None else None
    asked = config.continuity or (None if file else TEXT_NGRAMS)
    budget = middle(config.budgets)
    options = DecodeOptions(budget=budget, continuity=asked, positions=None, **shared)
    return [Variant(ALONE.name, budget, options, drafter=Lookup(drafter.block_size, file))]


def measure(
    model: AnyTarget,
    drafter: Drafter | None,
    variants: abc.Sequence[Variant],
    prompts: abc.Sequence[abc.Sequence[int]],
    progress: Progress = lambda done, total: None,
    numbers: abc.Sequence[int] | None = None,
    repeats: int = 1,
) -> list[Measured]:
    """Decode every prompt with every variant, as many at a time as the variant with the most rows, and all of that
    `repeats` times over. The variants take turns on the same prompts, each beginning as often as the others, so that a
    noisy machine is equally noisy for all; what was disturbed is measured again. `numbers` are the prompts' own among
    all that are sampled with one seed, by default 0, 1, 2, ...: each has a seed derived from its number."""
    clock = synchronised_clock(model.device)
    rows = max(variant.options.rows for variant in variants)
    capacity = max(map(len, prompts), default=0) + max(variant.options.max_new_tokens for variant in variants)
    numbers = list(range(len(prompts)) if numbers is None else numbers)

    def run(part: slice, one: Measured, batch: Batch) -> None:
        variant, options = one.variant, one.variant.options
        own = [replace(options, seed=derived_seed(options.seed, number)) for number in numbers[part]]
        asked = [list(prompt) for prompt in prompts[part]]
        began, stages = clock(), {}
        if variant.name in OTHERS:
            texts = decode_by_generate(model, OTHERS[variant.name].row, variant.arguments, asked, own)
        else:
            engine = open_engine(model, variant.drafter or drafter, options, capacity, clock)
            texts = [engine.submit(prompt, each) for prompt, each in zip(asked, own, strict=True)]
            while engine.busy:
                engine.step()
            stages = engine.seconds
        batch.add(clock() - began, stages)
        if len(batch.seconds) == 1:
            one.texts += texts
            one.numbers += numbers[part]
            one.batches.append(batch)

    parts = [slice(first, first + rows) for first in range(0, len(prompts), rows)]
    for variant in variants if prompts else ():  # warm-up: first calls pay for allocations and kernels
        tokens = min(16, variant.options.max_new_tokens)
        short = replace(variant, options=replace(variant.options, max_new_tokens=tokens))
        run(slice(rows), Measured(short), Batch(0, 0))
    measured = [Measured(variant) for variant in variants]
    batches = [[Batch(numbers[part.start], len(numbers[part])) for part in parts] for _ in variants]
    for repeat in range(repeats):
        for i, part in enumerate(parts):
            for turn in range(len(variants)):
                which = (turn + i + repeat) % len(variants)
                run(part, measured[which], batches[which][i])
            done = repeat * len(prompts) + min(part.stop, len(prompts))
            progress(done, repeats * len(prompts))
    for one in measured:
        for i in decided(model, disturbed(one)):
            run(parts[i], one, one.batches[i])
            one.again += 1
    return measured


def disturbed(measured: Measured) -> list[int]:
    """Return which batches took more than DISTURBED times the method's median time a token."""
    lengths, paces = iter(text.stats.tokens for text in measured.texts), []
    for batch in measured.batches:
        paces.append(min(batch.seconds) / max(1, sum(next(lengths) for _ in range(batch.size))))
    limit = DISTURBED * statistics.median(paces) if paces else 0.0
    return [i for i, pace in enumerate(paces) if pace > limit]


def decided(target: AnyTarget, value: object) -> object:
    """Return what the clock decided: where processes compute every pass of the target together, the first one's."""
    return agreed(value) if target.spread else value


def synchronised_clock(device: torch.device) -> abc.Callable[[], float]:
    """Return a clock that waits for the device's work before it is read. Seconds."""
    if device.type != "cuda":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock

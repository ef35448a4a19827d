"""Measured acceptance: held-out prompts decoded with every method, by the code that users call.

Acceptance is never estimated from token accuracy: every number here comes from decoding.
"""

import platform
import statistics
import time
from collections import abc
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from infer.api import AnyTarget, open_engine
from infer.config import NO_NGRAMS, TEXT_NGRAMS, DecodeOptions, EvaluationConfig
from infer.drafters.base import Drafter
from infer.drafters.lookup import Lookup
from infer.engine.loops import LONGEST_PERIOD, TIMES, loop_period
from infer.engine.sampling import derived_seed
from infer.engine.sequence import STAGES, Sequence
from infer.evaluation.acceptance import reference_of
from infer.evaluation.lossless import find_difference
from infer.evaluation.others import OTHERS, decode_by_generate
from infer.evaluation.results import OTHER_DRAFTER, Evaluation, MethodResult, PromptResult, Reference
from infer.evaluation.ruler import DISTURBED, by_batch, figures, rate
from infer.evaluation.showing import Shown, show_texts
from infer.targets.target import Target, pad_ids
from infer.trees.methods import ALONE, TREES, TreeMethod
from infer.utils.together import agreed

SHARED = ("max_new_tokens", "temperature", "seed", "rows", "compile", "continuity_weight")  # with DecodeOptions
ROWS = 8  # texts side by side when right guesses are counted
BRIEF = 4  # a brief evaluation decodes every fourth prompt
SLOW = 1.25  # plain decoders that take so many times as long as the fastest are measured on the first part alone
Progress = abc.Callable[[int, int], None]  # (prompts done, prompts)


class Prompt(Protocol):
    """A prompt to evaluate with, such as `data.prompts.evaluation_prompts` returns."""

    ids: list[int]
    kind: str  # what it is, such as "functions"
    beside: str | None  # what those are called that are reported beside the others; None: one of the others
    said: str  # what a client sends for these ids; empty for those that nobody else is asked
    chat: bool  # it is sent as a chat's question


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

    def replace_fastest(self, repeat: "Batch") -> None:
        """Put what was measured again in the place of the fastest repeat, if it is faster."""
        fastest = min(self.seconds)
        if min(repeat.seconds) < fastest:
            self.seconds[self.seconds.index(fastest)], self.stages = min(repeat.seconds), repeat.stages


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

    @property
    def by_budget(self) -> bool:
        """Whether it is a tree of the drafter alone whose size the node budget decides."""
        row = TREES.get(self.variant.name)
        return row is not None and row.by_budget and not row.ngrams

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
class Part:
    """The prompts of an evaluation that are reported together, and how they are decoded."""

    what: str | None  # what is different from the evaluation's own prompts; None: these are they
    prompts: list[Prompt]
    numbers: list[int]  # of the prompts among all
    config: EvaluationConfig
    drafter: Drafter | None = None  # None: the one that is evaluated


def evaluate(
    target: Target,
    drafter: Drafter,
    prompts: abc.Sequence[Prompt],
    config: EvaluationConfig,
    progress: Progress = lambda done, total: None,
    others: bool = False,
    say: abc.Callable[[str], None] = lambda line: None,
) -> Evaluation:
    """Decode every prompt with every method, those by which transformers drafts among them if `others`; `say` is told
    what it will cost. Where a method of ours wrote something else than plain decoding, `ties` and `defects` say on how
    many prompts and why, see `infer.evaluation.lossless`."""
    from infer.evaluation.cost import fit, limits_of

    parts = parts_of(prompts, config)
    parts = fit(parts, decided(target, limits_of(target, drafter, parts, others)), say)
    measured = decode_all(target, drafter, parts, progress, others)
    result = summarise(target, drafter, parts, measured)
    return replace(
        explain_differences(target, result, measured[0]),
        beside=[explain_differences(target, *pair) for pair in zip(result.beside, measured[1:], strict=True)],
    )


def explain_differences(target: Target, result: Evaluation, measured: list[Measured]) -> Evaluation:
    """Return the evaluation with `ties` and `defects` of the methods that wrote something else than plain decoding."""
    methods = []
    for method, one in zip(result.methods, measured, strict=True):
        pairs = [] if method.name in OTHERS else zip(one.texts, measured[0].texts, strict=True)
        found = [find_difference(target, plain.prompt, text.ids, plain.ids, plain.options) for text, plain in pairs]
        causes = [difference.cause for difference in found if difference is not None]
        if causes:
            method = replace(method, ties=causes.count("tie"), defects=causes.count("defect"))
        methods.append(method)
    return replace(result, methods=methods)


def parts_of(prompts: abc.Sequence[Prompt], config: EvaluationConfig, other: Drafter | None = None) -> list[Part]:
    """Return what an evaluation decodes: its prompts; once and with one budget, those beside them, every second of its
    own sampled, if the others are greedy, and every second with the `other` drafter."""
    groups: dict[str | None, list[int]] = {}
    for number, prompt in enumerate(prompts):
        groups.setdefault(prompt.beside, []).append(number)
    once = replace(config, repeats=1, budgets=[middle(config.budgets)])
    parts = [
        Part(what, [prompts[i] for i in numbers], numbers, once if what else config) for what, numbers in groups.items()
    ]
    if config.temperature == 0 and config.sampled is not None:
        parts.append(half(f"temperature {config.sampled:g}", parts[0], replace(once, temperature=config.sampled)))
    if other is not None:
        parts.append(half(OTHER_DRAFTER, parts[0], once, other))
    return parts


def half(what: str, part: Part, config: EvaluationConfig, drafter: Drafter | None = None) -> Part:
    """Return a part with every second prompt of another."""
    return Part(what, part.prompts[::2], part.numbers[::2], config, drafter)


def brief(part: Part) -> Part:
    """Return the part with fewer prompts, once: what a checkpoint in the middle of training is worth."""
    some = slice(0, None, BRIEF)
    minutes = part.config.minutes and part.config.minutes / BRIEF
    config = replace(part.config, repeats=1, minutes=minutes)
    return replace(part, prompts=part.prompts[some], numbers=part.numbers[some], config=config)


def decode_all(
    target: Target,
    drafter: Drafter,
    parts: abc.Sequence[Part],
    progress: Progress = lambda done, total: None,
    others: bool = False,
) -> list[list[Measured]]:
    """Decode the prompts of every part with every method, plain decoding first; of the first part, also count how often
    the drafter guesses right along what plain decoding wrote, and keep what a report shows of the texts. Plain decoders
    that are `SLOW` there are left out of the other parts."""
    slow, total, before, results = set(), sum(len(part.prompts) * part.config.repeats for part in parts), 0, []
    for part in parts:
        config, prompts = part.config, [prompt.ids for prompt in part.prompts]

        def onwards(done: int, _: int, before: int = before) -> None:
            progress(before + done, total)

        used = part.drafter or drafter
        every = [one for one in variants(target, used, config, others) if one.name not in slow]
        results.append(measure(target, used, every, prompts, onwards, part.numbers, config.repeats))
        if len(results) == 1:
            slow = decided(target, slow_decoders(results[0]))
        before += len(prompts) * config.repeats
    plain = results[0][0]
    length = max((len(text.prompt) for text in plain.texts), default=0) + parts[0].config.max_new_tokens
    for first in range(0, len(plain.texts), ROWS):
        plain.add_guesses(count_right_guesses(target, drafter, plain.texts[first : first + ROWS], length))
    best = max((one for one in results[0] if one.by_budget), key=lambda one: tau(one.texts))
    plain.shown = show_texts(target, drafter, best.texts, best.variant.options, parts[0].config.samples)
    return results


def slow_decoders(measured: abc.Sequence[Measured]) -> set[str]:
    """Return the names of transformers' plain decoders that are much slower than the fastest plain one."""
    theirs = [one for one in measured if one.variant.name in OTHERS and not OTHERS[one.variant.name].row.drafts]
    limit = SLOW * min(one.seconds for one in (measured[0], *theirs))
    return {one.variant.name for one in theirs if one.seconds > limit}


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
        return row.recalls and getattr(drafter, "ngrams", None) is not None
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
    if config.continuity == NO_NGRAMS or isinstance(drafter, Lookup):
        return []
    file = getattr(drafter, "ngrams", None) if config.continuity is None else None
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
    longest = max(map(len, prompts), default=0)
    numbers = list(range(len(prompts)) if numbers is None else numbers)

    def run(part: slice, variant: Variant, options: DecodeOptions, into: Measured, batch: Batch) -> None:
        own = [replace(options, seed=derived_seed(options.seed, number)) for number in numbers[part]]
        asked = [list(prompt) for prompt in prompts[part]]
        began, stages = clock(), {}
        if variant.name in OTHERS:
            texts = decode_by_generate(model, OTHERS[variant.name].row, variant.arguments, asked, own)
        else:
            capacity = longest + variant.options.max_new_tokens
            engine = open_engine(model, variant.drafter or drafter, options, capacity, clock)
            texts = [engine.submit(prompt, each) for prompt, each in zip(asked, own, strict=True)]
            while engine.busy:
                engine.step()
            stages = engine.seconds
        batch.add(clock() - began, stages)
        if len(batch.seconds) == 1:
            into.texts += texts
            into.numbers += numbers[part]
            into.batches.append(batch)

    parts = [slice(first, first + rows) for first in range(0, len(prompts), rows)]
    for variant in variants if prompts else ():  # warm-up: first calls pay for allocations and kernels
        tokens = variant.options.room(min(16, variant.options.max_new_tokens))
        options = replace(variant.options, max_new_tokens=tokens)
        run(slice(rows), variant, options, Measured(variant), Batch(0, 0))
    measured = [Measured(variant) for variant in variants]
    batches = [[Batch(numbers[part.start], len(numbers[part])) for part in parts] for _ in variants]
    for repeat in range(repeats):
        for i, part in enumerate(parts):
            for turn in range(len(variants)):
                which = (turn + i + repeat) % len(variants)
                one = measured[which]
                run(part, one.variant, one.variant.options, one, batches[which][i])
            done = repeat * len(prompts) + min(part.stop, len(prompts))
            progress(done, repeats * len(prompts))
    for one in measured:
        for i in decided(model, disturbed(one)):
            batch = Batch(0, 0)
            run(parts[i], one.variant, one.variant.options, Measured(one.variant), batch)
            one.batches[i].replace_fastest(batch)
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
    return agreed(value) if getattr(target, "spread", False) else value


@torch.inference_mode()
def count_right_guesses(target: Target, drafter: Drafter, texts: list[Sequence], length: int) -> torch.Tensor:
    """Count how often the drafter's likeliest token is the one that came, by drafted position: (L, 2) int64, right
    guesses and all. A block is drafted at every token of finished texts of at most `length` tokens, side by side. This
    is what DART's tables 3 and 4 call accuracy."""
    rows, drafted = len(texts), drafter.block_size - 1
    cache, state = target.cache(rows, length), drafter.state(rows, length)
    prompts, answers = [text.prompt for text in texts], [text.ids for text in texts]
    with cache.add(rows) as part, state.add(rows) as begun:
        features = target.extend(prompts, part, drafter.layer_ids)
        ids = pad_ids(prompts, target.device)
        drafter.update_context(target, features.context, ids, [len(prompt) for prompt in prompts], begun)
    features = target.extend(answers, cache, drafter.layer_ids).context
    ids = pad_ids(answers, target.device)  # (B, A)
    ends = torch.tensor([len(answer) for answer in answers], device=ids.device)
    counts = torch.zeros(drafted, 2, dtype=torch.long, device=ids.device)
    for step in range(ids.shape[1] - 1):
        guesses = guess(target, drafter, ids, step, state)  # (B, L)
        ahead = step + torch.arange(1, drafted + 1, device=ids.device)  # (L,)
        there = ahead < ends[:, None]  # (B, L)
        right = there & (guesses == ids[:, ahead.clamp(max=ids.shape[1] - 1)])
        counts += torch.stack([right.sum(0), there.sum(0)], 1)
        going = [int(step < len(answer)) for answer in answers]
        drafter.update_context(target, features[:, step : step + 1], ids[:, step : step + 1], going, state)
    return counts


def guess(target: Target, drafter: Drafter, ids: torch.Tensor, step: int, state: object) -> torch.Tensor:
    """Return the drafter's likeliest tokens (B, L) behind the tokens at `step` of ids (B, A), each with a conditional
    head behind the true token before it."""
    if getattr(drafter, "head_row", None) is None:
        return drafter.draft(target, ids[:, step], state).argmax(-1)
    block = drafter.draft_block(target, ids[:, step], state)
    before = step + torch.arange(block.states.shape[1], device=ids.device)  # (L,)
    return drafter.behind(target, block, ids[:, before.clamp(max=ids.shape[1] - 1)]).argmax(-1)


def summarise(
    target: Target, drafter: Drafter, parts: abc.Sequence[Part], measured: list[list[Measured]]
) -> Evaluation:
    """Return the figures of an evaluation, what is reported beside it included."""
    first, *beside = [summarise_part(target, drafter, *pair) for pair in zip(parts, measured, strict=True)]
    return replace(first, beside=beside, reference=reference_among(target, drafter, parts, measured))


def reference_among(
    target: Target, drafter: Drafter, parts: abc.Sequence[Part], measured: list[list[Measured]]
) -> Reference | None:
    """Return what chains took on the prompts that others may be asked, None where there are none, or no chain."""
    prompts = {number: prompt for part in parts for number, prompt in zip(part.numbers, part.prompts, strict=True)}
    for part, of_part in zip(parts, measured, strict=True):
        chain = next((one for one in of_part if one.variant.name == "chain"), None)
        if chain is not None and part.config.temperature == 0 and any(prompt.said for prompt in part.prompts):
            return reference_of(target, drafter, [prompts[number] for number in chain.numbers], chain.texts)
    return None


def summarise_part(target: Target, drafter: Drafter, part: Part, measured: list[Measured]) -> Evaluation:
    """Return the figures of one part."""
    plain, config, drafter = measured[0], part.config, part.drafter or drafter
    kinds = {number: prompt.kind for number, prompt in zip(part.numbers, part.prompts, strict=True)}
    fastest = fastest_plain(measured)
    return Evaluation(
        target=target.name,
        device=describe_device(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        prompts=len(plain.texts),
        rows=config.rows,
        prompt_tokens=config.prompt_tokens,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        block_size=drafter.block_size,
        accuracy=[right / max(1, count) for right, count in plain.guesses],
        methods=method_results(measured, kinds, fastest),
        samples=plain.shown.samples if plain.shown else [],
        example=plain.shown.example if plain.shown else None,
        baseline=fastest.variant.name,
        what=part.what,
    )


def fastest_plain(measured: abc.Sequence[Measured]) -> Measured:
    """Return the plain decoder that is faster on most prompts: ours, the first, or another one."""
    fastest, known = measured[0], by_batch(measured[0].prompt_results({}))
    for one in measured:
        if one.variant.name in OTHERS and not OTHERS[one.variant.name].row.drafts:
            own = by_batch(one.prompt_results({}))
            if statistics.median(rate(own[key]) / rate(known[key]) for key in own) > 1:
                fastest, known = one, own
    return fastest


def method_results(
    measured: abc.Sequence[Measured], kinds: abc.Mapping[int, str], fastest: Measured
) -> list[MethodResult]:
    """Return the rows of the table, with speedups over the `fastest` plain decoder."""
    baseline = fastest.prompt_results(kinds)
    return [method_result(one, measured[0], kinds, baseline) for one in measured]


def method_result(
    measured: Measured, plain: Measured, kinds: abc.Mapping[int, str], baseline: list[PromptResult]
) -> MethodResult:
    """Return one row of the table. `plain` wrote what every method must; `baseline` is what the fastest plain decoder
    took."""
    texts, seconds = measured.texts, measured.seconds
    prompts = measured.prompt_results(kinds)
    found = figures(prompts, baseline)
    drawn_otherwise = measured.variant.name in OTHERS and measured.variant.options.temperature > 0
    return MethodResult(
        name=measured.variant.name,
        budget=measured.variant.budget,
        tau=found.tau,
        tau_prompt_mean=measured.total("tau") / len(texts),
        rounds=measured.total("rounds"),
        tokens=measured.total("tokens"),
        seconds=seconds,
        tokens_per_second=found.speedup * statistics.median(map(rate, by_batch(baseline).values())),
        speedup=found.speedup,
        histogram=[sum(counts) for counts in zip(*(text.stats.histogram for text in texts), strict=True)],
        stage_seconds=measured.stages | {"other": seconds - sum(measured.stages.values())},
        identical=None if drawn_otherwise else [text.ids for text in texts] == [text.ids for text in plain.texts],
        tau_interval=found.tau_interval,
        speedup_interval=found.speedup_interval,
        limit=found.limit,
        prompts=prompts,
        again=measured.again or None,
    )


def tau(texts: abc.Sequence[Sequence]) -> float:
    """Return the acceptance length pooled over rounds."""
    rounds = sum(text.stats.rounds for text in texts)
    return sum(text.stats.tokens - 1 for text in texts) / rounds if rounds else 1.0


def synchronised_clock(device: torch.device) -> abc.Callable[[], float]:
    """Return a clock that waits for the device's work before it is read. Seconds."""
    if device.type != "cuda":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


def describe_device(device: torch.device) -> str:
    """Return the hardware in words, for the report."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    except OSError:
        pass
    return f"CPU, {torch.get_num_threads()} threads, {model}"

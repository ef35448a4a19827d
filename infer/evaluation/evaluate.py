"""Measured acceptance: held-out prompts decoded with every method, by the code that users call.

Acceptance is never estimated from token accuracy: every number here comes from decoding.
"""

import platform
import time
from collections import abc
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import torch

from infer.api import AnyTarget, open_engine
from infer.config import DecodeOptions, EvaluationConfig
from infer.drafters.base import Drafter
from infer.engine.sampling import derived_seed
from infer.engine.sequence import STAGES, Sequence
from infer.evaluation.lossless import find_difference
from infer.evaluation.results import Evaluation, MethodResult, Sample
from infer.targets.target import Target, pad_ids
from infer.trees.methods import TREES

SHARED = ("max_new_tokens", "temperature", "seed", "rows", "compile", "continuity_weight")  # with DecodeOptions
ROWS = 8  # texts side by side when right guesses are counted
Progress = abc.Callable[[int, int], None]  # (prompts done, prompts)


@dataclass(frozen=True)
class Variant:
    """One way of decoding that is measured."""

    name: str
    budget: int  # drafted nodes a round; for a masked model, states
    options: DecodeOptions


@dataclass
class Measured:
    """What one variant wrote, and how long it took."""

    variant: Variant
    texts: list[Sequence] = field(default_factory=list)
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    guesses: list[list[int]] = field(default_factory=list)  # of plain decoding, see `count_right_guesses`

    def total(self, name: str) -> float:
        """Return the sum of a statistic over the texts."""
        return sum(getattr(text.stats, name) for text in self.texts)

    def add_guesses(self, counts: torch.Tensor) -> None:
        """Add counts (L, 2) of guesses."""
        self.guesses = (counts.cpu() + torch.tensor(self.guesses or 0)).tolist()

    @staticmethod
    def joined(shares: "abc.Sequence[Measured]") -> "Measured":
        """Join what several processes measured, each on its share of the prompts: share i holds prompts i, i + n,
        ..."""
        texts = [text for some in zip_longest(*(share.texts for share in shares)) for text in some if text is not None]
        stages = {stage: sum(share.stages[stage] for share in shares) for stage in STAGES}
        result = Measured(shares[0].variant, texts, sum(share.seconds for share in shares), stages)
        for share in shares:
            if share.guesses:
                result.add_guesses(torch.tensor(share.guesses))
        return result


def evaluate(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    config: EvaluationConfig,
    progress: Progress = lambda done, total: None,
) -> Evaluation:
    """Decode every prompt with every method. Where a method wrote something else than plain decoding, `ties` and
    `defects` say on how many prompts and why, see `infer.evaluation.lossless`."""
    measured = decode_all(target, drafter, prompts, config, progress)
    result = summarise(target, drafter, measured, config)
    methods = []
    for method, one in zip(result.methods, measured, strict=True):
        pairs = zip(one.texts, measured[0].texts, strict=True)
        found = [find_difference(target, plain.prompt, text.ids, plain.ids, plain.options) for text, plain in pairs]
        causes = [difference.cause for difference in found if difference is not None]
        if causes:
            method = replace(method, ties=causes.count("tie"), defects=causes.count("defect"))
        methods.append(method)
    return replace(result, methods=methods)


def decode_all(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    config: EvaluationConfig,
    progress: Progress = lambda done, total: None,
    numbers: abc.Sequence[int] | None = None,
) -> list[Measured]:
    """Decode every prompt with every method, plain decoding first, and count how often the drafter guesses right along
    what plain decoding wrote. `numbers` are those of `measure`."""
    measured = measure(target, drafter, variants(drafter, config), prompts, progress, numbers)
    length = max(map(len, prompts), default=0) + config.max_new_tokens
    plain = measured[0]
    for first in range(0, len(prompts), ROWS):
        plain.add_guesses(count_right_guesses(target, drafter, plain.texts[first : first + ROWS], length))
    return measured


def variants(drafter: Drafter, config: EvaluationConfig) -> list[Variant]:
    """Return the evaluated rows of the table of tree methods, in its order: plain decoding is the first."""
    ngrams = config.continuity is not None
    rows = [row for row in TREES.values() if row.evaluated and (ngrams or not row.ngrams)]
    return [
        Variant(
            row.name,
            budget,
            DecodeOptions(
                method=row.name,
                budget=max(1, budget),
                continuity=config.continuity if row.ngrams else None,
                **{name: getattr(config, name) for name in SHARED},
            ),
        )
        for row in rows
        for budget in (config.budgets if row.by_budget else [row.most_nodes(drafter.block_size)])
    ]


def measure(
    model: AnyTarget,
    drafter: Drafter | None,
    variants: abc.Sequence[Variant],
    prompts: abc.Sequence[abc.Sequence[int]],
    progress: Progress = lambda done, total: None,
    numbers: abc.Sequence[int] | None = None,
) -> list[Measured]:
    """Decode every prompt with every variant, as many at a time as the variant with the most rows. The variants take
    turns on the same prompts, so that a noisy machine is equally noisy for all. `numbers` are the prompts' own among
    all that are sampled with one seed, by default 0, 1, 2, ...: each has a seed derived from its number."""
    clock = synchronised_clock(model.device)
    rows = max(variant.options.rows for variant in variants)
    longest = max(map(len, prompts), default=0)

    numbers = range(len(prompts)) if numbers is None else numbers

    def run(part: slice, options: DecodeOptions, into: Measured) -> None:
        began = clock()
        engine = open_engine(model, drafter, options, longest + into.variant.options.max_new_tokens, clock)
        into.texts += [
            engine.submit(list(prompt), replace(options, seed=derived_seed(options.seed, number)))
            for prompt, number in zip(prompts[part], numbers[part], strict=True)
        ]
        while engine.busy:
            engine.step()
        into.seconds += clock() - began
        for stage, seconds in engine.seconds.items():
            into.stages[stage] += seconds

    for variant in variants:  # warm-up: first calls pay for allocations and kernels
        tokens = variant.options.room(min(16, variant.options.max_new_tokens))
        run(slice(rows), replace(variant.options, max_new_tokens=tokens), Measured(variant))
    measured = [Measured(variant) for variant in variants]
    for first in range(0, len(prompts), rows):
        for one in measured:
            run(slice(first, first + rows), one.variant.options, one)
        progress(min(first + rows, len(prompts)), len(prompts))
    return measured


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
        guesses = drafter.draft(target, ids[:, step], state).argmax(-1)  # (B, L)
        ahead = step + torch.arange(1, drafted + 1, device=ids.device)  # (L,)
        there = ahead < ends[:, None]  # (B, L)
        right = there & (guesses == ids[:, ahead.clamp(max=ids.shape[1] - 1)])
        counts += torch.stack([right.sum(0), there.sum(0)], 1)
        going = [int(step < len(answer)) for answer in answers]
        drafter.update_context(target, features[:, step : step + 1], ids[:, step : step + 1], going, state)
    return counts


def summarise(target: Target, drafter: Drafter, measured: list[Measured], config: EvaluationConfig) -> Evaluation:
    """Return the figures of an evaluation, with samples of the tree that has the highest acceptance length."""
    plain = measured[0]
    trees = [one for one in measured if TREES[one.variant.name].by_budget]
    best = max(trees, key=lambda one: tau(one.texts))
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
        methods=[method_result(one, plain) for one in measured],
        samples=[sample(target, text) for text in best.texts[: config.samples]],
    )


def method_result(measured: Measured, plain: Measured) -> MethodResult:
    """Return one row of the table. `speedup` is the ratio of total times."""
    texts, seconds, tokens = measured.texts, measured.seconds, measured.total("tokens")
    return MethodResult(
        name=measured.variant.name,
        budget=measured.variant.budget,
        tau=tau(texts),
        tau_prompt_mean=measured.total("tau") / len(texts),
        rounds=measured.total("rounds"),
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        speedup=plain.seconds / seconds,
        histogram=[sum(counts) for counts in zip(*(text.stats.histogram for text in texts), strict=True)],
        stage_seconds=measured.stages | {"other": seconds - sum(measured.stages.values())},
        identical=[text.ids for text in texts] == [text.ids for text in plain.texts],
    )


def tau(texts: abc.Sequence[Sequence]) -> float:
    """Return the acceptance length pooled over rounds."""
    rounds = sum(text.stats.rounds for text in texts)
    return sum(text.stats.tokens - 1 for text in texts) / rounds if rounds else 1.0


def sample(target: Target, text: Sequence) -> Sample:
    """Cut a decoded text into pieces: the prefill's first token, then each round's accepted drafts and bonus token."""
    decode = target.tokenizer.decode
    pieces, at = [], 0
    for round, count in enumerate(text.commits):
        ids = text.ids[at : at + count]
        if ids[:-1]:
            pieces.append([decode(ids[:-1]), "accepted"])
        pieces.append([decode(ids[-1:]), "bonus"])
        at += count
        assert round or count == 1
    return Sample(decode(text.prompt), decode(text.ids), text.commits, pieces)


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

"""Measured acceptance: held-out prompts decoded with every method, by the code that users call.

Acceptance is never estimated from token accuracy: every number here comes from decoding.
"""

import platform
import statistics
from collections import abc
from dataclasses import replace

import torch

from infer.config import EvaluationConfig
from infer.drafters.base import Drafter
from infer.drafters.heads.draft import behind
from infer.engine.sequence import Sequence
from infer.evaluation.acceptance import AnyPrompt, reference_of
from infer.evaluation.cost import fit, limits_of
from infer.evaluation.lossless import find_difference
from infer.evaluation.measuring import SLOW, Measured, Progress, PromptSet, decided, measure, middle, variants
from infer.evaluation.others import OTHERS
from infer.evaluation.results import OTHER_DRAFTER, Evaluation, MethodResult, PromptResult, Reference, tree_of
from infer.evaluation.ruler import by_batch, figures, rate
from infer.evaluation.showing import show_texts
from infer.targets.target import Target, pad_ids

ROWS = 8  # texts side by side when right guesses are counted
BRIEF = 4  # a brief evaluation decodes every fourth prompt


def evaluate(
    target: Target,
    drafter: Drafter,
    prompts: abc.Sequence[AnyPrompt],
    config: EvaluationConfig,
    progress: Progress = lambda done, total: None,
    others: bool = False,
    say: abc.Callable[[str], None] = lambda line: None,
) -> Evaluation:
    """Decode every prompt with every method, those by which transformers drafts among them if `others`; `say` is told
    what it will cost. Where a method of ours wrote something else than plain decoding, `ties` and `defects` say on how
    many prompts and why, see `infer.evaluation.lossless`."""
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


def parts_of(
    prompts: abc.Sequence[AnyPrompt], config: EvaluationConfig, other: Drafter | None = None
) -> list[PromptSet]:
    """Return what an evaluation decodes: its prompts; once and with one budget, those beside them, every second of its
    own sampled, if the others are greedy, and every second with the `other` drafter."""
    groups: dict[str | None, list[int]] = {}
    for number, prompt in enumerate(prompts):
        groups.setdefault(prompt.beside, []).append(number)
    once = replace(config, repeats=1, budgets=[middle(config.budgets)])
    parts = [
        PromptSet(what, [prompts[i] for i in numbers], numbers, once if what else config)
        for what, numbers in groups.items()
    ]
    if config.temperature == 0 and config.sampled is not None:
        parts.append(half(f"temperature {config.sampled:g}", parts[0], replace(once, temperature=config.sampled)))
    if other is not None:
        parts.append(half(OTHER_DRAFTER, parts[0], once, other))
    return parts


def half(what: str, part: PromptSet, config: EvaluationConfig, drafter: Drafter | None = None) -> PromptSet:
    """Return a part with every second prompt of another."""
    return PromptSet(what, part.prompts[::2], part.numbers[::2], config, drafter)


def brief(part: PromptSet) -> PromptSet:
    """Return the part with fewer prompts, once: what a checkpoint in the middle of training is worth."""
    some = slice(0, None, BRIEF)
    minutes = part.config.minutes and part.config.minutes / BRIEF
    config = replace(part.config, repeats=1, minutes=minutes)
    return replace(part, prompts=part.prompts[some], numbers=part.numbers[some], config=config)


def decode_all(
    target: Target,
    drafter: Drafter,
    parts: abc.Sequence[PromptSet],
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
    trees = [(one, tree_of(one.variant.name)) for one in results[0]]
    best = max((one for one, tree in trees if tree.by_budget and not tree.ngrams), key=lambda one: tau(one.texts))
    plain.shown = show_texts(target, drafter, best.texts, best.variant.options, parts[0].config.samples)
    return results


def slow_decoders(measured: abc.Sequence[Measured]) -> set[str]:
    """Return the names of transformers' plain decoders that are much slower than the fastest plain one."""
    theirs = [one for one in measured if one.variant.name in OTHERS and not OTHERS[one.variant.name].row.drafts]
    limit = SLOW * min(one.seconds for one in (measured[0], *theirs))
    return {one.variant.name for one in theirs if one.seconds > limit}


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
    if drafter.head_row is None:
        return drafter.draft_block(target, ids[:, step], state).marginals.argmax(-1)
    block = drafter.draft_block(target, ids[:, step], state)
    before = step + torch.arange(block.states.shape[1], device=ids.device)  # (L,)
    return behind(drafter, target, block, ids[:, before.clamp(max=ids.shape[1] - 1)]).argmax(-1)


def summarise(
    target: Target, drafter: Drafter, parts: abc.Sequence[PromptSet], measured: list[list[Measured]]
) -> Evaluation:
    """Return the figures of an evaluation, what is reported beside it included."""
    first, *beside = [summarise_part(target, drafter, *pair) for pair in zip(parts, measured, strict=True)]
    return replace(first, beside=beside, reference=reference_among(target, drafter, parts, measured))


def reference_among(
    target: Target, drafter: Drafter, parts: abc.Sequence[PromptSet], measured: list[list[Measured]]
) -> Reference | None:
    """Return what chains took on the prompts that others may be asked, None where there are none, or no chain."""
    prompts = {number: prompt for part in parts for number, prompt in zip(part.numbers, part.prompts, strict=True)}
    for part, of_part in zip(parts, measured, strict=True):
        chain = next((one for one in of_part if one.variant.name == "chain"), None)
        if chain is not None and part.config.temperature == 0 and any(prompt.said for prompt in part.prompts):
            return reference_of(target, drafter, [prompts[number] for number in chain.numbers], chain.texts)
    return None


def summarise_part(target: Target, drafter: Drafter, part: PromptSet, measured: list[Measured]) -> Evaluation:
    """Return the figures of one part."""
    plain, config, drafter = measured[0], part.config, part.drafter or drafter
    kinds = {number: prompt.kind for number, prompt in zip(part.numbers, part.prompts, strict=True)}
    fastest, (samples, example) = fastest_plain(measured), plain.shown or ([], None)
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
        samples=samples,
        example=example,
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

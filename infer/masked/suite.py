"""Question sets for masked diffusion models, in the layout of the self-speculation paper's Table 1.

Of every chat the first turn is asked. A finished set is a file, and is not decoded again.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from infer.evaluation.measuring import Progress
from infer.evaluation.published import figures_of
from infer.evaluation.results import MethodResult, SetResult, SuiteResult
from infer.evaluation.suite import Asking, Questions, SuiteOptions, ask, ask_sets, settings_of, write_suite
from infer.evaluation.tables import DASH, markdown, means, span
from infer.masked.config import MaskedOptions
from infer.masked.evaluation import how_cached, masked_evaluation, masked_variants
from infer.masked.model import MaskedModel

LENGTHS = (3, 4, 5)  # the paper's draft lengths; its drafts are a chain by confidence
CITATION = (
    "Self Speculative Decoding for Diffusion Large Language Models, arXiv:2510.04147, Table 1: A100 80GB, dual cache, "
    "256 tokens, blocks of 8, GSM8K and MATH a tenth of each, zero-shot by lm-eval's prompts"
)
TABLE = Path(__file__).with_name("published.csv")  # of the paper; MATH stands beside MATH-500


class PublishedSSD(NamedTuple):
    """One cell of the paper's table: a model, a draft length, a set."""

    tokens_per_second: float
    speedup: float
    percent_saved: float  # of the steps


def published_ssd(model: str, draft_length: object, name: str) -> PublishedSSD | None:
    """Return the paper's figures for a masked model, None where it has none."""
    found = figures_of(TABLE, model, str(draft_length), name)
    return found and PublishedSSD(*found)


def evaluate_masked_suite(
    model: MaskedModel,
    suite: Sequence[Questions],
    options: SuiteOptions,
    decoding: MaskedOptions,
    out: Path,
    say: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda done, total: None,
) -> SuiteResult:
    """Ask every set at every temperature, step by step and with drafts of LENGTHS. `decoding`: what
    `evaluation_options` makes. Writes each set to out/sets as soon as it is done, and the whole to out/suite.json.

    Raises ValueError where `out` holds a set that was measured with other settings, and where no question of a set fits
    into the model.
    """

    def begin(questions: Questions, temperature: float) -> Asking:
        config = replace(decoding, temperature=temperature)
        settings = settings_of(model, None, questions, options.thinking, config)
        return settings, lambda: evaluate_masked_set(model, questions, settings, config, progress)

    sets = ask_sets(suite, options, begin, out, say)
    return write_suite(out, options.name, model.name, sets, decoding.block_length)


def evaluate_masked_set(
    model: MaskedModel,
    questions: Questions,
    settings: dict[str, object],
    config: MaskedOptions,
    progress: Progress,
) -> SetResult:
    """Ask one set at one temperature."""
    methods = masked_variants(config, LENGTHS, ("greedy",), 1)[: 1 + len(LENGTHS)]  # without automatic lengths
    measured, left_out = ask(model, None, questions, settings["thinking"], methods, progress, turns=1)
    answers = len(measured[0].texts)
    return SetResult(
        settings=settings,
        set=questions.name,
        title=questions.title,
        temperature=config.temperature,
        questions=len(questions.chats),
        answers=answers,
        left_out=left_out,
        result=masked_evaluation(model, answers, config, measured, {}),
    )


def masked_suite_table(suite: SuiteResult) -> str:
    """Return for each temperature the paper's Table 1: for every set, tokens a second before an end, with the speedup
    over step by step, and the share of the steps saved; below ours the paper's, where it has this model."""
    parts, known = [f"# {suite.suite}: {suite.target}"], False
    for temperature in dict.fromkeys(one.temperature for one in suite.sets):
        sets = [one for one in suite.sets if one.temperature == temperature]
        head = ["decoding", "drafts", *(f"{one.title} {name}" for one in sets for name in ("TPS", "Step↓"))]
        rows = []
        for i, method in enumerate(sets[0].result.methods):
            length = method.draft_length or DASH
            name = "self-speculation" if i else "step by step"
            rows.append([name, str(length), *(cell for one in sets for cell in cells(one, i)), *mean(sets, i)])
            theirs = [published_ssd(suite.target, length, one.set) if temperature == 0 else None for one in sets]
            if any(theirs):
                known = True
                figures = [cell for one in theirs for cell in published_cells(one)]
                rows.append(["the paper's", str(length), *figures, DASH, DASH])
        parts += [f"## Temperature {temperature:g}", markdown([*head, "mean TPS", "mean Step↓"], rows)]
    answers = sum(one.answers for one in suite.sets)
    same = min(method.same / one.answers for one in suite.sets for method in one.result.methods)
    parts.append(
        f"{suite.device}, {suite.dtype}, {answers} answers of {suite.max_new_tokens} tokens, "
        f"{how_cached(suite.sets[0].result.masked)}. TPS: tokens a second before an end; in brackets the speedup, "
        "median over answers with its 95 % interval. Answers that are those of step by step: at least "
        f"{same:.0%}." + f" Paper: {CITATION}." * known
    )
    return "\n\n".join(parts)


def cells(one: SetResult, i: int) -> list[str]:
    """Return a set's two cells of one method."""
    method = one.result.methods[i]
    if i == 0:
        return [f"{method.tokens_per_second:.2f}", DASH]
    speedup = f"{method.speedup:.2f}x{span(method.speedup_interval)}"
    return [f"{method.tokens_per_second:.2f} ({speedup})", f"{one.result.step_reduction(method):.1%}"]


def published_cells(one: PublishedSSD | None) -> list[str]:
    """Return the paper's two cells."""
    if one is None:
        return [DASH, DASH]
    return [f"{one.tokens_per_second:.2f} ({one.speedup:.2f}x)", f"{one.percent_saved:.1f}%"]


def mean(sets: Sequence[SetResult], i: int) -> list[str]:
    """Return the cells of a method's means over the sets."""
    found: list[MethodResult] = [one.result.methods[i] for one in sets]
    saved = [one.result.step_reduction(method) for one, method in zip(sets, found, strict=True)]
    rows = [[method.tokens_per_second, method.speedup, share] for method, share in zip(found, saved, strict=True)]
    rate, speedup, share = means(rows)
    return [f"{rate:.2f}" + f" ({speedup:.2f}x)" * bool(i), f"{share:.1%}" if i else DASH]

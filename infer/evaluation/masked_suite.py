"""Question sets for masked diffusion models, in the layout of the self-speculation paper's Table 1.

Of every chat the first turn is asked. A finished set is a file, and is not decoded again.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from infer.api import positions_of
from infer.config import DecodeOptions
from infer.evaluation.evaluate import describe_device
from infer.evaluation.masked import masked_evaluation, masked_variants
from infer.evaluation.measuring import Progress, measure
from infer.evaluation.published import SSD_CITATION, published_ssd
from infer.evaluation.results import Evaluation, MaskedDetails, MethodResult, SetResult, SuiteResult
from infer.evaluation.suite import Asking, Questions, SuiteOptions, ask_sets, prompt_ids, write_suite
from infer.evaluation.tables import DASH, markdown, means, span
from infer.masked.model import MaskedModel
from infer.utils.files import json_digest

LENGTHS = (3, 4, 5)  # the paper's draft lengths; its drafts are a chain by confidence


def evaluate_masked_suite(
    model: MaskedModel,
    suite: Sequence[Questions],
    options: SuiteOptions,
    decoding: DecodeOptions,
    out: Path,
    say: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda done, total: None,
) -> SuiteResult:
    """Ask every set at every temperature, step by step and with drafts of LENGTHS. `decoding`: what `masked_options`
    makes. Writes each set to out/sets as soon as it is done, and the whole to out/suite.json.

    Raises ValueError where `out` holds a set that was measured with other settings, and where no question of a set fits
    into the model.
    """

    def begin(questions: Questions, temperature: float) -> Asking:
        config = replace(decoding, temperature=temperature)
        settings = {
            "target": model.name,
            "dtype": str(model.dtype),
            "device": describe_device(model.device),
            "questions": json_digest(questions.chats),
        } | asdict(config)
        return settings, lambda: evaluate_masked_set(model, questions, options.thinking, settings, config, progress)

    sets = ask_sets(suite, options, begin, out, say)
    return write_suite(out, options.name, model.name, sets, decoding.block_length)


def evaluate_masked_set(
    model: MaskedModel,
    questions: Questions,
    thinking: bool,
    settings: dict[str, object],
    config: DecodeOptions,
    progress: Progress,
) -> SetResult:
    """Ask one set at one temperature."""
    asked = [prompt_ids(model, chat[0], thinking) for chat in questions.chats]
    prompts = [ids for ids in asked if len(ids) + config.max_new_tokens <= positions_of(model)]
    if not prompts:
        raise ValueError(
            f"{questions.title}: no question and {config.max_new_tokens} new tokens fit into the model's "
            f"{positions_of(model)} positions: lower evaluation.max_new_tokens"
        )
    variants = masked_variants(config, LENGTHS, ("greedy",), 1)[: 1 + len(LENGTHS)]  # without automatic lengths
    measured = measure(model, None, variants, prompts, progress)
    details = MaskedDetails(config.block_length, config.cache, config.refresh, [], {})
    result = masked_evaluation(model, len(prompts), config, measured, details)
    return SetResult(
        settings=settings,
        set=questions.name,
        title=questions.title,
        temperature=config.temperature,
        questions=len(asked),
        answers=len(prompts),
        left_out=len(asked) - len(prompts),
        result=result,
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
            rows.append([name, str(length), *(cell for one in sets for cell in cells(one.result, i)), *mean(sets, i)])
            theirs = [published_ssd(suite.target, length, one.set) if temperature == 0 else None for one in sets]
            if any(theirs):
                known = True
                figures = [
                    cell
                    for one in theirs
                    for cell in (
                        (f"{one.tokens_per_second:.2f} ({one.speedup:.2f}x)", f"{one.step_reduction:.1%}")
                        if one
                        else (DASH, DASH)
                    )
                ]
                rows.append(["the paper's", str(length), *figures, DASH, DASH])
        parts += [f"## Temperature {temperature:g}", markdown([*head, "mean TPS", "mean Step↓"], rows)]
    details, answers = suite.sets[0].result.masked, sum(one.answers for one in suite.sets)
    policy = "no cache" if details.cache == "none" else f"dual cache, refresh {details.refresh}"
    same = min(method.same / one.answers for one in suite.sets for method in one.result.methods)
    parts.append(
        f"{suite.device}, {suite.dtype}, {answers} answers of {suite.max_new_tokens} tokens, blocks of "
        f"{details.block_length}, {policy}. TPS: tokens a second before an end; in brackets the speedup, median over "
        f"answers with its 95 % interval. Answers that are those of step by step: at least {same:.0%}."
        + f" Paper: {SSD_CITATION}."
        * known
    )
    return "\n\n".join(parts)


def cells(evaluation: Evaluation, i: int) -> list[str]:
    """Return a set's two cells of one method."""
    method = evaluation.methods[i]
    if i == 0:
        return [f"{method.tokens_per_second:.2f}", DASH]
    return [f"{method.tokens_per_second:.2f} ({sped(method)})", f"{evaluation.step_reduction(method):.1%}"]


def sped(method: MethodResult) -> str:
    return f"{method.speedup:.2f}x{span(method.speedup_interval)}"


def mean(sets: Sequence[SetResult], i: int) -> list[str]:
    """Return the cells of a method's means over the sets."""
    found = [(one.result.methods[i], one.result.step_reduction(one.result.methods[i])) for one in sets]
    rate, speedup, saved = means([[method.tokens_per_second, method.speedup, share] for method, share in found])
    return [f"{rate:.2f}" + f" ({speedup:.2f}x)" * bool(i), f"{saved:.1%}" if i else DASH]

"""`eval`: a drafter measured on held-out prompts or on a suite of question sets; or a masked
diffusion model."""

import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import ClassVar

from data.rows import DataConfig, check_source
from data.suites import SuiteConfig
from infer.cli.models import MaskedConfig, OfDrafter, load
from infer.config import EvaluationConfig
from infer.targets.kinds import MASKED, is_masked
from infer.utils.progress import Progress


@dataclass
class OfData(OfDrafter):
    """Options of a command that decodes held-out text.

    data: see DataConfig in data/rows.py
    evaluation: see EvaluationConfig in infer/config.py
    """

    FROM_RUN: ClassVar = ("target", "data")
    data: DataConfig = field(default_factory=DataConfig, kw_only=True)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig, kw_only=True)


@dataclass
class EvalCommand(OfData):
    """Evaluate a drafter on held-out prompts, as training does at a checkpoint, or on a suite of
    question sets. For a masked diffusion model, which drafts for itself, measure its speedup.

    checkpoint: a drafter folder, a training checkpoint, or the name of a target whose drafter this
        repository contains (embedded, smollm2); lookup: drafts from the n-grams of the sequence
        itself; default: the drafter in the target's folder
    out: folder for numbers and report
    target: see TargetConfig in infer/config.py
    drafter: see LoadedConfig in infer/config.py
    data: held-out prompts, see DataConfig in data/rows.py
    evaluation: see EvaluationConfig in infer/config.py
    suite: question sets instead of data, see SuiteConfig in data/suites.py; evaluation's options
        apply, except those for prompts
    masked: only if the target is a masked diffusion model, see MaskedConfig in
        infer/masked/config.py
    """

    checkpoint: str = "${target.path}"
    out: str = "runs/evaluation"
    suite: SuiteConfig = field(default_factory=SuiteConfig)
    masked: MaskedConfig = field(default_factory=MaskedConfig)


def run(config: EvalCommand) -> None:
    if config.suite.name is not None:
        return run_suite(config)
    from data.prompts import evaluation_prompts, few_prompts
    from infer.evaluation.evaluate import evaluate
    from infer.evaluation.report import RunFacts, write_report
    from infer.evaluation.results import write_result
    from infer.evaluation.tables import headline, table
    from infer.utils.errors import command_line
    from infer.utils.redact import redact

    options = config.evaluation
    out = Path(config.out)
    masked = is_masked(config.target.path)
    if not masked:
        check_source(
            config.data, config.target.path, ", or suite=files with suite.folder=<question sets>"
        )
    target, drafter = load(config.target, config.checkpoint, config.drafter)
    outside = 0 if masked else options.external_prompts
    prompts = evaluation_prompts(
        config.data, target.tokenizer, options.prompts, options.max_prompt_tokens, outside
    )
    if few := few_prompts(sum(prompt.beside is None for prompt in prompts), options.prompts):
        print(few, file=sys.stderr)
    progress = Progress("evaluating", "prompts", minutes=options.max_minutes)
    if masked:
        prompt_ids = [prompt.ids for prompt in prompts]
        result = resolve_name(MASKED.evaluate)(target, prompt_ids, options, config.masked, progress)
    else:
        result = evaluate(target, drafter, prompts, options, progress)
        result = replace(result, checkpoint=config.checkpoint, drafter=config.checkpoint)
    out.mkdir(parents=True, exist_ok=True)
    write_result(out / "evaluation.json", result)
    print(table(result))
    if not masked:
        data = " ".join(filter(None, (config.data.source, config.data.path)))
        facts = RunFacts(command_line(), redact(asdict(config)), data)
        print(f"\n{headline(result)}\n\nreport      {write_report(out, [result], run=facts)}")


def run_suite(config: EvalCommand) -> None:
    from data.suites import load_suite
    from infer.evaluation.published import suite_table
    from infer.evaluation.suite import drafter_digest, evaluate_suite
    from infer.utils.files import atomic_write

    out = Path(config.out)
    progress = Progress("asking", "questions")
    if is_masked(config.target.path):
        raise ValueError(
            f"suite={config.suite.name}: for causal targets; a masked model is asked prompts (data=jsonl)"
        )
    drafter_digest(config.checkpoint)  # is it there? Asked before anything is downloaded or loaded
    suite = load_suite(config.suite)
    target, drafter = load(config.target, config.checkpoint, config.drafter)
    settings = config.suite, config.evaluation
    result = evaluate_suite(
        target, drafter, config.checkpoint, suite, *settings, out, progress.say, progress
    )
    text = suite_table(result)
    atomic_write(out / "suite.md", text + "\n")
    print(f"{text}\n\ntable    {out / 'suite.md'}\nnumbers  {out / 'suite.json'}")

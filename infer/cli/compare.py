"""The command `compare`: evaluates several drafters with every tree method on the same prompts."""

from dataclasses import dataclass, field
from pathlib import Path

from data.rows import refuse_embedded_answers
from infer.cli.eval import CommandWithData
from infer.cli.models import load_target_and_drafters
from infer.utils.checks import check_nested_options
from infer.utils.progress import Progress


def get_drafter_label(checkpoint: str) -> str:
    """Return the name of a drafter in the table and the chart of this command.

    For a checkpoint of a training run, this is the name of the run's folder. For any other drafter,
    it is the name of the drafter's folder.
    """
    folders = Path(checkpoint).parts
    if "checkpoints" in folders[1:]:
        return folders[folders.index("checkpoints") - 1]
    return Path(checkpoint).name


@dataclass
class CompareCommand(CommandWithData):
    """Evaluate several drafters with every tree method on the same prompts.

    checkpoints: a list of drafter folders and training checkpoints. The entry lookup means prompt
        lookup, which drafts the continuation of an earlier n-gram of the sequence
    out: output folder. The command writes a table, a chart and the results as JSON into it
    target: see TargetConfig in infer/config.py
    drafter: see DrafterLoadConfig in infer/config.py
    data: held-out prompts, see DataConfig in data/rows.py
    evaluation: see EvaluationConfig in infer/config.py
    """

    checkpoints: list[str] = field(
        default_factory=lambda: [f"runs/embedded-{x}/checkpoints/best" for x in ("dflash", "dart")]
    )
    out: str = "runs/comparison"

    def check(self) -> None:
        """Raise ValueError if `checkpoints` is empty or has two checkpoints with the same name."""
        check_nested_options(self)
        if not self.checkpoints:
            raise ValueError("checkpoints is empty: give checkpoints=[runs/a/checkpoints/best,...]")
        if len(set(map(get_drafter_label, self.checkpoints))) < len(self.checkpoints):
            raise ValueError(
                f"checkpoints={list(self.checkpoints)}: two entries have the same run name; give "
                "one checkpoint of each run"
            )


def run(config: CompareCommand) -> None:
    """Evaluate the drafters. Write a table, a chart and a file of results, and print the table."""
    from data.prompts import select_evaluation_prompts
    from infer.evaluation.charts import build_budget_charts, render_charts
    from infer.evaluation.evaluate import evaluate
    from infer.evaluation.results import to_json
    from infer.evaluation.tables import format_comparison
    from infer.utils.files import atomic_write, write_json

    refuse_embedded_answers(config.data, config.target.path)
    options = config.evaluation
    evaluations = {}
    target, drafters = load_target_and_drafters(config.target, config.checkpoints, config.drafter)
    prompts = select_evaluation_prompts(
        config.data,
        target.tokenizer,
        options.prompts,
        options.max_prompt_tokens,
        options.external_prompts,
    )
    for checkpoint, drafter in zip(config.checkpoints, drafters, strict=True):
        name = get_drafter_label(checkpoint)
        progress = Progress(f"evaluating {name}", "prompts", minutes=options.max_minutes)
        evaluations[name] = evaluate(target, drafter, prompts, options, progress)
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    results = {name: to_json(evaluation) for name, evaluation in evaluations.items()}
    write_json(out / "comparison.json", results)
    first = next(iter(evaluations.values()))
    table = format_comparison(evaluations)
    cuts = "".join(
        f" {name}: {evaluation.time_limit_note}."
        for name, evaluation in evaluations.items()
        if evaluation.time_limit_note
    )
    footer = f"{first.device}, {first.prompts} prompts.{cuts}"
    atomic_write(out / "comparison.md", f"{table}\n\n{footer}\n")
    atomic_write(out / "comparison.svg", render_charts(build_budget_charts(evaluations)))
    print(f"{table}\n\ntable    {out / 'comparison.md'}\nfigure   {out / 'comparison.svg'}")

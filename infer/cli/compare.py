"""`compare`: several drafters with every tree, on the same prompts."""

from dataclasses import dataclass, field
from pathlib import Path

from data.rows import check_source
from infer.cli.eval import OfData
from infer.cli.models import load_all
from infer.utils.checks import check_parts
from infer.utils.progress import Progress


def run_name(checkpoint: str) -> str:
    """Return the name of a checkpoint beside others: its run's, or its folder's."""
    parts = Path(checkpoint).parts
    return (
        parts[parts.index("checkpoints") - 1]
        if "checkpoints" in parts[1:]
        else Path(checkpoint).name
    )


@dataclass
class CompareCommand(OfData):
    """Evaluate several drafters with every tree method on the same prompts.

    checkpoints: drafter folders, training checkpoints, or lookup: drafts from the n-grams of the
        sequence itself
    out: folder for the table, the figure and the numbers
    target: see TargetConfig in infer/config.py
    drafter: see LoadedConfig in infer/config.py
    data: held-out prompts, see DataConfig in data/rows.py
    evaluation: see EvaluationConfig in infer/config.py
    """

    checkpoints: list[str] = field(
        default_factory=lambda: [f"runs/embedded-{x}/checkpoints/best" for x in ("dflash", "dart")]
    )
    out: str = "runs/comparison"

    def check(self) -> None:
        """Raise ValueError for what cannot be compared."""
        check_parts(self)
        if not self.checkpoints:
            raise ValueError("checkpoints=[runs/a/checkpoints/best,...]: which drafters?")
        if len(set(map(run_name, self.checkpoints))) < len(self.checkpoints):
            raise ValueError(f"checkpoints={list(self.checkpoints)}: one of them comes twice")


def run(config: CompareCommand) -> None:
    from data.prompts import evaluation_prompts
    from infer.evaluation.charts import budget_charts, picture
    from infer.evaluation.evaluate import evaluate
    from infer.evaluation.results import to_json
    from infer.evaluation.tables import comparison
    from infer.utils.files import atomic_write, write_json

    check_source(config.data, config.target.path)
    options = config.evaluation
    evaluations = {}
    target, drafters = load_all(config.target, config.checkpoints, config.drafter)
    prompts = evaluation_prompts(
        config.data,
        target.tokenizer,
        options.prompts,
        options.max_prompt_tokens,
        options.external_prompts,
    )
    for name, drafter in zip(map(run_name, config.checkpoints), drafters, strict=True):
        progress = Progress(f"evaluating {name}", "prompts", minutes=options.max_minutes)
        evaluations[name] = evaluate(target, drafter, prompts, options, progress)
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    write_json(
        out / "comparison.json",
        {name: to_json(evaluation) for name, evaluation in evaluations.items()},
    )
    some = next(iter(evaluations.values()))
    text = comparison(evaluations)
    cuts = "".join(f" {name}: {one.cut}." for name, one in evaluations.items() if one.cut)
    atomic_write(out / "comparison.md", f"{text}\n\n{some.device}, {some.prompts} prompts.{cuts}\n")
    atomic_write(out / "comparison.svg", picture(budget_charts(evaluations)))
    print(f"{text}\n\ntable    {out / 'comparison.md'}\npicture  {out / 'comparison.svg'}")

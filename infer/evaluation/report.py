"""Writes the report of an evaluation as an HTML page without external files.

The page is for readers who do not know speculative decoding. The template report.html.j2 contains
its text. The colours follow the light or dark setting of the browser. All that a colour shows is
also shown by a sign, a font or a line pattern.
"""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from infer.evaluation.charts import (
    build_budget_charts,
    build_first_choice_chart,
    build_loss_chart,
    build_tau_chart,
    draw_tree,
)
from infer.evaluation.metrics import select_best_checkpoint
from infer.evaluation.results import Evaluation
from infer.evaluation.tables import (
    METHOD_COLUMNS,
    build_group_rows,
    build_replay_table,
    build_significance_legend,
    format_method_row,
    group_by_prompt_kind,
    list_findings,
    list_measurement_notes,
)
from infer.evaluation.templates import render_template
from infer.utils.files import atomic_write
from infer.utils.progress import format_duration


@dataclass(frozen=True)
class RunDescription:
    """What a report says about the training or evaluation run.

    command: the command line
    config: the options of the run, without secrets
    data: name of the data set
    losses: pairs (training step, loss)
    seconds: duration of the training
    """

    command: str | None = None
    config: dict[str, object] = field(default_factory=dict)
    data: str | None = None
    losses: Sequence[tuple[int, float]] = ()
    seconds: float | None = None


def write_report(
    folder: Path,
    evaluations: list[Evaluation],
    notes: Sequence[str] = (),
    run: RunDescription | None = None,
) -> Path:
    """Write report.html into a folder, and return the path of the file.

    The page shows the evaluation of the best checkpoint in detail. If there are several
    evaluations, it also has a chart of τ by training step.

    notes: sentences for the top of the page
    """
    evaluations = sorted(evaluations, key=lambda evaluation: evaluation.step or 0)
    best = select_best_checkpoint(evaluations)
    run = run or RunDescription()

    charts = build_budget_charts({"": best})
    if best.tree_study and best.tree_study.first_choices:
        charts.append(build_first_choice_chart(best.tree_study))
    if len(evaluations) > 1:
        charts.append(build_tau_chart(evaluations))
    if run.losses:
        charts.append(build_loss_chart(run.losses))

    *findings, outputs_sentence = list_findings(best)
    groups = group_by_prompt_kind(best)
    group_rows = build_group_rows(best, groups)
    legend = [
        "The bold row is the fastest method with the drafter, by the lower end of its interval.",
        *build_significance_legend(best.methods),
        *(f"{note[0].upper()}{note[1:]}." for note in list_measurement_notes(best)),
    ]
    page = render_template(
        "report.html.j2",
        title=build_title(best),
        findings=findings,
        outputs=outputs_sentence,
        notes=notes,
        evaluation=best,
        example=best.example,
        tree=best.example and draw_tree(best.example),
        columns=METHOD_COLUMNS,
        methods=[format_method_row(method) for method in best.methods],
        best=best.methods.index(best.best_drafter_method),
        legend=legend,
        groups=list(groups),
        group_rows=group_rows,
        study=build_replay_table(best),
        marks=build_significance_legend((), [cell for row in group_rows for cell in row[1:]]),
        charts=charts,
        settings=list_settings(best, run),
        configuration=flatten_config(run.config),
    )
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / "report.html", page)
    return folder / "report.html"


def build_title(evaluation: Evaluation) -> str:
    """Return the title of the page: drafter, training step, target, date and machine.

    What the evaluation does not record is left out.
    """
    drafter = f"Drafter {evaluation.drafter}" if evaluation.drafter else "A drafter"
    step = f" (step {evaluation.step})" if evaluation.step else ""
    date = f", {evaluation.date}" if evaluation.date else ""
    return f"{drafter}{step} for {evaluation.target}{date}, {evaluation.device}"


def list_settings(evaluation: Evaluation, run: RunDescription) -> list[tuple[str, object]]:
    """Return (name, value) of each setting that the page shows, such as data, times and machine."""
    methods = [method for each in evaluation.with_others for method in each.methods]
    prompts = f"{evaluation.prompts} held-out, at most {evaluation.max_new_tokens} new tokens each"
    temperature = f"{evaluation.temperature:g}"
    if evaluation.temperature == 0:
        temperature += " (greedy)"
    machine = f"{evaluation.device}; {platform.system()}, Python {platform.python_version()}"
    rows = [
        ("Command", run.command),
        ("Measured on", evaluation.date),
        ("Checkpoint", evaluation.checkpoint),
        ("Target", evaluation.target),
        ("Data", run.data),
        ("Prompts", prompts),
        ("Temperature", temperature),
        ("Block size", evaluation.block_size),
        ("Training took", None if run.seconds is None else format_duration(run.seconds)),
        ("Decoding took", format_duration(sum(method.seconds for method in methods))),
        ("Machine", machine),
        ("Number format", evaluation.dtype),
    ]
    return [(name, value) for name, value in rows if value is not None]


def flatten_config(config: Mapping, prefix: str = "") -> list[tuple[str, object]]:
    """Return (dotted name, value) of every option in a nested configuration.

    prefix: put in front of every name
    """
    rows = []
    for key, value in config.items():
        if isinstance(value, dict):
            rows += flatten_config(value, f"{prefix}{key}.")
        else:
            rows.append((prefix + key, value))
    return rows

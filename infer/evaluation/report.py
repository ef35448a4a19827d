"""One page about an evaluation, for a reader who has never heard of drafting; it needs no network.

report.html.j2 holds what every page says. Colours follow the reader's light or dark setting, and
every difference that is coloured is marked without colour too.
"""

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from infer.evaluation.charts import (
    budget_charts,
    choices_chart,
    drawn_tree,
    loss_chart,
    steps_chart,
)
from infer.evaluation.pages import render
from infer.evaluation.results import Evaluation
from infer.evaluation.ruler import best_of
from infer.evaluation.tables import (
    COLUMNS,
    beside,
    findings,
    kinds_of,
    legend,
    method_cells,
    notes_of,
    study_table,
)
from infer.utils.files import atomic_write
from infer.utils.progress import duration


@dataclass(frozen=True)
class RunFacts:
    """What a report tells of the run behind an evaluation."""

    command: str | None = None
    config: dict[str, object] = field(default_factory=dict)  # without secrets
    data: str | None = None
    losses: Sequence[tuple[int, float]] = ()  # (step, loss)
    seconds: float | None = None  # of training


def write_report(
    folder: Path,
    evaluations: list[Evaluation],
    notes: Sequence[str] = (),
    run: RunFacts | None = None,
) -> Path:
    """Write report.html into `folder`, with `notes` at the top of the page; return its path.

    The best evaluation is shown in detail. If there are several, τ by training step is drawn too.
    """
    evaluations = sorted(evaluations, key=lambda evaluation: evaluation.step or 0)
    run = run or RunFacts()
    shown = best_of(evaluations)
    sentences = findings(shown)
    charts = budget_charts({"": shown})
    charts += [choices_chart(shown.trees)] if shown.trees and shown.trees.choices else []
    charts += [steps_chart(evaluations)] if len(evaluations) > 1 else []
    charts += [loss_chart(run.losses)] if run.losses else []
    groups = kinds_of(shown)
    others = beside(shown, groups)
    lines = [
        "Bold: the drafter's fastest method, by the lower end of its interval.",
        *legend(shown.methods),
    ]
    page = render(
        "report.html.j2",
        title=title_of(shown),
        findings=sentences[:-1],
        outputs=sentences[-1],
        notes=notes,
        evaluation=shown,
        example=shown.example,
        tree=shown.example and drawn_tree(shown.example),
        columns=COLUMNS,
        methods=list(map(method_cells, shown.methods)),
        best=shown.methods.index(shown.fastest),
        legend=lines + [f"{line[0].upper()}{line[1:]}." for line in notes_of(shown)],
        groups=list(groups),
        others=others,
        study=study_table(shown),
        marks=legend((), [cell for row in others for cell in row[1:]]),
        charts=charts,
        settings=settings_of_run(shown, run),
        configuration=flat(run.config),
    )
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / "report.html", page)
    return folder / "report.html"


def title_of(evaluation: Evaluation) -> str:
    """Return what the page is about: drafter, target and day, as far as they are known."""
    drafter = f"Drafter {evaluation.drafter}" if evaluation.drafter else "A drafter"
    step = f", step {evaluation.step}" if evaluation.step else ""
    day = f", {evaluation.date}" if evaluation.date else ""
    return f"{drafter} for {evaluation.target}{step}{day}"


def settings_of_run(evaluation: Evaluation, run: RunFacts) -> list[tuple[str, object]]:
    """Return what the page says of checkpoint, data, command, time and machine."""
    every = [method for one in (evaluation, *(evaluation.beside or ())) for method in one.methods]
    rows = [
        ("Command", run.command),
        ("Measured on", evaluation.date),
        ("Checkpoint", evaluation.checkpoint),
        ("Target", evaluation.target),
        ("Data", run.data),
        (
            "Prompts",
            f"{evaluation.prompts} held-out, at most {evaluation.max_new_tokens} new tokens each",
        ),
        (
            "Temperature",
            f"{evaluation.temperature:g}" + ("" if evaluation.temperature else " (greedy)"),
        ),
        ("Block size", evaluation.block_size),
        ("Training took", None if run.seconds is None else duration(run.seconds)),
        ("Decoding took", duration(sum(method.seconds for method in every))),
        (
            "Machine",
            f"{evaluation.device}; {platform.system()}, Python {platform.python_version()}",
        ),
        ("Number format", evaluation.dtype),
    ]
    return [(name, value) for name, value in rows if value is not None]


def flat(config: dict, prefix: str = "") -> list[tuple[str, object]]:
    """Return a configuration's options, one row each, by their whole names."""
    rows = []
    for key, value in config.items():
        rows += (
            flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
        )
    return rows

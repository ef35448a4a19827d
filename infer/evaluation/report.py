"""One page about an evaluation, for a reader who has never heard of drafting; it needs no network.

report.html holds what every page says. Colours follow the reader's light or dark setting, and every difference that is
coloured is marked without colour too.
"""

import html
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from infer.evaluation.drawings import line_chart, tree_drawing
from infer.evaluation.figures import budget_charts, loss_chart, steps_chart
from infer.evaluation.results import Evaluation, ExampleRound, TextSample
from infer.evaluation.ruler import best_of
from infer.evaluation.tables import COLUMNS, beside, headline, kinds_of, legend, method_cells, notes
from infer.utils.files import atomic_write
from infer.utils.progress import duration

PAGE = Path(__file__).with_name("report.html").read_text(encoding="utf-8")


@dataclass(frozen=True)
class RunFacts:
    """What a report tells of the run behind an evaluation."""

    command: str | None = None
    config: dict[str, object] = field(default_factory=dict)  # without secrets
    data: str | None = None
    losses: Sequence[tuple[int, float]] = ()  # (step, loss)
    seconds: float | None = None  # of training


def write_report(
    folder: Path, evaluations: list[Evaluation], notes: Sequence[str] = (), run: RunFacts | None = None
) -> Path:
    """Write report.html into `folder`, with `notes` at the top of the page; return its path.

    The best evaluation is shown in detail. If there are several, τ by training step is drawn too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    evaluations = sorted(evaluations, key=lambda evaluation: evaluation.step or 0)
    page = folder / "report.html"
    atomic_write(page, _page(best_of(evaluations), evaluations, notes, run or RunFacts()))
    return page


def _page(evaluation: Evaluation, evaluations: list[Evaluation], notes: Sequence[str], run: RunFacts) -> str:
    escape = html.escape
    charts = budget_charts({"": evaluation})
    if len(evaluations) > 1:
        charts.append(steps_chart(evaluations))
    if run.losses:
        charts.append(loss_chart(run.losses))
    return Template(PAGE).substitute(
        headline=escape(headline(evaluation)),
        notes="".join(f"<p><strong>{escape(note)}</strong></p>" for note in notes),
        example=_example(evaluation.example) if evaluation.example else "",
        methods=_methods(evaluation),
        beside=_beside(evaluation),
        charts="".join(
            f"<figure><figcaption>{escape(chart.title)}</figcaption>{line_chart(chart)}</figure>" for chart in charts
        ),
        samples="".join(map(_sample, evaluation.samples)) or "<p>No texts were kept.</p>",
        rows=evaluation.rows,
        settings=_facts(facts(evaluation, run)),
        configuration=_facts(flat(run.config)),
    )


def _facts(facts: Sequence[tuple[str, object]]) -> str:
    """Return names and values as rows of a table."""
    return "".join(
        f'<tr><th scope="row">{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>' for name, value in facts
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], best: int | None, lines: Sequence[str]) -> str:
    """Return a table, the row numbered `best` in bold, and lines below it."""
    parts = [f"<tr>{''.join(f'<th>{html.escape(cell)}</th>' for cell in head)}</tr>"]
    for i, row in enumerate(rows):
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        parts.append(f"<tr{' class=best' * (i == best)}>{cells}</tr>")
    notes = "".join(f'<p class="note">{html.escape(line)}</p>' for line in lines)
    return f'<div class="wide"><table>{"".join(parts)}</table></div>{notes}'


def _methods(evaluation: Evaluation) -> str:
    """Return the table of methods, and what its marks mean."""
    lines = ["Bold: the drafter's fastest method, by the lower end of its interval."]
    lines += [*legend(evaluation.methods), *(f"{line[0].upper()}{line[1:]}." for line in notes(evaluation))]
    best = evaluation.methods.index(evaluation.fastest)
    return _table(COLUMNS, [method_cells(method) for method in evaluation.methods], best, lines)


def _beside(evaluation: Evaluation) -> str:
    """Return τ and speedups by kind of prompts, and on other prompts; nothing where all are of one kind."""
    groups = kinds_of(evaluation)
    if not groups:
        return ""
    rows = [[method.label, *cells] for method, cells in beside(evaluation, groups)]
    marks = legend((), [cell for row in rows for cell in row[1:]])
    return "<h2>On other texts</h2>" + _table(["τ, speedup", *groups], rows, None, marks)


def _example(example: ExampleRound) -> str:
    """Return the drawn round and what it shows."""
    accepted = sum(node.accepted for node in example.nodes) - 1
    ending = html.escape(example.before[-50:] + example.nodes[0].word)
    return (
        f"<p>One round as it happened. The text so far ends in <code>{ending}</code>. From its last token at the top "
        f"hang {len(example.nodes) - 1} guesses, each with the chance that the drafter gave it. The model kept the "
        f"{accepted} marked ✓, did without those marked ✗, and added one token (+) of its own: {accepted + 1} tokens "
        "in one pass. The average of that number over all rounds is called <strong>τ</strong>.</p>"
        f'{tree_drawing(example)}<p class="note">· is a space, ⏎ the end of a line.</p>'
    )


def _sample(sample: TextSample) -> str:
    """Return a text with what became of the drafts, marked by colour and by signs."""
    parts = [f'<pre><span class="prompt">{html.escape(sample.prompt)}</span>']
    for text, kind in sample.pieces:
        shown = html.escape(text)
        if kind == "rejected":  # spaces and line ends as signs: they are no part of the text
            parts.append(f'<del class="rejected">{shown.replace(chr(10), "⏎").replace(" ", "·")}</del>')
        else:
            parts.append(f'<span class="{html.escape(kind)}">{shown}</span>')
    return "".join(parts) + "</pre>"


def facts(evaluation: Evaluation, run: RunFacts) -> list[tuple[str, object]]:
    """Return what the page says of checkpoint, data, command, time and machine."""
    rows = [
        ("Command", run.command),
        ("Checkpoint", evaluation.checkpoint),
        ("Target", evaluation.target),
        ("Data", run.data),
        ("Prompts", f"{evaluation.prompts} held-out, at most {evaluation.max_new_tokens} new tokens each"),
        ("Temperature", f"{evaluation.temperature:g}" + ("" if evaluation.temperature else " (greedy)")),
        ("Block size", evaluation.block_size),
        ("Training took", None if run.seconds is None else duration(run.seconds)),
        ("Decoding took", duration(decoding_seconds(evaluation))),
        ("Machine", f"{evaluation.device}; {platform.system()}, Python {platform.python_version()}"),
        ("Number format", evaluation.dtype),
    ]
    return [(name, value) for name, value in rows if value is not None]


def decoding_seconds(evaluation: Evaluation) -> float:
    """Return the seconds of all decoding, every repeat counted."""
    every = [method for one in (evaluation, *(evaluation.beside or ())) for method in one.methods]
    return sum(sum(map(sum, (one.seconds for one in method.prompts or ()))) or method.seconds for method in every)


def flat(config: dict, prefix: str = "") -> list[tuple[str, object]]:
    """Return a configuration's options, one row each, by their whole names."""
    rows = []
    for key, value in config.items():
        rows += flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return rows

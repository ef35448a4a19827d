"""One page about an evaluation, for a reader who has never heard of drafting; it needs no network.

Colours follow the reader's light or dark setting, and every difference that is coloured is marked without colour too.
"""

import html
import io
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from infer.evaluation.drawings import Line, line_chart, tree_drawing
from infer.evaluation.figures import budget_figure, histogram_figure, loss_figure, steps_figure
from infer.evaluation.results import Evaluation, MethodResult, Round, Sample
from infer.evaluation.ruler import best_of
from infer.evaluation.tables import DASH, beside, headline, kinds_of, legend, mark, notes
from infer.utils.files import atomic_write

POINTS = 120  # of the loss curve: averages of so many stretches
SHADES = ("", "7 3", "2 3", "9 3 2 3", "4 2")  # dash patterns, so that lines differ without colour


@dataclass(frozen=True)
class Run:
    """What a report tells of the run behind an evaluation."""

    command: str | None = None
    config: dict[str, object] = field(default_factory=dict)  # without secrets
    data: str | None = None
    losses: Sequence[tuple[int, float]] = ()  # (step, loss)
    seconds: float | None = None  # of training


STYLE = """
:root { color-scheme: light dark; --ink: #1d1d1f; --soft: #5a5a60; --paper: #ffffff; --line: #d9d9de; --band: #f4f4f6;
  --ok: #00664a; --ok-band: #d9f2e8; --no: #a3210f; --no-band: #fbe3df; --own: #8a4600; --own-band: #fdeccd; }
@media (prefers-color-scheme: dark) { :root { --ink: #e9e9ec; --soft: #a9a9b2; --paper: #17181a; --line: #3c3d42;
  --band: #222327; --ok: #6fe0b8; --ok-band: #12382c; --no: #ff9d8e; --no-band: #451a14; --own: #ffc27a;
  --own-band: #402a0c; } .line, .dot { filter: brightness(1.5); } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 62rem;
  margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; } .lead { font-size: 1.15rem; }
.note { color: var(--soft); font-size: .9rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; overflow-wrap: normal; }
th, td { padding: .3rem .35rem; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
@media (max-width: 30rem) { table { font-size: .78rem; } th, td { padding: .3rem .15rem; } }
td small { display: block; color: var(--soft); white-space: nowrap; } tr.best { font-weight: 700; }
.facts td { text-align: left; overflow-wrap: anywhere; } .facts th { width: 35%; font-weight: 400; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; display: block; }
.chart text, .tree text { fill: var(--ink); font: 12px system-ui, sans-serif; }
.grid { stroke: var(--line); } .line { stroke-width: 2; }
.legend { list-style: none; margin: .2rem 0; padding: 0; display: flex; flex-wrap: wrap; gap: .1rem .9rem;
  font-size: .85rem; } .legend svg { display: inline; width: 28px; }
.tree rect { fill: var(--paper); stroke: var(--soft); } .tree line { stroke: var(--soft); stroke-width: 1.5; }
.tree rect.root { fill: var(--band); } .tree .token { font-family: ui-monospace, monospace; font-size: 11px; }
.tree rect.accepted { fill: var(--ok-band); stroke: var(--ok); stroke-width: 2.5; }
.tree line.accepted { stroke: var(--ok); stroke-width: 3; } .tree text.accepted { fill: var(--ok); }
.tree rect.rejected { fill: var(--no-band); stroke: var(--no); stroke-dasharray: 4 3; }
.tree text.rejected { fill: var(--no); text-decoration: line-through; } .tree line.rejected { stroke-dasharray: 4 3; }
.tree rect.added { fill: var(--own-band); stroke: var(--own); stroke-width: 2.5; }
.tree text.added { fill: var(--own); font-weight: 700; } .tree line.added { stroke: var(--own); stroke-dasharray: 2 2; }
.tree .share { font-size: 11px; }
pre { white-space: pre-wrap; border: 1px solid var(--line); border-radius: 6px; padding: .8rem; font-size: .85rem; }
.prompt { color: var(--soft); } .accepted { color: var(--ok); text-decoration: underline; }
.rejected { color: var(--no); } .corrected, .bonus { color: var(--own); font-weight: 700; }
.corrected { font-style: italic; }
dt { font-weight: 600; } dd { margin: 0 0 .6rem 0; } summary { cursor: pointer; font-weight: 600; }
"""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>What this drafter gains</title><style>{style}</style></head><body><main>
<h1>What this drafter gains</h1>
<p class="lead">{headline}</p>
{notes}
<h2>What a draft is</h2>
<p>A large language model writes one token (a word or a piece of one) after the other, and each costs a pass through all
of it. A small model, the <em>drafter</em>, guesses several tokens ahead; the large one checks all guesses in a single
pass and keeps those that it would have written itself. The text stays the same, and takes fewer passes.</p>
{example}
<h2>What was measured</h2>
{methods}
{beside}
<h2>In pictures</h2>
<div class="charts">{charts}</div>
<h2>What it wrote</h2>
{samples}
<h2>What the words mean</h2><dl>{glossary}</dl>
<h2>How it was measured</h2>
<p>Each method decodes a prompt before the next prompt has its turn, {rows} at a time, and each begins as often as the
others. A speedup is the median over prompts of tokens a second, over those of the fastest plain decoder: ours or that
of transformers, whichever is faster here. Intervals hold 95 % of what other prompts of the same kind would give. Texts
end where they repeat themselves for the fourth time.</p>
<table class="facts"><tbody>{settings}</tbody></table>
{configuration}
</main></body></html>
"""

CONFIGURATION = '<details><summary>Configuration</summary><table class="facts"><tbody>{rows}</tbody></table></details>'

GLOSSARY = (
    (
        "Round",
        "One pass of the drafter and one of the target: a draft, its check, and what is kept.",
    ),
    (
        "τ (tau, acceptance length)",
        "Tokens that a round adds to the text on average, counting the one that the target itself adds at the end of "
        "each round. Plain decoding has τ = 1; the most that a round can add is the block size.",
    ),
    (
        "Node budget",
        "How many drafted tokens the target checks in a round, arranged as a tree of alternatives or as a single line "
        "(chain). A larger tree holds more of what the target wants, and costs more to check.",
    ),
    (
        "Speedup",
        "How many times as fast the same text is written. It is below τ, because drafting takes time, and checking "
        "many tokens takes longer than one.",
    ),
)


def write_report(
    folder: Path, evaluations: list[Evaluation], notes: Sequence[str] = (), run: Run | None = None
) -> Path:
    """Write the pictures and report.html into `folder`, with `notes` at the top of the page; return the page's path.

    The best evaluation is shown in detail. If there are several, τ by training step is drawn too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    evaluations = sorted(evaluations, key=lambda evaluation: evaluation.step or 0)
    best, run = best_of(evaluations), run or Run()
    pictures = {"acceptance_histogram": histogram_figure(best), "budget_curve": budget_figure(best)}
    if len(evaluations) > 1:
        pictures["tau_by_step"] = steps_figure(evaluations)
    if run.losses:
        pictures["loss"] = loss_figure(list(run.losses))
    for name, figure in pictures.items():
        (folder / f"{name}.png").write_bytes(_png(figure))
    page = folder / "report.html"
    atomic_write(page, _page(best, evaluations, notes, run))
    return page


def _png(figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _page(evaluation: Evaluation, evaluations: list[Evaluation], notes: Sequence[str], run: Run) -> str:
    escape = html.escape
    config = _rows(flat(run.config))
    return PAGE.format(
        style=STYLE,
        headline=escape(headline(evaluation)),
        notes="".join(f"<p><strong>{escape(note)}</strong></p>" for note in notes),
        example=_example(evaluation.example) if evaluation.example else "",
        methods=_methods(evaluation),
        beside=_beside(evaluation),
        charts="".join(_charts(evaluation, evaluations, run)),
        samples=_samples(evaluation.samples),
        glossary="".join(f"<dt>{term}</dt><dd>{text}</dd>" for term, text in GLOSSARY),
        rows=evaluation.rows,
        settings=_rows(facts(evaluation, run)),
        configuration=CONFIGURATION.format(rows=config) if config else "",
    )


def _rows(facts: Sequence[tuple[str, object]]) -> str:
    """Return names and values as rows of a table."""
    return "".join(
        f'<tr><th scope="row">{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>' for name, value in facts
    )


def _example(example: Round) -> str:
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


def _methods(evaluation: Evaluation) -> str:
    """Return the table of methods, and what its marks mean."""
    best, rows = evaluation.fastest, []
    for method in evaluation.methods:
        same = {True: "yes", False: "NO", None: "-"}[method.identical]
        rows.append(
            f"<tr{' class=best' if method is best else ''}><td>{html.escape(method.label)}</td>"
            f"<td>{_with_interval(f'{method.tau:.2f}', method.tau_interval)}</td>"
            f"<td>{_with_interval(f'{method.speedup:.2f}{mark(method)}', method.speedup_interval)}</td>"
            f"<td>{method.tokens_per_second:.0f}</td><td>{same}</td></tr>"
        )
    lines = ["Bold: the drafter's fastest method, by the lower end of its interval."]
    lines += [*legend(evaluation.methods), *(f"{line[0].upper()}{line[1:]}." for line in notes(evaluation))]
    return (
        "<table><thead><tr><th>method</th><th>τ</th><th>speedup</th><th>tokens/s</th><th>same text</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>{_notes(lines)}"
    )


def _notes(lines: Sequence[str]) -> str:
    return "".join(f'<p class="note">{html.escape(line)}</p>' for line in lines)


def _with_interval(figure: str, interval: Sequence[float] | None) -> str:
    shown = interval is not None and interval[0] != interval[1]
    return figure + (f"<small>{interval[0]:.2f}–{interval[1]:.2f}</small>" if shown else "")


def _beside(evaluation: Evaluation) -> str:
    """Return chain, trees and n-grams alone over other kinds of prompts, of a tree the size measured on most."""
    groups, shown = kinds_of(evaluation), {}
    for method, cells in beside(evaluation, groups):
        if method in evaluation.drafting and cells.count(DASH) <= shown.get(method.name, ("", cells))[1].count(DASH):
            shown[method.name] = method.label, cells
    columns = list(shown.values())
    if not groups:
        return ""
    head = "".join(f"<th>{html.escape(label)}: τ, speedup</th>" for label, _ in columns)
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td>" + "".join(f"<td>{cells[i]}</td>" for _, cells in columns) + "</tr>"
        for i, name in enumerate(groups)
    )
    marks = legend((), [cell for _, cells in columns for cell in cells])
    table = f"<table><thead><tr><th>prompts</th>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f"<h2>On other texts</h2>{table}{_notes(marks)}"


def _charts(evaluation: Evaluation, evaluations: list[Evaluation], run: Run) -> list[str]:
    """Return the drawings: by budget, by step, and the loss."""
    charts = []
    if any(method.tree.by_budget for method in evaluation.methods):
        for key, name in (("tau", "τ, tokens a round"), ("speedup", "speed, plain decoding = 1")):
            charts.append(
                line_chart(f"{name}, by node budget", "node budget", name, budget_lines(evaluation, key), True)
            )
    if len(evaluations) > 1:
        charts.append(line_chart("τ during training", "training step", "τ, tokens a round", step_lines(evaluations)))
    if run.losses:
        line = Line("loss", averaged(run.losses), "#0072b2")
        charts.append(line_chart("Loss during training", "training step", "loss", [line]))
    return charts


def budget_lines(evaluation: Evaluation, key: str) -> list[Line]:
    """Return a line for every kind of tree, and level ones for the other methods."""
    kinds: dict[str, list[MethodResult]] = {}
    for method in evaluation.methods:
        kinds.setdefault(method.name, []).append(method)
    budgets = [method.budget for method in evaluation.methods if method.tree.by_budget]
    ordered = sorted(kinds.values(), key=lambda methods: not methods[0].tree.by_budget)
    return [
        Line(
            methods[0].tree.label,
            [(method.budget, getattr(method, key)) for method in methods]
            if methods[0].tree.by_budget
            else [(budget, getattr(methods[0], key)) for budget in (min(budgets), max(budgets))],
            methods[0].tree.colour,
            [getattr(method, f"{key}_interval") for method in methods] if methods[0].tree.by_budget else (),
            SHADES[i % len(SHADES)],
        )
        for i, methods in enumerate(ordered)
    ]


def step_lines(evaluations: list[Evaluation]) -> list[Line]:
    """Return τ by step: the chain and the largest tree of each kind."""
    last = {method.name: method.label for method in evaluations[-1].drafting}
    lines = []
    for i, label in enumerate(last.values()):
        found = [(one.step or 0, method) for one in evaluations for method in one.drafting if method.label == label]
        if found:
            points = [(step, method.tau) for step, method in found]
            spans, colour = [method.tau_interval for _, method in found], found[-1][1].tree.colour
            lines.append(Line(label, points, colour, spans, SHADES[i % len(SHADES)]))
    return lines


def averaged(losses: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """Return the curve as at most POINTS averages."""
    size = max(1, -(-len(losses) // POINTS))
    parts = [losses[first : first + size] for first in range(0, len(losses), size)]
    return [(sum(step for step, _ in part) / len(part), sum(loss for _, loss in part) / len(part)) for part in parts]


def _samples(samples: Sequence[Sample]) -> str:
    """Return texts with what became of the drafts, marked by colour and by signs."""
    if not samples:
        return "<p>No texts were kept.</p>"
    legend = (
        '<p>After the prompt (grey): <span class="accepted">accepted drafts</span> are underlined, '
        '<del class="rejected">rejected drafts</del>, which are no part of the text, are struck out, '
        '<span class="corrected">corrections</span> by the model are in bold italics, and tokens that it '
        '<span class="bonus">added</span> behind an accepted draft in bold.</p>'
    )
    return legend + "".join(
        f'<pre><span class="prompt">{html.escape(sample.prompt)}</span>'
        + "".join(_piece(text, kind) for text, kind in sample.pieces)
        + "</pre>"
        for sample in samples
    )


def _piece(text: str, kind: str) -> str:
    if kind == "rejected":  # spaces and line ends as signs: they are no part of the text
        return f'<del class="rejected">{html.escape(text).replace(chr(10), "⏎").replace(" ", "·")}</del>'
    return f'<span class="{html.escape(kind)}">{html.escape(text)}</span>'


def facts(evaluation: Evaluation, run: Run) -> list[tuple[str, object]]:
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


def duration(seconds: float) -> str:
    """Return seconds in words."""
    minutes = round(seconds / 60)
    return (
        f"{seconds:.0f} seconds"
        if seconds < 120
        else f"{minutes} minutes"
        if minutes < 120
        else f"{minutes / 60:.1f} hours"
    )


def flat(config: dict, prefix: str = "") -> list[tuple[str, object]]:
    """Return a configuration's options, one row each, by their whole names."""
    rows = []
    for key, value in config.items():
        rows += flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return rows

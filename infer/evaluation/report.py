"""Evaluations as pictures, and one page that needs no network. matplotlib is imported where it draws."""

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path

from infer.evaluation.results import Evaluation, MethodResult
from infer.evaluation.ruler import best_of
from infer.evaluation.tables import headline, span, speed
from infer.utils.files import atomic_write


def _axes(width: float, height: float, columns: int = 1):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=120)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="#dddddd", linewidth=0.6)
        ax.set_axisbelow(True)
    return figure, axes


def histogram_figure(evaluation: Evaluation):
    """Draw the shares of rounds by tokens committed: the methods of one size, and the fastest tree."""
    figure, (ax,) = _axes(7, 3.6)
    shown = [method for method in evaluation.methods if not method.tree.by_budget and method.tree.drafts]
    trees = [method for method in evaluation.methods if method.tree.by_budget]
    shown += [max(trees, key=lambda method: method.speedup)] if trees else []
    width = 0.8 / max(1, len(shown))
    for i, method in enumerate(shown):
        places = [n + (i - (len(shown) - 1) / 2) * width for n in range(1, len(method.histogram) + 1)]
        shares = [100 * count / max(1, method.rounds) for count in method.histogram]
        words = f"{method.label}, τ {method.tau:.2f}"
        ax.bar(places, shares, 0.95 * width, color=method.tree.colour, label=words)
    ax.set_xticks(range(1, evaluation.block_size + 1))
    ax.set_xlabel("tokens committed in a round (bonus token included)")
    ax.set_ylabel("share of rounds, %")
    ax.legend(frameon=False)
    return figure


def budget_figure(evaluation: Evaluation):
    """Draw acceptance length and speedup by node budget, with the chain and plain decoding as lines."""
    figure, axes = _axes(9, 3.6, 2)
    _budget_curves(axes, evaluation)
    axes[0].legend(frameon=False)
    return figure


def comparison_figure(evaluations: dict[str, Evaluation]):
    """Draw the curves of `budget_figure` for several drafters, each with a line style of its own."""
    figure, axes = _axes(11, 4.4, 2)
    for i, (name, evaluation) in enumerate(evaluations.items()):
        _budget_curves(axes, evaluation, ("-", ":", "-.", "--")[i % 4], f"{name} ", plain=i == 0)
    axes[1].legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _budget_curves(axes, evaluation: Evaluation, line: str = "-", prefix: str = "", plain: bool = True) -> None:
    """Draw τ and speedup by budget into two axes: a curve for every kind of tree, level lines for the other methods."""
    kinds: dict[str, list[MethodResult]] = {}
    for method in evaluation.methods:
        kinds.setdefault(method.name, []).append(method)
    budgets = sorted({method.budget for method in evaluation.methods if method.tree.by_budget})
    for ax, key, title in ((axes[0], "tau", "τ, tokens per round"), (axes[1], "speedup", "speed, plain decoding = 1")):
        for methods in sorted(kinds.values(), key=lambda methods: not methods[0].tree.by_budget):
            row, values = methods[0].tree, [getattr(method, key) for method in methods]
            if row.by_budget:
                points = [method.budget for method in methods]
                ax.plot(points, values, "o" + line, color=row.colour, label=prefix + row.label)
            elif row.drafts or plain:
                style = {"linestyle": "--" if line == "-" else line, "linewidth": 1.2}
                ax.axhline(values[0], color=row.colour, label=prefix * row.drafts + row.label, **style)
        ax.set_xscale("log", base=2)
        ax.set_xticks(budgets, [str(budget) for budget in budgets])
        ax.set_xlabel("node budget")
        ax.set_ylabel(title)


def steps_figure(evaluations: list[Evaluation]):
    """Draw acceptance length by training step: every method but plain decoding, larger trees in fuller colours."""
    figure, (ax,) = _axes(7, 3.6)
    steps = [evaluation.step for evaluation in evaluations]
    last = evaluations[-1].drafting
    for i, method in enumerate(last, 1):
        found = [{one.label: one for one in evaluation.drafting}.get(method.label) for evaluation in evaluations]
        taus = [float("nan") if one is None else one.tau for one in found]
        shade = 0.35 + 0.65 * i / len(last) if method.tree.by_budget else 1
        ax.plot(steps, taus, "o-", color=method.tree.colour, alpha=shade, markersize=4)
        place = (steps[-1], taus[-1])
        ax.annotate(f" {method.label}", place, va="center", fontsize=8, color=method.tree.colour)
    ax.margins(x=0.12)
    ax.set_xlabel("training step")
    ax.set_ylabel("τ, tokens per round")
    return figure


def sweep_figure(methods: list[str], taus: dict[str, list[float]]):
    """Draw the acceptance lengths of several runs, method by method."""
    figure, (ax,) = _axes(8, 4.2)
    for run, values in taus.items():
        ax.plot(methods, values, marker="o", linewidth=1.4, label=run)
    ax.set_xticks(range(len(methods)), methods, rotation=20, ha="right")
    ax.set_ylabel("tokens per round (τ)")
    ax.legend(frameon=False, fontsize=8)
    return figure


def _png(figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


STYLE = """
:root { color-scheme: light dark; --ink: #1d1d1f; --paper: #fff; --line: #ddd; --ok: #009e73; --bonus: #d55e00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --paper: #17181a; --line: #3a3b3d; --ok: #3ccf9f;
  --bonus: #ff9a5a; } img { filter: invert(.9) hue-rotate(180deg); } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; } .lead { font-size: 1.15rem; }
table { border-collapse: collapse; } th, td { padding: .25rem .8rem; text-align: right;
  border-bottom: 1px solid var(--line); } th:first-child, td:first-child { text-align: left; }
tr.best { font-weight: 600; } img { max-width: 100%; display: block; margin: 1rem 0; }
pre { white-space: pre-wrap; border: 1px solid var(--line); padding: .8rem; font-size: .85rem; }
.prompt { opacity: .6; } .accepted { color: var(--ok); } .bonus { color: var(--bonus); }
dt { font-weight: 600; } dd { margin: 0 0 .6rem 0; }
"""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Drafter report</title><style>{style}</style></head><body>
<h1>What this drafter gains</h1>
<p class="lead">{headline}</p>
{notes}
<table><thead><tr><th>method</th><th>τ</th><th>rounds</th><th>tokens/s</th><th>speedup</th><th>same output</th></tr>
</thead><tbody>{methods}</tbody></table>
{pictures}
<h2>What the words mean</h2><dl>{glossary}</dl>
<h2>What it wrote</h2>
<p>Prompt in grey, <span class="accepted">accepted drafts</span>, <span class="bonus">bonus tokens</span>.</p>
{samples}
<h2>How it was measured</h2>
<p>The methods took turns on the prompts, {rows} at a time; times include first draft and prefill.</p>
<table><tbody>{settings}</tbody></table>
</body></html>
"""

GLOSSARY = (
    (
        "Round",
        "The drafter proposes several next tokens in one pass, and the target checks all of them in one pass. What the "
        "target would have written anyway is kept, so the output is the same as without a drafter.",
    ),
    (
        "τ (acceptance length)",
        "Tokens committed per round, counting the token that the target itself adds at the end of each round (the "
        "bonus token). Plain decoding has τ = 1; the most that a round can commit is the block size.",
    ),
    (
        "Node budget",
        "How many drafted tokens the target checks per round, arranged as a tree of alternatives (DDTree) or as a "
        "single line (chain). A larger tree catches more of what the target wants, and costs more to check.",
    ),
)


def write_report(folder: Path, evaluations: list[Evaluation], notes: Sequence[str] = ()) -> Path:
    """Write the pictures and report.html into `folder`, with `notes` at the top of the page; return the page's path.

    The evaluation with the highest acceptance length is shown in detail. If there are several, τ by training step is
    drawn too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    evaluations = sorted(evaluations, key=lambda evaluation: evaluation.step or 0)
    best = best_of(evaluations)
    pictures = {
        "acceptance_histogram": ("How many tokens a round commits", histogram_figure(best)),
        "budget_curve": ("What a larger tree gains", budget_figure(best)),
    }
    if len(evaluations) > 1:
        pictures["tau_by_step"] = ("Acceptance length during training", steps_figure(evaluations))
    parts = []
    for name, (title, figure) in pictures.items():
        data = _png(figure)
        (folder / f"{name}.png").write_bytes(data)
        encoded = base64.b64encode(data).decode()
        parts.append(f'<h2>{title}</h2><img alt="{title}" src="data:image/png;base64,{encoded}">')
    page = folder / "report.html"
    atomic_write(page, _page(best, parts, notes))
    return page


def _page(evaluation: Evaluation, pictures: list[str], notes: Sequence[str]) -> str:
    escape, best = html.escape, evaluation.fastest
    rows = "".join(
        f"<tr{' class=best' if method is best else ''}><td>{method.label}</td>"
        f"<td>{method.tau:.2f}{span(method.tau_interval)}</td>"
        f"<td>{method.rounds}</td><td>{method.tokens_per_second:.1f}</td><td>{speed(method, interval=True)}</td>"
        f"<td>{ {True: 'yes', False: 'NO', None: '-'}[method.identical] }</td></tr>"
        for method in evaluation.methods
    )
    samples = "".join(
        f"<pre><span class=prompt>{escape(sample.prompt)}</span>"
        + "".join(f"<span class={escape(kind)}>{escape(text)}</span>" for text, kind in sample.pieces)
        + "</pre>"
        for sample in evaluation.samples
    )
    facts = [
        ("Checkpoint", evaluation.checkpoint),
        ("Target", evaluation.target),
        ("Hardware", evaluation.device),
        ("Number format", evaluation.dtype),
        ("Prompts", f"{evaluation.prompts} held-out, at most {evaluation.max_new_tokens} new tokens each"),
        ("Temperature", f"{evaluation.temperature:g}" + ("" if evaluation.temperature else " (greedy)")),
        ("Block size", evaluation.block_size),
    ]
    return PAGE.format(
        style=STYLE,
        headline=escape(headline(evaluation)),
        notes="".join(f"<p><strong>{escape(note)}</strong></p>" for note in notes),
        methods=rows,
        pictures="".join(pictures),
        glossary="".join(f"<dt>{term}</dt><dd>{text}</dd>" for term, text in GLOSSARY),
        samples=samples,
        rows=evaluation.rows,
        settings="".join(f"<tr><td>{name}</td><td>{escape(str(value))}</td></tr>" for name, value in facts),
    )

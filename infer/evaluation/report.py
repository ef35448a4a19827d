"""Evaluations to a table, pictures and one page that needs no network.

Works on the dictionaries that `infer.evaluation.evaluate.evaluate` returns; matplotlib is imported where it draws.
"""

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path

# told apart by colour-blind readers too
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072b2", "#d55e00", "#009e73", "#9b4f96", "#777777"
NAMES = {"ddtree": "DDTree", "continuity": "continuity", "ddtree+continuity": "DDTree + continuity"}
COLOURS = {"chain": ORANGE, "ddtree": BLUE, "continuity": GREEN, "ddtree+continuity": PURPLE}


def label(method: dict) -> str:
    """How a method is called: plain, chain, DDTree 64."""
    name = NAMES.get(method["name"])
    return method["name"] if name is None else f"{name} {method['budget']}"


def fastest(evaluation: dict) -> dict:
    """The method with the highest speedup, plain decoding aside."""
    return max(evaluation["methods"][1:], key=lambda method: method["speedup"])


def table(evaluation: dict) -> str:
    """The evaluation as text for a terminal, one line a method."""
    wide = max(11, *(len(method["name"]) + 1 for method in evaluation["methods"]))
    lines = [f"{'method':<{wide}}{'nodes':>6}{'τ':>7}{'rounds':>8}{'tokens/s':>10}{'speedup':>9}  same output as plain"]
    for method in evaluation["methods"]:
        lines.append(
            f"{method['name']:<{wide}}{method['budget'] or '-':>6}{method['tau']:>7.2f}{method['rounds']:>8}"
            f"{method['tokens_per_second']:>10.1f}{method['speedup']:>8.2f}x  {'yes' if method['identical'] else 'NO'}"
            + (f" ({method['ties']} prompts at ties, {method['defects']} by defects)" if "ties" in method else "")
        )
    return "\n".join(lines)


def headline(evaluation: dict) -> str:
    """The result in one or two plain sentences, good or bad."""
    best = fastest(evaluation)
    count = evaluation["prompts"]
    text = f"{label(best)} commits {best['tau']:.2f} tokens per round and decodes "
    if best["speedup"] >= 1:
        text += f"{best['speedup']:.2f} times as fast as plain decoding. "
    else:
        text += f"at only {best['speedup']:.2f} times the speed of plain decoding: here speculation does not pay. "
    wrong = [label(method) for method in evaluation["methods"] if not method["identical"]]
    if wrong:
        return text + f"Outputs of {', '.join(wrong)} differ from plain decoding's on some of {count} prompts."
    return text + f"On all {count} prompts every method wrote exactly what plain decoding wrote."


def _axes(width: float, height: float, columns: int = 1):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=120)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="#dddddd", linewidth=0.6)
        ax.set_axisbelow(True)
    return figure, axes


def histogram_figure(evaluation: dict):
    """Shares of rounds by tokens committed: chain against the fastest tree."""
    figure, (ax,) = _axes(7, 3.6)
    trees = [method for method in evaluation["methods"] if method["name"] in NAMES]
    shown = [method for method in evaluation["methods"] if method["name"] == "chain"]
    shown += [max(trees, key=lambda method: method["speedup"])] if trees else []
    for i, (method, colour) in enumerate(zip(shown, (ORANGE, BLUE), strict=False)):
        lengths = range(1, len(method["histogram"]) + 1)
        shares = [100 * count / max(1, method["rounds"]) for count in method["histogram"]]
        offset = (i - (len(shown) - 1) / 2) * 0.4
        ax.bar(
            [n + offset for n in lengths], shares, 0.38, color=colour, label=f"{label(method)}, τ {method['tau']:.2f}"
        )
    ax.set_xticks(range(1, evaluation["block_size"] + 1))
    ax.set_xlabel("tokens committed in a round (bonus token included)")
    ax.set_ylabel("share of rounds, %")
    ax.legend(frameon=False)
    return figure


def budget_figure(evaluation: dict):
    """Node budget against acceptance length and against speedup, with the chain and plain decoding as lines."""
    figure, axes = _axes(9, 3.6, 2)
    _budget_curves(axes, evaluation)
    axes[0].legend(frameon=False)
    return figure


def _budget_curves(axes, evaluation: dict, line: str = "-", prefix: str = "", plain: bool = True) -> None:
    """An evaluation's τ and speedup by budget into two axes: a curve a kind of tree, level lines for the rest."""
    methods = evaluation["methods"]
    budgets = sorted({method["budget"] for method in methods if method["name"] in NAMES})
    for ax, key, name in (
        (axes[0], "tau", "τ, tokens per round"),
        (axes[1], "speedup", "speed, plain decoding = 1"),
    ):
        for tree, words in NAMES.items():
            points = [(method["budget"], method[key]) for method in methods if method["name"] == tree]
            if points:
                ax.plot(*zip(*points, strict=True), "o" + line, color=COLOURS[tree], label=prefix + words)
        for method in methods:
            if method["name"] == "chain" or (plain and method["name"] == "plain"):
                style = {"linestyle": "--" if line == "-" else line, "linewidth": 1.2}
                colour = COLOURS.get(method["name"], GREY)
                ax.axhline(
                    method[key], color=colour, label=prefix * (method["name"] != "plain") + method["name"], **style
                )
        ax.set_xscale("log", base=2)
        ax.set_xticks(budgets, [str(budget) for budget in budgets])
        ax.set_xlabel("node budget")
        ax.set_ylabel(name)


def comparison(evaluations: dict[str, dict]) -> str:
    """Several drafters' evaluations side by side, as a Markdown table: for each τ, tokens a second and speedup."""
    first = next(iter(evaluations.values()))["methods"]
    lines = ["| tree | nodes | " + " | ".join(f"{name} τ | tokens/s | speedup" for name in evaluations) + " |"]
    lines.append("| --- |" + " ---: |" * (1 + 3 * len(evaluations)))
    keys = dict.fromkeys((m["name"], m["budget"] if m["name"] in NAMES else 0) for m in first)
    for name, budget in keys:
        cells = []
        for evaluation in evaluations.values():
            found = [m for m in evaluation["methods"] if m["name"] == name and (not budget or m["budget"] == budget)]
            for m in found:
                mark = "" if m["identical"] else " (other output)"
                cells += [f"{m['tau']:.2f}", f"{m['tokens_per_second']:.0f}", f"{m['speedup']:.2f}x{mark}"]
        lines.append(f"| {NAMES.get(name, name)} | {budget or '-'} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def comparison_figure(evaluations: dict[str, dict]):
    """The curves of `budget_figure` for several drafters, a kind of line for each."""
    figure, axes = _axes(11, 4.4, 2)
    for i, (name, evaluation) in enumerate(evaluations.items()):
        _budget_curves(axes, evaluation, ("-", ":", "-.", "--")[i % 4], f"{name} ", plain=i == 0)
    axes[1].legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def steps_figure(evaluations: list[dict]):
    """Acceptance length against training step: chain and every budget."""
    figure, (ax,) = _axes(7, 3.6)
    steps = [evaluation["step"] for evaluation in evaluations]
    for i, method in enumerate(evaluations[-1]["methods"]):
        if method["name"] == "plain":
            continue
        taus = [evaluation["methods"][i]["tau"] for evaluation in evaluations]
        chain = method["name"] == "chain"
        shade = 0.35 + 0.65 * i / max(1, len(evaluations[-1]["methods"]) - 1)
        line = ax.plot(steps, taus, "o-", color=ORANGE if chain else BLUE, alpha=1 if chain else shade, markersize=4)
        ax.annotate(f" {label(method)}", (steps[-1], taus[-1]), va="center", fontsize=8, color=line[0].get_color())
    ax.margins(x=0.12)
    ax.set_xlabel("training step")
    ax.set_ylabel("τ, tokens per round")
    return figure


def sweep_figure(methods: list[str], taus: dict[str, list[float]]):
    """Acceptance lengths of several runs, method by method."""
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


def write_report(folder: Path, evaluations: list[dict], notes: Sequence[str] = ()) -> Path:
    """Writes the pictures and report.html into `folder`; returns the page's path. `notes` stand at its top.

    The evaluation with the highest acceptance length is shown in detail; if there are several, ordered by step, τ over
    training is drawn too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    evaluations = sorted(evaluations, key=lambda evaluation: evaluation["step"] or 0)
    best = max(evaluations, key=lambda evaluation: max(method["tau"] for method in evaluation["methods"]))
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
    page.write_text(_page(best, parts, notes), encoding="utf-8")
    return page


def _page(evaluation: dict, pictures: list[str], notes: Sequence[str]) -> str:
    escape = html.escape
    best = fastest(evaluation)
    rows = "".join(
        f"<tr{' class=best' if method is best else ''}><td>{label(method)}</td><td>{method['tau']:.2f}</td>"
        f"<td>{method['rounds']}</td><td>{method['tokens_per_second']:.1f}</td><td>{method['speedup']:.2f}</td>"
        f"<td>{'yes' if method['identical'] else 'NO'}</td></tr>"
        for method in evaluation["methods"]
    )
    glossary = "".join(f"<dt>{term}</dt><dd>{text}</dd>" for term, text in GLOSSARY)
    samples = "".join(
        f"<pre><span class=prompt>{escape(sample['prompt'])}</span>"
        + "".join(f"<span class={escape(kind)}>{escape(text)}</span>" for text, kind in sample["pieces"])
        + "</pre>"
        for sample in evaluation.get("samples", [])
    )
    facts = [
        ("Checkpoint", evaluation["checkpoint"]),
        ("Target", evaluation["target"]),
        ("Hardware", evaluation["device"]),
        ("Number format", evaluation["dtype"]),
        ("Prompts", f"{evaluation['prompts']} held-out, at most {evaluation['max_new_tokens']} new tokens each"),
        ("Temperature", f"{evaluation['temperature']:g}" + ("" if evaluation["temperature"] else " (greedy)")),
        ("Block size", evaluation["block_size"]),
    ]
    settings = "".join(f"<tr><td>{name}</td><td>{escape(str(value))}</td></tr>" for name, value in facts)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Drafter report</title><style>{STYLE}</style></head><body>
<h1>What this drafter gains</h1>
<p class="lead">{escape(headline(evaluation))}</p>
{"".join(f"<p><strong>{escape(note)}</strong></p>" for note in notes)}
<table><thead><tr><th>method</th><th>τ</th><th>rounds</th><th>tokens/s</th><th>speedup</th><th>same output</th></tr>
</thead><tbody>{rows}</tbody></table>
{"".join(pictures)}
<h2>What the words mean</h2><dl>{glossary}</dl>
<h2>What it wrote</h2>
<p>Prompt in grey, <span class="accepted">accepted drafts</span>, <span class="bonus">bonus tokens</span>.</p>
{samples}
<h2>How it was measured</h2>
<p>The methods took turns on the prompts, {evaluation["rows"]} at a time; times include first draft and prefill.</p>
<table><tbody>{settings}</tbody></table>
</body></html>
"""

"""Evaluations to a table, pictures and one page that needs no network.

Works on the dictionaries that `infer.evaluate.evaluate` returns and on the JSON files made of them; matplotlib is
imported where it draws, without pyplot and its global state.
"""

import base64
import html
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#6b6b6b"  # told apart by colour-blind readers too (Okabe and Ito)
COLOURS = {"plain": GREY, "chain": ORANGE, "ddtree": BLUE}
WIDTH = 8.0  # inches; one width for all pictures, so that their letters have one size on the page


def read_evaluations(folder: Path) -> list[dict]:
    """Every `evaluation.json` below `folder`, by step. A link to a folder (`best`) is not counted again."""
    files = sorted(path for path in folder.rglob("evaluation.json") if path.is_file())
    return by_step(json.loads(path.read_text(encoding="utf-8")) for path in files)


def by_step(evaluations: Iterable[dict]) -> list[dict]:
    """In the order of training; those of no known step last, equal steps by checkpoint."""
    return sorted(evaluations, key=lambda e: (e["step"] is None, e["step"] or 0, e["checkpoint"]))


def label(method: dict) -> str:
    """How a method is called in pictures and tables: plain, chain, DDTree 64."""
    return f"DDTree {method['budget']}" if method["name"] == "ddtree" else method["name"]


def trees(evaluation: dict) -> list[dict]:
    """The DDTree rows by node budget."""
    return sorted((m for m in evaluation["methods"] if m["name"] == "ddtree"), key=lambda m: m["budget"])


def fastest(methods: list[dict]) -> dict:
    """The method with the highest speedup, plain decoding aside."""
    return max((m for m in methods if m["name"] != "plain"), key=lambda m: m["speedup"])


def table(evaluation: dict) -> str:
    """The evaluation as text for a terminal, one line a method."""
    lines = [f"{'method':<11}{'nodes':>6}{'τ':>7}{'rounds':>8}{'tokens/s':>10}{'speedup':>9}  same output as plain"]
    for method in evaluation["methods"]:
        lines.append(
            f"{method['name']:<11}{method['budget'] or '-':>6}{method['tau']:>7.2f}{method['rounds']:>8}"
            f"{method['tokens_per_second']:>10.1f}{method['speedup']:>8.2f}x  {'yes' if method['identical'] else 'NO'}"
        )
    return "\n".join(lines)


def headline(evaluation: dict) -> str:
    """The result in two plain sentences, good or bad."""
    best = fastest(evaluation["methods"])
    name = f"DDTree with {best['budget']} nodes" if best["name"] == "ddtree" else f"The {best['name']}"
    speed = f"{best['speedup']:.2f}"  # judged as it is printed: 0.996 is neither a gain nor a loss
    text = f"{name} commits {best['tau']:.2f} tokens per round and "
    if float(speed) > 1:
        text += f"decodes {speed} times as fast as plain decoding. "
    elif float(speed) == 1:
        text += "is no faster than plain decoding. "
    else:
        text += f"is slower than plain decoding, at {speed} times its speed: here speculation does not pay. "
    different = [label(method) for method in evaluation["methods"] if not method["identical"]]
    if different:
        return (
            text + f"Outputs of {', '.join(different)} differ from plain decoding's: here the result is not lossless."
        )
    return text + f"All outputs on {evaluation['prompts']} prompts are identical to plain decoding's."


def _figure(columns: int = 1) -> "tuple[Figure, list[Axes]]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 3.5), layout="constrained", dpi=180)
    figure.get_layout_engine().set(wspace=0.06)
    axes = list(figure.subplots(1, columns, squeeze=False)[0])
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color("#999999")
        ax.tick_params(color="#999999", labelsize=9)
        ax.grid(axis="y", color="#e4e4e4", linewidth=0.7)
        ax.set_axisbelow(True)
    return figure, axes


def _label_ends(ax: "Axes", ends: list[tuple[float, str, str]]) -> None:
    """Names lines at the right edge: (y in data units, text, colour). Labels that would overlap are moved apart."""
    gap = 0.07  # of the axis' height, one line of text
    low, high = ax.get_ylim()
    at = -gap
    for y, text, colour in sorted(ends):
        at = max(at + gap, (y - low) / (high - low))
        ax.text(1.02, at, text, color=colour, fontsize=9, va="center", transform=ax.transAxes)
    ax.set_ylim(low, high)


def histogram_figure(evaluation: dict) -> "Figure":
    """Shares of rounds by tokens committed: chain against the fastest tree."""
    figure, (ax,) = _figure()
    shown = [method for method in evaluation["methods"] if method["name"] == "chain"]
    shown += [fastest(trees(evaluation))] if trees(evaluation) else []
    width = 0.8 / max(1, len(shown))
    for i, method in enumerate(shown):
        shares = [100 * count / max(1, method["rounds"]) for count in method["histogram"]]
        middles = [n + 1 + (i - (len(shown) - 1) / 2) * width for n in range(len(shares))]
        text = f"{label(method)}: {method['tau']:.2f} tokens per round"
        ax.bar(middles, shares, 0.94 * width, color=COLOURS[method["name"]], label=text)
    ax.set_xticks(range(1, evaluation["block_size"] + 1))
    ax.tick_params(axis="x", length=0)
    ax.set_xlabel("tokens committed in a round, bonus token included")
    ax.set_ylabel("share of rounds, %")
    if shown:
        ax.legend(frameon=False, labelcolor="linecolor", handlelength=1)
    return figure


def budget_figure(evaluation: dict) -> "Figure":
    """Node budget (log2) against acceptance length and against speedup, with chain and plain decoding as lines."""
    figure, panels = _figure(columns=2)
    rows = trees(evaluation)
    budgets = [method["budget"] for method in rows]
    names = (("tau", "τ, tokens per round", ""), ("speedup", "speed, plain decoding = 1", "×"))
    for ax, (key, name, unit) in zip(panels, names, strict=True):
        ends = []
        for method in evaluation["methods"]:
            if method["name"] != "ddtree":
                colour = COLOURS[method["name"]]
                ax.axhline(method[key], color=colour, linestyle=(0, (4, 3)), linewidth=1.2)
                ends.append((method[key], label(method), colour))
        if rows:
            ax.plot(budgets, [method[key] for method in rows], "o-", color=BLUE, markersize=5, clip_on=False)
            ends.append((rows[-1][key], "DDTree", BLUE))
            top = max(rows, key=lambda method: method[key])
            text, place = f"{top[key]:.2f}{unit}", (top["budget"], top[key])
            ax.annotate(text, place, (0, 7), textcoords="offset points", ha="center", fontsize=9, color=BLUE)
        ax.set_xscale("log", base=2)
        ax.set_xticks(budgets, [str(budget) for budget in budgets])
        ax.set_xlabel("node budget, drafted tokens checked per round")
        ax.set_ylabel(name)
        ax.margins(y=0.1)
        _label_ends(ax, ends)
    return figure


def steps_figure(evaluations: list[dict]) -> "Figure":
    """Acceptance length against training step: chain and every budget. Evaluations of no known step are left out."""
    figure, (ax,) = _figure()
    ends = []
    points: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for evaluation in by_step(e for e in evaluations if e["step"] is not None):
        for method in evaluation["methods"]:
            if method["name"] != "plain":
                points.setdefault((method["name"], method["budget"]), []).append((evaluation["step"], method["tau"]))
    budgets = sorted(budget for name, budget in points if name == "ddtree")
    for (name, budget), line in points.items():
        colour = COLOURS[name]
        if name == "ddtree":  # larger trees are darker
            colour = _tint(colour, 0.5 * (1 - (budgets.index(budget) + 1) / len(budgets)))
        ax.plot(*zip(*line, strict=True), "o-", color=colour, markersize=4)
        ends.append((line[-1][1], label({"name": name, "budget": budget}), colour))
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_xlabel("training step")
    ax.set_ylabel("τ, tokens per round")
    _label_ends(ax, ends)
    return figure


def _tint(colour: str, white: float) -> str:
    """The colour #rrggbb with a share of white mixed in."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)


def _png(figure: "Figure") -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


STYLE = """
:root { color-scheme: light dark; --ink: #1d1d1f; --soft: #626266; --paper: #fff; --line: #ddd; --mark: #f2f6fa;
  --good: #0072b2; --bad: #b84a00; --accepted: #0072b22e; --bonus: #d55e0052; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e8; --soft: #a0a0a6; --paper: #191919; --line: #3a3b3d;
  --mark: #20272e; --good: #5bb8f0; --bad: #ff9a5a; --accepted: #3aa0e04d; --bonus: #f07a2a80; }
  img { filter: invert(.9) hue-rotate(180deg); } }
* { box-sizing: border-box; }
body { font: 16px/1.55 system-ui, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; color: var(--ink);
  background: var(--paper); max-width: 60rem; margin: 2.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 1rem; } h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; }
.lead { font-size: 1.2rem; margin: 0 0 1.5rem; padding-left: 1rem; border-left: .25rem solid var(--good); }
.lead.bad { border-color: var(--bad); } .no { color: var(--bad); font-weight: 700; }
p, dd, figcaption { max-width: 46rem; } figcaption, .note { color: var(--soft); font-size: .95rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem 1rem .3rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; color: var(--soft); font-size: .9rem; }
th:first-child, td:first-child { text-align: left; padding-left: .5rem; }
tr.best { background: var(--mark); font-weight: 600; }
.facts td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
.facts td:first-child { color: var(--soft); white-space: nowrap; }
figure { margin: 0; } img { width: 100%; height: auto; display: block; margin: .5rem 0; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); border-radius: .4rem;
  padding: .8rem 1rem; font: .85rem/1.6 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
.prompt { color: var(--soft); } .accepted, .bonus { border-radius: .15rem; padding: .1em 0; }
.accepted { background: var(--accepted); } .bonus { background: var(--bonus); }
dt { font-weight: 600; } dd { margin: 0 0 .8rem 0; }
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


PICTURES = {
    "acceptance_histogram": (
        "How many tokens a round commits",
        "How often a round committed so many tokens. Every round commits at least one, so it is never in vain.",
    ),
    "budget_curve": (
        "What a larger tree gains, and what it costs",
        "Left: tokens per round for each tree size. Right: the speed that comes of it. More nodes take longer to "
        "check, so the best size depends on the hardware.",
    ),
    "tau_by_step": (
        "Acceptance length during training",
        "The same prompts, decoded with the drafter of each checkpoint.",
    ),
}


def write_report(folder: Path, evaluations: list[dict]) -> Path:
    """Writes the pictures and report.html into `folder`; returns the page's path.

    The evaluation with the highest acceptance length is shown in detail; if there are several of known steps, τ over
    training is drawn too. Raises ValueError if there is no evaluation.
    """
    if not evaluations:
        raise ValueError(f"{folder}: a report needs at least one evaluation")
    folder.mkdir(parents=True, exist_ok=True)
    evaluations = by_step(evaluations)
    best = max(evaluations, key=lambda evaluation: max(method["tau"] for method in evaluation["methods"]))
    figures = {"acceptance_histogram": histogram_figure(best), "budget_curve": budget_figure(best)}
    if sum(evaluation["step"] is not None for evaluation in evaluations) > 1:
        figures["tau_by_step"] = steps_figure(evaluations)
    pictures = {name: _png(figure) for name, figure in figures.items()}
    for name, data in pictures.items():
        (folder / f"{name}.png").write_bytes(data)
    page = folder / "report.html"
    page.write_text(_page(best, pictures), encoding="utf-8")
    return page


def _page(evaluation: dict, pictures: dict[str, bytes]) -> str:
    best = fastest(evaluation["methods"])
    good = best["speedup"] >= 1 and all(method["identical"] for method in evaluation["methods"])
    choice = "greedy" if evaluation["temperature"] == 0 else "sampled, every method with the same seed"
    facts = {
        "Checkpoint": evaluation["checkpoint"],
        "Training step": "unknown" if evaluation["step"] is None else evaluation["step"],
        "Target": evaluation["target"],
        "Drafter": f"{evaluation['drafter']}, block size {evaluation['block_size']}",
        "Hardware": evaluation["device"],
        "Number format": evaluation["dtype"],
        "Prompts": f"{evaluation['prompts']} held-out, at most {evaluation['max_new_tokens']} new tokens each",
        "Temperature": f"{evaluation['temperature']:g}, {choice}",
    }
    settings = "".join(f"<tr><td>{name}</td><td>{html.escape(str(value))}</td></tr>" for name, value in facts.items())
    glossary = "".join(f"<dt>{term}</dt><dd>{text}</dd>" for term, text in GLOSSARY)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Drafter report</title><style>{STYLE}</style></head><body>
<h1>What this drafter gains</h1>
<p class="lead{"" if good else " bad"}">{html.escape(headline(evaluation))}</p>
<div class="wide"><table><thead><tr><th>method</th><th>nodes</th><th>τ</th><th>τ by prompt</th><th>rounds</th>
<th>tokens/s</th><th>speedup</th><th>same output</th></tr></thead>
<tbody>{"".join(_row(method, method is best) for method in evaluation["methods"])}</tbody></table></div>
{"".join(_picture(name, data) for name, data in pictures.items())}
<h2>What the words mean</h2><dl>{glossary}</dl>
{_samples(evaluation.get("samples", []))}
<h2>How it was measured</h2>
<p>Every method decoded every prompt, one at a time, by turns; times include the prefill and the first draft. τ is
pooled over all rounds, τ by prompt is the mean of every prompt's own. Same output: token by token, on all prompts.</p>
<table class="facts"><tbody>{settings}</tbody></table>
</body></html>
"""


def _row(method: dict, best: bool) -> str:
    start = '<tr class="best">' if best else "<tr>"
    same = "<td>yes</td>" if method["identical"] else '<td class="no">NO</td>'
    return (
        f"{start}<td>{html.escape(label(method))}</td><td>{method['budget'] or '–'}</td>"
        f"<td>{method['tau']:.2f}</td><td>{method['tau_prompt_mean']:.2f}</td><td>{method['rounds']}</td>"
        f"<td>{method['tokens_per_second']:.1f}</td><td>{method['speedup']:.2f}×</td>{same}</tr>\n"
    )


def _picture(name: str, data: bytes) -> str:
    title, caption = PICTURES[name]
    source = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    image = f'<img alt="{title}" src="{source}">'
    return f"<h2>{title}</h2><figure>{image}<figcaption>{caption}</figcaption></figure>\n"


def _samples(samples: list[dict]) -> str:
    """Decoded texts with every piece in the colour of where it came from; nothing if there are none."""
    if not samples:
        return ""
    texts = []
    for sample in samples:
        pieces = [(sample["prompt"], "prompt"), *sample["pieces"]]
        spans = (f'<span class="{html.escape(kind)}">{html.escape(text)}</span>' for text, kind in pieces)
        texts.append(f"<pre>{''.join(spans)}</pre>")
    return (
        '<h2>What it wrote</h2>\n<p>The prompt in grey, then <span class="accepted">accepted drafts</span> and '
        '<span class="bonus">bonus tokens</span>, which end each round.</p>\n' + "\n".join(texts)
    )

"""Evaluations as pictures in files. matplotlib is imported where it draws."""

from infer.evaluation.results import Evaluation, MethodResult


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
    trees = [method for method in evaluation.of_drafter if method.tree.by_budget]
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
                ax.errorbar(
                    points,
                    values,
                    _bars(methods, key),
                    fmt="o" + line,
                    color=row.colour,
                    label=prefix + row.label,
                    elinewidth=1,
                )
            elif row.drafts or plain:
                style = {"linestyle": "--" if line == "-" else line, "linewidth": 1.2}
                ax.axhline(values[0], color=row.colour, label=prefix * row.drafts + row.label, **style)
        ax.set_xscale("log", base=2)
        ax.set_xticks(budgets, [str(budget) for budget in budgets])
        ax.set_xlabel("node budget")
        ax.set_ylabel(title)


def _bars(methods: list[MethodResult], key: str) -> list[list[float]] | None:
    """Return how far the intervals of a figure reach below and above it; None where one has none."""
    spans = [(getattr(method, key), getattr(method, f"{key}_interval")) for method in methods]
    if any(interval is None for _, interval in spans):
        return None
    return [[max(0, value - low) for value, (low, _) in spans], [max(0, high - value) for value, (_, high) in spans]]


def steps_figure(evaluations: list[Evaluation]):
    """Draw acceptance length by training step: every method but plain decoding, larger trees in fuller colours."""
    figure, (ax,) = _axes(7, 3.6)
    steps = [evaluation.step for evaluation in evaluations]
    last = evaluations[-1].drafting
    for i, method in enumerate(last, 1):
        found = [{one.label: one for one in evaluation.drafting}.get(method.label) for evaluation in evaluations]
        taus = [float("nan") if one is None else one.tau for one in found]
        shade = 0.35 + 0.65 * i / len(last) if method.tree.by_budget else 1
        bars = None if None in found else _bars(found, "tau")
        ax.errorbar(steps, taus, bars, fmt="o-", color=method.tree.colour, alpha=shade, markersize=4, elinewidth=1)
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


def loss_figure(losses: list[tuple[int, float]]):
    """Draw the loss by training step."""
    figure, (ax,) = _axes(7, 3.6)
    ax.plot(*zip(*losses, strict=True), color="#0072b2", linewidth=1)
    ax.set_xlabel("training step")
    ax.set_ylabel("loss")
    return figure

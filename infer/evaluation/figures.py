"""Evaluations as charts: what the report's page, a drafter's card and a comparison show."""

from collections.abc import Mapping, Sequence

from infer.evaluation.drawings import Chart, Line
from infer.evaluation.results import Evaluation, MethodResult

POINTS = 120  # of the loss curve: averages of so many stretches
SHADES = ("", "7 3", "2 3", "9 3 2 3", "4 2")  # dash patterns, so that lines differ without colour
CURVES = {  # a figure of a method with its interval, by what a chart calls it
    "τ, tokens a round": lambda method: (method.tau, method.tau_interval),
    "speed, plain decoding = 1": lambda method: (method.speedup, method.speedup_interval),
}


def budget_charts(evaluations: Mapping[str, Evaluation]) -> list[Chart]:
    """Return τ and speed by node budget, of evaluations by the names of their drafters."""
    return [
        Chart(
            f"{curve}, by node budget",
            "node budget",
            curve,
            [line for i, name in enumerate(evaluations) for line in budget_lines(evaluations[name], curve, name, i)],
            log=True,
        )
        for curve in CURVES
    ]


def budget_lines(evaluation: Evaluation, curve: str, name: str, number: int) -> list[Line]:
    """Return a line for every kind of tree, and level ones for the other methods; of drafters behind the first, whose
    `number` is not 0, none for plain decoding."""
    kinds: dict[str, list[MethodResult]] = {}
    for method in evaluation.methods:
        kinds.setdefault(method.name, []).append(method)
    budgets = [method.budget for method in evaluation.methods if method.tree.by_budget] or [1]
    lines = []
    for i, methods in enumerate(sorted(kinds.values(), key=lambda methods: not methods[0].tree.by_budget), number):
        tree = methods[0].tree
        if number and not tree.drafts:
            continue
        found = [CURVES[curve](method) for method in methods]
        values, intervals = zip(*found, strict=True)
        points = [(method.budget, value) for method, value in zip(methods, values, strict=True)]
        if not tree.by_budget:
            points, intervals = [(budget, values[0]) for budget in (min(budgets), max(budgets))], ()
        label = f"{name} {tree.label}".strip() if tree.drafts else tree.label
        lines.append(Line(label, points, tree.colour, intervals, SHADES[i % len(SHADES)]))
    return lines


def steps_chart(evaluations: Sequence[Evaluation]) -> Chart:
    """Return τ by training step: the chain and the largest tree of each kind."""
    last = {method.name: method for method in evaluations[-1].drafting}
    lines = []
    for i, method in enumerate(last.values()):
        found = [(one.step or 0, same) for one in evaluations for same in one.drafting if same.label == method.label]
        points, intervals = [(step, same.tau) for step, same in found], [same.tau_interval for _, same in found]
        lines.append(Line(method.label, points, method.tree.colour, intervals, SHADES[i % len(SHADES)]))
    return Chart("τ during training", "training step", "τ, tokens a round", lines)


def loss_chart(losses: Sequence[tuple[int, float]]) -> Chart:
    """Return the loss by training step, as at most POINTS averages."""
    size = max(1, -(-len(losses) // POINTS))
    parts = [losses[first : first + size] for first in range(0, len(losses), size)]
    points = [(sum(step for step, _ in part) / len(part), sum(loss for _, loss in part) / len(part)) for part in parts]
    return Chart("Loss during training", "training step", "loss", [Line("loss", points, "#0072b2")])

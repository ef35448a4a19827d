"""Evaluations as charts and a round as a drawn tree: what a report's page, a card and a comparison
show. Numbers and places are found here, chart.svg.j2 and tree.svg.j2 draw them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from infer.evaluation.pages import render
from infer.evaluation.results import Evaluation, ExampleRound, MethodResult, TreeStudy
from infer.trees.methods import TREES

# of a chart, and of a line of the legend below it: CSS pixels
HEIGHT = 240
ROW = 16
# between tokens of a tree
STEP_X = 74
STEP_Y = 62
POINTS = 120  # of the loss curve: averages of so many stretches
SHADES = ("", "7 3", "2 3", "9 3 2 3", "4 2")  # dash patterns, so that lines differ without colour
COLOURS = [row.colour for row in TREES.values() if row.drafts and row.evaluated]
CURVES = {  # a figure of a method with its interval, by what a chart calls it
    "τ, tokens a round": lambda method: (method.tau, method.tau_interval),
    "speed, plain decoding = 1": lambda method: (method.speedup, method.speedup_interval),
}


@dataclass(frozen=True)
class Line:
    """One line of a chart: points (x, y), an interval of y at each or None, a colour and a dash
    pattern."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: str
    intervals: Sequence[Sequence[float] | None] = ()
    dash: str = ""


@dataclass(frozen=True)
class AxisScale:
    """From values to pixels: from `low` at pixel `start` to `high` at pixel `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log2(x) if self.log else x for x in (self.low, self.high, value))
        return round(self.start + (value - low) / ((high - low) or 1) * (self.end - self.start), 1)


@dataclass(frozen=True)
class Chart:
    """Lines of finite numbers in one drawing. A logarithmic x axis has ticks at the points' own
    values."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    log: bool = False

    @property
    def height(self) -> int:
        return HEIGHT + ROW * len(self.lines)

    @property
    def places(self) -> list[float]:
        """The values of x that have points."""
        return sorted({x for line in self.lines for x, _ in line.points})

    @property
    def across(self) -> AxisScale:
        return AxisScale(self.places[0], self.places[-1], 54, 338, self.log)

    @property
    def up(self) -> AxisScale:
        """The scale of y, with room for the intervals and a margin."""
        values = [y for line in self.lines for _, y in line.points]
        values += [
            edge
            for line in self.lines
            for interval in line.intervals
            if interval
            for edge in interval
        ]
        low = min(values)
        high = max(values)
        margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        return AxisScale(low - margin, high + margin, 200, 12)

    @property
    def x_ticks(self) -> list[float]:
        return self.places if self.log else ticks(self.across)

    @property
    def y_ticks(self) -> list[float]:
        return ticks(self.up)


def ticks(scale: AxisScale, count: int = 4) -> list[float]:
    """Return round values on an axis, about `count`; the value itself where there is one only."""
    low = scale.low
    high = scale.high
    if low == high:
        return [low]
    step = 10 ** math.floor(math.log10((high - low) / count))
    step = next(
        step * times for times in (1, 2, 5, 10) if (high - low) / (step * times) <= count + 1
    )
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def picture(charts: Sequence[Chart]) -> str:
    """Return the text of an SVG file with charts side by side."""
    return render("picture.svg.j2", charts=charts)


def budget_charts(evaluations: Mapping[str, Evaluation]) -> list[Chart]:
    """Return τ and speed by node budget, of evaluations by the names of their drafters."""
    return [
        Chart(
            f"{curve}, by node budget",
            "node budget",
            curve,
            [
                line
                for i, name in enumerate(evaluations)
                for line in budget_lines(evaluations[name], curve, name, i)
            ],
            log=True,
        )
        for curve in CURVES
    ]


def budget_lines(evaluation: Evaluation, curve: str, name: str, number: int) -> list[Line]:
    """Return a line for every kind of tree, and level ones for the other methods; of drafters
    behind the first, whose `number` is not 0, none for plain decoding."""
    kinds: dict[str, list[MethodResult]] = {}
    for method in evaluation.methods:
        kinds.setdefault(method.name, []).append(method)
    budgets = [method.budget for method in evaluation.methods if method.tree.by_budget] or [1]
    lines = []
    for i, methods in enumerate(
        sorted(kinds.values(), key=lambda methods: not methods[0].tree.by_budget), number
    ):
        tree = methods[0].tree
        if number and not tree.drafts:
            continue
        values, intervals = zip(*map(CURVES[curve], methods), strict=True)
        points = [(method.budget, value) for method, value in zip(methods, values, strict=True)]
        if not tree.by_budget:
            points = [(budget, values[0]) for budget in (min(budgets), max(budgets))]
            intervals = ()
        label = f"{name} {tree.label}".strip() if tree.drafts else tree.label
        lines.append(Line(label, points, tree.colour, intervals, SHADES[i % len(SHADES)]))
    return lines


def steps_chart(evaluations: Sequence[Evaluation]) -> Chart:
    """Return τ by training step: the chain and the largest tree of each kind."""
    last = {method.name: method for method in evaluations[-1].drafting}
    lines = []
    for i, method in enumerate(last.values()):
        found = [
            (one.step or 0, same)
            for one in evaluations
            for same in one.drafting
            if same.label == method.label
        ]
        points = [(step, same.tau) for step, same in found]
        intervals = [same.tau_interval for _, same in found]
        lines.append(
            Line(method.label, points, method.tree.colour, intervals, SHADES[i % len(SHADES)])
        )
    return Chart("τ during training", "training step", "τ, tokens a round", lines)


def choices_chart(trees: TreeStudy) -> Chart:
    """Return how often first choices are right by depth: behind first choices and behind a
    sibling."""
    lines = []
    for i, one in enumerate(trees.choices):
        shares = zip(one.asked, one.right, one.intervals, strict=True)
        known = [
            ((depth, right / n), around) for depth, (n, right, around) in enumerate(shares, 1) if n
        ]
        if known:
            points, intervals = zip(*known, strict=True)
            lines.append(
                Line(f"{one.by}, behind {one.behind}", points, COLOURS[i], intervals, SHADES[i])
            )
    return Chart("First choices that are right", "depth in the tree", "share", lines)


def loss_chart(losses: Sequence[tuple[int, float]]) -> Chart:
    """Return the loss by training step, as at most POINTS averages."""
    size = max(1, -(-len(losses) // POINTS))
    parts = [losses[first : first + size] for first in range(0, len(losses), size)]
    points = [
        tuple(sum(column) / len(part) for column in zip(*part, strict=True)) for part in parts
    ]
    return Chart(
        "Loss during training", "training step", "loss", [Line("loss", points, COLOURS[0])]
    )


class TokenBox(NamedTuple):
    """A token of a drawn tree: its centre, and how likely the drafter thought it behind the token
    above."""

    x: int
    y: int
    parent: int  # number of the box above
    kind: str  # root, accepted, rejected or added
    word: str  # with a sign of its kind
    label: str


@dataclass(frozen=True)
class TreeDrawing:
    """A round's tree with the accepted path, rejected branches, and below the path the token that
    the target added."""

    boxes: list[TokenBox]
    said: str  # for those who do not see it

    @property
    def width(self) -> int:
        return max(box.x for box in self.boxes) + STEP_X // 2 + 4

    @property
    def height(self) -> int:
        return max(box.y for box in self.boxes) + 21


def drawn_tree(example: ExampleRound) -> TreeDrawing:
    """Return the drawing of a round: leaves side by side, parents above the middle of their
    children."""
    nodes, last = example.nodes, max(i for i, node in enumerate(example.nodes) if node.accepted)
    parents = [*(node.parent for node in nodes), last]  # of the added token, too
    columns = [0.0] * len(parents)
    depths = [0] * len(parents)
    free = 0

    def place(node: int) -> None:
        nonlocal free
        children = [child for child in range(1, len(parents)) if parents[child] == node]
        for child in children:
            depths[child] = depths[node] + 1
            place(child)
        columns[node] = (columns[children[0]] + columns[children[-1]]) / 2 if children else free
        free += not children

    place(0)
    words = [visible(node.word) for node in nodes] + [visible(example.added)]
    kinds = ["root", *("accepted" if node.accepted else "rejected" for node in nodes[1:]), "added"]
    signs = {"root": "", "accepted": "✓ ", "rejected": "✗ ", "added": "+ "}
    shares = [f"{node.probability:.0%}" for node in nodes] + [""]
    boxes = [
        TokenBox(
            round(4 + (columns[i] + 0.5) * STEP_X),
            21 + depths[i] * STEP_Y,
            parents[i],
            kind,
            signs[kind] + word,
            share,
        )
        for i, (kind, word, share) in enumerate(zip(kinds, words, shares, strict=True))
    ]
    path = ", ".join(repr(node.word) for node in nodes[1:] if node.accepted) or "none"
    return TreeDrawing(
        boxes,
        f"A draft tree of {len(nodes) - 1} tokens behind {nodes[0].word!r}: accepted {path}; rejected "
        f"{kinds.count('rejected')}; the model adds {example.added!r}",
    )


def visible(token: str) -> str:
    """Return a token with its spaces and line ends as signs, cut to what fits into a box."""
    shown = token.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·") or "∅"
    return shown if len(shown) <= 7 else shown[:6] + "…"

"""Charts of evaluations and the drawing of a round's draft tree, for reports, cards and
comparisons. Values and coordinates are computed here; chart.svg.j2 and tree.svg.j2 draw them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from infer.evaluation.results import (
    Evaluation,
    ExampleNode,
    ExampleRound,
    MethodResult,
    TreeStudy,
)
from infer.evaluation.templates import render_template
from infer.trees.methods import TREE_METHODS

# sizes in CSS pixels: of a chart, of a line of its legend, and between the tokens of a tree
CHART_HEIGHT_PX = 240
LEGEND_LINE_HEIGHT_PX = 16
TREE_COLUMN_WIDTH_PX = 74
TREE_LEVEL_HEIGHT_PX = 62
PLOT_LEFT_PX = 54
PLOT_RIGHT_PX = 338
PLOT_TOP_PX = 12
PLOT_BOTTOM_PX = 200

AXIS_TICK_COUNT = 4
MAX_LOSS_POINTS = 120  # longer loss curves are averaged over stretches
MAX_TOKEN_CHARACTERS_IN_DRAWING = 7  # of a token in a drawn tree
DASH_PATTERNS = ("", "7 3", "2 3", "9 3 2 3", "4 2")  # lines differ without colours too
LINE_COLOURS = [
    row.colour for row in TREE_METHODS.values() if row.needs_drafter and row.in_evaluations
]
# label of the y axis: function from a method's result to (value, interval)
BUDGET_CURVES = {
    "τ, tokens a round": lambda method: (method.tau, method.tau_interval),
    "speed, plain decoding = 1": lambda method: (method.speedup, method.speedup_interval),
}
TREE_DRAWING_TOKEN_MARKS = {"root": "", "accepted": "✓ ", "rejected": "✗ ", "added": "+ "}


@dataclass(frozen=True)
class ChartLine:
    """One line of a chart: points (x, y), and for each point the confidence interval of y or
    None."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: str
    intervals: Sequence[Sequence[float] | None] = ()
    dash: str = ""  # an SVG dash pattern


@dataclass(frozen=True)
class AxisScale:
    """Maps values to pixels: `low` to `start_px`, `high` to `end_px`."""

    low: float
    high: float
    start_px: float
    end_px: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low = self.low
        high = self.high
        if self.logarithmic:
            low = math.log2(low)
            high = math.log2(high)
            value = math.log2(value)
        fraction = (value - low) / ((high - low) or 1)
        return round(self.start_px + fraction * (self.end_px - self.start_px), 1)


@dataclass(frozen=True)
class Chart:
    """Lines of finite numbers in one drawing. A logarithmic x axis has its ticks at the points'
    values."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[ChartLine]
    logarithmic: bool = False

    @property
    def height(self) -> int:
        """Height in pixels, legend included."""
        return CHART_HEIGHT_PX + LEGEND_LINE_HEIGHT_PX * len(self.lines)

    @property
    def x_values(self) -> list[float]:
        """The different x values of all points, sorted."""
        return sorted({x for line in self.lines for x, _ in line.points})

    @property
    def x_scale(self) -> AxisScale:
        """The scale of the x axis."""
        values = self.x_values
        return AxisScale(values[0], values[-1], PLOT_LEFT_PX, PLOT_RIGHT_PX, self.logarithmic)

    @property
    def y_scale(self) -> AxisScale:
        """The scale of the y axis, which includes the intervals and a margin."""
        values = []
        for line in self.lines:
            values += [y for _, y in line.points]
            for interval in line.intervals:
                values += interval or ()
        low = min(values)
        high = max(values)
        margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        return AxisScale(low - margin, high + margin, PLOT_BOTTOM_PX, PLOT_TOP_PX)

    @property
    def x_ticks(self) -> list[float]:
        """The values that are labelled on the x axis."""
        return self.x_values if self.logarithmic else choose_ticks(self.x_scale)

    @property
    def y_ticks(self) -> list[float]:
        """The values that are labelled on the y axis."""
        return choose_ticks(self.y_scale)


def choose_ticks(scale: AxisScale, count: int = AXIS_TICK_COUNT) -> list[float]:
    """Return about `count` round values on an axis; the only value if low and high are equal."""
    low = scale.low
    high = scale.high
    if low == high:
        return [low]
    power = 10 ** math.floor(math.log10((high - low) / count))
    step = next(
        power * factor for factor in (1, 2, 5, 10) if (high - low) / (power * factor) <= count + 1
    )
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def render_charts(charts: Sequence[Chart]) -> str:
    """Return an SVG file with charts side by side."""
    return render_template("picture.svg.j2", charts=charts)


def build_budget_charts(evaluations: Mapping[str, Evaluation]) -> list[Chart]:
    """Return charts of τ and speedup by node budget. `evaluations`: by the drafter's name, which is
    "" if there is one only."""
    charts = []
    for y_label in BUDGET_CURVES:
        lines = []
        for i, (name, evaluation) in enumerate(evaluations.items()):
            lines += build_budget_lines(evaluation, y_label, name, i)
        title = f"{y_label}, by node budget"
        charts.append(Chart(title, "node budget", y_label, lines, logarithmic=True))
    return charts


def build_budget_lines(
    evaluation: Evaluation, y_label: str, drafter_name: str, drafter_index: int
) -> list[ChartLine]:
    """Return a line for each tree method, horizontal ones for methods without a budget. Baselines
    are drawn for the first drafter only. `y_label`: a key of BUDGET_CURVES."""
    methods_by_name: dict[str, list[MethodResult]] = {}
    for method in evaluation.methods:
        methods_by_name.setdefault(method.name, []).append(method)
    budgets = [
        method.budget for method in evaluation.methods if method.tree_method.scales_with_budget
    ]
    if not budgets:
        budgets = [1]

    groups = sorted(
        methods_by_name.values(), key=lambda methods: not methods[0].tree_method.scales_with_budget
    )
    lines = []
    for i, methods in enumerate(groups, drafter_index):
        row = methods[0].tree_method
        if drafter_index > 0 and not row.needs_drafter:
            continue
        values, intervals = zip(*map(BUDGET_CURVES[y_label], methods), strict=True)
        if row.scales_with_budget:
            method_budgets = [method.budget for method in methods]
            points = list(zip(method_budgets, values, strict=True))
        else:
            points = [(budget, values[0]) for budget in (min(budgets), max(budgets))]
            intervals = ()
        label = f"{drafter_name} {row.label}".strip() if row.needs_drafter else row.label
        dash = DASH_PATTERNS[i % len(DASH_PATTERNS)]
        lines.append(ChartLine(label, points, row.colour, intervals, dash))
    return lines


def build_tau_chart(evaluations: Sequence[Evaluation]) -> Chart:
    """Return τ by training step, for the chain and the largest tree of each method."""
    largest = {method.name: method for method in evaluations[-1].drafting_methods}
    lines = []
    for i, method in enumerate(largest.values()):
        points = []
        intervals = []
        for evaluation in evaluations:
            for result in evaluation.drafting_methods:
                if result.label == method.label:
                    points.append((evaluation.step or 0, result.tau))
                    intervals.append(result.tau_interval)
        colour = method.tree_method.colour
        dash = DASH_PATTERNS[i % len(DASH_PATTERNS)]
        lines.append(ChartLine(method.label, points, colour, intervals, dash))
    return Chart("τ during training", "training step", "τ, tokens a round", lines)


def build_first_choice_chart(study: TreeStudy) -> Chart:
    """Return the accuracy of first choices by depth, a line for each source and prefix."""
    lines = []
    for i, accuracy in enumerate(study.first_choices):
        points = []
        intervals = []
        columns = zip(accuracy.attempts, accuracy.correct, accuracy.intervals, strict=True)
        for depth, (attempts, correct, interval) in enumerate(columns, 1):
            if attempts:
                points.append((depth, correct / attempts))
                intervals.append(interval)
        if points:
            label = f"{accuracy.source}, behind {accuracy.prefix}"
            line = ChartLine(label, points, LINE_COLOURS[i], intervals, DASH_PATTERNS[i])
            lines.append(line)
    return Chart("First choices that are right", "depth in the tree", "share", lines)


def build_loss_chart(losses: Sequence[tuple[int, float]]) -> Chart:
    """Return the loss by training step, averaged to at most MAX_LOSS_POINTS points. losses: (step,
    loss)."""
    size = max(1, -(-len(losses) // MAX_LOSS_POINTS))
    points = []
    for start in range(0, len(losses), size):
        steps, values = zip(*losses[start : start + size], strict=True)
        points.append((sum(steps) / len(steps), sum(values) / len(values)))
    line = ChartLine("loss", points, LINE_COLOURS[0])
    return Chart("Loss during training", "training step", "loss", [line])


class TokenBox(NamedTuple):
    """A token of a drawn tree: its centre in pixels, and the drafter's probability of it given its
    parent."""

    x: int
    y: int
    parent: int  # index of the parent's box
    kind: str  # root, accepted, rejected or added
    word: str  # the token with the mark of its kind
    label: str  # the probability as text


@dataclass(frozen=True)
class TreeDrawing:
    """A round's tree: the accepted path, rejected branches, and below the path the token that the
    target added."""

    boxes: list[TokenBox]
    description: str  # alternative text for screen readers

    @property
    def width(self) -> int:
        """Width in pixels."""
        return max(box.x for box in self.boxes) + TREE_COLUMN_WIDTH_PX // 2 + 4

    @property
    def height(self) -> int:
        """Height in pixels."""
        return max(box.y for box in self.boxes) + 21


def draw_tree(example: ExampleRound) -> TreeDrawing:
    """Return the drawing of a round, with leaves side by side and parents above the middle of their
    children."""
    nodes = example.nodes
    last_accepted = max(i for i, node in enumerate(nodes) if node.accepted)
    parents = [*(node.parent for node in nodes), last_accepted]  # the added token is the last box
    columns, depths = lay_out_tree(parents)

    kinds = ["root", *("accepted" if node.accepted else "rejected" for node in nodes[1:]), "added"]
    words = [format_token(node.word) for node in nodes] + [format_token(example.added)]
    labels = [f"{node.probability:.0%}" for node in nodes] + [""]
    boxes = []
    for i, kind in enumerate(kinds):
        box = TokenBox(
            x=round(4 + (columns[i] + 0.5) * TREE_COLUMN_WIDTH_PX),
            y=21 + depths[i] * TREE_LEVEL_HEIGHT_PX,
            parent=parents[i],
            kind=kind,
            word=TREE_DRAWING_TOKEN_MARKS[kind] + words[i],
            label=labels[i],
        )
        boxes.append(box)
    return TreeDrawing(boxes, describe_tree(nodes, kinds.count("rejected"), example.added))


def lay_out_tree(parents: Sequence[int]) -> tuple[list[float], list[int]]:
    """Return the column and the depth of each node of a tree. parents: index of each node's parent;
    node 0 is the root."""
    columns = [0.0] * len(parents)
    depths = [0] * len(parents)
    next_column = 0

    def assign_column(node: int) -> None:
        nonlocal next_column
        children = [child for child in range(1, len(parents)) if parents[child] == node]
        for child in children:
            depths[child] = depths[node] + 1
            assign_column(child)
        if children:
            columns[node] = (columns[children[0]] + columns[children[-1]]) / 2
        else:
            columns[node] = next_column
            next_column += 1

    assign_column(0)
    return columns, depths


def describe_tree(nodes: Sequence[ExampleNode], rejected: int, added: str) -> str:
    """Return the alternative text of a drawn tree. rejected: number of rejected nodes; added: the
    token that the target added."""
    path = ", ".join(repr(node.word) for node in nodes[1:] if node.accepted) or "none"
    return (
        f"A draft tree of {len(nodes) - 1} tokens behind {nodes[0].word!r}: accepted {path}; "
        f"rejected {rejected}; the model adds {added!r}"
    )


def format_token(token: str) -> str:
    """Return a token with visible spaces and line ends, cut to what fits into a box."""
    shown = token.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·") or "∅"
    if len(shown) > MAX_TOKEN_CHARACTERS_IN_DRAWING:
        shown = shown[: MAX_TOKEN_CHARACTERS_IN_DRAWING - 1] + "…"
    return shown

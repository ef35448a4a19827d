"""Charts of evaluations, and drawings of draft trees, for reports, model cards and comparisons.

This module computes values and coordinates. The templates chart.svg.j2 and tree.svg.j2 draw them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from infer.evaluation.results import Evaluation, ExampleNode, ExampleRound, MethodResult, TreeStudy
from infer.evaluation.templates import render_template
from infer.trees.methods import TREE_METHODS

# Sizes of charts, of lines in legends and of drawn trees, in CSS pixels
CHART_HEIGHT_PX = 240
LEGEND_LINE_HEIGHT_PX = 16
TREE_COLUMN_WIDTH_PX = 74
TREE_LEVEL_HEIGHT_PX = 62
PLOT_LEFT_PX = 54
PLOT_RIGHT_PX = 338
PLOT_TOP_PX = 12
PLOT_BOTTOM_PX = 200

AXIS_TICK_COUNT = 4
# Error bars of values from fewer rounds would be so long that they hide the lines.
MIN_ROUNDS_FOR_ERROR_BAR = 50
MAX_LOSS_POINTS = 120  # if there are more points, neighbouring ones are averaged
MAX_TOKEN_CHARACTERS_IN_DRAWING = 7  # longer tokens are cut in the drawing of a tree
# SVG dash patterns of lines, for readers who cannot tell the colours apart
DASH_PATTERNS = ("", "7 3", "2 3", "9 3 2 3", "4 2")
LINE_COLOURS = [
    row.colour for row in TREE_METHODS.values() if row.needs_drafter and row.in_evaluations
]
# Keys are labels of the y axis. Values are functions MethodResult -> (value, confidence interval).
METRIC_READERS_BY_Y_LABEL = {
    "τ, tokens per round": lambda method: (method.tau, method.tau_interval),
    "speedup over the baseline": lambda method: (method.speedup, method.speedup_interval),
}
# Keys are kinds of tokens in a drawn tree. Values are marks that are drawn in front of the token.
TREE_MARKS_BY_TOKEN_KIND = {"root": "", "accepted": "✓ ", "rejected": "✗ ", "added": "+ "}


@dataclass(frozen=True)
class ChartLine:
    """One line of a chart.

    label: name of the line in the legend
    points: pairs (x, y)
    colour: an SVG colour
    intervals: confidence interval of y at each point, None where there is none; empty if no point
        has an interval
    dash: an SVG dash pattern
    """

    label: str
    points: Sequence[tuple[float, float]]
    colour: str
    intervals: Sequence[Sequence[float] | None] = ()
    dash: str = ""


@dataclass(frozen=True)
class AxisScale:
    """Maps a value on an axis to a pixel coordinate.

    The value `low` is drawn at `start_px`, and the value `high` at `end_px`.
    """

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
    """A chart with one or more lines.

    logarithmic_x: whether the x axis is logarithmic. If so, every x value has its own tick
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[ChartLine]
    logarithmic_x: bool = False

    @property
    def height(self) -> int:
        """The height of the chart and its legend, in pixels."""
        return CHART_HEIGHT_PX + LEGEND_LINE_HEIGHT_PX * len(self.lines)

    @property
    def x_values(self) -> list[float]:
        """The x values of all points, sorted and without duplicates."""
        return sorted({x for line in self.lines for x, _ in line.points})

    @property
    def x_scale(self) -> AxisScale:
        """The scale of the x axis."""
        values = self.x_values
        return AxisScale(values[0], values[-1], PLOT_LEFT_PX, PLOT_RIGHT_PX, self.logarithmic_x)

    @property
    def y_scale(self) -> AxisScale:
        """The scale of the y axis. It covers all points and confidence intervals, plus a margin."""
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
        """The values at which the x axis has a tick and a number."""
        return self.x_values if self.logarithmic_x else choose_ticks(self.x_scale)

    @property
    def y_ticks(self) -> list[float]:
        """The values at which the y axis has a tick and a number."""
        return choose_ticks(self.y_scale)


def choose_ticks(scale: AxisScale, count: int = AXIS_TICK_COUNT) -> list[float]:
    """Return about `count` round values between the ends of an axis.

    Returns a single value if both ends are equal.
    """
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
    """Return the text of an SVG file that shows the charts side by side."""
    return render_template("picture.svg.j2", charts=charts)


def build_budget_charts(evaluations: Mapping[str, Evaluation]) -> list[Chart]:
    """Return two charts whose x axis is the node budget (number of drafted tree nodes per round).

    The first chart shows τ (tokens per round), the second the speedup.

    evaluations: keys are names of drafters, values their evaluations. A single drafter may have the
        name ""
    """
    charts = []
    for y_label in METRIC_READERS_BY_Y_LABEL:
        lines = []
        for i, (name, evaluation) in enumerate(evaluations.items()):
            lines += build_budget_lines(evaluation, y_label, name, i)
        title = f"{y_label}, by node budget"
        charts.append(Chart(title, "node budget", y_label, lines, logarithmic_x=True))
    return charts


def build_budget_lines(
    evaluation: Evaluation, y_label: str, drafter_name: str, drafter_index: int
) -> list[ChartLine]:
    """Return the lines of one drafter's evaluation, one for each decoding method.

    A method without a node budget has a horizontal line. Lines of baseline decoding, which does not
    depend on the drafter, are returned for the first drafter only.

    y_label: label of the y axis, which selects the shown metric from METRIC_READERS_BY_Y_LABEL
    drafter_name: name of the drafter in the legend
    drafter_index: position of the drafter in the chart; the first drafter has 0
    """
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
        values, all_intervals = zip(*map(METRIC_READERS_BY_Y_LABEL[y_label], methods), strict=True)
        intervals = [
            interval if method.rounds >= MIN_ROUNDS_FOR_ERROR_BAR else None
            for method, interval in zip(methods, all_intervals, strict=True)
        ]
        if row.scales_with_budget:
            method_budgets = [method.budget for method in methods]
            points = list(zip(method_budgets, values, strict=True))
        else:
            points = [(budget, values[0]) for budget in (min(budgets), max(budgets))]
            intervals = []
        label = f"{drafter_name} {row.label}".strip() if row.needs_drafter else row.label
        dash = DASH_PATTERNS[i % len(DASH_PATTERNS)]
        lines.append(ChartLine(label, points, row.colour, intervals, dash))
    return lines


def build_tau_chart(evaluations: Sequence[Evaluation]) -> Chart:
    """Return a chart of τ (tokens per round) by training step.

    It has a line for the chain (a draft without branches). For each tree method, it has a line for
    the largest node budget.

    evaluations: evaluations of the checkpoints of one training run
    """
    largest = {method.name: method for method in evaluations[-1].drafting_methods}
    lines = []
    for i, method in enumerate(largest.values()):
        points = []
        intervals = []
        for evaluation in evaluations:
            for result in evaluation.drafting_methods:
                if result.label == method.label:
                    points.append((evaluation.step or 0, result.tau))
                    has_error_bar = result.rounds >= MIN_ROUNDS_FOR_ERROR_BAR
                    intervals.append(result.tau_interval if has_error_bar else None)
        colour = method.tree_method.colour
        dash = DASH_PATTERNS[i % len(DASH_PATTERNS)]
        lines.append(ChartLine(method.label, points, colour, intervals, dash))
    return Chart("τ during training", "training step", "τ, tokens per round", lines)


def build_first_choice_chart(study: TreeStudy) -> Chart:
    """Return a chart of how often the drafter's most likely token is the token that the target
    generates. The x axis is the depth in the draft tree. The chart has one line for each entry of
    `study.first_choices`.
    """
    lines = []
    for i, accuracy in enumerate(study.first_choices):
        points = []
        intervals = []
        columns = zip(accuracy.attempts, accuracy.correct, accuracy.intervals, strict=True)
        for depth, (attempts, correct, interval) in enumerate(columns, 1):
            if attempts:
                points.append((depth, correct / attempts))
                has_error_bar = attempts >= MIN_ROUNDS_FOR_ERROR_BAR
                intervals.append(interval if has_error_bar else None)
        if points:
            label = f"{accuracy.source}, after {accuracy.prefix}"
            line = ChartLine(label, points, LINE_COLOURS[i], intervals, DASH_PATTERNS[i])
            lines.append(line)
    return Chart("Accuracy of the first choice", "depth in the tree", "fraction", lines)


def build_loss_chart(losses: Sequence[tuple[int, float]]) -> Chart:
    """Return a chart of the training loss by training step.

    losses: pairs (step, loss). Neighbouring pairs are averaged if there are more than
        MAX_LOSS_POINTS
    """
    size = max(1, -(-len(losses) // MAX_LOSS_POINTS))
    points = []
    for start in range(0, len(losses), size):
        steps, values = zip(*losses[start : start + size], strict=True)
        points.append((sum(steps) / len(steps), sum(values) / len(values)))
    line = ChartLine("loss", points, LINE_COLOURS[0])
    return Chart("Loss during training", "training step", "loss", [line])


class TokenBox(NamedTuple):
    """The box of one token in a drawn tree.

    x, y: the centre of the box, in pixels
    parent: index of the box of the parent token
    kind: "root", "accepted", "rejected", or "added" for the target's own token, which follows the
        accepted tokens
    word: the token as text, with a mark in front that shows the kind
    label: the drafter's probability of the token given its parent, as text
    """

    x: int
    y: int
    parent: int
    kind: str
    word: str
    label: str


@dataclass(frozen=True)
class TreeDrawing:
    """The drawing of the draft tree of one round.

    It shows the accepted draft tokens, the rejected draft tokens, and the target's own token, which
    follows the accepted tokens.
    """

    boxes: list[TokenBox]
    description: str  # what the drawing shows, in words, for screen readers

    @property
    def width(self) -> int:
        """The width of the drawing, in pixels."""
        return max(box.x for box in self.boxes) + TREE_COLUMN_WIDTH_PX // 2 + 4

    @property
    def height(self) -> int:
        """The height of the drawing, in pixels."""
        return max(box.y for box in self.boxes) + 21


def draw_tree(example: ExampleRound) -> TreeDrawing:
    """Return the drawing of the draft tree of one round.

    Every leaf has its own column. A parent is above the middle of its children.
    """
    nodes = example.nodes
    last_accepted = max(i for i, node in enumerate(nodes) if node.accepted)
    # The last box is the target's own token, which follows the last accepted token.
    parents = [*(node.parent for node in nodes), last_accepted]
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
            word=TREE_MARKS_BY_TOKEN_KIND[kind] + words[i],
            label=labels[i],
        )
        boxes.append(box)
    return TreeDrawing(boxes, describe_tree(nodes, kinds.count("rejected"), example.added))


def lay_out_tree(parents: Sequence[int]) -> tuple[list[float], list[int]]:
    """Return the column and the depth of each node of a tree, as two lists.

    A column is a horizontal position. Leaves have the columns 0, 1, 2, ...

    parents: index of the parent of each node; node 0 is the root
    """
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
    """Return a description of a drawn tree in words, for screen readers.

    rejected: number of rejected nodes
    added: the target's own token, which follows the accepted tokens
    """
    path = ", ".join(repr(node.word) for node in nodes[1:] if node.accepted) or "none"
    return (
        f"A draft tree of {len(nodes) - 1} tokens after {nodes[0].word!r}. Accepted tokens: "
        f"{path}. Number of rejected tokens: {rejected}. The target adds {added!r}."
    )


def format_token(token: str) -> str:
    """Return a token as text for a box: white space becomes visible, and long tokens are cut."""
    shown = token.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·") or "∅"
    if len(shown) > MAX_TOKEN_CHARACTERS_IN_DRAWING:
        shown = shown[: MAX_TOKEN_CHARACTERS_IN_DRAWING - 1] + "…"
    return shown

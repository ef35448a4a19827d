"""Drawings as SVG: line charts, in a page or a file of their own, and a draft tree. In a page they take its colours and
fit a phone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from infer.evaluation.results import ExampleRound

WIDTH, HEIGHT = 360, 240  # of a chart, CSS pixels; narrower screens scale it
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 12, 40
ROW = 16  # of the legend, a line each
STYLE = "<style>text{font:12px system-ui,sans-serif}.grid{stroke:#d9d9de}.line{stroke-width:2}</style>"  # of a file
STEP_X, STEP_Y, BOX_W, BOX_H = 74, 62, 66, 34  # of a tree


@dataclass(frozen=True)
class Line:
    """One line of a chart: points (x, y), an interval of y at each or None, a colour and a dash pattern."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: str
    intervals: Sequence[Sequence[float] | None] = ()
    dash: str = ""


@dataclass(frozen=True)
class Chart:
    """Lines in one drawing. A logarithmic x axis has ticks at the points' own values."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    log: bool = False

    @property
    def height(self) -> int:
        return HEIGHT + ROW * len(self.lines)


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
        return self.start + (value - low) / ((high - low) or 1) * (self.end - self.start)


def line_chart(chart: Chart) -> str:
    """Draw a chart with its legend below; bars are intervals. Nothing but finite numbers may come."""
    every = [point for line in chart.lines for point in line.points]
    edges = [edge for line in chart.lines for interval in line.intervals if interval for edge in interval]
    values, places = [y for _, y in every] + edges, [x for x, _ in every]
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    across = AxisScale(min(places), max(places), LEFT + 10, WIDTH - RIGHT - 10, chart.log)
    up = AxisScale(low - room, high + room, HEIGHT - BOTTOM, TOP)
    parts = [y_axis(up, chart.y_label), x_axis(across, sorted(set(places)) if chart.log else None, chart.x_label)]
    parts += [draw_line(line, across, up) for line in chart.lines]
    for i, line in enumerate(chart.lines):
        y = HEIGHT + ROW * i + ROW / 2
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + 28}" y1="{y}" y2="{y}" {stroke(line)}/>')
        parts.append(f'<text x="{LEFT + 36}" y="{y + 4}">{escape(line.label)}</text>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {chart.height}" role="img" aria-label="{escape(chart.title)}" class="chart">'
        f"{''.join(parts)}</svg>"
    )


def picture(charts: Sequence[Chart]) -> str:
    """Return the text of an SVG file with charts side by side."""
    height = max(chart.height for chart in charts)
    placed = [
        line_chart(chart).replace("<svg", f'<svg x="{WIDTH * i}" width="{WIDTH}" height="{chart.height}"', 1)
        for i, chart in enumerate(charts)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * len(charts)} {height}">{STYLE}'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{"".join(placed)}</svg>\n'
    )


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return round values between two, about `count`; the value itself where both are one."""
    if low == high:
        return [low]
    step = 10 ** math.floor(math.log10((high - low) / count))
    step = next(step * times for times in (1, 2, 5, 10) if (high - low) / (step * times) <= count + 1)
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def y_axis(up: AxisScale, label: str) -> str:
    """Draw the y axis: lines across, numbers, and what they are."""
    parts = []
    for value in ticks(up.low, up.high):
        y = up(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text x="12" y="{middle}" text-anchor="middle" transform="rotate(-90 12 {middle})">{label}</text>')
    return "".join(parts)


def x_axis(across: AxisScale, values: Sequence[float] | None, label: str) -> str:
    """Draw the numbers of the x axis, and what they are."""
    named = [(across(value), HEIGHT - BOTTOM + 16, f"{value:g}") for value in values or ticks(across.low, across.high)]
    named.append(((LEFT + WIDTH) / 2, HEIGHT - 6, label))
    return "".join(f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{text}</text>' for x, y, text in named)


def stroke(line: Line) -> str:
    dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
    return f'class="line" stroke="{line.colour}"{dash}'


def draw_line(line: Line, across: AxisScale, up: AxisScale) -> str:
    """Draw a line, its points where it has intervals, and those as bars."""
    path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line.points)
    parts = [f'<polyline points="{path}" fill="none" {stroke(line)}/>']
    for (x, y), interval in zip(line.points, line.intervals, strict=False):
        place = across(x)
        parts.append(f'<circle cx="{place:.1f}" cy="{up(y):.1f}" r="3" class="dot" fill="{line.colour}"/>')
        if interval:
            low, high = map(up, interval)
            parts.append(f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{low:.1f}" y2="{high:.1f}" {stroke(line)}/>')
    return "".join(parts)


def visible(token: str) -> str:
    """Return a token with its spaces and line ends as signs, cut to what fits into a box."""
    shown = token.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·") or "∅"
    return shown if len(shown) <= 7 else shown[:6] + "…"


def leaves_first(parents: Sequence[int]) -> list[float]:
    """Return a column for every node: leaves side by side, parents above the middle of their children."""
    children: dict[int, list[int]] = {}
    for node in range(1, len(parents)):
        children.setdefault(parents[node], []).append(node)
    columns, free = [0.0] * len(parents), 0

    def place(node: int) -> None:
        nonlocal free
        for child in children.get(node, ()):
            place(child)
        if node in children:
            columns[node] = (columns[children[node][0]] + columns[children[node][-1]]) / 2
        else:
            columns[node], free = float(free), free + 1

    place(0)
    return columns


def tree_drawing(example: ExampleRound) -> str:
    """Draw a round's tree from the top down: the accepted path, rejected branches, how likely the drafter thought each
    token behind the one above, and below the path the token that the target added."""
    nodes, last = example.nodes, max(i for i, node in enumerate(example.nodes) if node.accepted)
    parents = [*(node.parent for node in nodes), last]  # of the added token, too
    columns, depths = leaves_first(parents), [0] * len(parents)
    for i, parent in enumerate(parents[1:], 1):
        depths[i] = depths[parent] + 1
    width, height = (max(columns) + 1) * STEP_X + 8, max(depths) * STEP_Y + BOX_H + 8
    places = [
        (4 + (column + 0.5) * STEP_X, 4 + depth * STEP_Y + BOX_H / 2)
        for column, depth in zip(columns, depths, strict=True)
    ]
    kinds = [("accepted", "✓") if node.accepted else ("rejected", "✗") for node in nodes] + [("added", "+")]
    kinds[0] = ("root", "")
    labels = [f"{node.probability:.0%}" for node in nodes] + [""]
    words = [visible(node.word) for node in nodes] + [visible(example.added)]
    parts = [edge(places[parents[i]], places[i], kinds[i][0], labels[i]) for i in range(1, len(parents))]
    parts += [box(place, kind, word, sign) for place, (kind, sign), word in zip(places, kinds, words, strict=True)]
    path = ", ".join(repr(node.word) for node in nodes[1:] if node.accepted) or "none"
    said = (
        f"A draft tree of {len(nodes) - 1} tokens behind {nodes[0].word!r}: accepted {path}; rejected "
        f"{sum(not node.accepted for node in nodes)}; the model adds {example.added!r}"
    )
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:{width:.0f}px" role="img" class="tree" '
        f'aria-label="{escape(said)}">{"".join(parts)}</svg>'
    )


def edge(begin: tuple[float, float], end: tuple[float, float], kind: str, label: str) -> str:
    """Draw a line from box to box, with a label beside its lower end, on the side that the line does not come from."""
    (x1, y1), (x2, y2) = begin, end
    beside = f'x="{x2 - 4:.0f}" text-anchor="end"' if x1 > x2 else f'x="{x2 + 4:.0f}"'
    text = f'<text {beside} y="{y2 - BOX_H / 2 - 5:.0f}" class="share">{label}</text>' if label else ""
    return (
        f'<line x1="{x1:.0f}" y1="{y1 + BOX_H / 2:.0f}" x2="{x2:.0f}" y2="{y2 - BOX_H / 2:.0f}" class="{kind}"/>{text}'
    )


def box(centre: tuple[float, float], kind: str, word: str, sign: str) -> str:
    """Draw a token."""
    x, y = centre
    corner = f'x="{x - BOX_W / 2:.0f}" y="{y - BOX_H / 2:.0f}"'
    mark = f"{sign} " if sign else ""
    return (
        f'<rect {corner} width="{BOX_W}" height="{BOX_H}" rx="6" class="{kind}"/>'
        f'<text x="{x:.0f}" y="{y + 4:.0f}" text-anchor="middle" class="{kind} token">{mark}{escape(word)}</text>'
    )

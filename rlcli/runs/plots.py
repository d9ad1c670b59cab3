"""Small charts as inline SVG: lines with markers, and stacked bars. No library, no script; colours come from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 440, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 10, 24
MOST_POINTS = 160  # more are averaged in buckets
SMOOTH_FROM = 40  # points from which a smoothed line is drawn over the faint raw one

Points = list[tuple[float, float]]
Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Series:
    """A named line. `markers`: measured now and then, so that each point is shown."""

    name: str
    points: Points
    markers: bool = False


def plain(value: float) -> str:
    """A number as an axis or a summary shows it: 1,234 or 0.0123 or 2e-5."""
    size = abs(value)
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    if size >= 100_000 or size < 0.001:
        digits, _, power = f"{value:.1e}".partition("e")
        return f"{digits.removesuffix('.0')}e{int(power)}"
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(size)))}f}".rstrip("0").rstrip(".")


def percent(value: float) -> str:
    """A share as a percentage."""
    text = f"{100 * value:.{2 if 0 < abs(value) < 0.01 else 1}f}"
    return f"{text.rstrip('0').rstrip('.')}%"


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Up to about `most` round numbers from `low` to `high` or a little beyond, always at least two."""
    if not high > low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def thin(points: Points, most: int = MOST_POINTS) -> Points:
    """At most `most` points, each the mean of its bucket."""
    if len(points) <= most:
        return points
    size = math.ceil(len(points) / most)
    buckets = [points[start : start + size] for start in range(0, len(points), size)]
    return [(bucket[-1][0], sum(y for _, y in bucket) / len(bucket)) for bucket in buckets]


def smooth(points: Points, window: int) -> Points:
    """Exponential moving average over about `window` points, without the bias towards the first one."""
    keep, mean, weight, out = 1 - 2 / (window + 1), 0.0, 0.0, []
    for x, y in points:
        mean, weight = keep * mean + (1 - keep) * y, keep * weight + (1 - keep)
        out.append((x, mean / weight))
    return out


@dataclass(slots=True)
class _Scale:
    """From data to the picture."""

    xs: tuple[float, float]
    ys: tuple[float, float]

    def x(self, value: float) -> float:
        low, high = self.xs
        return LEFT + (value - low) / ((high - low) or 1) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.ys
        return HEIGHT - BOTTOM - (value - low) / ((high - low) or 1) * (HEIGHT - TOP - BOTTOM)


def lines(series: Sequence[Series], form: Format = plain, zero: bool = False, label: str = "") -> str:
    """A line chart; "" where no series has a point. zero: the vertical axis begins at 0."""
    shown = [Series(one.name, one.points if one.markers else thin(one.points), one.markers) for one in series if one.points]
    if not shown:
        return ""
    xs = [x for one in shown for x, _ in one.points]
    ys = [y for one in shown for _, y in one.points] + ([0.0] if zero else [])
    marks = ticks(min(ys), max(ys))
    scale = _Scale((min(xs), max(xs)), (marks[0], marks[-1]))
    body = _axes(scale, marks, form)
    for number, one in enumerate(shown, 1):
        body += _line(one, number, scale)
    values = {x: {one.name: y for one in shown for px, y in one.points if px == x} for x in dict.fromkeys(sorted(xs))}
    return _svg(body + _tips(values, scale, form), label)


def bars(names: Sequence[str], rows: Sequence[tuple[float, Sequence[float]]], form: Format = plain, label: str = "") -> str:
    """Stacked bars, one a row (x, a value for each name); "" where there are none. Negative values count as 0."""
    if not rows:
        return ""
    size = math.ceil(len(rows) / MOST_POINTS)
    chunks = [rows[start : start + size] for start in range(0, len(rows), size)]
    merged = [(chunk[-1][0], [sum(max(row[1][i], 0.0) for row in chunk) / len(chunk) for i in range(len(names))]) for chunk in chunks]
    marks = ticks(0.0, max(sum(values) for _, values in merged))
    pad = (merged[-1][0] - merged[0][0]) / max(len(merged) - 1, 1) / 2 or 0.5
    scale = _Scale((merged[0][0] - pad, merged[-1][0] + pad), (marks[0], marks[-1]))
    width = max((WIDTH - LEFT - RIGHT) / len(merged) * 0.82, 0.8)
    body = _axes(scale, marks, form)
    for x, values in merged:
        base = 0.0
        for number, value in enumerate(values, 1):
            top, bottom = scale.y(base + value), scale.y(base)
            if bottom - top > 0.05:
                body += f'<rect class="b{number}" x="{scale.x(x) - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" height="{bottom - top:.1f}"/>'
            base += value
    tips = {x: dict(zip(names, values, strict=True)) for x, values in merged}
    return _svg(body + _tips(tips, scale, form), label)


def _line(one: Series, number: int, scale: _Scale) -> str:
    path = " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in one.points)
    if not one.markers and len(one.points) >= SMOOTH_FROM:
        calm = " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in smooth(one.points, max(5, len(one.points) // 12)))
        return f'<polyline class="l{number} raw" points="{path}"/><polyline class="l{number}" points="{calm}"/>'
    out = f'<polyline class="l{number}" points="{path}"/>'
    if one.markers or len(one.points) == 1:
        out += "".join(f'<circle class="m{number}" cx="{scale.x(x):.1f}" cy="{scale.y(y):.1f}" r="3.2"/>' for x, y in one.points)
    return out


def _axes(scale: _Scale, marks: Sequence[float], form: Format) -> str:
    out = ""
    for mark in marks:
        y = scale.y(mark)
        out += f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        out += f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(form(mark))}</text>'
    low, high = scale.xs
    steps = [mark for mark in ticks(low, high, 6) if low <= mark <= high and mark == int(mark)] or [low]
    for mark in steps:
        out += f'<text x="{scale.x(mark):.1f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(plain(mark))}</text>'
    return out


def _tips(values: dict[float, dict[str, float]], scale: _Scale, form: Format) -> str:
    """Invisible columns that show a step's values when pointed at."""
    xs = list(values)
    out = ""
    for number, x in enumerate(xs):
        here = scale.x(x)
        left = (scale.x(xs[number - 1]) + here) / 2 if number else LEFT
        right = (scale.x(xs[number + 1]) + here) / 2 if number + 1 < len(xs) else WIDTH - RIGHT
        text = "\n".join([f"step {plain(x)}", *(f"{name}: {form(value)}" for name, value in values[x].items())])
        out += f'<rect class="tip" x="{left:.1f}" y="{TOP}" width="{max(right - left, 0.1):.1f}" height="{HEIGHT - TOP - BOTTOM}"><title>{escape(text)}</title></rect>'
    return out


def _svg(body: str, label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{body}</svg>'

"""Line charts as SVG: axes, round ticks, a line for a target, one curve a strategy. They are parts of `figure.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 480, 300
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 12, 44
INK, SOFT, LINE = "#1d2129", "#5c6470", "#dfe2e6"
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#b07a00", "#3b9bd0")
"""Okabe and Ito's, which colour-blind people can tell apart; those of the page."""
MAX_POINTS = 300
"""More than a curve of this width can show; a long run must not make a heavy page."""
DASHES = ("", "8 3", "12 3 3 3", "3 3", "5 2", "1 3")
"""Curves differ by dash as well as by colour: prints are grey."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """One strategy's points, in order of x."""

    name: str
    points: Sequence[Point]


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers that cover the range.

    >>> ticks(0, 20), ticks(0.13, 0.97)
    ([0.0, 5.0, 10.0, 15.0, 20.0], [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    """
    span = high - low if high > low else abs(high) or 1.0
    rough = span / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.floor(low / step + 1e-9), math.ceil((low + span) / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def line_chart(
    curves: Sequence[Curve],
    *,
    x_label: str,
    y_label: str,
    target: float | None = None,
    x_marks: Mapping[float, str] | None = None,
) -> str:
    """The chart as an SVG element; the curves take the colours of their places in the list. `x_marks`: what is written
    where on an axis that goes from the first to the last of them; by default it begins at 0 and has round numbers."""
    points = [point for curve in curves for point in curve.points if all(map(math.isfinite, point))]
    if not points:
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}"><text x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">'
            f"{escape(y_label)}: nothing was recorded</text></svg>"
        )
    ys = [y for _, y in points] + ([target] if target is not None else [])
    longest, y_ticks = max(x for x, _ in points) or 1.0, ticks(min(ys), max(ys))
    marks = x_marks or {mark: _tick_text(mark) for mark in ticks(0.0, longest) if mark <= longest}
    place = _Placing(min(marks), max(marks) if x_marks else longest, y_ticks[0], y_ticks[-1])
    parts = [_grid(place, marks, y_ticks), _labels(x_label, y_label)]
    if target is not None:
        d = f"M{LEFT} {place.y(target):.1f}H{WIDTH - RIGHT}"
        parts.append(f'<path d="{d}" stroke="{INK}" stroke-dasharray="5 4"/>')
    parts += [_curve(place, curve, index) for index, curve in enumerate(curves)]
    title = f"<title>{escape(y_label)} over {escape(x_label)}</title>"
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" fill="none">{title}{"".join(parts)}</svg>'


@dataclass(frozen=True)
class _Placing:
    """From the data's units to the picture's."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)


def _grid(place: _Placing, marks: Mapping[float, str], y_ticks: Sequence[float]) -> str:
    floor = HEIGHT - BOTTOM
    parts = []
    for value in y_ticks:
        y = place.y(value)
        parts.append(f'<path stroke="{LINE}" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT - 7, y + 4.5, _tick_text(value), "end"))
    for value, said in marks.items():
        x = place.x(value)
        parts.append(f'<path stroke="{SOFT}" d="M{x:.1f} {floor}v5"/>')
        parts.append(_text(x, floor + 19, said))
    parts.append(f'<path stroke="{SOFT}" d="M{LEFT} {floor}H{WIDTH - RIGHT}"/>')
    return "".join(parts)


def _labels(x_label: str, y_label: str) -> str:
    middle = (LEFT + WIDTH - RIGHT) / 2
    up = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'<g transform="translate(13 {up}) rotate(-90)">{_text(0, 0, y_label)}</g>'
    return _text(middle, HEIGHT - 6, x_label) + turned


def _text(x: float, y: float, said: str, anchor: str = "middle") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="13" fill="{SOFT}">{escape(said)}</text>'


def _curve(place: _Placing, curve: Curve, index: int) -> str:
    finite = [point for point in curve.points if all(map(math.isfinite, point))]
    if not finite:
        return ""
    stride = math.ceil(len(finite) / MAX_POINTS)
    kept = [*finite[:-1:stride], finite[-1]]
    corners = [f"{place.x(x):.1f} {place.y(y):.1f}" for x, y in kept]
    x, y = kept[-1]
    end = f'<circle cx="{place.x(x):.1f}" cy="{place.y(y):.1f}" r="4" fill="{COLOURS[index % len(COLOURS)]}"/>'
    line = f'<path {stroke(index)} stroke-width="2.25" stroke-linejoin="round" d="M{"L".join(corners)}">'
    return f"{line}<title>{escape(curve.name)}</title></path>{end}"


def stroke(index: int) -> str:
    """Colour and dash of the curve at this place of a list."""
    return f'stroke="{COLOURS[index % len(COLOURS)]}" stroke-dasharray="{DASHES[index % len(DASHES)]}"'


def _tick_text(value: float) -> str:
    """
    >>> _tick_text(0.5), _tick_text(20000.0), _tick_text(1500000.0)
    ('0.5', '20k', '1.5M')
    """
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if abs(value) >= 1e4 else f"{value:g}"

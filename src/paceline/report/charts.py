"""Line charts as inline SVG: axes, round ticks, a target line, one curve a strategy.

Written here because a plotting library in the page would need a network or a megabyte, and pictures do not follow the
reader's light or dark colours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 480, 300
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 12, 44
COLOURS = 6
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


def line_chart(curves: Sequence[Curve], *, x_label: str, y_label: str, target: float | None = None) -> str:
    """The chart as an SVG element; the curves take the colours of their places in the list."""
    points = [point for curve in curves for point in curve.points if all(map(math.isfinite, point))]
    if not points:
        return '<p class="soft">No metric was recorded.</p>'
    ys = [y for _, y in points] + ([target] if target is not None else [])
    x_ticks, y_ticks = ticks(0.0, max(x for x, _ in points)), ticks(min(ys), max(ys))
    place = _Placing(x_ticks[0], x_ticks[-1], y_ticks[0], y_ticks[-1])
    parts = [_grid(place, x_ticks, y_ticks), _labels(x_label, y_label)]
    if target is not None:
        parts.append(f'<path class="target" d="M{LEFT} {place.y(target):.1f}H{WIDTH - RIGHT}"/>')
    parts += [_curve(place, curve, index) for index, curve in enumerate(curves)]
    title = f"<title>{escape(y_label)} over {escape(x_label)}</title>"
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{title}{"".join(parts)}</svg>'


def legend(names: Sequence[str], target: float | None = None) -> str:
    """Names beside a piece of their lines."""
    entries = []
    for index, name in enumerate(names):
        line = f'<path d="M0 6H26" {_stroke(index)} stroke-width="3"/>'
        entries.append(f'<span><svg viewBox="0 0 26 12" aria-hidden="true">{line}</svg>{escape(name)}</span>')
    if target is not None:
        line = '<path d="M0 6H26" stroke="var(--soft)" stroke-width="2" stroke-dasharray="5 4"/>'
        entries.append(f'<span><svg viewBox="0 0 26 12" aria-hidden="true">{line}</svg>target {target:g}</span>')
    return f'<div class="legend">{"".join(entries)}</div>'


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


def _grid(place: _Placing, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> str:
    floor = HEIGHT - BOTTOM
    parts = []
    for value in y_ticks:
        y = place.y(value)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{y + 4.5:.1f}" text-anchor="end">{_tick_text(value)}</text>')
    for value in x_ticks:
        x = place.x(value)
        parts.append(f'<path class="axis" d="M{x:.1f} {floor}v5"/>')
        parts.append(f'<text x="{x:.1f}" y="{floor + 19}" text-anchor="middle">{_tick_text(value)}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {floor}H{WIDTH - RIGHT}"/>')
    return "".join(parts)


def _labels(x_label: str, y_label: str) -> str:
    middle = (LEFT + WIDTH - RIGHT) / 2
    across = f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>'
    up = (TOP + HEIGHT - BOTTOM) / 2
    return f'{across}<text transform="translate(13 {up}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'


def _curve(place: _Placing, curve: Curve, index: int) -> str:
    finite = [point for point in curve.points if all(map(math.isfinite, point))]
    if not finite:
        return ""
    stride = math.ceil(len(finite) / MAX_POINTS)
    kept = [*finite[:-1:stride], finite[-1]]
    corners = [f"{place.x(x):.1f} {place.y(y):.1f}" for x, y in kept]
    x, y = kept[-1]
    end = f'<circle cx="{place.x(x):.1f}" cy="{place.y(y):.1f}" r="4" fill="var(--s{index % COLOURS})"/>'
    line = f'<path class="curve" {_stroke(index)} d="M{"L".join(corners)}">'
    return f"{line}<title>{escape(curve.name)}</title></path>{end}"


def _stroke(index: int) -> str:
    return f'stroke="var(--s{index % COLOURS})" stroke-dasharray="{DASHES[index % len(DASHES)]}"'


def _tick_text(value: float) -> str:
    """
    >>> _tick_text(0.5), _tick_text(20000.0), _tick_text(1500000.0)
    ('0.5', '20k', '1.5M')
    """
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if abs(value) >= 1e4 else f"{value:g}"

"""A graph and its matchings as one picture: SVG, made by the same small means as the figure of a report.

The picture is written once. A PNG is that very picture as pixels, by resvg (3 MB, the extra `plot`), where a plotting
library (100 MB) would be a second way to draw, for fewer people.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, cos, pi, sin
from pathlib import Path

from paceline.errors import PacelineError
from paceline.report.charts import COLOURS, DASHES, INK, SOFT
from paceline.rules.graphs import Edge, Graph
from paceline.rules.matcha import Matcha

NEVER = "#b4bac2"
WIDTH, MARGIN, TITLE = 900, 24, 44
LARGE, SMALL, COLUMNS = 420, 205, 4
MOST_PANELS, MOST_NAMED = 12, 14
"""More are too many to look at; the command's table and JSON have them all."""
SUFFIXES = (".svg", ".png")


@dataclass(frozen=True)
class _Line:
    """How the edges of one matching are drawn: the wider, the more often."""

    colour: str
    dash: str
    width: float

    def svg(self, edge: Edge, places: Sequence[tuple[float, float]], scale: float = 1.0) -> str:
        (x, y), (to_x, to_y) = places[edge[0]], places[edge[1]]
        return (
            f'<path d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}" stroke="{self.colour}" '
            f'stroke-width="{self.width * scale:.2f}" stroke-dasharray="{self.dash}"/>'
        )


def draw(graph: Graph, plan: Matcha, title: str) -> str:
    """The picture as SVG: the whole graph with a legend, below it each matching by itself."""
    # Many workers have many edges: thinner ones, or they would cover each other.
    widest = 6 * min(1.0, (16 / graph.workers) ** 0.5)
    lines = [_line(place, probability, widest) for place, probability in enumerate(plan.probabilities)]
    shown = min(len(lines), MOST_PANELS)
    height = TITLE + LARGE + ceil(shown / COLUMNS) * (SMALL + TITLE) + MARGIN
    parts = [_text(MARGIN, 30, title, 20, weight="600"), *_whole(graph, plan, lines), *_legend(plan, lines)]
    for place in range(shown):
        parts += _panel(graph, plan, place, lines[place])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="system-ui, Segoe UI, Roboto, DejaVu Sans, sans-serif" fill="none"><title>{escape(title)}</title>'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>{"".join(parts)}</svg>\n'
    )


def save(picture: str, file: Path) -> None:
    """Write the picture, as what the file's name says."""
    check_suffix(file)
    if file.suffix == ".svg":
        file.write_text(picture, encoding="utf-8")
        return
    import resvg_py

    file.write_bytes(bytes(resvg_py.svg_to_bytes(svg_string=picture, zoom=2)))


def check_suffix(file: Path) -> None:
    """Protest against what cannot be drawn, before anything is computed."""
    if file.suffix not in SUFFIXES:
        raise PacelineError(f"A picture cannot be written to {file}.", remedy="Give a name that ends in .svg or .png.")
    if file.suffix == ".png":
        try:
            import resvg_py  # noqa: F401  # only whether it is there
        except ImportError:
            raise PacelineError(
                "For a PNG the package resvg-py is missing.",
                remedy="Install it with: pip install 'paceline[plot]'. Or give a name that ends in .svg.",
            ) from None


def _line(place: int, probability: float, widest: float) -> _Line:
    if probability == 0:
        return _Line(NEVER, "2 4", 1.0)
    dash = DASHES[place // len(COLOURS) % len(DASHES)]
    return _Line(COLOURS[place % len(COLOURS)], dash, widest * (0.2 + 0.8 * probability))


def _whole(graph: Graph, plan: Matcha, lines: Sequence[_Line]) -> Iterator[str]:
    places = _circle(graph.workers, MARGIN, TITLE, LARGE)
    # Those that are seldom used last: a thin line is seen above a thick one, not below it.
    for place in sorted(range(len(lines)), key=lambda place: -lines[place].width):
        yield from (lines[place].svg(edge, places) for edge in plan.matchings[place])
    yield from _ranks(places, LARGE)


def _panel(graph: Graph, plan: Matcha, place: int, line: _Line) -> Iterator[str]:
    left = MARGIN + place % COLUMNS * (WIDTH - 2 * MARGIN) / COLUMNS
    top = TITLE + LARGE + place // COLUMNS * (SMALL + TITLE)
    yield _text(left + 6, top + 28, f"{place + 1}: {_often(plan.probabilities[place])}", 15, colour=INK)
    places = _circle(graph.workers, left, top + TITLE - 6, SMALL)
    yield from (line.svg(edge, places, 0.8) for edge in plan.matchings[place])
    yield from _ranks(places, SMALL)


def _legend(plan: Matcha, lines: Sequence[_Line]) -> Iterator[str]:
    left, top = MARGIN + LARGE + 50, TITLE + 40
    yield _text(left, top, f"α = {plan.alpha:.4f}, ρ = {plan.rho:.4f}", 17)
    yield _text(left, top + 28, "Lines are as wide as they are often used.", 14, colour=SOFT)
    for place, line in enumerate(lines[:MOST_NAMED]):
        y = top + 62 + 20 * place
        yield line.svg((0, 1), ((left, y - 5), (left + 46, y - 5)))
        edges = len(plan.matchings[place])
        said = f"matching {place + 1}: {_often(plan.probabilities[place])}, {edges} {'edge' if edges == 1 else 'edges'}"
        yield _text(left + 60, y, said, 14)
    if len(lines) > MOST_NAMED:
        yield _text(left + 60, top + 62 + 20 * MOST_NAMED, f"and {len(lines) - MOST_NAMED} more", 14, colour=SOFT)


def _often(probability: float) -> str:
    return f"p = {probability:.3f}" if probability else "never"


def _circle(workers: int, left: float, top: float, side: float) -> list[tuple[float, float]]:
    """Where the ranks stand: rank 0 at the top, the others clockwise."""
    middle, reach = side / 2, 0.42 * side if workers > 1 else 0.0
    angles = [2 * pi * rank / workers for rank in range(workers)]
    return [(left + middle + reach * sin(angle), top + middle - reach * cos(angle)) for angle in angles]


def _ranks(places: Sequence[tuple[float, float]], side: float) -> Iterator[str]:
    # As large as the circle has room for, and with a number where that can be read.
    radius = min(0.034 * side + 2, side / len(places))
    for rank, (x, y) in enumerate(places):
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="#ffffff" stroke="{INK}"/>'
        if radius >= 6:
            yield _text(x, y + 0.36 * radius * 1.1, str(rank), 1.1 * radius, anchor="middle")


def _text(
    x: float, y: float, said: str, points: float, *, colour: str = INK, anchor: str = "start", weight: str = "400"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{points:.1f}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="{colour}">{escape(said)}</text>'
    )

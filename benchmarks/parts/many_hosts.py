"""Up to 1,024 hosts in the simulator, with the recorded times of a real cluster: timing only, nothing is learned."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from paceline.backends.learners import TimingLearner
from paceline.race.timing import BYTES_PER_PARAMETER, time_strategy
from paceline.report.charts import HEIGHT, INK, WIDTH, Curve, line_chart, stroke
from paceline.simulator.cluster import Cluster
from paceline.simulator.network import Network, Uplink
from paceline.strategies import create

SIZES = (16, 64, 256, 1024)
STRATEGIES = (
    "all-reduce",
    "all-reduce:compress=int8",
    "abs-sgd",
    "abs-sgd:compress=int8",
    "local-sgd:steps=32:by_speed",
    "ad-psgd",
)
PARAMETERS, MICRO_BATCH, MICRO_BATCH_SECONDS = 10_000_000, 32, 1.0
JOBS, JOB_RANKS = 3, 8  # recorded jobs, and how many hosts in a row are of one
LEAST_SECONDS, ROUNDS = 40.0, 2  # simulated: so long, and so many all-reduces, at least
FAST = "10 Gbit/s, 0.1 ms"
SLOW = "1 Gbit/s, 10 ms; every fourth 100 Mbit/s, 50 ms"
UPLINKS = {
    FAST: (Uplink(0.05e-3, 1.25e9),),
    SLOW: (*[Uplink(0.005, 125e6)] * 3, Uplink(0.045, 12.5e6)),
}


@dataclass(frozen=True)
class Found:
    """Of one strategy on so many hosts."""

    links: str
    strategy: str
    hosts: int
    share: float
    samples_per_round: float
    seconds_per_round: float


def cluster_of(hosts: int, links: str, traces: Path, seed: int = 0) -> Cluster:
    """The recorded jobs in turn, one host for each worker; each has its worker's speed and times."""
    jobs = [Cluster.from_trace(str(traces / f"pai_job_{number + 1}.csv")).devices for number in range(JOBS)]
    chosen = [jobs[rank // JOB_RANKS % JOBS] for rank in range(hosts)]
    devices = tuple(devices[rank % len(devices)] for rank, devices in enumerate(chosen))
    kinds = UPLINKS[links]
    uplinks = tuple(kinds[host % len(kinds)] for host in range(hosts))
    return Cluster(devices, MICRO_BATCH_SECONDS, Network(uplinks=uplinks), seed=seed)


def extrapolated(traces: Path, sizes: Sequence[int] = SIZES) -> Iterator[Found]:
    learner = TimingLearner(nbytes=PARAMETERS * BYTES_PER_PARAMETER)
    for links in UPLINKS:
        for hosts in sizes:
            cluster = cluster_of(hosts, links, traces)
            long = max(LEAST_SECONDS, ROUNDS * cluster.network.all_reduce_seconds(hosts, learner.nbytes))
            for strategy in STRATEGIES:
                seconds = LEAST_SECONDS if create(strategy).steps_alone else long  # who steps alone has short rounds
                outcome = time_strategy(strategy, cluster, learner, seconds=seconds, micro_batch=MICRO_BATCH)
                rounds = max(1, outcome.rounds)
                yield Found(
                    links,
                    strategy,
                    hosts,
                    outcome.share_of_ideal,
                    outcome.samples_applied / rounds,
                    outcome.seconds / rounds,
                )


def picture(found: Sequence[Found]) -> str:
    """Share of ideal by the number of hosts, for each kind of links, as SVG."""
    marks = {math.log2(hosts): f"{hosts:,}" for hosts in sorted({each.hosts for each in found})}
    parts, top = [_legend(STRATEGIES)], 24 + 24 * math.ceil(len(STRATEGIES) / 3)
    for place, links in enumerate(UPLINKS):
        curves = [Curve(name, _points(found, links, name)) for name in STRATEGIES]
        chart = line_chart(
            curves, x_label=f"hosts; {links}", y_label="share of ideal, simulated", x_marks=marks, target=1.0
        )
        sized = chart.replace("<svg ", f'<svg overflow="visible" width="{WIDTH}" height="{HEIGHT}" ', 1)
        parts.append(f'<g transform="translate({24 + place * (WIDTH + 24)} {top})">{sized}</g>')
    wide, high = 3 * 24 + 2 * WIDTH, top + HEIGHT + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" '
        f'font-family="system-ui, Segoe UI, Roboto, DejaVu Sans, sans-serif">'
        f'<rect width="{wide}" height="{high}" fill="#ffffff"/>{"".join(parts)}</svg>\n'
    )


def _points(found: Sequence[Found], links: str, strategy: str) -> list[tuple[float, float]]:
    return [(math.log2(each.hosts), each.share) for each in found if (each.links, each.strategy) == (links, strategy)]


def _legend(names: Sequence[str]) -> str:
    parts = []
    for index, name in enumerate(names):
        x, y = 24 + index % 3 * 330, 28 + index // 3 * 24
        text = f'<text x="{x + 34}" y="{y + 5}" font-size="14" fill="{INK}">{escape(name)}</text>'
        parts.append(f'<path d="M{x} {y}h26" stroke-width="3" fill="none" {stroke(index)}/>{text}')
    return "".join(parts)


def table(found: Sequence[Found]) -> str:
    """As Markdown: share of ideal, and in brackets the samples that one step is over."""
    rows: Mapping[tuple[str, str, int], Found] = {(each.links, each.strategy, each.hosts): each for each in found}
    sizes = sorted({each.hosts for each in found})
    lines = []
    for links in UPLINKS:
        lines += ["", f"{links}:", "", "| strategy | " + " | ".join(f"{size:,} hosts" for size in sizes) + " |"]
        lines.append("|---|" + "---:|" * len(sizes))
        for strategy in STRATEGIES:
            cells = [rows[links, strategy, size] for size in sizes]
            shown = [f"{cell.share:.2f} ({_count(cell.samples_per_round)})" for cell in cells]
            lines.append(f"| `{strategy}` | " + " | ".join(shown) + " |")
    return "\n".join(lines[1:])


def _count(samples: float) -> str:
    return (
        f"{samples / 1e6:.1f} M"
        if samples >= 1e6
        else f"{samples / 1e3:.0f} k"
        if samples >= 1e4
        else f"{samples:,.0f}"
    )

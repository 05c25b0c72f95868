"""From the raw numbers of a dated file to its tables, and to those of the README and of docs/peers.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path

from parts.peers.course import CLUSTERS
from parts.peers.methods import METHODS, Method
from parts.peers.outcomes import (
    ALONE_OVERSLEPT,
    EQUAL_SAMPLES,
    LATER,
    MOST_OVERSLEPT,
    SMOOTHED,
    TARGET,
    TUNED_ON,
    WINDOW,
    Book,
    Outcome,
    median_time,
)

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results" / "peers"
SHORT = {
    "equal": "equal",
    "static": "1, 1, ½, ¼",
    "drifting": "drifting",
    "straggler": "straggler",
    "traces": "recorded",
}
IN_README = ("ddp", "ddp-balanced", "post-local-sgd", "accelerate-local-sgd", "torchft-local-sgd")
IN_README += ("hivemind-local", "ray-ddp", "abs-sgd")
BEGIN, END = "<!-- peers: made by scripts/bench peers --tables -->", "<!-- /peers -->"
WORDS = {"peer": "as documented", "by hand": "by hand", "paceline": "Paceline"}

Cell = Callable[[Sequence[Outcome]], str]


def newest() -> Path:
    """The latest dated file."""
    return max(RESULTS.glob("*.jsonl"), default=RESULTS / "none.jsonl")


def raced(book: Book) -> list[Method]:
    """Methods that have results, in the order of the list."""
    return [method for method in METHODS if book.at_best(method.name, TUNED_ON)]


def clusters_of(book: Book) -> list[str]:
    """Those on which somebody has enough races."""
    return [name for name in CLUSTERS if any(book.at_best(method.name, name) for method in METHODS)]


def table(book: Book, methods: Sequence[Method], cell: Cell) -> list[str]:
    """One row a method, one column a cluster."""
    clusters = clusters_of(book)
    lines = ["| method | | " + " | ".join(SHORT[name] for name in clusters) + " |"]
    lines.append("|---|---|" + "---:|" * len(clusters))
    for method in methods:
        found = [book.at_best(method.name, name) for name in clusters]
        cells = [cell(outcomes) if outcomes else "" for outcomes in found]
        lines.append(f"| `{method.name}` | {WORDS[method.kind]} | " + " | ".join(cells) + " |")
    return lines


def time_cell(book: Book) -> Cell:
    """Seconds to the target: median, and least and most; the first of a cluster in bold."""
    best = {
        name: min(
            (median_time(found) for method in raced(book) if (found := book.at_best(method.name, name))), default=inf
        )
        for name in clusters_of(book)
    }

    def cell(outcomes: Sequence[Outcome]) -> str:
        times = sorted(inf if each.time_to_target is None else each.time_to_target for each in outcomes)
        middle = statistics.median(times)
        if middle == inf:
            return f"> {outcomes[0].race.seconds:.0f}"
        told = f"**{middle:.1f}**" if middle == best[outcomes[0].race.cluster] else f"{middle:.1f}"
        return f"{told} ({times[0]:.1f}–{_or_more(times[-1])})"

    return cell


def _or_more(seconds: float) -> str:
    return "…" if seconds == inf else f"{seconds:.1f}"


def median_of(value: Callable[[Outcome], float | None], form: str) -> Cell:
    def cell(outcomes: Sequence[Outcome]) -> str:
        known = [found for each in outcomes if (found := value(each)) is not None]
        return "–" if not known or (middle := statistics.median(known)) == inf else format(middle, form)

    return cell


def factors(book: Book) -> list[str]:
    """How many times sooner the best strategy of Paceline is, cluster by cluster."""
    clusters = clusters_of(book)
    rows: dict[str, list[str]] = {"DDP": [], "the best peer as documented": [], "DDP balanced by hand": []}
    names, seeds = [], []
    for cluster in clusters:
        found = {each: outcomes for each in raced(book) if (outcomes := book.at_best(each.name, cluster))}
        time_of = {method: median_time(outcomes) for method, outcomes in found.items()}
        ours = {method.name: time for method, time in time_of.items() if method.kind == "paceline"}
        peers = [time for method, time in time_of.items() if method.kind == "peer"]
        by_name = {method.name: time for method, time in time_of.items()}
        best = min(ours.values(), default=inf)
        first = min(ours, key=lambda name: ours[name], default="")
        names.append(f"`{first}`" if best < inf else "–")
        seeds.append(_seeds_won(book.at_best(first, cluster), book.at_best("ddp-balanced", cluster)))
        for name, time in zip(
            rows, (by_name.get("ddp"), min(peers, default=None), by_name.get("ddp-balanced")), strict=True
        ):
            rows[name].append(_factor(time, best, _longest(book)))
    rows["the same, seeds on which it is sooner"] = seeds
    lines = ["| sooner than | " + " | ".join(SHORT[name] for name in clusters) + " |"]
    lines.append("|---|" + "---:|" * len(clusters))
    lines += [f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows.items()]
    return [*lines, "| first of Paceline's | " + " | ".join(names) + " |"]


def _seeds_won(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> str:
    """Of those that both have raced with: on the same samples and the same devices."""
    times = {each.race.seed: each.time_to_target or inf for each in theirs}
    both = [each for each in ours if each.race.seed in times]
    won = sum((each.time_to_target or inf) < times[each.race.seed] for each in both)
    return f"{won} of {len(both)}" if both else "–"


def _longest(book: Book) -> float:
    return max((race.seconds for race in book.outcomes), default=0.0)


def _factor(time: float | None, best: float, longest: float) -> str:
    if time is None or best == inf:
        return "–"
    return f"> {longest / best:.2f}×" if time == inf else f"{time / best:.2f}×"


def report(book: Book) -> str:
    """The whole of the dated file's companion."""
    methods, about = raced(book), book.about
    counted = [each for each in book.outcomes.values() if not each.disturbed]
    loads = [each.load for each in counted]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    tried = sorted({len(book.at_best(method.name, "static")) for method in methods} or {0})
    seeds = f"{tried[0]} seeds" if len(tried) == 1 else f"{tried[0]} to {tried[-1]} seeds (see the last table)"
    lines = [
        f"# Paceline and what people use today, {about['date']}",
        "",
        f"{about['machine']}; {versions}. {_load(loads)}{about['races_at_once']} races at a time. "
        f"{len(book.outcomes) - len(counted)} of {len(book.outcomes)} races do not count: their sleeps ended more than "
        f"{1000 * MOST_OVERSLEPT:g} ms late on average, because others had the processors "
        f"({1000 * ALONE_OVERSLEPT:g} ms for hivemind, which races alone and has many processes of its own).",
        "",
        f"Races of {_longest(book):.0f} s on real processes; medians of {seeds}, least and most in brackets. "
        "Made from the lines of the file of the same name by `scripts/bench peers --tables`.",
        "",
        *(f"- {SHORT[name]}: {CLUSTERS[name]}" for name in clusters_of(book)),
        "",
        f"## Seconds to a held-out loss of {TARGET}",
        "",
        f"As the mean over the snapshots of {WINDOW} samples around one.",
        "",
        *table(book, methods, time_cell(book)),
        "",
        "How many times sooner the first of Paceline's strategies is:",
        "",
        *factors(book),
        "",
        *measures(book, methods),
        "## Settings, seeds on the static cluster, and seconds from launch to the first micro-batch",
        "",
        *settings(book, methods),
        *not_run(book),
        "",
    ]
    return "\n".join(lines)


def measures(book: Book, methods: Sequence[Method]) -> list[str]:
    """All but the time to the target."""
    per_sample = median_of(lambda each: None if each.bytes is None else each.bytes / each.samples / 1000, ".1f")
    return [
        f"## Samples to a held-out loss of {TARGET}",
        "",
        *table(book, methods, median_of(lambda each: each.samples_to_target or inf, ",.0f")),
        "",
        f"## Seconds to a held-out accuracy of {LATER}",
        "",
        f"As the mean of {SMOOTHED} snapshots in a row, as of the middle one. Nobody was tuned for it, and it is far "
        "more a matter of chance.",
        "",
        *table(book, methods, median_of(lambda each: each.time_to_accuracy or inf, ".1f")),
        "",
        "## Share of ideal",
        "",
        *table(book, methods, median_of(lambda each: each.share_of_ideal, ".1%")),
        "",
        "## Accuracy when the time is up",
        "",
        *table(book, methods, median_of(lambda each: each.final, ".3f")),
        "",
        f"## Accuracy after {EQUAL_SAMPLES:,} samples",
        "",
        *table(book, methods, median_of(lambda each: each.at_equal_samples, ".3f")),
        "",
        "## Kilobytes sent for a sample used",
        "",
        "All traffic of all processes, counted on the loopback of a network of their own: headers and control too.",
        "",
        *table(book, methods, per_sample),
        "",
    ]


def _load(loads: Sequence[float]) -> str:
    if not loads:
        return ""
    told = f"median {statistics.median(loads):.0f}, {min(loads):.0f} to {max(loads):.0f}"
    return f"Load of the machine while it was measured: {told}; "


def not_run(book: Book) -> list[str]:
    """Everybody who is missing, and why."""
    done = {method.name for method in raced(book)}
    missing = [method.name for method in METHODS if method.name not in done]
    if not missing:
        return []
    lines = [f"- `{name}`: {book.failures.get(name) or _too_few(book, name)}" for name in missing]
    return ["", "## Not in the tables", "", *lines]


def _too_few(book: Book, name: str) -> str:
    """What there is of a method that has not enough races that count."""
    found = [each for race, each in book.outcomes.items() if race.method == name]
    if not found:
        return "it was not raced this time"
    late = sorted(1000 * each.overslept for each in found)
    final = sorted(each.final for each in found)
    reached = sum(each.time_to_target is not None for each in found)
    disturbed = sum(each.disturbed for each in found)
    return (
        f"too few races count. Of {len(found)}, {disturbed} had sleeps that ended too late, "
        f"{late[0]:.1f} to {late[-1]:.1f} ms on average; {reached} reached the target, accuracy in the end was "
        f"{final[0]:.3f} to {final[-1]:.3f}"
    )


def settings(book: Book, methods: Sequence[Method]) -> list[str]:
    lines = ["| method | set up | micro-batch | rate | seeds | start-up |", "|---|---|---:|---:|---:|---:|"]
    for method in methods:
        best = book.best(method.name)
        assert best is not None
        starts = [
            each.start_up
            for race, each in book.outcomes.items()
            if race.method == method.name and each.start_up is not None
        ]
        start = f"{min(starts):.1f}" if starts else "–"
        seeds = len(book.at_best(method.name, TUNED_ON))
        lines.append(
            f"| `{method.name}` | {method.configuration} | {best.micro_batch} | {best.lr:g} | {seeds} | {start} |"
        )
    return lines


def readme_table(book: Book) -> str:
    """Time to target, for the README."""
    methods = [method for method in raced(book) if method.name in IN_README]

    def cell(outcomes: Sequence[Outcome]) -> str:
        middle = median_time(outcomes)
        return f"> {outcomes[0].race.seconds:.0f}" if middle == inf else f"{middle:.1f}"

    return "\n".join(table(book, methods, cell))


def whole_table(book: Book) -> str:
    """Time to target and factors, for docs/peers.md."""
    return "\n".join([*table(book, raced(book), time_cell(book)), "", *factors(book)])


def inserted(text: str, made: str) -> str:
    """The text with what is between the marks replaced."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{made}\n{END}{after}"


def write_tables(book: Book, path: Path) -> str:
    """The dated tables; if they are the newest of the project's own, also the README's and the page's."""
    made = report(book)
    path.write_text(made)
    if book.path.resolve() == newest().resolve():
        for page, part in ((ROOT / "README.md", readme_table(book)), (ROOT / "docs" / "peers.md", whole_table(book))):
            page.write_text(inserted(page.read_text(), part))
    return made

"""A report out of a folder: what a race or a run left behind is all that it needs."""

from __future__ import annotations

import json
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.record import Event, read_events
from paceline.report.html import write_report
from paceline.summary import summarise

ESTIMATED = (
    "The speed of each worker alone was not measured: it is estimated from the run itself, as samples computed ÷ time "
    "spent computing. What a worker loses while it computes (other processes on its cores, say) is in no number here."
)


@dataclass(frozen=True)
class Kept:
    """What a folder holds: the race as its JSON has it, and the events of each strategy. A run is a race of one."""

    race: dict[str, Any]
    runs: dict[str, list[Event]]


def strategy_folder(strategy: str) -> str:
    """The name of a strategy's folder in a race's.

    >>> strategy_folder("abs-sgd:delay_cure=none: min_micro_batches=2")
    'abs-sgd_delay_cure=none_min_micro_batches=2'
    """
    return strategy.replace(":", "_").replace(" ", "")


def read_folder(folder: Path | str) -> Kept:
    """Read a race's folder, or a run's."""
    folder = Path(folder)
    if (folder / "race.json").is_file():
        kept = _race(folder)
    elif any((folder / "events").glob("rank-*.jsonl")):
        kept = _run(folder)
    else:
        parts = sorted(path.parent.parent for path in folder.glob("*/events/rank-0000.jsonl"))
        if parts:
            raise PacelineError(
                f"The race in {folder} did not finish: it has no race.json.",
                cause="It was stopped, or still runs.",
                remedy=f"Name a strategy's folder: {', '.join(map(str, parts))}.",
            )
        raise PacelineError(
            f"{folder} is not the folder of a race or a run.",
            cause="It has neither a race.json nor events/rank-0000.jsonl.",
            remedy="Name a folder such as runs/race/TIME or runs/NAME/TIME; `paceline run` and `race` print it.",
        )
    return kept


def report_of_folder(folder: Path | str) -> tuple[Path, Kept]:
    """Write `report.html` into a folder, from its record; where it is, and what was read."""
    kept = read_folder(folder)
    page = Path(folder) / "report.html"
    write_report(page, kept.race, kept.runs)
    return page.absolute(), kept


def run_as_race(events: list[Event], settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A run as a race of one, with speeds estimated from its own events.

    Args:
        events: of all ranks.
        settings: what `config.toml` holds.
        name: of the run.
    """
    speeds = estimated_speeds(events)
    everyone = range(max(speeds, default=-1) + 1)
    summary = summarise(events, speeds=[speeds.get(rank, 0.0) for rank in everyone]).as_dict()
    summary["workers"] = [worker for worker in summary["workers"] if worker["speed"]]  # the others serve
    result = {"strategy": str(settings.get("strategy", "run")), "backend": "processes", **summary}
    told = {key: value for key, value in settings.items() if key not in ("strategy", "began")}
    ideal = sum(speeds.values())
    title = f"Paceline run: {name}"
    return {"title": title, "note": ESTIMATED, "results": [result], "ideal_samples_per_second": ideal, **told}


def estimated_speeds(events: Iterable[Event]) -> dict[int, float]:
    """Samples a second of each rank that has computed, while it computed.

    >>> estimated_speeds([{"kind": "compute", "rank": 1, "t": 0.0, "end": 0.5, "samples": 30},
    ...                   {"kind": "compute", "rank": 1, "t": 2.0, "end": 2.5, "samples": 20}])
    {1: 50.0}
    """
    samples: dict[int, int] = defaultdict(int)
    busy: dict[int, float] = defaultdict(float)
    for event in events:
        if event["kind"] == "compute":
            samples[event["rank"]] += event["samples"]
            busy[event["rank"]] += event["end"] - event["t"]
    return {rank: samples[rank] / busy[rank] for rank in sorted(busy) if busy[rank] > 0}


def _race(folder: Path) -> Kept:
    try:
        race = json.loads((folder / "race.json").read_text(encoding="utf-8"))
        names = [str(result["strategy"]) for result in race["results"]]
    except (ValueError, KeyError, TypeError) as error:
        raise PacelineError(
            "The result of the race is damaged.", where=str(folder / "race.json"), cause=f"{error}."
        ) from error
    return Kept(race, {name: read_events(folder / strategy_folder(name) / "events") for name in names})


def _run(folder: Path) -> Kept:
    events = read_events(folder / "events")
    settings: dict[str, Any] = {}
    if (folder / "config.toml").is_file():
        try:
            settings = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
        except ValueError as error:
            raise PacelineError(
                "The settings of the run are damaged.", where=str(folder / "config.toml"), cause=f"{error}."
            ) from error
    parts = folder.absolute().parts[-2:]
    race = run_as_race(events, settings, "/".join(parts))
    return Kept(race, {race["results"][0]["strategy"]: events})

"""The live display: what every worker does, how fast it is, and whom it waits for.

It reads nothing but the folder of events. So it shows what really was recorded, costs the workers nothing, and works as
well for a run that somebody else started.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paceline.record import Event, follow
from paceline.report.words import count, number, ranks
from paceline.summary import Standing

REFRESH_SECONDS = 0.25
"""As often as there are new events; see `record.FLUSH_SECONDS`."""
PLAIN_SECONDS = 5.0
"""In a log one line in a while is enough."""
SPEED_SECONDS = 3.0
"""The speed is a mean over so long: a few micro-batches of a slow worker, yet it follows a change at once."""


@dataclass
class WorkerRow:
    """One worker, as far as its events have told."""

    samples: int = 0
    rounds: int = 0
    recent: deque[tuple[float, float, int]] = field(default_factory=deque)
    """Micro-batches of the last seconds: start, end, samples."""
    ended: bool = False

    def computed(self, t: float, end: float, samples: int) -> None:
        self.samples += samples
        self.recent.append((t, end, samples))
        while self.recent[0][1] < end - SPEED_SECONDS:
            self.recent.popleft()

    def speed(self, now: float) -> float:
        """Samples a second of late; zero for a worker that has been silent."""
        late = [(t, samples) for t, end, samples in self.recent if end > now - SPEED_SECONDS]
        seconds = now - min((t for t, _ in late), default=now)
        return sum(samples for _, samples in late) / seconds if seconds > 0 else 0.0


class RunView:
    """What is known of a run after the events so far. Events that lack a field are passed over."""

    def __init__(self) -> None:
        self.workers: dict[int, WorkerRow] = {}
        self.now = 0.0
        self.metric: float | None = None
        self.said: deque[str] = deque(maxlen=3)  # warnings and notes
        self._standing = Standing()

    def see(self, event: Event) -> None:
        try:
            self._see(event)
            self._standing.see(event)
        except (KeyError, TypeError, ValueError):  # an event of another version: a display must not fall over it
            return

    def _see(self, event: Event) -> None:
        worker = self.workers.setdefault(event["rank"], WorkerRow())
        match event["kind"]:
            case "compute":
                worker.computed(event["t"], float(event["end"]), int(event["samples"]))
            case "applied" | "step":
                worker.rounds += bool(event["samples"])
            case "metric":
                self.metric = float(event["metric"])
            case "warning" | "note":
                self.said.append(f"{event['kind']}: {event['text']}")
            case "end":
                worker.ended = True
        self.now = max(self.now, event["end"] if "end" in event else event["t"])

    def doing(self) -> dict[int, str]:
        """What every worker does, in words."""
        waits = self._standing.waiting_for()
        return {rank: self._words(worker, waits.get(rank)) for rank, worker in sorted(self.workers.items())}

    @staticmethod
    def _words(worker: WorkerRow, waits_for: list[int] | None) -> str:
        if worker.ended:
            return "done"
        if waits_for is None:
            return "computing"
        return f"waiting for {ranks(waits_for)}" if waits_for else "waiting for the network"

    def headline(self) -> str:
        samples = sum(worker.samples for worker in self.workers.values())
        rounds = max((worker.rounds for worker in self.workers.values()), default=0)
        speed = sum(worker.speed(self.now) for worker in self.workers.values())
        metric = f", metric {number(self.metric)}" if self.metric is not None else ""
        return f"{self.now:.1f} s, {count(rounds)} rounds, {count(samples)} samples, {speed:,.0f}/s{metric}"


class Progress:
    """Shows a run while it goes on; a context manager with a thread of its own.

    Args:
        folder: where the ranks write their events; it may appear later.
        title: what is running.
        console: where to show it. On a terminal one live row a worker, elsewhere a plain line every few seconds.
    """

    def __init__(self, folder: Path | str, *, title: str = "", console: Console | None = None) -> None:
        self._follower = follow(folder)
        self._title = title
        self._console = console or Console()
        self.view = RunView()
        self._live: Live | None = None
        self._last_line = ""
        self._told: set[str] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep_updating, name="paceline-progress", daemon=True)

    def start(self) -> None:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._thread.start()

    def stop(self) -> None:
        """Show the last state and give the terminal back."""
        self._stopping.set()
        self._thread.join()
        self.update()
        if self._live:
            self._live.stop()

    def __enter__(self) -> Progress:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def update(self) -> None:
        """Read what is new and show it."""
        for event in self._follower.new_events():
            self.view.see(event)
        if self._live:
            self._live.update(self.table(), refresh=True)
        elif self.view.workers and self.line() != self._last_line:
            self._last_line = self.line()
            news = [text for text in self.view.said if text not in self._told]
            self._told.update(self.view.said)
            self._console.file.write("\n".join([*news, self._last_line]) + "\n")
            self._console.file.flush()

    def table(self) -> Table:
        table = Table(box=None, title=Text(f"{self._title}  {self.view.headline()}".strip()), title_justify="left")
        for column in ("worker", "samples", "samples/s"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("doing", min_width=24, no_wrap=True)
        doing = self.view.doing()
        shown = list(doing)[: max(self._console.height - 6, 4)]  # more rows than the screen has would scroll it
        for rank in shown:
            worker = self.view.workers[rank]
            words = Text(doing[rank], style="yellow" if doing[rank].startswith("waiting") else "green")
            table.add_row(str(rank), count(worker.samples), f"{worker.speed(self.view.now):,.0f}", words)
        if len(doing) > len(shown):
            table.add_row("…", "", "", f"and {len(doing) - len(shown)} more")
        for text in self.view.said:
            table.add_row("", "", "", Text(text, style="red" if text.startswith("warning") else ""))
        return table

    def line(self) -> str:
        """The run in one line; workers that compute need no mention."""
        waiting = [f"rank {rank} {words}" for rank, words in self.view.doing().items() if words.startswith("waiting")]
        more = [f"and {len(waiting) - 4} more"] if len(waiting) > 4 else []
        return "; ".join([f"{self._title}: {self.view.headline()}".removeprefix(": "), *waiting[:4], *more])

    def _keep_updating(self) -> None:
        while not self._stopping.wait(REFRESH_SECONDS if self._live else PLAIN_SECONDS):
            self.update()

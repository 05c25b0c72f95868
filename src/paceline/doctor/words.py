"""What a doctor says, on a terminal and in a log."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from paceline.doctor.advice import Advice, Expectation
from paceline.doctor.host import OK, PROBLEM, WARNING, Finding, Host, Peer, Task
from paceline.report.table import as_table, as_text, show
from paceline.report.words import amount, count, milliseconds, percent, size
from paceline.simulator.network import Network

STYLES = {OK: "green", WARNING: "yellow", PROBLEM: "bold red"}
NARROW = 100  # columns of a log, which has no width
LONGEST_NAME = 28


class Speaker:
    """Prints, as wide as the place is.

    Args:
        console: where to; the standard output by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)

    @property
    def _width(self) -> int:
        return self.console.width if self.console.is_terminal else NARROW

    def headline(self, text: str) -> None:
        self._print(Text(f"\n{text}", style="bold"))

    def paragraph(self, text: str, style: str = "") -> None:
        unbroken = text.replace(" %", "\u00a0%")  # a figure and its sign stay on one line
        for line in textwrap.wrap(unbroken, self._width, break_on_hyphens=False):
            self._print(Text(line.replace("\u00a0", " "), style=style))

    def command(self, text: str) -> None:
        """A line to be copied: never broken."""
        self._print(Text(f"  {text}"))

    def _print(self, text: Text) -> None:
        self.console.print(text, soft_wrap=True)

    def findings(self, findings: Iterable[Finding]) -> None:
        """One line each; what is not well also says its probable cause and what to do."""
        for finding in findings:
            start = f"{finding.verdict:8} {finding.name:14} "
            rest = " " * 9
            self._hanging(start, finding.said, rest, STYLES[finding.verdict], len(finding.verdict))
            for more in (finding.cause, finding.remedy):
                if more and finding.verdict != OK:
                    self._hanging(rest, more, rest, "", 0)

    def _hanging(self, start: str, text: str, indent: str, style: str, styled: int) -> None:
        # A command in a remedy may be wider than the terminal; it is copied whole or not at all.
        lines = textwrap.wrap(
            start + text,
            self._width,
            subsequent_indent=indent,
            break_on_hyphens=False,
            break_long_words=False,
        )
        for place, line in enumerate(lines):
            said = Text(line.rstrip())
            if place == 0 and styled:
                said.stylize(style, 0, styled)
            self._print(said)

    def _table(self, header: Sequence[str], rows: Sequence[Sequence[str]], best: Sequence[bool] = ()) -> None:
        show(as_table(header, rows, best), as_text(header, rows), self.console)

    def devices(self, hosts: Sequence[Host], task: Task) -> None:
        parameters = f"{count(task.parameters)} parameters"
        self.headline(f"Speed alone: {task.workload}, {task.model}, {parameters}, micro-batches of {task.micro_batch}")
        header = ["device", "ranks", "samples/s", "micro-batch", "spread", "relative"]
        fastest = min(device.micro_batch_seconds for host in hosts for device in host.devices)
        rows = []
        for host in hosts:
            for device in host.devices:
                name = f"{host.name} {device.device}, {device.name}"
                rows.append(
                    [
                        name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…",
                        str(device.workers),
                        amount(task.micro_batch / device.micro_batch_seconds),
                        _short(device.micro_batch_seconds),
                        percent(device.jitter),
                        f"{fastest / device.micro_batch_seconds:.2f}",
                    ]
                )
        self._table(header, rows)

    def networks(self, own: Host, peers: Sequence[Peer], nbytes: int) -> None:
        self.headline(f"Network, and a gradient of {size(nbytes)} over it")
        header = ["from here to", "latency", "bandwidth", "all-reduce of two"]
        ways = [(f"{own.name} itself", own.network)]
        ways += [(f"{peer.host.name} ({peer.address})", peer.link) for peer in peers if peer.host is not None]
        rows = [[name, *_row(network, nbytes)] for name, network in ways if network is not None]
        self._table(header, rows)

    def expected(self, expected: Sequence[Expectation], advice: Advice, workers: int) -> None:
        ranks = f"{workers} {'worker' if workers == 1 else 'workers'}"
        self.headline(f"What the simulator expects of {ranks} like these: share of ideal, samples")
        header = ["strategy", "of ideal", "samples/s", "a round", "gradients"]  # 80 columns with the longest of each
        rows = [
            [
                each.strategy,
                percent(each.share_of_ideal),
                amount(each.samples_per_second),
                amount(each.samples_per_round),
                each.gradients,
            ]
            for each in expected
        ]
        self._table(header, rows, [each.strategy == advice.strategy for each in expected])
        self.paragraph(
            f"Recommended: {advice.strategy}, {percent(advice.share_of_ideal)} of ideal: {advice.why}.", "bold"
        )
        for note in advice.notes:
            self.paragraph(note)
        self.paragraph("Expected without the strategy's own work and what ranks of one machine take from each other.")


def _row(network: Network, nbytes: int) -> list[str]:
    return [
        _short(network.latency),
        f"{size(round(network.bandwidth))}/s" if network.bandwidth < float("inf") else "too fast to tell",
        _short(network.all_reduce_seconds(2, nbytes)),
    ]


def _short(seconds: float) -> str:
    """
    >>> _short(0.000123), _short(0.0123)
    ('123 µs', '12.3 ms')
    """
    return f"{1e6 * seconds:.0f} µs" if seconds < 1e-3 else milliseconds(seconds)

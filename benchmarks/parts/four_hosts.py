"""Hosts with slow links on this machine, and what every strategy makes of them: measured, and by the simulator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from paceline.backends.learners import TimingLearner
from paceline.launch.local import end_with_parent
from paceline.race.links import MTU, EmulatedHosts, Link
from paceline.race.spec import RaceSpec, with_servers
from paceline.race.timing import BYTES_PER_PARAMETER, time_strategy
from paceline.record import Event, read_events
from paceline.simulator.cluster import Cluster
from paceline.simulator.network import Network, Uplink
from paceline.strategies import create
from paceline.summary import summarise
from parts.hosts_rank import DDP, FLAT, PARAMETERS

# Between two of the first three hosts 10 ms and 1 Gbit/s; to the fourth 50 ms and 100 Mbit/s.
LINKS = (*[Link(1e9, 0.005)] * 3, Link(1e8, 0.045))
RANK = Path(__file__).with_name("hosts_rank.py")
PACELINE = [sys.executable, "-c", "from paceline.cli import main; main()"]
PORT = 29500
MICRO_BATCH = 32
LONGEST_SECONDS = 240  # a guard against a hang
FIRST_WINDOW = 10 * MTU  # of TCP, in Linux
ONE_MACHINE_LATENCY = 0.9e-3  # what gloo needs for a step between processes of this machine, without emulated links


class Ground:
    """The hosts, and what a race on them is.

    Args:
        seconds: that every strategy trains for.
        micro_batch_seconds: of every device.
        nproc: workers on each host.
        flat: sums go through one ring of all workers, whichever hosts they are on.
    """

    def __init__(self, seconds: float, micro_batch_seconds: float, nproc: int = 1, flat: bool = False) -> None:
        self.seconds, self.micro_batch_seconds, self.nproc, self.flat = seconds, micro_batch_seconds, nproc, flat
        self.workers = nproc * len(LINKS)

    def measured(self, strategy: str) -> dict[str, Any]:
        """Share of ideal on real processes; the hosts are made for it, and gone afterwards."""
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            hosts = stack.enter_context(EmulatedHosts(LINKS))
            spec = RaceSpec(
                strategies=("all-reduce" if strategy == DDP else strategy,),
                speeds=(1.0,) * self.workers,
                workload="synthetic",
                seconds=self.seconds,
                micro_batch_seconds=self.micro_batch_seconds,
            )
            (folder / "spec.json").write_text(spec.to_json())
            commands = _ddp(self.nproc, folder) if strategy == DDP else self._paceline(strategy, hosts, folder)
            _run_all([(hosts.command(host, command), more) for host, command, more in commands], stack, folder)
            ideal = self.workers * MICRO_BATCH / self.micro_batch_seconds
            if strategy == DDP:
                found = json.loads((folder / "ddp.json").read_text())
                return {"share": found["samples"] / found["seconds"] / ideal, "metric": None}
            events = read_events(next(folder.glob("host-0/bench/*/events")))
            for host in range(1, len(LINKS)):
                events += read_events(next(folder.glob(f"host-{host}/bench/*/events")))
        summary = summarise(events, speeds=[ideal / self.workers] * self.workers, seconds=self.seconds, target=1.0)
        times = {doing: [getattr(each, doing) for each in summary.workers] for doing in ("computing", "communicating")}
        found = {"share": summary.share_of_ideal, "metric": summary.final_metric, "rounds": summary.rounds}
        return {**found, "noise": _noise(events), **times}

    def _paceline(
        self, strategy: str, hosts: EmulatedHosts, folder: Path
    ) -> list[tuple[int, list[str], dict[str, str]]]:
        servers = create(strategy).servers_for(self.workers)
        commands = []
        for host in range(len(LINKS)):
            options = [
                "--nnodes",
                str(len(LINKS)),
                "--node-rank",
                str(host),
                "--master",
                f"{hosts.addresses[0]}:{PORT}",
            ]
            options += [
                "--nproc",
                str(self.nproc),
                "--servers",
                str(servers // len(LINKS) + (host < servers % len(LINKS))),
            ]
            options += ["--out", str(folder / f"host-{host}"), "--name", "bench", "--heartbeat-timeout", "60"]
            more = {FLAT: "1"} if self.flat else {}
            commands.append((host, [*PACELINE, "run", *options, str(RANK), str(folder / "spec.json"), strategy], more))
        return commands

    def network(self, all_reduce: str = "auto") -> Network:
        uplinks = tuple(Uplink(link.delay, link.rate / 8) for link in LINKS)
        hosts = tuple(rank // self.nproc for rank in range(self.workers))
        joined = {"uplinks": uplinks, "hosts": hosts, "first_window": FIRST_WINDOW}
        return Network(ONE_MACHINE_LATENCY, bandwidth=0.9e9, all_reduce=all_reduce, **joined)

    def predicted(self, strategy: str, noise: Sequence[float] = ()) -> float:
        """Share of ideal in the simulator, from the figures of the links. `noise`: of the gradients, as measured; the
        simulator computes none, and rounds of some strategies go by it."""
        chosen, way = "all-reduce" if strategy == DDP else strategy, "ring" if strategy == DDP or self.flat else "auto"
        alone = Cluster.from_speeds(
            [1.0] * self.workers, micro_batch_seconds=self.micro_batch_seconds, network=self.network(way)
        )
        cluster = with_servers(alone, create(chosen), None)
        learner = TimingLearner(nbytes=PARAMETERS * BYTES_PER_PARAMETER)
        if noise:
            learner.noise.restore([*noise, 1.0])
        outcome = time_strategy(chosen, cluster, learner, seconds=self.seconds, micro_batch=MICRO_BATCH)
        return outcome.share_of_ideal


def _noise(events: Sequence[Event]) -> list[float]:
    """The squared norm of the gradients and their variance, as they were measured last; nothing if never."""
    seen = [(event["squared_norm"], event["variance"]) for event in events if event["kind"] == "noise"]
    return list(seen[-1]) if seen else []


def _ddp(nproc: int, folder: Path) -> list[tuple[int, list[str], dict[str, str]]]:
    world, commands = nproc * len(LINKS), []
    for rank in range(world):
        more = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "10.231.0.1", "MASTER_PORT": str(PORT)}
        more |= {"GLOO_SOCKET_IFNAME": "eth0", "DDP_RESULT": str(folder / "ddp.json")}
        commands.append((rank // nproc, [sys.executable, str(RANK), str(folder / "spec.json"), DDP], more))
    return commands


def _run_all(commands: Sequence[tuple[list[str], dict[str, str]]], stack: ExitStack, folder: Path) -> None:
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("PACELINE_", "GLOO_"))}
    plain |= {"OMP_NUM_THREADS": "1", "PACELINE_SECRET": os.urandom(32).hex()}
    started = []
    for number, (command, more) in enumerate(commands):
        log = stack.enter_context((folder / f"{number}.log").open("w"))
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=plain | more, preexec_fn=end_with_parent
        )
        stack.callback(end, process)
        started.append(process)
    for number, process in enumerate(started):
        if process.wait(LONGEST_SECONDS):
            raise SystemExit(f"{' '.join(commands[number][0])} failed:\n{(folder / f'{number}.log').read_text()}")


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()  # a launcher ends its ranks
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

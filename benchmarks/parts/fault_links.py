"""Faults of the network between two emulated hosts with two workers each: cut for ten seconds, and a bad link."""

from __future__ import annotations

import os
import random
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from paceline.launch.local import end_with_parent
from paceline.race.links import EmulatedHosts, Link
from paceline.record import read_events
from parts.fault_blows import EARLIEST, HEARTBEAT_SECONDS, LATEST, WORKERS
from parts.faults import STRATEGIES, first_after, found_in, is_exact, pause
from parts.four_hosts import PACELINE, PORT, end

PARTED, LOSSY = "the network, cut for 10 s", "a link that loses 5 %, at 100 ms"
LINK_KINDS = (PARTED, LOSSY)
HOSTS, PARTED_SECONDS = 2, 10.0
LINKS = {PARTED: [Link()] * HOSTS, LOSSY: [Link(), Link(1e9, 0.1, 0.05)]}
EPOCHS = {PARTED: 40, LOSSY: 1}
TERMS = {PARTED: ["--heartbeat-timeout", f"{HEARTBEAT_SECONDS:g}", "--replace", str(WORKERS)], LOSSY: []}
RANK = Path(__file__).with_name("fault_rank.py")
LONGEST_SECONDS = 400.0  # a guard against a hang


def one_linked_fault(strategy: str, kind: str, seed: int) -> dict[str, Any]:
    """A run over both hosts. When they are parted the first goes on, with the control plane; the workers of the other
    one come back when it can be reached again. On a bad link all go on."""
    chance, servers, at = random.Random(f"{strategy} {kind} {seed}"), STRATEGIES[strategy], 0.0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = stack.enter_context(EmulatedHosts(LINKS[kind]))
        launchers = launch(hosts, [strategy, str(EPOCHS[kind]), str(seed)], kind, folder, stack)
        if have_begun(folder, launchers, WORKERS + servers) and kind == PARTED:
            time.sleep(chance.uniform(EARLIEST, LATEST))
            at = time.time()
            hosts.cut(1)
            time.sleep(PARTED_SECONDS)
            hosts.cut(1, off=False)
        codes = [code_of(each) for each in launchers]
        events = [event for path in folder.glob("host-*/bench/*/events") for event in read_events(path)]
        told = found_in(folder)
        words = [line for path in folder.glob("*.log") for line in path.read_text().splitlines()[-3:]]
    lost = sorted({event["rank"] for event in events if event["kind"] == "lost"})
    living, struck = [rank for rank in range(WORKERS) if rank not in lost], at - told.get("began", at)
    back_in = first_after(events, "start", lost, struck) if at else None
    went_on = codes == [0] * HOSTS and (back_in is not None if kind == PARTED else not lost)
    return {
        "strategy": strategy,
        "kind": kind,
        "seed": seed,
        "ok": went_on and bool(told["samples"]),
        "hit": kind == LOSSY or bool(at),
        "exact": is_exact(strategy, events, told.get("ledger", {}), told["samples"], living[0]),
        "pause": max(pause(events, rank, struck, bool(servers), HEARTBEAT_SECONDS) for rank in living) if at else None,
        "found_in": first_after(events, "lost", lost, struck) if at else None,
        "back_in": back_in,
        "accuracy": told["accuracy"],
        "lost": lost,
        "words": [] if went_on else words,
        "load": os.getloadavg()[0],
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
    }


def launch(
    hosts: EmulatedHosts, arguments: list[str], kind: str, folder: Path, stack: ExitStack
) -> list[subprocess.Popen[bytes]]:
    """`paceline run` on each host, with its output in a file."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("PACELINE_", "GLOO_"))}
    plain |= {"OMP_NUM_THREADS": "1", "PACELINE_SECRET": os.urandom(32).hex()}
    servers, started = STRATEGIES[arguments[0]], []
    for host in range(HOSTS):
        options = ["--nnodes", str(HOSTS), "--node-rank", str(host), "--master", f"{hosts.addresses[0]}:{PORT}"]
        options += ["--nproc", str(WORKERS // HOSTS), "--servers", str(servers // HOSTS)]
        options += ["--out", str(folder / f"host-{host}"), "--name", "bench", *TERMS[kind]]
        command = [*PACELINE, "run", *options, str(RANK), *arguments, str(folder / "found.json"), "no"]
        log = stack.enter_context((folder / f"{host}.log").open("w"))
        process = subprocess.Popen(
            hosts.command(host, command), stdout=log, stderr=subprocess.STDOUT, env=plain, preexec_fn=end_with_parent
        )
        stack.callback(end, process)
        started.append(process)
    return started


def have_begun(folder: Path, launchers: list[subprocess.Popen[bytes]], ranks: int) -> bool:
    """Wait until all ranks train; whether they do."""
    deadline = time.monotonic() + LONGEST_SECONDS
    while time.monotonic() < deadline and all(each.poll() is None for each in launchers):
        records = list(folder.glob("host-*/bench/*/events/rank-*.jsonl"))
        if len(records) == ranks and all('"start"' in record.read_text() for record in records):
            return True
        time.sleep(0.05)
    return False


def code_of(launcher: subprocess.Popen[bytes]) -> int | None:
    """None for one that hangs."""
    try:
        return launcher.wait(LONGEST_SECONDS)
    except subprocess.TimeoutExpired:
        return None

"""The same SIGKILL for other libraries: torchrun with DDP (which starts all ranks again), torchft and hivemind."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from paceline.launch.local import end_with_parent
from parts.fault_blows import EARLIEST, LATEST, WORKERS
from parts.peers.sessions import NotInstalledError, environment

RANK = Path(__file__).with_name("fault_peer_rank.py")
OUTCOMES = Path(__file__).parents[1] / "results" / "faults" / "peers.jsonl"
PEERS = {"ddp": "", "torchft": "torchft", "torchft-by-hand": "torchft", "hivemind": "hivemind"}
START_SECONDS, RUN_SECONDS = 120.0, 120.0
LIGHTHOUSE = (
    "import sys, time; from torchft.coordination import LighthouseServer as L; "
    "l = L(bind='127.0.0.1:0', min_replicas=1, join_timeout_ms=1000, quorum_tick_ms=100, heartbeat_timeout_ms=1000); "
    "open(sys.argv[1], 'w').write(l.address().rpartition(':')[2] + '\\n'); time.sleep(3600)"
)
"""It logs ten times a second, so that a pipe which nobody reads would stop it."""


def measure_peers(kills: int) -> None:
    OUTCOMES.parent.mkdir(parents=True, exist_ok=True)
    for method, package in PEERS.items():
        try:
            python = environment(package)
        except NotInstalledError as error:
            print(f"Not with {method}: {error}")
            continue
        for seed in range(kills):
            outcome = one_kill(method, python, seed)
            with OUTCOMES.open("a") as file:
                file.write(json.dumps(outcome) + "\n")
            print(outcome, flush=True)


def one_kill(method: str, python: Path, seed: int) -> dict[str, Any]:
    """A rank other than the first: hivemind's first peer is where the others find each other."""
    chance, struck = random.Random(f"{method} {seed}"), 0.0
    victim = chance.randrange(1, WORKERS)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes = start(method, python, folder, stack)
        if wait_until(lambda: len(steps_in(folder, 0)) >= 3, START_SECONDS):
            time.sleep(chance.uniform(EARLIEST, LATEST))
            struck = time.time()
            os.kill(int((folder / f"pid-{victim}").read_text()), signal.SIGKILL)
        expected = [rank for rank in range(WORKERS) if method == "ddp" or rank != victim]
        went_on = wait_until(
            lambda: (
                all((folder / f"over-{rank}").exists() for rank in expected)
                or all(each.poll() is not None for each in processes)
            ),
            RUN_SECONDS,
        )
        ok = went_on and all((folder / f"over-{rank}").exists() for rank in expected)
        pauses = [pause(steps_in(folder, rank), struck) for rank in range(WORKERS) if rank != victim]
        words = (folder / "log").read_text(errors="replace").splitlines()[-3:]
    told = {"pause": max(pauses), "words": [] if ok else words, "load": os.getloadavg()[0]}
    return {"method": method, "seed": seed, "ok": bool(ok and struck), **told}


def start(method: str, python: Path, folder: Path, stack: ExitStack) -> list[subprocess.Popen[bytes]]:
    """All ranks; under torchrun they are its children."""
    plain = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(folder)}
    log = stack.enter_context((folder / "log").open("w"))

    def run(command: list[str], **more: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command, env=plain | more, stdout=log, stderr=log, start_new_session=True, preexec_fn=end_with_parent
        )
        stack.callback(end, process)
        return process

    program = [str(RANK), method, str(folder)]
    if method == "ddp":  # without the variable, or on a given port, its restart meets the dead attempt's addresses
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORKERS)]
        command += ["--standalone", "--max-restarts", "3", *program]
        return [run(command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stack.callback(lambda: store)  # it lives as long as the ranks
    more = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    if PEERS[method] == "torchft":
        door = folder / "lighthouse"
        run([str(python), "-c", LIGHTHOUSE, str(door)])
        if not wait_until(lambda: door.exists() and door.read_text().endswith("\n"), START_SECONDS):
            raise SystemExit("torchft's lighthouse does not start.")
        more["LIGHTHOUSE"] = f"http://127.0.0.1:{door.read_text().strip()}"
    return [run([str(python), *program], RANK=str(rank), **more) for rank in range(WORKERS)]


def end(process: subprocess.Popen[bytes]) -> None:
    """With all that it has started: it leads a session of its own, which may outlive it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_until(condition: Any, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def steps_in(folder: Path, rank: int) -> list[float]:
    path = folder / f"steps-{rank}"
    return [float(line) for line in path.read_text().splitlines()] if path.exists() else []


def pause(times: list[float], struck: float) -> float:
    """How much longer than usual a rank waited for its next step after the blow; for ever if none came."""
    gaps = list(pairwise(times))
    before = [b - a for a, b in gaps if b < struck]
    after = [b - a for a, b in gaps if b >= struck]
    return (max(after) if after else float("inf")) - (statistics.median(before) if before else 0.0)

"""One rank of a session: races of one method, one after the other in the same process.

The environment is as torchrun sets it: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. The session's folder holds
`races.json`; the outcome of the n-th race goes to the subfolder n, where each rank leaves a file when it is over.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.race.worker import heedful_sleep, train
from paceline.run.run import Run
from paceline.workloads.workload import Workload
from parts.peers.course import PacedDevice, Race, cluster_of, load_workload, paces
from parts.peers.lane import LAUNCHED, TRACES, Lane, bytes_on_loopback, race_on, say_over
from parts.ranks import own_control_plane

LOOPS = {
    "ddp": "torch_loops:ddp",
    "ddp-balanced": "torch_loops:ddp_balanced",
    "post-local-sgd": "torch_loops:post_local_sgd",
    "accelerate-local-sgd": "torch_loops:accelerate_local_sgd",
    "torchft-local-sgd": "torchft_loops:local_sgd",
    "torchft-diloco": "torchft_loops:diloco",
    "hivemind": "hivemind_loops:synchronous",
    "hivemind-delayed": "hivemind_loops:delayed",
    "hivemind-local": "hivemind_loops:local_updates",
}
NO_PROCESS_GROUP = ("torchft", "hivemind")
TIMEOUT = timedelta(seconds=60)


def loop_of(method: str) -> Callable[[Lane], None]:
    module, _, name = LOOPS[method].partition(":")
    loop: Callable[[Lane], None] = getattr(import_module(f"parts.peers.{module}"), name)
    return loop


def peer(races: list[Race], workload: Workload, folder: Path) -> None:
    loop, rank = loop_of(races[0].method), int(os.environ["RANK"])
    grouped = not races[0].method.startswith(NO_PROCESS_GROUP)
    if grouped:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    for number, race in enumerate(races):
        lane = Lane(race, rank, workload, folder / str(number))
        loop(lane)
        lane.say_over()
    if grouped:
        dist.destroy_process_group()


def paceline(races: list[Race], workload: Workload, folder: Path) -> None:
    for number, race in enumerate(races):
        os.chdir(folder / str(number))
        own_control_plane(str(number))
        first: dict[str, float] = {}
        made: list[PacedDevice] = []

        def note(first: dict[str, float] = first) -> None:
            race_on()
            first.update(bytes=bytes_on_loopback(), start_up=time.time() - float(os.environ[LAUNCHED]))

        def device(
            run: Run, race: Race = race, note: Callable[[], None] = note, made: list[PacedDevice] = made
        ) -> PacedDevice:
            traces = Path(os.environ[TRACES])
            pace = paces(race.cluster, race.seed, race.seconds, traces)[run.rank]
            mean = cluster_of(race.cluster, race.seed, traces).mean_seconds(run.rank)
            made.append(PacedDevice(pace, mean, note, sleep=lambda rest: heedful_sleep(run, rest)))
            return made[-1]

        train(race.spec(), replace(workload, micro_batch=race.micro_batch), race.method, device)
        torch.set_num_threads(1)
        if os.environ["RANK"] == "0":
            traffic = {"bytes": bytes_on_loopback() - first["bytes"], "start_up": first["start_up"]}
            Path("traffic.json").write_text(json.dumps(traffic))
        for each in made:
            say_over(Path(), int(os.environ["RANK"]), each)


def prepare(folder: Path) -> tuple[list[Race], Workload]:
    """What all ranks of a session need, before they are there."""
    torch.set_num_threads(1)
    races = [Race(**each) for each in json.loads((folder / "races.json").read_text())]
    if races[0].method in LOOPS:
        loop_of(races[0].method)  # imports the peer's package
    return races, load_workload()


def run(races: list[Race], workload: Workload, folder: Path) -> None:
    """All races of a session, as the rank that the environment says."""
    (peer if races[0].method in LOOPS else paceline)(races, workload, folder)

"""One rank of another library, to be killed: fault_peer_rank.py METHOD FOLDER

As the libraries' own documentation has it, on the model and the emulated devices of `fault_rank`. Each step of a rank
leaves a line with its time in the folder; who comes to the last one says so. RANK, MASTER_ADDR and MASTER_PORT are as
torchrun sets them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.launch.local import end_with_parent

STEPS, SAVE_EVERY = 300, 20
MICRO_BATCH, SECONDS = 16, (0.02, 0.02, 0.04, 0.04)
TIMEOUT = timedelta(seconds=60)


class Course:
    """What every rank does, whatever the library.

    Args:
        folder: for what it leaves behind.
    """

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.rank, self.folder = int(os.environ["RANK"]), folder
        self.model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self._file = (folder / f"steps-{self.rank}").open("a")
        (folder / f"pid-{self.rank}").write_text(str(os.getpid()))

    def compute(self, model: nn.Module) -> None:
        """A micro-batch, as long as the device would take."""
        until = time.perf_counter() + SECONDS[self.rank % len(SECONDS)]
        x = torch.randn(MICRO_BATCH, 20)
        F.cross_entropy(model(x), x[:, :5].argmax(1)).backward()
        time.sleep(max(0.0, until - time.perf_counter()))

    def stepped(self) -> None:
        self._file.write(f"{time.time()}\n")
        self._file.flush()

    def over(self) -> None:
        (self.folder / f"over-{self.rank}").touch()


def ddp(course: Course) -> None:
    """torchrun starts all again when one has died; they go on from the last checkpoint."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    saved, first = course.folder / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        course.model.load_state_dict(state["model"])
        course.optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    model = DistributedDataParallel(course.model)
    for step in range(first, STEPS):
        course.optimizer.zero_grad()
        course.compute(model)
        course.optimizer.step()
        course.stepped()
        if course.rank == 0 and step % SAVE_EVERY == SAVE_EVERY - 1:
            parts = {"model": course.model.state_dict(), "optimizer": course.optimizer.state_dict(), "step": step + 1}
            torch.save(parts, saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)
    course.over()


def torchft(course: Course, by_hand: bool = False) -> None:
    """Every rank is a replica group of its own; the lighthouse is a process beside them. `by_hand`: without its DDP,
    which ends all survivors with an assertion in its hook (torchft 0.2.0; its pull request 294 is open)."""
    from torchft import Manager, Optimizer, ProcessGroupGloo
    from torchft.ddp import DistributedDataParallel as FaultTolerantDDP

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    parts = {"model": course.model, "optimizer": course.optimizer}
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=lambda values: [part.load_state_dict(values[name]) for name, part in parts.items()],
        state_dict=lambda: {name: part.state_dict() for name, part in parts.items()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=os.environ["LIGHTHOUSE"],
        replica_id=f"worker-{course.rank}-",
        hostname="127.0.0.1",
    )
    model = course.model if by_hand else FaultTolerantDDP(manager, course.model)
    optimizer = Optimizer(manager, course.optimizer)
    while manager.current_step() < STEPS:
        optimizer.zero_grad()
        course.compute(model)
        for parameter in course.model.parameters() if by_hand else ():
            manager.allreduce(parameter.grad).wait()
        optimizer.step()
        course.stepped()
    course.over()
    manager.shutdown(wait=False)


def hivemind(course: Course) -> None:
    """A step of all peers together is an epoch of hivemind's: those are written down."""
    import hivemind as library

    told = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    first = [] if course.rank == 0 else told.get("peers").decode().split()
    dht = library.DHT(initial_peers=first, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True, startup_timeout=120.0)
    if course.rank == 0:
        told.set("peers", " ".join(map(str, dht.get_visible_maddrs())))
    optimizer = library.Optimizer(
        dht=dht,
        run_id="faults",
        batch_size_per_step=MICRO_BATCH,
        target_batch_size=64 * MICRO_BATCH,
        params=course.model.parameters(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        matchmaking_time=1.0,
        averaging_timeout=10.0,
    )
    epoch = 0
    while epoch < STEPS // 20:
        optimizer.zero_grad()
        course.compute(course.model)
        optimizer.step()
        if optimizer.local_epoch > epoch:
            epoch = optimizer.local_epoch
            course.stepped()
    course.over()


METHODS: dict[str, Callable[[Course], None]] = {
    "ddp": ddp,
    "torchft": torchft,
    "torchft-by-hand": partial(torchft, by_hand=True),
    "hivemind": hivemind,
}


if __name__ == "__main__":
    end_with_parent()  # torchrun gives each rank a session of its own
    METHODS[sys.argv[1]](Course(Path(sys.argv[2])))
    os._exit(0)  # threads and helpers of the libraries would keep it

"""torchft: every rank is a replica group of its own; LocalSGD and DiLoCo."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo, LocalSGD

from parts.peers.course import WORKERS
from parts.peers.lane import Lane, meet

SYNC_EVERY = 8  # steps; the races have some hundreds
TIMEOUT = timedelta(seconds=60)


@contextmanager
def manager_of(lane: Lane, optimizer: torch.optim.Optimizer) -> Iterator[Manager]:
    """A manager as the documentation makes it; rank 0 hosts the lighthouse, with the README's settings."""
    told = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    key, lighthouse = f"lighthouse-{lane.folder.name}", None
    if lane.rank == 0:
        lighthouse = LighthouseServer(
            bind="127.0.0.1:0", min_replicas=WORKERS, join_timeout_ms=10000, quorum_tick_ms=100
        )
        told.set(key, f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    state = {"model": lane.model, "optimizer": optimizer}
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=lambda values: [part.load_state_dict(values[name]) for name, part in state.items()],
        state_dict=lambda: {name: part.state_dict() for name, part in state.items()},
        min_replica_size=WORKERS,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=told.get(key).decode(),
        replica_id=f"worker-{lane.rank}-",
        hostname="127.0.0.1",
        init_sync=False,  # all begin with the same seed
    )
    try:
        yield manager
    finally:
        meet(told, f"over-{lane.folder.name}")
        manager.shutdown(wait=False)
        if lighthouse is not None:
            lighthouse.shutdown()


def train(lane: Lane, optimizer: torch.optim.Optimizer, synchronised: AbstractContextManager[object]) -> None:
    with synchronised:
        for batch in lane.batches():
            lane.begin(len(batch[1]))
            optimizer.zero_grad()
            lane.loss(lane.model, batch).backward()
            lane.rest()
            optimizer.step()
            same = (lane.steps + 1) % SYNC_EVERY == 0
            lane.stepped(lane.batch * (lane.steps + 1), lane.model if same else None)
            if lane.over(SYNC_EVERY):
                break
    lane.finish(lane.batch * lane.steps, lane.model)


def local_sgd(lane: Lane) -> None:
    optimizer = lane.optimizer()
    with manager_of(lane, optimizer) as manager:
        train(lane, optimizer, LocalSGD(manager, lane.model, optimizer, sync_every=SYNC_EVERY))


def diloco(lane: Lane) -> None:
    """The paper's outer optimizer, as in the documentation."""
    inner = lane.optimizer()
    outer = torch.optim.SGD(lane.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    with manager_of(lane, inner) as manager:
        train(lane, inner, DiLoCo(manager, [lane.model], inner, outer, sync_every=SYNC_EVERY))

"""hivemind's Optimizer: synchronous, with delayed updates, and with local updates.

Everything that a peer computes is counted as used. hivemind drops a little of it, when a peer is late for a step, and
does not say how much. While a race runs, rank 0 knows only its own samples: those of all follow from the mean speeds.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from functools import partial
from typing import Any

import hivemind
import torch
import torch.distributed as dist
from hivemind.optim.grad_averager import GradientAverager
from hivemind.p2p import P2P

from parts.peers.course import WORKERS
from parts.peers.lane import Lane, meet

TARGET_BATCHES = 16  # micro-batches of an epoch, in hivemind's sense: a step over all peers
MATCHMAKING = 1.0  # seconds; "3-5s for small local runs", and less "allows training with smaller batch sizes"
REQUEST = 0.5  # seconds; the documentation wants it to be shorter than the matchmaking
TIMEOUT = 10.0
START_UP = 120.0  # seconds for its daemon; 15 by default, in which it does not come up on a loaded machine
ATTEMPTS = 20


def synchronous(lane: Lane) -> None:
    train(lane)


def delayed(lane: Lane) -> None:
    """Both delays: the documentation's "train faster, but with 1 round of staleness"."""
    train(lane, delay_grad_averaging=True, delay_optimizer_step=True)


def local_updates(lane: Lane) -> None:
    """Everybody steps by itself; parameters are averaged in the background."""
    train(lane, use_local_updates=True, offload_optimizer=False)


def begin_sharing() -> None:
    """torch starts a helper for shared memory, and gives it one second to come up; a loaded machine needs longer."""
    for _ in range(ATTEMPTS):
        with contextlib.suppress(RuntimeError):
            torch.zeros(1).share_memory_()
            return


def leave_nothing_behind() -> None:
    """hivemind puts its sockets into /tmp, whatever TMPDIR says, and leaves them there when it is ended."""
    P2P._UNIX_SOCKET_PREFIX = f"/unix{tempfile.gettempdir()}/"


def train(lane: Lane, **options: Any) -> None:
    leave_nothing_behind()
    begin_sharing()
    told = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    key = f"peers-{lane.folder.name}"
    first = [] if lane.rank == 0 else told.get(key).decode().split()
    dht = hivemind.DHT(initial_peers=first, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True, startup_timeout=START_UP)
    if lane.rank == 0:
        told.set(key, " ".join(map(str, dht.get_visible_maddrs())))
    groups = {"target_group_size": WORKERS, "request_timeout": REQUEST}
    if not options.get("use_local_updates"):
        options |= {"grad_averager_factory": partial(GradientAverager, **groups)}  # `averager_opts` does not reach it
    target = TARGET_BATCHES * lane.race.micro_batch
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id=f"race-{lane.folder.name}",
        batch_size_per_step=lane.race.micro_batch,
        target_batch_size=target,
        params=lane.model.parameters(),
        optimizer=lane.optimizer,
        matchmaking_time=MATCHMAKING,
        averaging_timeout=TIMEOUT,
        load_state_timeout=TIMEOUT,
        averager_opts=groups,
        **options,
    )
    meet(told, f"ready-{lane.folder.name}")
    for batch in lane.batches():
        lane.begin(len(batch[1]))
        optimizer.zero_grad()
        lane.loss(lane.model, batch).backward()
        lane.rest()
        optimizer.step()
        lane.stepped(lane.computed_by_all, lane.model)
        if lane.time_is_up:
            break
    lane.finish(None, lane.model)
    meet(told, f"over-{lane.folder.name}")
    optimizer.shutdown()
    dht.shutdown()

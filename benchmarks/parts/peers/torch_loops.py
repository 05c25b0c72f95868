"""PyTorch's own: DDP, DDP balanced by hand, DDP with PostLocalSGD; and Accelerate's LocalSGD."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from parts.peers.course import WORKERS, shares_of
from parts.peers.lane import Lane

LOCAL_STEPS = 4  # the documentation's period
POST_LOCAL_WARM_UP = 8  # the documentation's example has 100, which is as long as these races
ACCELERATE_STEPS = 8  # the documentation's example


def ddp(lane: Lane, model: nn.Module | None = None) -> None:
    """As its tutorial: everybody the same batch."""
    model = wrapped(lane) if model is None else model
    optimizer = lane.optimizer()
    dist.barrier()
    for batch in lane.batches():
        lane.begin(len(batch[1]))
        optimizer.zero_grad()
        lane.loss(model, batch).backward()
        optimizer.step()
        lane.stepped(lane.batch * (lane.steps + 1), lane.model)
        if lane.over():
            break
    lane.finish(lane.batch * lane.steps, lane.model)


def wrapped(lane: Lane) -> DistributedDataParallel:
    lane.rest_before_sending()
    return DistributedDataParallel(lane.model, gradient_as_bucket_view=True)


def ddp_balanced(lane: Lane) -> None:
    """Batches in proportion to the workers' true mean speeds, which nobody had to measure; losses weighted, because DDP
    takes the mean over ranks; Join, as its documentation advises for unequal inputs."""
    model = wrapped(lane)
    optimizer = lane.optimizer()
    shares = shares_of(lane.speeds, lane.batch)
    weight = shares[lane.rank] * WORKERS / lane.batch
    dist.barrier()
    with Join([model]):
        for batch in lane.batches(shares):
            lane.begin(len(batch[1]))
            optimizer.zero_grad()
            (weight * lane.loss(model, batch)).backward()
            optimizer.step()
            lane.stepped(lane.batch * (lane.steps + 1), lane.model)
            if lane.time_is_up:
                break
    lane.finish(lane.batch * lane.steps, lane.model)


def post_local_sgd(lane: Lane) -> None:
    """As its documentation: gradients are averaged at first, models from then on. Every process stands for a machine of
    its own, so nothing is averaged within machines."""
    model = wrapped(lane)
    state = PostLocalSGDState(None, None, POST_LOCAL_WARM_UP, post_local_gradient_allreduce=False)
    model.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=LOCAL_STEPS, warmup_steps=POST_LOCAL_WARM_UP)
    optimizer = PostLocalSGDOptimizer(lane.optimizer(), averager)
    dist.barrier()
    for batch in lane.batches():
        lane.begin(len(batch[1]))
        optimizer.zero_grad()
        lane.loss(model, batch).backward()
        optimizer.step()
        same = lane.steps < POST_LOCAL_WARM_UP or (lane.steps - POST_LOCAL_WARM_UP) % LOCAL_STEPS == 0
        lane.stepped(lane.batch * (lane.steps + 1), lane.model if same else None)
        if lane.over(LOCAL_STEPS):
            break
    lane.finish(lane.batch * lane.steps, lane.model)


def accelerate_local_sgd(lane: Lane) -> None:
    """As its guide: `prepare`, and `local_sgd.step()` after every step."""
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(lane.model, lane.optimizer())
    dist.barrier()
    with LocalSGD(accelerator, model, local_sgd_steps=ACCELERATE_STEPS, enabled=True) as local_sgd:
        for batch in lane.batches():
            lane.begin(len(batch[1]))
            optimizer.zero_grad()
            accelerator.backward(lane.loss(model, batch))
            lane.rest()
            optimizer.step()
            local_sgd.step()
            same = (lane.steps + 1) % ACCELERATE_STEPS == 0
            lane.stepped(lane.batch * (lane.steps + 1), lane.model if same else None)
            if lane.over(ACCELERATE_STEPS):
                break
    lane.finish(lane.batch * lane.steps, lane.model)

"""What a strategy keeps when ranks crash, as functions: beside `paceline.testing`, for strategies that survive.

    check_losses(create("abs-sgd"), Losses(speeds=(1.0, 0.5, 0.25), crashes=(Crash(at=0.4, rank=1),)))

Everything is in virtual time and follows from a seed: whatever fails can be played again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from paceline.backends.simulated import simulate
from paceline.backends.sources import Data
from paceline.control.membership import ON_NOTICE
from paceline.node import GIVEN_UP
from paceline.record import Event, MemoryRecorder
from paceline.simulator.cluster import Cluster
from paceline.simulator.faults import Crash, Join, Leave
from paceline.simulator.jitter import LogNormal
from paceline.simulator.network import Network
from paceline.strategies import create
from paceline.strategies.strategy import Strategy
from paceline.summary import account
from paceline.testing import MICRO_BATCH, SAMPLES, Trial

SURVIVORS = (
    "all-reduce",
    "all-reduce:micro_batches=2",
    "all-reduce:compress=int8",
    "balanced",
    "abs-sgd",
    "abs-sgd:paper",
    "abs-sgd:delay_cure=acco",
    "abs-sgd:trigger=target:target=32",
    "abs-sgd:trigger=fastest",
    "abs-sgd:compress=int8",
    "abs-sgd:delay_cure=acco:compress=fp16",
    "rennala",
    "rennala:unfinished=discard",
    "rennala:compress=bf16",
    "non-blocking:mini_batches=2",
    "non-blocking:mini_batches=2:unfinished=finish:carry",
    "local-sgd:steps=3",
    "local-sgd:by_speed",
    "adaptive-sgd:mega_batch=48",
    "adaptive-sgd:mega_batch=48:overlap",
    "adaptive-sgd:mega_batch=48:paper",
    "elastic-averaging:steps=3",
    "crossbow",
    "d-psgd",
    "d-psgd:graph=star:momentum=acid:micro_batches=2",
    "matcha",
    "matcha:graph=exponential:budget=1.0",
    "ad-psgd",
    "ad-psgd:graph=ring:momentum=acid",
    "non-blocking:topology=d-psgd:mini_batches=2",
    "non-blocking:topology=matcha:mini_batches=2:unfinished=finish:carry",
)
"""Strategies without servers that go on when ranks are lost, with options that change what is in flight."""
CRASH = "crash"  # why the simulator drops what a rank has computed and not brought to a round
SECONDS = 1.5  # about as long as a run of one epoch lasts


@dataclass(frozen=True)
class Losses:
    """A cluster and who crashes in it.

    Args:
        speeds: of the workers.
        crashes: at most all but one of them.
        leaves: who is told to leave, and when.
        joins: newcomers for the places of those who are gone, and further ones.
        seed: of everything that is left to chance.
        epochs: over the samples of a `Trial`.
        latency: of the network, seconds.
    """

    speeds: tuple[float, ...] = (1.0, 0.7, 0.25)
    crashes: tuple[Crash, ...] = ()
    leaves: tuple[Leave, ...] = ()
    seed: int = 0
    epochs: int = 1
    latency: float = 0.002
    joins: tuple[Join, ...] = ()

    @property
    def living(self) -> list[int]:
        gone = {fault.rank for fault in (*self.crashes, *self.leaves)}
        return [rank for rank in range(len(self.speeds)) if rank not in gone]


def play(strategy: Strategy, losses: Losses) -> tuple[Trial, list[Event], list[torch.Tensor]]:
    """The training, its record, and every rank's parameters in the end."""
    network = Network(latency=losses.latency, bandwidth=1e9)
    alone = Cluster.from_speeds(losses.speeds, jitter=LogNormal(sigma=0.2), network=network, seed=losses.seed)
    trial = Trial(strategy, speeds=losses.speeds, seed=losses.seed)
    learners = [trial.learner(rank) for rank in range(len(losses.speeds))]
    recorder = MemoryRecorder()
    simulate(
        strategy,
        replace(alone, faults=(*losses.crashes, *losses.leaves, *losses.joins)),
        micro_batch=MICRO_BATCH,
        data=Data(SAMPLES, losses.epochs),
        learners=learners,
        recorder=recorder,
    )
    return trial, recorder.events, [learner.parameters for learner in learners]


def check_losses(strategy: Strategy, losses: Losses) -> None:
    """Raise unless the run goes on without those who crash: whoever is left ends with the same bits, and every sample
    is used once in an epoch or said to be discarded."""
    trial, events, parameters = play(strategy, losses)
    books = account(events)
    assert not books.errors, books.errors
    first = parameters[losses.living[0]]
    came_back = [rank for rank in range(len(parameters)) if starts(events, rank) > 1 and not gone_again(events, rank)]
    came = [rank for rank in losses.living if starts(events, rank)]  # a further one may come too late
    for rank in [*came, *came_back]:
        assert torch.equal(parameters[rank], first), f"rank {rank} ends with other bits than rank {losses.living[0]}"
    assert bool(first.isfinite().all())
    assert all(trial.used[index] >= losses.epochs for index in range(SAMPLES)), "some samples were never computed"
    used = _used(strategy, events, losses.living[0])
    discards = [event for event in events if event["kind"] == "discard" and event["reason"] not in (CRASH, GIVEN_UP)]
    crashed = {crash.rank for crash in losses.crashes}
    dropped = sum(event["samples"] for event in discards if event["rank"] not in crashed)
    perhaps = sum(event["samples"] for event in discards) - dropped  # what a lost rank has dropped may go out again
    whole = losses.epochs * SAMPLES
    assert not any(event["reason"] == ON_NOTICE for event in discards), "who leaves on notice drops nothing for that"
    assert whole - perhaps <= used + dropped <= whole, f"{used} samples were applied and {dropped} dropped, of {whole}"


def _used(strategy: Strategy, events: list[Event], rank: int) -> int:
    """Samples of the rounds that a rank has applied; where ranks step alone, of the steps of all, the lost ones too."""
    if strategy.steps_alone:
        return sum(event["samples"] for event in events if event["kind"] == "step")
    return sum(event["samples"] for event in events if event["kind"] == "applied" and event["rank"] == rank)


def starts(events: Sequence[Event], rank: int) -> int:
    """How often somebody has begun in this place."""
    return len([event for event in events if event["kind"] == "start" and event["rank"] == rank])


def gone_again(events: Sequence[Event], rank: int) -> bool:
    """Whether all that have begun in this place were lost."""
    losses = [event for event in events if event["kind"] == "lost" and event["rank"] == rank]
    return len(losses) == starts(events, rank)


def moments(strategy: Strategy, losses: Losses) -> list[float]:
    """When something happens in the run if nobody goes: a rank is suspended or woken, joins or applies a round."""
    _, events, _ = play(strategy, replace(losses, crashes=(), leaves=(), joins=()))
    times = {event[field] for event in events for field in ("t", "end") if isinstance(event.get(field), float)}
    return sorted(times)


def drawn(seed: int) -> tuple[str, Losses]:
    """A strategy, a cluster, who crashes, who is told to leave and who joins, by chance."""
    draw = random.Random(f"losses {seed}")
    workers = draw.randint(2, 6)
    dead = draw.sample(range(workers), draw.randint(1, workers - 1))
    speeds = tuple(draw.choice([1.0, 1.0, 0.5, 0.25]) for _ in range(workers))
    at_once = draw.random() < 0.2
    together = draw.uniform(0, SECONDS)
    times = {rank: together if at_once else draw.uniform(0, SECONDS) for rank in dead}
    told = {rank for rank in dead if draw.random() < 0.3}
    crashes = tuple(Crash(at=at, rank=rank) for rank, at in times.items() if rank not in told)
    leaves = tuple(Leave(at=at, rank=rank) for rank, at in times.items() if rank in told)
    text, epochs, latency = draw.choice(SURVIVORS), draw.randint(1, 2), draw.choice([0.0, 0.002, 0.03])
    joins: tuple[Join, ...] = ()
    if create(text).admits:
        back = [rank for rank in times if draw.random() < 0.4]
        joins = tuple(Join(at=times[rank] + draw.uniform(0, SECONDS / 3), rank=rank) for rank in back)
        if draw.random() < 0.3:
            speeds, joins = (*speeds, 0.5), (*joins, Join(at=draw.uniform(0, SECONDS), rank=workers))
    return text, Losses(speeds, crashes, leaves, seed, epochs, latency, joins)


def check_seed(seed: int) -> None:
    """Play what a seed has drawn; if it fails, say how to play it again."""
    text, losses = drawn(seed)
    try:
        check_losses(create(text), losses)
    except Exception as error:
        replay = f"Replay it: scripts/bench faults --seed {seed}"
        raise AssertionError(f"Seed {seed}: {text}, {losses}: {error}\n{replay}") from error


def check_seeds(seeds: Sequence[int]) -> None:
    for seed in seeds:
        check_seed(seed)

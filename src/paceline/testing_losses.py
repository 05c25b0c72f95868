"""What a strategy keeps when ranks crash, as functions: beside `paceline.testing`, for strategies that survive.

    check_losses(create("abs-sgd"), Losses(speeds=(1.0, 0.5, 0.25), crashes=(Crash(at=0.4, rank=1),)))

Everything is in virtual time and follows from a seed: whatever fails can be played again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from paceline.backends.learners import Data
from paceline.backends.simulated import simulate
from paceline.node import GIVEN_UP
from paceline.record import Event, MemoryRecorder
from paceline.simulator.cluster import Cluster
from paceline.simulator.faults import Crash
from paceline.simulator.jitter import LogNormal
from paceline.simulator.network import Network
from paceline.strategies import create
from paceline.strategies.strategy import Strategy
from paceline.summary import account
from paceline.testing import MICRO_BATCH, SAMPLES, Trial

SURVIVORS = (
    "all-reduce",
    "all-reduce:micro_batches=2",
    "balanced",
    "abs-sgd",
    "abs-sgd:paper",
    "abs-sgd:delay_cure=acco",
    "abs-sgd:trigger=target:target=32",
    "abs-sgd:trigger=fastest",
    "rennala",
    "rennala:unfinished=discard",
    "non-blocking:mini_batches=2",
    "non-blocking:mini_batches=2:unfinished=finish:carry",
    "local-sgd:steps=3",
    "local-sgd:by_speed",
    "adaptive-sgd:mega_batch=48",
    "adaptive-sgd:mega_batch=48:overlap",
    "adaptive-sgd:mega_batch=48:paper",
    "elastic-averaging:steps=3",
    "crossbow",
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
        seed: of everything that is left to chance.
        epochs: over the samples of a `Trial`.
        latency: of the network, seconds.
    """

    speeds: tuple[float, ...] = (1.0, 0.7, 0.25)
    crashes: tuple[Crash, ...] = ()
    seed: int = 0
    epochs: int = 1
    latency: float = 0.002

    @property
    def living(self) -> list[int]:
        dead = {crash.rank for crash in self.crashes}
        return [rank for rank in range(len(self.speeds)) if rank not in dead]


def play(strategy: Strategy, losses: Losses) -> tuple[Trial, list[Event], list[torch.Tensor]]:
    """The training, its record, and every rank's parameters in the end."""
    network = Network(latency=losses.latency, bandwidth=1e9)
    alone = Cluster.from_speeds(losses.speeds, jitter=LogNormal(sigma=0.2), network=network, seed=losses.seed)
    trial = Trial(strategy, speeds=losses.speeds, seed=losses.seed)
    learners = [trial.learner(rank) for rank in range(len(losses.speeds))]
    recorder = MemoryRecorder()
    simulate(
        strategy,
        replace(alone, faults=losses.crashes),
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
    for rank in losses.living:
        assert torch.equal(parameters[rank], first), f"rank {rank} ends with other bits than rank {losses.living[0]}"
    assert bool(first.isfinite().all())
    assert all(trial.used[index] >= losses.epochs for index in range(SAMPLES)), "some samples were never computed"
    used = sum(event["samples"] for event in events if event["kind"] == "applied" and event["rank"] == losses.living[0])
    discards = [event for event in events if event["kind"] == "discard" and event["reason"] not in (CRASH, GIVEN_UP)]
    dropped = sum(event["samples"] for event in discards if event["rank"] in losses.living)
    perhaps = sum(event["samples"] for event in discards) - dropped  # what a lost rank has dropped may go out again
    whole = losses.epochs * SAMPLES
    assert whole - perhaps <= used + dropped <= whole, f"{used} samples were applied and {dropped} dropped, of {whole}"


def moments(strategy: Strategy, losses: Losses) -> list[float]:
    """When something happens in the run if nobody crashes: a rank is suspended or woken, joins or applies a round."""
    _, events, _ = play(strategy, replace(losses, crashes=()))
    times = {event[field] for event in events for field in ("t", "end") if isinstance(event.get(field), float)}
    return sorted(times)


def drawn(seed: int) -> tuple[str, Losses]:
    """A strategy, a cluster and crashes, by chance."""
    draw = random.Random(f"losses {seed}")
    workers = draw.randint(2, 6)
    dead = draw.sample(range(workers), draw.randint(1, workers - 1))
    speeds = tuple(draw.choice([1.0, 1.0, 0.5, 0.25]) for _ in range(workers))
    at_once = draw.random() < 0.2
    together = draw.uniform(0, SECONDS)
    crashes = tuple(Crash(at=together if at_once else draw.uniform(0, SECONDS), rank=rank) for rank in dead)
    return draw.choice(SURVIVORS), Losses(
        speeds, crashes, seed, epochs=draw.randint(1, 2), latency=draw.choice([0.0, 0.002, 0.03])
    )


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

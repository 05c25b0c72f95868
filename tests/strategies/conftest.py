"""Strategies in virtual time, with everything kept that a formula can be checked against.

`play` trains in the simulator and notes, for every rank, which samples each micro-batch had and at which point it was
computed, and the committed parameters after every round. All in float64: a formula that is written down twice then
agrees to the last digits, and a wrong one does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.backends.replica import Replica
from paceline.backends.replica_learner import ReplicaLearner
from paceline.backends.simulated import Data, Simulation, simulate
from paceline.backends.simulated_node import SimulatedNode
from paceline.control.ledger import Ledger
from paceline.record import Event, MemoryRecorder
from paceline.rules.learning_rate import StepScale
from paceline.simulator.cluster import Cluster
from paceline.strategies import Strategy

SAMPLES = 200
X = torch.randn(2 * SAMPLES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
Y = X @ torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64) + 0.3 * torch.sin(7 * X[:, 0])

MeanGradient = Callable[[Tensor, NDArray[np.int64]], Tensor]
"""Of the mean loss at these parameters over these samples."""
Step = Callable[[int, Tensor, Tensor, Tensor, int], Tensor]
"""A rank, its model, what mixing adds to it, the sum of its gradients and over how many samples that is: its model
after the round."""
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
PLAIN: MakeOptimizer = partial(torch.optim.SGD, lr=0.1)


def least_squares(w: Tensor, indices: NDArray[np.int64]) -> Tensor:
    x, y = X[indices], Y[indices]
    return x.T @ (x @ w - y) / len(indices)


class MicroBatch(NamedTuple):
    """What a rank computed: which samples, and where."""

    indices: NDArray[np.int64]
    point: Tensor


class Sent(NamedTuple):
    """A message, and when it left."""

    t: float
    sender: int
    to: int
    what: str
    words: list[str]
    tensors: list[Tensor]


class Stepped(NamedTuple):
    """A step that a server has made with what came in a message: of the learning rate it took `scale`."""

    mean: Tensor
    scale: float
    first: int


@dataclass
class Played:
    """A run, and all that a test asks about it."""

    gradient: MeanGradient
    start: Tensor
    learners: list[ReplicaLearner] = field(default_factory=list)
    micro_batches: list[list[MicroBatch]] = field(default_factory=list)  # of each rank
    epochs: list[list[int]] = field(default_factory=list)  # of each rank's micro-batches
    committed: list[list[Tensor]] = field(default_factory=list)  # of each rank, after each round
    noise: list[float | None] = field(default_factory=list)  # rank 0's noise scale after each round
    events: list[Event] = field(default_factory=list)
    run: Simulation | None = None
    sent: list[Sent] = field(default_factory=list)  # of a run with servers
    stepped: dict[int, list[Stepped]] = field(default_factory=dict)  # of each server
    ledger: Ledger | None = None

    @property
    def path(self) -> list[Tensor]:
        """The parameters before the first round and after each."""
        return [self.start, *self.committed[0]]

    @property
    def batches(self) -> list[int]:
        """Samples of each round."""
        return [event["samples"] for event in self.of_kind("applied", rank=0)]

    def of_kind(self, kind: str, rank: int | None = None) -> list[Event]:
        return [event for event in self.events if event["kind"] == kind and rank in (None, event["rank"])]

    def warnings(self, about: str) -> list[str]:
        return [event["text"] for event in self.of_kind("warning", rank=0) if about in event["text"]]

    def contributions(self, rank: int) -> list[list[MicroBatch]]:
        """What the rank brought to each round: as much as its joining says, in the order of computing."""
        return self._parts(rank, "join")

    def own_steps(self, rank: int) -> list[list[MicroBatch]]:
        """What each step was made of that the rank made alone; nothing of a step that only mixed."""
        return self._parts(rank, "step")

    def _parts(self, rank: int, kind: str) -> list[list[MicroBatch]]:
        queue = list(self.micro_batches[rank])
        parts = []
        for event in self.of_kind(kind, rank):
            part: list[MicroBatch] = []
            while sum(len(each.indices) for each in part) < event["samples"]:
                part.append(queue.pop(0))
            assert sum(len(each.indices) for each in part) == event["samples"], "a micro-batch is not cut"
            parts.append(part)
        assert not queue, "all that was computed was brought to a round, or used"
        return parts

    def sum_of(self, part: Sequence[MicroBatch]) -> tuple[Tensor, int]:
        """The sum of the gradients, each at its own point, and the number of samples."""
        sums = [len(indices) * self.gradient(point, indices) for indices, point in part]
        return sum(sums, torch.zeros_like(self.start)), sum(len(indices) for indices, _ in part)

    def means(self) -> list[Tensor]:
        """The mean gradient of each round that has samples, over all ranks."""
        rounds = zip(*(self.contributions(rank) for rank in range(len(self.learners))), strict=True)
        sums = [self.sum_of([each for part in parts for each in part]) for parts in rounds]
        return [total / count for total, count in sums if count]

    def ages(self) -> set[int]:
        """How many rounds were applied between computing a sample and the step with it, over all samples that were
        used. (Those of the very first round cannot be late.)"""
        found = set[int]()
        for rank in range(len(self.learners)):
            applied, queue = 0, list[tuple[int, int]]()
            for event in (event for event in self.events if event["rank"] == rank):
                if event["kind"] == "compute":
                    queue.append((event["samples"], applied))
                elif event["kind"] == "discard":
                    assert queue.pop()[0] == event["samples"]
                elif event["kind"] == "applied":
                    applied += 1
                elif event["kind"] == "join":
                    left = event["samples"]
                    while left:
                        samples, version = queue.pop(0)
                        left -= samples
                        found |= {event["round"] - version} if event["round"] else set()
        return found


class Flat(nn.Module):
    """Nothing but parameters: one vector, or cut into several."""

    def __init__(self, start: Tensor, pieces: int = 1) -> None:
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(piece.clone()) for piece in start.chunk(pieces))


class WatchedLearner(ReplicaLearner):
    """Notes the steps that it makes with what came in messages."""

    stepped: list[Stepped]

    def step(self, mean: Tensor, scale: StepScale, first: int) -> float:
        self.stepped.append(Stepped(mean.clone(), scale.learning_rate, first))
        return super().step(mean, scale, first)


def learner(
    played: Played, rank: int, start: Tensor, samples: int, optimizer: MakeOptimizer, pieces: int
) -> ReplicaLearner:
    model, record = Flat(start, pieces), list[MicroBatch]()
    played.micro_batches.append(record)
    played.epochs.append([])

    def backward(model: nn.Module, indices: NDArray[np.int64]) -> None:
        parameters = list(model.parameters())
        point = torch.cat([parameter.detach() for parameter in parameters])
        record.append(MicroBatch(indices, point))
        played.epochs[rank].append(made.epoch)
        gradient = played.gradient(point, indices)
        for parameter, part in zip(parameters, gradient.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part

    made = WatchedLearner(Replica(model, optimizer(list(model.parameters()))), backward, samples=samples, rank=rank)
    played.stepped[rank] = made.stepped = []
    return made


def train(
    strategy: Strategy,
    speeds: Sequence[float] | Cluster = (1.0,),
    *,
    optimizer: MakeOptimizer = PLAIN,
    gradient: MeanGradient = least_squares,
    start: Sequence[float] | Sequence[Sequence[float]] = (1.0, 1.0, 1.0, 1.0),
    samples: int = SAMPLES,
    epochs: int = 2,
    micro_batch: int = 8,
    pieces: int = 1,
) -> Played:
    """Train until the data ends. With `speeds` a micro-batch of a device of speed 1 takes 1 s, and the network none.
    `start` may be one for each rank: a strategy that keeps a model on each has to draw them together. `pieces`: how
    many parameters the model is."""
    cluster = speeds if isinstance(speeds, Cluster) else Cluster.from_speeds(speeds, micro_batch_seconds=1.0)
    given = torch.tensor(start, dtype=torch.float64)
    starts = given.expand(cluster.ranks, -1)
    played = Played(gradient, given if given.dim() == 1 else given.mean(0))
    played.learners = [learner(played, rank, own, samples, optimizer, pieces) for rank, own in enumerate(starts)]
    played.committed = [[] for _ in played.learners]
    recorder = MemoryRecorder()

    def keep(rank: int, t: float, samples: int) -> None:
        replica = played.learners[rank].replica
        committed = torch.cat(list(replica.committed.values()))
        assert torch.equal(committed, replica.parameters), "a round is reported where it ended, not ahead of it"
        played.committed[rank].append(committed.clone())
        if rank == 0:
            played.noise.append(replica.noise.value)

    options = {"learners": played.learners, "recorder": recorder, "on_applied": keep}
    with listening(played):
        played.run = simulate(strategy, cluster, micro_batch=micro_batch, data=Data(samples, epochs), **options)
    played.events = recorder.events
    return played


@contextmanager
def listening(played: Played) -> Iterator[None]:
    """Note all messages, and keep the ledger."""
    send = SimulatedNode.send

    def spy(node: SimulatedNode, to: int, kind: str, *tensors: Tensor) -> None:
        what, *words = kind.split()
        played.sent.append(Sent(node.now(), node.rank, to, what, words, [tensor.clone() for tensor in tensors]))
        send(node, to, kind, *tensors)

    def keep(*arguments: Any) -> Ledger:
        played.ledger = Ledger(*arguments)
        return played.ledger

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedNode, "send", spy)
        patch.setattr("paceline.backends.simulated.Ledger", keep)
        yield


def alone_by_hand(
    played: Played, matrix: Callable[[int], NDArray[np.float64]], step: Step
) -> tuple[list[list[Tensor]], Tensor]:
    """The rounds of ranks that step alone, by the equations and nothing else: each rank's models after its steps, and
    the mean of all at the end. It is told only which samples each step had. Who finds no data has taken part in one
    last round; from the next on its neighbours keep its weight.

    Args:
        played: the run; every gradient must have been computed at the rank's model of the round.
        matrix: W of each round.
        step: how a model moves.
    """
    workers = len(played.learners)
    parts = [played.own_steps(rank) for rank in range(workers)]
    models, after, gone = [played.start] * workers, [list[Tensor]() for _ in range(workers)], set[int]()
    number = 0
    while len(gone) < workers:
        weights, before, out_of_data = matrix(number), list(models), set[int]()
        for rank in sorted(set(range(workers)) - gone):
            here = [other for other in range(workers) if other != rank and other not in gone]
            pulls = [weights[rank, other] * (before[other] - before[rank]) for other in here]
            pull = sum(pulls, torch.zeros_like(played.start))
            if number == len(parts[rank]):
                models[rank] = before[rank] + pull
                out_of_data.add(rank)
                continue
            for _, point in parts[rank][number]:
                torch.testing.assert_close(point, before[rank], rtol=1e-10, atol=1e-12)
            models[rank] = step(rank, before[rank], pull, *played.sum_of(parts[rank][number]))
            after[rank].append(models[rank])
        gone |= out_of_data
        number += 1
    return after, torch.stack(models).mean(0)


def check_alone(
    played: Played, matrix: Callable[[int], NDArray[np.float64]], step: Step, but_before_empty_steps: bool = False
) -> None:
    """All models of all ranks after all rounds are those of the equations, and at the end all hold the same bits.
    `but_before_empty_steps`: do not look at what was told of a round when the next one was over as soon as it began."""
    after, mean = alone_by_hand(played, matrix, step)
    for rank, expected in enumerate(after):
        *committed, last = played.committed[rank]
        assert len(committed) == len(expected)
        following = [bool(part) for part in played.own_steps(rank)[1:]] + [True]
        for found, model, looked_at in zip(committed, expected, following, strict=True):
            if looked_at or not but_before_empty_steps:
                torch.testing.assert_close(found, model, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(last, mean, rtol=1e-10, atol=1e-12)
        assert torch.equal(last, played.committed[0][-1])
    assert sum(map(len, after)) > 20 and not torch.equal(after[0][1], after[1][1]), "it was worth looking"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For a few numbers more threads only take turns."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def play() -> Callable[..., Played]:
    return train


@pytest.fixture
def as_by_hand() -> Callable[..., None]:
    return check_alone

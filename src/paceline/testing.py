"""The contracts of a strategy and of a backend, as functions: call them in the tests of your own.

    from paceline.testing import check_strategy

    def test_mine():
        check_strategy(MyStrategy())

`check_strategy` runs a strategy in the simulator on small problems. `check_backend` runs a strategy that probes
everything a node promises; whoever writes a backend gives it a function that plays a strategy there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.backends.replica import Replica
from paceline.backends.replica_learner import ReplicaLearner
from paceline.backends.simulated import simulate
from paceline.backends.sources import Data
from paceline.node import Gradient, Node, Work
from paceline.record import Event, MemoryRecorder
from paceline.rules.learning_rate import StepScale
from paceline.simulator.cluster import Cluster
from paceline.simulator.jitter import LogNormal
from paceline.simulator.network import Network
from paceline.strategies.strategy import Strategy
from paceline.summary import account

SAMPLES, MICRO_BATCH, FEATURES = 203, 8, 5  # 203: the last micro-batch of an epoch is a short one
LEARNING_RATE, UNEQUAL = 0.05, (1.0, 0.7, 0.25)
GIVEN_UP_ROUND = 1_000_013  # signals are for good: no other may have the number
DISCARDED, WARNED = "the probe has no use for it", "The probe warns."  # in the record of a probed backend


@dataclass
class Trial:
    """A simulated training on a small regression, and all that can be asked about it afterwards."""

    strategy: Strategy
    speeds: tuple[float, ...]
    epochs: int = 2
    momentum: float = 0.0
    seed: int = 0
    events: list[Event] = field(default_factory=list)
    used: Counter[int] = field(default_factory=Counter)
    after_rounds: list[Tensor] = field(default_factory=list)  # rank 0's parameters after each of its rounds
    parameters: list[Tensor] = field(default_factory=list)  # of every rank, at the end

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, FEATURES, generator=generator)
        self.y = self.x @ torch.linspace(-1, 1, FEATURES) + 0.1 * torch.randn(SAMPLES, generator=generator)

    def run(self) -> Trial:
        workers = len(self.speeds)
        network = Network(latency=0.002, bandwidth=1e9)
        alone = Cluster.from_speeds(self.speeds, jitter=LogNormal(sigma=0.2), network=network, seed=self.seed)
        cluster = replace(alone, servers=self.strategy.servers_for(workers))
        learners = [self.learner(rank) for rank in range(cluster.ranks)]
        self.first = learners[0].parameters.clone()
        recorder = MemoryRecorder()

        def look(rank: int, t: float, samples: int) -> None:
            if rank == 0:
                self.after_rounds.append(learners[0].parameters.clone())

        simulate(
            self.strategy,
            cluster,
            micro_batch=MICRO_BATCH,
            data=Data(SAMPLES, self.epochs),
            learners=learners,
            recorder=recorder,
            on_applied=look,
        )
        self.events = recorder.events
        self.parameters = [learner.parameters for learner in learners]
        return self

    def learner(self, rank: int) -> ReplicaLearner:
        model = nn.Linear(FEATURES, 1)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=self.momentum)

        def backward(model: nn.Module, indices: NDArray[np.int64]) -> None:
            self.used.update(indices.tolist())
            self.loss(model, torch.from_numpy(indices)).backward()

        replica = Replica(model, optimizer)
        return ReplicaLearner(replica, backward, samples=SAMPLES, rank=rank, seed=self.seed)

    def loss(self, model: nn.Module, indices: Tensor) -> Tensor:
        predicted: Tensor = model(self.x[indices]).squeeze(1)
        return (predicted - self.y[indices]).square().mean()

    def gradient(self, parameters: Tensor, indices: Tensor) -> Tensor:
        """Of the mean loss, by hand: the oracle does not use what it tests."""
        x = torch.cat([self.x[indices], torch.ones(len(indices), 1)], dim=1)
        return 2 * x.T @ (x @ parameters - self.y[indices]) / len(indices)

    def whole_loss(self, parameters: Tensor) -> float:
        x = torch.cat([self.x, torch.ones(SAMPLES, 1)], dim=1)
        return float((x @ parameters - self.y).square().mean())


def check_strategy(
    strategy: Strategy, *, delay: int | None = 0, lr_scale: Callable[[int], float] = lambda batch: 1.0
) -> None:
    """Raise unless the strategy keeps the contract of every strategy that steps with averaged gradients.

    It converges; replays bit for bit; is SGD, `delay` rounds late, with one worker; loses and repeats no sample; leaves
    all ranks with the same bits; and ends when ranks of unequal speed run out of data at different times.

    Args:
        strategy: with the options to check.
        delay: rounds between taking a gradient and stepping with it; None for a method that is not SGD with one worker.
        lr_scale: what the strategy multiplies the learning rate by, for a round over so many samples.
    """
    if delay is not None:
        _check_one_worker_is_sgd(strategy, delay, lr_scale)
    _check_samples_and_consensus(strategy)
    _check_replays(strategy)
    _check_converges(strategy)


def _check_one_worker_is_sgd(strategy: Strategy, delay: int, lr_scale: Callable[[int], float]) -> None:
    trial = Trial(strategy, speeds=(1.0,)).run()
    sizes = [event["samples"] for event in trial.events if event["kind"] in ("join", "step") and event["samples"]]
    order = torch.from_numpy(
        np.concatenate([np.random.default_rng((trial.seed, epoch)).permutation(SAMPLES) for epoch in range(2)])
    )
    history = [trial.first] * (delay + 1)
    for batch in order.split(sizes):
        step = LEARNING_RATE * lr_scale(len(batch)) * trial.gradient(history[-1 - delay], batch)
        history.append(history[-1] - step)
    torch.testing.assert_close(trial.parameters[0], history[-1], rtol=1e-4, atol=1e-5)


def _check_samples_and_consensus(strategy: Strategy) -> None:
    trial = Trial(strategy, speeds=UNEQUAL).run()
    wrong = {index: times for index, times in trial.used.items() if times != trial.epochs}
    assert len(trial.used) == SAMPLES and not wrong, f"samples not used exactly {trial.epochs} times: {wrong}"
    books = account(trial.events)
    assert not books.errors, books.errors
    assert books.in_flight == 0 and books.applied == trial.epochs * SAMPLES, books
    for rank, parameters in enumerate(trial.parameters):
        assert torch.equal(parameters, trial.parameters[0]), f"rank {rank} ends with other bits than rank 0"
    ended = {event["rank"] for event in trial.events if event["kind"] == "end"}
    assert ended == set(range(len(trial.parameters))), "not every rank came to its end"


def _check_replays(strategy: Strategy) -> None:
    first, second = (Trial(strategy, speeds=UNEQUAL, seed=3).run() for _ in range(2))
    assert first.events == second.events, "the same seed gave other events"
    for one, other in zip(first.parameters, second.parameters, strict=True):
        assert torch.equal(one, other), "the same seed gave other parameters"


def _check_converges(strategy: Strategy) -> None:
    for momentum in (0.0, 0.5):
        trial = Trial(strategy, speeds=UNEQUAL, epochs=30, momentum=momentum).run()
        loss = trial.whole_loss(trial.parameters[0])
        assert loss < 0.02, f"with momentum {momentum} the loss is {loss:.3f} after 30 epochs (noise: 0.01)"


def check_backend(play: Callable[[Strategy], object]) -> None:
    """Raise unless a backend's nodes keep all that `paceline.node.Node` promises.

    Args:
        play: runs a strategy on the backend, on at least two ranks with some hundred samples in micro-batches of at
            least four, with plain SGD and a model that can be trained on less than a micro-batch; an exception in the
            coroutine of any rank must come out of it.
    """
    play(BackendProbe())


@dataclass(frozen=True, kw_only=True)
class BackendProbe(Strategy):
    """Asks a node for everything that it promises, and raises where it does not keep it."""

    name: ClassVar[str] = "backend-probe"

    async def worker(self, node: Node) -> None:
        assert 0 <= node.rank < node.world_size and node.world_size >= 2
        await self._numbers_and_gradients(node)
        await self._sizes(node)
        await self._notes(node)
        await self._looking_ahead(node)
        await self._models(node)
        await self._steps_alone(node)
        await self._discarding(node)
        await self._two_rounds_in_a_step(node)
        await self._messages(node)
        await self._signals(node)
        await self._counting(node)
        await self._giving_up(node)
        await self._polling(node)
        while not node.finished:
            node.apply(await node.all_reduce(await node.gradient()))
        rest = await node.gradient()
        assert rest.count == 0 and rest.values is None, "after the end a gradient is empty"

    async def _giving_up(self, node: Node) -> None:
        """Rank 0 ends the round; the others have a micro-batch under way then, or have just ended one."""
        done = Gradient(None, 0)
        if node.rank == 0:
            done += await node.gradient(until=GIVEN_UP_ROUND)
            node.signal(GIVEN_UP_ROUND)
        else:
            while not node.signalled(GIVEN_UP_ROUND):
                fresh = await node.gradient(until=GIVEN_UP_ROUND)
                assert fresh.count or node.signalled(GIVEN_UP_ROUND), "given up only after the signal"
                assert bool(fresh.samples) == bool(fresh.count), "what was given up brings nothing"
                done += fresh
        node.apply(await node.all_reduce(done))
        node.apply(await node.all_reduce(await node.gradient()))

    async def _numbers_and_gradients(self, node: Node) -> None:
        ranks, squares = await node.all_gather(float(node.rank), float(node.rank**2))
        assert ranks == tuple(float(rank) for rank in range(node.world_size)), f"gathered {ranks}"
        assert squares == tuple(rank**2 for rank in ranks), "numbers that are gathered together stay apart"
        batch = await node.gradient()
        assert batch.count > 0 and sum(map(len, batch.samples)) == batch.count
        assert node.seconds_per_sample > 0
        own = batch.count
        work, gathered = node.all_reduce(batch), node.all_gather(float(own))
        total = await work
        assert work.done and total.count == sum((await gathered)[0]), "the count of the sum is the sum of the counts"
        before = node.parameters.clone()
        node.apply(total)
        assert not torch.equal(node.parameters, before), "a step with a gradient moves the parameters"
        await self._same_parameters(node)
        before = node.parameters.clone()
        node.apply(await node.all_reduce(Gradient(None, 0)))
        assert torch.equal(node.parameters, before), "a round over no samples changes nothing"

    async def _sizes(self, node: Node) -> None:
        assert node.divisible and node.micro_batch >= 4
        batch = await node.gradient(3)
        assert 0 < batch.count <= 3 and len(batch.samples) == 1, "as much as was asked for, of one lease"
        for at_most in (1, node.micro_batch - 1, 10 * node.micro_batch, None):
            fresh = await node.gradient(at_most)
            assert 0 < fresh.count <= min(at_most or node.micro_batch, node.micro_batch), f"{fresh.count} of {at_most}"
            assert len(fresh.samples) == 1 and len(fresh.samples[0]) == fresh.count
            batch += fresh
        assert node.seconds_per_sample > 0 and node.overhead_samples >= 0
        node.apply(await node.all_reduce(batch))

    async def _notes(self, node: Node) -> None:
        total = await node.all_reduce(await node.gradient(), note=node.rank + 0.5)
        assert total.notes == tuple(rank + 0.5 for rank in range(node.world_size)), f"notes {total.notes}"
        node.apply(total)
        total = await node.all_reduce(await node.gradient())
        assert total.notes == (0.0,) * node.world_size, f"who sends no note sends 0.0: {total.notes}"
        node.apply(total)
        (noise,) = await node.all_gather(-1.0 if node.noise_scale is None else node.noise_scale)
        assert len(set(noise)) == 1, f"the ranks know different noise scales: {noise}"

    async def _looking_ahead(self, node: Node) -> None:
        assert not node.steps.momentum and not node.steps.adaptive, "the probe knows the steps of plain SGD only"
        batch = await node.gradient()
        start, count, rate = node.parameters.clone(), batch.count, node.steps.learning_rate
        node.look_ahead(batch)
        ahead = node.parameters.clone()
        assert batch.count == count and batch.values is not None, "to look ahead does not use the gradient up"
        torch.testing.assert_close(ahead, start - rate / count * batch.values.tensor(), rtol=1e-4, atol=1e-6)
        late = await node.gradient()
        assert torch.equal(node.parameters, ahead), "it computes ahead until the next step"
        node.look_ahead(batch, StepScale(0.5))
        torch.testing.assert_close(node.parameters, 0.5 * (start + ahead), rtol=1e-4, atol=1e-6)
        node.look_ahead(Gradient(None, 0))
        total = await node.all_reduce(batch)
        assert total.values is not None
        expected = start - 2 * rate / total.count * total.values.tensor()
        node.apply(total, StepScale(2.0))
        torch.testing.assert_close(node.parameters, expected, rtol=1e-4, atol=1e-6)
        assert node.steps.learning_rate == rate, "another scale holds for one step"
        await self._same_parameters(node)
        node.apply(await node.all_reduce(late))

    async def _models(self, node: Node) -> None:
        for weight in (None, node.rank / 8, -1.0 - node.rank):  # below zero: as a movement, while the parameters go on
            common, own = node.parameters.clone(), await node.gradient()
            node.apply(own)
            left, part = node.parameters.clone(), own.count if weight is None else abs(weight)
            gathered = node.all_gather(part, float(left.double().sum()) * part)
            moved = node.movement(left, common, part, own.count, own.samples)
            work = node.all_reduce(moved if (weight or 0) < 0 else node.model(own.count, own.samples, weight))
            node.parameters.add_(1.0)
            node.adopt(await work)
            parts, sums = await gathered
            mean = sum(sums) / sum(parts)
            assert abs(float(node.parameters.double().sum()) - mean) < 1e-4 * (1 + abs(mean)), f"the mean by {weight}"
            await self._same_parameters(node)
        assert torch.equal(node.parameters, common), "the common model is merged in place"
        node.adopt(await node.all_reduce(node.model(0, [])))
        await self._same_parameters(node)

    async def _steps_alone(self, node: Node) -> None:
        """Two of rank 0 and one of the others; then all meet."""
        for _ in range(2 if node.rank == 0 else 1):
            own = await node.gradient()
            node.apply(own)
            node.settle(own)
        assert not node.called_together, "nobody has called"
        gathered = node.all_gather(float(node.parameters.double().sum()))
        node.adopt(await node.mean_model())
        mean = sum((await gathered)[0]) / node.world_size
        assert abs(float(node.parameters.double().sum()) - mean) < 1e-4 * (1 + abs(mean)), "the mean of all models"
        await self._same_parameters(node)

    async def _discarding(self, node: Node) -> None:
        batch = await node.gradient()
        own = batch.count
        node.discard(await node.gradient(), DISCARDED)
        node.discard(Gradient(None, 0), DISCARDED)
        gathered = node.all_gather(float(own))
        total = await node.all_reduce(batch)
        assert total.count == sum((await gathered)[0]), "what is discarded is in no sum"
        node.apply(total)
        if node.rank == 0:
            node.warn(WARNED)

    async def _two_rounds_in_a_step(self, node: Node) -> None:
        start, rate = node.parameters.clone(), node.steps.learning_rate
        first = node.all_reduce(await node.gradient(), note=1.0)
        second = node.all_reduce(await node.gradient(), note=2.0)
        total, later = await first, await second
        assert total.values is not None and later.values is not None
        count, sums = total.count + later.count, total.values.tensor() + later.values.tensor()
        total += later
        assert total.count == count and set(total.notes) == {2.0}
        node.apply(total)
        torch.testing.assert_close(node.parameters, start - rate / count * sums, rtol=1e-4, atol=1e-6)
        await self._same_parameters(node)

    async def _same_parameters(self, node: Node) -> None:
        (sums,) = await node.all_gather(float(node.parameters.double().sum()))
        assert len(set(sums)) == 1, f"the ranks' parameters differ after the same step: {sums}"

    async def _messages(self, node: Node) -> None:
        following, previous = (node.rank + 1) % node.world_size, (node.rank - 1) % node.world_size
        for number in range(3):
            node.send(following, f"note-{number}", torch.arange(5) + 10 * node.rank + number, torch.tensor([True]))
        node.send(node.rank, "to-myself")
        received = [await node.receive() for _ in range(4)]
        own = [message for message in received if message.kind == "to-myself"]
        notes = [message for message in received if message.kind != "to-myself"]
        assert len(own) == 1 and own[0].sender == node.rank and not own[0].tensors
        for number, note in enumerate(notes):
            assert (note.sender, note.kind) == (previous, f"note-{number}"), "a link keeps the order of messages"
            numbers, flag = note.tensors
            assert torch.equal(numbers, torch.arange(5) + 10 * previous + number) and flag.dtype == torch.bool

    async def _signals(self, node: Node) -> None:
        """The rounds are far from any real one."""
        if node.rank == node.world_size - 1:
            node.signal(1_000_007)
            node.signal(1_000_007)
            assert node.signalled(1_000_007), "who signals knows it"
        batch = await node.gradient()
        while not node.signalled(1_000_007):
            batch += await node.gradient()
        assert not node.signalled(1_000_008)
        node.apply(await node.all_reduce(batch))

    async def _counting(self, node: Node) -> None:
        """All but one sample of the target, then that one."""
        target = 3 * node.world_size + 1
        node.count(1_000_009, 1, target)
        node.count(1_000_009, 2, target)
        for _ in range(3):  # whatever is on its way has arrived after some of these
            batch = await node.gradient()
            await node.all_gather(0.0)
            assert not node.signalled(1_000_009), "before the ranks have the target together"
            node.apply(await node.all_reduce(batch))
        if node.rank == 0:
            node.count(1_000_009, 1, target)
        batch = await node.gradient()
        while not node.signalled(1_000_009):
            batch += await node.gradient()
        assert not node.signalled(1_000_010)
        node.apply(await node.all_reduce(batch))

    async def _polling(self, node: Node) -> None:
        work: Work[Gradient] = node.all_reduce(await node.gradient())
        batch = await node.gradient()
        while not work.done:
            batch += await node.gradient()
        node.apply(await work)
        node.apply(await node.all_reduce(batch))

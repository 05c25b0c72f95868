"""What the ranks of these tests do: small trainings that return facts, as JSON can hold them, for the test to judge."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules
from torch.utils.data import Dataset, IterableDataset

import paceline
from paceline.node import Node
from paceline.run.loader import Loader
from paceline.run.run import Run
from paceline.strategies.all_reduce import AllReduce
from paceline.testing import BackendProbe

Facts = dict[str, Any]
FEATURES = 3
torch.optim.SGD([torch.zeros(1)], lr=0.1)  # the first optimizer imports half of torch: once is enough for all ranks
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, amsgrad=True),
}


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "exponential": lambda optimizer: schedules.ExponentialLR(optimizer, gamma=0.9),
    "cosine": lambda optimizer: schedules.CosineAnnealingLR(optimizer, T_max=60),
    "one-cycle": lambda optimizer: schedules.OneCycleLR(optimizer, max_lr=0.1, total_steps=60),
    "warm-up": lambda optimizer: schedules.SequentialLR(
        optimizer,
        [schedules.LinearLR(optimizer, 0.1, total_iters=10), schedules.StepLR(optimizer, 9, gamma=0.5)],
        milestones=[10],
    ),
    "plateau": lambda optimizer: schedules.ReduceLROnPlateau(optimizer),
}


class Points(Dataset[tuple[int, Tensor, Tensor]]):
    """Points on a plane; each says its own index, so that the loop can tell what it was given."""

    def __init__(self, samples: int, bad: int = 0) -> None:
        chance = torch.Generator().manual_seed(7)
        self.x = torch.randn(samples, FEATURES, dtype=torch.float64, generator=chance)
        self.y = self.x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + 0.3
        self.x[:bad] = float("nan")

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.x[index], self.y[index]


def linear() -> nn.Module:
    """The same on every rank and in the test."""
    model = nn.Linear(FEATURES, 1).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.1, 0.2, 0.3]]))
        model.bias.zero_()
    return model


def squared_error(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return ((model(x).squeeze(-1) - y) ** 2).mean()


def fingerprint(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()[:16]


class Diary:
    """What a rank was given, and what its parameters were after every round."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.seen: list[tuple[int, int]] = []
        self.steps: list[tuple[int, list[int]]] = []
        self.parameters: list[str] = []
        self.rates: list[tuple[int, float]] = []
        run.after_round(self._after_round)

    def _after_round(self) -> None:
        node = self._run.node
        self.parameters.append(fingerprint(node.parameters))
        self.rates.append((node.samples_applied, node.steps.learning_rate))

    def given(self, loader: Loader, indices: Tensor) -> None:
        self.seen += [(loader.epoch, index) for index in indices.tolist()]
        self.steps.append((self._run.node.rounds, indices.tolist()))

    def facts(self, **more: Any) -> Facts:
        node = self._run.node
        return {
            "seen": self.seen,
            "steps": self.steps,
            "after_round": self.parameters,
            "rates": self.rates,
            "final": node.parameters.tolist(),
            "applied": node.samples_applied,
            "rounds": node.rounds,
            "alone": self._run.strategy.steps_alone,
            **more,
        }


def train(
    strategy: str,
    samples: int = 53,
    micro_batch: int = 4,
    epochs: int = 2,
    optimizer: str = "sgd",
    slow: dict[str, float] | None = None,
    clip_norm: float | None = None,
    every: int | str | None = None,
    bad: int = 0,
    **loader_options: Any,
) -> Facts:
    """An ordinary loop; `slow` are seconds of sleep a micro-batch by rank, `bad` samples are not a number."""
    model = linear()
    with paceline.Run(strategy) as run:
        loader = run.loader(Points(samples, bad), micro_batch=micro_batch, epochs=epochs, **loader_options)
        inner = OPTIMIZERS[optimizer](model.parameters())
        driven = run.optimizer(inner, model, clip_norm=clip_norm)
        if every is not None:
            run.scheduler(torch.optim.lr_scheduler.ExponentialLR(inner, gamma=0.5), every=every)
        diary = Diary(run)
        for indices, x, y in loader:
            diary.given(loader, indices)
            driven.zero_grad()
            squared_error(model, x, y).backward()
            time.sleep((slow or {}).get(str(run.rank), 0.0))
            driven.step()
    return diary.facts(model={name: tensor.tolist() for name, tensor in run.model_state().items()})


def train_scheduled(
    strategy: str,
    samples: int,
    epochs: int,
    stepped: str,
    schedule: str = "exponential",
    over: str = "run",
    first: str = "optimizer",
    slow: dict[str, float] | None = None,
) -> Facts:
    """An ordinary loop with an ordinary scheduler, of which the run is told nothing.

    `stepped` is after every micro-batch, every two with one step of the optimizer for both, every epoch, or never; the
    scheduler is made over the run's optimizer or over torch's own, before (`first`) or after the run's optimizer.
    """
    model = linear()
    with paceline.Run(strategy) as run:
        loader = run.loader(Points(samples), micro_batch=4, epochs=epochs)
        inner = OPTIMIZERS["momentum"](model.parameters())
        if first == "scheduler":
            scheduler = SCHEDULES[schedule](inner)
        driven = run.optimizer(inner, model)
        if first == "optimizer":
            scheduler = SCHEDULES[schedule](driven if over == "run" else inner)
        diary = Diary(run)
        epoch = 0
        for number, (indices, x, y) in enumerate(loader):
            diary.given(loader, indices)
            if stepped == "epoch" and loader.epoch > epoch:
                epoch = loader.epoch
                scheduler.step()
            squared_error(model, x, y).backward()
            time.sleep((slow or {}).get(str(run.rank), 0.0))
            if stepped != "twos" or number % 2:
                driven.step()
                driven.zero_grad()
            if stepped == "micro-batch" or (stepped == "twos" and number % 2):
                scheduler.step()
        last = scheduler.get_last_lr()
    scheduler.step()
    return diary.facts(last=last, afterwards=scheduler.get_last_lr())


def dictionaries(batch: list[tuple[int, Tensor, Tensor]]) -> dict[str, Tensor]:
    """A collate_fn, which DataLoader's workers run."""
    indices, xs, ys = zip(*batch, strict=True)
    return {"indices": torch.tensor(indices), "x": torch.stack(xs), "y": torch.stack(ys)}


def train_collated(strategy: str, samples: int, epochs: int) -> Facts:
    """Batches made by the user's function in DataLoader's worker processes."""
    model = linear()
    with paceline.Run(strategy) as run:
        loader = run.loader(
            Points(samples), micro_batch=4, epochs=epochs, num_workers=2, collate_fn=dictionaries, prefetch_factor=3
        )
        driven = run.optimizer(OPTIMIZERS["sgd"](model.parameters()), model)
        diary = Diary(run)
        for batch in loader:
            diary.given(loader, batch["indices"])
            driven.zero_grad()
            squared_error(model, batch["x"], batch["y"]).backward()
            driven.step()
    return diary.facts()


def train_scaled(strategy: str, samples: int, skipped: int) -> Facts:
    """Mixed precision with a GradScaler whose scale overflows in the first so many micro-batches."""
    model = linear().float()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10_000)
    losses, skips = [], 0
    with paceline.Run(strategy) as run:
        loader = run.loader(Points(samples), micro_batch=4, epochs=1)
        driven = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
        diary = Diary(run)
        for indices, x, y in loader:
            diary.given(loader, indices)
            driven.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = ((model(x.float()).squeeze(-1).float() - y.float()) ** 2).mean()
            scaled = scaler.scale(loss)
            if run.rank == 0 and skips < skipped:
                skips += 1
                scaled = scaled * float("inf")
            scaled.backward()
            scaler.step(driven)
            scaler.update()
            losses.append(loss.item())
    return diary.facts(losses=losses, skips=skips)


def train_accumulated(strategy: str, samples: int, tidy: bool) -> Facts:
    """Two micro-batches a step; `tidy` loops clear the gradients after the step, others before the first backward."""
    model = linear()
    with paceline.Run(strategy) as run:
        loader = run.loader(Points(samples), micro_batch=4, epochs=1)
        driven = run.optimizer(OPTIMIZERS["sgd"](model.parameters()), model)
        diary = Diary(run)
        for number, (indices, x, y) in enumerate(loader):
            diary.given(loader, indices)
            if number % 2 == 0 and not tidy:
                driven.zero_grad()
            (squared_error(model, x, y) / 2).backward()
            if number % 2 == 1:
                driven.step()
                if tidy:
                    driven.zero_grad()
    return diary.facts()


def train_normalised(strategy: str, samples: int, saving: bool = False, leaver: int | None = None) -> Facts:
    """A model with running statistics, which every rank sees other samples for; one rank may leave its loop at once."""
    own: list[float] = []
    model = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 1)).double()
    with paceline.Run(strategy) as run:
        loader = run.loader(Points(samples), micro_batch=4, epochs=2)
        driven = run.optimizer(OPTIMIZERS["momentum"](model.parameters()), model)
        diary = Diary(run)
        for indices, x, y in loader:
            if run.rank == leaver:
                break
            diary.given(loader, indices)
            driven.zero_grad()
            squared_error(model, x + run.rank, y).backward()
            own = model[0].running_mean.tolist()
            if saving:
                run.save()
            driven.step()
        if saving:
            run.save()
    state = run.model_state()
    averaged = [fingerprint(state["0.running_mean"]), fingerprint(state["0.running_var"])]
    return diary.facts(averaged=averaged, own=own, mean=state["0.running_mean"].tolist())


def train_leaving(strategy: str, samples: int, leavers: list[int], after: int, **loader_options: Any) -> Facts:
    """Some ranks leave their loops early, with leases in their hands."""
    model = linear()
    done = 0
    with paceline.Run(strategy) as run:
        loader = run.loader(Points(samples), micro_batch=4, epochs=1, **loader_options)
        driven = run.optimizer(OPTIMIZERS["sgd"](model.parameters()), model)
        diary = Diary(run)
        for indices, x, y in loader:
            if run.rank in leavers and done == after:
                break
            done += 1
            diary.given(loader, indices)
            driven.zero_grad()
            squared_error(model, x, y).backward()
            driven.step()
    return diary.facts(done=done)


class Interrupted(paceline.PacelineError):
    """What ends a run in the middle."""


def train_saving(
    strategy: str,
    samples: int,
    epochs: int,
    save_at: list[int] | None = None,
    resume: bool = False,
    resume_from: str | None = None,
    weights_only: bool = False,
    told: bool = True,
) -> Facts:
    """Save after some rounds and break off when all is saved, or resume; with momentum and a schedule, of which the run
    is `told` or not."""
    model = linear()
    found: Facts = {}
    # Whoever is still in the round when rank 0 breaks off learns that it is lost.
    with contextlib.suppress(*([paceline.PacelineError] if save_at else [])), paceline.Run(strategy) as run:
        loader = run.loader(Points(samples), micro_batch=4, epochs=epochs)
        inner = OPTIMIZERS["momentum"](model.parameters())
        driven = run.optimizer(inner, model)
        scheduler = SCHEDULES["exponential"](inner)
        if told:
            run.scheduler(scheduler, every=20)
        if resume:
            taken = run.resume(resume_from, weights_only=weights_only)
            found["taken"] = taken and str(taken)
        diary = Diary(run)

        def after_round() -> None:
            if run.node.rounds in (save_at or []) and run.rank == run.world_size - 1:
                run.save()
            if save_at and len(list(run.folder.glob("checkpoints/round-*"))) == len(save_at):
                raise Interrupted("That is enough.")

        run.after_round(after_round)
        try:
            for indices, x, y in loader:
                if not diary.seen:
                    state = {name: tensor.tolist() for name, tensor in run.model_state().items()}
                    momenta = [inner.state[p]["momentum_buffer"].tolist() for p in model.parameters() if inner.state[p]]
                    found["start"] = {"model": state, "momenta": momenta, "lr": run.node.steps.learning_rate}
                    found["start_applied"] = run.node.samples_applied
                diary.given(loader, indices)
                driven.zero_grad()
                squared_error(model, x, y).backward()
                time.sleep(0.005)  # long enough that the data lasts for several rounds
                driven.step()
                scheduler.step()
        finally:
            found |= diary.facts()
    return found


def letters(sender: int, number: int) -> list[Tensor]:
    """The tensors of one message: several shapes and dtypes, an empty one and a scalar among them."""
    base = torch.arange(6) + 10 * number + 1000 * sender
    return [
        base.view(2, 3).float(),
        base.double()[::2],
        base.to(torch.bfloat16),
        base % 2 == 0,
        torch.empty(0, 4),
        torch.tensor(number),
        torch.full((70_000,), sender, dtype=torch.int16),
    ]


HEARD: list[tuple[int, str, bool]] = []


@dataclass(frozen=True, kw_only=True)
class Chatter(paceline.Strategy):
    """Every rank writes to all, itself too, and then they train; rank 0 says by a signal when to begin."""

    name: ClassVar[str] = "chatter"
    letters: int = 5

    async def worker(self, node: Node) -> None:
        for number in range(self.letters):
            for to in range(node.world_size):
                sent = letters(node.rank, number)
                node.send(to, f"letter {number}", *sent)
                for tensor in sent:
                    tensor.zero_()  # what is sent is what it was
        for _ in range(self.letters * node.world_size):
            message = await node.receive()
            expected = letters(message.sender, int(message.kind.split()[1]))
            same = [a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(message.tensors, expected, strict=True)]
            HEARD.append((message.sender, message.kind, all(same)))
        assert not node.signalled(6)
        if node.rank == 0:
            node.signal(5)
            node.signal(5)
        batch = await node.gradient()
        while not node.signalled(5):
            batch += await node.gradient()
        while not node.finished:
            node.apply(await node.all_reduce(batch))
            (ranks,) = await node.all_gather(node.rank + 0.5)
            assert ranks == tuple(rank + 0.5 for rank in range(node.world_size))
            if not node.finished:
                batch = await node.gradient()


def train_chatting(samples: int) -> Facts:
    """With a strategy of the user's own, given as an object."""
    model = linear()
    with paceline.Run(Chatter(letters=7)) as run:
        loader = run.loader(Points(samples), micro_batch=4, epochs=1)
        driven = run.optimizer(OPTIMIZERS["sgd"](model.parameters()), model)
        diary = Diary(run)
        for indices, x, y in loader:
            diary.given(loader, indices)
            driven.zero_grad()
            squared_error(model, x, y).backward()
            driven.step()
    return diary.facts(heard=HEARD)


@dataclass(frozen=True, kw_only=True)
class Cutter(paceline.Strategy):
    """Synchronous SGD that asks for micro-batches of other sizes all the time."""

    name: ClassVar[str] = "cutter"
    sizes: tuple[int, ...] = (3, 1, 8, 5, 2, 100)

    async def worker(self, node: Node) -> None:
        for size in itertools.cycle(self.sizes[node.rank :] + self.sizes[: node.rank]):
            if node.finished:
                return
            node.apply(await node.all_reduce(await node.gradient(size)))


def train_cut(samples: int, normalised: bool, **loader_options: Any) -> Facts:
    """Every micro-batch with what was asked for."""
    model = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 1)).double() if normalised else linear()
    asked: list[tuple[int, list[int]]] = []
    with paceline.Run(Cutter()) as run:
        loader = run.loader(Points(samples), micro_batch=8, epochs=2, **loader_options)
        driven = run.optimizer(OPTIMIZERS["sgd"](model.parameters()), model)
        diary = Diary(run)
        for indices, x, y in loader:
            asked.append((run.node.at_most, indices.tolist()))
            diary.given(loader, indices)
            driven.zero_grad()
            squared_error(model, x, y).backward()
            driven.step()
    return diary.facts(asked=asked, divisible=run.node.divisible)


def train_probed(samples: int, epochs: int) -> Facts:
    """With a strategy that asks its node for everything."""
    model = linear()
    with paceline.Run(BackendProbe()) as run:
        loader = run.loader(Points(samples), micro_batch=4, epochs=epochs)
        driven = run.optimizer(OPTIMIZERS["sgd"](model.parameters()), model)
        diary = Diary(run)
        for indices, x, y in loader:
            diary.given(loader, indices)
            driven.zero_grad()
            squared_error(model, x, y).backward()
            driven.step()
    return diary.facts()


def train_given_up(samples: int, abortable: bool, waits: int) -> Facts:
    """Rank 1 waits in the middle of its first micro-batches until they are no longer wanted."""
    model = linear()
    with paceline.Run("non-blocking:mini_batches=2") as run:
        loader = run.loader(Points(samples), micro_batch=4, epochs=1)
        driven = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        diary, through, waited = Diary(run), 0, 0
        for indices, x, y in loader:
            diary.given(loader, indices)
            with run.abortable() if abortable else contextlib.nullcontext():
                driven.zero_grad()
                if run.rank == 1 and waited < waits:
                    waited += 1
                    while not run.node.over:
                        time.sleep(0.001)
                squared_error(model, x, y).backward()
                through += 1
            driven.step()
    return diary.facts(through=through, waited=waited)


def train_looking(strategy: str, samples: int) -> Facts:
    """What `run.model_state()` says in the middle of training, and where the model really is then."""
    model = linear()
    states: list[tuple[int, str, str]] = []
    with paceline.Run(strategy) as run:
        loader = run.loader(Points(samples), micro_batch=4, epochs=2)
        driven = run.optimizer(OPTIMIZERS["momentum"](model.parameters()), model)
        diary = Diary(run)
        for indices, x, y in loader:
            diary.given(loader, indices)
            state = torch.cat([tensor.flatten() for tensor in run.model_state().values()])
            states.append((run.node.rounds, fingerprint(state), fingerprint(run.node.parameters)))
            driven.zero_grad()
            squared_error(model, x, y).backward()
            time.sleep(0.001)  # long enough that several micro-batches fall into a round
            driven.step()
    return diary.facts(states=states, start=fingerprint(nn.utils.parameters_to_vector(linear().parameters())))


@dataclass(frozen=True, kw_only=True)
class Longing(paceline.Strategy):
    """Rank 0 waits for a message that nobody sends."""

    name: ClassVar[str] = "longing"

    async def worker(self, node: Node) -> None:
        await node.gradient()
        if node.rank == 0:
            await node.receive()
        await node.gradient()


def wait_for_a_letter(samples: int) -> Facts:
    """Rank 1 fails while rank 0 waits for its message."""
    model = linear()
    with paceline.Run(Longing()) as run:
        loader = run.loader(Points(samples), micro_batch=4, epochs=1)
        driven = run.optimizer(OPTIMIZERS["sgd"](model.parameters()), model)
        for _, x, y in loader:
            if run.rank == 1:
                raise RuntimeError("the postman is ill")
            squared_error(model, x, y).backward()
            driven.step()
    return {}


def train_apart(how: str) -> Facts:
    """Rank 1 trains something else than the others."""
    other = os.environ["RANK"] == "1"
    model: nn.Module = nn.Linear(FEATURES, 2 if other and how == "shape" else 1)
    if other and how == "names":
        model = nn.Sequential(model)
    if other and how == "dtype":
        model = model.double()
    strategy = "all-reduce:micro_batches=2" if other and how == "option" else "all-reduce"
    with paceline.Run("abs-sgd" if other and how == "strategy" else strategy, seed=int(other and how == "seed")) as run:
        loader = run.loader(Points(20 if other and how == "samples" else 24), micro_batch=4, epochs=1)
        driven = run.optimizer(OPTIMIZERS["sgd"](model.parameters()), model)
        kept = [schedules.CosineAnnealingLR(driven, T_max=7 if other else 8)] if how == "schedule" else []
        for _, x, _ in loader:
            model(x.float()).sum().backward()
            driven.step()
            for scheduler in kept:
                scheduler.step()
    return {}


class Frail(AllReduce):
    """All strategies that there are go on without a lost rank."""

    name, survives = "frail", False


def train_until_killed(strategy: str, victim: int) -> Facts:
    """One rank is killed in its loop, with leases in its hands and perhaps a round in flight."""
    model = linear()
    with paceline.Run(Frail() if strategy == "frail" else strategy) as run:
        loader = run.loader(Points(53), micro_batch=4, epochs=50)
        driven = run.optimizer(OPTIMIZERS["sgd"](model.parameters()), model)
        for number, (_, x, y) in enumerate(loader):
            driven.zero_grad()
            squared_error(model, x, y).backward()
            time.sleep(0.005)
            if run.rank == victim and number == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            driven.step()
    return {}


def mistake(how: str) -> Facts:
    """What people do wrong with a run; the error is what is judged."""
    model, stranger = linear(), linear()
    samples = Points(3 if how == "short" else 24)
    with paceline.Run("all-reduce") as run:
        if how == "iterable":
            run.loader(Stream(), micro_batch=4, epochs=1)
        loader = run.loader(
            samples,
            micro_batch=4,
            epochs=None if how == "endless" else 1,
            **{"shuffle": True} if how == "shuffle" else {},
        )
        if how == "early":
            next(iter(loader))
        inner = OPTIMIZERS["sgd"]((stranger if how == "stranger" else model).parameters())
        driven = run.optimizer(inner, model)
        plateau = SCHEDULES["plateau"](driven) if how == "plateau" else None
        for _, x, y in loader:
            loss = squared_error(model, x, y)
            loss.backward()
            driven.step()
            if plateau is not None:
                plateau.step(loss.item())
            if how == "late":
                run.scheduler(SCHEDULES["exponential"](inner))
            if how == "twice":
                driven.step()
            if how == "schedule":
                inner.param_groups[0]["lr"] *= 0.9
        if how == "again":
            list(loader)
    return {}


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))

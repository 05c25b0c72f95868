"""What ranks do in the tests of strategies that step alone; see `scenarios`."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import Any

import paceline
from paceline.node import Gradient, Share, Work
from paceline.race import worker
from paceline.race.spec import RaceSpec
from paceline.run.run import Run
from paceline.workloads.synthetic import synthetic

Facts = dict[str, Any]


class Meetings:
    """This rank's model as it was when all met, and its path from round to round."""

    def __init__(self, run: Run) -> None:
        self._run, self._mean_model = run, run.node.mean_model
        self.before: list[list[float]] = []
        self.path: list[list[float]] = []
        self.rounds: list[int] = []
        run.after_round(lambda: self.path.append(run.node.parameters.tolist()))
        vars(run.node)["mean_model"] = self._look

    def _look(self) -> Work[Gradient]:
        self.before.append(self._run.node.parameters.tolist())
        self.rounds.append(self._run.node.rounds)
        return self._mean_model()


def train_meeting(
    strategy: str,
    samples: int = 61,
    epochs: int = 2,
    optimizer: str = "sgd",
    slow: dict[str, float] | None = None,
    save_after: dict[str, int] | None = None,
    resume: bool = False,
    scheduled: str | None = None,
) -> Facts:
    """An ordinary loop. `save_after`: ranks that save after so many micro-batches of their own, and go on; `resume`:
    from the newest checkpoint; `scheduled`: a scheduler is stepped after every micro-batch or every epoch."""
    from scenarios import OPTIMIZERS, SCHEDULES, Diary, Points, linear, squared_error  # only the zygote can find them

    model = linear()
    found: Facts = {}
    with paceline.Run(strategy) as run:
        loader = run.loader(Points(samples), micro_batch=4, epochs=epochs)
        driven = run.optimizer(OPTIMIZERS[optimizer](model.parameters()), model)
        scheduler: Any = SCHEDULES["exponential"](driven) if scheduled else None
        if resume:
            found["taken"] = str(run.resume())
        diary = Diary(run)
        meetings: Meetings | None = None
        epoch = 0
        for number, (indices, x, y) in enumerate(loader):
            if meetings is None:
                meetings = Meetings(run)
                found["start"] = run.node.parameters.tolist()
                found["start_applied"] = run.node.samples_applied
            if scheduled == "epoch" and loader.epoch > epoch:
                epoch = loader.epoch
                scheduler.step()
            if number == (save_after or {}).get(str(run.rank)):
                run.save()
            diary.given(loader, indices)
            driven.zero_grad()
            squared_error(model, x, y).backward()
            time.sleep((slow or {}).get(str(run.rank), 0.002))
            driven.step()
            if scheduled == "micro-batch":
                scheduler.step()
    if meetings is not None:
        found |= {"meetings": meetings.before, "path": meetings.path, "met_at": meetings.rounds}
    return diary.facts(**found)


def train_served(
    strategy: str,
    samples: int = 61,
    epochs: int = 2,
    save_after: dict[str, int] | None = None,
    resume: bool = False,
) -> Facts:
    """An ordinary loop with momentum, which servers keep: what it is at a rank's first step, and whenever all meet."""
    from scenarios import OPTIMIZERS, Diary, Points, linear, squared_error  # only the zygote can find them

    model = linear()
    found: Facts = {"when_met": []}
    with paceline.Run(strategy) as run:
        loader = run.loader(Points(samples), micro_batch=4, epochs=epochs)
        inner = OPTIMIZERS["momentum"](model.parameters())
        driven = run.optimizer(inner, model)
        if resume:
            found["taken"] = str(run.resume())
        diary = Diary(run)

        def momenta() -> list[list[float] | None]:
            states = [inner.state.get(parameter, {}) for parameter in model.parameters()]
            return [state["momentum_buffer"].flatten().tolist() if state else None for state in states]

        def watch() -> None:
            if "mean_model" not in vars(run.node):
                mean_model = run.node.mean_model

                def look(share: Share) -> Work[Gradient]:
                    found["when_met"].append({"momenta": momenta(), "parameters": run.node.parameters.tolist()})
                    return mean_model(share)

                vars(run.node)["mean_model"] = look

        run.after_round(watch)
        inner.register_step_pre_hook(lambda *_: found.setdefault("first", momenta()) and None)
        for number, (indices, x, y) in enumerate(loader):
            if number == (save_after or {}).get(str(run.rank)):
                run.save()
            diary.given(loader, indices)
            driven.zero_grad()
            squared_error(model, x, y).backward()
            time.sleep(0.004)  # long enough that everybody has some data
            driven.step()
    return diary.facts(**found)


def race(strategy: str, seconds: float) -> Facts:
    """One rank of a race, as the race starts it."""
    spec = RaceSpec(strategies=(strategy,), speeds=(1.0, 0.6, 0.3), workload="synthetic", seconds=seconds)
    workload = synthetic(256, 4, 3)
    worker.train(spec, workload, strategy, partial(worker.emulated, spec, workload, 0.004))
    return {"seen": []}


def train_until_shot(strategy: str, victim: int) -> Facts:
    """One rank kills itself: a worker in its fifth micro-batch, a server after its fifth step."""
    from scenarios import OPTIMIZERS, Points, linear, squared_error  # only the zygote can find them

    model = linear()
    with paceline.Run(strategy) as run:
        loader = run.loader(Points(61), micro_batch=4, epochs=3)
        driven = run.optimizer(OPTIMIZERS["momentum"](model.parameters()), model)
        steps = 0

        def shoot() -> None:
            nonlocal steps
            steps += 1
            if run.rank == victim and steps == 5:
                os.kill(os.getpid(), signal.SIGKILL)

        if victim >= run.surroundings.workers:
            run.after_round(shoot)
        for _, x, y in loader:
            driven.zero_grad()
            squared_error(model, x, y).backward()
            time.sleep(0.005)
            if not run.serves and victim == run.rank:
                shoot()
            driven.step()
        return {"final": run.node.parameters.tolist()}

"""What ranks do in the tests of strategies that step alone; see `scenarios`."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

import paceline
from paceline.backends.collectives import Collectives
from paceline.backends.mailbox import Mailbox
from paceline.backends.processes import ProcessNode
from paceline.node import Gradient, Share, Work
from paceline.race import worker
from paceline.race.spec import RaceSpec
from paceline.run.rank import Rank
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


def train_pushing_wrong(strategy: str, how: str) -> Facts:
    """An ordinary loop in which the third push of rank 1 goes wrong on its way: `short` or `nan`."""
    from scenarios import train  # only the zygote can find them

    send = ProcessNode.send

    def instead(node: ProcessNode, to: int, kind: str, *tensors: Tensor) -> None:
        if node.rank == 1 and kind.startswith("push 3 "):
            tensors = (tensors[0][:-1] if how == "short" else tensors[0] * torch.nan,)
        send(node, to, kind, *tensors)

    ProcessNode.send = instead  # type: ignore[method-assign]  # in this process, which ends after it
    return train(strategy, slow={"0": 0.004, "1": 0.004})  # long enough that both have some data


def train_beside_a_stranger(strategy: str) -> Facts:
    """An ordinary loop. Before its third push rank 1 pushes as somebody who knows the secret of an old run."""
    from scenarios import train  # only the zygote can find them

    send = ProcessNode.send

    def after_a_stranger(node: ProcessNode, to: int, kind: str, *tensors: Tensor) -> None:
        if node.rank == 1 and kind.startswith("push 3 "):
            turned_away = threading.Event()
            stranger = Mailbox(node.rank, b"the secret of an old run", on_broken=lambda *_: turned_away.set())
            stranger.connect(node._mailbox._roster)
            stranger.send(to, kind, [tensors[0] * torch.nan])
            assert turned_away.wait(60)
            stranger.close()
        send(node, to, kind, *tensors)

    ProcessNode.send = after_a_stranger  # type: ignore[method-assign]  # in this process, which ends after it
    return train(strategy, slow={"0": 0.004, "1": 0.004})  # long enough that both have some data


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


def train_until_stuck(strategy: str, victim: int, where: str) -> Facts:
    """One rank is stuck in its fifth micro-batch, or in its data, and comes back when the others are through."""
    from scenarios import OPTIMIZERS, Points, linear, squared_error  # only the zygote can find them

    model = linear()
    with paceline.Run(strategy) as run:
        waits_for = [run.folder / f"over-{rank}" for rank in range(run.world_size) if rank != victim]

        def be_stuck() -> None:
            while not all(path.exists() for path in waits_for):
                time.sleep(0.01)

        class Endless(Points):
            def __getitem__(self, index: int) -> Any:
                if run.rank == victim and self.read == 16 and where == "data":
                    be_stuck()
                self.read += 1
                return super().__getitem__(index)

            read = 0

        loader = run.loader(Endless(61), micro_batch=4, epochs=3)
        driven = run.optimizer(OPTIMIZERS["momentum"](model.parameters()), model)
        for number, (_, x, y) in enumerate(loader):
            driven.zero_grad()
            squared_error(model, x, y).backward()
            if run.rank == victim and number == 4 and where == "loop":
                be_stuck()
            driven.step()
        final = run.node.parameters.tolist()
    (run.folder / f"over-{run.rank}").touch()
    return {"final": final}


def train_until_told(strategy: str, told: list[int], handler: bool = False, by_hand: bool = False) -> Facts:
    """Some ranks get SIGTERM in their fifth micro-batch, or tell themselves to leave."""
    from scenarios import OPTIMIZERS, Diary, Frail, Points, linear, squared_error  # only the zygote can find them

    model = linear()
    heard: list[int] = []
    if handler:
        signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    with paceline.Run(Frail() if strategy == "frail" else strategy) as run:
        loader = run.loader(Points(61), micro_batch=4, epochs=3)
        driven = run.optimizer(OPTIMIZERS["momentum"](model.parameters()), model)
        diary = Diary(run)
        for number, (indices, x, y) in enumerate(loader):
            diary.given(loader, indices)
            driven.zero_grad()
            squared_error(model, x, y).backward()
            time.sleep(0.005)
            if number == 4 and run.rank in told:
                run.leave() if by_hand else os.kill(os.getpid(), signal.SIGTERM)
            driven.step()
        left = run.left
    before = signal.getsignal(signal.SIGTERM)
    return diary.facts(left=left, heard=heard, restored=before == signal.SIG_DFL or handler)


KILLED_AT = {
    "waiting": (Rank, "enter"),  # a newcomer has said hello
    "entering": (Collectives, "enter"),  # a newcomer has the state of the run, and the others wait for it
    "giving": (Rank, "give_state"),  # newcomers are let in, and have nothing yet
}


def kill_once(run: Any, rank: int, moment: str) -> None:
    """The rank dies when it comes to this moment, the first time."""
    owner, name = KILLED_AT[moment]
    really, mark = getattr(owner, name), run.folder / f"killed-{moment}"

    def do(*arguments: Any) -> Any:
        if run.rank == rank and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return really(*arguments)

    setattr(owner, name, do)


def train_with_newcomers(
    strategy: str,
    victims: list[int],
    epochs: int = 20,
    killed: tuple[int, str] | None = None,
    further: int = 0,
    saves: bool = False,
) -> Facts:
    """Some ranks kill themselves in their fifth micro-batch; who takes their place stays to the end, or is killed once
    more in the middle of joining. So many `further` ones come. `saves`: rank 0 wants a checkpoint all the time."""
    from scenarios import OPTIMIZERS, Diary, Points, linear, squared_error  # only the zygote can find them

    model = linear()
    with paceline.Run(strategy) as run:
        loader = run.loader(Points(61), micro_batch=4, epochs=epochs)
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        driven = run.optimizer(optimizer, model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.999)
        diary = Diary(run)
        if killed:
            kill_once(run, *killed)
        for number, (indices, x, y) in enumerate(loader):
            diary.given(loader, indices)
            driven.zero_grad()
            squared_error(model, x, y).backward()
            control = run.surroundings.control
            missing = control.lost or len(control.roster) < run.world_size + further
            time.sleep(0.1 if missing else 0.004)  # the run must not be over before one comes
            if number == 4 and run.rank in victims and not run.surroundings.joins:
                os.kill(os.getpid(), signal.SIGKILL)
            if saves and run.rank == 0:
                run.save()
            driven.step()
            scheduler.step()
        states = [optimizer.state[each] for each in model.parameters()]  # none where servers make the steps
        momenta = [state["momentum_buffer"].flatten().tolist() for state in states if "momentum_buffer" in state]
    return diary.facts(momenta=momenta, rate=optimizer.param_groups[0]["lr"], joined=run.surroundings.joins)

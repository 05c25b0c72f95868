"""The user's door: an ordinary PyTorch loop, trained by a strategy together with the other ranks.

    with paceline.Run(strategy="abs-sgd") as run:
        loader = run.loader(train_set, micro_batch=32, epochs=5)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

It works alone, under torchrun and under `paceline run`; the script is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.backends.driver import Driver
from paceline.backends.processes import ProcessNode
from paceline.backends.replica import Replica
from paceline.backends.rounds import RoundNews, extra_numbers
from paceline.callbacks import Callback
from paceline.errors import PacelineError, print_as_paragraph
from paceline.launch.roles import Servers
from paceline.launch.surroundings import Surroundings
from paceline.node import Share
from paceline.run.checkpoint import Checkpoint
from paceline.run.giving_up import Abortable
from paceline.run.joining import Entrance
from paceline.run.leaving import IDLE_SLICE, Notice, Part
from paceline.run.loader import Loader, balanced_by
from paceline.run.optimizer import LearningRates, RunOptimizer
from paceline.run.rank import Rank
from paceline.run.saving import Saver
from paceline.run.state import model_state, to_resume
from paceline.strategies import Strategy, create


class Run:
    """One rank's part in a run.

    Args:
        strategy: a name with options (`"abs-sgd:delay_cure=none"`) or a `Strategy`.
        name: the run's folder is `out/name/TIME`; under `paceline run` its own options --name and --out decide.
        out: where runs are kept.
        seed: of the shuffled order of the samples.
        join_timeout: seconds to wait for the other ranks at the start.
        servers: ranks that serve, for strategies with servers: how many, the last ones; or which, `"0,4"`; or `"host"`,
            the last one of every host. `paceline run --servers` counts more.
        callbacks: told on rank 0 how it goes, beside `metrics.jsonl`; see `paceline.callbacks`.
    """

    def __init__(
        self,
        strategy: str | Strategy = "abs-sgd",
        *,
        name: str = "run",
        out: str | Path = "runs",
        seed: int = 0,
        join_timeout: float = 120.0,
        servers: Servers = 0,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.strategy = create(strategy) if isinstance(strategy, str) else strategy
        self._name, self._out, self._seed, self._join_timeout = name, Path(out), seed, join_timeout
        self._servers, self._callbacks = servers, callbacks
        self._surroundings: Surroundings | None = None
        self._replica: Replica | None = None
        self._rates: LearningRates | None = None
        self._loader: Loader | None = None
        self._rank: Rank | None = None
        self._driver: Driver | None = None
        self._abortable: Abortable | None = None
        self._resumed, self._resumes, self._notice = Checkpoint(), 0, Notice()
        self.left = False
        """Whether this rank was told to leave, and has: its loop ended before the data did."""
        self._after_round: list[Callable[[], None]] = []
        self._mark: list[tuple[Tensor, int]] = []

    # ---- where this rank is

    @property
    def surroundings(self) -> Surroundings:
        if self._surroundings is None:
            raise PacelineError("The run has not begun.", remedy="Use it as `with paceline.Run(...) as run:`.")
        return self._surroundings

    @property
    def rank(self) -> int:
        return self.surroundings.rank

    @property
    def world_size(self) -> int:
        return self.surroundings.world_size

    @property
    def serves(self) -> bool:
        """Whether this rank is a server: its loop gets no micro-batches."""
        return self.surroundings.serves

    @property
    def share_of_model(self) -> Share:
        """What this rank brings to the model of the run, where that is a mean."""
        return self._share_of(self.rank)

    def _share_of(self, rank: int) -> Share:
        assert self._replica is not None
        place = self.surroundings
        return self.strategy.share_of_model(rank, place.workers, place.servers, self._replica.sizes)

    @property
    def folder(self) -> Path:
        """The run's folder: events, logs, checkpoints. A launcher that started this rank has chosen it."""
        return self.surroundings.folder

    @property
    def node(self) -> ProcessNode:
        """What the strategy sees: rounds, samples applied, parameters."""
        if self._rank is None:
            raise PacelineError("Training has not begun.", remedy="The loader begins it, at its first micro-batch.")
        return self._rank.node

    def __enter__(self) -> Run:
        print_as_paragraph()
        folder, check = self._out / self._name, self.strategy.check_servers
        self._surroundings = Surroundings.find(folder, self._join_timeout, self._servers, check)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self._driver is not None and not self.left:
                self.left = self._part.end(self._notice.given)
        except BaseException as late:
            error = late
            raise
        finally:
            self._notice.stop_listening()
            if self._driver is not None and error is not None:
                self._driver.stop()
                self._saver.close()
            if self._replica is not None:
                self._replica.return_from_looking_ahead()
            if self._rank is not None:
                self._rank.close("" if error is None else f"{type(error).__name__}: {error}")
            if self._rates is not None:
                self._rates.give_back()
            if self._abortable is not None:
                self._abortable.remove()
            self.surroundings.close()

    # ---- what the user makes

    def loader(
        self,
        dataset: Dataset[Any],
        *,
        micro_batch: int,
        epochs: int | None = None,
        seconds: float | None = None,
        cost: ArrayLike | None = None,
        balance: str = "samples",
        **dataloader_options: Any,
    ) -> Loader:
        """Micro-batches of the dataset for this rank; over all ranks every sample exactly once an epoch.

        Args:
            dataset: map-style.
            micro_batch: samples in a micro-batch, the smallest piece of work.
            epochs, seconds: how often every sample is used; take no new micro-batch after so long. Either or both.
            cost: of each sample, in any unit: micro-batches then cost about the same, of at most `micro_batch` samples.
            balance: `nonzeros` is the cost of sparse rows by length: the dataset's `nonzeros`, and its `row_cost`.
            dataloader_options: passed on to `torch.utils.data.DataLoader`: num_workers, collate_fn, pin_memory, …
        """
        if self._loader is not None:
            raise PacelineError("A run has one loader.", remedy="Make a second Run for a second training.")
        cost = balanced_by(balance, cost, dataset)
        self._loader = Loader(dataset, micro_batch, epochs, seconds, self._seed, cost, dataloader_options)
        self._connect_loader()
        return self._loader

    def optimizer(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, *, clip_norm: float | None = None
    ) -> RunOptimizer:
        """The optimizer to use in the loop.

        Args:
            optimizer: any `torch.optim` optimizer over the model's parameters.
            model: on the device where it will be trained.
            clip_norm: clip the norm of a round's mean gradient. (Clipping in the loop would clip each worker's part.)
        """
        if self._replica is not None:
            raise PacelineError("A run has one optimizer.", remedy="Put all parameters into its parameter groups.")
        self._replica = Replica(model, optimizer, clip_norm, extra_numbers(self.world_size))
        place = self.surroundings
        self._rates = LearningRates(optimizer, place.workers, place.control, self._say_called)
        self._connect_loader()
        return RunOptimizer(optimizer, self._replica, self._give_gradient, self._gradients_zeroed)

    def scheduler(self, scheduler: Any, *, every: int | str = "epoch") -> None:
        """Step a scheduler once for every so many samples, over all ranks. Needed only for a period of your own.

        A torch scheduler of the optimizer, made before the first micro-batch, needs no word: its `step()` in the loop
        stands for a step (or, if the loop calls it once an epoch, for an epoch) over all ranks, and the run makes it
        after the same round everywhere. With `run.scheduler` the loop may call `step()` or not.

        Args:
            scheduler: any whose `step()` needs no metric, made for the torch optimizer or for `run.optimizer(...)`.
            every: `"epoch"`, or a number of samples.
        """
        rates, loader = self._rates, self._loader
        if rates is None or loader is None or self._driver is not None:
            raise PacelineError(
                "run.scheduler(...) comes after run.loader(...) and run.optimizer(...), before the first micro-batch."
            )
        rates.drive(scheduler, loader.samples if every == "epoch" else every)

    def abortable(self) -> AbstractContextManager[None]:
        """Around the forward and the backward pass: a strategy that gives micro-batches up (`non-blocking`) may then do
        so between two layers, not only when they are through. `optimizer.step()` follows outside, as ever."""
        if self.node.until is None:
            return nullcontext()
        if self._abortable is None:
            self._abortable = Abortable(self.node.replica.model, lambda: self.node.over)
        return self._abortable.micro_batch()

    def heed(self) -> None:
        """Leave `abortable()` if the micro-batch is given up: for a layer that takes long by itself."""
        if self._abortable is not None:
            self._abortable.look()

    def leave(self) -> None:
        """This rank leaves the run when its micro-batch is done: it hands in its work, gives back its leases, and its
        loop ends; the others go on without it. So it does at a SIGTERM, which a cluster sends before it takes a machine
        away. Raises if the run could not go on."""
        self._notice.give(self.strategy, self.surroundings)

    def after_round(self, callback: Callable[[], None]) -> None:
        """Call this after every round, when all ranks hold the same parameters."""
        self._after_round.append(callback)

    def report(self, metric: float, loss: float, *, t: float | None = None, samples: int | None = None) -> None:
        """Put a held-out metric and loss into the run's record.

        Args:
            metric, loss: of the model at `t`.
            t: seconds since the run began; now by default.
            samples: applied until then over all ranks; those until now by default.
        """
        assert self._rank is not None
        node = self.node
        when, seen = (node.now() if t is None else t), (node.samples_applied if samples is None else samples)
        self._rank.recorder.write("metric", self.rank, when, samples=seen, metric=metric, loss=loss)

    # ---- checkpoints

    def save(self) -> None:
        """Write a checkpoint at the end of the present round, for all ranks. Any rank may ask, or all of them.

        Training goes on while it is written; after the loop it is on the disk when this returns."""
        if self.left:
            self.node.tell("A rank that has left the run saves nothing.")
        elif self._rank is not None and self._driver is not None and self._driver.finished:
            self._saver.write()
            self._saver.wait()
        else:
            self.node.save_wanted = True

    def resume(self, path: str | Path | None = None, *, weights_only: bool = False) -> Path | None:
        """Go on from the newest whole checkpoint. Call it on every rank, after loader and optimizer are made.

        Args:
            path: a checkpoint, a run's folder, or None for the last run of this name.
            weights_only: take the model alone and begin anew with it, on other data or with another optimizer.

        Returns:
            The checkpoint taken, or None if there is none: then the run starts from the beginning.
        """
        if self._replica is None or self._loader is None or self._driver is not None:
            raise PacelineError(
                "run.resume() comes after run.loader(...) and run.optimizer(...) and before the first micro-batch."
            )
        first = self.rank == 0 and not self.surroundings.joins
        found = to_resume(path, self.folder, self._replica, None if weights_only else self._data()) if first else None
        self._resumes += 1  # of each, all ranks hear; a path may be another one on each host
        taken = self.surroundings.tell_all(f"resumed {self._resumes}", str(found[0]) if found else "")
        self._resumed = found[1] if found else self._resumed
        return Path(taken) if taken else None

    def model_state(self) -> dict[str, Tensor]:
        """The model's state on the CPU, with running statistics averaged over the ranks once training is over."""
        if self._replica is None:
            raise PacelineError("There is no model yet.", remedy="Call run.optimizer(optimizer, model) first.")
        return model_state(self._replica)

    # ---- the loop, seen from inside

    def _connect_loader(self) -> None:
        if self._loader is not None and self._replica is not None:
            self._loader.iterate = self._micro_batches

    def _micro_batches(self) -> Iterator[Any]:
        if self._driver is not None:
            raise PacelineError(
                "The loader was iterated a second time.",
                cause="It goes through all epochs by itself, because fast ranks enter the next one earlier.",
                remedy="Use one `for` over the loader, with epochs=...; loader.epoch tells the present one.",
            )
        driver, loader, node = self._begin()
        while not driver.finished:
            if self._notice.given and not loader.has_pending:
                self.left = self._part.leave()
                break
            if not loader.has_pending:
                loader.fetched_at = node.now()
            batch = loader.next_batch()
            if batch is None:
                self._discard(loader.take_pending())  # no step will follow: the next gradients are not the loop's
                node.replica.drop_gradients()
                node.out_of_data = True
                driver.give_nothing(IDLE_SLICE)
                continue
            node.out_of_data = False
            self._mark = node.replica.gradients_mark()
            yield batch
        if not self.left:
            self._part.rest()

    def _begin(self) -> tuple[Driver, Loader, ProcessNode]:
        assert self._replica is not None and self._loader is not None and self._rates is not None
        schedulers, describes = self._rates.find(self._loader), (self.strategy.name, self._data())
        self._rank = Rank(self.surroundings, self._replica, self._loader, self.strategy, schedulers, self._callbacks)
        self._saver = Saver(self._rank, self._rates, self._share_of, describes, self.folder / "checkpoints")
        self._entrance = Entrance(self._rank, self._rates, describes)
        self._entrance.enter(self._resumed, self.surroundings.joins)
        self._rank.node.after_round = self._round_over
        self._driver = Driver(self.strategy, self._rank.node)
        self._part = Part(self._driver, self._rank, self._loader, self._saver)
        self._notice.listen(self.strategy, self.surroundings)
        self._driver.start()
        return self._driver, self._loader, self._rank.node

    def _give_gradient(self) -> None:
        samples = self._loader.take_pending() if self._loader is not None else []
        if self._driver is None or self._loader is None or not samples:
            raise PacelineError(
                "optimizer.step() was called without a new micro-batch from run.loader(...).",
                cause="A gradient counts with the samples that it is over.",
                remedy="Call step() once for every micro-batch of the loader.",
            )
        assert self._rates is not None
        self._rates.before_step(len(samples))
        count = sum(len(positions) for positions in samples)
        gradient = self.node.computed(self._loader.fetched_at, count, samples)
        if not gradient.count:  # given up
            self._loader.repeat()
        self._driver.give(gradient)

    def _say_called(self) -> None:
        self.node.scheduler_called = True

    def _gradients_zeroed(self) -> None:
        """`zero_grad()` throws away what was not handed in: all of it, or, when the newest micro-batch has not been
        through its backward pass yet, all but that. GradScaler skips steps so, and so may the user."""
        if self._loader is not None and self._loader.has_pending:
            after_backward = self.node.replica.written_since(self._mark)
            self._discard(self._loader.take_pending(keep_newest=not after_backward))

    def _discard(self, unused: list[range]) -> None:
        if unused and self._loader is not None:
            self.node.computed_in_vain(self._loader.fetched_at, unused, "the loop made no step with it")
            self._loader.fetched_at = self.node.now()

    def _round_over(self, news: RoundNews) -> None:
        assert self._rates is not None
        if news.scheduler_called and news.number is not None:
            self._rates.decide(news.number, news.before)
        self._rates.advance(news.before, news.after)
        if news.saving:
            self._saver.prepare()
            self._saver.write()
        self._saver.look()
        if news.joining and not self.node.finished:  # else nobody would take part with a newcomer
            self._entrance.admit()
        for callback in self._after_round:
            callback()

    def _data(self) -> dict[str, int]:
        assert self._loader is not None
        return {"samples": self._loader.samples, "seed": self._loader.seed}

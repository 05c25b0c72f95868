"""What a workload is: data, a model and how to judge it. The race, the tests and the examples all train these."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812  (the name that every PyTorch user knows)
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.errors import no_such
from paceline.workloads import OPTIMIZERS, model_name

Batch = tuple[Any, Any]
"""Inputs and targets: two tensors, or whatever has a length and can be sent `to` a device."""


class Samples(Dataset[Batch]):
    """A map-style dataset over two tensors that are ready for the model, so that fetching costs next to nothing. What
    can be indexed as a tensor can may take their place.

    A slice or a tensor of indices gives a batch at once, the same as a `DataLoader` makes of single samples.
    `__getitems__` follows PyTorch's contract (a list of samples, as a `DataLoader` wants it) with one indexing
    operation for the whole list.
    """

    collate: Callable[[Any], Batch] | None = None
    """What a `DataLoader` joins samples with; None for torch's own way."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int | slice | Tensor) -> Batch:
        return self.x[index], self.y[index]

    def __getitems__(self, indices: Sequence[int]) -> list[Batch]:
        chosen = torch.as_tensor(indices)
        return list(zip(self.x[chosen].unbind(), self.y[chosen].unbind(), strict=True))


@dataclass(frozen=True, kw_only=True)
class Workload(ABC):
    """A task: samples, a model, and in a subclass how it is judged. A subclass says three things:

    - `metric_name`: what is told of the held-out part. Larger is better.
    - `loss`: what is minimised, a **mean over the samples** of a batch. A strategy adds up gradients of micro-batches
      of any size, each times its count, and divides by the count of all: only of means over samples is that the mean.
    - `judge`: the metric and the loss of a batch, added up over its samples, for `evaluate`.

    Args:
        name: as the command line calls it.
        train: the samples to learn from.
        test: the held-out part.
        model: makes a new model.
        micro_batch: samples in the smallest piece of work.
        target: held-out metric that counts as reached in `time to target`.
        lr, momentum: of SGD, with Nesterov's momentum too. The rates leave room for a delay of one round, which with
            momentum is stable only at far smaller ones than synchronous training.
        adamw_lr: of AdamW, whose steps do not grow with the gradients: a rate for SGD says nothing about it.
    """

    metric_name: ClassVar[str]
    evaluation_batch: ClassVar[int] = 2048
    """Large enough to be fast, small enough that the activations of a convolution take little memory."""

    name: str
    train: Samples
    test: Samples
    model: Callable[[], nn.Module]
    micro_batch: int
    target: float
    lr: float
    momentum: float = 0.9
    adamw_lr: float = 1e-3  # torch's own default

    def build_model(self, seed: int) -> nn.Module:
        """A model whose first parameters depend on the seed alone. The global random state stays as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # not torch.manual_seed: that would seed GPUs too, for good
            return self.model()

    def build_optimizer(
        self,
        model: nn.Module,
        *,
        optimizer: str | None = None,
        lr: float | None = None,
    ) -> torch.optim.Optimizer:
        """The optimizer of a training.

        Args:
            model: that it moves.
            optimizer: `sgd` (the default), `nesterov` (SGD with Nesterov's momentum), `adamw`, or `plain-sgd` without
                momentum.
            lr: learning rate; what the workload knows for this optimizer by default.
        """
        kind = OPTIMIZERS[0] if optimizer is None else optimizer
        rate = self.learning_rate(kind) if lr is None else lr
        if kind == "adamw":  # β₁ plays the part of momentum; β₂ is the usual one
            return torch.optim.AdamW(model.parameters(), lr=rate, betas=(self.momentum, 0.999))
        momentum = 0.0 if kind == "plain-sgd" else self.momentum
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum, nesterov=kind == "nesterov")

    def learning_rate(self, optimizer: str) -> float:
        """What the workload trains with when no other rate is asked for."""
        if optimizer not in OPTIMIZERS:
            raise no_such("optimizer", optimizer, OPTIMIZERS)
        return self.adamw_lr if optimizer == "adamw" else self.lr

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean over the samples of the batch of what is to become small."""

    @abstractmethod
    def judge(self, model: nn.Module, batch: Batch) -> tuple[float, float]:
        """The metric and the loss of the batch, both added up over its samples."""

    @torch.no_grad()
    def evaluate(self, model: nn.Module, samples: Samples | None = None) -> tuple[float, float]:
        """Mean metric and mean loss. The model is left in the mode in which it came.

        Args:
            model: to judge.
            samples: to judge it by; the held-out part by default.
        """
        samples = self.test if samples is None else samples
        device = next(model.parameters()).device
        was_training = model.training
        model.eval()
        metric, loss = 0.0, 0.0
        for first in range(0, len(samples), self.evaluation_batch):
            x, y = samples[first : first + self.evaluation_batch]
            of_batch = self.judge(model, (x.to(device), y.to(device)))
            metric, loss = metric + of_batch[0], loss + of_batch[1]
        model.train(was_training)
        return metric / len(samples), loss / len(samples)


class Classification(Workload):
    """One class of several for each sample: cross-entropy, and the share of samples whose class is found."""

    metric_name = "accuracy"

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy of the batch."""
        x, y = batch
        return F.cross_entropy(model(x), y)

    def judge(self, model: nn.Module, batch: Batch) -> tuple[float, float]:
        x, y = batch
        logits = model(x)
        return float((logits.argmax(1) == y).sum()), float(F.cross_entropy(logits, y, reduction="sum"))


def data_folders(data: Path | None, name: str) -> list[Path]:
    """Where the files of a workload may lie: in the folder that the user gave, else in the environment's PACELINE_DATA,
    or in a subfolder of this name; none if neither is given."""
    given = data or (Path(os.environ["PACELINE_DATA"]) if os.environ.get("PACELINE_DATA") else None)
    return [given, given / name] if given else []


def choose_model(
    workload: str, name: str | None, models: dict[str, Callable[[], nn.Module]]
) -> Callable[[], nn.Module]:
    """The model of this name, or the workload's usual one when none was asked for."""
    return models[model_name(workload, name)]

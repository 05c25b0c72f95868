"""What a workload is: data, a model and how to judge it. The race, the tests and the examples all train these."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812  (the name that every PyTorch user knows)
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.errors import no_such
from paceline.workloads import OPTIMIZERS, model_name

EVALUATION_BATCH = 2048
"""Large enough to be fast, small enough that the activations of a convolution take little memory."""


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """A map-style dataset over two tensors that are ready for the model, so that fetching costs next to nothing.

    `__getitems__` follows PyTorch's contract (a list of samples, as a `DataLoader` wants it) with one indexing
    operation for the whole list.
    """

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        chosen = torch.as_tensor(indices)
        return list(zip(self.x[chosen].unbind(), self.y[chosen].unbind(), strict=True))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A classification task.

    Args:
        name: as the command line calls it.
        train: the samples to learn from.
        test_x, test_y: the held-out part.
        model: makes a new model.
        micro_batch: samples in the smallest piece of work.
        target: held-out accuracy that counts as reached in `time to target`.
        lr, momentum: of SGD, with Nesterov's momentum too. The rates leave room for a delay of one round, which with
            momentum is stable only at far smaller ones than synchronous training.
        adamw_lr: of AdamW, whose steps do not grow with the gradients: a rate for SGD says nothing about it.
    """

    name: str
    train: Samples
    test_x: Tensor
    test_y: Tensor
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
        momentum: float | None = None,
    ) -> torch.optim.Optimizer:
        """The optimizer of a training.

        Args:
            model: that it moves.
            optimizer: `sgd` (the default), `nesterov` (SGD with Nesterov's momentum) or `adamw`.
            lr: learning rate; what the workload knows for this optimizer by default.
            momentum: of AdamW it is β₁, which plays the same part; the workload's by default.
        """
        kind = OPTIMIZERS[0] if optimizer is None else optimizer
        rate = self.learning_rate(kind) if lr is None else lr
        momentum = self.momentum if momentum is None else momentum
        if kind == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=rate, betas=(momentum, 0.999))  # β₂: the usual one
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum, nesterov=kind == "nesterov")

    def learning_rate(self, optimizer: str) -> float:
        """What the workload trains with when no other rate is asked for."""
        if optimizer not in OPTIMIZERS:
            raise no_such("optimizer", optimizer, OPTIMIZERS)
        return self.adamw_lr if optimizer == "adamw" else self.lr

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy of the batch."""
        x, y = batch
        return F.cross_entropy(model(x), y)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> tuple[float, float]:
        """Accuracy and mean loss on the held-out part. The model is left in the mode in which it came."""
        device = next(model.parameters()).device
        was_training = model.training
        model.eval()
        right, loss = 0, 0.0
        for part in range(0, len(self.test_y), EVALUATION_BATCH):
            chosen = slice(part, part + EVALUATION_BATCH)
            logits, labels = model(self.test_x[chosen].to(device)), self.test_y[chosen].to(device)
            right += int((logits.argmax(1) == labels).sum())
            loss += float(F.cross_entropy(logits, labels, reduction="sum"))
        model.train(was_training)
        return right / len(self.test_y), loss / len(self.test_y)


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

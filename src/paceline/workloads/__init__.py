"""Models and data to race, test and show with.

The names are known without importing torch, because the command line's help must answer at once.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import no_such

if TYPE_CHECKING:
    from paceline.workloads.workload import Workload

MODELS = {
    "cifar-10": ("lenet-5", "resnet-18", "vgg-19"),
    "digits": ("mlp",),
    "fashion-mnist": ("lenet-5", "mlp", "resnet-18", "vgg-19"),
    "multi30k": ("seq2seq",),
    "synthetic": ("mlp",),
}
"""What each workload can train; its usual model first."""
NAMES = tuple(MODELS)
OPTIMIZERS = ("sgd", "nesterov", "adamw")
"""What every workload knows a learning rate for; the usual one first."""


def load(name: str, data: Path | None = None, model: str | None = None) -> Workload:
    """The workload of this name.

    Args:
        name: one of `NAMES`.
        data: folder with the data's files, for workloads that are not bundled.
        model: one of the workload's models; its usual one by default.
    """
    from paceline.workloads.workload import Workload

    model = model_name(name, model)
    module = importlib.import_module(f"paceline.workloads.{name.replace('-', '_')}")
    workload = module.load(data, model)
    assert isinstance(workload, Workload)
    return workload


def model_name(workload: str, model: str | None = None) -> str:
    """The name of the model that the workload trains when it is asked for this one; its usual one for None.

    >>> model_name("fashion-mnist")
    'lenet-5'
    """
    if workload not in NAMES:
        raise no_such("workload", workload, NAMES)
    models = MODELS[workload]
    if model is not None and model not in models:
        raise no_such(f"model for the workload {workload} called", model, models)
    return models[0] if model is None else model

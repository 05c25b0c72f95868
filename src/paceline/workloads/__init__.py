"""Models and data to race, test and show with.

The names are known without importing torch, because the command line's help must answer at once.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import no_such
from paceline.options import read_options, split_name

if TYPE_CHECKING:
    from paceline.workloads.workload import Workload

MODELS = {
    "cifar-10": ("lenet-5", "resnet-18", "vgg-19"),
    "digits": ("mlp",),
    "fashion-mnist": ("lenet-5", "mlp", "resnet-18", "vgg-19"),
    "multi30k": ("seq2seq",),
    "synthetic": ("mlp",),
    "xmc": ("sparse-mlp",),
    "xmc-generated": ("sparse-mlp",),
}
"""What each workload can train; its usual model first."""
NAMES = tuple(MODELS)
OPTIMIZERS = ("sgd", "nesterov", "adamw", "plain-sgd")
"""What every workload knows a learning rate for; the usual one first."""


def load(text: str, data: Path | None = None, model: str | None = None) -> Workload:
    """The workload of this name.

    Args:
        text: one of `NAMES` and, behind colons, its options: the keyword arguments of its module's `load`.
        data: folder with the data's files, for workloads that are not bundled.
        model: one of the workload's models; its usual one by default.
    """
    from paceline.workloads.workload import Workload

    name, settings = split_name(text)
    model = model_name(text, model)
    module = importlib.import_module(f"paceline.workloads.{name.replace('-', '_')}")
    parameters = inspect.signature(module.load).parameters.values()
    known = {each.name: each.default for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}
    workload = module.load(data, model, **read_options(settings, known, "workload", name))
    assert isinstance(workload, Workload)
    return workload


def model_name(workload: str, model: str | None = None) -> str:
    """The name of the model that the workload trains when it is asked for this one; its usual one for None.

    >>> model_name("fashion-mnist")
    'lenet-5'
    """
    name, _ = split_name(workload)
    if name not in NAMES:
        raise no_such("workload", name, NAMES)
    models = MODELS[name]
    if model is not None and model not in models:
        raise no_such(f"model for the workload {name} called", model, models)
    return models[0] if model is None else model

"""CIFAR-10 from one npz file: coloured pictures, harder than Fashion-MNIST's. Nothing is downloaded."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from paceline.errors import PacelineError
from paceline.workloads.models import LeNet5, ResNet18
from paceline.workloads.workload import Classification, Samples, Workload, choose_model, data_folders

FILE = "cifar10_10k_2k.npz"
CHANNELS, SIZE, CLASSES = 3, 32, 10
MEAN, DEVIATION = (0.494, 0.483, 0.447), (0.248, 0.245, 0.263)
"""Of the training pixels: red, green, blue."""
MODELS: dict[str, Callable[[], nn.Module]] = {
    "lenet-5": partial(LeNet5, channels=CHANNELS, size=SIZE),
    # As for Fashion-MNIST: an eighth of the paper's width, and images halved at once.
    "resnet-18": partial(ResNet18, width=8, channels=CHANNELS, stem_stride=2),
}
FIELDS = (
    f"x_train and x_test, unsigned bytes of (images, {CHANNELS}, {SIZE}, {SIZE}), and y_train and y_test, "
    f"their labels from 0 to {CLASSES - 1}"
)


def load(data: Path | None = None, model: str | None = None) -> Workload:
    """Pictures of animals and vehicles, 3×32×32, in ten classes; a part of the whole set, 10,000 to learn from and
    2,000 held out, or as many as the file holds.

    The file lies in the folder `data`, else in the environment's PACELINE_DATA; in its subfolder `cifar10` as well.
    """
    build = choose_model("cifar-10", model, MODELS)
    path = _path(data)
    arrays = _read(path)
    train, test = _samples(path, arrays, "train"), _samples(path, arrays, "test")
    return Classification(
        name="cifar-10",
        train=train,
        test=test,
        model=build,
        micro_batch=32,
        target=0.45,
        lr=0.01,
        adamw_lr=2e-3,
    )


def _path(data: Path | None) -> Path:
    places = data_folders(data, "cifar10")
    for place in places:
        if (place / FILE).is_file():
            return place / FILE
    raise PacelineError(
        f"The file of CIFAR-10, {FILE}, is not there.",
        where=" or ".join(map(str, places)),
        remedy="Give the folder that holds it with --data DIR or PACELINE_DATA. To make it, take the pictures from "
        f"https://www.cs.toronto.edu/~kriz/cifar.html and save with numpy.savez: {FIELDS}.",
    )


def _read(path: Path) -> dict[str, np.ndarray]:
    """The four arrays. Nothing in the file is unpickled: it may come from anywhere."""
    try:
        with path.open("rb") as stream:
            file = np.load(stream, allow_pickle=False)
            if isinstance(file, np.ndarray):
                raise ValueError("it is not an npz file")
            return {name: file[name] for name in ("x_train", "y_train", "x_test", "y_test")}
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise _bad_file(path, f"It cannot be read: {error}.") from error


def _samples(path: Path, arrays: dict[str, np.ndarray], part: str) -> Samples:
    images, labels = arrays[f"x_{part}"], arrays[f"y_{part}"]
    if images.dtype != np.uint8 or images.shape != (len(labels), CHANNELS, SIZE, SIZE) or labels.ndim != 1:
        raise _bad_file(
            path,
            f"Its {part} images are {images.dtype} of {images.shape}, its labels {labels.dtype} of {labels.shape}.",
        )
    if (
        not np.issubdtype(labels.dtype, np.integer)
        or not len(labels)
        or not 0 <= labels.min() <= labels.max() < CLASSES
    ):
        raise _bad_file(path, f"Its {part} labels are not whole numbers from 0 to {CLASSES - 1}, at least one.")
    mean, deviation = (torch.tensor(values).view(CHANNELS, 1, 1) for values in (MEAN, DEVIATION))
    x = torch.from_numpy(images).float().div_(255).sub_(mean).div_(deviation)
    return Samples(x, torch.from_numpy(labels.astype(np.int64)))


def _bad_file(path: Path, cause: str) -> PacelineError:
    return PacelineError(
        "The file of CIFAR-10 cannot be used.", where=str(path), cause=cause, remedy=f"It must hold {FIELDS}."
    )

"""Fashion-MNIST from its four idx files: a real convolutional workload. Nothing is downloaded."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from paceline.errors import PacelineError
from paceline.workloads.models import MLP, LeNet5, ResNet18
from paceline.workloads.workload import Classification, Samples, Workload, choose_model, data_folders

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts the files."""
IMAGE_MAGIC, LABEL_MAGIC = 0x803, 0x801
"""idx: two zero bytes, 8 for unsigned bytes, then the number of dimensions."""
MEAN, DEVIATION = 0.286, 0.353
"""Of the training pixels. Centred inputs let LeNet-5 learn at the same rate from the first step."""
MODELS: dict[str, Callable[[], nn.Module]] = {
    "lenet-5": LeNet5,
    "mlp": partial(MLP, (784, 256, 10)),
    # An eighth of the paper's width and images halved at once: one core still trains about 1,000 samples a second.
    "resnet-18": partial(ResNet18, width=8, stem_stride=2),
}


def load(data: Path | None = None, model: str | None = None) -> Workload:
    """60,000 pictures of clothes, 28×28, to learn from and 10,000 held out.

    The folder is `data`, else the environment's PACELINE_DATA, else where Debian's package puts the files; either of
    the first two may also hold them in a subfolder `fashion-mnist`.
    """
    build = choose_model("fashion-mnist", model, MODELS)
    folder = _folder(data)
    train, test = _samples(folder, "train"), _samples(folder, "t10k")
    return Classification(
        name="fashion-mnist",
        train=train,
        test=test,
        model=build,
        micro_batch=32,
        target=0.75,
        lr=0.01,
        adamw_lr=2e-3,
    )


def _folder(data: Path | None) -> Path:
    places = data_folders(data, "fashion-mnist") or [DEBIAN_FOLDER]
    for place in places:
        if any(place.glob("train-images-idx3-ubyte*")):
            return place
    raise PacelineError(
        "The files of Fashion-MNIST are not there.",
        where=" or ".join(map(str, places)),
        remedy="`apt-get install dataset-fashion-mnist` installs them; or give the folder that holds "
        "train-images-idx3-ubyte.gz and its three companions with --data DIR or PACELINE_DATA.",
    )


def _samples(folder: Path, part: str) -> Samples:
    images = _read_idx(folder / f"{part}-images-idx3-ubyte", IMAGE_MAGIC)
    labels = _read_idx(folder / f"{part}-labels-idx1-ubyte", LABEL_MAGIC)
    if len(images) != len(labels) or images.shape[1:] != (28, 28) or labels.max(initial=0) > 9:
        raise PacelineError(
            f"The {part} files are not Fashion-MNIST's.",
            where=str(folder),
            cause=f"They hold {len(images)} images of {images.shape[1]}×{images.shape[2]} and {len(labels)} labels.",
            remedy="Images are 28×28, one label from 0 to 9 for each; take all four files from the same source.",
        )
    x = (torch.from_numpy(images).float().div_(255).sub_(MEAN).div_(DEVIATION)).unsqueeze(1)
    return Samples(x, torch.from_numpy(labels).long())


def _read_idx(path: Path, magic: int) -> np.ndarray:
    """The array of an idx file, given without `.gz`; a compressed one is taken when the plain one is not there."""
    if not path.exists():
        path = path.with_name(path.name + ".gz")
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise _bad_file(path, f"It cannot be read: {error}.") from error
    dimensions = magic & 0xFF
    header = np.frombuffer(raw[: 4 * (1 + dimensions)], dtype=">u4") if len(raw) >= 4 * (1 + dimensions) else None
    if header is None or header[0] != magic:
        raise _bad_file(path, f"It does not begin with an idx header of {dimensions} dimensions.")
    shape = tuple(int(size) for size in header[1:])
    expected, found = int(np.prod(shape)), len(raw) - header.nbytes
    if expected != found:
        raise _bad_file(path, f"Its header speaks of {expected} bytes, but {found} follow: it is cut off or damaged.")
    return np.frombuffer(raw, dtype=np.uint8, offset=header.nbytes).reshape(shape).copy()  # a copy: torch wants to own


def _bad_file(path: Path, cause: str) -> PacelineError:
    return PacelineError(
        "A file of Fashion-MNIST cannot be used.", where=str(path), cause=cause, remedy="Get the file again."
    )

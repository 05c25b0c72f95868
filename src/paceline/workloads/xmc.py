"""Extreme multi-label classification from files: EURLex-4K, Delicious-200k, Amazon-670k and all others of the XMC
repository's text format. Nothing is downloaded."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from paceline.errors import PacelineError, no_such
from paceline.workloads.models import SparseMLP
from paceline.workloads.sparse_rows import Bags, Rows, SparseSamples
from paceline.workloads.sparse_store import stored
from paceline.workloads.workload import Batch, Samples, Workload, choose_model, data_folders
from paceline.workloads.xmc_text import Header, XmcFile

log = logging.getLogger("paceline")
SUFFIXES = ("", ".xz", ".gz")
SCALINGS = ("log1p-l2", "none")
TOP = (1, 3, 5)
MOST_LOGITS = 2**31
"""In one evaluation on held-out rows, and so how many rows: all of EURLex-4K's, 3,189 of Amazon-670k's 153,025."""
LOGITS_AT_ONCE = 2**23
ROW_COST, LABEL_COST = 20.0, 0.12
"""What a row costs besides its non-zeros, and each label in the softmax, in non-zeros: fitted to times of micro-batches
of EURLex-4K on a CPU, with 16 labels (20 a row) and with all 3,993 (483 and 486). `scripts/bench sparse spread` fits
the cost of a row on another machine."""


@dataclass(frozen=True, kw_only=True)
class Xmc(Workload):
    """Rows with several true labels out of very many. The metric is P@1: the share of rows whose likeliest label is
    true. A row without a label has no loss and counts as wrong; it is a sample like all others."""

    metric_name = "P@1"

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy of the softmax over all labels with a target of 1/k on each of a row's k true ones."""
        x, y = batch
        return summed_loss(model(x), y) / len(y)

    def judge(self, model: nn.Module, batch: Batch) -> tuple[float, float]:
        found = self._judged(model, batch)
        return float(found[0]), float(found[-1])

    def precisions(self, model: nn.Module, samples: Samples | None = None) -> dict[int, float]:
        """P@k for k = 1, 3 and 5, held-out or on other rows: of the k likeliest labels, the share that is true."""
        samples = self.test if samples is None else samples
        with torch.no_grad():
            found = self._judged(model, samples[:])
        return {k: float(hits) / (k * len(samples)) for k, hits in zip(TOP, found, strict=False)}

    def _judged(self, model: nn.Module, batch: Batch) -> Tensor:
        """Hits among the first 1, 3 and 5, and the loss, added up over the rows. A few rows at a time: the logits of
        two thousand rows over 670,000 labels would take five gigabytes."""
        x, y = batch
        total = torch.zeros(len(TOP) + 1, dtype=torch.float64)
        labels = model(x[:1]).shape[1]
        step = max(1, LOGITS_AT_ONCE // labels)
        for first in range(0, len(y), step):
            logits, true = model(x[first : first + step]), y[first : first + step]
            total[:-1] += hits(logits, true)
            total[-1] += float(summed_loss(logits, true))
        return total


def summed_loss(logits: Tensor, true: Bags) -> Tensor:
    """Σ over rows of log Σ_j exp(z_j) − (1/k) Σ_{true} z_j; 0 for a row without a label.

    >>> true = Bags(torch.tensor([0, 2, 2]), torch.tensor([0, 1]))
    >>> summed_loss(torch.zeros(2, 4), true)  # one row: log 4
    tensor(1.3863)
    """
    sizes, rows = true.sizes, true.rows
    wanted = (logits[rows, true.indices] / sizes[rows]).sum()
    return (logits.logsumexp(1) * (sizes > 0)).sum() - wanted


def hits(logits: Tensor, true: Bags) -> Tensor:
    """How many of the 1, 3 and 5 likeliest labels of all rows are true.

    >>> true = Bags(torch.tensor([0, 2]), torch.tensor([1, 2]))
    >>> hits(torch.tensor([[0.0, 3.0, 1.0, 2.0, -1.0]]), true).tolist()
    [1, 2, 2]
    """
    rows, labels = logits.shape
    best = logits.topk(min(TOP[-1], labels)).indices + labels * torch.arange(rows, device=logits.device).unsqueeze(1)
    right = torch.isin(best, true.indices + labels * true.rows)
    return torch.stack([right[:, :k].sum() for k in TOP])


def load(data: Path | None = None, model: str | None = None, *, scaling: str = "log1p-l2") -> Workload:
    """Rows from two files called `…train.txt` and `…test.txt`, also with `.xz` or `.gz` behind it.

    They lie in the folder `data`, else in the environment's PACELINE_DATA, or in its subfolder `xmc` or `eurlex-4k`.

    Args:
        data: the folder.
        model: `sparse-mlp`.
        scaling: `log1p-l2` takes log(1 + |value|) and makes every row's norm 1; `none` leaves the values as they are.
    """
    if scaling not in SCALINGS:
        raise no_such("scaling", scaling, SCALINGS)
    train, test = (XmcFile(path) for path in _files(data))
    if (train.header.features, train.header.labels) != (test.header.features, test.header.labels):
        raise PacelineError(
            "The two files are not of the same data: their headers speak of different numbers of features or labels.",
            where=f"{train.path} and {test.path}",
        )
    return workload("xmc", train.header, _samples(train, scaling), _samples(test, scaling), model)


def workload(name: str, header: Header, train: SparseSamples, test: SparseSamples, model: str | None) -> Xmc:
    """The task on these rows. Of very many held-out rows over very many labels, some: evenly spread."""
    train.row_cost = row_cost(header.labels)
    build = choose_model(name, model, {"sparse-mlp": partial(SparseMLP, header.features, header.labels)})
    step = -(-len(test) * header.labels // MOST_LOGITS)
    return Xmc(
        name=name,
        train=train,
        test=test if step == 1 else SparseSamples(*test[torch.arange(0, len(test), step)]),
        model=build,
        micro_batch=32,
        target=0.2,
        lr=0.3,
        adamw_lr=5e-3,
    )


def row_cost(labels: int) -> float:
    """What a row costs besides its non-zeros: with many labels most of a micro-batch is their softmax."""
    return ROW_COST + LABEL_COST * labels


def scaled(rows: Rows) -> Rows:
    """v ← sign(v)·log(1 + |v|), then every row divided by its norm."""
    values = np.copysign(np.log1p(np.abs(rows.values)), rows.values)
    places = np.repeat(np.arange(len(rows.sizes)), rows.sizes)
    norms = np.sqrt(np.bincount(places, values.astype(np.float64) ** 2, len(rows.sizes)))
    norms[norms == 0] = 1.0  # nothing but zeros stays that
    return replace(rows, values=(values / norms[places]).astype(np.float32))


def _samples(file: XmcFile, scaling: str) -> SparseSamples:
    def rows() -> Iterator[Rows]:
        without = 0
        for each in file.rows():
            without += int((each.label_counts == 0).sum())
            yield scaled(each) if scaling != "none" else each
        if without:
            log.warning("%s: %d of %d rows have no label; they count as samples.", file.path, without, file.header.rows)

    path, state = file.path.resolve(), file.path.stat()
    name = f"{path.name.partition('.')[0]}-{scaling}-{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    return stored(name, {"path": str(path), "bytes": state.st_size, "changed": state.st_mtime_ns}, rows)


def _files(data: Path | None) -> tuple[Path, Path]:
    places = list(dict.fromkeys(data_folders(data, "xmc") + data_folders(data, "eurlex-4k")))
    for place in places:
        found = [
            (train, test) for train in _called(place, "train") for test in _called(place, "test") if _alike(train, test)
        ]
        if len(found) == 1:
            return found[0]
        if found:
            raise PacelineError(
                f"There are several files to train with: {', '.join(train.name for train, _ in found)}.",
                where=str(place),
                remedy="Put each pair of files into a folder of its own, and give that.",
            )
    raise PacelineError(
        "There are no files of sparse data, …train.txt and …test.txt (or .txt.xz, .txt.gz).",
        where=" or ".join(map(str, places)),
        remedy="Give the folder that holds them with --data DIR or PACELINE_DATA. EURLex-4K, Delicious-200k, "
        "Amazon-670k: http://manikvarma.org/downloads/XC/XMLRepository.html. --workload xmc-generated needs none.",
    )


def _called(place: Path, part: str) -> list[Path]:
    return sorted(path for suffix in SUFFIXES for path in place.glob(f"*{part}.txt{suffix}") if path.is_file())


def _alike(train: Path, test: Path) -> bool:
    """Whether two files are parts of the same data, by their names."""
    return train.name.partition("train.txt")[0] == test.name.partition("test.txt")[0]

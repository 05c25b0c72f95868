"""Sparse rows: how fast text is read, and how alike micro-batches are when they are cut by cost.

    python benchmarks/sparse.py reading FILE
    python benchmarks/sparse.py spread [--workload xmc] [--data DIR] [--labels 16] [--micro-batch 36] [--count 100]

`reading` compares readers of the same file, in processor time of one core. `spread` measures the forward and backward
pass of micro-batches as one of four ranks gets them: of an equal number of rows, of about equal non-zeros, and of about
equal cost, where a row costs besides as many non-zeros as the workload says (`balance="nonzeros"`), or a fit of the
measured times. All have the same mean number of rows. Processor time on one thread, the best of 25 passes.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

from paceline import workloads
from paceline.rules.portions import FILLED
from paceline.run.loader import Loader, balanced_by
from paceline.workloads.models import SparseMLP
from paceline.workloads.sparse_rows import Bags, SparseSamples
from paceline.workloads.workload import Workload
from paceline.workloads.xmc import row_cost as known_row_cost
from paceline.workloads.xmc_text import XmcFile

PASSES = 25
RANKS, LEASES = 4, 8  # a rank gets so many micro-batches at a time, then the others do


def seconds(work: Callable[[], Any], times: int = 3) -> float:
    """Of processor time, at best."""
    taken = []
    for _ in range(times):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return min(taken)


def reading(path: Path) -> None:
    from sklearn.datasets import load_svmlight_file

    file = XmcFile(path)
    text = path.read_bytes()
    body = text.partition(b"\n")[2]
    lines, size = body.split(b"\n")[:-1], len(text) / 1e6
    numbers = body.translate(bytes.maketrans(b":,\n", b"   "))
    readers: dict[str, Callable[[], Any]] = {
        "this": lambda: list(file.rows()),
        "scikit-learn's svmlight": lambda: load_svmlight_file(
            io.BytesIO(body), n_features=file.header.features, multilabel=True, zero_based=True
        ),
        "numpy.fromstring (numbers alone)": lambda: np.fromstring(numbers, sep=" "),
        "plain Python": lambda: [file.one(line, 2 + number) for number, line in enumerate(lines)],
    }
    for name, reader in readers.items():
        print(f"{name:<34}{size / seconds(reader):>8.1f} MB/s")


def with_labels(workload: Workload, labels: int) -> Workload:
    """The same rows with fewer labels: what the first layer costs then weighs more."""
    x, y = workload.train.x, workload.train.y
    fewer = SparseSamples(x, Bags(y.starts, y.indices % labels), known_row_cost(labels))
    features = workload.build_model(0).features.num_embeddings
    return replace(workload, train=fewer, model=partial(SparseMLP, features, labels))


def spread(workload: Workload, micro_batch: int, count: int) -> None:
    torch.set_num_threads(1)
    model = workload.build_model(0)
    nonzeros = workload.train.x.sizes.numpy()
    row = row_cost(workload, model, nonzeros)
    given = balanced_by("nonzeros", None, workload.train)
    print(
        f"A row costs as much as {row:.0f} non-zeros, by the workload {workload.train.row_cost:.0f}; "
        f"on average it has {nonzeros.mean():.0f}."
    )
    cases: dict[str, tuple[int, ArrayLike | None]] = {
        "equal rows": (round(FILLED * micro_batch), None),
        "non-zeros alone": (micro_batch, nonzeros),
        "balance=nonzeros": (micro_batch, given),
        "fitted cost": (micro_batch, nonzeros + row),
    }
    batches = [batch for most, cost in cases.values() for batch in micro_batches(workload, most, cost, count)]
    print(f"{'micro-batches of':<18}{'rows':>8}{'non-zeros':>16}{'time ms':>10}{'spread':>9}{'p99/mean':>10}")
    for number, (name, times) in enumerate(
        zip(cases, np.split(passed(workload, model, batches), len(cases)), strict=True)
    ):
        own = batches[number * count : (number + 1) * count]
        rows, sizes = (np.array(counts) for counts in zip(*((len(y), int(x.starts[-1])) for x, y in own), strict=True))
        print(
            f"{name:<18}{rows.mean():>8.1f}{sizes.mean():>9.0f} ±{sizes.std() / sizes.mean():>4.0%}"
            f"{1e3 * times.mean():>10.2f}{times.std() / times.mean():>9.1%}"
            f"{np.quantile(times, 0.99) / times.mean():>10.2f}"
        )


def row_cost(workload: Workload, model: nn.Module, nonzeros: NDArray[np.int64]) -> float:
    """In non-zeros, by least squares over micro-batches of different size."""
    chance = np.random.default_rng(0)
    chosen = [chance.integers(len(nonzeros), size=rows) for rows in (8, 16, 24, 32, 48) * 10]
    times = passed(workload, model, [workload.train[torch.from_numpy(each)] for each in chosen])
    table = np.array([(1.0, len(each), nonzeros[each].sum()) for each in chosen])
    (_, row, nonzero), *_ = np.linalg.lstsq(table, times)
    return max(0.0, float(row / nonzero))


def passed(workload: Workload, model: nn.Module, batches: Sequence[Any]) -> NDArray[np.float64]:
    """Seconds of a forward and a backward pass of each. One pass of all follows the other, so that all of them see the
    machine when it is busy and when it is not."""
    best = np.full(len(batches), np.inf)
    for _ in range(PASSES):
        for number, batch in enumerate(batches):
            model.zero_grad()
            took = seconds(lambda batch=batch: workload.loss(model, batch).backward(), times=1)
            best[number] = min(best[number], took)
    return best


def micro_batches(workload: Workload, most: int, cost: ArrayLike | None, count: int) -> list[Any]:
    """The first of one rank."""
    loader = Loader(workload.train, most, 1000, None, 0, cost, {"collate_fn": workload.train.collate})
    ranges = leases(len(workload.train), most)
    loader.start(lambda: next(ranges), lambda: most)
    return [loader.next_batch() for _ in range(count)]


def leases(samples: int, micro_batch: int) -> Iterator[range]:
    """Of one of four ranks that are equally fast, for ever."""
    whole = samples // micro_batch * micro_batch  # the last, smaller micro-batch of an epoch is left out
    epoch = 0
    while True:
        for first in range(0, whole, RANKS * LEASES * micro_batch):
            for begin in range(first, min(first + LEASES * micro_batch, whole), micro_batch):
                yield range(epoch * samples + begin, epoch * samples + begin + micro_batch)
        epoch += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["reading", "spread"])
    parser.add_argument("file", type=Path, nargs="?", help="plain text, for `reading`")
    parser.add_argument("--workload", default="xmc")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--micro-batch", type=int, default=36, help="the most rows")
    parser.add_argument("--count", type=int, default=100, help="micro-batches to measure")
    parser.add_argument("--labels", type=int, help="fold the labels to so many")
    options = parser.parse_args()
    if options.what == "reading":
        if options.file is None:
            parser.error("reading needs a file")
        reading(options.file)
    else:
        workload = workloads.load(options.workload, options.data)
        if options.labels is not None:
            workload = with_labels(workload, options.labels)
        spread(workload, options.micro_batch, options.count)


if __name__ == "__main__":
    main()

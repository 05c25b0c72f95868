"""Sparse rows on disk, mapped into memory: the processes of a machine hold one copy, and nothing is read twice.

Plain files of numbers in the user's cache folder, mapped copy-on-write: the operating system gives all processes the
same pages, also to those that start later, and takes them back when memory is short. Shared memory proper would have to
be handed from process to process, and somebody would have to be the last one to remove it.

A folder is written under another name and renamed when it is whole. A checksum of every file is compared each time
(3 GB a second), so a power cut or a full disk costs another reading of the source and never wrong data. A lock lets one
process write while the others wait for it; it goes with its holder, however that ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import PacelineError
from paceline.workloads.sparse_rows import Bags, Rows, SparseSamples

log = logging.getLogger("paceline")
KINDS = {"starts": "<i8", "indices": "<i4", "values": "<f4", "label_starts": "<i8", "labels": "<i4"}
"""Of each file's numbers."""
VERSION = 1
"""Of the files' format, and of how rows are made from a source: with another one all is read again."""
MANIFEST = "manifest.json"


def stored(name: str, made_from: Mapping[str, Any], rows: Callable[[], Iterable[Rows]]) -> SparseSamples:
    """The rows of a source, mapped from files that are written when they are not there, out of date or damaged.

    Args:
        name: of the source, different from those of all others. What was made from an earlier state of it goes.
        made_from: all that the rows depend on, in plain values.
        rows: gives them; called only when they must be written.
    """
    place = _cache() / name
    described = {"version": VERSION, **made_from}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]
    folder = place / digest
    try:
        place.mkdir(parents=True, exist_ok=True)
        with _locked(place / "lock"):
            if folder.exists() and (damage := _damage(folder)):
                log.warning("The cache %s is damaged (%s): it is written again.", folder, damage)
                shutil.rmtree(folder)
            if not folder.exists():
                _write(folder, rows())
            for other in place.iterdir():
                if other.is_dir() and other != folder:
                    shutil.rmtree(other)  # whoever has mapped it keeps its pages
            return _mapped(folder)
    except OSError as error:
        raise PacelineError(
            "The cache of sparse data cannot be used.",
            where=str(place),
            cause=f"{error}.",
            remedy="Make room, or name another folder with the environment's XDG_CACHE_HOME.",
        ) from error


def _cache() -> Path:
    """The user's folder for what can be made again, as the systems' conventions have it."""
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "paceline" / "sparse"


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _write(folder: Path, rows: Iterable[Rows]) -> None:
    """Row after row into the files: no more than a few are in memory."""
    unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        with ExitStack() as opened:
            files = {name: opened.enter_context(_Growing(unfinished / name, kind)) for name, kind in KINDS.items()}
            ends = {"starts": 0, "label_starts": 0}
            for name in ends:
                files[name].add(np.zeros(1))
            for part in rows:
                for name, sizes in (("starts", part.sizes), ("label_starts", part.label_counts)):
                    files[name].add(ends[name] + np.cumsum(sizes))
                    ends[name] += int(sizes.sum())
                files["indices"].add(part.indices)
                files["values"].add(part.values)
                files["labels"].add(part.labels)
        manifest = {name: [file.size, file.checksum] for name, file in files.items()}
        (unfinished / MANIFEST).write_text(json.dumps(manifest))
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished)
        raise


class _Growing:
    """A file of numbers of one kind, its length and its checksum."""

    def __init__(self, path: Path, kind: str) -> None:
        self._stream, self._kind = path.open("wb"), kind
        self.size = self.checksum = 0

    def __enter__(self) -> _Growing:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def add(self, numbers: NDArray[Any]) -> None:
        raw = np.ascontiguousarray(numbers, self._kind).data
        self._stream.write(raw)
        self.size += raw.nbytes
        self.checksum = zlib.crc32(raw, self.checksum)


def _damage(folder: Path) -> str:
    """What is wrong with the files; '' if nothing is."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        for name in KINDS:
            size, checksum = manifest[name]
            if (folder / name).stat().st_size != size:
                return f"{name} has {(folder / name).stat().st_size} bytes instead of {size}"
            if zlib.crc32(_numbers(folder / name, "u1").data) != checksum:
                return f"the checksum of {name} is another one"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return str(error)
    return ""


def _mapped(folder: Path) -> SparseSamples:
    tensors = {name: _tensor(folder / name, kind) for name, kind in KINDS.items()}
    features = Bags(tensors["starts"], tensors["indices"], tensors["values"])
    return SparseSamples(features, Bags(tensors["label_starts"], tensors["labels"]))


def _tensor(file: Path, kind: str) -> Tensor:
    return torch.from_numpy(_numbers(file, kind))


def _numbers(file: Path, kind: str) -> NDArray[Any]:
    """Copy-on-write, because torch wants memory that could be written to; nobody does, so nothing is copied."""
    if not file.stat().st_size:  # what cannot be mapped
        return np.zeros(0, kind)
    return np.memmap(file, kind, mode="c")

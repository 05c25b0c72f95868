"""Rows in the cache: one copy for all processes, and never an old or a damaged one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.errors import PacelineError
from paceline.workloads import sparse_store
from paceline.workloads.sparse_rows import Bags, Rows, SparseSamples
from paceline.workloads.sparse_store import KINDS, MANIFEST, stored


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "paceline" / "sparse" / "made-up"


class Source:
    """Gives some rows, and counts how often."""

    def __init__(self) -> None:
        self.read = 0

    def __call__(self) -> Iterator[Rows]:
        self.read += 1
        for first in range(0, 12, 3):
            sizes, labels = np.array([2, 0, first]), np.array([1, 2, 0])
            yield Rows(
                sizes,
                np.arange(sizes.sum(), dtype=np.int32) + first,
                np.arange(sizes.sum(), dtype=np.float32) / 4,
                labels,
                np.arange(3, dtype=np.int32) + first,
            )


def folder_in(cache: Path) -> Path:
    (folder,) = (each for each in cache.iterdir() if each.is_dir())
    return folder


def lists(samples: SparseSamples) -> list[list]:
    x, y = samples.x, samples.y
    return [each.tolist() for each in (x.starts, x.indices, x.values, y.starts, y.indices)]


def test_rows_are_written_once_and_come_back_as_they_were(cache: Path) -> None:
    source = Source()
    samples = stored("made-up", {"seed": 1}, source)
    parts = list(Source()())
    assert samples.x.starts.tolist() == [0, *np.cumsum(np.concatenate([part.sizes for part in parts]))]
    assert samples.y.starts.tolist() == [0, *np.cumsum(np.concatenate([part.label_counts for part in parts]))]
    assert samples.x.indices.tolist() == np.concatenate([part.indices for part in parts]).tolist()
    assert samples.x.values.tolist() == np.concatenate([part.values for part in parts]).tolist()
    assert samples.y.indices.tolist() == np.concatenate([part.labels for part in parts]).tolist()
    assert lists(stored("made-up", {"seed": 1}, source)) == lists(samples) and source.read == 1
    assert sorted(each.name for each in folder_in(cache).iterdir()) == sorted([*KINDS, MANIFEST])


def test_another_state_of_the_source_replaces_the_old_files(cache: Path) -> None:
    source = Source()
    old = stored("made-up", {"changed": 1}, source)
    before, kept = folder_in(cache), lists(old)
    stored("made-up", {"changed": 2}, source)
    assert source.read == 2 and folder_in(cache) != before
    assert lists(old) == kept, "who has mapped the old files keeps them"


def test_other_sources_are_left_alone(cache: Path) -> None:
    source = Source()
    stored("made-up", {}, source)
    stored("other", {}, source)
    stored("made-up", {}, source)
    assert source.read == 2


def cut_off(folder: Path) -> None:
    (folder / "values").write_bytes((folder / "values").read_bytes()[:-4])


def flip(folder: Path) -> None:
    raw = bytearray((folder / "indices").read_bytes())
    raw[5] ^= 1
    (folder / "indices").write_bytes(raw)


def lose(folder: Path) -> None:
    (folder / "labels").unlink()


def spoil(folder: Path) -> None:
    (folder / MANIFEST).write_text("[]")


@pytest.mark.parametrize("harm", [cut_off, flip, lose, spoil])
def test_damage_is_noticed_and_the_files_are_written_again(
    cache: Path, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    source = Source()
    whole = lists(stored("made-up", {}, source))
    harm(folder_in(cache))
    assert lists(stored("made-up", {}, source)) == whole and source.read == 2
    assert "is damaged" in caplog.text
    stored("made-up", {}, source)
    assert source.read == 2


def test_a_reading_that_fails_leaves_nothing_behind(cache: Path) -> None:
    def broken() -> Iterator[Rows]:
        yield next(Source()())
        raise PacelineError("Line 7 is wrong.")

    with pytest.raises(PacelineError, match=r"Line 7 is wrong\."):
        stored("made-up", {}, broken)
    assert [each.name for each in cache.iterdir()] == ["lock"]


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(PacelineError, match=r"cannot be used.*made-up.*XDG_CACHE_HOME"):
        stored("made-up", {}, Source())


def test_rows_without_any_label_or_feature(cache: Path) -> None:
    def empty() -> Iterator[Rows]:
        nothing = np.zeros(2, np.int64)
        yield Rows(nothing, np.zeros(0, np.int32), np.zeros(0, np.float32), nothing, np.zeros(0, np.int32))

    samples = stored("made-up", {}, empty)
    assert len(samples) == 2 and samples[:2][0].starts.tolist() == [0, 0, 0]


READS_ALL = """
import sys
from pathlib import Path
from paceline.workloads.sparse_store import stored
def never():
    raise AssertionError("the rows are there")
samples = stored("made-up", {"big": True}, never)
assert float(samples.x.values.sum()) == float(sys.argv[1])
print(Path("/proc/self/smaps").read_text())
"""


def mapping(smaps: str, file: Path) -> dict[str, int]:
    """Kilobytes of the mapping of a file, by kind."""
    lines = iter(smaps.splitlines())
    found = {}
    for line in lines:
        if line.endswith(str(file)):
            for each in lines:
                key, _, value = each.partition(":")
                if not value.strip().endswith("kB"):
                    return found
                found[key] = found.get(key, 0) + int(value.split()[0])
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
def test_two_processes_hold_one_copy(cache: Path) -> None:
    def big() -> Iterator[Rows]:
        values = np.ones(1_000_000, np.float32)
        sizes = np.full(1000, 1000)
        yield Rows(sizes, np.zeros(1_000_000, np.int32), values, np.zeros(1000, np.int64), np.zeros(0, np.int32))

    samples = stored("made-up", {"big": True}, big)
    total = float(samples.x.values.sum())  # now all pages are in this process
    code = [sys.executable, "-c", READS_ALL, str(total)]
    seen = subprocess.run(code, capture_output=True, text=True, check=True, timeout=120).stdout
    found = mapping(seen, folder_in(cache) / "values")
    assert found["Rss"] >= 3900, "the other process has read all of it"
    assert found["Private_Dirty"] == 0 and found["Shared_Clean"] + found["Shared_Dirty"] >= 3900, found


def test_writing_to_a_batch_does_not_reach_the_files(cache: Path) -> None:
    samples = stored("made-up", {}, Source())
    x, _ = samples[:3]
    assert x.values is not None
    x.values += 7
    assert lists(stored("made-up", {}, Source())) == lists(samples)


def test_bags_are_cut_and_joined_like_lists() -> None:
    rows = [[3, 1], [], [4], [1, 5, 9], [2]]
    bags = Bags(
        torch.tensor([0, 2, 2, 3, 6, 7]), torch.tensor([each for row in rows for each in row]), torch.arange(7.0)
    )

    def as_lists(found: Bags) -> list[list[int]]:
        return [found.indices[a:b].tolist() for a, b in zip(found.starts[:-1], found.starts[1:], strict=True)]

    assert as_lists(bags[torch.tensor([3, 1, 0, 3])]) == [rows[3], rows[1], rows[0], rows[3]]
    assert bags[torch.tensor([3, 0])].values.tolist() == [3, 4, 5, 0, 1]
    assert as_lists(bags[1:4]) == rows[1:4] and as_lists(bags[2]) == [rows[2]] and as_lists(bags[5:]) == []
    assert bags[1:4].rows.tolist() == [1, 2, 2, 2] and bags.sizes.tolist() == [2, 0, 1, 3, 1]


def test_the_version_of_the_format_is_part_of_what_the_files_are_made_from(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source()
    stored("made-up", {}, source)
    monkeypatch.setattr(sparse_store, "VERSION", 2)
    stored("made-up", {}, source)
    assert source.read == 2

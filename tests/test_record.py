"""The record: nothing is lost on the way to the disk, trouble never reaches training, damage is named."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import record
from paceline.errors import PacelineError
from paceline.record import FileRecorder, MemoryRecorder, follow, read_events, write_events


class FullDisk:
    """A file on a disk without room; also its `close` fails, as a buffered file's does when it cannot be flushed."""

    def write(self, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        raise AssertionError("nothing was written")

    def close(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_all_events_are_in_the_file_after_close(tmp_path: Path) -> None:
    with FileRecorder(tmp_path / "events", 3) as recorder:
        for step in range(1000):
            recorder.write("compute", 3, step * 1.0, end=step + 0.5, samples=32)
    assert recorder.path.name == "rank-0003.jsonl"
    events = read_events(tmp_path / "events")
    assert len(events) == 1000
    assert events[7] == {"kind": "compute", "rank": 3, "t": 7.0, "end": 7.5, "samples": 32}


def test_events_of_all_ranks_come_in_order_of_time_then_rank(tmp_path: Path) -> None:
    for rank in (1, 0):
        with FileRecorder(tmp_path, rank) as recorder:
            recorder.write("start", rank, 0.5)
            recorder.write("end", rank, 2.0 - rank)
    assert [(e["t"], e["rank"]) for e in read_events(tmp_path)] == [(0.5, 0), (0.5, 1), (1.0, 1), (2.0, 0)]


def test_memory_and_file_hold_the_same(tmp_path: Path) -> None:
    memory = MemoryRecorder()
    with FileRecorder(tmp_path, 0) as file:
        for recorder in (memory, file):
            recorder.write("metric", 0, 1.0, samples=10, metric=0.5, loss=float("inf"))
    assert read_events(tmp_path) == memory.events


def test_a_value_that_json_does_not_know_costs_only_its_own_readability(tmp_path: Path) -> None:
    with FileRecorder(tmp_path, 0) as recorder:
        recorder.write("warning", 0, 1.0, text=Path("x"))
    assert read_events(tmp_path)[0]["text"] == "x"


def test_a_full_disk_is_said_once_counted_and_never_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "FLUSH_SECONDS", 3600.0)  # the test flushes, so that it need not wait
    recorder = FileRecorder(tmp_path, 0)
    recorder._file.close()
    file: Any = FullDisk()
    recorder._file = file
    with caplog.at_level(logging.WARNING, logger="paceline"):
        recorder.write("start", 0, 0.0)
        recorder.write("end", 0, 0.1)
        recorder._flush()
        recorder.write("end", 0, 1.0)
        recorder.close()
        recorder.close()
    assert recorder.dropped == 3
    assert len(caplog.records) == 1 and "No space left" in caplog.text


def test_writing_after_close_is_counted(tmp_path: Path) -> None:
    recorder = FileRecorder(tmp_path, 0)
    recorder.close()
    recorder.write("end", 0, 0.0)
    assert recorder.dropped == 1


def test_a_folder_that_cannot_be_made_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("a file stands in the way")
    with pytest.raises(PacelineError, match="cannot be written"):
        FileRecorder(tmp_path / "events", 0)


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "rank-0000.jsonl").write_text('{"kind":"start","rank":0,"t":0.0}\n{"kind":"end","ra')
    assert [event["kind"] for event in read_events(tmp_path)] == ["start"]


@pytest.mark.parametrize("damaged", ["{", "", "[1]", '{"kind":"end"}', '{"kind":"end","rank":"0","t":1}', "\x00\x00"])
def test_a_damaged_line_is_named_by_file_and_number(tmp_path: Path, damaged: str) -> None:
    good = '{"kind":"end","rank":0,"t":1.0}'
    (tmp_path / "rank-0000.jsonl").write_text(f"{good}\n{damaged}\n{good}\n")
    with pytest.raises(PacelineError, match=r"rank-0000\.jsonl:2"):
        read_events(tmp_path)
    assert len(follow(tmp_path).new_events()) == 2  # a live display goes on


def test_no_folder_means_no_events(tmp_path: Path) -> None:
    assert read_events(tmp_path / "nowhere") == []
    assert follow(tmp_path / "nowhere").new_events() == []


def test_following_sees_new_files_and_files_begun_anew(tmp_path: Path) -> None:
    follower = follow(tmp_path)
    with FileRecorder(tmp_path, 0) as recorder:
        recorder.write("start", 0, 0.0)
        recorder.write("end", 0, 0.1)
    assert len(follower.new_events()) == 2
    with FileRecorder(tmp_path, 1) as recorder:
        recorder.write("start", 1, 1.0)
    assert [event["rank"] for event in follower.new_events()] == [1]
    assert follower.new_events() == []
    with FileRecorder(tmp_path, 0) as recorder:
        recorder.write("start", 0, 5.0)
    assert [event["t"] for event in follower.new_events()] == [5.0]


@given(cuts=st.lists(st.integers(1, 60), max_size=30))
def test_following_a_file_in_any_pieces_gives_every_event_once(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    whole = "".join(json.dumps({"kind": "warning", "rank": 0, "t": i, "text": "größer"}) + "\n" for i in range(10))
    data, follower, seen = whole.encode(), follow(folder), []
    for cut in [*cuts, len(data)]:
        with (folder / "rank-0000.jsonl").open("ab") as file:
            file.write(data[:cut])
        data = data[cut:]
        seen += follower.new_events()
    assert [event["t"] for event in seen] == list(range(10))


def test_thousands_of_ranks_need_no_thousands_of_open_files(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = max(int(name) for name in os.listdir("/proc/self/fd"))
    events = [{"kind": "start", "rank": rank, "t": 0.0, "pid": 0} for rank in range(200)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(in_use + 50, soft), hard))
    try:
        write_events(tmp_path, events)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert read_events(tmp_path) == events

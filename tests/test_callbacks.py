"""Callbacks: the numbers of the record, in order, on one thread, and whatever befalls them never ends a training."""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import tomllib
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.backends.simulated import simulate
from paceline.callbacks import Callback, JsonLines, Scalars, TensorBoard, replay
from paceline.record import Event, FileRecorder, MemoryRecorder
from paceline.run import metrics
from paceline.run.metrics import Feed
from paceline.simulator.cluster import Cluster
from paceline.strategies import create

DOCS = Path(__file__).parent.parent / "docs" / "reports.md"


class Listener:
    """Keeps all that it is told."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.threads: set[int] = set()

    def _hear(self, *what: Any) -> None:
        self.heard.append(what)
        self.threads.add(threading.get_ident())

    def begin(self, info: dict[str, Any]) -> None:
        self._hear("begin", info)

    def scalars(self, samples: int, values: dict[str, float]) -> None:
        self._hear("scalars", samples, values)

    def end(self, summary: dict[str, Any]) -> None:
        self._hear("end", summary)


def simulated(strategy: str, seconds: float = 4.0) -> list[Event]:
    recorder = MemoryRecorder()
    cluster = Cluster.from_speeds([1, 1, 0.5, 0.25], micro_batch_seconds=0.02)
    simulate(create(strategy), cluster, seconds=seconds, recorder=recorder)
    recorder.write("metric", 0, seconds, samples=100, metric=0.5, loss=1.25)
    return recorder.events


# ---- the numbers


@pytest.mark.parametrize("strategy", ["all-reduce", "abs-sgd", "ad-psgd"])
def test_the_numbers_are_those_of_the_record(strategy: str) -> None:
    events, listener = simulated(strategy), Listener()
    replay(events, listener, {"began": 0.0})
    (first, _), *told, (last, summary) = listener.heard
    assert (first, last) == ("begin", "end")
    rows = [(samples, values) for _, samples, values in told if "rounds" in values]
    assert 3 <= len(rows) <= 4, "one a second"
    assert all(b[1]["seconds"] - a[1]["seconds"] >= 1.0 for a, b in pairwise(rows))
    for samples, values in rows:
        until = values["seconds"]
        steps = [e for e in events if e["kind"] == "step" or (e["kind"] == "applied" and e["rank"] == 0)]
        # Of several steps at one instant the record has some before and some after the one that closes the window.
        before, with_it = (sum(e["samples"] for e in steps if e["t"] < until + late) for late in (0.0, 1e-9))
        assert before < samples <= with_it
        assert 0 <= values["computing"] <= 1 and 0 <= values["waiting"] <= 1 and values["discarded"] == 0
    (before, earlier), (after, later) = rows[1:3]
    seconds, rounds = (later[name] - earlier[name] for name in ("seconds", "rounds"))
    assert later["samples_per_second"] == pytest.approx((after - before) / seconds)
    assert later["samples_per_round"] == pytest.approx((after - before) / rounds)
    assert told[-1] == ("scalars", 100, {"seconds": 4.0, "metric": 0.5, "loss": 1.25})
    assert summary["loss"] == 1.25 and summary["error"] == "" and summary["samples"] >= rows[-1][0]


def test_the_noise_scale_and_discarded_samples_are_told() -> None:
    scalars = Scalars(lambda: 640)
    events: list[Event] = [
        {"kind": "start", "rank": 0, "t": 1.0, "pid": 1},
        {"kind": "noise", "rank": 0, "t": 1.5, "round": 3, "squared_norm": 2.0, "variance": 50.0},
        {"kind": "discard", "rank": 0, "t": 1.5, "samples": 7, "reason": "non-finite gradient"},
        {"kind": "wait", "rank": 0, "t": 1.5, "end": 2.0, "round": 4},
        {"kind": "applied", "rank": 0, "t": 3.0, "round": 4, "samples": 0, "own": 0},
    ]
    samples, values = [scalars.see(event) for event in events][-1] or (0, {})
    assert samples == 640 and values["noise_scale"] == 25.0 and values["discarded"] == 7
    assert values["waiting"] == 0.25 and values["rounds"] == 0 and "samples_per_round" not in values


def test_lines_of_json(tmp_path: Path) -> None:
    replay(simulated("abs-sgd"), JsonLines(tmp_path / "new" / "metrics.jsonl"), {})
    lines = [json.loads(line) for line in (tmp_path / "new" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) >= 4 and all({"samples", "seconds"} <= line.keys() for line in lines)
    assert lines[-1] == {"samples": 100, "seconds": 4.0, "metric": 0.5, "loss": 1.25}


def test_tensorboard_reads_the_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed: pip install 'paceline[tensorboard]'")
    from tensorboardX.proto.event_pb2 import Event as Written

    replay(simulated("abs-sgd"), TensorBoard(), {"began": 1000.0, "folder": str(tmp_path), "strategy": "abs-sgd"})
    (file,) = (tmp_path / "tb").iterdir()
    block, found = file.read_bytes(), dict[str, list[tuple[int, float, float]]]()
    while block:  # each record: its length in 8 bytes, a checksum of 4, the record, a checksum of 4
        length = int.from_bytes(block[:8], "little")
        event = Written.FromString(block[12 : 12 + length])
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, event.wall_time, value.simple_value))
        block = block[16 + length :]
    assert found["loss"] == [(100, 1004.0, 1.25)] and len(found["samples_per_second"]) >= 3
    assert [step for step, _, _ in found["rounds"]] == sorted(step for step, _, _ in found["rounds"])
    assert "seconds" not in found and "run/text_summary" in found


def test_without_tensorboardx_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(paceline.PacelineError, match=r"paceline\[tensorboard\]"):
        TensorBoard()


# ---- the feed


def feed(folder: Path, *callbacks: Callback) -> None:
    """A run of four seconds, told live."""
    with FileRecorder(folder / "events", 0) as recorder:
        told = Feed(recorder, callbacks, {"folder": str(folder)}, lambda: 5)
        for event in simulated("all-reduce"):
            if event["rank"] == 0:
                told.write(**event)
        told.close("ValueError: so it is")


def test_all_methods_are_called_in_order_by_one_other_thread(tmp_path: Path) -> None:
    listener = Listener()
    feed(tmp_path, listener)
    assert [what for what, *_ in listener.heard] == ["begin", *["scalars"] * (len(listener.heard) - 2), "end"]
    assert len(listener.threads) == 1 and threading.get_ident() not in listener.threads
    assert listener.heard[-1][1]["error"] == "ValueError: so it is"
    assert len((tmp_path / "events" / "rank-0000.jsonl").read_text().splitlines()) > 100, "the record has it all"


@pytest.mark.parametrize("method", ["begin", "scalars", "end"])
def test_a_callback_that_fails_is_named_once_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no route to host")

    broken, sound = Listener(), Listener()
    setattr(broken, method, fail)
    with caplog.at_level(logging.WARNING, "paceline"):
        feed(tmp_path, broken, sound)
    assert [record.getMessage() for record in caplog.records] == [
        f"Listener.{method} failed and is not called again: no route to host. Training goes on."
    ]
    assert sound.heard[-1][0] == "end" and len(broken.heard) < len(sound.heard)


def test_a_callback_that_hangs_is_left_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "FAREWELL_SECONDS", 0.01)
    released = threading.Event()
    hanging = Listener()
    hanging.begin = lambda info: released.wait(60)  # type: ignore[assignment, method-assign, return-value]
    with caplog.at_level(logging.WARNING, "paceline"):
        feed(tmp_path, hanging)
    released.set()
    assert "is left behind" in caplog.text


def test_a_run_keeps_its_settings_and_metrics_and_tells_its_callbacks(tmp_path: Path) -> None:
    listener, model = Listener(), nn.Linear(2, 1)
    data = TensorDataset(torch.randn(64, 2), torch.randn(64, 1))
    with paceline.Run(strategy="all-reduce", out=tmp_path, seed=3, callbacks=[listener]) as run:
        loader = run.loader(data, micro_batch=8, epochs=2)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        run.report(0.5, 1.25)
        folder = run.folder
    (_, info), *_, (_, summary) = listener.heard
    assert info["strategy"] == "all-reduce" and info["workers"] == 1 and info["folder"] == str(folder)
    assert info["versions"]["paceline"] == paceline.__version__ and info["micro_batch"] == 8 and info["epochs"] == 2
    assert summary["samples"] == 128 and summary["rounds"] == 16 and summary["error"] == ""
    (line,) = (folder / "metrics.jsonl").read_text().splitlines()[-1:]
    assert json.loads(line)["loss"] == 1.25 and json.loads(line)["samples"] == 128
    settings = tomllib.loads((folder / "config.toml").read_text())
    assert settings["seed"] == 3 and settings["options"]["micro_batches"] == 1 and "folder" not in settings


# ---- the examples of the page


def example(name: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    return next(block for block in blocks if block.startswith(f"import {name}\n"))


def test_the_example_for_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, Any]] = []
    run = SimpleNamespace(
        define_metric=lambda name, *, step_metric: said.append((name, step_metric)),
        log=lambda data: said.append(("log", data)),
        summary={},
        finish=lambda exit_code=None: said.append(("finish", exit_code)),
    )
    module = ModuleType("wandb")
    # An empty module has no such names: the suppressions below are for that.
    module.init = lambda *, project, config: run  # type: ignore[attr-defined]  # a stand-in for the module
    monkeypatch.setitem(sys.modules, "wandb", module)
    names: dict[str, Any] = {}
    exec(example("wandb"), names)
    replay(simulated("abs-sgd"), names["WeightsAndBiases"](), {"strategy": "abs-sgd"})
    assert said[0] == ("*", "samples") and said[-1] == ("finish", 0) and run.summary["loss"] == 1.25
    assert said[-2] == ("log", {"samples": 100, "seconds": 4.0, "metric": 0.5, "loss": 1.25})


def test_the_example_for_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[Any, ...]] = []
    module = ModuleType("mlflow")
    module.start_run = lambda *, run_name: said.append(("start", run_name))  # type: ignore[attr-defined]  # a stand-in for the module
    module.log_params = lambda params: said.append(("params", params))  # type: ignore[attr-defined]  # a stand-in for the module
    module.log_metrics = lambda metrics, step: said.append(("metrics", step, metrics))  # type: ignore[attr-defined]  # a stand-in for the module
    module.end_run = lambda status: said.append(("end", status))  # type: ignore[attr-defined]  # a stand-in for the module
    monkeypatch.setitem(sys.modules, "mlflow", module)
    names: dict[str, Any] = {}
    exec(example("mlflow"), names)
    replay(simulated("abs-sgd"), names["MlFlow"](), {"strategy": "abs-sgd", "versions": {"torch": "2"}})
    assert said[:2] == [("start", "abs-sgd"), ("params", {"strategy": "abs-sgd"})]
    assert said[-2:] == [("metrics", 100, {"seconds": 4.0, "metric": 0.5, "loss": 1.25}), ("end", "FINISHED")]

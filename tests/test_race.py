"""The race's parts: its settings, devices that keep their speed, snapshots, and real gradients in virtual time."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from itertools import cycle, repeat
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import PacelineError
from paceline.race import emulation, worker
from paceline.race.emulation import MOST_MICRO_BATCHES_LATE, EmulatedDevice
from paceline.race.race import run_race
from paceline.race.snapshots import PER_RACE, Snapshots
from paceline.race.spec import RaceSpec
from paceline.workloads import fashion_mnist
from paceline.workloads.synthetic import synthetic
from paceline.workloads.workload import Samples, Workload


class Machine:
    """A clock that only computing and sleeping move; `oversleeps` is how late a sleep ends."""

    def __init__(self, oversleeps: float = 0.0) -> None:
        self.now, self.slept, self._oversleeps = 0.0, list[float](), oversleeps

    def sleep(self, seconds: float) -> None:
        assert seconds > 0, "time.sleep takes nothing below zero"
        self.slept.append(seconds)
        self.now += seconds + self._oversleeps

    def device(self, *durations: float, micro_batch: int = 8) -> EmulatedDevice:
        mean = sum(durations) / len(durations)
        return EmulatedDevice(cycle(durations), mean, micro_batch, clock=lambda: self.now, sleep=self.sleep)

    def compute(self, device: EmulatedDevice, samples: int, seconds: float) -> float:
        """How long a micro-batch of so many samples lasts that is really computed in so many seconds."""
        began = self.now
        with device.micro_batch(samples):
            self.now += seconds
        return self.now - began


# ---- emulated devices


def test_a_micro_batch_lasts_in_proportion_to_its_samples() -> None:
    machine = Machine()
    device = machine.device(8.0)
    assert [machine.compute(device, samples, 0.5) for samples in (8, 4, 1, 16)] == [8.0, 4.0, 1.0, 16.0]
    assert machine.slept == [7.5, 3.5, 0.5, 15.5]


def test_each_micro_batch_has_its_own_duration_whatever_its_size() -> None:
    machine = Machine()
    device = machine.device(8.0, 16.0)
    assert [machine.compute(device, samples, 0.5) for samples in (8, 8, 2, 2)] == [8.0, 16.0, 2.0, 4.0]


def test_what_a_small_micro_batch_really_takes_too_long_is_taken_off_the_next() -> None:
    machine = Machine()
    device = machine.device(8.0)
    assert machine.compute(device, 1, 3.0) == 3.0, "its part is 1.0: nothing to sleep, two late"
    assert machine.compute(device, 1, 3.0) == 3.0, "four late"
    assert machine.compute(device, 8, 3.0) == 4.0, "made up for: 10 samples in 10 seconds"
    assert machine.compute(device, 8, 3.0) == 8.0, "and forgotten"
    assert machine.slept == [1.0, 5.0]


def test_what_is_late_is_made_up_for_over_several_micro_batches() -> None:
    machine = Machine()
    device = machine.device(8.0)
    assert [machine.compute(device, 8, seconds) for seconds in (20.0, 2.0, 2.0, 2.0)] == [20.0, 2.0, 2.0, 8.0]


def test_a_device_keeps_its_average_speed_over_micro_batches_of_any_size() -> None:
    machine = Machine()
    device = machine.device(4.0, 8.0, 12.0)  # three, so that every size meets every duration
    sizes = [1, 1, 8, 2, 1, 8, 5, 8] * 150
    for samples in sizes:
        machine.compute(device, samples, 1.0 + 0.05 * samples)
    assert machine.now == pytest.approx(sum(sizes), rel=0.01), "a sample a second"


def test_a_late_end_of_a_sleep_is_no_loss_of_speed() -> None:
    machine = Machine(oversleeps=0.5)
    device = machine.device(8.0)
    assert [machine.compute(device, 8, 2.0) for _ in range(4)] == [8.5, 8.0, 8.0, 8.0]


def test_after_a_standstill_only_a_few_micro_batches_are_made_up_for() -> None:
    machine = Machine()
    device = machine.device(8.0)
    machine.compute(device, 8, 1000.0)
    began = machine.now
    for _ in range(10):
        machine.compute(device, 8, 1.0)
    assert machine.now - began == 8.0 * (10 - MOST_MICRO_BATCHES_LATE)


def test_waiting_between_micro_batches_is_not_the_devices_delay() -> None:
    machine = Machine()
    device = machine.device(8.0)
    for _ in range(3):
        assert machine.compute(device, 8, 2.0) == 8.0
        machine.now += 100.0


def test_the_solo_speeds_are_measured_with_the_races_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str | None, float | None]] = []
    build = Workload.build_optimizer

    def spy(self: Workload, model: torch.nn.Module, *, optimizer: str | None = None, lr: float | None = None) -> Any:
        asked.append((optimizer, lr))
        return build(self, model, optimizer=optimizer, lr=lr)

    monkeypatch.setattr(Workload, "build_optimizer", spy)
    monkeypatch.setattr(emulation, "SOLO_SECONDS", 0.0)
    spec = RaceSpec(strategies=("all-reduce",), speeds=(1.0,), workload="synthetic", optimizer="adamw", lr=0.5)
    workload = synthetic(100, 4, 3)
    assert emulation.compute_seconds(workload, spec) > 0
    assert emulation.solo_speed(workload, spec, 0.001) > 0
    assert asked == [("adamw", 0.5)] * 2


def test_a_worker_tells_its_device_how_many_samples_a_micro_batch_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[int] = []

    class Device(EmulatedDevice):
        def micro_batch(self, samples: int) -> Any:
            told.append(samples)
            return super().micro_batch(samples)

    monkeypatch.chdir(tmp_path)
    spec = RaceSpec(strategies=("all-reduce",), speeds=(1.0,), workload="synthetic", seconds=2.0)
    worker.train(spec, synthetic(40, 4, 3), "all-reduce", lambda run: Device(repeat(0.0), 0.0, 1))
    assert told[:4] == [32, 8, 32, 8], "an epoch of 40 samples ends with a small one"


# ---- snapshots


def test_snapshots_go_by_time_and_not_by_samples() -> None:
    workload = synthetic(100, 4, 3)
    snapshots = Snapshots(workload, seed=0, seconds=float(PER_RACE))  # one a second
    model = workload.build_model(0)
    flat = torch.nn.utils.parameters_to_vector(model.parameters())
    seen = [(0.0, 1), (0.5, 33), (1.0, 34), (1.9, 500), (2.1, 501)]
    for t, samples in seen:
        snapshots.look(t, samples, lambda: flat)
    flat.data.zero_()
    snapshots.take(2.2, 502, flat)
    found = list(snapshots.evaluate())
    assert [(t, samples) for t, samples, _, _ in found] == [(0.0, 1), (1.0, 34), (2.1, 501), (2.2, 502)]
    assert found[0][2:] == pytest.approx(workload.evaluate(model)) and found[-1][2:] != found[0][2:]


# ---- settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"workload": "digit"}, "no workload 'digit'"),
        ({"model": "lenet-5"}, "no model for the workload digits called 'lenet-5'"),
        ({"workload": "fashion-mnist", "model": "resnet18"}, "Did you mean 'resnet-18'"),
        ({"optimizer": "adam"}, "no optimizer 'adam'"),
        ({"lr": 0.0}, "learning rate of 0"),
        ({"lr": float("nan")}, "learning rate of nan"),
    ],
)
def test_wrong_settings_protest_at_once(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(PacelineError, match=words):
        RaceSpec(strategies=("all-reduce",), speeds=(1.0,), **settings)


def test_settings_survive_the_way_to_a_worker() -> None:
    given = {"workload": "fashion-mnist", "model": "resnet-18", "optimizer": "nesterov", "lr": 0.02}
    spec = RaceSpec(strategies=("all-reduce",), speeds=(1.0, 0.5), **given)  # type: ignore[arg-type]  # of mixed types
    assert RaceSpec.from_json(spec.to_json()) == spec


def test_what_was_not_asked_for_is_told() -> None:
    workload = synthetic(100, 4, 3)
    spec = RaceSpec(strategies=("all-reduce",), speeds=(1.0,), workload="synthetic", optimizer="adamw")
    assert spec.learning(workload) == {"model": "mlp", "optimizer": "adamw", "lr": 1e-3}


def test_settings_are_checked_without_torch() -> None:
    code = (
        "import sys; from paceline.race.spec import RaceSpec; RaceSpec(strategies=('all-reduce',), speeds=(1.0,), "
        "workload='fashion-mnist', model='resnet-18', optimizer='adamw'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- a race


@pytest.fixture
def clothes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise of the shape of Fashion-MNIST stands in for it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 1, 28, 28, generator=generator)
    y = torch.randint(10, (80,), generator=generator)
    parts = {"train": Samples(x[:64], y[:64]), "t10k": Samples(x[64:], y[64:])}
    monkeypatch.setattr(fashion_mnist, "_folder", lambda data: Path())
    monkeypatch.setattr(fashion_mnist, "_samples", lambda folder, part: parts[part])


@pytest.mark.usefixtures("clothes")
def test_a_simulated_race_of_another_model_and_optimizer(tmp_path: Path) -> None:
    def race(optimizer: str) -> dict[str, Any]:
        spec = RaceSpec(
            strategies=("all-reduce", "abs-sgd"),
            speeds=(1.0, 0.5),
            workload="fashion-mnist",
            model="resnet-18",
            optimizer=optimizer,
            backend="simulated",
            seconds=0.1,
        )
        return run_race(spec, tmp_path / optimizer)

    found, other = race("adamw"), race("sgd")
    assert (found["model"], found["optimizer"], found["lr"]) == ("resnet-18", "adamw", 2e-3)
    (config,) = (tmp_path / "adamw").rglob("config.toml")
    written = tomllib.loads(config.read_text())
    assert (written["model"], written["optimizer"], written["lr"]) == ("resnet-18", "adamw", 2e-3)
    for adamw, sgd in zip(found["results"], other["results"], strict=True):
        assert min(adamw["samples_applied"], sgd["samples_applied"]) > 100
        assert adamw["final_loss"] != sgd["final_loss"]
        assert adamw["bytes_sent"] > 4 * 170_000 * adamw["rounds"], "the resnet's 176,258 parameters"

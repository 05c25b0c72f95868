"""Checkpoints while training goes on: exact to resume from, and nothing that befalls a disk or a process loses them."""

from __future__ import annotations

import errno
import random
import resource
import subprocess
import threading
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import PacelineError
from paceline.record import read_events
from paceline.run import checkpoint as module
from paceline.run.checkpoint import Checkpoint, export, read, read_latest, write

TO_THE_BIT = [
    *("all-reduce", "balanced", "local-sgd", "non-blocking", "d-psgd", "matcha", "ad-psgd"),
    *("abs-sgd", *(f"abs-sgd:delay_cure={cure}" for cure in ("none", "extrapolate", "acco"))),
]
LONGEST_SECONDS = 60.0


@pytest.fixture(autouse=True)
def one_thread():
    """These layers are tiny: on a busy machine threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class StopError(Exception):
    """Ends a training in the middle."""


def train(out, strategy="all-reduce", *, resume=False, after_round=None, epochs=16):
    """Alone, with all that a resume could get wrong: chance, momenta, a schedule, running statistics.

    Returns the run and the samples that the loop was given."""
    torch.manual_seed(0)
    random.seed(1)
    model, seen = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1)), []
    points = torch.arange(80.0).view(40, 2) / 80
    with paceline.Run(strategy, out=out) as run:
        loader = run.loader(TensorDataset(points, torch.arange(40)), micro_batch=4, epochs=epochs)
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        if resume:
            run.resume()
        if after_round is not None:
            run.after_round(lambda: after_round(run))
        for x, indices in loader:
            seen += indices.tolist()
            optimizer.zero_grad()
            (model(x) * random.uniform(0.9, 1.1)).square().mean().backward()
            optimizer.step()
            scheduler.step()
    return run, seen


def checkpoints(run):
    return checkpoints_in(run.folder)


def checkpoints_in(folder):
    return sorted((folder / "checkpoints").glob("round-*"))


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("strategy", TO_THE_BIT)
def test_a_resumed_run_is_to_the_bit_the_run_that_never_stopped(strategy, tmp_path):
    """Both save at the same time: for a checkpoint, what `abs-sgd` has in flight is brought in."""

    def save(run):
        if run.node.rounds == 3:
            run.save()

    def save_and_stop(run):
        save(run)
        if run.node.rounds > 3 and checkpoints(run):
            raise StopError

    whole, expected = train(tmp_path / "whole", strategy, after_round=save)
    with pytest.raises(StopError):
        train(tmp_path / "cut", strategy, after_round=save_and_stop)
    again, seen = train(tmp_path / "cut", strategy, resume=True)
    assert 0 < len(seen) < len(expected) and seen == expected[-len(seen) :]
    assert same(again.model_state(), whole.model_state())


# ---- what fits, and what does not


def resume_with(tmp_path, model, optimizer, samples=8, **how):
    """What a run on other data is given to begin with: the checkpoint taken, and the samples of its loop."""
    with paceline.Run("all-reduce", out=tmp_path / "later") as run:
        loader = run.loader(TensorDataset(torch.ones(samples, 2)), micro_batch=4, epochs=1)
        driven = run.optimizer(optimizer(model.parameters(), lr=0.0), model)
        taken = run.resume(**how)
        for (x,) in loader:
            driven.zero_grad()
            model(x).square().mean().backward()
            driven.step()
    return taken, run.node.samples_applied


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of a small model, trained by SGD on 12 samples."""
    with paceline.Run("abs-sgd", out=tmp_path / "first") as run:
        model = nn.Linear(2, 1)
        loader = run.loader(TensorDataset(torch.ones(12, 2)), micro_batch=4, epochs=1)
        driven = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for (x,) in loader:
            driven.zero_grad()
            model(x).square().mean().backward()
            driven.step()
        run.save()
    return run.folder, model


def test_the_weights_alone_can_be_taken(saved, tmp_path):
    folder, before = saved
    model = nn.Linear(2, 1)
    taken, applied = resume_with(tmp_path, model, torch.optim.AdamW, path=folder, weights_only=True)
    assert taken == checkpoints_in(folder)[-1] and applied == 8
    assert same(model.state_dict(), before.state_dict())


def test_a_run_that_has_no_checkpoint_yet_may_begin_with_the_weights_of_another(saved, tmp_path):
    folder, before = saved
    model = nn.Linear(2, 1)
    with paceline.Run("all-reduce", out=tmp_path / "later") as run:
        run.loader(TensorDataset(torch.ones(4, 2)), micro_batch=4, epochs=1)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        assert run.resume() is None
        assert run.resume(folder, weights_only=True) == checkpoints_in(folder)[-1]
    assert same(model.state_dict(), before.state_dict())


@pytest.mark.parametrize(
    ("optimizer", "samples", "said"),
    [(torch.optim.AdamW, 12, "SGD then, AdamW now"), (torch.optim.SGD, 8, "samples 12 then, 8 now")],
)
def test_another_optimizer_or_other_data_is_refused(saved, tmp_path, optimizer, samples, said):
    with pytest.raises(paceline.PacelineError, match=f"{said}(.|\n)*weights_only=True"):
        resume_with(tmp_path, nn.Linear(2, 1), optimizer, samples, path=saved[0])


@pytest.mark.parametrize("weights_only", [True, False])
def test_another_model_is_refused(saved, tmp_path, weights_only):
    said = r"weight has shape \(1, 2\) in the checkpoint, and has shape \(3, 2\) here"
    with pytest.raises(paceline.PacelineError, match=said):
        resume_with(tmp_path, nn.Linear(2, 3), torch.optim.SGD, 12, path=saved[0], weights_only=weights_only)


# ---- while training goes on


@pytest.fixture
def slow_disk(monkeypatch):
    """A disk that writes when it is let; what is being written at the same time, and what has been written."""
    really_write, let = module.write, threading.Event()
    busy, most, written = [], [], []

    def wait_and_write(folder, round_number, checkpoint):
        busy.append(round_number)
        most.append(len(busy))
        assert let.wait(LONGEST_SECONDS)
        written.append(really_write(folder, round_number, checkpoint))
        busy.remove(round_number)

    monkeypatch.setattr(module, "write", wait_and_write)
    return let, most, written


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_get_into_it(slow_disk, tmp_path):
    let, _, written = slow_disk
    states = {}

    def after_round(run):
        states[run.node.rounds] = run.model_state()
        if run.node.rounds == 2:
            run.save()
        if run.node.rounds == 20:  # seventeen rounds after the save, which is still on its way
            assert not written
            let.set()

    train(tmp_path, after_round=after_round, epochs=4)
    (path,) = written
    saved = read(path)
    parameters = [name for name in states[3] if "running" not in name]
    assert saved.values["rounds"] == 3 and len(states) > 20
    assert all(torch.equal(saved.tensors["model"][name], states[3][name]) for name in parameters)
    assert all(saved.tensors["optimizer"][f"{index}.step"] == 3 for index in range(6))


def test_a_second_save_waits_for_the_first(slow_disk, tmp_path):
    let, most, written = slow_disk
    threading.Timer(0.05, let.set).start()
    train(tmp_path, after_round=lambda run: run.save(), epochs=2)
    assert max(most) == 1 and len(written) == len(most) > 10


def full_at(monkeypatch, unwritable):
    """The disk is full whenever one of these rounds is written."""
    really_write = module._write_synced

    def write_or_fail(path, content):
        if any(f"round-{number:08d}" in str(path) for number in unwritable):
            raise OSError(errno.ENOSPC, "No space left on device")
        really_write(path, content)

    monkeypatch.setattr(module, "_write_synced", write_or_fail)


def test_a_checkpoint_that_cannot_be_written_is_told_and_training_goes_on(monkeypatch, tmp_path, caplog):
    full_at(monkeypatch, [3])
    run, seen = train(tmp_path, after_round=lambda run: run.save() if run.node.rounds in (2, 12) else None, epochs=2)
    told = "The checkpoint of round 3 could not be written: No space left on device."
    warnings = [event["text"] for event in read_events(run.folder / "events") if event["kind"] == "warning"]
    assert len(seen) == 80 and [path.name for path in checkpoints(run)] == ["round-00000013"]
    assert len(warnings) == 1 and warnings[0].startswith(told) and "Training goes on" in warnings[0]
    assert sum(told in record.getMessage() for record in caplog.records) == 1


def test_the_last_checkpoint_must_be_written(monkeypatch, tmp_path):
    full_at(monkeypatch, [19])
    with pytest.raises(PacelineError, match="checkpoint of round 19 could not be written: No space left"):
        train(tmp_path, after_round=lambda run: run.save() if run.node.rounds == 18 else None, epochs=2)


def test_an_error_of_the_loop_is_not_hidden_by_one_of_the_disk(monkeypatch, tmp_path, caplog):
    full_at(monkeypatch, [3])

    def save_and_stop(run):
        run.save()
        if run.node.rounds == 3:
            raise StopError

    with pytest.raises(StopError):
        train(tmp_path, after_round=save_and_stop)
    assert "checkpoint of round 3 could not be written" in caplog.text


def test_whatever_goes_wrong_in_writing_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "write", lambda *_: {}["nothing"])
    with pytest.raises(PacelineError, match=r"checkpoint of round 19 could not be written: KeyError: 'nothing'"):
        train(tmp_path, after_round=lambda run: run.save() if run.node.rounds == 18 else None, epochs=2)


# ---- crashes and real full disks


def made(number):
    return Checkpoint({"model": {"weight": torch.full((4096,), float(number))}}, {"number": number})


@contextmanager
def tmpfs(folder):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def file_limit(folder):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limited", [tmpfs, file_limit])
def test_a_disk_that_is_really_full_leaves_the_last_checkpoint_whole(limited, tmp_path):
    """Three of 16 kB fit, and one of 60 kB does not."""
    with limited(tmp_path):
        for number in range(3):
            write(tmp_path, number, made(number))
        large = Checkpoint({"model": {"weight": torch.zeros(15_000)}})
        with pytest.raises(PacelineError, match=r"round 3 could not be written: (No space left|File too large)"):
            write(tmp_path, 3, large)
        found = read_latest(tmp_path)
        assert found is not None and found[0].name == "round-00000002" and found[1].values == {"number": 2}
        assert sorted(path.name for path in tmp_path.iterdir()) == [f"round-{number:08d}" for number in range(3)]


class CrashError(BaseException):
    """From here on the process does nothing more."""


@pytest.mark.parametrize("again", [False, True], ids=["next round", "same round"])
def test_a_crash_at_any_moment_leaves_a_whole_checkpoint(again, tmp_path, monkeypatch):
    """Before each operation on the disk in turn; after it none takes place any more, not even tidying up."""
    operations = [
        (module.Path, "mkdir"),
        (module.Path, "rename"),
        (module, "_write_synced"),
        (module, "_sync_folder"),
        (module.shutil, "rmtree"),
    ]
    outcomes = []
    while "no crash" not in outcomes:
        folder, left = tmp_path / str(len(outcomes)), iter(range(len(outcomes)))
        write(folder, 1, made(1))

        def counted(operation, left=left):
            def run(*arguments, **options):
                if next(left, None) is None:
                    raise CrashError
                return operation(*arguments, **options)

            return run

        with monkeypatch.context() as patched:
            for owner, name in operations:
                patched.setattr(owner, name, counted(getattr(owner, name)))
            try:
                write(folder, 1 if again else 2, made(2))
                crashed = False
            except CrashError:
                crashed = True
        number, weight = found_in(folder)
        assert number in (1, 2) and torch.equal(weight, made(number).tensors["model"]["weight"])
        outcomes.append(number if crashed else "no crash")
        write(folder, 3, made(3))  # what the crash has left is in nobody's way
        assert found_in(folder)[0] == 3
    assert outcomes == sorted(outcomes, key=str) and {1, 2} <= set(outcomes) and len(outcomes) > 7


def found_in(folder):
    found = read_latest(folder)
    assert found is not None
    return found[1].values["number"], found[1].tensors["model"]["weight"]


# ---- for other tools


def test_an_export_is_a_plain_state_dict(tmp_path):
    run, _ = train(tmp_path / "runs", after_round=lambda run: run.save() if run.node.rounds == 4 else None, epochs=1)
    file = tmp_path / "model.pt"
    assert export(run.folder, file) == checkpoints(run)[0]
    loaded = torch.load(file, weights_only=True)
    assert same(loaded, read(checkpoints(run)[0]).tensors["model"])
    model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1))
    model.load_state_dict(loaded)


def test_an_export_that_does_not_fit_leaves_the_file_before_it(tmp_path):
    file = tmp_path / "model.pt"
    export(write(tmp_path / "one", 1, made(1)), file)
    before = file.read_bytes()
    large = write(tmp_path / "two", 1, Checkpoint({"model": {"weight": torch.zeros(15_000)}}))
    with file_limit(tmp_path), pytest.raises(PacelineError, match=r"could not be written to .*: File too large"):
        export(large, file)
    assert file.read_bytes() == before and not list(tmp_path.glob(".*"))

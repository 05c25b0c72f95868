"""Checkpoints: what goes in comes out, and whatever befalls a file is found and named."""

from __future__ import annotations

import errno
import json
import logging
import random

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import PacelineError
from paceline.run import checkpoint as module
from paceline.run.checkpoint import (
    KEEP,
    MANIFEST,
    Checkpoint,
    load_optimizer,
    optimizer_parts,
    read,
    read_latest,
    write,
)


def made(number=0):
    """A small checkpoint with tensors of several kinds."""
    return Checkpoint(
        tensors={
            "model": {"weight": torch.arange(6.0).view(2, 3) + number, "half": torch.ones(3, dtype=torch.bfloat16)},
            "optimizer": {"0.step": torch.tensor(3.0), "0.count": torch.tensor([2**40, -1])},
            "strategy": {},
        },
        values={"rounds": number, "rate": 0.1, "text": "ß", "used": [[0, 8], [16, 24]], "nothing": None, "yes": True},
    )


def assert_same(one, other):
    assert one.values == other.values
    parts = {part: tensors for part, tensors in one.tensors.items() if tensors}
    assert parts.keys() == {part for part, tensors in other.tensors.items() if tensors}
    for part, tensors in parts.items():
        assert tensors.keys() == other.tensors[part].keys()
        for name, tensor in tensors.items():
            assert tensor.dtype == other.tensors[part][name].dtype and torch.equal(tensor, other.tensors[part][name])


def test_a_checkpoint_survives_the_disk(tmp_path):
    path = write(tmp_path, 7, made())
    assert path.name == "round-00000007"
    assert {file.name for file in path.iterdir()} == {
        "model.safetensors",
        "optimizer.safetensors",
        "strategy.safetensors",
        MANIFEST,
    }
    assert_same(read(path), made())


def test_a_checkpoint_survives_as_bytes():
    assert_same(Checkpoint.from_bytes(made().to_bytes()), made())
    assert_same(Checkpoint.from_bytes(Checkpoint().to_bytes()), Checkpoint())


def test_names_with_slashes_survive_as_bytes():
    odd = Checkpoint(tensors={"model": {"a/b/c": torch.ones(1), "a.b": torch.zeros(2)}})
    assert_same(Checkpoint.from_bytes(odd.to_bytes()), odd)


def test_views_of_one_buffer_are_written_each_for_itself(tmp_path):
    flat = torch.arange(4.0)
    views = Checkpoint(tensors={"model": {"a": flat[:2], "b": flat[2:], "all": flat, "turned": flat.view(2, 2).t()}})
    assert_same(read(write(tmp_path, 0, views)), views)
    assert_same(Checkpoint.from_bytes(views.to_bytes()), views)


def trained(make, steps=3):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    return train(model, optimizer, steps), optimizer


def train(model, optimizer, steps):
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((1, 3), float(step + 1))).square().sum().backward()
        optimizer.step()
    return model


OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, lr=0.01),
    lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    lambda p: torch.optim.Adam(p, lr=0.01),
    lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_resumed_optimizer_goes_on_exactly(make, tmp_path):
    model, optimizer = trained(make)
    tensors, values = optimizer_parts(optimizer)
    saved = Checkpoint({"model": model.state_dict(), "optimizer": tensors}, {"optimizer": values})
    found = read_latest(write(tmp_path, 3, saved).parent)
    assert found is not None
    for back in (found[1], Checkpoint.from_bytes(saved.to_bytes())):
        fresh = nn.Linear(3, 2)
        again = make(fresh.parameters())
        fresh.load_state_dict(back.tensors["model"])
        load_optimizer(again, back.tensors.get("optimizer", {}), back.values["optimizer"])
        expected, expected_optimizer = trained(make)
        for one, other in ((fresh, again), (expected, expected_optimizer)):
            train(one, other, 2)
        assert all(torch.equal(fresh.state_dict()[name], expected.state_dict()[name]) for name in fresh.state_dict())


# ---- damage


def damage(path, dice):
    """Flip one bit somewhere in the file."""
    content = bytearray(path.read_bytes())
    content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", MANIFEST])
@pytest.mark.parametrize("seed", range(20))
def test_a_flipped_bit_is_found_and_the_older_checkpoint_is_taken(name, seed, tmp_path, caplog):
    older, newer = write(tmp_path, 1, made(1)), write(tmp_path, 2, made(2))
    damage(newer / name, random.Random(seed))
    with pytest.raises(PacelineError, match="round-00000002"):
        read(newer)
    with caplog.at_level(logging.WARNING, "paceline"):
        found = read_latest(tmp_path)
    assert found is not None and found[0] == older
    assert_same(found[1], made(1))
    assert len(caplog.records) == 1 and "round-00000002" in caplog.text and "one before it is taken" in caplog.text


def test_every_flipped_bit_of_a_manifest_is_found(tmp_path):
    path = write(tmp_path, 1, Checkpoint(values={"rounds": 12, "used": [[0, 8]], "rate": 0.5}))
    manifest = path / MANIFEST
    whole = manifest.read_bytes()
    for bit in range(8 * len(whole)):
        broken = bytearray(whole)
        broken[bit // 8] ^= 1 << bit % 8
        manifest.write_bytes(broken)
        with pytest.raises(PacelineError):
            read(path)
    manifest.write_bytes(whole)
    read(path)


@pytest.mark.parametrize("kept", [0, 1, 0.5, -1])
def test_a_truncated_manifest_is_found(kept, tmp_path, caplog):
    write(tmp_path, 1, made(1))
    manifest = write(tmp_path, 2, made(2)) / MANIFEST
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[: int(len(whole) * kept) if isinstance(kept, float) else kept])
    found = read_latest(tmp_path)
    assert found is not None and found[0].name == "round-00000001" and "round-00000002" in caplog.text


@pytest.mark.parametrize("content", ["[]", "7", "null", '"text"', "{}", '{"format": 1}', '{"format": 1, "self": ""}'])
def test_a_manifest_that_is_something_else_is_found(content, tmp_path):
    path = write(tmp_path, 1, made())
    (path / MANIFEST).write_text(content)
    with pytest.raises(PacelineError, match=r"round-00000001.* is damaged"):
        read(path)


@pytest.mark.parametrize("name", ["model.safetensors", MANIFEST])
def test_a_missing_file_is_found(name, tmp_path):
    path = write(tmp_path, 1, made())
    (path / name).unlink()
    with pytest.raises(PacelineError, match=r"round-00000001.* is damaged"):
        read(path)


def test_a_checkpoint_of_another_version_is_named_as_such(tmp_path):
    path = write(tmp_path, 1, made())
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(manifest | {"format": 2}))
    with pytest.raises(PacelineError, match="has format 2; this version reads 1"):
        read(path)


def test_all_damaged_is_an_error_that_names_them(tmp_path, caplog):
    for number in (1, 2):
        damage(write(tmp_path, number, made()) / "model.safetensors", random.Random(number))
    with pytest.raises(PacelineError, match="All 2 checkpoints are damaged: round-00000002, round-00000001"):
        read_latest(tmp_path)
    assert len(caplog.records) == 2


def test_no_checkpoint_is_no_error(tmp_path):
    assert read_latest(tmp_path) is None and read_latest(tmp_path / "nowhere") is None


# ---- writing


def listing(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("full_after", [0, 1, 2, 3])
def test_a_full_disk_is_told_and_leaves_the_older_ones_whole(full_after, tmp_path, monkeypatch):
    for number in range(KEEP):
        write(tmp_path, number, made(number))
    before, really_write, written = listing(tmp_path), module._write_synced, []

    def write_until_full(path, content):
        if len(written) == full_after:
            path.write_bytes(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(path)
        really_write(path, content)

    monkeypatch.setattr(module, "_write_synced", write_until_full)
    with pytest.raises(PacelineError, match="checkpoint of round 9 could not be written: No space left on device"):
        write(tmp_path, 9, made(9))
    assert listing(tmp_path) == before
    for number in range(KEEP):
        assert_same(read(tmp_path / f"round-{number:08d}"), made(number))


def test_a_full_disk_leaves_the_same_round_saved_before_whole(tmp_path, monkeypatch):
    path = write(tmp_path, 1, made(1))

    def no_room(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "_write_synced", no_room)
    with pytest.raises(PacelineError, match="could not be written"):
        write(tmp_path, 1, made(2))
    assert_same(read(path), made(1))


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(PacelineError, match="could not be written"):
        write(tmp_path / "file" / "checkpoints", 1, made())


def test_what_a_crash_left_half_written_is_no_checkpoint_and_is_in_nobodys_way(tmp_path):
    aside = tmp_path / ".round-00000002.writing"
    aside.mkdir()
    (aside / "model.safetensors").write_bytes(b"half")
    assert read_latest(tmp_path) is None
    write(tmp_path, 2, made(2))
    assert listing(tmp_path) == ["round-00000002"]
    assert_same(read(tmp_path / "round-00000002"), made(2))


def test_only_the_last_few_are_kept(tmp_path):
    for number in (1, 5, 20, 100, 101):
        write(tmp_path, number, made(number))
    assert KEEP == 3 and listing(tmp_path) == ["round-00000020", "round-00000100", "round-00000101"]


def test_the_same_round_again_replaces_it(tmp_path):
    write(tmp_path, 1, made(1))
    write(tmp_path, 1, made(2))
    assert listing(tmp_path) == ["round-00000001"]
    assert_same(read(tmp_path / "round-00000001"), made(2))


# ---- a whole run


def loop(out, resume, stop_after=None):
    """Train alone; returns the samples of the micro-batches that were seen, the model and what was resumed."""
    torch.manual_seed(0)
    model, seen = nn.Linear(1, 1), []
    numbers = torch.arange(40.0).unsqueeze(1)
    with paceline.Run(strategy="all-reduce", out=out) as run:
        loader = run.loader(TensorDataset(numbers), micro_batch=4, epochs=2)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9), model)
        taken = run.resume() if resume else None
        for (x,) in loader:
            seen += x.flatten().int().tolist()
            optimizer.zero_grad()
            if len(seen) == stop_after:
                run.save()
            model(x).square().mean().backward()
            optimizer.step()
            if len(seen) == stop_after:
                break
    return seen, model, taken


def test_a_saved_run_goes_on_with_exactly_the_samples_that_are_left(tmp_path):
    uninterrupted, expected, _ = loop(tmp_path / "whole", resume=False)
    before, _, _ = loop(tmp_path / "cut", resume=False, stop_after=24)
    after, model, taken = loop(tmp_path / "cut", resume=True)
    assert taken is not None and read(taken).values["used"] == [[0, 24]]
    assert before + after == uninterrupted and sorted(uninterrupted) == sorted([*range(40)] * 2)
    assert torch.equal(model.weight, expected.weight) and torch.equal(model.bias, expected.bias)

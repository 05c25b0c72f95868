"""Stopped and resumed, also with another number of ranks: nothing is lost, nothing is used twice."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import ALL_TOGETHER, TOGETHER

from paceline.rules.order import order
from paceline.run.checkpoint import read

SAMPLES, EPOCHS = 50, 3
Ranks = Callable[..., Any]
SHORT = {"adaptive-sgd": "adaptive-sgd:mega_batch=16"}  # by default these data are two rounds
CHANGES = [
    *((name, 2, 3) for name in (*ALL_TOGETHER, "adaptive-sgd:mega_batch=16:overlap")),
    *((name, *ranks) for name in TOGETHER for ranks in ((3, 1), (1, 2))),
]


def used_by(path: Path) -> list[tuple[int, int]]:
    """The (epoch, sample) pairs that a checkpoint says are used."""
    positions = [position for start, stop in read(path).values["used"] for position in range(start, stop)]
    orders = [order(0, epoch, SAMPLES) for epoch in range(EPOCHS)]
    return [(position // SAMPLES, int(orders[position // SAMPLES][position % SAMPLES])) for position in positions]


def flat_fingerprint(state: dict[str, torch.Tensor]) -> str:
    flat = torch.cat([state["weight"].flatten(), state["bias"].flatten()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def checkpoints(outcome: Any) -> list[Path]:
    return sorted((outcome.folder / "checkpoints").glob("round-*"))


@pytest.mark.parametrize(("strategy", "before", "after"), CHANGES)
def test_what_a_checkpoint_holds_is_where_the_next_run_begins(
    ranks: Ranks, strategy: str, before: int, after: int
) -> None:
    strategy = SHORT.get(strategy, strategy)
    first = ranks("train_saving", before, strategy=strategy, samples=SAMPLES, epochs=EPOCHS, save_at=[1])
    (path,) = checkpoints(first)
    saved = read(path)
    used = used_by(path)
    round_number = saved.values["rounds"]
    assert flat_fingerprint(saved.tensors["model"]) == first.facts[0]["after_round"][round_number - 1]
    assert set(used) <= set(first.seen) and len(used) == len(set(used)) == saved.values["samples_applied"]

    second = ranks("train_saving", after, strategy=strategy, samples=SAMPLES, epochs=EPOCHS, resume=True)
    assert {fact["taken"] for fact in second.facts} == {str(path)}
    everything = Counter((epoch, index) for epoch in range(EPOCHS) for index in range(SAMPLES))
    assert Counter(used) + second.seen == everything
    assert second.facts[0]["applied"] == EPOCHS * SAMPLES
    for fact in second.facts:
        assert fact["after_round"] == second.facts[0]["after_round"]
        if "start" not in fact:
            continue  # it was never given a sample
        if fact["start_applied"] != len(used):
            continue  # its first sample came after others had gone on
        assert fact["start"]["model"] == {name: tensor.tolist() for name, tensor in saved.tensors["model"].items()}
        momenta = [saved.tensors["optimizer"][f"{number}.momentum_buffer"].tolist() for number in range(2)]
        assert fact["start"]["momenta"] == momenta
        assert fact["start"]["lr"] == saved.values["optimizer"]["param_groups"][0]["lr"]
    nothing_left = len(used) == EPOCHS * SAMPLES  # on a busy machine the first rounds may take it all
    assert nothing_left or any(fact.get("start_applied") == len(used) for fact in second.facts)


ANOTHER = [
    ("all-reduce", "abs-sgd"),
    ("abs-sgd", "gssp"),
    ("gssp", "local-sgd"),
    ("adaptive-sgd:mega_batch=16", "balanced"),
]


@pytest.mark.parametrize(("before", "after"), ANOTHER)
def test_another_strategy_goes_on_with_the_same_model(ranks: Ranks, before: str, after: str) -> None:
    first = ranks("train_saving", 3, strategy=before, samples=SAMPLES, epochs=EPOCHS, save_at=[1])
    (path,) = checkpoints(first)
    saved, used = read(path), used_by(path)
    second = ranks("train_saving", 2, strategy=after, samples=SAMPLES, epochs=EPOCHS, resume=True)
    assert {fact["taken"] for fact in second.facts} == {str(path)}
    everything = Counter((epoch, index) for epoch in range(EPOCHS) for index in range(SAMPLES))
    assert Counter(used) + second.seen == everything
    for fact in second.facts:
        if fact.get("start_applied") == len(used):  # it came before any step of the new run
            assert fact["start"]["model"] == {name: tensor.tolist() for name, tensor in saved.tensors["model"].items()}


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(ranks: Ranks) -> None:
    options = {"strategy": "abs-sgd", "samples": SAMPLES, "epochs": EPOCHS}
    first = ranks("train_saving", 2, **options, save_at=[1, 6])
    good, newest = checkpoints(first)
    tensors = newest / "model.safetensors"
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    second = ranks("train_saving", 2, **options, resume=True)
    assert {fact["taken"] for fact in second.facts} == {str(good)}
    assert f"{tensors} is damaged: its checksum differs" in second.outputs[0]
    everything = Counter((epoch, index) for epoch in range(EPOCHS) for index in range(SAMPLES))
    assert Counter(used_by(good)) + second.seen == everything

    (good / "manifest.json").write_text("{}")
    third = ranks("train_saving", 2, **options, resume=True, resume_from=str(first.folder), fails=True)
    assert third.codes == [1, 1]
    assert "All 2 checkpoints are damaged" in third.outputs[0]


def test_the_weights_alone_go_into_a_run_on_other_data(ranks: Ranks) -> None:
    first = ranks("train_saving", 2, strategy="abs-sgd", samples=SAMPLES, epochs=EPOCHS, save_at=[1])
    (path,) = checkpoints(first)
    saved = read(path).tensors["model"]
    second = ranks("train_saving", 3, strategy="balanced", samples=30, epochs=1, resume=True, weights_only=True)
    assert {fact["taken"] for fact in second.facts} == {str(path)}
    assert second.seen == Counter((0, index) for index in range(30))
    started = [fact["start"] for fact in second.facts if fact.get("start_applied") == 0]
    assert started and second.facts[0]["applied"] == 30
    for start in started:
        assert start["model"] == {name: tensor.tolist() for name, tensor in saved.items()}
        assert start["momenta"] == []


def test_with_no_checkpoint_the_run_begins_anew(ranks: Ranks, tmp_path: Path) -> None:
    outcome = ranks("train_saving", 2, strategy="balanced", samples=SAMPLES, epochs=1, resume=True)
    assert [fact["taken"] for fact in outcome.facts] == [None, None]
    assert outcome.seen == Counter((0, index) for index in range(SAMPLES))
    asked = {"strategy": "balanced", "samples": SAMPLES, "epochs": 1, "resume": True, "resume_from": str(tmp_path)}
    outcome = ranks("train_saving", 1, **asked, fails=True)
    assert outcome.codes == [1]
    assert f"There is no checkpoint in {tmp_path}" in outcome.outputs[0]

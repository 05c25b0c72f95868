"""Sparse multi-label workloads: from files and generated; the loss, the metric and the way through a race."""

from __future__ import annotations

import lzma
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from paceline import workloads
from paceline.backends.replica import Replica
from paceline.errors import PacelineError
from paceline.race.race import run_race
from paceline.race.spec import RaceSpec
from paceline.workloads import xmc, xmc_generated
from paceline.workloads.models import SparseMLP
from paceline.workloads.sparse_rows import Bags, Rows
from paceline.workloads.xmc import Xmc, hits, summed_loss
from paceline.workloads.xmc_generated import LIKE, SparseGenerator, distinct, power_law

TINY = "xmc-generated:like=eurlex-4k:scale=0.03"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PACELINE_DATA", raising=False)
    return tmp_path / "cache" / "paceline" / "sparse"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "data"
    place.mkdir()
    (place / "toy_train.txt").write_text("4 6 5\n0,2 0:3 5:4\n1 1:1\n 2:7\n4 3:1 4:1\n")
    (place / "toy_test.txt.xz").write_bytes(lzma.compress(b"2 6 5\n0 0:1\n1 1:2\n"))
    return place


def load(text: str, data: Path | None = None) -> Xmc:
    workload = workloads.load(text, data)
    assert isinstance(workload, Xmc)
    return workload


# ---- from files


def test_rows_from_files(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    workload = load("xmc:scaling=none", folder)
    assert len(workload.train) == 4 and len(workload.test) == 2
    x, y = workload.train[:]
    assert x.starts.tolist() == [0, 2, 3, 4, 6] and x.values.tolist() == [3, 4, 1, 7, 1, 1]
    assert y.starts.tolist() == [0, 2, 3, 3, 4] and y.indices.tolist() == [0, 2, 1, 4]
    model = workload.build_model(0)
    assert isinstance(model, SparseMLP) and model(x).shape == (4, 5)
    assert "toy_train.txt: 1 of 4 rows have no label" in caplog.text
    caplog.clear()
    load("xmc:scaling=none", folder)
    assert not caplog.text, "they are told when the file is read, and it is read once"


def test_values_are_scaled_unless_that_is_not_wanted(folder: Path) -> None:
    x, _ = load("xmc", folder).train[:]
    logs = np.log1p([3.0, 4.0])
    assert np.allclose(x.values[:2], logs / np.linalg.norm(logs)) and x.values[2:4].tolist() == [1.0, 1.0]
    rows = Rows(np.array([2, 0, 1]), np.arange(3), np.array([-3.0, 0.0, 0.0], np.float32), np.zeros(3), np.zeros(0))
    assert xmc.scaled(rows).values.tolist() == [-1.0, 0.0, 0.0], "signs stay, and rows of zeros stay zero"


def test_a_changed_file_is_read_again(folder: Path) -> None:
    load("xmc", folder)
    (folder / "toy_train.txt").write_text("1 6 5\n0 0:3\n")
    assert len(load("xmc", folder).train) == 1


def test_the_folder_may_be_a_subfolder_of_the_environments(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("xmc", "eurlex-4k"):
        folder = folder.rename(tmp_path / name)
        monkeypatch.setenv("PACELINE_DATA", str(tmp_path))
        assert len(load("xmc").train) == 4


def test_missing_and_ambiguous_files_are_told(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match=r"no files of sparse data.*nowhere.*--data DIR.*xmc-generated"):
        load("xmc", tmp_path / "nowhere")
    with pytest.raises(PacelineError, match=r"no files of sparse data.*PACELINE_DATA"):
        load("xmc")
    for part in ("train", "test"):
        (folder / f"other_{part}.txt").write_text("1 6 5\n0 0:3\n")
    with pytest.raises(PacelineError, match=r"several files to train with: other_train\.txt, toy_train\.txt"):
        load("xmc", folder)
    (folder / "toy_train.txt").unlink()
    assert len(load("xmc", folder).train) == 1
    (folder / "other_test.txt").write_text("1 7 5\n0 0:3\n")
    with pytest.raises(PacelineError, match=r"not of the same data.*other_train\.txt and .*other_test\.txt"):
        load("xmc", folder)


def test_options_are_read_and_wrong_ones_told() -> None:
    with pytest.raises(PacelineError, match=r"no option of the workload xmc called 'scalin'. Did you mean 'scaling'"):
        load("xmc:scalin=none")
    with pytest.raises(PacelineError, match=r"no scaling 'l2'"):
        load("xmc:scaling=l2")
    with pytest.raises(PacelineError, match=r"no data set to generate rows like 'amazon'. Did you mean 'amazon-670k'"):
        load("xmc-generated:like=amazon")
    with pytest.raises(PacelineError, match=r"scale of the workload xmc-generated cannot be 'big'"):
        load("xmc-generated:scale=big")
    with pytest.raises(PacelineError, match="scale of 0 is not possible"):
        load("xmc-generated:scale=0")
    with pytest.raises(PacelineError, match="no option of the workload digits called 'scale'"):
        workloads.load("digits:scale=2")


# ---- loss and metric


def test_the_loss_is_a_cross_entropy_with_equal_targets_on_the_true_labels() -> None:
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), requires_grad=True)
    true = Bags(torch.tensor([0, 2, 3, 3, 6]), torch.tensor([0, 5, 2, 1, 3, 4]))
    target = torch.zeros(4, 6)
    for row, labels in enumerate(([0, 5], [2], [], [1, 3, 4])):
        for label in labels:
            target[row, label] = 1 / len(labels)
    by_hand = -(target * logits.log_softmax(1)).sum()
    assert torch.allclose(summed_loss(logits, true), by_hand)
    ours, theirs = (torch.autograd.grad(loss, logits)[0] for loss in (summed_loss(logits, true), by_hand))
    assert torch.allclose(ours, theirs, atol=1e-6) and ours[2].abs().sum() == 0, "a row without a label pulls nowhere"


def test_hits_are_counted_as_by_hand() -> None:
    chance = torch.Generator().manual_seed(2)
    logits = torch.randn(50, 20, generator=chance)
    labels = [torch.randperm(20, generator=chance)[: i % 7].tolist() for i in range(50)]
    starts = torch.tensor([0, *np.cumsum([len(each) for each in labels])])
    true = Bags(starts, torch.tensor([label for each in labels for label in each]))
    by_hand = [
        sum(label in labels[row] for row in range(50) for label in logits[row].topk(k).indices.tolist())
        for k in (1, 3, 5)
    ]
    assert hits(logits, true).tolist() == by_hand
    assert hits(torch.tensor([[1.0, 0.0]]), Bags(torch.tensor([0, 1]), torch.tensor([1]))).tolist() == [0, 1, 1]


def test_evaluating_in_small_parts_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = load(TINY)
    model = workload.build_model(0)
    whole, precisions = workload.evaluate(model), workload.precisions(model)
    monkeypatch.setattr(xmc, "LOGITS_AT_ONCE", 500)
    assert workload.evaluate(model) == pytest.approx(whole) and workload.precisions(model) == precisions
    assert whole[0] == precisions[1] and list(precisions) == [1, 3, 5]


def test_of_very_many_held_out_rows_some_are_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "toy_test.txt.xz").write_bytes(lzma.compress(b"7 6 5\n" + b"0 0:1\n1 1:1\n" * 3 + b"2 2:1\n"))
    monkeypatch.setattr(xmc, "MOST_LOGITS", 15)
    test = load("xmc", folder).test
    assert test[:][1].indices.tolist() == [0, 1, 2], "every third"


# ---- batches


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader_gives_the_rows_that_were_asked_for(folder: Path, workers: int) -> None:
    samples = load("xmc:scaling=none", folder).train
    loader: Any = DataLoader(samples, batch_size=3, num_workers=workers, collate_fn=samples.collate)
    sizes = []
    for number, (x, y) in enumerate(loader):
        expected_x, expected_y = samples[3 * number : 3 * number + 3]
        for found, expected in ((x, expected_x), (y, expected_y)):
            assert torch.equal(found.starts, expected.starts) and torch.equal(found.indices, expected.indices)
        assert x.indices.dtype == torch.int64 and torch.equal(x.values, expected_x.values)
        sizes.append(len(y))
    assert sizes == [3, 1]


def test_a_row_does_not_depend_on_its_company() -> None:
    workload = load(TINY)
    model = workload.build_model(0)
    together = model(workload.train[:10][0])
    alone = torch.cat([model(workload.train[i][0]) for i in range(10)])
    assert torch.allclose(together, alone, atol=1e-5)


# ---- generated rows


def test_generated_rows_have_the_statistics_that_were_asked_for() -> None:
    sizes = LIKE["amazon-670k"].times(0.02)
    parts = list(SparseGenerator(sizes).rows(0, 5000))
    lengths = np.concatenate([part.sizes for part in parts])
    indices, labels = (np.concatenate([getattr(part, name) for part in parts]) for name in ("indices", "labels"))
    assert len(lengths) == 5000 and lengths.min() >= 1
    assert lengths.mean() == pytest.approx(sizes.nonzeros, rel=0.05)
    assert np.log(lengths).std() == pytest.approx(0.8, abs=0.06)
    assert np.concatenate([part.label_counts for part in parts]).mean() == pytest.approx(5.5, rel=0.02)
    assert indices.min() >= 0 and indices.max() < sizes.features and labels.max() < sizes.labels
    for drawn, items, exponent in ((indices, sizes.features, 0.94), (labels, sizes.labels, 1.01)):
        counts = np.sort(np.bincount(drawn, minlength=items))[::-1]
        middle = np.arange(30, items // 10)
        slope = np.polyfit(np.log(middle), np.log(counts[middle]), 1)[0]
        assert slope == pytest.approx(-exponent, abs=0.25)
    for part in parts:
        rows = np.repeat(np.arange(len(part.sizes)), part.sizes)
        assert len(np.unique(rows * sizes.features + part.indices)) == len(rows), "no feature twice in a row"
        assert np.allclose(np.bincount(rows, part.values.astype(float) ** 2), 1, atol=1e-4)


@pytest.mark.parametrize("like", LIKE)
def test_to_name_the_commonest_label_in_every_row_is_a_bad_guess(like: str) -> None:
    (part,) = SparseGenerator(LIKE[like].times(0.03)).rows(0, 1000)
    assert np.bincount(part.labels).max() < 400


def test_generated_rows_depend_on_the_seed_and_on_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = LIKE["eurlex-4k"].times(0.02)

    def values(seed: int, part: int, count: int) -> list[float]:
        return [value for rows in SparseGenerator(sizes, seed).rows(part, count) for value in rows.values.tolist()]

    first = values(0, 0, 100)
    assert values(0, 0, 100) == first and values(1, 0, 100) != first and values(0, 1, 100) != first
    monkeypatch.setattr(xmc_generated, "ROWS_AT_ONCE", 30)
    parts = list(SparseGenerator(sizes).rows(0, 100))
    assert [len(part.sizes) for part in parts] == [30, 30, 30, 10]


def test_the_real_sets_have_the_sizes_of_the_literature() -> None:
    assert {name: (like.features, like.labels, like.rows, like.held_out) for name, like in LIKE.items()} == {
        "eurlex-4k": (5_000, 3_993, 15_539, 3_809),
        "delicious-200k": (782_585, 205_443, 196_606, 100_095),
        "amazon-670k": (135_909, 670_091, 490_449, 153_025),
    }


def test_a_power_law_stays_within_its_items() -> None:
    for exponent in (0.5, 0.94, 1.01):
        ranks = power_law(np.array([0.0, 0.5, 1.0]), 1000, exponent)
        assert ranks[0] == 0 and 0 < ranks[1] < 999 and ranks[2] == 999


def test_distinct_draws_keep_their_order() -> None:
    counts, items = distinct(np.array([0, 0, 0, 2, 2]), np.array([5, 5, 1, 9, 0]), np.array([9, 9, 1]))
    assert counts.tolist() == [2, 0, 1] and items.tolist() == [5, 1, 9]


@pytest.mark.parametrize(
    ("like", "epochs", "better"),
    [("eurlex-4k:scale=0.1", 4, 3.0), ("delicious-200k:scale=0.005", 8, 1.3)],
    ids=["few labels a row", "very many"],
)
def test_generated_labels_can_be_learnt(like: str, epochs: int, better: float) -> None:
    workload = load(f"xmc-generated:like={like}")
    model = workload.build_model(0)
    counts = torch.bincount(workload.train[:][1].indices)
    commonest = int(counts.argmax())
    test = workload.test[:][1]
    by_chance = len(torch.unique(test.rows[test.indices == commonest])) / len(test)
    replica = Replica(model, workload.build_optimizer(model, optimizer="adamw"))
    chance = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for chosen in torch.randperm(len(workload.train), generator=chance).split(32):
            workload.loss(model, workload.train[chosen]).backward()
            replica.apply(replica.take_gradients(len(chosen), []))
    found = workload.evaluate(model)[0]
    assert found > better * by_chance and found > 0.3, (found, by_chance)


# ---- the race


def test_a_race_in_virtual_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = RaceSpec(
        strategies=("all-reduce", "abs-sgd", "d-psgd"),
        speeds=(1.0, 0.5),
        workload=TINY,
        backend="simulated",
        seconds=0.6,
    )
    race = run_race(spec, tmp_path)
    assert race["metric"] == "P@1" and race["workload"] == TINY and not race["failed"]
    assert all(result["samples_applied"] > 0 and math.isfinite(result["final_metric"]) for result in race["results"])
    assert capsys.readouterr().out.count("Sparse gradients become dense") == 3, "once for each strategy"

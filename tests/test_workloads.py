"""Workloads: the right data, reproducible models, learning in a few epochs, and clear words when files are wrong."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from paceline import workloads
from paceline.errors import PacelineError
from paceline.workloads import cifar_10, fashion_mnist
from paceline.workloads.models import VGG19, LeNet5, ResNet18
from paceline.workloads.synthetic import synthetic
from paceline.workloads.workload import Samples, Workload


def train(workload: Workload, epochs: int, batch: int, optimizer: str | None = None) -> float:
    model = workload.build_model(0)
    moving = workload.build_optimizer(model, optimizer=optimizer)
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for x, y in DataLoader(workload.train, batch_size=batch, shuffle=True, generator=generator):
            moving.zero_grad()
            workload.loss(model, (x, y)).backward()
            moving.step()
    return workload.evaluate(model)[0]


def test_digits() -> None:
    workload = workloads.load("digits")
    assert len(workload.train) == 1437 and workload.test.x.shape == (360, 64)
    assert torch.equal(workload.test.y, workloads.load("digits").test.y)
    assert train(workload, epochs=10, batch=32) >= workload.target


def test_synthetic_reaches_its_target_and_takes_its_sizes() -> None:
    assert train(workloads.load("synthetic"), epochs=2, batch=128) >= workloads.load("synthetic").target
    small = synthetic(samples=20, features=3, classes=2)
    assert small.train.x.shape == (20, 3) and len(small.test) == 5
    assert not torch.equal(small.train.x, synthetic(20, 3, 2, seed=1).train.x)


def test_the_seed_alone_makes_the_model_and_the_global_random_state_is_left_alone() -> None:
    workload = workloads.load("synthetic")
    before = torch.random.get_rng_state()
    first, again, other = (workload.build_model(seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    weights = [next(model.parameters()) for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("training", [True, False])
def test_evaluating_leaves_the_mode_as_it_was(training: bool) -> None:
    workload = synthetic(100, 4, 3)
    model = workload.build_model(0).train(training)
    metric, loss = workload.evaluate(model)
    assert 0.0 <= metric <= 1.0 and loss > 0.0 and model.training is training


def test_evaluating_is_a_mean_over_samples_in_whatever_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = synthetic(100, 4, 3)
    model = workload.build_model(0)
    at_once = workload.evaluate(model)
    logits = model(workload.test.x)
    assert at_once[0] == pytest.approx((logits.argmax(1) == workload.test.y).float().mean().item())
    assert at_once[1] == pytest.approx(workload.loss(model, workload.test[:]).item())
    monkeypatch.setattr(type(workload), "evaluation_batch", 7)
    assert workload.evaluate(model) == pytest.approx(at_once)
    part = Samples(*workload.test[:9])
    assert workload.evaluate(model, part)[1] == pytest.approx(workload.loss(model, part[:]).item())


def test_options_of_the_optimizer() -> None:
    workload = synthetic(100, 4, 3)
    optimizer = workload.build_optimizer(workload.build_model(0), optimizer="plain-sgd", lr=0.5)
    assert (optimizer.defaults["lr"], optimizer.defaults["momentum"]) == (0.5, 0.0)
    optimizer = workload.build_optimizer(workload.build_model(0), optimizer="adamw", lr=0.5)
    assert (optimizer.defaults["lr"], optimizer.defaults["betas"]) == (0.5, (0.9, 0.999))


@pytest.mark.parametrize(
    ("name", "kind", "nesterov", "lr"),
    [
        (None, torch.optim.SGD, False, 0.02),
        ("sgd", torch.optim.SGD, False, 0.02),
        ("nesterov", torch.optim.SGD, True, 0.02),
        ("adamw", torch.optim.AdamW, None, 1e-3),
    ],
)
def test_each_optimizer_has_its_usual_learning_rate(
    name: str | None, kind: type[torch.optim.Optimizer], nesterov: bool | None, lr: float
) -> None:
    workload = synthetic(100, 4, 3)
    optimizer = workload.build_optimizer(workload.build_model(0), optimizer=name)
    assert type(optimizer) is kind and optimizer.defaults["lr"] == lr
    assert optimizer.defaults.get("nesterov") is nesterov
    assert optimizer.defaults.get("momentum", optimizer.defaults.get("betas", (0.9,))[0]) == 0.9


@pytest.mark.parametrize("name", workloads.OPTIMIZERS)
def test_every_optimizer_learns(name: str) -> None:
    assert train(workloads.load("synthetic"), epochs=2, batch=64, optimizer=name) >= 0.85


def test_fetching_many_samples_is_fetching_each() -> None:
    samples = synthetic(100, 4, 3).train
    for (x, y), index in zip(samples.__getitems__([3, 99, 3]), [3, 99, 3], strict=True):
        assert torch.equal(x, samples[index][0]) and torch.equal(y, samples[index][1])


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(PacelineError, match="Did you mean 'digits'"):
        workloads.load("digit")
    possible = "Possible: cifar-10, digits, fashion-mnist, multi30k, synthetic, xmc, xmc-generated"
    with pytest.raises(PacelineError, match=possible):
        workloads.load("zzz")
    with pytest.raises(PacelineError, match=r"no model for the workload fashion-mnist called 'lenet'.*lenet-5"):
        workloads.load("fashion-mnist", model="lenet")
    with pytest.raises(PacelineError, match=r"no optimizer 'adam'\. Did you mean 'adamw'"):
        synthetic(100, 4, 3).build_optimizer(synthetic(100, 4, 3).build_model(0), optimizer="adam")


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_every_model_of_the_table_is_there(name: str) -> None:
    for model in workloads.MODELS[name]:
        workload = workloads.load(name, model=model)
        assert workload.build_model(0)(workload.test.x[:3]).shape == (3, 10)


# ---- the residual network


def test_resnet_has_eighteen_layers_and_the_papers_stages() -> None:
    model = ResNet18(width=8)
    sizes = [module.weight.shape for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len([size for size in sizes if size[-1] == 3]) + 1 == 18, "17 convolutions and the classifier"
    assert [size[0] for size in sizes if size[-1] == 1] == [16, 32, 64], "the ways where the shape changes"


@pytest.mark.parametrize(("shape", "stem_stride"), [((1, 28, 28), 1), ((1, 28, 28), 2), ((3, 32, 32), 1)])
def test_resnet_takes_small_images(shape: tuple[int, int, int], stem_stride: int) -> None:
    model = ResNet18(width=2, classes=7, channels=shape[0], stem_stride=stem_stride)
    assert model(torch.randn(2, *shape)).shape == (2, 7)
    assert model.blocks(model.stem(torch.randn(2, *shape))).shape[1:] == (16, *[(shape[1] // stem_stride + 7) // 8] * 2)


@pytest.mark.parametrize("model", [ResNet18(width=4, stem_stride=2), VGG19(width=4)], ids=["resnet-18", "vgg-19"])
def test_samples_do_not_depend_on_their_company_and_ranks_hold_nothing_but_parameters(model: nn.Module) -> None:
    images = torch.randn(6, 1, 28, 28)
    together = model(images)
    alone = torch.cat([model(part) for part in images.split((1, 2, 3))])
    assert torch.allclose(together, alone, atol=1e-5)
    assert not list(model.buffers())


# ---- the deep network without ways around


def test_vgg_has_the_papers_sixteen_convolutions() -> None:
    layers = [module for module in VGG19(width=2, classes=7).features if isinstance(module, nn.Conv2d | nn.MaxPool2d)]
    stages = " ".join("pool" if isinstance(layer, nn.MaxPool2d) else str(layer.out_channels) for layer in layers)
    assert stages == "2 2 pool 4 4 pool 8 8 8 8 pool 16 16 16 16 pool 16 16 16 16 pool"
    assert all(layer.kernel_size == (3, 3) for layer in layers if isinstance(layer, nn.Conv2d))


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 17, 17)])
def test_vgg_takes_small_images_down_to_one_pixel(shape: tuple[int, int, int]) -> None:
    model = VGG19(width=2, classes=7, channels=shape[0])
    assert model.features(torch.randn(2, *shape)).shape == (2, 16, 1, 1)
    assert model(torch.randn(2, *shape)).shape == (2, 7)


def test_the_names_are_known_without_torch() -> None:
    code = "import sys, paceline.workloads, paceline.record, paceline.summary; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- Fashion-MNIST: small files of the same format stand in for the real ones


def write_idx(path: Path, array: np.ndarray, magic: int) -> None:
    raw = np.array([magic, *array.shape], dtype=">u4").tobytes() + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for part, count in (("train", 50), ("t10k", 20)):
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", rng.integers(0, 256, (count, 28, 28)), 0x803)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte", rng.integers(0, 10, count), 0x801)
    return tmp_path


@pytest.mark.parametrize("model", [None, *workloads.MODELS["fashion-mnist"]])
def test_fashion_mnist_from_plain_and_compressed_files(folder: Path, model: str | None) -> None:
    workload = workloads.load("fashion-mnist", folder, model)
    assert workload.train.x.shape == (50, 1, 28, 28) and len(workload.test) == 20
    net = workload.build_model(0)
    assert net(workload.test.x).shape == (20, 10)
    assert workload.loss(net, workload.train[0:2]).item() > 0
    assert (type(net) is LeNet5) == (model in (None, "lenet-5"))
    assert [workload.learning_rate(optimizer) for optimizer in workloads.OPTIMIZERS] == [0.01, 0.01, 2e-3, 0.01]


def test_the_folder_may_come_from_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_DATA", str(folder))
    assert len(workloads.load("fashion-mnist").train) == 50


def test_missing_files_tell_how_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_DATA", raising=False)
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", tmp_path / "nowhere")
    with pytest.raises(PacelineError, match=r"apt-get install dataset-fashion-mnist.*--data"):
        workloads.load("fashion-mnist")


def test_wrong_files_are_named(folder: Path) -> None:
    labels, images = folder / "train-labels-idx1-ubyte", folder / "train-images-idx3-ubyte.gz"
    good = labels.read_bytes()
    for bad, words in [
        (good[:-1], "cut off"),
        (good[:5], "does not begin with an idx header"),
        (b"\0" * 58, "does not begin with an idx header"),
        (good[:4] + (49).to_bytes(4, "big") + good[9:], "50 images of 28×28 and 49 labels"),
        (good[:-1] + b"\x0b", "not Fashion-MNIST's"),
    ]:
        labels.write_bytes(bad)
        with pytest.raises(PacelineError, match=words):
            workloads.load("fashion-mnist", folder)
    images.write_bytes(images.read_bytes()[:100])
    with pytest.raises(PacelineError, match=r"train-images-idx3-ubyte\.gz.*cannot be read"):
        workloads.load("fashion-mnist", folder)


# ---- CIFAR-10: a tiny file of the same fields stands in for the real one


def cifar_arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {"class_names": np.array(["a", "b"])}
    for part, count in (("train", 40), ("test", 12)):
        arrays[f"x_{part}"] = rng.integers(0, 256, (count, 3, 32, 32)).astype(np.uint8)
        arrays[f"y_{part}"] = (np.arange(count) % 10).astype(np.uint8)
    return arrays


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    np.savez(tmp_path / cifar_10.FILE, **cifar_arrays())
    return tmp_path


@pytest.mark.parametrize("model", [None, *workloads.MODELS["cifar-10"]])
def test_cifar_10_from_its_file(cifar: Path, model: str | None) -> None:
    workload = workloads.load("cifar-10", cifar, model)
    assert workload.train.x.shape == (40, 3, 32, 32) and len(workload.test) == 12
    assert workload.train.y.dtype == torch.int64 and abs(workload.train.x.mean()) < 0.2
    net = workload.build_model(0)
    assert net(workload.test.x).shape == (12, 10)
    assert workload.loss(net, workload.train[0:2]).item() > 0
    assert (type(net) is LeNet5) == (model in (None, "lenet-5"))


def test_cifar_10s_file_may_lie_in_a_subfolder_and_the_folder_come_from_the_environment(
    cifar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = tmp_path / "all" / "cifar10"
    below.mkdir(parents=True)
    (cifar / cifar_10.FILE).rename(below / cifar_10.FILE)
    assert len(workloads.load("cifar-10", tmp_path / "all").train) == 40
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path / "all"))
    assert len(workloads.load("cifar-10").train) == 40


def test_a_missing_file_of_cifar_10_tells_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PacelineError, match=r"nowhere or .*nowhere.cifar10.*--data DIR.*cs\.toronto\.edu"):
        workloads.load("cifar-10", tmp_path / "nowhere")
    monkeypatch.delenv("PACELINE_DATA", raising=False)
    with pytest.raises(PacelineError, match=r"is not there\. Give the folder .* PACELINE_DATA"):
        workloads.load("cifar-10")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"x_train": np.zeros((40, 32, 32, 3), np.uint8)}, r"train images are uint8 of \(40, 32, 32, 3\)"),
        ({"x_test": np.zeros((12, 3, 32, 32), np.float32)}, "test images are float32"),
        ({"y_train": np.zeros(39, np.uint8)}, r"labels uint8 of \(39,\)"),
        ({"y_train": np.full(40, 10, np.uint8)}, "not whole numbers from 0 to 9"),
        ({"y_test": np.full(12, -1, np.int64)}, "not whole numbers from 0 to 9"),
        ({"y_test": np.full(12, 0.5)}, "not whole numbers from 0 to 9"),
        ({"x_test": np.zeros((0, 3, 32, 32), np.uint8), "y_test": np.zeros(0, np.uint8)}, "at least one"),
        ({"y_train": np.array([0] * 40, dtype=object)}, "cannot be read"),
    ],
)
def test_wrong_arrays_of_cifar_10_are_named(cifar: Path, wrong: dict[str, np.ndarray], words: str) -> None:
    np.savez(cifar / cifar_10.FILE, **{**cifar_arrays(), **wrong})
    with pytest.raises(PacelineError, match=words):
        workloads.load("cifar-10", cifar)


def test_a_damaged_file_of_cifar_10_is_told(cifar: Path) -> None:
    file = cifar / cifar_10.FILE
    whole = file.read_bytes()
    for bad in (whole[:1000], whole[:-30], b"", b"no archive", whole[:5000] + b"\xff" * 50 + whole[5050:]):
        file.write_bytes(bad)
        with pytest.raises(PacelineError, match=r"cannot be read.*x_train and x_test"):
            workloads.load("cifar-10", cifar)
    with file.open("wb") as stream:
        np.save(stream, np.zeros(3))
    with pytest.raises(PacelineError, match="not an npz file"):
        workloads.load("cifar-10", cifar)
    arrays = cifar_arrays()
    del arrays["y_test"]
    np.savez(file, **arrays)
    with pytest.raises(PacelineError, match="y_test"):
        workloads.load("cifar-10", cifar)

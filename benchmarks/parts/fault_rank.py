"""One rank of the measurements of `faults`: fault_rank.py STRATEGY EPOCHS SEED FOUND

A small classification on an emulated device of one of four speeds. Whoever leads in the end writes the accuracy on
samples that were held out, and how many there were to learn from."""

from __future__ import annotations

import json
import sys
from itertools import repeat
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.race.emulation import EmulatedDevice
from paceline.race.worker import heedful_sleep

SPEEDS = (1.0, 1.0, 0.5, 0.5)
MICRO_BATCH, MICRO_BATCH_SECONDS = 16, 0.02  # at speed 1
SAMPLES, HELD_OUT = 2048, 1024


def train(strategy: str, epochs: int, seed: int, found: Path) -> None:
    torch.manual_seed(seed)
    x = torch.randn(SAMPLES + HELD_OUT, 20)
    y = (x @ torch.randn(20, 5)).argmax(1)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    with paceline.Run(strategy, seed=seed) as run:
        loader = run.loader(TensorDataset(x[:SAMPLES], y[:SAMPLES]), micro_batch=MICRO_BATCH, epochs=epochs)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model)
        seconds = MICRO_BATCH_SECONDS / SPEEDS[run.rank % len(SPEEDS)]
        device = EmulatedDevice(repeat(seconds), seconds, MICRO_BATCH, sleep=lambda rest: heedful_sleep(run, rest))
        for inputs, labels in loader:
            with run.abortable(), device.micro_batch(len(labels)):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        if run.node.leads:
            accuracy = float((model(x[SAMPLES:]).argmax(1) == y[SAMPLES:]).float().mean())
            found.write_text(json.dumps({"accuracy": accuracy, "samples": epochs * SAMPLES}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))

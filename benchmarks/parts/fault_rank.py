"""One rank of the measurements of `faults`: a small classification on an emulated device of one of four speeds.

Whoever leads in the end writes the accuracy on samples that were held out, and how many there were to learn from. As a
program it forks such ranks (see `forked`); with arguments it is one: fault_rank.py STRATEGY EPOCHS SEED FOUND SAVES."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import time
import traceback
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.launch.local import end_with_parent
from paceline.race.emulation import EmulatedDevice
from paceline.race.worker import heedful_sleep

SPEEDS = (1.0, 1.0, 0.5, 0.5)
MICRO_BATCH, MICRO_BATCH_SECONDS = 16, 0.02  # at speed 1
SAMPLES, HELD_OUT = 2048, 1024
SAVE_EVERY = 8  # micro-batches of the rank that leads
LOOK_SECONDS = 0.005  # of the forking process, for orders and deaths


def train(strategy: str, epochs: int, seed: int, found: str, saves: bool) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGUSR1, be_stuck)
    torch.manual_seed(seed)
    x = torch.randn(SAMPLES + HELD_OUT, 20)
    y = (x @ torch.randn(20, 5)).argmax(1)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    with paceline.Run(strategy, seed=seed) as run:
        loader = run.loader(TensorDataset(x[:SAMPLES], y[:SAMPLES]), micro_batch=MICRO_BATCH, epochs=epochs)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model)
        seconds = MICRO_BATCH_SECONDS / SPEEDS[run.rank % len(SPEEDS)]
        device = EmulatedDevice(repeat(seconds), seconds, MICRO_BATCH, sleep=lambda rest: heedful_sleep(run, rest))
        for number, (inputs, labels) in enumerate(loader):
            with run.abortable(), device.micro_batch(len(labels)):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
            if saves and run.node.leads and number % SAVE_EVERY == SAVE_EVERY - 1:
                run.save()
            optimizer.step()
        if run.node.leads and not run.left:
            accuracy = float((model(x[SAMPLES:]).argmax(1) == y[SAMPLES:]).float().mean())
            run.node.has_no_more_of_the_lost()  # all have met, and know the same
            told = {"ledger": run.surroundings.control.status()["ledger"], "began": run.surroundings.origin}
            Path(found).write_text(json.dumps({"accuracy": accuracy, "samples": epochs * SAMPLES, **told}))


def be_stuck(*_: object) -> None:
    """In the middle of whatever the loop does."""
    while True:
        time.sleep(0.1)


def fork_ranks() -> None:
    """Until the orders end; then those who are left end with this process."""
    alive: set[int] = set()
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)  # the first one imports 800 modules: once, not in each rank
    gc.collect()
    gc.freeze()  # else the first collection of every rank copies all pages of what was imported
    say({"ready": os.getpid()})
    while True:
        for pid in list(alive):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                alive.discard(pid)
                say({"ended": pid, "code": os.waitstatus_to_exitcode(status)})
        if select.select([sys.stdin], [], [], LOOK_SECONDS)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            pid = os.fork()
            if pid == 0:
                os._exit(be_rank(json.loads(line)))
            alive.add(pid)
            say({"pid": pid})


def be_rank(order: dict[str, Any]) -> int:
    end_with_parent()
    os.environ.update(order["environment"])
    output = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        train(*order["arguments"])
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def say(news: dict[str, int]) -> None:
    print(json.dumps(news), flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        fork_ranks()
    else:
        train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5] == "saves")

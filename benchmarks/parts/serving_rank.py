"""One rank of the measurements of `serving`: serving_rank.py WAY FOUND

`echo`: 100 MB to the server and 100 MB back, and nothing else. `asp…`: the same with a server that steps."""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.node import Node
from paceline.strategies.asp import Asp

WIDTH, LAYERS = 1250, 16  # 25 M numbers, 100 MB
SECONDS = 8.0
MEGA = 1e6


@dataclass(frozen=True, kw_only=True)
class Echo(Asp):
    """Messages of the model's size there and back, and no step."""

    name: ClassVar[str] = "echo"

    async def worker(self, node: Node) -> None:
        server = node.workers
        while (await node.gradient()).count:
            node.send(server, "there", node.parameters)
            await node.receive()
        node.send(server, "done")
        node.adopt(await node.mean_model(self._share(node)))

    async def server(self, node: Node) -> None:
        done = 0
        while done < node.workers:
            message = await node.receive()
            if message.kind == "there":
                node.send(message.sender, "back", node.parameters)
            else:
                done += 1
        node.adopt(await node.mean_model(self._share(node)))


def transport(way: str, found: Path) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    gradients = [torch.full_like(p, 1e-9) for p in model.parameters()]
    nbytes = sum(gradient.nbytes for gradient in gradients)
    steps = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)  # torch imports 80 MB for it
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - nbytes
    with paceline.Run(Echo() if way == "echo" else f"{way}:overlap=never") as run:
        loader = run.loader(TensorDataset(torch.zeros(64)), micro_batch=1, seconds=SECONDS)
        optimizer = run.optimizer(steps, model)
        count, began = 0, 0.0
        for _ in loader:
            count += 1
            began = began or time.perf_counter()
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
        spent = time.perf_counter() - began
        counted = torch.zeros(2, run.world_size, dtype=torch.float64)
        memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / nbytes
        counted[:, run.rank] = torch.tensor([count / spent if count else 0.0, memory if run.serves else 0.0])
        rates, memories = run.node.sum_now(counted)
        if run.rank == 0:
            found.write_text(
                json.dumps({"rate": 2 * nbytes * float(rates.sum()) / MEGA, "memory": float(memories.max())})
            )


if __name__ == "__main__":
    torch.set_num_threads(1)
    transport(sys.argv[1], Path(sys.argv[2]))

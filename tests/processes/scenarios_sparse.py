"""What ranks do in the tests of sparse rows: bags of features of very different length."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scenarios import Diary, Facts
from torch import nn

import paceline
from paceline.workloads.sparse_rows import Bags, SparseSamples

FEATURES, CLASSES = 30, 4


def bags(samples: int) -> SparseSamples:
    """The first label of a row is its own number, so that the loop can tell what it was given; the second its class."""
    chance = np.random.default_rng(5)
    sizes = 1 + chance.integers(0, 9, samples)
    starts = torch.tensor([0, *np.cumsum(sizes)])
    indices = torch.from_numpy(chance.integers(0, FEATURES, int(sizes.sum())))
    values = torch.from_numpy(chance.random(len(indices), dtype=np.float64))
    classes = torch.from_numpy(chance.integers(0, CLASSES, samples))
    labels = torch.stack([torch.arange(samples), classes], 1).flatten()
    return SparseSamples(Bags(starts, indices, values), Bags(torch.arange(samples + 1) * 2, labels))


class Table(nn.Module):
    """The same on every rank and in the test."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.rows = nn.EmbeddingBag(FEATURES, CLASSES, mode="sum", sparse=sparse, include_last_offset=True)
        self.double()

    def loss(self, x: Bags, y: Bags) -> torch.Tensor:
        logits = self.rows(x.indices, x.starts, x.values)
        return nn.functional.cross_entropy(logits, y.indices[1::2])


def train_sparse(strategy: str, samples: int, micro_batch: int = 4, cost: bool = False, **options: Any) -> Facts:
    """An ordinary loop over sparse rows with sparse gradients; `cost` asks for micro-batches of equal non-zeros."""
    model, data = Table(sparse=True), bags(samples)
    weights = {"balance": "nonzeros"} if cost else {}
    with paceline.Run(strategy) as run:
        loader = run.loader(data, micro_batch=micro_batch, epochs=2, collate_fn=data.collate, **weights, **options)
        driven = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
        diary = Diary(run)
        nonzeros = []
        for x, y in loader:
            diary.given(loader, y.indices[::2])
            nonzeros.append(int(x.starts[-1]))
            driven.zero_grad()
            model.loss(x, y).backward()
            driven.step()
    return diary.facts(nonzeros=nonzeros)

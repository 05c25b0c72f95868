"""An ordinary PyTorch loop, trained together with whoever else runs this script.

python examples/train_digits.py                                      # alone
paceline run --nproc 4 examples/train_digits.py                      # four processes of this machine
torchrun --nproc-per-node 4 examples/train_digits.py                 # the same, started by torchrun
paceline run --engine ray --nproc 4 examples/train_digits.py         # four processes, placed by Ray
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F  # noqa: N812
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import paceline

options = argparse.ArgumentParser()
options.add_argument("--strategy", default="abs-sgd")
options.add_argument("--epochs", type=int, default=20)
arguments = options.parse_args()

digits = load_digits()
x = torch.tensor(digits.data / 16 - 0.3, dtype=torch.float32)
y = torch.tensor(digits.target)
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)
)

with paceline.Run(strategy=arguments.strategy) as run:
    loader = run.loader(TensorDataset(x[:1437], y[:1437]), micro_batch=32, epochs=arguments.epochs)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model)
    for batch, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(batch), labels).backward()
        optimizer.step()
    if run.rank == 0:
        accuracy = (model(x[1437:]).argmax(1) == y[1437:]).float().mean().item()
        print(f"{run.node.rounds} rounds over {run.node.samples_applied} samples: accuracy {accuracy:.3f}")

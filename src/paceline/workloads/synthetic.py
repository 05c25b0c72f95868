"""Made-up classes of any size: for tests and for timing, where the data must not be the question."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from paceline.workloads.models import MLP
from paceline.workloads.workload import Classification, Samples, Workload, choose_model

SPREAD = 0.7
"""How far apart the classes' centres are, in units of the noise: near enough that some samples stay ambiguous."""


def load(data: Path | None = None, model: str | None = None) -> Workload:
    """The usual synthetic workload. Nothing is read: `data` is not looked at."""
    return synthetic(model=model)


def synthetic(
    samples: int = 8192, features: int = 32, classes: int = 10, *, seed: int = 0, model: str | None = None
) -> Workload:
    """A mixture of Gaussians, one a class, with a quarter as many held-out samples.

    Args:
        samples: to learn from.
        features: of a sample.
        classes: with centres drawn at random.
        seed: of the data; the model has its own.
        model: `mlp`.
    """
    build = choose_model("synthetic", model, {"mlp": partial(MLP, (features, 64, classes))})
    generator = torch.Generator().manual_seed(seed)
    centres = SPREAD * torch.randn(classes, features, generator=generator)
    total = samples + max(samples // 4, 1)
    y = torch.randint(classes, (total,), generator=generator)
    x = centres[y] + torch.randn(total, features, generator=generator)
    return Classification(
        name="synthetic",
        train=Samples(x[:samples], y[:samples]),
        test=Samples(x[samples:], y[samples:]),
        model=build,
        micro_batch=32,
        target=0.9,
        lr=0.02,
    )

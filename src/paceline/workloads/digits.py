"""Scikit-learn's bundled digits: real data that needs no download, so it is the default everywhere."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from paceline.errors import PacelineError
from paceline.workloads.models import MLP
from paceline.workloads.workload import Classification, Samples, Workload, choose_model

MEAN = 0.305
"""Of the pixels. Centred inputs leave far more room for delayed gradients: with momentum 0.9 and a raw delay of one
round, 10 epochs at batch 128 and rate 0.1 end at 0.96 instead of 0.82 (mean of three seeds; synchronous 0.96)."""
TEST_SAMPLES = 360
"""A fifth of the 1,797, as is usual."""
SPLIT_SEED = 0
"""The split is part of the task: every run, of whatever seed, is judged on the same held-out digits."""


def load(data: Path | None = None, model: str | None = None) -> Workload:
    """1,437 digits of 8×8 to learn from, 360 held out. The data are bundled: `data` is not looked at."""
    build = choose_model("digits", model, {"mlp": partial(MLP, (64, 128, 10))})
    try:
        from sklearn.datasets import load_digits  # an extra: who trains on other data need not install it
    except ImportError as error:
        raise PacelineError(
            "The workload digits needs scikit-learn, which bundles the data.",
            remedy="`pip install paceline[workloads]` installs it.",
        ) from error
    bunch = load_digits()
    x = torch.as_tensor(bunch.data / 16.0, dtype=torch.float32) - MEAN
    y = torch.as_tensor(bunch.target, dtype=torch.int64)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(SPLIT_SEED))
    train, test = order[TEST_SAMPLES:], order[:TEST_SAMPLES]
    return Classification(
        name="digits",
        train=Samples(x[train], y[train]),
        test=Samples(x[test], y[test]),
        model=build,
        micro_batch=4,  # small, so that the noise of the gradients and not the number of steps limits the learning
        target=0.95,
        lr=0.1,
    )

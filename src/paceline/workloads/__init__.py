"""Models and data to race, test and show with.

The names are known without importing torch, because the command line's help must answer at once.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import no_such

if TYPE_CHECKING:
    from paceline.workloads.workload import Workload

NAMES = ("digits", "fashion-mnist", "synthetic")


def load(name: str, data: Path | None = None, model: str | None = None) -> Workload:
    """The workload of this name.

    Args:
        name: one of `NAMES`.
        data: folder with the data's files, for workloads that are not bundled.
        model: one of the workload's models; its usual one by default.
    """
    from paceline.workloads.workload import Workload

    if name not in NAMES:
        raise no_such("workload", name, NAMES)
    module = importlib.import_module(f"paceline.workloads.{name.replace('-', '_')}")
    workload = module.load(data, model)
    assert isinstance(workload, Workload)
    return workload

"""Train one PyTorch model on unequal machines, at the speed of all of them together."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["PacelineError", "Run", "Strategy", "__version__"]

if TYPE_CHECKING:
    from paceline.errors import PacelineError
    from paceline.run.run import Run
    from paceline.strategies import Strategy

_HOMES = {"PacelineError": "paceline.errors", "Run": "paceline.run.run", "Strategy": "paceline.strategies"}


def __getattr__(name: str) -> Any:
    """Import on first use: `paceline --help` must not pay for importing torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

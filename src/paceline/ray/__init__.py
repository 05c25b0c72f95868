"""Paceline on Ray: `paceline run --engine ray`, and `fit` for a training function. Needs the extra `paceline[ray]`."""

from paceline.ray.fitting import Result, TrainingFailed, fit
from paceline.ray.reporting import report

__all__ = ["Result", "TrainingFailed", "fit", "report"]

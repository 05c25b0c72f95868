"""One strategy of every kind. To what a loop does around it, the others of its kind are the same; the contract of
each is checked on the simulator, and that each trains on real ranks in test_training and test_alone."""

from __future__ import annotations

from paceline.strategies import STRATEGIES, create

TOGETHER = ("all-reduce", "local-sgd", "abs-sgd", "non-blocking", "adaptive-sgd")  # in rounds of all
KINDS = (*TOGETHER, "d-psgd", "ssp", "gssp")
ALL_TOGETHER = tuple(name for name in STRATEGIES if not create(name).steps_alone)

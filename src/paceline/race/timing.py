"""`paceline simulate`: timing only, in virtual time, without torch."""

from __future__ import annotations

import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from paceline.backends.learners import TimingLearner
from paceline.backends.simulated import Simulation, simulate
from paceline.errors import PacelineError
from paceline.report.words import count, percent
from paceline.simulator.cluster import Cluster
from paceline.strategies import create

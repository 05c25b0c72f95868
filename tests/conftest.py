"""For all tests: how long hypothesis takes to make an example tells about the machine, and nothing about us."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("paceline", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("paceline")

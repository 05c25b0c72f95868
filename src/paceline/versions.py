"""What a result was made with. No import of what is asked for: torch alone takes seconds."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from paceline import __version__

PACKAGES = ("torch", "numpy")


def versions() -> dict[str, str]:
    """Names and versions, in the order in which people ask for them.

    >>> list(versions())
    ['paceline', 'python', 'torch', 'numpy', 'system']
    """
    found = {"paceline": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found | {"system": f"{platform.system()} {platform.machine()}"}

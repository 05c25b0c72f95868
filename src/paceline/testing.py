"""The contracts of a strategy and of a backend, as functions: call them in the tests of your own.

from paceline.testing import check_strategy
def test_mine():
    check_strategy(MyStrategy())
"""

from __future__ import annotations

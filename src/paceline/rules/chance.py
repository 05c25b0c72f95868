"""Chance that all ranks share without talking: a number in [0, 1) for every place, and always the same one."""

from __future__ import annotations

from hashlib import blake2b

BITS = 53
"""As many as a float tells apart below one: every draw is exact, on every platform."""


def chance(*place: int | str) -> float:
    """The number of a place, such as (seed, round, matching); evenly spread over [0, 1), other places independent.

    A hash of the place, not the next number of a stream: it does not matter who has asked what before, so that ranks
    which join late, restart or skip a round still agree. `hash()` and numpy's streams may change with the version.

    Args:
        place: whole numbers and words; the first says what the chance is for, so that no two uses share their draws.

    >>> chance("matching", 0, 17, 2)
    0.6908308511083125
    >>> chance("matching", 0, 17, 2) == chance("matching", 0, 17, 2) != chance("matching", 0, 17, 3)
    True
    """
    digest = blake2b(":".join(map(str, place)).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> (64 - BITS)) / (1 << BITS)

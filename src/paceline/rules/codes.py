"""As what the numbers of a gradient may travel, and what they weigh then; the rounding itself is in `rounding.py`."""

from __future__ import annotations

BLOCK = 256  # numbers that share a scale of 4 bytes: one large entry makes only its own block coarse
SCALE_BYTES = 4
CODES = {"none": 4, "fp16": 2, "bf16": 2, "int8": 1}
"""Bytes of a number."""


def code_bytes(code: str, numbers: int, plain: int = 4) -> int:
    """Bytes that so many numbers travel as.

    Args:
        code: one of `CODES`.
        numbers: how many.
        plain: bytes of each when it is sent as it is.

    >>> [code_bytes(code, 1_000_000) for code in CODES]
    [4000000, 2015628, 2015628, 1015628]
    """
    return numbers * plain if code == "none" else numbers * CODES[code] + SCALE_BYTES * -(-numbers // BLOCK)


def part_size(numbers: int, parts: int) -> int:
    """Numbers in each of so many equal parts, in whole blocks; the last ones are filled up with zeros.

    >>> part_size(1000, 2), part_size(1, 4)
    (512, 256)
    """
    return -(-numbers // (parts * BLOCK)) * BLOCK

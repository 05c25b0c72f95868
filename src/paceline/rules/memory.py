"""How large a micro-batch a device's memory allows."""

from __future__ import annotations

USABLE = 0.9  # of the memory: allocators lose some between blocks, and batches of text differ in length
FIRST_PART = 4  # the first micro-batch is so many times smaller than the user's: it shows what a sample takes


class MemoryMeter:
    """The largest micro-batch that fits, from what smaller ones took.

    A micro-batch takes what is there without it (the model, the optimizer's state) and so much a sample.

    Args:
        most: the user's micro-batch.
        total: memory of the device in bytes.

    >>> meter = MemoryMeter(most=64, total=10_000)
    >>> meter.fits
    16
    >>> meter.see(samples=16, before=1_000, peak=4_200)
    >>> meter.fits
    40
    """

    def __init__(self, most: int, total: int) -> None:
        self._most, self._total = most, total
        self.fits = -(-most // FIRST_PART)

    def see(self, samples: int, before: int, peak: int) -> None:
        """A micro-batch of so many samples; bytes in use before it, and at most during it."""
        a_sample = (peak - before) / samples
        room = USABLE * self._total - before
        self.fits = self._most if a_sample <= 0 else min(max(1, int(room / a_sample)), self._most)

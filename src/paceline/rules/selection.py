"""The k entries of largest magnitude, chosen fast: exact, in little more than one pass over memory.

    1. sample: m of the n magnitudes, evenly spread; t = the one of rank q = e + 3·√e + 3,  e = m·k/n
    2. gather: the places where |x| > t: more than k of them but for bad luck, and hardly more than k·q/e
    3. cut:    the k largest of these

All k largest lie above t as soon as k entries do, so the result does not depend on the sample: a lucky one only saves
time. Bad luck lowers t and gathers again. Where many entries equal t (zeros, say) those above it and the first ones
that equal it are the answer.

A float without its sign bit, read as an integer, is in the order of its magnitude: the passes compare integers, −0
equals 0, and NaN comes out larger than infinity, as it does in `torch.topk`. The passes go by pieces that stay in the
cache: a fresh buffer of n entries costs more by its page faults than the arithmetic that fills it.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    Bits: TypeAlias = NDArray[np.signedinteger[Any]]
    Places: TypeAlias = NDArray[np.int64]

SAMPLED = 750_000
"""Entries from which on a sample saves time: below, all magnitudes stay in the cache and are cut at once."""
MOST = 0.25
"""Share up to which it does: above, nearly all that would have to be cut anyway is gathered first."""
SAMPLE = 16_384
"""Entries of a sample: of a hundredth it leaves 1.25·k to cut, of a thousandth 1.9·k; costs 5 % of it all."""
PIECE = 131_072
"""Entries of a piece: small enough for the cache, large enough that numpy's calls do not count."""
GOLDEN = 0.6180339887498949
"""Its multiples spread evenly over [0, 1) and never come around: a sample that no width of a layer is in step with."""

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def largest(values: Tensor, k: int) -> Tensor:
    """Places of the k entries of largest magnitude, ascending, as int64; of equal ones the first.

    NaN counts as larger than any number. Entries on another device than the CPU are left to `torch.topk`, which does
    not say which of equal ones it takes.

    Args:
        values: one-dimensional, of any floating type.
        k: how many, from 0 to all.

    >>> largest(torch.tensor([1.0, -3.0, 0.0, 2.0, -2.0]), 2)
    tensor([1, 3])
    """
    if values.dim() != 1 or not values.is_floating_point():
        raise PacelineError(
            f"The largest entries of a tensor of shape {tuple(values.shape)} and type {values.dtype} were asked for.",
            remedy="Give one flat tensor of floats.",
        )
    if not 0 <= k <= len(values):
        raise PacelineError(f"{k} of {len(values)} entries cannot be chosen.", remedy="Ask for 0 to all of them.")
    if values.device.type != "cpu":
        return torch.topk(values.abs(), k, sorted=False).indices.sort().values
    bits = values.detach().view(INTEGERS[values.element_size()]).numpy()
    return torch.from_numpy(_largest(bits, k))


def _largest(bits: Bits, k: int) -> Places:
    size = len(bits)
    if size < SAMPLED or not 0 < k <= MOST * size:
        return np.flatnonzero(_kept(_magnitudes(bits), k))
    sample = _sample(bits)
    expected = len(sample) * k / size
    rank = int(expected + 3 * sqrt(expected) + 3)
    while rank < len(sample):
        threshold = _largest_but(sample, rank)
        above, magnitudes = _passing(bits, np.greater, threshold, size)
        if len(above) >= k:
            return above[_kept(magnitudes, k)]
        equal, _ = _passing(bits, np.equal, threshold, k - len(above))
        if len(above) + len(equal) == k:
            return np.sort(np.concatenate((above, equal)))
        rank *= 2
    return np.flatnonzero(_kept(_magnitudes(bits), k))


def _sample(bits: Bits) -> Bits:
    """Magnitudes from all parts of the tensor: one from each of m equal runs, at a place within it that moves on."""
    run = np.arange(SAMPLE)
    places = ((run + run * GOLDEN % 1.0) * (len(bits) / SAMPLE)).astype(np.int64)
    return _magnitudes(bits.take(places))


def _passing(bits: Bits, compare: np.ufunc, threshold: np.signedinteger[Any], most: int) -> tuple[Places, Bits]:
    """The first `most` places whose magnitude compares so with the threshold, and these magnitudes, in one pass."""
    unsigned = _all_but_the_sign(bits)
    magnitudes, passes = np.empty(PIECE, bits.dtype), np.empty(PIECE, np.bool_)
    found, count = [], 0
    for begin in range(0, len(bits), PIECE):
        piece = bits[begin : begin + PIECE]
        magnitude = np.bitwise_and(piece, unsigned, out=magnitudes[: len(piece)])
        places = np.flatnonzero(compare(magnitude, threshold, out=passes[: len(piece)]))
        # Now, while the piece is in the cache: later every one of them would be a miss.
        found.append((places + begin, magnitude.take(places)))
        count += len(places)
        if count >= most:
            break
    return np.concatenate([places for places, _ in found])[:most], np.concatenate([taken for _, taken in found])[:most]


def _magnitudes(bits: Bits) -> Bits:
    return np.bitwise_and(bits, _all_but_the_sign(bits))


def _all_but_the_sign(bits: Bits) -> np.signedinteger[Any]:
    found: np.signedinteger[Any] = bits.dtype.type(np.iinfo(bits.dtype).max)
    return found


def _kept(magnitudes: Bits, k: int) -> NDArray[np.bool_]:
    """True for the k largest; of equal ones the first."""
    if k == 0:
        return np.zeros(len(magnitudes), np.bool_)
    last = _largest_but(magnitudes, k - 1)
    kept = magnitudes > last
    kept[np.flatnonzero(magnitudes == last)[: k - np.count_nonzero(kept)]] = True
    return kept


def _largest_but(magnitudes: Bits, rank: int) -> np.signedinteger[Any]:
    """The largest but so many."""
    place = len(magnitudes) - 1 - rank
    found: np.signedinteger[Any] = np.partition(magnitudes, place)[place]
    return found

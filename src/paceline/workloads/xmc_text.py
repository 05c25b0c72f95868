"""Reads the XMC repository's text of sparse, multi-label data, fast, and says where a file is wrong.

    rows features labels
    label,label,… feature:value feature:value …

A large block of bytes is taken apart at once: whatever is no digit separates two numbers, and which separators may
follow each other is a small table. A line that does not fit, because it is wrong or merely unusual (`1e-05`, a tab), is
read again on its own, byte by byte in plain Python: that either understands it or says what is wrong with it. So the
fast way needs no error messages, and the exact way no speed.
"""

from __future__ import annotations

import gzip
import lzma
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from paceline.errors import PacelineError
from paceline.workloads.sparse_rows import Rows

BLOCK = 1 << 20
"""Bytes taken apart at once: enough that Python costs nothing, few enough that what they become stays in a cache."""
LONGEST_HEADER, LONGEST_QUOTE = 100, 40
LARGEST_VALUE = float(np.finfo(np.float32).max)

_LINE, _COMMA, _SPACE, _COLON, _POINT, _OTHER = range(6)
_KIND = np.full(256, _OTHER, np.uint8)
for _sign, _kind in zip(b"\n ,:.", (_LINE, _SPACE, _COMMA, _COLON, _POINT), strict=True):
    _KIND[_sign] = _kind
_NUMBER, _NOTHING = 1, 2
"""What may stand between two separators, as bits: digits, or nothing at all."""
_FITS = np.zeros((6, 6), np.uint8)
"""By the separator before and the one behind."""
for _before, _behind, _between in (
    (_LINE, _COMMA, _NUMBER),  # a label
    (_LINE, _SPACE, _NUMBER | _NOTHING),  # the last label, or a row without one
    (_LINE, _LINE, _NUMBER),  # a row without features
    (_COMMA, _COMMA, _NUMBER),
    (_COMMA, _SPACE, _NUMBER),
    (_COMMA, _LINE, _NUMBER),
    (_SPACE, _COLON, _NUMBER),  # a feature
    (_SPACE, _SPACE, _NOTHING),
    (_SPACE, _LINE, _NOTHING),
    (_COLON, _POINT, _NUMBER | _NOTHING),  # the value's whole part
    (_COLON, _SPACE, _NUMBER),
    (_COLON, _LINE, _NUMBER),
    (_POINT, _SPACE, _NUMBER),  # and what is behind its point
    (_POINT, _LINE, _NUMBER),
):
    _FITS[_before, _behind] = _between

_WORD = 8
"""Digits that are turned into a number at once, as the bytes of one integer."""
_LONGEST = 3 * _WORD
_KEPT = np.array([0x0F0F0F0F0F0F0F0F >> 8 * (_WORD - n) << 8 * (_WORD - n) for n in range(_WORD + 1)], np.uint64)
"""By the number of digits: what of a word is their values. The last digit is the highest byte."""
_JOINED = tuple(
    (np.uint64(base << bits | 1), np.uint64(bits), np.uint64(mask))
    for base, bits, mask in (
        (10, 8, 0x00FF00FF00FF00FF),
        (100, 16, 0x0000FFFF0000FFFF),
        (10_000, 32, 0x00000000FFFFFFFF),
    )
)
"""Factor, shift and mask that join neighbours, of which the first counts `base` times as much as the second."""
_POWERS = 10.0 ** np.arange(_LONGEST + 1)


@dataclass(frozen=True)
class Header:
    """The first line: how many there are of each."""

    rows: int
    features: int
    labels: int


class XmcFile:
    """A file of this format; plain, or compressed as `.gz` or `.xz`.

    Args:
        path: of the file. Its header is read at once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as stream:
            line = self._read(stream, LONGEST_HEADER).partition(b"\n")[0]
        self.header, self._header_length = self._header(line), len(line) + 1

    def rows(self) -> Iterator[Rows]:
        """All rows, some at a time. At the end there were as many as the header says, or this protests."""
        line = 2
        for text in self._blocks():
            for rows in self._parse(text, line):
                line += len(rows.sizes)
                if line - 2 > self.header.rows:
                    raise self._wrong(
                        self.header.rows + 2, f"The header speaks of {self.header.rows} rows: this is more"
                    )
                yield rows
        if line - 2 < self.header.rows:
            raise self._wrong(line, f"The file ends after {line - 2} rows, the header speaks of {self.header.rows}")

    # ---- the file

    def _open(self) -> BinaryIO:
        openers: dict[str, Callable[..., object]] = {".gz": gzip.open, ".xz": lzma.open}
        opener = openers.get(self.path.suffix, open)
        try:
            return cast(BinaryIO, opener(self.path, "rb"))
        except OSError as error:
            raise self._unreadable(error) from error

    def _read(self, stream: BinaryIO, size: int) -> bytes:
        try:
            return stream.read(size)
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise self._unreadable(error) from error

    def _blocks(self) -> Iterator[bytes]:
        """The text behind the header in whole lines. Empty lines at the end of the file are left out."""
        with self._open() as stream:
            self._read(stream, self._header_length)
            rest = b""
            while read := self._read(stream, BLOCK):
                rest = (rest + read).replace(b"\r\n", b"\n")
                lines = rest[: rest.rfind(b"\n") + 1].rstrip(b"\n")
                if lines:
                    yield lines + b"\n"
                    rest = rest[len(lines) + 1 :]
            if rest := rest.rstrip(b"\r\n"):
                yield rest + b"\n"

    def _header(self, line: bytes) -> Header:
        parts = line.split()
        if len(parts) != 3 or not all(part.isdigit() for part in parts):
            raise self._wrong(1, f"The header must be three whole numbers, but it is {_quoted(line)}")
        header = Header(*map(int, parts))
        if not header.rows or not header.features or not header.labels or max(header.features, header.labels) >= 2**31:
            raise self._wrong(1, f"There cannot be {_quoted(line)} rows, features and labels")
        return header

    # ---- lines

    def _parse(self, text: bytes, line: int) -> Iterator[Rows]:
        """The rows of whole lines, of which the first is that of this number."""
        separated = Separated(text)
        odd = separated.odd_lines(self.header)
        if not len(odd):
            yield separated.rows()
            return
        lines = text.split(b"\n")[:-1]
        for before, here in pairwise([-1, *odd.tolist(), len(lines)]):
            if between := lines[before + 1 : here]:
                yield Separated(b"\n".join([*between, b""])).rows()
            if here < len(lines):
                yield self.one(lines[here], line + here)

    def one(self, text: bytes, line: int) -> Rows:
        """The row of one line, exactly; or what is wrong with it."""
        if not text:
            raise self._wrong(line, "The line is empty")
        first, *pairs = text.replace(b"\t", b" ").rstrip(b"\r").split(b" ")
        if b":" in first:  # a row without a label whose leading space somebody has stripped
            first, pairs = b"", [first, *pairs]
        labels = [self._index(part, "label", self.header.labels, line) for part in first.split(b",") if first]
        indices, values = [], []
        for pair in filter(None, pairs):
            feature, colon, value = pair.partition(b":")
            if not colon:
                raise self._wrong(line, f"{_quoted(pair)} has no colon between feature and value")
            indices.append(self._index(feature, "feature", self.header.features, line))
            values.append(self._value(value, line))
        return Rows(
            np.array([len(indices)]),
            np.array(indices, np.int32),
            np.array(values, np.float32),
            np.array([len(labels)]),
            np.array(labels, np.int32),
        )

    def _index(self, text: bytes, what: str, end: int, line: int) -> int:
        if not text.isdigit():
            raise self._wrong(line, f"The {what} {_quoted(text)} is not a whole number")
        if int(text) >= end:
            raise self._wrong(
                line, f"The {what} {_quoted(text)} is not below {end}, the number of {what}s in the header"
            )
        return int(text)

    def _value(self, text: bytes, line: int) -> float:
        try:
            value = float(text)
        except ValueError:
            raise self._wrong(line, f"The value {_quoted(text)} is not a number") from None
        if b"_" in text or not math.isfinite(value) or abs(value) > LARGEST_VALUE:
            raise self._wrong(line, f"The value {_quoted(text)} is not a number that float32 holds")
        return value

    def _wrong(self, line: int, cause: str) -> PacelineError:
        return PacelineError(
            "The file is not sparse data as the XMC repository writes it.",
            where=f"{self.path}, line {line}",
            cause=f"{cause}.",
            remedy="A header `rows features labels`, then for each row `label,label feature:value feature:value`.",
        )

    def _unreadable(self, error: Exception) -> PacelineError:
        return PacelineError(
            "A file of sparse data cannot be read.",
            where=str(self.path),
            cause=f"{error or type(error).__name__}.",
            remedy="Get the file again; a compressed one must be called .gz or .xz.",
        )


class Separated:
    """Whole lines of text, taken apart at everything that is no digit.

    Separator k ends the number that stands between it and separator k − 1; before the first there is a line's end.
    """

    def __init__(self, text: bytes) -> None:
        padded = np.frombuffer(b"0" * (_LONGEST - 1) + b"\n" + text, np.uint8)
        found = np.flatnonzero(padded - np.uint8(ord("0")) > 9)
        self._words: NDArray[np.uint64] = np.ndarray(len(padded) - _WORD + 1, "<u8", padded, strides=(1,))
        self._places, self._digits = found[1:], np.diff(found) - 1
        kinds = _KIND[padded[found]]
        self._before, self._kinds = kinds[:-1], kinds[1:]
        self._line_ends = np.flatnonzero(self._kinds == _LINE)
        self._colons = np.flatnonzero(self._kinds == _COLON)
        self._label_ends = np.flatnonzero((self._before <= _COMMA) & (self._digits > 0))
        self._indices, self._labels = self._numbers(self._colons), self._numbers(self._label_ends)

    def odd_lines(self, header: Header) -> NDArray[np.intp]:
        """Which lines, counted from 0, are not plainly right: `rows()` would misread them."""
        between = np.where(self._digits > 0, np.uint8(_NUMBER), np.uint8(_NOTHING))
        fits = _FITS.ravel()[self._before * np.uint8(len(_FITS)) + self._kinds] & between
        odd = (
            np.flatnonzero((fits == 0) | (self._digits > _LONGEST)),
            self._colons[self._indices >= header.features],
            self._label_ends[self._labels >= header.labels],
        )
        return np.unique(np.searchsorted(self._line_ends, np.concatenate(odd)))

    def rows(self) -> Rows:
        """What the lines say, if none of them is odd."""
        behind = self._colons + 1
        pointed = self._kinds[behind] == _POINT
        whole = self._numbers(behind) * pointed
        behind += pointed
        scale = _POWERS[self._digits[behind] * pointed]
        # Two whole numbers below 2^53 and one division: rounded once, as reading the text exactly would be.
        values = (whole * scale + self._numbers(behind)) / scale
        return Rows(
            self._counted(self._colons),
            self._indices.astype(np.int32),
            values.astype(np.float32),
            self._counted(self._label_ends),
            self._labels.astype(np.int32),
        )

    def _counted(self, separators: NDArray[np.intp]) -> NDArray[np.int64]:
        """How many of them are in each line. A label may end with its line."""
        return np.diff(np.searchsorted(separators, self._line_ends, side="right"), prepend=0)

    def _numbers(self, separators: NDArray[np.intp]) -> NDArray[np.float64]:
        """What stands before each of them; 0 for nothing."""
        return self._read(self._places[separators], self._digits[separators])

    def _read(self, ends: NDArray[np.intp], digits: NDArray[np.int64]) -> NDArray[np.float64]:
        """The numbers of so many digits that end before these places. Eight digits take three multiplications:
        neighbours are joined to pairs, pairs to fours, fours to eights."""
        word = self._words[ends - _WORD]
        word &= _KEPT[np.minimum(digits, _WORD)]
        for factor, shift, mask in _JOINED:
            word *= factor
            word >>= shift
            word &= mask
        found = word.astype(np.float64)
        longer = np.flatnonzero(digits > _WORD)
        if len(longer):
            found[longer] += 1e8 * self._read(ends[longer] - _WORD, digits[longer] - _WORD)
        return found


def _quoted(text: bytes) -> str:
    """The text as a user knows it, or its beginning."""
    return repr(text[:LONGEST_QUOTE].decode(errors="replace")) + ("…" if len(text) > LONGEST_QUOTE else "")

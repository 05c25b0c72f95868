"""Made-up sparse rows with many labels, of the statistics of real sets and of any size: for those who have no files.

Features and labels follow power laws, and rows are of very different length. Labels depend on features: each label has
a few features of its own, its topic, and most non-zeros of a row come from the topics of its labels. Where rows have
very many labels, half of them are of one theme.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import ceil, log
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.errors import PacelineError, no_such
from paceline.workloads.sparse_rows import Rows
from paceline.workloads.sparse_store import stored
from paceline.workloads.workload import Workload
from paceline.workloads.xmc import MOST_LOGITS, scaled, workload
from paceline.workloads.xmc_text import Header

FEATURE_EXPONENT, LABEL_EXPONENT = 0.94, 1.01
"""Of the power laws, as fitted to the commoner half of EURLex-4K's features and labels."""
LABEL_SHIFT = 10.0
"""The commonest labels are less common than a pure power law has it: EURLex-4K's first is in 6 % of the rows."""
SHIFT_OF_LONG_LISTS = 40.0
"""Of rows with very many labels each, in which the first one would be in most rows and to name it always a good guess:
Delicious-200k's, for which published methods name a right label first in less than half of the rows."""
THEMATIC_PART = 0.5
"""Of the labels of a row with very many: they belong together, as the tags of one page do. Were each drawn for itself,
a row would have too few features of each to tell it by."""
LISTS_IN_A_THEME = 8
"""So many times the labels of a row belong to a theme."""
LENGTH_DEVIATION = 0.8
"""Of the logarithm of a row's length: EURLex-4K's."""
TOPICAL = 0.6
"""Part of the draws that come from the topics of a row's labels; the others are noise."""
ROWS_AT_ONCE = 4096
SPARE = 3.0
"""Draws for each non-zero or label that is wanted: many fall on one that the row has already."""

Generator = np.random.Generator
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Likeness:
    """The sizes of a data set.

    Args:
        features, labels, rows, held_out: how many.
        nonzeros, labels_a_row: of a row, on average.
        shift: of the labels' power law.
        thematic: part of a row's labels that are of one theme.
    """

    features: int
    labels: int
    rows: int
    held_out: int
    nonzeros: float
    labels_a_row: float
    shift: float = LABEL_SHIFT
    thematic: float = 0.0

    @property
    def themes(self) -> int:
        """How many there are. Labels belong to them in turn, in the order of their frequency."""
        return max(1, round(self.labels / (LISTS_IN_A_THEME * self.labels_a_row)))

    @property
    def topic(self) -> int:
        """Features that a label has of its own: twice as many as a row of average length has for each of its labels."""
        return max(8, round(2 * TOPICAL * self.nonzeros / self.labels_a_row))

    def times(self, scale: float) -> Likeness:
        """So many times the features, labels and rows; rows stay as they are, as far as there are features for them.

        >>> smaller = LIKE["amazon-670k"].times(0.01)
        >>> smaller.features, smaller.labels, smaller.rows, smaller.held_out, smaller.nonzeros
        (1360, 6701, 4905, 1531, 75.7)
        """
        sizes = {name: ceil(getattr(self, name) * scale) for name in ("features", "labels", "rows", "held_out")}
        smaller = replace(self, **sizes)
        return replace(
            smaller,
            nonzeros=min(self.nonzeros, smaller.features / 4),
            labels_a_row=min(self.labels_a_row, smaller.labels / 4),
        )


LIKE = {
    "eurlex-4k": Likeness(5_000, 3_993, 15_539, 3_809, 237.1, 5.3),
    "delicious-200k": Likeness(782_585, 205_443, 196_606, 100_095, 301.2, 75.5, SHIFT_OF_LONG_LISTS, THEMATIC_PART),
    "amazon-670k": Likeness(135_909, 670_091, 490_449, 153_025, 75.7, 5.5),
}


def load(
    data: Path | None = None,
    model: str | None = None,
    *,
    like: str = "eurlex-4k",
    scale: float = 1.0,
    seed: int = 0,
) -> Workload:
    """Rows with the statistics of a real set. Nothing is read: `data` is not looked at.

    Args:
        data: not used.
        model: `sparse-mlp`.
        like: `eurlex-4k`, `delicious-200k` or `amazon-670k`.
        scale: so many times the features, labels and rows of that set.
        seed: of the rows.
    """
    if like not in LIKE:
        raise no_such("data set to generate rows like", like, LIKE)
    if not 0 < scale <= 100:
        raise PacelineError(f"A scale of {scale:g} is not possible.", remedy="Give more than 0, and at most 100.")
    sizes = LIKE[like].times(scale)
    generator = SparseGenerator(sizes, seed)
    held_out = min(sizes.held_out, max(1, MOST_LOGITS // sizes.labels))  # more would not be looked at
    train, test = (
        stored(
            f"generated-{like}-{scale:g}-{seed}-{part}",
            {"sizes": asdict(sizes), "seed": seed, "rows": rows, "part": part},
            lambda part=part, rows=rows: generator.rows(part, rows),  # type: ignore[misc]  # mypy knows no defaults here
        )
        for part, rows in enumerate((sizes.rows, held_out))
    )
    return workload("xmc-generated", Header(sizes.rows, sizes.features, sizes.labels), train, test, model)


class SparseGenerator:
    """Makes rows, the same ones for the same seed however many are asked for.

    Args:
        sizes: of the data set.
        seed: of all of it.
    """

    def __init__(self, sizes: Likeness, seed: int = 0) -> None:
        self.sizes, self._seed = sizes, seed

    def rows(self, part: int, count: int) -> Iterator[Rows]:
        """So many rows, some thousands at a time.

        Args:
            part: 0 for training, 1 for the held-out part, …: other rows over the same topics.
            count: of rows.
        """
        for number, first in enumerate(range(0, count, ROWS_AT_ONCE)):
            chance = np.random.default_rng((self._seed, 1, part, number))
            yield self._some(min(ROWS_AT_ONCE, count - first), chance)

    @cached_property
    def _names(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The feature and the label of each rank: common ones do not stand together."""
        chance = np.random.default_rng((self._seed, 0))
        features, labels = (chance.permutation(n).astype(np.int32) for n in (self.sizes.features, self.sizes.labels))
        return features, labels

    @cached_property
    def _topics(self) -> NDArray[np.int32]:
        """The features of each label, by ranks. Any feature may be one's, common ones of more labels than rare ones."""
        chance = np.random.default_rng((self._seed, 2))
        drawn = power_law(chance.random((self.sizes.labels, self.sizes.topic)), self.sizes.features, FEATURE_EXPONENT)
        return drawn.astype(np.int32)

    def _some(self, count: int, chance: Generator) -> Rows:
        sizes = self.sizes
        wanted_labels = 1 + chance.poisson(sizes.labels_a_row - 1, count)
        rows = np.repeat(np.arange(count), np.ceil(SPARE * wanted_labels).astype(np.int64))
        drawn = power_law(chance.random(len(rows)), sizes.labels, LABEL_EXPONENT, sizes.shift)
        if sizes.thematic:
            theme = chance.integers(sizes.themes, size=count)
            near = np.minimum(drawn - drawn % sizes.themes + theme[rows], sizes.labels - 1)
            drawn = np.where(chance.random(len(rows)) < sizes.thematic, near, drawn)
        label_counts, labels = distinct(rows, drawn, wanted_labels)
        wanted = row_lengths(count, sizes, chance)
        rows = np.repeat(np.arange(count), np.ceil(SPARE * wanted).astype(np.int64) + 1)
        drawn = power_law(chance.random(len(rows)), sizes.features, FEATURE_EXPONENT)
        topical = chance.random(len(rows)) < TOPICAL
        starts = np.cumsum(label_counts) - label_counts
        whose = starts[rows] + (chance.random(len(rows)) * label_counts[rows]).astype(np.int64)
        own = self._topics[labels[whose], chance.integers(sizes.topic, size=len(rows))]
        lengths, ranks = distinct(rows, np.where(topical, own, drawn), wanted)
        # As a word's weight in a text: how often it comes, times how rare it is.
        weights = (1 + chance.exponential(size=len(ranks))) * (1 + np.log(sizes.features) - np.log1p(ranks))
        names, label_names = self._names
        return scaled(Rows(lengths, names[ranks], weights.astype(np.float32), label_counts, label_names[labels]))


def power_law(uniform: NDArray[np.float64], items: int, exponent: float, shift: float = 1.0) -> Integers:
    """Ranks 0 to items − 1, of which rank r comes about in proportion to (r + shift)^−exponent.

    The inverse of the distribution's integral, so that no table of all items is needed.

    >>> ranks = power_law(np.linspace(0, 0.999, 1000), items=100, exponent=1.01)
    >>> np.bincount(ranks)[:4].tolist()  # 1, 1/2, 1/3, 1/4, …
    [154, 89, 63, 48]
    """
    power = 1.0 - exponent
    low, high = shift**power, (items + shift) ** power
    ranks: Integers = ((low + uniform * (high - low)) ** (1 / power) - shift).astype(np.int64)
    return np.minimum(ranks, items - 1)  # rounding may lead just beyond the last one


def row_lengths(count: int, sizes: Likeness, chance: Generator) -> Integers:
    """Log-normal, of the wanted mean; at least 1, and never so many that most features would be in a row."""
    centre = log(sizes.nonzeros) - LENGTH_DEVIATION**2 / 2
    lengths = np.rint(chance.lognormal(centre, LENGTH_DEVIATION, count)).astype(np.int64)
    return np.clip(lengths, 1, max(1, sizes.features // 2))


def distinct(rows: Integers, items: Integers, wanted: Integers) -> tuple[Integers, Integers]:
    """Of what was drawn for each row, the first so many that differ.

    Args:
        rows: of each draw, in order.
        items: what was drawn.
        wanted: at most, by row.

    Returns:
        How many each row got, and all of them.

    >>> distinct(np.array([0, 0, 0, 0, 1]), np.array([7, 7, 3, 5, 7]), np.array([2, 2]))
    (array([2, 1]), array([7, 3, 7]))
    """
    _, first = np.unique(rows * (int(items.max()) + 1) + items, return_index=True)
    first.sort()
    found = rows[first]
    counts = np.bincount(found, minlength=len(wanted))
    place = np.arange(len(first)) - (np.cumsum(counts) - counts)[found]
    kept = place < wanted[found]
    return np.minimum(counts, wanted), items[first[kept]]

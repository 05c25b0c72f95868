"""Newcomers in a running training: how they are let in, and what they take over.

A newcomer says hello to the control plane and waits. Whoever knows of it says so in its next round, so that all hear it
with the same total, and admit it when that round is applied and the next one has not begun:

    all who take part      meet: from here on all hold the same, and nothing is in flight
                           ask the control plane to let in who waits; the first to ask makes a new generation of it
    the first of them      sends the state of the run: parameters, optimizer, schedule, strategy, books
    all, and the newcomer  form groups in the new generation, as after a loss; see `agreement`

If somebody is lost meanwhile, a newcomer that has not the state yet gives up, because it may have been the one to give
it; the others go on without it, as without any lost rank.
"""

from __future__ import annotations

from paceline.run.checkpoint import Checkpoint
from paceline.run.optimizer import LearningRates
from paceline.run.rank import Rank
from paceline.run.state import gather, restore, start_alike


class Entrance:
    """How a rank comes into the run, and lets others in.

    Args:
        rank: this one.
        rates: the learning rates' schedule.
        run: the strategy's name, and the data; see `state.gather`.
    """

    def __init__(self, rank: Rank, rates: LearningRates, run: tuple[str, dict[str, int]]) -> None:
        self._rank, self._rates, (self._strategy, self._data) = rank, rates, run
        self._admissions = 0

    def admit(self) -> None:
        """All who take part together, after a round in which somebody said that a newcomer waits."""
        self._admissions += 1
        self._rank.admit(self._admissions - 1, self._state)

    def _state(self) -> Checkpoint:
        whole = gather(self._rank.node, self._rates, [], self._strategy, self._data)
        del whole.tensors["chance"]  # ranks with the same dropout would be no dropout
        course = self._rank.node.course_so_far()
        whole.values |= {"course": course, "admissions": self._admissions}
        return whole

    def enter(self, resumed: Checkpoint, joins: bool) -> None:
        """Begin with all others, from what was resumed; or join, and take over what they have by now."""
        if joins:
            self._join()
        else:
            alike = start_alike(resumed, self._rank.node, self._rank.collectives, self._rates, self._strategy)
            self._rank.start_leasing(alike.values.get("used", []))

    def _join(self) -> None:
        node, whole = self._rank.node, self._rank.enter()
        restore(whole, node, self._rates, self._strategy)
        node.take_over(whole.values["course"])
        self._admissions = whole.values["admissions"]
        self._rank.collectives.enter(whole.values["started"])
        self._rank.lease()

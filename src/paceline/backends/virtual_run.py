"""The driver of the simulated backend: all ranks' coroutines on one clock.

It answers what a coroutine yields: a request for a gradient when the micro-batch ends, a `Work` when it is done. What
happens at the same instant happens in the order of planning, so that a run can be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from paceline.backends.learners import Learner
from paceline.backends.simulated_node import AllGatherWork, AllReduceWork, SimulatedNode, SimulatedWork
from paceline.backends.sources import Source
from paceline.backends.standstill import leaked, never_ends, standstill
from paceline.backends.theatre import Theatre
from paceline.backends.virtual_collectives import VirtualCollectives
from paceline.backends.virtual_losses import Losses
from paceline.backends.virtual_post import VirtualPost
from paceline.backends.virtual_rounds import Collective, RoundTotal, Waiter
from paceline.backends.watch import NOISE_EVERY
from paceline.node import GIVEN_UP, NEXT_GRADIENT, Gradient, Share, Work
from paceline.simulator.clock import Clock
from paceline.simulator.cluster import Cluster
from paceline.simulator.faults import Crash, FaultPlan
from paceline.simulator.network import Traffic
from paceline.simulator.trace import Trace
from paceline.strategies.strategy import Strategy

OnApplied = Callable[[int, float, int], object]
"""Called after a rank has applied a round: rank, virtual seconds, samples that it has applied so far."""

PATIENCE = 100  # empty gradients at one instant and with nothing in flight, before the rank waits for an arrival


class VirtualRun(Theatre):
    """Drives the coroutines: answers what they yield when its time has come.

    Args:
        strategy, cluster, on_applied: see `simulate`.
        source: of the samples.
        learners: one for each rank.
        trace: of what happens.
        limits: samples in a micro-batch, and the time from which on no rank begins one.
    """

    def __init__(
        self,
        strategy: Strategy,
        cluster: Cluster,
        source: Source,
        learners: Sequence[Learner],
        trace: Trace,
        limits: tuple[int, float],
        on_applied: OnApplied | None,
    ) -> None:
        self.clock, self.trace, self._on_applied = Clock(), trace, on_applied
        self._until = limits[1]
        self._node_of: Callable[[int], SimulatedNode] = lambda rank: SimulatedNode(
            rank, cluster, learners[rank], limits[0], self
        )
        self.nodes = [self._node_of(rank) for rank in range(len(learners))]
        self.strategy, self._source = strategy, source
        self._faults, self._traffic = FaultPlan(cluster.faults), Traffic(cluster.network, cluster.ranks)
        post = VirtualPost(self, cluster, self._faults, self._traffic)
        for node in self.nodes:
            node.post = post
        self._losses = Losses(self, strategy, source)
        for node in self.nodes[cluster.begins_with :]:
            self._losses.expect(node)
        self._micro_batch_ends = self._end_micro_batch  # one object for all the heap's entries
        self.last_applied = 0.0
        self._news = False
        self._let_in: Collective | None = None
        more = lambda: self.clock.now < self._until and self._losses.samples_left  # noqa: E731  # used once, below
        self._collectives = VirtualCollectives(self, source, self._faults, self._traffic, cluster.seed, more)
        self.rounds = self.samples_applied = self._empties = 0

    # ---- from the beginning to the end

    def play(self) -> None:
        for node in self.nodes:
            self.clock.at(self._faults.starts.get(node.rank, 0.0), self._begin, node)
        for crash in self._faults.crashes:
            self.clock.at(crash.at, self._crash, crash)
        for leave in self._faults.leaves:
            self.clock.at(leave.at, self._losses.tell_to_leave, self.nodes[leave.rank])
        for join in self._faults.joins:
            self.clock.at(join.at, self._losses.wait_to_join, join.rank)
        try:
            self.clock.run()
            if not all(node.ended for node in self.nodes):
                raise standstill(self.nodes, self._faults, self.clock.now, self.strategy.name)
        finally:
            for node in self.nodes:
                if node.close is not None:
                    node.close()  # also gives back the modes of torch that a coroutine may hold

    def _begin(self, node: SimulatedNode) -> None:
        if node.ended:  # crashed before it joined
            return
        self.trace.start(node.rank, self.clock.now)
        coroutine = self.strategy.course(node)
        node.resume, node.close = coroutine.send, coroutine.close
        self.advance(node, None)

    def _end(self, node: SimulatedNode, reason: str) -> None:
        node.resume, node.ended = None, True
        if node.unsent:
            self.trace.discard(node.rank, self.clock.now, node.unsent, reason)
        if node.rank not in self._losses:
            self._source.release(node.rank)
        self.trace.end(node.rank, self.clock.now)

    def _crash(self, crash: Crash) -> None:
        if not self.nodes[crash.rank].ended:
            self.remove(self.nodes[crash.rank], crash.kind)

    def remove(self, node: SimulatedNode, why: str) -> None:
        """The rank is gone; the others go on, if the strategy can."""
        if node.close is not None:
            node.close()
        if self.strategy.survives:
            self._losses.add(node, why)
        self._end(node, why)
        if self.strategy.survives:
            self._collectives.agree_without(node.rank)
            if not node.servers:  # with servers, when all of them have heard of it
                self._source.release(node.rank)

    def seat(self, rank: int, giver: SimulatedNode) -> None:
        """A newcomer takes the place of a rank that is gone, with what another one has."""
        self.nodes[rank] = self._node_of(rank)
        self.nodes[rank].take_over(giver, self._source.reached(rank))
        self.clock.at(self.clock.now, self._begin, self.nodes[rank])

    def heard_of_loss(self, node: SimulatedNode, rank: int) -> bool:
        return self._losses.heard(node, rank)

    # ---- a rank's course

    def advance(self, node: SimulatedNode, answer: Gradient | None) -> None:
        """Run the coroutine to where it next needs time."""
        assert node.resume is not None
        node.ticket += 1
        try:
            asked = node.resume(answer)
        except StopIteration:
            self._end(node, "left over by the strategy")
            asked = None
        if self._news:
            self.round_over(node)
        if self._losses.leaving:
            self._losses.look()
        if asked is None:
            return
        if leak := node.learner.leaked():
            raise leaked(leak, self.strategy.name, self.place(node))
        if asked is NEXT_GRADIENT:
            self._start_micro_batch(node)
        else:
            assert isinstance(asked, SimulatedWork), "a strategy may await only what its node gave it"
            node.since, node.waits_for, node.answer = self.clock.now, asked, None
            asked.waiters.append((node, node.ticket))

    def _start_micro_batch(self, node: SimulatedNode) -> None:
        now = self.clock.now
        over = now >= self._until or node.until in node.signals
        if node.rank in self._losses.leaving:
            self._source.give_back(node.rank)
            over = True
        if over or not (samples := self._source.take(node.rank, node.at_most)):
            self._start_idling(node)
            return
        node.out_of_data, node.empties, self._empties = False, 0, 0
        if node.until is None:
            gradient = node.learner.compute(samples)
        else:  # computed when it is done, if it ever is: until then nothing moves this rank's parameters
            gradient = Gradient(None, sum(map(len, samples)), samples)
        node.computing, node.since = gradient, now
        seconds = node.times.seconds(gradient.count)
        end = now + seconds
        if node.rank in self._faults.touched:
            end = self._faults.end(node.rank, now, seconds)
        node.due = end
        if end < inf:
            self.clock.at(end, self._micro_batch_ends, node)

    def _end_micro_batch(self, node: SimulatedNode) -> None:
        gradient = node.computing
        if node.ended or gradient is None or self.clock.now != node.due:  # it crashed meanwhile, or was given up
            return
        node.computing = None
        if node.until is not None:
            gradient = node.learner.compute(gradient.samples)
        start, end, count = node.since, self.clock.now, gradient.count
        node.speed.see(count, end - start)
        node.unsent += count
        self.trace.compute(node.rank, start, end, count)
        self.advance(node, gradient)

    def give_up(self, node: SimulatedNode) -> None:
        """The signal that ends the micro-batch under way has come: as much of it as was done was for nothing."""
        gradient, now, node.computing = node.computing, self.clock.now, None
        assert gradient is not None
        if now > node.since:
            done = int(gradient.count * (now - node.since) / (node.due - node.since))
            self.trace.compute(node.rank, node.since, now, done)
            self.trace.discard(node.rank, now, done, GIVEN_UP)
        self._source.put_back(node.rank, gradient.samples)
        self.advance(node, Gradient(None, 0))

    def _start_idling(self, node: SimulatedNode) -> None:
        """No data: an empty gradient, when the next thing in flight here arrives; at once if there is nothing."""
        now = self.clock.now
        node.empties = node.empties + 1 if node.since == now else 1
        node.idle, node.out_of_data = True, node.rounds >= node.open_until
        node.since, node.waits_for, node.answer = now, None, Gradient(None, 0)
        self._empties += 1
        if self._empties > 10_000 + PATIENCE * len(self.nodes):
            raise never_ends(self._empties, self.strategy.name, self.place(node))
        waiter = (node, node.ticket)
        for work in node.in_flight:
            if not work.done:
                node.waits_for = work
                work.waiters.append(waiter)
        if node.waits_for is None and node.empties <= PATIENCE:
            self.clock.at(now, self.wake, waiter)

    def wake(self, waiter: Waiter) -> None:
        node, ticket = waiter
        if node.ticket != ticket or node.resume is None:
            return
        now = self.clock.now
        if node.rank in self._faults.touched and (thaw := self._faults.thaw(node.rank, now)) > now:
            if thaw < inf:
                self.clock.at(thaw, self.wake, waiter)
            return
        if now > node.since:
            work = node.waits_for
            joined, round_number = (work.joined, work.round) if work else (inf, None)
            self.trace.wait(node.rank, node.since, now, joined, round_number)
        node.waits_for, node.idle = None, False
        self.advance(node, node.answer)

    def place(self, node: SimulatedNode) -> str:
        return f"rank {node.rank}, {self.clock.now:g} s"

    # ---- collectives

    def start_all_reduce(self, node: SimulatedNode, gradient: Gradient, note: float) -> Work[Gradient]:
        self.round_over(node)  # newcomers take part from this one on
        own, samples = gradient.count, gradient.samples
        node.unsent -= own
        payload, sound = node.learner.contribution(gradient, not node.out_of_data)
        self._source.contribute(node.rank, node.rounds, own + node.discarded)
        node.discarded = 0
        if not sound:
            self._drop_non_finite(node, own, samples)
            own = 0
        return self._start_round(node, payload, own, note)

    def start_mean(self, node: SimulatedNode, share: Share) -> Work[Gradient]:
        node.bids_farewell = node.servers > 0
        own = Gradient(node.learner.share(share), share.models)
        payload, _ = node.learner.contribution(own, not node.out_of_data)
        self._source.contribute(node.rank, node.rounds, node.discarded)
        node.handed_in, node.discarded = node.handed_in + node.discarded, 0
        if self._losses and node.handed_in:  # what is not used by now is lost with a server
            self._source.reach(node.rank, node.handed_in)
        return self._start_round(node, payload, None, 0.0)

    def _start_round(self, node: SimulatedNode, payload: Any, own: int | None, note: float) -> Work[Gradient]:
        round_number, nbytes = node.rounds, node.learner.travelling([payload])
        node.rounds += 1
        self.trace.join(node.rank, self.clock.now, round_number, own or 0, nbytes + node.sent)
        node.sent = 0
        kind = "all-reduce" if own is not None else "mean of models"
        collective = self._collectives.join(node, kind, payload, nbytes, round_number, note)
        work = AllReduceWork(collective, node, own)
        node.fly(work)
        return work

    def start_all_gather(self, node: SimulatedNode, numbers: tuple[float, ...]) -> Work[tuple[tuple[float, ...], ...]]:
        work = AllGatherWork(self._collectives.join(node, "all-gather", numbers, 8 * len(numbers), None, 0.0), node)
        node.fly(work)
        return work

    def round_applied(self, node: SimulatedNode, total: RoundTotal) -> None:
        now = self.clock.now
        node.finished, node.bids_farewell, node.here = node.finished or not total.working, False, total.ranks
        applied = sum(count for _, count, _ in total.parts)
        node.samples_applied = self.samples_applied if node.own_rounds else node.samples_applied + applied
        if applied:
            self.last_applied = now
        for collective, count, own in total.parts:
            number = collective.round
            assert number is not None
            node.last_round = number
            if not collective.applied:
                collective.applied, collective.count = True, count
                if collective.done:
                    self.round_counts(collective)
            self.trace.applied(node.rank, now, number, count, own)
            noise = node.learner.noise
            if node.rank == 0 and number % NOISE_EVERY == 0 and noise.value is not None:
                self.trace.noise(node.rank, now, number, noise.squared_norm, noise.variance)
            if collective.joining and not node.finished:
                self._let_in = collective
        self._news = True  # told when the rank next needs time: until then the strategy may correct the step

    def round_counts(self, collective: Collective) -> None:
        """All have its result, and one has applied it: its samples are used."""
        assert collective.round is not None
        self.rounds += collective.count > 0
        self.samples_applied += collective.count
        self._source.commit(collective.round)

    def settle(self, node: SimulatedNode, gradient: Gradient) -> None:
        now, count = self.clock.now, sum(map(len, gradient.samples))
        settled, node.discarded = count + node.discarded, 0
        node.unsent -= count
        if settled:
            self._source.settle(node.rank, settled)
            node.watch.see(node.own_rounds, node.norm, count, True, node.learner.steps.learning_rate)
        if count:
            self.last_applied = now
        self.trace.step(node.rank, now, node.own_rounds, count, node.sent)
        node.own_rounds, node.sent = node.own_rounds + 1, 0
        self.rounds = max(self.rounds, node.own_rounds)
        self.samples_applied += count
        node.samples_applied = self.samples_applied
        self._news = True
        self.round_over(node)  # at once: the next round may be over too, with nothing to wait for in between

    def hand_in(self, node: SimulatedNode, gradient: Gradient) -> int:
        node.unsent -= gradient.count
        node.handed_in += gradient.count + node.discarded
        node.discarded = 0
        node.own_rounds += 1
        return node.handed_in

    def take_back(self, node: SimulatedNode, samples: list[range], reason: str) -> None:
        self._source.discard(node.rank, samples, reason)
        self.trace.discard(node.rank, self.clock.now, sum(map(len, samples)), reason)

    def settle_for(self, node: SimulatedNode, worker: int, samples: int, handed_in: int, delay: int) -> None:
        self._source.reach(worker, handed_in)
        if not samples:
            node.watch.dropped()
        node.watch.see(node.own_rounds, node.norm, samples, True, node.learner.steps.learning_rate)
        self.last_applied = self.clock.now
        self.trace.step_for(node.rank, self.clock.now, node.own_rounds, samples, node.sent, worker, delay)
        node.own_rounds, node.sent = node.own_rounds + 1, 0
        self.rounds = max(self.rounds, node.own_rounds)
        self.samples_applied += samples
        node.samples_applied += samples
        self._news = True
        self.round_over(node)

    def learned(self, node: SimulatedNode, samples: int) -> None:
        node.samples_applied = max(samples, node.samples_applied)

    def round_over(self, node: SimulatedNode) -> None:
        if self._news and self._on_applied is not None:
            applied = self.samples_applied if node.serves else node.samples_applied
            self._on_applied(node.rank, self.clock.now, applied)
        if self._let_in is not None:
            self._losses.admit(node, self._let_in)
        self._news, self._let_in = False, None

    def discard(self, node: SimulatedNode, gradient: Gradient, reason: str) -> None:
        node.unsent -= gradient.count
        node.discarded += gradient.count
        self._source.discard(node.rank, gradient.samples, reason)
        self.trace.discard(node.rank, self.clock.now, gradient.count, reason)

    def say(self, node: SimulatedNode, kind: str, text: str) -> None:
        self.trace.say(kind, node.rank, self.clock.now, text)

    @property
    def now(self) -> float:
        return self.clock.now

    @property
    def somebody_joins(self) -> bool:
        return bool(self._losses.joining)

    def is_lost(self, rank: int) -> bool:
        return rank in self._losses

    @property
    def somebody_is_lost(self) -> bool:
        return bool(self._losses)

    def _drop_non_finite(self, node: SimulatedNode, count: int, samples: list[range]) -> None:
        self._source.discard(node.rank, samples, "non-finite gradient")
        self.trace.discard(node.rank, self.clock.now, count, "non-finite gradient")
        node.watch.non_finite(count, node.rounds)

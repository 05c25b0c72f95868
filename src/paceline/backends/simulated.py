"""The simulated backend: all ranks of a run in one process and in virtual time, reproducible from one seed.

A micro-batch's gradient is computed when it *starts*, at the parameters of that moment, and delivered when it *ends*:
that is what a real device does. Between two awaits a rank takes no time. `simulate` is the door:

>>> from paceline.simulator.cluster import Cluster
>>> from paceline.strategies.all_reduce import AllReduce
>>> cluster = Cluster.from_speeds([1, 1, 0.5, 0.25], micro_batch_seconds=0.02)
>>> run = simulate(AllReduce(), cluster, seconds=8.0)
>>> run.rounds, run.samples_applied, round(run.share_of_ideal, 3)
(100, 12800, 0.364)
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import inf

from paceline.backends.learners import Learner, TimingLearner
from paceline.backends.sources import Data, Endless, Leases, Source
from paceline.backends.virtual_run import OnApplied, VirtualRun
from paceline.control.ledger import Ledger
from paceline.errors import PacelineError
from paceline.record import Recorder
from paceline.simulator.cluster import Cluster
from paceline.simulator.trace import Totals, Trace
from paceline.strategies.strategy import Strategy

__all__ = ["Data", "OnApplied", "Simulation", "TimingLearner", "simulate"]


@dataclass(frozen=True)
class Simulation:
    """What a simulated run came to. Seconds are virtual; samples computed = applied + discarded.

    Args:
        seconds: until the last sample was applied, but not less than a given limit (the rule of `summary.window_of`).
        rounds: all-reduces over at least one sample that were applied.
        bytes_sent: what the ranks gave to collectives and messages.
        events: taken from the clock's heap (see `simulator.clock`).
        workers: each rank's totals.
        ideal_samples_per_second: what all devices compute together when nobody waits.
    """

    seconds: float
    rounds: int
    samples_computed: int
    samples_applied: int
    samples_discarded: int
    bytes_sent: int
    events: int
    workers: tuple[Totals, ...]
    ideal_samples_per_second: float

    @property
    def share_of_ideal(self) -> float:
        """Samples applied ÷ what all devices could have computed in the same time."""
        return self.samples_applied / (self.seconds * self.ideal_samples_per_second) if self.seconds else 0.0


def simulate(
    strategy: Strategy,
    cluster: Cluster,
    *,
    micro_batch: int = 32,
    seconds: float | None = None,
    data: Data | None = None,
    learners: Sequence[Learner] | None = None,
    recorder: Recorder | None = None,
    on_applied: OnApplied | None = None,
) -> Simulation:
    """Run a strategy in virtual time, until its own end.

    Args:
        strategy: the same object that a real run takes.
        cluster: devices, network and faults; its seed is the seed of the run's timing.
        micro_batch: samples in one micro-batch. A shorter one at the end of an epoch takes proportionally less time.
        seconds: from then on no rank begins a micro-batch: all are out of data.
        data: what to learn from; endless when `None` (timing only). There must be an end: `seconds` or `data.epochs`.
        learners: one for each rank, servers included; `None` simulates time only, without tensors and torch.
        recorder: gets every event, as a real run writes them; costs time and memory.
        on_applied: see `OnApplied`; the place to take snapshots of the parameters.
    """
    workers, ranks = cluster.workers, cluster.ranks
    strategy.check_servers(cluster.begins_with - cluster.servers, cluster.servers)
    if seconds is None and (data is None or data.epochs is None):
        raise PacelineError("The simulation would never end.", remedy="Give seconds, or data with a number of epochs.")
    if micro_batch < 1:
        raise PacelineError(f"A micro-batch of {micro_batch} samples is not possible.", remedy="Give at least 1.")
    if learners is not None and len(learners) != ranks:
        raise PacelineError(f"There are {len(learners)} learners for a cluster of {ranks} ranks.")
    timing_only = all(isinstance(learner, TimingLearner) for learner in learners or ())
    if data is None and not timing_only:
        raise PacelineError("Real gradients need data.", remedy="Give data=Data(samples), the length of the data set.")
    source: Source = Endless(micro_batch)
    if data is not None:
        source = Leases(Ledger(data.samples, data.epochs, micro_batch, workers), ranks)
    trace = Trace(ranks, recorder)
    limits = micro_batch, inf if seconds is None else seconds
    sending = [learner.sending_as(strategy.code) for learner in learners or [TimingLearner()] * ranks]
    run = VirtualRun(strategy, cluster, source, sending, trace, limits, on_applied)
    with _collector_paused() if timing_only else nullcontext():
        run.play()
    return Simulation(
        seconds=max(run.last_applied, seconds or 0.0),
        rounds=run.rounds,
        samples_computed=sum(totals.samples for totals in trace.ranks),
        samples_applied=run.samples_applied,
        samples_discarded=sum(totals.discarded for totals in trace.ranks),
        bytes_sent=sum(totals.nbytes for totals in trace.ranks),
        events=run.clock.events,
        workers=tuple(trace.ranks[node.rank] for node in run.nodes if not node.serves),
        ideal_samples_per_second=micro_batch * cluster.micro_batches_per_second(),
    )


@contextmanager
def _collector_paused() -> Iterator[None]:
    """A timing-only run leaves no cyclic garbage; to look for some would take up to a third of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

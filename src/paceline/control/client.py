"""A rank's door to the control service.

Two threads: one reads what the service says, one tells it that this rank is alive. Questions wait for their answer
with a time-out; news (progress, discards, signals) is sent and forgotten, so that training never waits for it.
When the service refuses such news, the next call raises its error. A service that dies may be started again: then
whoever waits for an answer waits on, see `Line`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Self

from paceline.control.attention import Attention
from paceline.control.connection import Address
from paceline.control.line import Line
from paceline.control.membership import Description
from paceline.control.messages import Metadata, to_ranges, to_spans
from paceline.control.signals import RoundSignals
from paceline.control.wire import Frame, WireError
from paceline.errors import PacelineError

ANSWER_SECONDS = 30.0  # the service answers in microseconds; this is for a machine that swaps
CONNECT_SECONDS = 60.0  # the service's process may start later than this one
MOST_UNHEARD = 128  # messages kept to be repeated; then a question is asked, whose answer says that they were heard
DEFERRED_GRACE = 10.0  # the service watches the time-out of what it defers; ours only catches a dead service


class ControlClient:
    """One rank's connection to the control service.

    Args:
        address: the service's host and port.
        secret: the run's secret.
        rank: who we are.
        on_lost: called with {rank: reason} of the ranks lost since the last call, on the reading thread. It must be
            short and must not ask the service anything.
        connect_seconds: how long to try while nobody listens yet.
    """

    def __init__(
        self,
        address: Address,
        secret: bytes,
        rank: int,
        *,
        on_lost: Callable[[dict[int, str]], None] | None = None,
        connect_seconds: float = CONNECT_SECONDS,
    ) -> None:
        self.address, self.rank = address, rank
        self.generation = 0
        self.roster: list[Address | None] = []
        self.lost: dict[int, str] = {}
        self.left: set[int] = set()
        self.joining: set[int] = set()
        """Ranks that wait to take part; among the lost until then."""
        self.membership = (0, frozenset[int](), frozenset[int](), 0)
        """Its generation, the ranks that are lost and that have left, and how many numbers of ranks there are, as of
        one moment: ranks look at it after every micro-batch."""
        self.admitted_in = 0
        """The generation in which newcomers took part for the last time."""
        self._metrics: Metadata = {}
        self.attention = Attention()
        self.kept_alive: list[object] = []
        """What others need to live as long as this client; see `ControlStore`."""
        self._progress: list[int] = []
        self._adopted = 0
        self._on_lost = on_lost
        self._signals = RoundSignals()
        self._lock = threading.Lock()
        greeting: Future[Frame] = Future()
        self._pending: dict[int, Future[Frame]] = {0: greeting}
        self._refusal: PacelineError | None = None
        self._gone: str = ""
        self._closing = threading.Event()
        self._line = Line(address, secret, connect_seconds)
        self._threads: list[threading.Thread] = []
        self._start(self._read)
        try:
            terms = self._await(greeting, "greeting", ANSWER_SECONDS).metadata
        except BaseException:
            self.close()
            raise
        self._line.agree(terms)
        self._beat, self._join_seconds = float(terms["heartbeat_seconds"]), float(terms["join_seconds"])
        self._start(self._keep_alive)

    def _start(self, loop: Callable[[], None]) -> None:
        thread = threading.Thread(target=loop, name=f"paceline-control{loop.__name__}", daemon=True)
        self._threads.append(thread)
        thread.start()

    # ---- membership

    @property
    def takes_part(self) -> bool:
        """Whether this rank is no newcomer that still waits."""
        with self._lock:
            return self.rank < len(self.roster) and self.rank not in self.lost

    @property
    def local_host(self) -> str:
        """This machine's address as the service's machine reaches it: the one to be found at by other ranks."""
        return self._line.connection.local_host

    def hello(self, description: Description, mailbox: Address | None = None) -> list[Address | None]:
        """Join the run; returns where every rank's mailbox is, when all have arrived. Raises when they do not fit."""
        place = list(mailbox) if mailbox else None
        introduction = {"rank": self.rank, "description": description, "mailbox": place}
        self._line.introduction = {"rank": self.rank}
        answer = self._ask("hello", introduction, timeout=self._join_seconds + DEFERRED_GRACE)
        self._take_membership(answer.metadata)
        return self.roster

    def leave(self, reason: str = "") -> bool:
        """Say farewell: the others go on without us. With a reason they learn that this rank is gone before the end,
        and why. Whether it was the last."""
        last: bool = self._ask("leave", {"error": reason}).metadata["last"]
        self._line.return_seconds = 0.0  # to a run that is over for this rank
        return last

    def admit(self, number: int) -> tuple[list[int], int]:
        """Let those in who wait to join, for the how-manieth time: they, and the generation from which on they take
        part. Whoever asks for the same gets the same answer."""
        answer = self._ask("admit", {"number": number}).metadata
        return answer["ranks"], answer["generation"]

    def enlist(self, count: int) -> list[int]:
        """For a launcher: numbers of further ranks, which it will start and let join."""
        ranks: list[int] = self._ask("enlist", {"count": count}).metadata["ranks"]
        return ranks

    def held(self) -> int:
        """Samples that this rank has leased, and that are neither given back nor known to be used."""
        return int(self._ask("status", {}).metadata["state"]["held"].get(str(self.rank), 0))

    def report_exit(self, rank: int, reason: str) -> None:
        """For a launcher: the rank's process has ended."""
        self._tell("exited", {"rank": rank, "reason": reason})

    def status(self) -> dict[str, Any]:
        """Members, latest metrics and the ledger's counters."""
        state: dict[str, Any] = self._ask("status", {}).metadata["state"]
        return state

    def report(self, metrics: Metadata) -> None:
        """Small numbers and texts about this rank; the next heartbeat carries them, and `status` shows them."""
        self._metrics = metrics

    def signal(self, round_number: int) -> None:
        """Tell every rank that the round is over."""
        if self._signals.add(round_number):
            self._tell("signal", {"round": round_number, "samples": 0, "target": 0})

    def count(self, round_number: int, samples: int, target: int) -> None:
        """Add to the round's samples; the service signals the round when it has the target."""
        if round_number not in self._signals:
            self._tell("signal", {"round": round_number, "samples": samples, "target": target})

    def signalled(self, round_number: int) -> bool:
        """Whether somebody, or this rank itself, has signalled the round."""
        return round_number in self._signals

    # ---- samples

    def open_ledger(self, samples: int, epochs: int | None, micro_batch: int, used: Iterable[range] = ()) -> None:
        """Say what data the run reads. Every rank says the same; `used` is what a checkpoint had settled."""
        terms = {"samples": samples, "epochs": epochs, "micro_batch": micro_batch, "used": to_spans(used)}
        self._ask("open_ledger", terms)

    def lease(self, micro_batches: int) -> Future[tuple[list[range], bool]]:
        """Ask for work: the ranges (maybe none), and whether every sample of the run is settled."""
        outcome: Future[tuple[list[range], bool]] = Future()

        def pass_on(answer: Future[Frame]) -> None:
            error = answer.exception()
            if error is not None:
                outcome.set_exception(error)
            else:
                found = answer.result().metadata
                outcome.set_result((to_ranges(found["ranges"]), found["complete"]))

        self._request("lease", {"micro_batches": micro_batches}).add_done_callback(pass_on)
        return outcome

    def report_progress(self, samples: Sequence[int], *, now: bool = False, generation: int | None = None) -> None:
        """Samples that each rank has brought to an end in the rounds that this rank has applied. The next heartbeat
        tells it; `now` tells it at once, with all that this rank knows of the membership: it will apply no more
        rounds with those that are lost by now, so what they leave behind can go to others. With a `generation` it says
        so only of those who were lost by then."""
        with self._lock:
            self._progress = list(samples)
            if generation is None and not now:
                return
            self._adopted = max(self._adopted, self.generation if generation is None else generation)
            news = {"samples": self._progress, "generation": self._adopted}
        self._tell("progress", news)

    def discard(self, ranges: Iterable[range], reason: str) -> None:
        """Computed, but dropped."""
        self._tell("discard", {"ranges": to_spans(ranges), "reason": reason})

    def give_back(self, ranges: Iterable[range]) -> None:
        """Leased, but not computed. After it others can lease it."""
        self._ask("give_back", {"ranges": to_spans(ranges)})

    def snapshot(self, samples: Sequence[int]) -> list[range]:
        """What a checkpoint at this progress has settled."""
        return to_ranges(self._ask("snapshot", {"samples": list(samples)}).metadata["ranges"])

    # ---- key-value store

    def store_set(self, key: str, value: bytes) -> None:
        self._ask("store_set", {"key": key}, buffers=[memoryview(value)])

    def store_get(self, key: str, timeout: float = ANSWER_SECONDS) -> bytes:
        """The value; waits until somebody has set it."""
        answer = self._ask("store_get", {"key": key, "timeout": timeout}, timeout=timeout + DEFERRED_GRACE)
        return b"".join(answer.buffers)

    def store_wait(self, keys: list[str], timeout: float = ANSWER_SECONDS) -> None:
        self._ask("store_wait", {"keys": keys, "timeout": timeout}, timeout=timeout + DEFERRED_GRACE)

    def store_add(self, key: str, amount: int) -> int:
        return int(self._ask("store_add", {"key": key, "amount": amount}).metadata["value"])

    def store_check(self, keys: list[str]) -> bool:
        return bool(self._ask("store_check", {"keys": keys}).metadata["value"])

    def store_delete(self, key: str) -> bool:
        return bool(self._ask("store_delete", {"key": key}).metadata["value"])

    # ---- asking and telling

    def _ask(
        self,
        kind: str,
        metadata: Metadata,
        *,
        buffers: Iterable[memoryview] = (),
        timeout: float = ANSWER_SECONDS,
    ) -> Frame:
        return self._await(self._request(kind, metadata, buffers), kind, timeout)

    def _await(self, answer: Future[Frame], question: str, timeout: float) -> Frame:
        try:
            return answer.result(timeout)
        except FutureTimeoutError:
            raise PacelineError(
                f"The control service did not answer ({question}) within {timeout:g} s.",
                where=self._where,
                cause="Its machine is overloaded, or the network between is down.",
            ) from None

    def _request(self, kind: str, metadata: Metadata, buffers: Iterable[memoryview] = ()) -> Future[Frame]:
        answer: Future[Frame] = Future()
        self._send(Frame(kind, metadata, list(buffers), self.generation), answer)
        return answer

    def _tell(self, kind: str, metadata: Metadata) -> None:
        self._send(Frame(kind, metadata, generation=self.generation))
        if self._line.unheard > MOST_UNHEARD:
            self._request("status", {})

    def _send(self, frame: Frame, answer: Future[Frame] | None = None) -> None:
        def register(number: int) -> None:
            with self._lock:
                self._raise_trouble()
                if answer is not None:
                    self._pending[number] = answer

        try:
            self._line.say(frame, asks=answer is not None, register=register)
        except OSError as error:
            self._lose_service(str(error))
            raise self._service_gone() from error

    def check(self) -> None:
        """Raise if the service is gone for good, or has let this rank go."""
        if self._gone:
            raise self._service_gone()

    def _raise_trouble(self) -> None:
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            raise refusal
        self.check()

    @property
    def _where(self) -> str:
        return f"rank {self.rank}, service at {self.address[0]}:{self.address[1]}"

    def _service_gone(self) -> PacelineError:
        return PacelineError(
            f"The connection to the control service is gone ({self._gone}).",
            where=self._where,
            cause="The process that runs it has ended, or took this rank for dead because it had been stopped.",
            remedy="Look at the output of the launcher or of rank 0.",
        )

    # ---- the two threads

    def _read(self) -> None:
        reason = "its answers are no longer read"  # unless `on_lost` raises, one of the reasons below
        try:
            while reason:
                try:
                    self._take(self._line.connection.receive())
                except (OSError, WireError) as error:
                    ended = "it was closed here" if self._closing.is_set() else str(error)
                    why = self._line.come_back(self._take, self._closing)
                    reason = why and f"{ended}; {why}"
                    if reason:
                        break
                    reason = "its answers are no longer read"
        finally:
            self._lose_service(reason)

    def _take(self, frame: Frame) -> None:
        with self._lock:
            answer = self._pending.pop(frame.sequence, None)
        if frame.sequence:
            self._line.answered(frame.sequence)
        match frame.kind:
            case "error" if answer is not None:
                answer.set_exception(PacelineError(**_error_fields(frame)))
            case "error":
                self._refusal = PacelineError(**_error_fields(frame))
            case "membership":
                self._take_membership(frame.metadata)
            case "signalled":
                self._signals.add(frame.metadata["round"])
            case _ if answer is not None:
                answer.set_result(frame)

    def _take_membership(self, news: Metadata) -> None:
        with self._lock:
            if news["generation"] < self.generation:
                return  # two of the service's threads overtook each other
            lost = {int(rank): reason for rank, reason in news["lost"].items()}
            fresh = {rank: reason for rank, reason in lost.items() if rank not in self.lost}
            self.roster = [(place[0], place[1]) if place else None for place in news["roster"]]
            self.left, self.joining = set(news["left"]), set(news["joining"])
            self.lost, self.admitted_in = lost, news["admitted_in"]
            self.membership = (news["generation"], frozenset(lost), frozenset(self.left), len(self.roster))
            self.generation = news["generation"]  # last: whoever reads it without the lock finds all the rest
        if fresh and self._on_lost is not None:
            self._on_lost(fresh)

    def _keep_alive(self) -> None:
        while not self._closing.wait(self._beat):
            try:
                said = {"metrics": self._metrics, **self.attention.report()}
                self._line.connection.send(Frame("heartbeat", said, generation=self.generation))
                with self._lock:  # both as of one moment: old progress with a new generation would free used samples
                    news = {"samples": self._progress, "generation": self._adopted}
                if news["samples"]:
                    self._line.connection.send(Frame("progress", news, generation=self.generation))
            except OSError:
                if self._gone or not self._line.return_seconds:
                    return  # the reading thread tells why

    def _lose_service(self, reason: str) -> None:
        with self._lock:
            self._gone = self._gone or reason
            pending = list(self._pending.values())
            self._pending.clear()
        for answer in pending:
            answer.set_exception(self._service_gone())

    def close(self) -> None:
        """Close the connection. Without `leave` before, the service takes it for a death."""
        self._closing.set()
        self._line.connection.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _error_fields(frame: Frame) -> dict[str, str]:
    return {field: str(text) for field, text in frame.metadata.items()}

"""The driver's side of a run on Ray: it starts the ranks, hears and watches them, and ends them all.

It watches actors as the local launcher watches its children.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from paceline.errors import PacelineError
from paceline.launch.local import LOOK_SECONDS, Launch, Ranks
from paceline.launch.replacing import Replacing
from paceline.launch.roles import environment_of_servers
from paceline.launch.surroundings import JOINS, environment_of
from paceline.ray.actors import Spot
from paceline.ray.reporting import Report

ANSWER_SECONDS = 60.0  # the control plane's actor answers in milliseconds; this is for a machine that swaps
DEAD = "The actor is dead because "
GPUS = "CUDA_VISIBLE_DEVICES"


class Control:
    """The driver's line to the control plane's actor."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def report_exit(self, rank: int, reason: str) -> None:
        self._ask(self.actor.report_exit.remote(rank, reason))

    def status(self) -> dict[str, Any]:
        state: dict[str, Any] = self._ask(self.actor.status.remote())
        return state

    def reports(self) -> list[Report]:
        told: list[Report] = self._ask(self.actor.reports.remote())
        return told

    @staticmethod
    def _ask(question: Any) -> Any:
        return answer(question, "The control plane", ANSWER_SECONDS)


class Spare(NamedTuple):
    """For ranks that are lost.

    Args:
        most: how often, over all ranks, one is started again.
        make: another actor for a rank. Ray places it: where the one before was, or where it has moved its room to.
    """

    most: int
    make: Callable[[int], Any]


class RankActor:
    """An actor, asked as a child process is asked.

    Args:
        actor: the rank.
        gently: whether it can ask its process to end; else the actor itself is ended.
    """

    pid = None

    def __init__(self, actor: Any, gently: bool) -> None:
        self.actor, self._gently = actor, gently
        self._over = threading.Event()
        self.returncode: int | None = None
        self.placed = True
        """Whether Ray has found room for it."""

    def end_with(self, code: int) -> None:
        if self.returncode is None:
            self.returncode = code
        self._over.set()

    def poll(self) -> int | None:
        return self.returncode

    def terminate(self) -> None:
        if self._gently:
            self.actor.terminate.remote()
        else:
            self.kill()

    def kill(self) -> None:
        import ray

        ray.kill(self.actor)
        self.end_with(-signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        if not self._over.wait(timeout):
            raise subprocess.TimeoutExpired("an actor of Ray", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode


class Actors(Ranks):
    """The ranks as actors.

    Args:
        actors: that are placed.
        start: makes an actor run as its rank; `joins` for one that joins a running training. What it then yields is
            listened to.
        spare: in place of those that are lost.
        logs: the folder of their logs; None if Ray shows what they print.
    """

    def __init__(self, actors: Sequence[Any], start: Callable[..., Any], spare: Spare, logs: Path | None) -> None:
        super().__init__(range(len(actors)), quiet=logs is None, replacing=Replacing(spare.most))
        self._run, self._spare, self._logs = start, spare, logs
        for rank, actor in enumerate(actors):
            process = RankActor(actor, gently=self._logs is not None)
            self._processes.append(process)
            self._thread(self._listen, rank, process, start(actor, rank))

    def _thread(self, target: Callable[..., None], *arguments: Any) -> None:
        self._readers.append(threading.Thread(target=target, args=arguments, daemon=True))
        self._readers[-1].start()

    def _start(self, rank: int, joins: bool = False) -> RankActor:
        process = RankActor(self._spare.make(rank), gently=self._logs is not None)
        process.placed = False
        self._thread(self._join, rank, process)
        return process

    def _join(self, rank: int, process: RankActor) -> None:
        """When Ray has found room for it. The others may be through before that, and then nobody needs it. An actor
        that Ray sends to a node of whose death it does not know yet dies with it, and is made again."""
        import ray
        from ray.exceptions import RayActorError

        self._reasons.pop(rank, None)
        found = False
        while not found:
            where = process.actor.where.remote()
            while not ray.wait([where], timeout=LOOK_SECONDS)[0]:
                if all(other.poll() is not None or not other.placed for other in self._actors_now):
                    self._reasons[rank] = "Ray had no room for another actor"
                    process.kill()
                    return
            try:
                found = bool(ray.get(where))
            except RayActorError:
                time.sleep(LOOK_SECONDS)
                process.actor = self._spare.make(rank)
        process.placed = True
        try:
            heard = self._run(process.actor, rank, joins=True)
        except PacelineError as error:
            self._reasons[rank] = str(error).splitlines()[0]
            process.kill()
            return
        self._listen(rank, process, heard, joins=True)

    @property
    def _actors_now(self) -> list[RankActor]:
        return [process for process in self._processes if isinstance(process, RankActor)]

    def _listen(self, rank: int, process: RankActor, heard: Any, joins: bool = False) -> None:
        import ray
        from ray.exceptions import RayError, RayTaskError

        code = -signal.SIGKILL  # of an actor that ends without a word
        log = None if self._logs is None else (self._logs / f"rank-{rank:04d}.log").open("a" if joins else "w")
        try:
            for reference in heard:
                told = ray.get(reference)
                if isinstance(told, int):
                    code = told
                    break
                self._take(rank, told, log)
        except RayTaskError as error:  # before the script or the function began
            code = 1
            self._take(rank, [("stderr", f"Error: {error.cause}\n")], log)
        except RayError as error:
            self._reasons[rank] = f"its actor died: {reason_of(error)}"
        finally:
            if log is not None:
                log.close()
            process.end_with(code)

    def _take(self, rank: int, lines: Sequence[tuple[str, str]], log: IO[str] | None) -> None:
        for name, line in lines:
            if log is not None:
                log.write(line)
                log.flush()
            self._hear(rank, line, sys.stderr if name == "stderr" else sys.stdout)


class Team:
    """All ranks of one start, placed and waiting.

    Args:
        actors: the ranks, workers first.
        servers: how many of them serve.
        control: the control plane.
        card: what a rank needs to find its run.
        seconds: within which all must have been started.
        spare: in place of those that are lost.
    """

    def __init__(
        self, actors: Sequence[Any], servers: int, control: Control, card: dict[str, str], seconds: float, spare: Spare
    ) -> None:
        self.folder, self.control = Path(card["folder"]), control
        self._actors, self._origin, self._seconds, self._spare = actors, float(card["origin"]), seconds, spare
        asked = [actor.where.remote() for actor in actors]
        self._spots = [answer(each, f"Rank {rank}", seconds) for rank, each in enumerate(asked)]
        self._shared = {**environment_of(card), **environment_of_servers(servers), "WORLD_SIZE": str(len(actors))}
        self.where = {rank: spot.for_people for rank, spot in enumerate(self._spots)}

    def run_script(self, command: list[str]) -> Launch:
        """Run a script with its arguments on every rank."""
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        return self._watched(logs, command, os.getcwd())

    def run_function(self, call: Callable[[], object]) -> Launch:
        """Run a function on every rank."""
        import ray

        return self._watched(None, ray.put(call), self.control.actor)

    def _watched(self, logs: Path | None, *arguments: Any) -> Launch:
        def start(actor: Any, rank: int, joins: bool = False) -> Any:
            if joins:
                self._spots[rank] = answer(actor.where.remote(), f"Rank {rank}", self._seconds)
                self.where[rank] = self._spots[rank].for_people
            environment = self._shared | environments(self._spots)[rank] | ({JOINS: "1"} if joins else {})
            run = actor.run.options(num_returns="streaming")
            return run.remote(*arguments, environment, max(0.0, time.time() - self._origin))

        actors = Actors(self._actors, start, self._spare, logs)
        try:
            return actors.watch(self.control)
        finally:
            actors.end_all()


def environments(spots: Sequence[Spot]) -> list[dict[str, str]]:
    """What each rank is told of itself and its machine, as torchrun would: whoever has a GPU sees all that ranks of its
    machine have, and `LOCAL_RANK` is the number of its own. So ranks with GPUs come first among those of a machine.

    >>> spots = [Spot("a", "", "", ["1"]), Spot("a", "", ""), Spot("b", "", ""), Spot("a", "", "", ["0"])]
    >>> for each in environments(spots):
    ...     print(each)
    {'RANK': '0', 'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '3', 'CUDA_VISIBLE_DEVICES': '1,0'}
    {'RANK': '1', 'LOCAL_RANK': '2', 'LOCAL_WORLD_SIZE': '3'}
    {'RANK': '2', 'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '1'}
    {'RANK': '3', 'LOCAL_RANK': '1', 'LOCAL_WORLD_SIZE': '3', 'CUDA_VISIBLE_DEVICES': '1,0'}
    """
    neighbours: dict[str, list[int]] = {}
    for rank in sorted(range(len(spots)), key=lambda rank: not spots[rank].gpus):
        neighbours.setdefault(spots[rank].node, []).append(rank)
    found = []
    for rank, spot in enumerate(spots):
        here = neighbours[spot.node]
        own = {"RANK": str(rank), "LOCAL_RANK": str(here.index(rank)), "LOCAL_WORLD_SIZE": str(len(here))}
        if spot.gpus:
            seen = dict.fromkeys(gpu for each in here for gpu in spots[each].gpus)
            own[GPUS] = ",".join(seen)
        found.append(own)
    return found


def answer(reference: Any, who: str, seconds: float) -> Any:
    """Of an actor; its errors as ours."""
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

    try:
        return ray.get(reference, timeout=seconds)
    except RayTaskError as error:
        if isinstance(error.cause, PacelineError):
            raise error.cause from None
        raise
    except GetTimeoutError:
        raise PacelineError(
            f"{who} did not answer within {seconds:g} s.",
            cause="Its node still prepares the environment, or is overloaded.",
            remedy="Look at `ray status`; give more time with --join-timeout.",
        ) from None
    except RayActorError as error:
        raise PacelineError(
            f"{who} is gone: its actor died: {reason_of(error)}.",
            remedy="Every node needs the same Paceline, torch and Ray. More is in Ray's own logs.",
        ) from error


def reason_of(error: Exception) -> str:
    """What tells, of the much that Ray says when an actor has died.

    >>> reason_of(Exception("It died.\\n ip: 10.0.0.1\\nThe actor is dead because its node has died. Node Id: a1"))
    'its node has died'
    >>> reason_of(Exception("The actor a1 is unavailable: RpcError: Socket closed"))
    'its node does not answer'
    """
    said = str(error)
    if " is unavailable" in said:
        return "its node does not answer"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith((DEAD, "ModuleNotFoundError"))]
    sentence = (telling or lines or [type(error).__name__])[-1].removeprefix(DEAD)
    return sentence.split(". ")[0].rstrip(".")

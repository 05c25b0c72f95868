"""A server of a group: holds parameters, steps with what is pushed, and says who may go on; see `server_line` for what
workers and servers say to each other.

    push from i     Opt(w, x_i);  clock_i += 1;  whoever waited and now may start gets w
    bound 0         Opt(w, mean of the round's x) as soon as all of the group have pushed
    between groups  see `exchange`: after as many pushes as the group has workers, all other groups hear of them
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.errors import PacelineError
from paceline.node import Message, Node
from paceline.rules.placement import cut
from paceline.rules.staleness import Clocks, Unbounded, delayed_learning_rate
from paceline.serving.cures import scale_at_server
from paceline.serving.exchange import exchange
from paceline.serving.grouper import Grouper
from paceline.serving.received import Received, dense

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.strategies.parameter_server import ParameterServer


class GroupServer:
    """One server.

    Args:
        options: the strategy.
        node: the server.
    """

    def __init__(self, options: ParameterServer, node: Node) -> None:
        self._options, self._node = options, node
        self._placement = placement = options.placement(node.workers, node.servers)
        self._group, part = placement.place(node.rank)
        self._leads = part == 0  # of the group's servers the first keeps the books, and moves workers
        self._first, last = cut(node.sizes, placement.parts)[part]
        self._parameters = node.parameters[self._first : last]
        self._lock_step = options.bound.high == 0
        self._asked: dict[int, tuple[int, float]] = {}  # who wants parameters: number of the request, and since when
        self._sent: dict[int, deque[int]] = {}  # versions that workers have and have not yet pushed a gradient of
        self._version = 0  # pushes that the parameters are the result of
        self._round: list[Received] = []
        self._exchange = exchange(options, node, self._first, self._parameters)
        self._grouper = Grouper(options, node, self._group)
        # While those who are together are not of similar speed, the fast ones would wait for the slow ones in bursts.
        self._clocks = Clocks(options.bound if self._grouper.formed or self._lock_step else Unbounded())
        self._workers = set(range(node.workers))  # that are not lost
        self._left: set[int] = set()
        self._lost: set[int] = set()
        # Who is to come belongs to the group from the beginning: else the first to come would go ahead without it.
        self._expected = {each for each in self._workers if placement.first_group(each) == self._group}
        self._expect()

    @property
    def broken(self) -> bool:
        """Whether a server of this group is lost: then its model is not whole."""
        return not self._lost.isdisjoint(self._placement.servers_of(self._group))

    async def serve(self) -> None:
        """Until all workers have left, and all that other groups have sent is in."""
        while not self._left.issuperset(self._workers):
            self._hear(await self._node.receive())
        self._step_together()
        self._exchange.close()
        while not self._exchange.closed:
            self._hear(await self._node.receive())

    def met(self) -> None:
        """All hold the mean of the groups' models; the next period begins, with newcomers if some were let in."""
        self._left.clear()
        self._node.answers_for.clear()  # a successor may come to another group than the one before it has left
        self._exchange.met()
        self._welcome({rank for rank in self._node.here if rank not in self._placement.ranks} - self._workers)
        self._expect()

    def _welcome(self, newcomers: set[int]) -> None:
        self._workers |= newcomers
        self._lost -= newcomers
        self._grouper.welcome(newcomers)
        if self._placement.groups == 1:  # else it joins at the least clock of whichever group it comes to
            self._expected |= newcomers

    def _expect(self) -> None:
        for worker in sorted(self._expected):
            self._clocks.join(worker)
        self._expected.clear()

    # ---- what comes

    def _hear(self, message: Message) -> None:
        what, *words = message.kind.split()
        sender = message.sender
        if sender in self._lost:  # it was taken for dead, and comes back: its samples went to others
            return
        match what:
            case "lost":
                self._lose(sender)
            case "found":
                pass  # news of a loss, read after its successor has come: at the meeting both were dealt with
            case "join":
                if sender not in self._clocks.workers:
                    self._clocks.join(sender)
                if self._leads:
                    self._node.answers_for.add(sender)
                self._sent[sender] = deque()
                self._asked[sender] = int(words[0]), self._node.now()
                self._answer(sender)
            case "pull":
                self._asked[sender] = int(words[0]), self._node.now()
                self._answer(sender)
            case "push":
                self._take_push(Received(sender, *words), message.tensors)
            case "rest":
                self._take_rest(sender, message.tensors)
            case "gone":
                self._forget(sender)
                self._node.answers_for.discard(sender)
                self._node.send(sender, "bye")
            case "leaves":
                if sender in self._sent:
                    self._expected.add(sender)  # after the meeting it comes back to the group that it has left
                    self._node.send(sender, "bye")
                self._forget(sender)
                self._left.add(sender)
                self._grouper.hear(message)
            case "groups":
                self._grouper.hear(message)
                self._begin_to_bound()
            case "time" | "pushed" | "orphan":
                self._grouper.hear(message)
            case _:
                self._version += self._exchange.hear(message)

    def _begin_to_bound(self) -> None:
        """Groups are formed: from now on the bound holds, between those who are here."""
        if self._clocks.bound != self._options.bound:
            members, self._clocks = self._clocks.workers, Clocks(self._options.bound)
            for worker in members:
                self._clocks.join(worker)

    def _lose(self, rank: int) -> None:
        """A rank is lost: if it is a worker, nobody waits for it; if it is a server, its workers go elsewhere."""
        self._lost.add(rank)
        if rank in self._workers:
            self._workers.discard(rank)
            self._round = [push for push in self._round if push.worker != rank]  # others get these samples
            self._forget(rank)
            self._left.discard(rank)
            self._expected.discard(rank)
        self._grouper.lose(rank, self._exchange.samples_of(rank))
        self._exchange.lose(rank)

    def _forget(self, worker: int) -> None:
        """It is not of this group now: nobody waits for it."""
        if worker in self._clocks.workers:
            slowest = self._clocks.slowest
            self._clocks.leave(worker)
            self._sent.pop(worker, None)
            self._asked.pop(worker, None)
            self._go_on(slowest)

    # ---- pushes

    def _take_push(self, push: Received, tensors: Sequence[Tensor]) -> None:
        worker = push.worker
        slowest = self._clocks.slowest
        push.delay = self._version - self._sent[worker].popleft()
        self._clocks.finished(worker, at=self._node.now())
        self._grouper.see(push)
        try:
            mean = dense(tensors, self._parameters) if push.samples else None
        except PacelineError as error:
            self._refuse(push, str(error))
        else:
            if mean is None:
                self._tell_nothing_came(push)
            elif self._lock_step:
                push.mean = mean
                self._round.append(push)
            else:
                self._step([push], mean, self._scale(push))
        self._go_on(slowest)
        self._answer(worker)

    def _take_rest(self, worker: int, tensors: Sequence[Tensor]) -> None:
        """What its compressor had kept back, of samples that are settled."""
        rest = Received(worker)
        try:
            self._step([rest], dense(tensors, self._parameters), 1 / len(self._workers))
        except PacelineError as error:
            self._refuse(rest, str(error))

    def _scale(self, push: Received) -> float:
        """Of the learning rate: one worker's part, less if the push comes late or is of a shorter micro-batch."""
        workers = len(self._workers)
        scale = push.samples / (workers * self._node.micro_batch)
        return delayed_learning_rate(scale, workers, push.delay) if self._options.adapt_lr else scale

    def _go_on(self, slowest: int) -> None:
        """After a push or a farewell: those may start who waited for the slowest, if that has come further."""
        if self._clocks.slowest > slowest or not self._clocks.workers:
            self._step_together()
            for worker in list(self._asked):
                self._answer(worker)

    def _step_together(self) -> None:
        """With a bound of 0: one step with the mean of the round."""
        pushes, self._round = self._round, []
        if pushes:
            samples = sum(push.samples for push in pushes)
            total = pushes[0].mean * (pushes[0].samples / samples)
            for push in pushes[1:]:
                total.add_(push.mean, alpha=push.samples / samples)
            self._step(pushes, total, len(pushes) / len(self._workers))

    def _step(self, pushes: list[Received], mean: Tensor, scale: float) -> None:
        node = self._node
        if not node.step(mean, scale_at_server(self._options, node, scale), self._first):
            for push in pushes:
                self._refuse(push, "it has NaN or infinity in it")
            return
        for push in pushes:
            if self._leads and push.samples:
                node.settle_for(push.worker, push.samples, push.handed_in, push.delay)
            else:
                node.learned(node.samples_applied + push.samples)
        self._version += sum(push.samples > 0 for push in pushes)
        window = self._options.group_rules.window or len(self._clocks.workers)
        self._exchange.stepped(mean, scale, pushes, window)

    def _tell_nothing_came(self, push: Received) -> None:
        """The worker has discarded its gradient. Where nothing else ever comes, the run ends."""
        if self._leads:
            self._node.settle_for(push.worker, 0, push.handed_in)

    def _refuse(self, push: Received, why: str) -> None:
        if not push.samples:
            self._node.warn(f"What rank {push.worker} had kept back of its gradients was refused: {why}")
        elif self._leads:
            self._node.send(push.worker, f"refused {push.number} {why}")
            self._node.settle_for(push.worker, 0, push.handed_in)

    # ---- parameters

    def _answer(self, worker: int) -> None:
        """Send the parameters that a worker has asked for, if the bound allows; who is to move is told so instead."""
        if worker not in self._asked or not self._may_have(worker):
            return
        request, since = self._asked.pop(worker)
        node, group = self._node, self._grouper.group_of(worker)
        if self._leads and group != self._group:
            node.send(worker, f"move {request} {group}")
            return
        self._sent[worker].append(self._version)
        held = node.now() - since
        node.send(worker, f"parameters {request} {node.samples_applied} {held!r}", self._parameters)

    def _may_have(self, worker: int) -> bool:
        """Whether it may start with the parameters of now: its next iteration, or the one after it if the gradient of
        the last ones sent is still to come."""
        if self._sent[worker]:
            return self._clocks.clock(worker) + 1 <= self._clocks.slowest + self._options.bound.low
        return self._clocks.ask(worker)

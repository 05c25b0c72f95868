"""Messages between ranks over real sockets: any tensor, in order, and the end of a peer is told."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from typing import Any

import pytest
import torch

from paceline.backends import mailbox as module
from paceline.backends.mailbox import Mailbox, to_frame, to_message
from paceline.control.connection import connect
from paceline.control.wire import Frame, WireError
from paceline.errors import PacelineError

SECRET = b"the run's secret"
SECONDS = 60


@contextlib.contextmanager
def boxes(count):
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(Mailbox(rank, SECRET)) for rank in range(count)]
        for box in made:
            box.connect([each.address for each in made])
        yield made


def take(box):
    received = box.receive()
    assert received.wait(SECONDS) and received.done
    return received.result()


TENSORS = [
    torch.randn(3, 4),
    torch.randn(6, 5).t(),
    torch.randn(10)[::2],
    torch.tensor(3.5),
    torch.empty(0),
    torch.empty(2, 0, 3, dtype=torch.int16),
    torch.tensor([True, False]),
    torch.randn(7).bfloat16(),
    torch.randn(7).half(),
    torch.arange(9),
    torch.randn(3, dtype=torch.complex64).conj(),
    torch.randn(4, requires_grad=True),
    torch.ones(4).to(torch.float8_e4m3fn),
]


@pytest.mark.parametrize("to", [0, 1])
def test_any_tensor_arrives_as_it_was(to):
    with boxes(2) as made:
        made[0].send(to, "everything", TENSORS)
        message = take(made[to])
        assert (message.sender, message.kind, len(message.tensors)) == (0, "everything", len(TENSORS))
        for sent, got in zip(TENSORS, message.tensors, strict=True):
            assert sent.dtype == got.dtype and sent.shape == got.shape
            assert torch.equal(
                sent.detach().resolve_conj().float() if sent.dtype.itemsize == 1 else sent.detach(),
                got.float() if sent.dtype.itemsize == 1 else got,
            )
            got.zero_()  # it is ours, and writable


def test_what_is_sent_may_be_changed_at_once():
    with boxes(2) as made:
        values = torch.ones(2**20)
        for to in (0, 1):
            made[0].send(to, "values", [values])
            values += 1
        assert take(made[0]).tensors[0].sum() == 2**20 and take(made[1]).tensors[0].sum() == 2**21


def test_messages_of_a_link_keep_their_order():
    with boxes(3) as made:
        for number in range(100):
            for sender in (0, 1):
                made[sender].send(2, "count", [torch.tensor(number)])
        got = [take(made[2]) for _ in range(200)]
        for sender in (0, 1):
            assert [int(m.tensors[0]) for m in got if m.sender == sender] == list(range(100))


def test_receivers_are_served_in_the_order_of_asking():
    with boxes(1) as (box,):
        first, second = box.receive(), box.receive()
        assert not first.done and not first.wait(0)
        with pytest.raises(PacelineError, match="not arrived"):
            first.result()
        box.send(0, "one", [])
        assert first.done and not second.done
        box.send(0, "two", [])
        assert (first.result().kind, second.result().kind) == ("one", "two")


def test_two_ranks_that_send_much_to_each_other_do_not_block():
    with boxes(2) as made:
        large = torch.zeros(2**22)
        for _ in range(3):
            made[0].send(1, "large", [large])
            made[1].send(0, "large", [large])
        for box in made * 3:
            assert take(box).tensors[0].numel() == 2**22


def test_a_full_queue_blocks_until_there_is_room(monkeypatch):
    monkeypatch.setattr(module, "QUEUE_BYTES", 100)
    with boxes(2) as made:
        for number in range(20):
            made[0].send(1, "more than fits", [torch.full((50,), number)])
        assert [int(take(made[1]).tensors[0][0]) for _ in range(20)] == list(range(20))


def test_what_nobody_reads_waits_at_the_sender(monkeypatch):
    monkeypatch.setattr(module, "INBOX_BYTES", 1000)
    with boxes(3) as made:
        for number in range(4):
            for sender in (1, 2):
                made[sender].send(0, str(number), [torch.full((200,), float(number)), torch.zeros(100)])
        taken = []
        for _ in range(8):
            message = take(made[0])
            taken.append((message.sender, message.kind))
            assert 1200 <= made[0]._unread <= 2 * 1200, "of each sender one message that has begun, and no more"
        assert [kind for sender, kind in taken if sender == 1] == list("0123")
        assert [kind for sender, kind in taken if sender == 2] == list("0123")
        assert made[0]._unread == 1200, "the last one is being worked with"
        made[0].receive()
        assert made[0]._unread == 0


def test_what_was_read_and_sent_leaves_no_memory_behind():
    """A message may be as large as the model: threads that wait for the next one must not hold the last one."""
    held: list[weakref.ref[Any]] = []
    made_memory, copied = module.torch_memory, module._copied_bytes

    def watched(memory: memoryview) -> memoryview:
        held.append(weakref.ref(memory.obj))
        return memory

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "torch_memory", lambda length: watched(made_memory(length)))
        patch.setattr(module, "_copied_bytes", lambda tensor: watched(copied(tensor)))
        with boxes(2) as made:
            made[0].send(1, "large", [torch.zeros(1000)])
            take(made[1])
            made[1].receive()  # whoever asks for the next one is through with the last
            deadline = time.monotonic() + SECONDS
            while any(memory() is not None for memory in held) and time.monotonic() < deadline:
                time.sleep(0.001)  # the sender's thread may not have heard yet that all of it has left
            assert len(held) == 2 and all(memory() is None for memory in held)


def test_the_end_of_a_peer_is_told_and_named():
    broken: queue.Queue[int] = queue.Queue()
    with boxes(2) as made:
        for box in made:
            box._on_broken = lambda rank, error: broken.put(rank)
        made[0].send(1, "hello", [])
        made[1].send(0, "hello", [])
        take(made[0]), take(made[1])
        for link in made[1]._links.values():  # as a killed process: no farewell
            link.cut(PacelineError("dead"))
        assert broken.get(timeout=SECONDS) == 1
        made[1]._listener.close()
        with pytest.raises(PacelineError, match="Rank 0 cannot send to rank 1"):
            while True:
                made[0].send(1, "are you there?", [torch.zeros(1000)])


def test_a_farewell_is_no_break():
    broken = []
    with boxes(2) as made:
        made[0]._on_broken = lambda *what: broken.append(what)
        made[1].send(0, "hello", [])
        take(made[0])
        made[1].close()
    assert not broken


def test_who_is_not_in_the_roster_cannot_be_reached():
    with boxes(1) as (box,), pytest.raises(PacelineError, match="cannot send to rank 3"):
        box.send(3, "hello", [])


def test_nobody_at_the_address_is_told():
    broken: queue.Queue[int] = queue.Queue()
    with boxes(2) as made:
        made[1].close()
        made[0]._on_broken = lambda rank, error: broken.put(rank)
        made[0].send(1, "hello", [])
        assert broken.get(timeout=SECONDS) == 1
        with pytest.raises(PacelineError, match="cannot send to rank 1"):
            made[0].send(1, "hello", [])


def test_old_generations_are_refused_and_counted_and_new_ones_wait():
    with boxes(2) as made:
        roster = [box.address for box in made]
        made[0].send(0, "left in the box", [])
        made[0].connect(roster, generation=1)
        assert made[0].refused == 1
        made[1].send(0, "old", [])
        made[1].connect(roster, generation=2)
        made[1].send(0, "early", [])
        made[1].send(1, "a way to know that all was sent", [])
        received = made[0].receive()
        pause = threading.Event()
        while not (made[0].refused == 2 and made[0]._early):
            pause.wait(0.005)
        assert not received.done
        made[0].connect(roster, generation=2)
        assert received.result().kind == "early" and made[0].refused == 2


def test_a_rank_that_moved_is_reached_at_its_new_place():
    with boxes(2) as made, Mailbox(1, SECRET) as again:
        made[0].send(1, "first life", [])
        take(made[1])
        made[0].connect([made[0].address, again.address], generation=1)
        again.connect([made[0].address, again.address], generation=1)
        made[0].send(1, "second life", [])
        assert take(again).kind == "second life"


def test_closing_sends_what_is_queued_and_wakes_who_waits():
    before = set(threading.enumerate())
    with boxes(2) as made:
        received = made[0].receive()
        for _ in range(10):
            made[0].send(1, "values", [torch.zeros(10**6)])
        made[0].close()
        for _ in range(10):
            assert take(made[1]).tensors[0].numel() == 10**6
        with pytest.raises(PacelineError, match="closed"):
            received.result()
        with pytest.raises(PacelineError, match="closed"):
            made[0].receive().result()
    assert set(threading.enumerate()) <= before


def test_what_does_not_fit_its_description_is_refused():
    good = to_frame("kind", [torch.zeros(4)], 0)
    for change in ({"dtypes": ["float"] * 2}, {"dtypes": ["nonsense"]}, {"shapes": [[5]]}, {"shapes": []}):
        with pytest.raises(WireError):
            to_message(0, Frame("message", good.metadata | change, good.buffers))
    with pytest.raises(PacelineError, match="sparse"):
        to_frame("kind", [torch.eye(2).to_sparse()], 0)


def test_who_does_not_introduce_itself_is_not_heard():
    with boxes(1) as (box,), connect(box.address, SECRET) as peer:
        peer.send(to_frame("kind", [], 0))
        with pytest.raises(OSError):
            peer.receive()
        assert not box.receive().done

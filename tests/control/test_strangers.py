"""Every port of ours against strangers and confused friends: nobody gets in, or is in the way; memory stays flat."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from paceline.backends.mailbox import Mailbox, to_frame
from paceline.control import connection as module
from paceline.control import messages
from paceline.control.client import ControlClient
from paceline.control.connection import MAGIC, Listener, connect
from paceline.control.service import ControlService
from paceline.control.wire import Frame, encode
from paceline.doctor.probing import Responder
from paceline.launch.hosted import HostedService

SECRET = b"the run's secret"
RUN = {"strategy": "abs-sgd", "parameters": [["w", [2, 3], "float32", [3, 1]]]}
RANDOM, MUTATED = 10_000, 1_000
MOST_GROWTH = 8 * 2**20  # bytes; 11,000 messages that each left a kilobyte behind would be more
WARM_UP = 1_000  # messages until the allocator has what it needs


def valid_frames():
    """One message of every kind that a rank may send, to the service and to a mailbox."""
    leases = {"ranges": [[0, 4], [8, 12]]}
    yield Frame("hello", {"rank": 0, "description": RUN, "mailbox": ["127.0.0.1", 9]})
    yield Frame("open_ledger", {"samples": 100, "epochs": 1, "micro_batch": 4, "used": []})
    yield Frame("lease", {"micro_batches": 8})
    yield Frame("progress", {"samples": [8], "generation": 0})
    yield Frame("discard", leases | {"reason": "not a number"})
    yield Frame("give_back", leases)
    yield Frame("signal", {"round": 3, "samples": 0, "target": 0})
    yield Frame("heartbeat", {"metrics": {"loss": 0.5}, "busy": 0.0, "waits": 0.0, "longest": 0.0})
    yield Frame("leave", {"error": ""})
    yield Frame("status")
    yield Frame("store_set", {"key": "k"}, [memoryview(b"value")])
    yield Frame("store_add", {"key": "n", "amount": 1})
    yield Frame("introduction", {"rank": 0})
    yield to_frame("push", [torch.arange(6.0)], 0)
    yield Frame("farewell")


def mutated(dice: random.Random, whole: bytes) -> bytes:
    """Bits flipped, bytes cut out, doubled, or made the largest: what goes wrong on a wire, and what people try."""
    broken, at = bytearray(whole), dice.randrange(len(whole))
    match dice.randrange(5):
        case 0:
            broken[at] ^= 1 << dice.randrange(8)
        case 1:
            del broken[at : at + dice.randrange(1, 20)]
        case 2:
            broken[at:at] = broken[at : at + dice.randrange(1, 20)] or b"\0"
        case 3:
            broken[at : at + 8] = b"\xff" * len(broken[at : at + 8])
        case _:
            broken = broken[:at]
    return bytes(broken) if bytes(broken) != whole else whole[:-1]


def hostile(dice: random.Random) -> list[bytes]:
    """What a stranger says instead of the handshake: noise, half of it well begun, and messages of a member."""
    answer = MAGIC + bytes(64)
    noise = [(MAGIC if dice.random() < 0.5 else b"") + dice.randbytes(dice.randrange(200)) for _ in range(RANDOM)]
    frames = [b"".join(encode(frame)) for frame in valid_frames()]
    started = [mutated(dice, answer + dice.choice(frames)) for _ in range(MUTATED)]
    return noise + started


def say(address, words: list[bytes], source: int) -> None:
    """Each on a connection of its own. From several addresses of this machine: every connection takes a port for a
    minute after its end."""
    for said in words:
        here = (f"127.0.0.{2 + source}", 0)
        with contextlib.suppress(OSError), socket.create_connection(address, 60, source_address=here) as one:
            one.sendall(said)
            one.shutdown(socket.SHUT_WR)
            while one.recv(4096):
                pass


def shout(address, words: list[bytes]) -> None:
    """All of it, from eight at a time."""
    with ThreadPoolExecutor(8) as pool:
        for outcome in [pool.submit(say, address, words[each::8], each) for each in range(8)]:
            outcome.result()


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def until(condition):
    pause = threading.Event()
    while not condition():
        pause.wait(0.005)


def test_noise_and_broken_messages_do_nothing_to_a_control_plane(capfd, tmp_path):
    words = hostile(random.Random(0))
    service = HostedService(1, SECRET, "127.0.0.1", tmp_path, join_timeout=60.0)
    try:
        with ControlClient(service.address, SECRET, 0) as client:
            client.hello(RUN, None)
            client.store_set("k", b"mine")
            shout(service.address, words[:WARM_UP])
            before = resident(service._process.pid)
            shout(service.address, words[WARM_UP:])
            assert resident(service._process.pid) - before < MOST_GROWTH
            state = client.status()
            assert state["present"] == [0] and state["lost"] == {} and client.store_get("k") == b"mine"
            client.leave()
    finally:
        service.close()
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert said.count("Turned away a connection from") == 8, "each address is named once"


def test_noise_and_broken_messages_do_nothing_to_a_mailbox(caplog):
    words = hostile(random.Random(1))
    with Mailbox(0, SECRET) as box, Mailbox(1, SECRET) as friend:
        friend.connect([box.address, friend.address])
        shout(box.address, words[:WARM_UP])
        before = resident(os.getpid())
        shout(box.address, words[WARM_UP:])
        assert resident(os.getpid()) - before < MOST_GROWTH
        assert box._unread == 0 and not box._arrived
        friend.send(0, "after all that", [torch.ones(2)])
        received = box.receive()
        assert received.wait(60) and received.result().kind == "after all that"
    assert sum("Turned away" in record.getMessage() for record in caplog.records) == 8


def test_noise_and_broken_messages_do_nothing_to_a_doctor_that_listens(caplog):
    words, asked = hostile(random.Random(4)), []
    with Responder(SECRET, lambda *what: asked.append(what), ("127.0.0.1", 0)) as doctor:
        shout(doctor.address, words[:WARM_UP])
        before = resident(os.getpid())
        shout(doctor.address, words[WARM_UP:])
        assert resident(os.getpid()) - before < MOST_GROWTH and not asked
        with connect(doctor.address, SECRET) as caller:
            caller.send(Frame("probe", {"answer_bytes": 8}))
            assert caller.receive().kind == "probed"
    assert sum("Turned away" in record.getMessage() for record in caplog.records) == 8


# ---- friends who know the secret, and are confused


def converse(address, said: bytes) -> None:
    """Say this behind a true handshake, until the other side closes."""
    with connect(address, SECRET) as peer, contextlib.suppress(OSError):
        peer._socket.sendall(said)
        peer._socket.shutdown(socket.SHUT_WR)
        while peer._socket.recv(65536):
            pass


def test_broken_messages_of_who_knows_the_secret_cost_only_its_connection():
    dice, frames = random.Random(2), [b"".join(encode(frame)) for frame in valid_frames()]
    with (
        ControlService(1, SECRET) as service,
        ControlClient(service.address, SECRET, 0) as client,
        Mailbox(0, SECRET) as box,
    ):
        client.hello(RUN, None)
        for number in range(MUTATED):
            # Only what the checksum covers: a payload is the sender's own affair.
            converse((service if number % 2 else box).address, mutated(dice, dice.choice(frames)[:60]))
        assert client.status()["present"] == [0] and not client.store_check(["k"])
        assert box._unread == 0 and not box._arrived


def sealed(header: tuple, envelope: bytes) -> bytes:
    import zlib

    fields = struct.pack("!4sHIQHIHQ", b"PCLN", 1, *header)
    return fields + struct.pack("!I", zlib.crc32(envelope, zlib.crc32(fields))) + envelope


@pytest.mark.parametrize("length", [2**36 - 1, 2**35])
def test_a_message_larger_than_memory_is_refused(length, monkeypatch):
    """Its checksum is right and its size is allowed, but torch cannot have it."""

    def no_memory(length):
        raise RuntimeError(f"can't allocate memory: you tried to allocate {length} bytes")

    monkeypatch.setattr("paceline.backends.mailbox.torch_memory", no_memory)
    metadata = f'{{"kind":"push","dtypes":["uint8"],"shapes":[[{length}]]}}'.encode()
    broken = []
    with Mailbox(0, SECRET, on_broken=lambda rank, error: broken.append(str(error))) as box:
        introduction = b"".join(encode(Frame("introduction", {"rank": 1})))
        said = sealed((0, 0, 7, len(metadata), 1, length), b"message" + metadata + struct.pack("!Q", length))
        converse(box.address, introduction + said)
        until(lambda: broken)
        assert f"no memory for its {length} bytes" in broken[0] and box._unread == 0


def test_a_tensor_that_torch_cannot_have_is_refused():
    broken = []
    with Mailbox(0, SECRET, on_broken=lambda rank, error: broken.append(str(error))) as box:
        odd = Frame("message", {"kind": "odd", "dtypes": ["float32"], "shapes": [[0, 2**62, 2**62]]}, [memoryview(b"")])
        with connect(box.address, SECRET) as peer:
            peer.send(Frame("introduction", {"rank": 1}))
            peer.send(odd)
            until(lambda: broken)
    assert "torch has no tensor of shape" in broken[0]


NUMBERS = [0, 1, 2, 7, 2**16, 2**31, 2**62, 2**63 - 1]
MADE = {
    messages.integer: lambda dice: dice.choice(NUMBERS) * dice.choice([1, -1]),
    messages.natural: lambda dice: dice.choice(NUMBERS),
    messages.portions: lambda dice: dice.choice([0, 1, 8, messages.MOST_PORTIONS]),
    messages.seconds: lambda dice: dice.choice([0, 0.01, 1e308]),
    messages.text: lambda dice: dice.choice(["", "k", "generation-1/0", "\0", "ß" * 50]),
    messages.mapping: lambda dice: {"a": [dice.choice(NUMBERS)]},
    messages.description: lambda dice: dice.choice([RUN, {}, {"options": {"a": None}}, {"strategy": []}]),
    messages.SPANS: lambda dice: [
        [start, start + dice.choice([1, 4, 2**40])] for start in dice.choices([0, 4, 8, 96], k=3)
    ],
    messages.NAMES: lambda dice: dice.choices(["k", "", "generation-0/1"], k=dice.randrange(3)),
    messages.PROGRESS: lambda dice: dice.choices(NUMBERS, k=dice.randrange(4)),
}
"""Something that each check allows, the odd and the largest among it."""


def test_every_question_that_the_table_allows_gets_an_answer_or_a_refusal():
    """From members and from others who know the secret. An error that is not ours would end a thread, and this test."""
    asked = [kind for kind in messages.SCHEMAS if kind in ControlService(1, SECRET)._handlers]
    assert len(asked) == 20
    dice = random.Random(3)
    with ControlService(2, SECRET, join_timeout=0.2) as service:
        for number in range(400):
            with connect(service.address, SECRET) as peer:
                if number % 2:
                    peer.send(Frame("hello", {"rank": number % 3, "description": RUN, "mailbox": None}))
                    peer.send(Frame("open_ledger", {"samples": 100, "epochs": None, "micro_batch": 4, "used": []}))
                for kind in dice.choices(asked, k=5):
                    schema = messages.SCHEMAS[kind]
                    made = {field: MADE[check](dice) for field, check in schema.items() if check in MADE}
                    made |= {field: None for field in schema if field not in made}  # optional, all of them
                    peer.send(Frame(kind, made, sequence=1))
                peer.send(Frame("status", sequence=2))
                with contextlib.suppress(OSError):
                    while peer.receive().sequence != 2:
                        pass
        assert service.status()["generation"] >= 0


# ---- silence, and many at once


def test_who_says_nothing_or_little_is_dropped_after_a_bounded_time(monkeypatch, caplog):
    monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 0.2)
    with Listener(SECRET, lambda connection: None) as listener:
        silent = socket.create_connection(listener.address, 60)
        slow = socket.create_connection(listener.address, 60)
        with silent, slow:
            slow.sendall(MAGIC)  # one byte now and then would keep a careless reader busy for ever
            for one in (silent, slow):
                while one.recv(64):
                    pass
        until(lambda: not listener._pending)
    assert "Turned away a connection from 127.0.0.1: timed out. Further" in caplog.text


def test_a_thousand_silent_strangers_are_bounded_and_a_rank_still_gets_in():
    served = threading.Event()
    with Listener(SECRET, lambda connection: served.set()) as listener:
        strangers = []
        try:
            for _ in range(600):
                strangers.append(socket.create_connection(listener.address, 60))
            threads = [each for each in threading.enumerate() if each.name == "paceline-peer"]
            assert len(listener._pending) <= module.PENDING_HANDSHAKES
            until(lambda: sum(each.is_alive() for each in threads) <= module.PENDING_HANDSHAKES + 1)
            with connect(listener.address, SECRET):
                assert served.wait(60)
        finally:
            for stranger in strangers:
                stranger.close()


def test_a_handshake_that_was_dropped_among_strangers_is_tried_again(monkeypatch):
    """The listener drops its oldest handshake when there are too many: that may hit an honest one."""
    really, attempts = module._let_in, []

    def drop_the_first(sock, secret, deadline):
        attempts.append(sock)
        if len(attempts) == 1:
            raise OSError("dropped")
        really(sock, secret, deadline)

    monkeypatch.setattr(module, "_let_in", drop_the_first)
    done = threading.Event()
    with Listener(SECRET, lambda connection: done.set()) as listener, connect(listener.address, SECRET):
        assert done.wait(60) and len(attempts) == 2


def test_a_machine_without_threads_to_spare_refuses_one_and_goes_on(monkeypatch):
    served, really, refused = threading.Event(), threading.Thread.start, []

    def start(thread):
        if thread.name == "paceline-peer" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        really(thread)

    with Listener(SECRET, lambda connection: served.set()) as listener:
        monkeypatch.setattr(threading.Thread, "start", start)
        with socket.create_connection(listener.address, 60) as first:
            assert first.recv(1) == b""
        with connect(listener.address, SECRET):
            assert served.wait(60) and refused and not listener._pending


def test_the_list_of_strangers_is_bounded(monkeypatch, caplog):
    monkeypatch.setattr(module, "STRANGERS", 3)
    with caplog.at_level(logging.WARNING, "paceline.control"), Listener(SECRET, lambda connection: None) as listener:
        for number in (2, 3, 2, 4, 5, 6, 5):
            say(listener.address, [bytes(104)], number)
        assert len(listener._known_strangers) == 3
    assert sum("not logged" in record.getMessage() for record in caplog.records) == 3
    assert "Connections from 3 addresses were turned away. No more are logged." in caplog.text

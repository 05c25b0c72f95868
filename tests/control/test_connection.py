"""Connections: who knows the secret gets in, nobody else does, and nobody else is in the way."""

from __future__ import annotations

import logging
import socket
import threading

import pytest

from paceline.control import connection as module
from paceline.control.connection import Connection, HandshakeError, Listener, connect
from paceline.control.wire import Frame
from paceline.errors import PacelineError

SECRET = b"the run's secret"


def echo(connection: Connection) -> None:
    try:
        while True:
            connection.send(connection.receive())
    except OSError:
        pass


def test_frames_of_any_size_come_back_whole():
    large = bytes(range(256)) * 2**14  # 4 MiB: more than any socket buffer takes at once
    with Listener(SECRET, echo) as listener, connect(listener.address, SECRET) as client:
        frame = Frame("value", {}, [memoryview(large), memoryview(b""), memoryview(b"end")], 3, 9)
        sender = threading.Thread(target=client.send, args=(frame,))
        sender.start()
        back = client.receive()
        sender.join()
        assert [bytes(b) for b in back.buffers] == [large, b"", b"end"]
        assert (back.generation, back.sequence) == (3, 9)


def test_many_buffers_in_one_frame():
    with Listener(SECRET, echo) as listener, connect(listener.address, SECRET) as client:
        client.send(Frame("value", {}, [memoryview(bytes([i % 256])) for i in range(2000)]))
        assert b"".join(client.receive().buffers) == bytes(i % 256 for i in range(2000))


def test_a_wrong_secret_is_told_to_both_sides_and_logged_once(caplog):
    with caplog.at_level(logging.WARNING, "paceline.control"), Listener(SECRET, echo) as listener:
        for _ in range(3):
            with pytest.raises(HandshakeError, match="secret of this process is not that of the run"):
                connect(listener.address, b"another secret")
        with connect(listener.address, SECRET) as client:
            client.send(Frame("done"))
            assert client.receive().kind == "done"
    assert len(caplog.records) == 1 and "127.0.0.1" in caplog.text and "secret" in caplog.text


def test_a_port_in_use_is_named():
    with Listener(SECRET, echo) as listener:
        port = listener.address[1]
        with pytest.raises(PacelineError, match=f"{port}.*give another port"):
            Listener(SECRET, echo, ("127.0.0.1", port))


def test_who_listens_but_is_not_paceline():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            peer, _ = server.accept()
            with peer:
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + b" " * 99)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(HandshakeError, match="is not Paceline"):
            connect(server.getsockname(), SECRET)
        thread.join()


def test_who_says_nothing_times_out(monkeypatch):
    monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(HandshakeError, match="did not answer"):
        connect(server.getsockname(), SECRET)


def test_silent_strangers_are_in_nobodys_way(monkeypatch):
    """More of them than handshakes may be pending, and all of them still there while the honest one gets in."""
    monkeypatch.setattr(module, "PENDING_HANDSHAKES", 4)
    with Listener(SECRET, echo) as listener:
        strangers = [socket.create_connection(listener.address) for _ in range(20)]
        try:
            with connect(listener.address, SECRET) as client:
                client.send(Frame("done"))
                assert client.receive().kind == "done"
        finally:
            for stranger in strangers:
                stranger.close()


def test_a_played_back_proof_is_refused():
    """The server's own words, sent back to it, open nothing."""
    with Listener(SECRET, echo) as listener, socket.create_connection(listener.address) as stranger:
        greeting = stranger.recv(40, socket.MSG_WAITALL)
        stranger.sendall(greeting + greeting[8:])
        assert stranger.recv(33, socket.MSG_WAITALL)[:1] == b"\x00"


def test_a_peer_that_takes_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(module, "STALL_SECONDS", 0.05)
    done = threading.Event()
    with Listener(SECRET, lambda connection: done.wait() and None) as listener:
        with connect(listener.address, SECRET) as client, pytest.raises(ConnectionError, match="took no data"):
            client.send(Frame("value", {}, [memoryview(bytes(2**26))]))
        done.set()


def test_closing_wakes_who_receives_and_leaves_no_thread():
    before = set(threading.enumerate())
    with Listener(SECRET, echo) as listener:
        client = connect(listener.address, SECRET)
        ended = threading.Event()

        def receive() -> None:
            with pytest.raises(OSError):
                client.receive()
            ended.set()

        thread = threading.Thread(target=receive)
        thread.start()
        client.close()
        client.close()
        assert ended.wait(30)
        thread.join()
    assert set(threading.enumerate()) <= before

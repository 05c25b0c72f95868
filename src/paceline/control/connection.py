"""TCP connections that only holders of the run's secret can open.

Before any frame is read, both sides prove that they know the secret without showing it:

    server → client   magic, server nonce
    client → server   magic, client nonce, HMAC(secret, "client", both nonces)
    server → client   verdict, HMAC(secret, "server", both nonces)

The two labels keep one side's proof from being played back as the other's. The client proves itself first, so that a
stranger learns nothing to test guesses on. The handshake is a few dozen bytes with one deadline for all of it: garbage
and silence cost one short-lived thread. After it, the connection is plain TCP; see the README for what that means on a
network that is not yours.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self

from paceline.control.wire import Allocate, Frame, encode, plain_memory, read_frame
from paceline.errors import PacelineError

Address = tuple[str, int]

MAGIC = b"PACELINE"
NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
WELCOME, REFUSED = b"\x01", b"\x00"

HANDSHAKE_SECONDS = 5.0  # a round trip around the world is 0.3 s; a loaded laptop needs a second
STALL_SECONDS = 60.0  # a peer that takes no byte for so long is gone: SIGSTOP, a pulled cable
PENDING_HANDSHAKES = 256  # more ranks than that seldom start in the same millisecond; see Listener
STRANGERS = 1000  # addresses that are remembered and named in the log; whoever has more of them must not fill memory
BUFFERS_A_CALL = 512  # POSIX promises 16 buffers a call, Linux and macOS take 1024
PAYLOAD_LIMIT = 16 * 2**20

log = logging.getLogger("paceline.control")


class HandshakeError(PacelineError):
    """The peer could not prove that it belongs to this run."""


def _prove(secret: bytes, label: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, label + nonces, "sha256")


def _receive_exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    received = b""
    while len(received) < count:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        part = sock.recv(count - len(received))
        if not part:
            raise ConnectionAbortedError("the peer closed the connection during the handshake")
        received += part
    return received


def _let_in(sock: socket.socket, secret: bytes, deadline: float) -> None:
    """The server's side of the handshake."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    sock.settimeout(HANDSHAKE_SECONDS)
    sock.sendall(MAGIC + nonce)
    answer = _receive_exactly(sock, len(MAGIC) + NONCE_BYTES + PROOF_BYTES, deadline)
    theirs, proof = answer[len(MAGIC) : -PROOF_BYTES], answer[-PROOF_BYTES:]
    if not answer.startswith(MAGIC):
        raise HandshakeError("The peer does not speak Paceline's protocol.")
    if not hmac.compare_digest(proof, _prove(secret, b"client", nonce + theirs)):
        sock.sendall(REFUSED + bytes(PROOF_BYTES))
        raise HandshakeError("The peer does not know the run's secret.")
    sock.sendall(WELCOME + _prove(secret, b"server", nonce + theirs))


def _ask_in(sock: socket.socket, secret: bytes, address: Address, deadline: float) -> None:
    """The client's side of the handshake."""
    greeting = _receive_exactly(sock, len(MAGIC) + NONCE_BYTES, deadline)
    if not greeting.startswith(MAGIC):
        raise HandshakeError(
            f"What listens on {address[0]}:{address[1]} is not Paceline.",
            remedy="Check the address, or give the run another port.",
        )
    nonce = secrets.token_bytes(NONCE_BYTES)
    nonces = greeting[len(MAGIC) :] + nonce
    sock.sendall(MAGIC + nonce + _prove(secret, b"client", nonces))
    verdict = _receive_exactly(sock, 1 + PROOF_BYTES, deadline)
    if verdict[:1] != WELCOME or not hmac.compare_digest(verdict[1:], _prove(secret, b"server", nonces)):
        raise HandshakeError(
            f"The secret of this process is not that of the run at {address[0]}:{address[1]}.",
            cause="It belongs to another run, or was started with an old secret.",
            remedy="Give every process of one run the same secret.",
        )


class Connection:
    """One authenticated connection that carries frames. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket, payload_limit: int, allocate: Allocate = plain_memory) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):  # macOS spells the first one differently and has a default of its own
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._socket = sock
        self._payload_limit, self._allocate = payload_limit, allocate
        self._sending = threading.Lock()
        self.peer: str = sock.getpeername()[0]
        self.local_host: str = sock.getsockname()[0]

    def send(self, frame: Frame) -> None:
        """Send one frame whole. Raises when the connection is broken or the peer takes nothing for a minute."""
        self.send_encoded(encode(frame))

    def send_encoded(self, frame: Sequence[memoryview]) -> None:
        """Send what `encode` made: for a notice to many, encoded once."""
        pieces = list(frame)
        with self._sending:
            while pieces:
                self._drop_sent(pieces, self._send_some(pieces[:BUFFERS_A_CALL]))

    def _send_some(self, pieces: list[memoryview]) -> int:
        while True:
            try:
                return self._socket.sendmsg(pieces, [], socket.MSG_DONTWAIT)
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._socket, select.POLLOUT)
                if not poll.poll(STALL_SECONDS * 1000):
                    raise ConnectionError(f"the peer {self.peer} took no data for {STALL_SECONDS:.0f} s") from None

    @staticmethod
    def _drop_sent(pieces: list[memoryview], sent: int) -> None:
        while pieces and sent >= len(pieces[0]):
            sent -= len(pieces.pop(0))
        if sent:
            pieces[0] = pieces[0][sent:]

    def receive(self) -> Frame:
        """The next frame; blocks until there is one. Raises `ConnectionError` at the end of the stream."""
        return read_frame(self._fill, self._payload_limit, self._allocate)

    def _fill(self, memory: memoryview) -> None:
        while memory:
            count = self._socket.recv_into(memory)
            if not count:
                raise ConnectionError("the connection was closed")
            memory = memory[count:]

    def stop_receiving(self) -> None:
        """End the stream here: the receiving thread still gets what has already arrived, and then the end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Wake whoever sends or receives on it, and close it. Closing twice is the same as once."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._sending:
            self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(
    address: Address, secret: bytes, *, payload_limit: int = PAYLOAD_LIMIT, allocate: Allocate = plain_memory
) -> Connection:
    """Open a connection and prove to belong to the run. Raises `OSError` when nobody is there."""
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    while True:
        try:
            return Connection(_authenticated(address, secret, deadline), payload_limit, allocate)
        except ConnectionAbortedError:  # dropped among many strangers, see `Listener`: the next attempt may fare better
            if time.monotonic() > deadline:
                raise


def _authenticated(address: Address, secret: bytes, deadline: float) -> socket.socket:
    sock = socket.create_connection(address, timeout=HANDSHAKE_SECONDS)
    try:
        _ask_in(sock, secret, address, deadline)
        return sock
    except TimeoutError as error:
        sock.close()
        raise HandshakeError(
            f"What listens on {address[0]}:{address[1]} did not answer like Paceline within {HANDSHAKE_SECONDS:.0f} s.",
            cause="Another program has the port, or the machine is overloaded.",
        ) from error
    except (ConnectionResetError, BrokenPipeError) as error:
        sock.close()
        raise ConnectionAbortedError("the peer closed the connection during the handshake") from error
    except BaseException:
        sock.close()
        raise


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=socket.SOMAXCONN)
    except OSError as error:
        raise PacelineError(
            f"Cannot listen on {host}:{port}: {error.strerror or error}.",
            cause=f"Another program, perhaps an earlier run, has the port {port}, or {host} is not this machine's.",
            remedy="Stop it, or give another port (0 takes any free one).",
        ) from error


class Listener:
    """Accepts connections; every peer that passes the handshake is handed to `serve` on a thread of its own.

    When too many handshakes are pending, the oldest is dropped: an honest one is over in milliseconds, so the oldest
    is a stranger who says nothing.
    """

    def __init__(
        self,
        secret: bytes,
        serve: Callable[[Connection], None],
        address: Address = ("127.0.0.1", 0),
        *,
        payload_limit: int = PAYLOAD_LIMIT,
        allocate: Allocate = plain_memory,
    ) -> None:
        self._secret, self._serve = secret, serve
        self._payload_limit, self._allocate = payload_limit, allocate
        self._socket = _bind(*address)
        self.address: Address = self._socket.getsockname()[:2]
        self._lock = threading.Lock()
        self._pending: dict[socket.socket, None] = {}
        self._open: set[Connection] = set()
        self._threads: set[threading.Thread] = set()
        self._known_strangers: set[str] = set()
        self._closed = False
        self._acceptor = threading.Thread(target=self._accept, name="paceline-accept", daemon=True)
        self._acceptor.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                if not self._closed:  # out of file descriptors, or the peer is already gone: others may still come
                    time.sleep(0.01)
                continue
            with self._lock:
                if len(self._pending) >= PENDING_HANDSHAKES:
                    oldest = next(iter(self._pending))
                    del self._pending[oldest]
                    _drop(oldest)
                self._pending[sock] = None
                thread = threading.Thread(target=self._handle, args=(sock,), name="paceline-peer", daemon=True)
                self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError:  # the machine has no thread to spare: this one goes, and others may still come
                with self._lock:
                    self._threads.discard(thread)
                    self._pending.pop(sock, None)
                sock.close()

    def _handle(self, sock: socket.socket) -> None:
        try:
            connection = self._authenticate(sock)
            if connection is not None:
                try:
                    with connection:
                        self._serve(connection)
                finally:
                    with self._lock:
                        self._open.discard(connection)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _authenticate(self, sock: socket.socket) -> Connection | None:
        peer = "unknown"
        try:
            peer = sock.getpeername()[0]
            _let_in(sock, self._secret, time.monotonic() + HANDSHAKE_SECONDS)
            connection = Connection(sock, self._payload_limit, self._allocate)
        except (OSError, HandshakeError) as error:
            sock.close()
            self._report_stranger(peer, error)
            connection = None
        with self._lock:
            self._pending.pop(sock, None)
            if connection is not None:
                self._open.add(connection)
        if connection is not None and self._closed:
            connection.close()
        return connection

    def _report_stranger(self, peer: str, error: Exception) -> None:
        with self._lock:
            known = peer in self._known_strangers or len(self._known_strangers) == STRANGERS
            if not known:
                self._known_strangers.add(peer)
            last = not known and len(self._known_strangers) == STRANGERS
        if known or self._closed:
            return
        why = str(error).rstrip(".")
        log.warning("Turned away a connection from %s: %s. Further ones from there are not logged.", peer, why)
        if last:
            log.warning("Connections from %d addresses were turned away. No more are logged.", STRANGERS)

    def close(self) -> None:
        """Stop listening, close every connection and wait for their threads."""
        self._closed = True
        _drop(self._socket)
        self._socket.close()
        with self._lock:
            pending, connections, threads = list(self._pending), list(self._open), list(self._threads)
        for sock in pending:
            _drop(sock)
        for connection in connections:
            connection.close()
        for thread in [self._acceptor, *threads]:
            if thread is not threading.current_thread():
                thread.join(HANDSHAKE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _drop(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)

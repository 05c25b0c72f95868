"""Which transport should carry messages between ranks? One-way rate and round trip of each candidate, side by side.

    python benchmarks/transport.py

Two processes on loopback. A *round trip* sends one message of the size and waits for an empty answer, so that it
is what a parameter server's push costs. Every candidate receives into memory that torch can use without a copy.
The figures in docs/design.md come from here.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import zmq
import zmq.utils.z85

SIZES = {"4 kB": 4_096, "4 MB": 4_194_304, "100 MB": 104_857_600}
REPEATS = {4_096: 2_000, 4_194_304: 60, 104_857_600: 6}
ANSWER = b"ok"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def time_round_trips(send_and_wait: Callable[[], None], repeats: int) -> float:
    """Median seconds of one round trip, after a warm-up."""
    for _ in range(max(2, repeats // 10)):
        send_and_wait()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        send_and_wait()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def rounds(size: int) -> int:
    return REPEATS[size] + max(2, REPEATS[size] // 10)


def receive_exactly(connection: socket.socket, view: memoryview) -> None:
    got = 0
    while got < len(view):
        got += connection.recv_into(view[got:])


def raw_socket(rank: int, port: int, results: dict[str, float]) -> None:
    if rank == 0:
        with socket.create_server(("127.0.0.1", port)) as listener:
            connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for size in SIZES.values():
            target = memoryview(bytearray(size))
            for _ in range(rounds(size)):
                receive_exactly(connection, target)
                connection.sendall(ANSWER)
        return
    time.sleep(0.5)
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    answer = memoryview(bytearray(len(ANSWER)))
    for name, size in SIZES.items():
        payload = memoryview(torch.zeros(size, dtype=torch.uint8).numpy())

        def once(payload: memoryview = payload) -> None:
            connection.sendall(payload)
            receive_exactly(connection, answer)

        results[name] = time_round_trips(once, REPEATS[size])


def curve_keys(role: str) -> tuple[bytes, bytes]:
    secret = zmq.utils.z85.encode(hashlib.sha256(b"run secret" + role.encode()).digest())
    return zmq.curve_public(secret), secret


def zeromq(rank: int, port: int, results: dict[str, float], curve: bool) -> None:
    context = zmq.Context()
    peer = context.socket(zmq.PAIR)
    if curve:
        peer.curve_publickey, peer.curve_secretkey = curve_keys("server" if rank == 0 else "client")
        if rank == 0:
            peer.curve_server = True
        else:
            peer.curve_serverkey = curve_keys("server")[0]
    if rank == 0:
        peer.bind(f"tcp://127.0.0.1:{port}")
        for size in SIZES.values():
            for _ in range(rounds(size)):
                torch.frombuffer(peer.recv(copy=False).buffer, dtype=torch.uint8)
                peer.send(ANSWER)
    else:
        peer.connect(f"tcp://127.0.0.1:{port}")
        for name, size in SIZES.items():
            payload = torch.zeros(size, dtype=torch.uint8).numpy()

            def once(payload: object = payload) -> None:
                peer.send(payload, copy=False)
                peer.recv()

            results[name] = time_round_trips(once, REPEATS[size])
    peer.close(linger=1000)
    context.term()


def zeromq_plain(rank: int, port: int, results: dict[str, float]) -> None:
    zeromq(rank, port, results, curve=False)


def zeromq_curve(rank: int, port: int, results: dict[str, float]) -> None:
    zeromq(rank, port, results, curve=True)


def gloo(rank: int, port: int, results: dict[str, float]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    answer = torch.zeros(len(ANSWER), dtype=torch.uint8)
    for name, size in SIZES.items():
        payload = torch.zeros(size, dtype=torch.uint8)
        if rank == 0:
            for _ in range(rounds(size)):
                dist.recv(payload, 1)
                dist.send(answer, 1)
        else:

            def once(payload: torch.Tensor = payload) -> None:
                dist.send(payload, 0)
                dist.recv(answer, 0)

            results[name] = time_round_trips(once, REPEATS[size])
    dist.destroy_process_group()


CANDIDATES = {
    "raw socket": raw_socket,
    "ZeroMQ": zeromq_plain,
    "ZeroMQ, CURVE": zeromq_curve,
    "gloo send/recv": gloo,
}


def main() -> None:
    spawn = multiprocessing.get_context("spawn")
    print(
        f"torch {torch.__version__}, pyzmq {zmq.pyzmq_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}"
    )
    print(f"{'transport':16}" + "".join(f"{name:>26}" for name in SIZES))
    for label, candidate in CANDIDATES.items():
        with spawn.Manager() as manager:
            results = manager.dict()
            port = free_port()
            pair = [spawn.Process(target=candidate, args=(rank, port, results)) for rank in (0, 1)]
            for process in pair:
                process.start()
            for process in pair:
                process.join(180)
                if process.is_alive():
                    process.terminate()
            cells = [
                f"{results[name] * 1e3:9.3f} ms {size / results[name] / 1e6:7.0f} MB/s" if name in results else "failed"
                for name, size in SIZES.items()
            ]
            print(f"{label:16}" + "".join(f"{cell:>26}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()

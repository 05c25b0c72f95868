"""Several hosts on one machine: network namespaces with addresses of their own, and slow links between them.

    scripts/hosts --links 1gbit/5ms,100mbit/45ms -- paceline run --nnodes 2 --node-rank {host} --master {first} …

Each host hangs on one switch by a link with a rate, a delay and a loss, the same in both directions; a packet passes
the sender's link and the receiver's. The namespaces have no names: processes hold them that end with this one, however
it ends, and with them goes everything. It needs root and Linux. Where the kernel has netem it delays the packets; else
a switch in user space does (`switch.py`), which carries up to 1 Gbit/s in all and takes a core for it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Self

from paceline.errors import PacelineError
from paceline.launch.local import end_with_parent

SUBNET = "10.231.0"
MTU = 16000  # fewer packets for the switch in user space; netem does not care
NETEM_QUEUE = 20_000  # packets: 2 s of 1 Gbit/s in ordinary ones
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True)
class Link:
    """Of one host to the switch: bits a second, seconds, and the share of packets that are lost, in each direction.

    >>> Link.parse("100mbit/45ms/5%")
    Link(rate=100000000.0, delay=0.045, loss=0.05)
    """

    rate: float = 1e9
    delay: float = 0.0
    loss: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Link:
        found = re.fullmatch(r"([\d.]+)(kbit|mbit|gbit)(?:/([\d.]+)ms)?(?:/([\d.]+)%)?", text.strip())
        if found is None:
            remedy = "Write rate, delay and loss, as in 100mbit/45ms/5%."
            raise PacelineError(f"{text.strip()!r} is no link.", remedy=remedy)
        return cls(float(found[1]) * UNITS[found[2]], float(found[3] or 0) / 1e3, float(found[4] or 0) / 100)


def reason_against() -> str:
    """Why no such hosts can be made here, or an empty string."""
    if sys.platform != "linux":
        return "network namespaces exist on Linux only"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "unshare", "nsenter"):
        if not any(Path(folder, tool).exists() for folder in (*os.get_exec_path(), "/sbin", "/usr/sbin")):
            return f"the command {tool} is missing (packages iproute2 and util-linux)"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"network namespaces are not allowed here: {tried.stderr.strip()}"
    return "" if has_netem() or Path("/dev/net/tun").exists() else "there is neither netem nor /dev/net/tun"


def has_netem() -> bool:
    """Whether the kernel can delay packets itself."""
    command = "ip link set lo up && tc qdisc add dev lo root netem delay 1ms"
    return subprocess.run(["unshare", "--net", "sh", "-c", command], capture_output=True, check=False).returncode == 0


class EmulatedHosts:
    """Hosts as long as a block lasts.

    Args:
        links: one for each host.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        why_not = reason_against()
        if why_not:
            raise PacelineError(f"No hosts can be emulated: {why_not}.", remedy="Run it as root on Linux.")
        self.links = list(links)
        self.addresses = [f"{SUBNET}.{number + 1}" for number in range(len(links))]
        self._holders: list[subprocess.Popen[str]] = []
        self._switch: subprocess.Popen[str] | None = None
        try:
            self._holders = [_hold() for _ in links]
            if has_netem():
                self._join_by_bridge()
            else:
                self._join_by_switch()
        except BaseException:
            self.close()
            raise

    def command(self, host: int, arguments: Sequence[str]) -> list[str]:
        """The command that runs another one on that host."""
        return ["nsenter", f"--net=/proc/{self._holders[host].pid}/ns/net", "--", *arguments]

    def cut(self, host: int, *, off: bool = True) -> None:
        """Take the host off the network, or bring it back."""
        self._do(host, "ip", "link", "set", "eth0", "down" if off else "up")

    def _do(self, host: int, *arguments: str) -> None:
        _run(self.command(host, arguments))

    def _up(self, host: int) -> None:
        self._do(host, "ip", "address", "add", f"{self.addresses[host]}/24", "dev", "eth0")
        self._do(host, "ip", "link", "set", "eth0", "mtu", str(MTU), "up")
        self._do(host, "ip", "link", "set", "lo", "up")

    def _join_by_switch(self) -> None:
        import fcntl

        tunnels = []
        with ExitStack() as opened:
            for host, holder in enumerate(self._holders):
                name = f"pl{os.getpid()}-{host}"
                tunnel = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
                opened.callback(os.close, tunnel)
                set_interface, plain_packets = 0x400454CA, 0x1001
                fcntl.ioctl(tunnel, set_interface, struct.pack("16sH", name.encode(), plain_packets))
                _run(["ip", "link", "set", name, "netns", str(holder.pid), "name", "eth0"])
                self._do(host, "ip", "link", "set", "eth0", "txqueuelen", "2000")
                self._up(host)
                tunnels.append(tunnel)
            settings = json.dumps({"tunnels": tunnels, "links": [asdict(link) for link in self.links]})
            program = [sys.executable, "-m", "paceline.race.switch", settings]
            self._switch = subprocess.Popen(
                program, pass_fds=tunnels, preexec_fn=end_with_parent, stdin=subprocess.DEVNULL, text=True
            )

    def _join_by_bridge(self) -> None:
        self._holders.append(_hold())
        hub = len(self.links)
        self._do(hub, "ip", "link", "add", "hub", "type", "bridge")
        self._do(hub, "ip", "link", "set", "hub", "up")
        for host, link in enumerate(self.links):
            port, pids = f"port{host}", (str(self._holders[hub].pid), str(self._holders[host].pid))
            self._do(hub, "ip", "link", "add", port, "mtu", str(MTU), "type", "veth", "peer", "eth0", "netns", pids[1])
            self._do(hub, "ip", "link", "set", port, "master", "hub", "up")
            self._up(host)
            behaviour = f"delay {link.delay * 1e3:g}ms loss {link.loss:%} rate {link.rate:.0f}bit"
            shape = f"netem {behaviour} limit {NETEM_QUEUE}".split()
            self._do(host, "tc", "qdisc", "add", "dev", "eth0", "root", *shape)
            self._do(hub, "tc", "qdisc", "add", "dev", port, "root", *shape)

    def close(self) -> None:
        """Take the network away. What runs on the hosts is its starter's to end."""
        for process in [*([self._switch] if self._switch else []), *self._holders]:
            process.kill()
            process.wait()
        self._switch, self._holders = None, []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _hold() -> subprocess.Popen[str]:
    """A process in a namespace of its own, that is there when this returns."""
    program = ["unshare", "--net", "sh", "-c", "echo held; exec sleep infinity"]
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    holder = subprocess.Popen(program, stdin=nothing, stdout=pipe, text=True, preexec_fn=end_with_parent)
    assert holder.stdout is not None
    holder.stdout.readline()
    holder.stdout.close()
    return holder


def _run(arguments: Sequence[str]) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PacelineError(f"`{' '.join(arguments)}` failed: {done.stderr.strip()}")


def main() -> None:
    """Run one command on every host, with the output of each marked; the first code that is not 0 is the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/hosts", description="Run a command on hosts that are emulated here.")
    parser.add_argument(
        "--links", required=True, help="one for each host: rate/delay/loss, as in 1gbit/5ms,100mbit/45ms/1%%"
    )
    parser.add_argument(
        "command", nargs="+", help="{host} is the host's number, {address} its address, {first} the first's"
    )
    given = parser.parse_args()
    try:
        with EmulatedHosts([Link.parse(text) for text in given.links.split(",")]) as hosts:
            raise SystemExit(_run_everywhere(hosts, given.command))
    except PacelineError as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _run_everywhere(hosts: EmulatedHosts, command: Sequence[str]) -> int:
    started, readers = [], []
    for host, address in enumerate(hosts.addresses):
        arguments = [_filled(each, host, address, hosts.addresses[0]) for each in command]
        process = subprocess.Popen(
            hosts.command(host, arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=end_with_parent,
        )
        assert process.stdout is not None
        reader = threading.Thread(target=_copy, args=(host, process.stdout))
        reader.start()
        started.append(process)
        readers.append(reader)
    codes = [process.wait() for process in started]
    for reader in readers:
        reader.join()
    return next((code for code in codes if code), 0)


def _filled(argument: str, host: int, address: str, first: str) -> str:
    for name, value in (("{host}", str(host)), ("{address}", address), ("{first}", first)):
        argument = argument.replace(name, value)
    return argument


def _copy(host: int, stream: IO[str]) -> None:
    for line in stream:
        print(f"[host {host}] {line}", end="", flush=True)
    stream.close()


if __name__ == "__main__":
    main()

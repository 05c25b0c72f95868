"""Addresses of machines: as a user writes them, and those of this machine's own network interfaces."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import struct
import sys
from pathlib import Path

from paceline.errors import PacelineError

Address = tuple[str, int]

INTERFACE = "GLOO_SOCKET_IFNAME"
"""The interface that collectives use, as torch's own users choose it; messages between ranks follow it."""
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux


def parse_address(text: str, where: str, default_port: int | None = None) -> Address:
    """`host:port`, IPv6 in brackets; without a port the default one, if there is one.

    >>> parse_address("gpu-2:29600", "--master"), parse_address("[fd00::1]", "--master", 29500)
    (('gpu-2', 29600), ('fd00::1', 29500))
    """
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+)(?::(\d{1,5}))?", text.strip())
    port = default_port if found is None or found[2] is None else int(found[2])
    if found is None or port is None or not 0 < port < 2**16:
        raise PacelineError(
            f"{text.strip()!r} is not the address of a machine.",
            where=where,
            remedy="Write host:port, an IPv6 address in brackets: gpu-1:29500, 10.0.0.1:29500, [fd00::1]:29500.",
        )
    return found[1].strip("[]"), port


def in_words(address: Address) -> str:
    """
    >>> in_words(("10.0.0.1", 29500)), in_words(("fd00::1", 29500))
    ('10.0.0.1:29500', '[fd00::1]:29500')
    """
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether an address, not a name, is reached only from its own machine."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def own_interfaces() -> dict[str, str]:
    """This machine's interfaces that have an address, and the first of each: IPv4 before IPv6."""
    found: dict[str, str] = {}
    if sys.platform == "linux":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # it has none, or is down
                    found[name] = _address_of(asking, name)
        for name, address in _of_version_6():
            found.setdefault(name, address)
    return found


def _address_of(asking: socket.socket, name: str) -> str:
    import fcntl

    answer = fcntl.ioctl(asking.fileno(), _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])


def _of_version_6() -> list[tuple[str, str]]:
    """Without those that are valid on one link only: they need the link's name beside them."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            address = ipaddress.IPv6Address(bytes.fromhex(digits))
            if not address.is_link_local:
                found.append((name, str(address)))
    return found


def find_interface(wanted: str) -> tuple[str, str]:
    """The name and the address of one of this machine's interfaces, given either."""
    found = own_interfaces()
    for name, address in found.items():
        if wanted in (name, address):
            return name, address
    there = ", ".join(f"{name} ({address})" for name, address in found.items()) or "none could be asked"
    raise PacelineError(
        f"This machine has no network interface {wanted!r} with an address.",
        where=f"--interface or {INTERFACE}",
        remedy=f"Name one of its own, or its address: {there}.",
    )


def own_address(host: str) -> str:
    """The address to listen on so that other machines find it under this name, which must be this machine's. A name
    that is not known yet raises `OSError`: it may become known."""
    found = [str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    own = {*own_interfaces().values()}
    address = next((each for each in found if each in own and not is_loopback(each)), found[0])
    if is_loopback(address) and not is_loopback(host) and host != "localhost":
        raise PacelineError(
            f"{host} is {address} on this machine itself, where no other machine reaches it.",
            where="--master",
            cause="/etc/hosts gives the machine's own name to the loopback, as Debian does.",
            remedy="Give the address that the others reach, with --master 10.0.0.1:29500 on every host.",
        )
    return address

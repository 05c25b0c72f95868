"""Addresses as users write them, and those of this machine."""

from __future__ import annotations

import socket

import pytest

from paceline.errors import PacelineError
from paceline.launch import addresses
from paceline.launch.addresses import find_interface, is_loopback, own_address, own_interfaces, parse_address


@pytest.mark.parametrize("text", ["", "a b:1", "host:0", "host:65536", "fd00::1:29500", "host:port", "host"])
def test_what_is_no_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(PacelineError, match="Write host:port"):
        parse_address(text, "--master")


def test_the_loopback_is_an_interface_under_its_name_and_its_address() -> None:
    assert own_interfaces()["lo"] == "127.0.0.1"
    assert find_interface("lo") == find_interface("127.0.0.1") == ("lo", "127.0.0.1")


def test_an_interface_that_is_not_there_is_told_with_those_that_are() -> None:
    with pytest.raises(PacelineError, match=r"no network interface 'eth77'.*lo \(127\.0\.0\.1\)"):
        find_interface("eth77")


def test_a_name_that_is_the_loopback_is_no_place_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian gives a machine's own name to 127.0.1.1: the first host would wait where nobody reaches it."""
    known = {"gpu-1": "127.0.1.1", "localhost": "127.0.0.1", "10.0.0.9": "10.0.0.9"}

    def look_up(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known[host], 0))]

    monkeypatch.setattr(addresses.socket, "getaddrinfo", look_up)
    with pytest.raises(PacelineError, match=r"gpu-1 is 127\.0\.1\.1 on this machine"):
        own_address("gpu-1")
    assert own_address("localhost") == "127.0.0.1" and own_address("10.0.0.9") == "10.0.0.9"
    assert is_loopback("::1") and not is_loopback("10.0.0.9") and not is_loopback("gpu-1")

"""The switch in user space: rates, delays and losses of emulated links, by hand."""

from __future__ import annotations

from paceline.race.switch import Switch


def packet(receiver: int, nbytes: int = 1000) -> bytes:
    """IPv4, to 10.231.0.(receiver + 1)."""
    return bytes([0x45]) + bytes(15) + bytes([10, 231, 0, receiver + 1]) + bytes(nbytes - 20)


def test_a_packet_passes_both_links() -> None:
    switch = Switch([(8e6, 0.010, 0.0), (4e6, 0.020, 0.0)])  # 1 ms and 2 ms for each packet
    for _ in range(2):
        switch.take(0, packet(1), now=0.0)
    assert [round(at, 6) for at in [switch.next_at or 0.0]] == [0.033]
    assert len(switch.due(0.0331)) == 1 and len(switch.due(0.0351)) == 1, "one after the other"


def test_a_link_loses_its_share_of_packets_in_both_directions() -> None:
    switch = Switch([(1e12, 0.0, 0.0), (1e12, 0.0, 0.25)])
    for number in range(2000):
        switch.take(0, packet(1), now=float(number))
        switch.take(1, packet(0), now=float(number))
    arrived = [receiver for receiver, _ in switch.due(1e6)]
    assert all(1400 < arrived.count(host) < 1600 for host in (0, 1))

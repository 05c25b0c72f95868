"""The switch in user space: rates, delays and losses of emulated links, by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.race.switch import Switch


def packet(receiver: int, nbytes: int = 1000) -> bytes:
    """IPv4, to 10.231.0.(receiver + 1)."""
    return bytes([0x45]) + bytes(15) + bytes([10, 231, 0, receiver + 1]) + bytes(nbytes - 20)


def test_a_packet_passes_both_links() -> None:
    switch = Switch([(8e6, 0.010, 0.0), (4e6, 0.020, 0.0)])  # 1 ms and 2 ms for each packet
    for _ in range(2):
        switch.take(0, packet(1), now=0.0)
    assert not switch.due(0.0329)
    assert len(switch.due(0.0331)) == 1 and len(switch.due(0.0351)) == 1, "one after the other"


def test_who_is_far_away_does_not_hold_up_who_is_near() -> None:
    """Packets pass the receiver's link in the order in which they come there, not in which they were sent."""
    switch = Switch([(8e6, 0.0, 0.0), (8e6, 0.005, 0.0), (8e6, 0.5, 0.0)])  # 1 ms for each packet
    switch.take(2, packet(0), now=0.0)
    switch.take(1, packet(0), now=0.0)
    assert switch.due(0.0071) == [(0, packet(0))]
    assert len(switch.due(0.5021)) == 1 and switch.next_at is None


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.floats(0, 0.1)), min_size=1, max_size=40))
def test_whoever_wakes_up_when_told_to_delivers_all_in_time(sent: list[tuple[int, int, float]]) -> None:
    links = [(8e6, 0.001, 0.0), (4e6, 0.01, 0.0), (1e6, 0.05, 0.0)]
    lazy, busy = Switch(links), Switch(links)  # one is asked when it says, one all the time
    for sender, receiver, at in sorted(sent, key=lambda each: each[2]):
        lazy.take(sender, packet(receiver), now=at)
        busy.take(sender, packet(receiver), now=at)
    arrived = 0
    while (until := lazy.next_at) is not None:
        assert not busy.due(until - 1e-9), "nothing comes before"
        there = lazy.due(until)
        assert there == busy.due(until)
        arrived += len(there)
    assert arrived == len(sent)


def test_a_link_loses_its_share_of_packets_in_both_directions() -> None:
    switch = Switch([(1e12, 0.0, 0.0), (1e12, 0.0, 0.25)])
    for number in range(2000):
        switch.take(0, packet(1), now=float(number))
        switch.take(1, packet(0), now=float(number))
    arrived = [receiver for receiver, _ in switch.due(1e6)]
    assert all(1400 < arrived.count(host) < 1600 for host in (0, 1))

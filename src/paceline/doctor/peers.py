"""Other machines: called, measured, and what is wrong with the way to them."""

from __future__ import annotations

import socket

from paceline.control.connection import HANDSHAKE_SECONDS, HandshakeError, connect
from paceline.control.wire import WireError
from paceline.doctor.host import OK, PROBLEM, WARNING, Finding, Host, Peer
from paceline.doctor.probing import PAYLOAD_LIMIT, Caller
from paceline.errors import PacelineError
from paceline.launch.addresses import in_words, parse_address
from paceline.report.words import milliseconds, size

CLOCKS_APART = 0.1  # seconds: several micro-batches, so that a timeline of both would mislead
MUST_BE_EQUAL, SHOULD_BE_EQUAL = ("paceline",), ("torch",)


def parse_peers(text: str | None) -> list[tuple[str, int]]:
    """`host:port`, comma-separated; IPv6 in brackets.

    >>> parse_peers("gpu-2:29600,[::1]:4000")
    [('gpu-2', 29600), ('::1', 4000)]
    """
    parts = [part for part in (text or "").split(",") if part.strip()]
    peers = [parse_address(part, "--peers; `paceline doctor --listen` prints it there") for part in parts]
    if text is not None and not peers:
        raise PacelineError("There is no peer.", where="--peers", remedy="Write host:port, or leave it out.")
    return peers


def call(address: tuple[str, int], secret: bytes, own: Host, workload: str, model: str | None) -> Peer:
    """Measure another machine and the way to it. What goes wrong becomes a finding: other peers may still answer."""
    name = in_words(address)
    try:
        with connect(address, secret, payload_limit=PAYLOAD_LIMIT) as connection:
            caller = Caller(connection, secret)
            host = caller.examine(workload, model)
            link, apart = caller.measure()
            there, here = caller.other_ports_open()
    except HandshakeError as error:
        return Peer(name, findings=(_not_let_in(name, error),))
    except WireError as error:
        return Peer(name, findings=(Finding(name, PROBLEM, error.what, error.cause, error.remedy),))
    except PacelineError as error:
        return Peer(name, findings=(Finding(name, PROBLEM, f"it said: {error.what}", error.cause, error.remedy),))
    except OSError as error:
        return Peer(name, findings=(unreachable(name, error),))
    said = f"{host.name}: {milliseconds(link.latency)} one way, {size(round(link.bandwidth))} a second"
    findings = [Finding(name, OK, said)]
    findings += _ports(name, there, here)
    if abs(apart) > CLOCKS_APART:
        said = f"its clock is {abs(apart):.1f} s {'ahead' if apart > 0 else 'behind'}"
        remedy = "Run chrony or ntpd on both."
        findings.append(Finding(name, WARNING, said, "Timelines of both would not fit together.", remedy))
    return Peer(name, host, link, (*findings, *differences(name, own.versions, host.versions)))


def _not_let_in(name: str, error: HandshakeError) -> Finding:
    if "secret" not in error.what:
        return Finding(name, PROBLEM, error.what, error.cause, error.remedy or "Check host and port.")
    return Finding(
        name,
        PROBLEM,
        "it has another secret",
        cause="The files differ, or another user listens there.",
        remedy="Copy the file that `paceline doctor --listen` names there, and give it with --secret-file.",
    )


def unreachable(name: str, error: OSError) -> Finding:
    """Why a peer could not be called, by what the system says."""
    start = "Start `paceline doctor --listen --host ADDRESS` there first, ADDRESS being one that is seen from here."
    if isinstance(error, socket.gaierror):
        return Finding(name, PROBLEM, "its name is not known", "A typing error, or DNS.", "Try its IP address.")
    if isinstance(error, ConnectionRefusedError):
        return Finding(name, PROBLEM, "nobody listens there", "It listens on the loopback alone, or not at all.", start)
    if isinstance(error, TimeoutError):
        said = str(error) if "answer" in str(error) else f"silent for {HANDSHAKE_SECONDS:.0f} s"
        cause = "A firewall between you drops it, or the host is down."
        return Finding(name, PROBLEM, said, cause, "Open the port there; try `ping` and `nc -vz HOST PORT`.")
    if isinstance(error, ConnectionError):
        return Finding(name, PROBLEM, str(error), "It was ended, or the network failed.", "Try again.")
    remedy = "Look at `ip route get ADDRESS`."
    return Finding(name, PROBLEM, str(error.strerror or error), "There is no way to that address.", remedy)


def _ports(name: str, there: bool, here: bool) -> list[Finding]:
    closed = [where for where, is_open in (("there", there), ("here", here)) if not is_open]
    if not closed:
        return []
    said = f"its port is open, but not any other {' and '.join(closed)}"
    cause = "A firewall; ranks open ports that nobody can name before (gloo, messages between ranks)."
    remedy = "Let the hosts reach each other's ports of `sysctl net.ipv4.ip_local_port_range`."
    return [Finding(name, PROBLEM, said, cause, remedy)]


def differences(name: str, here: dict[str, str], there: dict[str, str]) -> list[Finding]:
    """Versions that are not the same."""
    found = []
    for package in (*MUST_BE_EQUAL, *SHOULD_BE_EQUAL):
        if here.get(package) != there.get(package):
            verdict = PROBLEM if package in MUST_BE_EQUAL else WARNING
            said = f"{package} is {there.get(package)} there and {here.get(package)} here"
            cause = "Ranks of different versions refuse each other." if verdict == PROBLEM else "Not tested together."
            found.append(Finding(name, verdict, said, cause, "Install the same version on both."))
    return found

"""`paceline doctor`: look at this machine and its peers, say what was found, and recommend a strategy."""

from __future__ import annotations

import socket
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.doctor.advice import advise, as_json, described, expectations
from paceline.doctor.examination import BYTES_PER_PARAMETER, Examination
from paceline.doctor.host import OK, PROBLEM, Host, Peer, Task
from paceline.doctor.peers import call, parse_peers
from paceline.doctor.probing import Responder
from paceline.doctor.words import Speaker
from paceline.errors import PacelineError
from paceline.launch.addresses import in_words
from paceline.launch.secret import find_secret
from paceline.launch.surroundings import LOOPBACK, SECRET
from paceline.simulator.cluster import Cluster

EVERYWHERE = ("0.0.0.0", "::")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a user asks of a doctor: see the options of the command."""

    workload: str = "digits"
    model: str | None = None
    data: Path | None = None
    nproc: int | None = None
    peers: str | None = None
    secret_file: Path | None = None
    write: Path | None = None

    def examination(self, **more: Any) -> Examination:
        return Examination(self.workload, self.model, self.data, self.nproc, **more)


def examine(settings: Settings, speaker: Speaker) -> dict[str, Any]:
    """Look at everything, and return what `--json` holds. `problems` counts what will not work."""
    addresses = parse_peers(settings.peers)
    secret = find_secret(settings.secret_file, make=False)[0] if addresses else b""
    examination = settings.examination(several_hosts=bool(addresses), say=speaker.findings)
    speaker.headline("This machine")
    own, task = examination.look()
    peers = _call_all(addresses, secret, own, settings, speaker)
    result: dict[str, Any] = {
        "host": own.as_dict(),
        "peers": [asdict(peer) for peer in peers],
        "task": None if task is None else asdict(task),
        "problems": len(_problems(own, peers)),
    }
    found = None if task is None else described(own, peers, task)
    if task is not None and found is not None:
        result |= _recommend(found, own, peers, task, settings, speaker)
    elif settings.write is not None:
        raise PacelineError("Nothing could be measured, so that there is no cluster to write.", where="--write")
    _conclude(_problems(own, peers), speaker)
    return dict(as_json(result))


def _call_all(
    addresses: list[tuple[str, int]], secret: bytes, own: Host, settings: Settings, speaker: Speaker
) -> list[Peer]:
    peers = []
    for address in addresses:
        speaker.headline(f"Peer {in_words(address)}")
        peer = call(address, secret, own, settings.workload, settings.model)
        speaker.findings(peer.findings)
        if peer.host is not None:
            speaker.findings(finding for finding in peer.host.findings if finding.verdict != OK)
        peers.append(peer)
    return peers


def _problems(own: Host, peers: list[Peer]) -> list[str]:
    """Names of what will not work; what a peer found on itself is told with its address."""
    named = [(finding.name, finding) for finding in own.findings]
    for peer in peers:
        named += [(peer.address, finding) for finding in peer.findings]
        named += [
            (f"{finding.name} of {peer.address}", finding) for finding in (peer.host.findings if peer.host else ())
        ]
    return [name for name, finding in named if finding.verdict == PROBLEM]


def _recommend(
    found: tuple[Cluster, str], own: Host, peers: list[Peer], task: Task, settings: Settings, speaker: Speaker
) -> dict[str, Any]:
    cluster, text = found
    expected = expectations(cluster, task)
    advice = advise(expected, cluster, task)
    hosts = [own, *(peer.host for peer in peers if peer.host is not None)]
    speaker.devices(hosts, task)
    speaker.networks(own, peers, task.parameters * BYTES_PER_PARAMETER)
    speaker.expected(expected, advice, cluster.workers)
    if settings.write is not None:
        settings.write.write_text(text)
    file = settings.write or "cluster.toml"
    speaker.headline("Go on" if settings.write else "Go on (--write cluster.toml keeps what was measured)")
    asked = "" if settings.workload == "digits" else f" --workload {settings.workload}"
    asked += f" --model {settings.model}" if settings.model else ""
    speaker.command(
        f"paceline race --backend simulated --cluster {file}{asked} --strategies all-reduce,{advice.strategy}"
    )
    how = f"SCRIPT.py  # with Run(strategy={advice.strategy!r})"
    if len(hosts) == 1:
        speaker.command(f"paceline run --nproc {own.workers} {how}")
    for number, host in enumerate(hosts if len(hosts) > 1 else []):
        place = f"--nnodes {len(hosts)} --node-rank {number} --nproc-per-node {host.workers}"
        speaker.command(f"torchrun {place} --master-addr {own.name} {how}")
    return {
        "cluster": text,
        "expected": [asdict(each) for each in expected],
        "recommended": asdict(advice),
    }


def _conclude(problems: list[str], speaker: Speaker) -> None:
    if problems:
        names = ", ".join(dict.fromkeys(problems))
        number = "One thing" if len(problems) == 1 else f"{len(problems)} things"
        speaker.headline(f"{number} will not work: {names}. See above.")


def listen(settings: Settings, host: str, port: int, speaker: Speaker) -> None:
    """Answer doctors of other machines until somebody ends it."""
    secret, source = find_secret(settings.secret_file, make=True)

    def measure(workload: str, model: str | None) -> Host:
        return Examination(workload, model, settings.data, settings.nproc, several_hosts=True).look()[0]

    with Responder(secret, measure, (host, port), say=speaker.paragraph) as responder:
        own = socket.gethostname() if responder.address[0] in EVERYWHERE else responder.address[0]
        speaker.paragraph(f"Listening on {in_words(responder.address)} until you press Ctrl-C. On the other machine:")
        if source != SECRET:
            speaker.command(f"scp {own}:{Path(source).absolute()} paceline.secret  # once")
        file = "" if source == SECRET else " --secret-file paceline.secret"
        speaker.command(f"paceline doctor --peers {in_words((own, responder.address[1]))}{file}")
        if host in LOOPBACK:
            speaker.paragraph("This is the loopback, which only this machine reaches. For others: --host ADDRESS.")
        wait_for_ever()


def wait_for_ever() -> None:
    threading.Event().wait()

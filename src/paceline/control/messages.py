"""The table of every message that may travel: its kind, its fields and what each field must be.

A receiver acts only on what this table allows, so that a confused or hostile peer is turned away at the door and the
handlers behind it need no checks of their own. Adding a message is adding a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Metadata = dict[str, Any]
Check = Callable[[Any], bool]

LARGEST_INTEGER = 2**63 - 1
MOST_PORTIONS = 2**16


def integer(value: Any) -> bool:
    return type(value) is int and -LARGEST_INTEGER <= value <= LARGEST_INTEGER


def natural(value: Any) -> bool:
    return integer(value) and value >= 0


def portions(value: Any) -> bool:
    """Micro-batches to take ahead: without a limit one question could ask for more than memory holds."""
    return natural(value) and value <= MOST_PORTIONS


def seconds(value: Any) -> bool:
    return type(value) in (int, float) and value >= 0  # which NaN is not


def positive(value: Any) -> bool:
    return seconds(value) and value > 0


def text(value: Any) -> bool:
    return type(value) is str


def flag(value: Any) -> bool:
    return type(value) is bool


def mapping(value: Any) -> bool:
    return type(value) is dict


def list_of(check: Check) -> Check:
    return lambda value: type(value) is list and all(map(check, value))


def optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def span(value: Any) -> bool:
    """A non-empty range of sample positions as [start, stop]."""
    return type(value) is list and len(value) == 2 and all(map(natural, value)) and value[0] < value[1]


def address(value: Any) -> bool:
    return type(value) is list and len(value) == 2 and text(value[0]) and natural(value[1])


def parameter(value: Any) -> bool:
    """A model's parameter as [name, shape, dtype, strides]."""
    if type(value) is not list or len(value) != 4:
        return False
    name, shape, dtype, strides = value
    return text(name) and text(dtype) and list_of(natural)(shape) and list_of(natural)(strides)


def description(value: Any) -> bool:
    """What a rank says of the run that it takes part in. Absent parts count as empty."""
    if type(value) is not dict or not all(mapping(value.get(part, {})) for part in ("options", "data")):
        return False
    return natural(value.get("servers", 0)) and list_of(parameter)(value.get("parameters", []))


def record_of(fields: dict[str, Check]) -> Check:
    """An object with exactly these fields."""
    return lambda value: (
        type(value) is dict and value.keys() == fields.keys() and all(fields[key](value[key]) for key in fields)
    )


SPANS = list_of(span)
NAMES = list_of(text)
ROSTER = list_of(optional(address))
RANKS = list_of(natural)
MEMBERSHIP: dict[str, Check] = {
    "generation": natural,
    "roster": ROSTER,
    "lost": mapping,
    "left": RANKS,
    "admitted_in": natural,  # the generation in which newcomers took part for the last time
    "joining": RANKS,  # who has arrived and does not take part yet: also among the lost
}
PROGRESS = list_of(natural)  # samples that each rank has brought to an end

# What `paceline doctor` tells of a machine
DEVICE = record_of(
    {"device": text, "name": text, "workers": natural, "micro_batch_seconds": positive, "jitter": seconds}
)
NETWORK = record_of({"latency": seconds, "bandwidth": positive, "all_reduce": text, "shared": flag})
FINDING = record_of({"name": text, "verdict": text, "said": text, "cause": text, "remedy": text})

SCHEMAS: dict[str, dict[str, Check]] = {
    # a rank to the service
    "hello": {"rank": natural, "description": description, "mailbox": optional(address)},
    "open_ledger": {"samples": natural, "epochs": optional(natural), "micro_batch": natural, "used": SPANS},
    "lease": {"micro_batches": portions},
    "progress": {"samples": PROGRESS, "generation": natural},
    "discard": {"ranges": SPANS, "reason": text},
    "give_back": {"ranges": SPANS},
    "snapshot": {"samples": PROGRESS},
    "signal": {"round": natural, "samples": natural, "target": natural},
    "heartbeat": {"metrics": mapping, "busy": seconds, "waits": seconds, "longest": seconds},
    "leave": {"error": text},
    "admit": {"number": natural},  # who waits to join takes part from now on; the how-manieth time that is
    "enlist": {"count": portions},  # a launcher: numbers for further ranks, which will join
    "exited": {"rank": natural, "reason": text},  # a launcher: the rank's process has ended
    "return": {"rank": natural},  # after the service was started again
    "status": {},
    "store_set": {"key": text},
    "store_get": {"key": text, "timeout": seconds},
    "store_wait": {"keys": NAMES, "timeout": seconds},
    "store_add": {"key": text, "amount": integer},
    "store_check": {"keys": NAMES},
    "store_delete": {"key": text},
    # the service's answers; they carry the sequence number of the question
    "done": {},
    "left": {"last": flag},
    "enlisted": {"ranks": RANKS},
    "admitted": {"ranks": RANKS, "generation": natural},
    "welcome": MEMBERSHIP,
    "leased": {"ranges": SPANS, "complete": flag},
    "ranges": {"ranges": SPANS},
    "value": {},
    "sum": {"value": integer},
    "truth": {"value": flag},
    "state": {"state": mapping},
    "returned": {"rounds": list_of(natural)},
    "error": {"what": text, "where": text, "cause": text, "remedy": text},
    # the service to every rank, unasked; sequence number 0
    "greeting": {
        "heartbeat_seconds": seconds,
        "join_seconds": seconds,
        "incarnation": natural,
        "return_seconds": seconds,
    },
    "membership": MEMBERSHIP,
    "signalled": {"round": natural},
    # a rank to a rank
    "introduction": {"rank": natural},
    "message": {"kind": text, "dtypes": NAMES, "shapes": list_of(list_of(natural))},
    "farewell": {},
    # a host's launcher to that of the first host, and its answer; see `launch/rendezvous.py`
    "arrive": {
        "node_rank": natural,
        "nnodes": natural,
        "nproc": portions,
        "servers": portions,
        "name": text,
        "version": text,
    },
    "seat": {
        "ranks": RANKS,
        "servers": natural,
        "where": NAMES,
        "control": address,
        "run": text,
        "nonce": text,
        "elapsed": seconds,
    },
    # a doctor to a doctor that listens, and its answers
    "examine": {"workload": text, "model": optional(text)},
    "examined": {
        "name": text,
        "versions": mapping,
        "devices": list_of(DEVICE),
        "network": optional(NETWORK),
        "findings": list_of(FINDING),
    },
    "probe": {"answer_bytes": natural},
    "probed": {"clock": seconds},
    "open_port": {},
    "call_back": {"port": natural},
    "port": {"port": natural},
}


def to_spans(ranges: Iterable[range]) -> list[list[int]]:
    """Ranges as JSON can carry them."""
    return [[part.start, part.stop] for part in ranges]


def to_ranges(spans: list[list[int]]) -> list[range]:
    """The other way round."""
    return [range(start, stop) for start, stop in spans]


def complaint(kind: str, metadata: Any) -> str:
    """What is wrong with a message, or an empty string."""
    schema = SCHEMAS.get(kind)
    if schema is None:
        return f"the kind {kind!r} is unknown"
    if type(metadata) is not dict:
        return f"the metadata of {kind} is no object"
    if metadata.keys() != schema.keys():
        missing, extra = sorted(schema.keys() - metadata.keys()), sorted(metadata.keys() - schema.keys())
        return f"{kind} lacks the fields {missing} and has the unknown fields {extra}"
    for field, check in schema.items():
        if not check(metadata[field]):
            return f"the field {field} of {kind} is not what it should be"
    return ""

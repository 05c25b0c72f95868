"""The fixed message format: pure bytes in and out, no pickle, nothing allocated before its size was checked.

    magic 4s | version u16 | generation u32 | sequence u64 | kind length u16 | metadata length u32
             | buffers u16 | payload length u64 | crc32 u32                                      (the header)
    kind (ASCII) | metadata (JSON object) | one u64 length for each buffer                       (the envelope)
    the buffers, one after the other                                                             (the payload)

The checksum covers header and envelope: it tells a damaged or foreign stream from a message. The payload's integrity
is left to TCP: gradients are large, a second checksum costs a third of a core per GB/s, and a peer has already proved
to hold the run's secret.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.control.messages import Metadata, complaint
from paceline.errors import PacelineError

MAGIC = b"PCLN"
VERSION = 1
METADATA_LIMIT = 16 * 2**20
KIND_LIMIT = 64
BUFFERS_LIMIT = 2**16 - 1

_FIELDS = struct.Struct("!4sHIQHIHQ")  # the header without its checksum
_CHECKSUM = struct.Struct("!I")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size

Fill = Callable[[memoryview], None]
"""Fills the memory with the next bytes of a stream, or raises when the stream ends before."""

Allocate = Callable[[int], memoryview]
"""Gives writable memory of so many bytes."""


class WireError(PacelineError):
    """What arrived is no message of this protocol."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"Refused a message: {what}.",
            cause="The peer runs another version of Paceline, or is no Paceline at all.",
            remedy="Install the same version everywhere.",
        )


@dataclass(frozen=True)
class Frame:
    """One message: what it is, which membership it belongs to, and raw buffers."""

    kind: str
    metadata: Metadata = field(default_factory=dict)
    buffers: Sequence[memoryview] = ()
    generation: int = 0
    sequence: int = 0


def error_frame(error: PacelineError) -> Frame:
    """The answer that something could not be done."""
    return Frame("error", {"what": error.what, "where": error.where, "cause": error.cause, "remedy": error.remedy})


def plain_memory(length: int) -> memoryview:
    return memoryview(bytearray(length))


def encode(frame: Frame) -> list[memoryview]:
    """The frame as pieces to send in order. The buffers are passed through, not copied."""
    wrong = complaint(frame.kind, frame.metadata)
    if wrong:
        raise WireError(wrong)
    if len(frame.buffers) > BUFFERS_LIMIT:
        raise WireError(f"{len(frame.buffers)} buffers in one message; {BUFFERS_LIMIT} is the most")
    kind = frame.kind.encode("ascii")
    metadata = json.dumps(frame.metadata, separators=(",", ":")).encode()
    if len(metadata) > METADATA_LIMIT:
        raise WireError(f"metadata of {len(metadata)} bytes; {METADATA_LIMIT} is the most")
    lengths = [buffer.nbytes for buffer in frame.buffers]
    envelope = kind + metadata + struct.pack(f"!{len(lengths)}Q", *lengths)
    header = _FIELDS.pack(
        MAGIC, VERSION, frame.generation, frame.sequence, len(kind), len(metadata), len(lengths), sum(lengths)
    )
    checksum = _CHECKSUM.pack(zlib.crc32(envelope, zlib.crc32(header)))
    return [memoryview(header + checksum + envelope), *(b.cast("B") for b in frame.buffers if b.nbytes)]


def read_frame(fill: Fill, payload_limit: int, allocate: Allocate = plain_memory) -> Frame:
    """Read one frame from a stream; anything but a whole valid frame raises a `WireError` (or what `fill` raises)."""
    header = memoryview(bytearray(HEADER_BYTES))
    fill(header)
    magic, version, generation, sequence, kind_length, metadata_length, count, payload = _FIELDS.unpack_from(header)
    if magic != MAGIC:
        raise WireError("it does not begin like one")
    if version != VERSION:
        raise WireError(f"it is of protocol version {version}, and this is {VERSION}")
    if kind_length > KIND_LIMIT or metadata_length > METADATA_LIMIT or payload > payload_limit:
        raise WireError(f"it announces {metadata_length} bytes of metadata and {payload} of payload, over the limit")
    envelope = memoryview(bytearray(kind_length + metadata_length + 8 * count))
    fill(envelope)
    (checksum,) = _CHECKSUM.unpack_from(header, _FIELDS.size)
    if zlib.crc32(envelope, zlib.crc32(header[: _FIELDS.size])) != checksum:
        raise WireError("its checksum is wrong")
    lengths = struct.unpack_from(f"!{count}Q", envelope, kind_length + metadata_length)
    if sum(lengths) != payload:
        raise WireError("its buffers do not add up to its payload")
    kind, metadata = _open_envelope(bytes(envelope[: kind_length + metadata_length]), kind_length)
    buffers = [_filled(fill, _memory(allocate, length)) for length in lengths]
    return Frame(kind, metadata, buffers, generation, sequence)


def _open_envelope(envelope: bytes, kind_length: int) -> tuple[str, Metadata]:
    try:
        kind = envelope[:kind_length].decode("ascii")
        metadata = json.loads(envelope[kind_length:])
    except (ValueError, RecursionError) as error:
        raise WireError("its metadata cannot be read") from error
    wrong = complaint(kind, metadata)
    if wrong:
        raise WireError(wrong)
    return kind, metadata


def _memory(allocate: Allocate, length: int) -> memoryview:
    try:
        return allocate(length)
    except (MemoryError, RuntimeError) as error:  # the second is torch's
        raise WireError(f"there is no memory for its {length} bytes") from error


def _filled(fill: Fill, memory: memoryview) -> memoryview:
    if memory.nbytes:
        fill(memory)
    return memory

"""The message format: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

import io
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.control.messages import SCHEMAS, complaint, to_ranges, to_spans
from paceline.control.wire import HEADER_BYTES, METADATA_LIMIT, Frame, WireError, encode, read_frame

LIMIT = 2**20


def from_bytes(data: bytes, allocate=None) -> Frame:
    stream = io.BytesIO(data)

    def fill(memory: memoryview) -> None:
        if stream.readinto(memory) != len(memory):
            raise EOFError

    return read_frame(fill, LIMIT) if allocate is None else read_frame(fill, LIMIT, allocate)


def to_bytes(frame: Frame) -> bytes:
    return b"".join(encode(frame))


spans = st.lists(st.tuples(st.integers(0, 2**40), st.integers(1, 99)).map(lambda p: [p[0], p[0] + p[1]]), max_size=5)
frames = st.builds(
    lambda reason, ranges, buffers, generation, sequence: Frame(
        "discard", {"reason": reason, "ranges": ranges}, [memoryview(b) for b in buffers], generation, sequence
    ),
    st.text(max_size=30),
    spans,
    st.lists(st.binary(max_size=50), max_size=4),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
)


@given(frames)
def test_a_frame_survives_the_wire(frame):
    back = from_bytes(to_bytes(frame))
    assert (back.kind, back.metadata, back.generation, back.sequence) == (
        frame.kind,
        frame.metadata,
        frame.generation,
        frame.sequence,
    )
    assert [bytes(b) for b in back.buffers] == [bytes(b) for b in frame.buffers]


@given(frames, st.data())
def test_a_damaged_header_or_envelope_is_refused(frame, data):
    whole = bytearray(to_bytes(frame))
    envelope_end = len(whole) - sum(len(b) for b in frame.buffers)
    at = data.draw(st.integers(0, envelope_end - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises((WireError, EOFError)):
        from_bytes(bytes(whole))


@given(frames, st.data())
def test_a_truncated_stream_is_refused(frame, data):
    whole = to_bytes(frame)
    with pytest.raises(EOFError):
        from_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(st.binary(max_size=300))
def test_garbage_is_refused(garbage):
    with pytest.raises((WireError, EOFError)):
        from_bytes(garbage)


@pytest.mark.parametrize(("metadata_length", "payload"), [(METADATA_LIMIT + 1, 0), (2, LIMIT + 1), (2, 2**64 - 1)])
def test_sizes_are_checked_before_memory_is_taken(metadata_length, payload):
    header = struct.pack("!4sHIQHIHQI", b"PCLN", 1, 0, 0, 4, metadata_length, 1, payload, 0)
    assert len(header) == HEADER_BYTES
    with pytest.raises(WireError, match="over the limit"):
        from_bytes(header)  # there is nothing behind the header: whoever read on would find the end of the stream


def test_buffers_that_do_not_add_up_are_refused_before_memory_is_taken():
    import zlib

    envelope = b"value{}" + struct.pack("!Q", 2**60)
    fields = struct.pack("!4sHIQHIHQ", b"PCLN", 1, 0, 0, 5, 2, 1, 3)
    checksum = struct.pack("!I", zlib.crc32(envelope, zlib.crc32(fields)))
    with pytest.raises(WireError, match="add up"):
        from_bytes(fields + checksum + envelope + b"abc")


@pytest.mark.parametrize(
    ("kind", "metadata"),
    [
        ("no-such-kind", {}),
        ("signal", {}),
        ("signal", {"round": 1}),
        ("signal", {"round": 1, "samples": 0, "target": 0, "more": 2}),
        ("signal", {"round": "1", "samples": 0, "target": 0}),
        ("signal", {"round": True, "samples": 0, "target": 0}),
        ("signal", {"round": -1, "samples": 0, "target": 0}),
        ("signal", {"round": 2**70, "samples": 0, "target": 0}),
        ("signal", {"round": 1, "samples": -1, "target": 0}),
        ("signal", {"round": 1, "samples": 1.5, "target": 0}),
        ("signal", {"round": 1, "samples": 1, "target": None}),
        ("signal", []),
        ("contribute", {"round": 1, "ranges": [[5, 6]]}),
        ("commit", {"round": 1, "members": None}),
        ("give_back", {"ranges": [[5, 5]]}),
        ("give_back", {"ranges": [[1, 2, 3]]}),
        ("discard", {"ranges": [[5, 6]], "reason": None}),
        ("progress", {"samples": [1, 2]}),
        ("progress", {"samples": [1, -2], "generation": 0}),
        ("progress", {"samples": [1, 2.0], "generation": 0}),
        ("progress", {"samples": [1, True], "generation": 0}),
        ("progress", {"samples": None, "generation": 0}),
        ("progress", {"samples": [1, 2], "generation": -1}),
        ("snapshot", {"samples": {"0": 1}}),
        ("snapshot", {"samples": [1], "timeout": 1.0}),
        ("store_wait", {"keys": ["a", 1], "timeout": 1.0}),
        ("store_wait", {"keys": ["a"], "timeout": float("nan")}),
        ("hello", {"rank": 0, "description": {"parameters": [["w", "shape", "float32"]]}, "mailbox": None}),
        ("hello", {"rank": 0, "description": {}, "mailbox": ["host"]}),
    ],
)
def test_what_the_table_does_not_allow_is_refused(kind, metadata):
    assert complaint(kind, metadata)
    with pytest.raises(WireError):
        encode(Frame(kind, metadata))


@pytest.mark.parametrize(
    ("kind", "metadata"),
    [
        ("progress", {"samples": [0, 2**62], "generation": 3}),
        ("progress", {"samples": [], "generation": 0}),
        ("snapshot", {"samples": [7, 8, 9]}),
        ("discard", {"ranges": [[5, 6]], "reason": "not a number"}),
        ("give_back", {"ranges": []}),
        ("ranges", {"ranges": [[0, 1], [4, 9]]}),
        ("open_ledger", {"samples": 10, "epochs": None, "micro_batch": 2, "used": [[0, 4]]}),
    ],
)
def test_what_the_table_allows_survives_the_wire(kind, metadata):
    assert not complaint(kind, metadata)
    assert from_bytes(to_bytes(Frame(kind, metadata))).metadata == metadata


@given(st.lists(st.lists(st.integers(0, 2**40), min_size=2, max_size=2).map(sorted).filter(lambda s: s[0] < s[1])))
def test_ranges_survive_as_spans(spans):
    assert to_spans(to_ranges(spans)) == spans and not complaint("ranges", {"ranges": spans})


def test_deeply_nested_metadata_is_refused():
    import zlib

    metadata = b'{"metrics":' + b"[" * 200_000 + b"}"
    envelope = b"heartbeat" + metadata
    fields = struct.pack("!4sHIQHIHQ", b"PCLN", 1, 0, 0, 9, len(metadata), 0, 0)
    checksum = struct.pack("!I", zlib.crc32(envelope, zlib.crc32(fields)))
    with pytest.raises(WireError, match="cannot be read"):
        from_bytes(fields + checksum + envelope)


def test_every_kind_fits_the_header_and_json():
    assert all(kind.isascii() and len(kind) <= 64 for kind in SCHEMAS)
    assert json.dumps(sorted(SCHEMAS))


def test_the_allocator_gives_the_memory():
    given = []

    def allocate(length: int) -> memoryview:
        given.append(bytearray(length))
        return memoryview(given[-1])

    from_bytes(to_bytes(Frame("value", {}, [memoryview(b"abc"), memoryview(b"")])), allocate)
    assert given == [b"abc", b""]

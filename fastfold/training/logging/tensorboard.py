"""TensorBoard event files: records of length, checksum and one protocol buffer each.

Scalars need five kinds of field, and the format is stable. Writing it here avoids the dependency on TensorBoard's
package with its web server, which is needed only to show the curves.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

Event = bytes  #: Serialised ``tensorboard.Event``


def version_event(time: float) -> Event:
    """Return the first event of every file; times are in seconds since 1970."""
    return _field(1, float(time)) + _field(3, b"brain.Event:2")


def scalar_event(time: float, step: int, values: Mapping[str, float]) -> Event:
    """Return an event with numbers of one step, in float32 as in TensorBoard."""
    summary = b"".join(
        _field(1, _field(1, tag.encode()) + _key(2, 5) + _float32(value)) for tag, value in values.items()
    )
    return _field(1, float(time)) + _field(2, step) + _field(5, summary)


def text_event(time: float, step: int, tag: str, text: str) -> Event:
    """Return an event with a text at one step, for TensorBoard's text page."""
    string = 7  # DataType.DT_STRING
    shape = _field(2, _field(1, 1))
    tensor = _field(1, string) + _field(2, shape) + _field(8, text.encode())
    plugin = _field(1, _field(1, b"text"))
    value = _field(1, tag.encode()) + _field(8, tensor) + _field(9, plugin)
    return _field(1, float(time)) + _field(2, step) + _field(5, _field(1, value))


def record(event: Event) -> bytes:
    """Return the record of an event in a file."""
    length = struct.pack("<Q", len(event))
    return length + _checksum(length) + event + _checksum(event)


def read_steps(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield offsets and steps of records, up to the first damaged or incomplete one.

    Step 0 is for events without one, and -1 finally for the end of the last valid record.
    """
    offset = 0
    while len(data) - offset >= 16:
        header = data[offset : offset + 8]
        length = struct.unpack("<Q", header)[0]
        end = offset + 12 + length
        if data[offset + 8 : offset + 12] != _checksum(header) or end + 4 > len(data):
            break
        event = data[offset + 12 : end]
        if data[end : end + 4] != _checksum(event):
            break
        yield offset, _step(event)
        offset = end + 4
    yield offset, -1


def _step(event: Event) -> int:
    """Return field 2 of an event, which only its time may precede."""
    position = 9 if event[:1] == _key(1, 1) else 0
    if event[position : position + 1] != _key(2, 0):
        return 0
    value, shift = 0, 0
    for byte in event[position + 1 : position + 11]:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return value


def _key(number: int, wire_type: int) -> bytes:
    return bytes([number << 3 | wire_type])


def _field(number: int, value: int | float | bytes) -> bytes:
    """Return a field: a varint of an integer, a double of a float, or bytes with their length."""
    if isinstance(value, float):
        return _key(number, 1) + struct.pack("<d", value)
    if isinstance(value, bytes):
        return _key(number, 2) + _varint(len(value)) + value
    return _key(number, 0) + _varint(value)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _float32(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:  # out of float32's range
        return struct.pack("<f", float("inf") if value > 0 else float("-inf"))


def _table() -> list[int]:
    """Return the CRC-32C (Castagnoli, reflected) of every byte."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_CRC = _table()


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of some bytes."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _checksum(data: bytes) -> bytes:
    """Return a record's checksum, masked as the format requires."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

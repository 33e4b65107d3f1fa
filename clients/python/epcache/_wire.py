"""The encoding of the messages in _messages.py.

A message is a dict from field name to value. Encoding accepts absent fields. Decoding sets repeated
and map fields always, and other fields to their default unless they are `optional` or messages; it
skips unknown fields, and raises WireError for any invalid bytes.
"""

from __future__ import annotations

import struct
from typing import Any

from ._messages import MESSAGES, Field

Message = dict[str, Any]


class WireError(ValueError):
    """The bytes are not a valid message."""


_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_DEFAULTS: dict[str, Any] = {
    "uint32": 0,
    "uint64": 0,
    "int32": 0,
    "int64": 0,
    "enum": 0,
    "bool": False,
    "double": 0.0,
    "string": "",
}
_NUMBERS = frozenset(_DEFAULTS) - {"double", "string"}
_BY_NAME = {message: {f.name: f for f in fields} for message, fields in MESSAGES.items()}
_BY_NUMBER = {message: {f.number: f for f in fields} for message, fields in MESSAGES.items()}


def encode(message: str, values: Message) -> bytes:
    """Returns the bytes of the message type `message`, with fields in the order of their numbers,
    because the daemon decodes that fastest. Raises for an unknown field name or a wrong value.
    """
    out = bytearray()
    by_name = _BY_NAME[message]
    for name in sorted(values, key=lambda name: by_name[name].number):
        field, value = by_name[name], values[name]
        if field.label == "map":
            for key, item in value.items():
                entry = bytearray()
                _put(entry, 1, "string", key)
                _put(entry, 2, field.kind, item)
                _put_bytes(out, field.number, bytes(entry))
        elif field.label == "repeated":
            for item in value:
                _put(out, field.number, field.kind, item)
        else:
            _put(out, field.number, field.kind, value)
    return bytes(out)


def _put(out: bytearray, number: int, kind: str, value: Any) -> None:
    if kind == "string":
        _put_bytes(out, number, value.encode())
    elif kind == "double":
        _put_varint(out, number << 3 | _FIXED64)
        out += struct.pack("<d", value)
    elif kind in _DEFAULTS:
        _put_varint(out, number << 3 | _VARINT)
        # Negative numbers are encoded as two's complement in 64 bits, in ten bytes.
        _put_varint(out, int(value) & 0xFFFF_FFFF_FFFF_FFFF)
    else:
        _put_bytes(out, number, encode(kind, value))


def _put_bytes(out: bytearray, number: int, data: bytes) -> None:
    _put_varint(out, number << 3 | _BYTES)
    _put_varint(out, len(data))
    out += data


def _put_varint(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def decode(message: str, data: bytes) -> Message:
    """Returns the message of type `message` in `data`. Raises only WireError."""
    values = _empty(message)
    _merge(message, data, values)
    return values


def _empty(message: str) -> Message:
    values: Message = {}
    for field in MESSAGES[message]:
        if field.label == "repeated":
            values[field.name] = []
        elif field.label == "map":
            values[field.name] = {}
        elif field.label == "" and field.kind in _DEFAULTS:
            values[field.name] = _DEFAULTS[field.kind]
    return values


def _merge(message: str, data: bytes, values: Message) -> None:
    known = _BY_NUMBER[message]
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        raw, at = _raw(data, at, tag & 7)
        field = known.get(tag >> 3)
        if field is None:
            continue
        if field.label == "map":
            key, item = _entry(field, _as_bytes(field, raw))
            values[field.name][key] = item
        elif field.label == "repeated":
            _append(field, raw, values[field.name])
        elif field.kind in _DEFAULTS:
            values[field.name] = _scalar(field, raw)
        else:
            # protobuf merges a message field that occurs twice.
            _merge(
                field.kind, _as_bytes(field, raw), values.setdefault(field.name, _empty(field.kind))
            )


def _append(field: Field, raw: int | bytes, into: list[Any]) -> None:
    if field.kind in _NUMBERS and isinstance(raw, bytes):  # a packed field
        at = 0
        while at < len(raw):
            number, at = _varint(raw, at)
            into.append(_scalar(field, number))
    elif field.kind in _DEFAULTS:
        into.append(_scalar(field, raw))
    else:
        into.append(decode(field.kind, _as_bytes(field, raw)))


def _entry(field: Field, data: bytes) -> tuple[str, Any]:
    key: Any = ""
    item: Any = _DEFAULTS[field.kind] if field.kind in _DEFAULTS else _empty(field.kind)
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        raw, at = _raw(data, at, tag & 7)
        if tag >> 3 == 1:
            key = _scalar(field._replace(kind="string"), raw)
        elif tag >> 3 == 2:
            item = (
                _scalar(field, raw)
                if field.kind in _DEFAULTS
                else decode(field.kind, _as_bytes(field, raw))
            )
    return key, item


def _scalar(field: Field, raw: int | bytes) -> Any:
    if field.kind == "string":
        try:
            return _as_bytes(field, raw).decode()
        except UnicodeDecodeError:
            raise WireError(f"field {field.name}: text is not UTF-8") from None
    if field.kind == "double":
        if not isinstance(raw, bytes) or len(raw) != 8:
            raise WireError(f"field {field.name}: not a double")
        return struct.unpack("<d", raw)[0]
    if not isinstance(raw, int):
        raise WireError(f"field {field.name}: not a number")
    if field.kind == "bool":
        return raw != 0
    if field.kind == "uint64":
        return raw
    if field.kind == "uint32":
        return raw & 0xFFFF_FFFF
    if field.kind == "int32":
        raw &= 0xFFFF_FFFF
        return raw - (1 << 32) if raw >> 31 else raw
    return raw - (1 << 64) if raw >> 63 else raw  # int64 and enum


def _as_bytes(field: Field, raw: int | bytes) -> bytes:
    if not isinstance(raw, bytes):
        raise WireError(f"field {field.name}: a number instead of bytes")
    return raw


def _raw(data: bytes, at: int, wire_type: int) -> tuple[int | bytes, int]:
    """Returns a field's encoded value, and the offset of the next field."""
    if wire_type == _VARINT:
        return _varint(data, at)
    if wire_type == _BYTES:
        length, at = _varint(data, at)
    elif wire_type == _FIXED64:
        length = 8
    elif wire_type == _FIXED32:
        length = 4
    else:
        raise WireError(f"offset {at}: wire type {wire_type} is not in use")
    if length > len(data) - at:
        raise WireError(f"offset {at}: {length} bytes wanted, {len(data) - at} left")
    return data[at : at + length], at + length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise WireError(f"offset {at}: ends inside a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
    raise WireError(f"offset {at}: number of more than ten bytes")

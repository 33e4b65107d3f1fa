"""Renames the files to which a compiled model refers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from . import _errors

# Keys of ONNX's protobuf messages: field number and wire type 2.
_GRAPH = 7 << 3 | 2  # of a model
_NODE = 1 << 3 | 2  # of a graph
_OP_TYPE, _ATTRIBUTE = 4 << 3 | 2, 5 << 3 | 2  # of a node
_NAME, _TEXT = 1 << 3 | 2, 4 << 3 | 2  # of an attribute


def renamed_contexts(model: bytes, names: Mapping[str, str]) -> bytes:
    """Returns the model with other names for the binaries of its EPContext nodes.

    Raises ProtocolError for a model that cannot be parsed, or that has such a name elsewhere as
    well.
    """
    names_in_bytes = {old.encode(): new.encode() for old, new in names.items()}

    def attribute(data: bytes) -> bytes:
        fields = {key: value for key, _, value in _fields(data)}
        new = names_in_bytes.get(fields.get(_TEXT, b""))
        if fields.get(_NAME) != b"ep_cache_context" or new is None:
            return data
        return _changed(data, _TEXT, lambda _: new)

    def node(data: bytes) -> bytes:
        if (_OP_TYPE, b"EPContext") not in ((key, value) for key, _, value in _fields(data)):
            return data
        return _changed(data, _ATTRIBUTE, attribute)

    try:
        result = _changed(model, _GRAPH, lambda graph: _changed(graph, _NODE, node))
    except (IndexError, ValueError) as error:
        raise _errors.ProtocolError("the daemon's graph is no ONNX model") from error
    if left := [old for old in names if old != names[old] and old.encode() in result]:
        raise _errors.ProtocolError(f"the graph names its file {left[0]!r} outside its contexts")
    return result


def _changed(data: bytes, key: int, change: Callable[[bytes], bytes]) -> bytes:
    """Returns a message with its fields of that key changed."""
    parts = []
    for found, whole, value in _fields(data):
        if found == key:
            new = change(value)
            whole = _number(key) + _number(len(new)) + new
        parts.append(whole)
    return b"".join(parts)


def _fields(data: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Yields each field's key, its bytes, and those of its value, b"" if that is a number."""
    at = 0
    while at < len(data):
        start = at
        key, at = _parse(data, at)
        value = b""
        if key & 7 == 2:
            size, at = _parse(data, at)
            value = data[at : at + size]
            at += size
        elif key & 7 == 0:
            _, at = _parse(data, at)
        else:
            at += {1: 8, 5: 4}.get(key & 7, len(data) + 1)
        if at > len(data):
            raise ValueError("a field is longer than its message")
        yield key, data[start:at], value


def _parse(data: bytes, at: int) -> tuple[int, int]:
    """Returns the variable-length number at an offset, and the offset behind it."""
    number = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
    raise ValueError("a number is too long")


def _number(value: int) -> bytes:
    result = bytearray()
    while value >= 0x80:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*result, value))

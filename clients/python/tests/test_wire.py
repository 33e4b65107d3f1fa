"""The table of messages equals the .proto, and the codec agrees with protobuf's."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from epcache import _messages, _wire

descriptor_pb2 = pytest.importorskip(
    "google.protobuf.descriptor_pb2", reason="needs protobuf, see testdata/fetch-python"
)
from google.protobuf import descriptor_pool, message_factory  # noqa: E402
from grpc_tools import protoc  # noqa: E402

PROTO = Path(__file__).parents[3] / "unixsock" / "wire" / "epcached.proto"
PACKAGE = "epcached.v1"

# The bodies of an Envelope that this client does not use.
UNUSED_BODIES = {
    f"{verb}{suffix}"
    for verb in (
        "release",
        "list",
        "show",
        "status",
        "probe",
        "check",
        "doctor",
        "collect",
        "usage",
        "pack",
        "layout",
        "stop",
        "export",
        "import",
        "push",
        "check_remote",
        "remote_trust",
        "collect_remote",
    )
    for suffix in ("", "_reply")
} | {"invalidate", "remove", "change_reply", "why", "explanation", "pin", "unpin"}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> object:
    out = tmp_path_factory.mktemp("proto") / "set"
    status = protoc.main(["protoc", f"-I{PROTO.parent}", f"--descriptor_set_out={out}", PROTO.name])
    assert status == 0
    return descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file[0]


def kind(field: object) -> str:
    if field.type == field.TYPE_MESSAGE:
        return field.type_name.removeprefix(f".{PACKAGE}.")
    return field.Type.Name(field.type).removeprefix("TYPE_").lower()


def as_ours(message: object) -> list[_messages.Field]:
    maps = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    fields = []
    for field in message.field:
        entry = maps.get(kind(field).rpartition(".")[2])
        if entry is not None:
            key, value = entry.field
            assert kind(key) == "string", (
                "a map with keys other than strings needs a codec for them"
            )
            fields.append(_messages.Field(field.number, field.name, kind(value), "map"))
            continue
        label = (
            "repeated"
            if field.label == field.LABEL_REPEATED
            else "optional"
            if field.proto3_optional
            else ""
        )
        fields.append(_messages.Field(field.number, field.name, kind(field), label))
    return fields


@pytest.mark.parametrize("name", _messages.MESSAGES)
def test_message_is_as_in_the_proto(file: object, name: str) -> None:
    (theirs,) = [message for message in file.message_type if message.name == name]
    want = [
        field for field in as_ours(theirs) if name != "Envelope" or field.name not in UNUSED_BODIES
    ]
    assert list(_messages.MESSAGES[name]) == want


@pytest.mark.parametrize("name", _messages.ENUMS)
def test_enum_is_as_in_the_proto(file: object, name: str) -> None:
    (theirs,) = [enum for enum in file.enum_type if enum.name == name]
    assert _messages.ENUMS[name] == {value.name: value.number for value in theirs.value}


@pytest.fixture(scope="module")
def classes(file: object) -> dict[str, type]:
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        for name in _messages.MESSAGES
    }


EDGES = {
    "uint32": [0, 1, 127, 128, 0xFFFF_FFFF],
    "uint64": [0, 1, 0xFFFF_FFFF_FFFF_FFFF],
    "int32": [0, 1, -1, -(1 << 31), (1 << 31) - 1],
    "int64": [0, 1, -1, -(1 << 63), (1 << 63) - 1],
    "enum": [0, 3, 13],
    "bool": [False, True],
    "double": [0.0, -1.5, 1e300, float("inf")],
    "string": ["", "a", "ä€😀", "x" * 200],
}


def some_message(random: random.Random, name: str) -> dict[str, object]:
    values: dict[str, object] = {}
    bodies = [f.name for f in _messages.MESSAGES[name] if name == "Envelope" and f.number >= 10]
    body = random.choice(bodies) if bodies else None
    for field in _messages.MESSAGES[name]:
        if random.random() < 0.3 or (field.name in bodies and field.name != body):
            continue

        def one(kind: str = field.kind) -> object:
            return random.choice(EDGES[kind]) if kind in EDGES else some_message(random, kind)

        if field.label == "map":
            values[field.name] = {
                random.choice(EDGES["string"]): one() for _ in range(random.randrange(3))
            }
        elif field.label == "repeated":
            values[field.name] = [one() for _ in range(random.randrange(3))]
        else:
            values[field.name] = one()
    return values


def filled(name: str, values: dict[str, object]) -> dict[str, object]:
    """The values as decode() returns them: with the defaults of fields that were not set."""
    result = _wire._empty(name)
    for field in _messages.MESSAGES[name]:
        if field.name not in values:
            continue
        value, nested = values[field.name], field.kind in _messages.MESSAGES
        if field.label == "map":
            value = {
                key: filled(field.kind, item) if nested else item for key, item in value.items()
            }
        elif field.label == "repeated":
            value = [filled(field.kind, item) if nested else item for item in value]
        elif nested:
            value = filled(field.kind, value)
        result[field.name] = value
    return result


@pytest.mark.parametrize("name", _messages.MESSAGES)
def test_codec_agrees_with_protobuf(classes: dict[str, type], name: str) -> None:
    numbers = random.Random(name)
    for _ in range(100):
        values = some_message(numbers, name)
        theirs = classes[name].FromString(_wire.encode(name, values))
        # protobuf keeps unknown fields, and would write them back although the number is wrong.
        theirs.DiscardUnknownFields()
        assert _wire.decode(name, theirs.SerializeToString(deterministic=True)) == filled(
            name, values
        )


def test_unknown_fields_are_skipped() -> None:
    unknown = bytes([0x98, 0x06, 0x01])  # field 99, varint
    unknown += bytes([0x9A, 0x06, 0x02, 0x61, 0x62])  # field 99, bytes
    unknown += bytes([0x99, 0x06]) + bytes(8) + bytes([0x9D, 0x06]) + bytes(4)  # fixed64, fixed32
    data = unknown + _wire.encode("Progress", {"phase": "compiling"}) + unknown
    assert _wire.decode("Progress", data)["phase"] == "compiling"


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x0a", id="ends before a length"),
        pytest.param(b"\x0a\x05ab", id="length beyond the end"),
        pytest.param(b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01ab", id="length of 2^64 - 1"),
        pytest.param(b"\x0a\x02\xff\xfe", id="not UTF-8"),
        pytest.param(b"\x08\x01", id="number where text belongs"),
        pytest.param(b"\x12\x01a", id="text where a number belongs"),
        pytest.param(b"\x10" + b"\xff" * 10, id="number of eleven bytes"),
        pytest.param(b"\x10\x80", id="ends inside a number"),
        pytest.param(b"\x0b", id="group"),
        pytest.param(b"\x0f", id="wire type 7"),
    ],
)
def test_damaged_progress(data: bytes) -> None:
    with pytest.raises(_wire.WireError):
        _wire.decode("Progress", data)


def test_any_bytes_decode_or_are_a_wire_error() -> None:
    numbers = random.Random(7)
    seeds = [_wire.encode("Envelope", some_message(numbers, "Envelope")) for _ in range(50)]
    refused = 0
    for _ in range(int(os.environ.get("EPCACHE_FUZZ", "5000"))):
        data = bytearray(numbers.choice(seeds) or b"\0")
        for _ in range(numbers.randrange(1, 5)):
            data[numbers.randrange(len(data))] = numbers.randrange(256)
        try:
            _wire.decode("Envelope", bytes(data[: numbers.randrange(len(data) + 1)]))
        except _wire.WireError:
            refused += 1
    assert refused > 100, "hardly anything was damaged: the test does not test"

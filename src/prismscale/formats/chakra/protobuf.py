"""Chakra execution trace messages, built at import time from the schema's field numbers.

The numbers are those of ``schema/protobuf/et_def.proto`` of mlcommons/chakra (schema 0.0.4); fields
that are not listed here are skipped by protobuf when it parses.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import IO, Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from prismscale.errors import FormatError

PACKAGE = "prismscale_chakra"
SCHEMA_VERSION = "0.0.4"
LARGEST_MESSAGE = 1 << 25
"""Most bytes of one message: 32 MB are no node but a damaged file."""

_TYPES = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    # name: (protobuf type, number of the scalar, number of the list)
    "double": (_TYPES.TYPE_DOUBLE, 3, 4),
    "float": (_TYPES.TYPE_FLOAT, 5, 6),
    "int32": (_TYPES.TYPE_INT32, 7, 8),
    "int64": (_TYPES.TYPE_INT64, 9, 10),
    "uint32": (_TYPES.TYPE_UINT32, 11, 12),
    "uint64": (_TYPES.TYPE_UINT64, 13, 14),
    "sint32": (_TYPES.TYPE_SINT32, 15, 16),
    "sint64": (_TYPES.TYPE_SINT64, 17, 18),
    "fixed32": (_TYPES.TYPE_FIXED32, 19, 20),
    "fixed64": (_TYPES.TYPE_FIXED64, 21, 22),
    "sfixed32": (_TYPES.TYPE_SFIXED32, 23, 24),
    "sfixed64": (_TYPES.TYPE_SFIXED64, 25, 26),
    "bool": (_TYPES.TYPE_BOOL, 27, 28),
    "string": (_TYPES.TYPE_STRING, 29, 30),
    "bytes": (_TYPES.TYPE_BYTES, 31, 32),
}


class NodeType(IntEnum):
    """Values of a node's ``type``."""

    INVALID_NODE = 0
    METADATA_NODE = 1
    MEM_LOAD_NODE = 2
    MEM_STORE_NODE = 3
    COMP_NODE = 4
    COMM_SEND_NODE = 5
    COMM_RECV_NODE = 6
    COMM_COLL_NODE = 7


class CommType(IntEnum):
    """Values of the attribute ``comm_type``."""

    ALL_REDUCE = 0
    REDUCE = 1
    ALL_GATHER = 2
    GATHER = 3
    SCATTER = 4
    BROADCAST = 5
    ALL_TO_ALL = 6
    REDUCE_SCATTER = 7
    REDUCE_SCATTER_BLOCK = 8
    BARRIER = 9


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="prismscale_chakra.proto", package=PACKAGE, syntax="proto3"
    )
    attribute = file.message_type.add(name="AttributeProto")
    attribute.oneof_decl.add(name="value")
    _field(attribute, "name", 1, _TYPES.TYPE_STRING)
    for scalar, (kind, number, list_number) in _SCALARS.items():
        values = file.message_type.add(name=f"{scalar.capitalize()}List")
        _field(values, "values", 1, kind, repeated=True)
        _field(attribute, f"{scalar}_val", number, kind, oneof=True)
        _field(attribute, f"{scalar}_list", list_number, values.name, oneof=True)
    metadata = file.message_type.add(name="GlobalMetadata")
    _field(metadata, "version", 1, _TYPES.TYPE_STRING)
    _field(metadata, "attr", 2, "AttributeProto", repeated=True)
    node = file.message_type.add(name="Node")
    _field(node, "id", 1, _TYPES.TYPE_UINT64)
    _field(node, "name", 2, _TYPES.TYPE_STRING)
    # An open integer rather than an enum: later schemas add kinds of node.
    _field(node, "type", 3, _TYPES.TYPE_INT32)
    _field(node, "ctrl_deps", 4, _TYPES.TYPE_UINT64, repeated=True)
    _field(node, "data_deps", 5, _TYPES.TYPE_UINT64, repeated=True)
    _field(node, "start_time_micros", 6, _TYPES.TYPE_UINT64)
    _field(node, "duration_micros", 7, _TYPES.TYPE_UINT64)
    _field(node, "attr", 10, "AttributeProto", repeated=True)
    return file


def _field(
    message: descriptor_pb2.DescriptorProto,
    name: str,
    number: int,
    kind: Any,
    *,
    repeated: bool = False,
    oneof: bool = False,
) -> None:
    label = _TYPES.LABEL_REPEATED if repeated else _TYPES.LABEL_OPTIONAL
    field = message.field.add(name=name, number=number, label=label)
    if isinstance(kind, str):
        field.type = _TYPES.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{kind}"
    else:
        field.type = kind
    if oneof:
        field.oneof_index = 0


_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(_file())


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


Attribute = _message("AttributeProto")
GlobalMetadata = _message("GlobalMetadata")
Node = _message("Node")


INT32 = ("comm_src", "comm_dst", "comm_tag")
"""Integers that Chakra's feeder reads as 32 bits; it takes those of 64 bits for 0."""


def attribute(name: str, value: bool | int | str | list[int]) -> Any:
    """Return an attribute of the type that Chakra's own tools use for such a value."""
    if isinstance(value, bool):
        return Attribute(name=name, bool_val=value)
    if isinstance(value, int) and name in INT32:
        return Attribute(name=name, int32_val=value)
    if isinstance(value, int):
        return Attribute(name=name, int64_val=value)
    if isinstance(value, str):
        return Attribute(name=name, string_val=value)
    made = Attribute(name=name)
    # Set the list even when it is empty, so that the attribute has a value.
    made.int64_list.SetInParent()
    made.int64_list.values.extend(value)
    return made


def attributes(message: Any) -> dict[str, Any]:
    """Return a message's attributes by name, as plain Python values and lists of them."""
    found: dict[str, Any] = {}
    for item in message.attr:
        kind = item.WhichOneof("value")
        if kind is not None:
            value = getattr(item, kind)
            found[item.name] = list(value.values) if kind.endswith("_list") else value
    return found


def framed(message: Any) -> bytes:
    """Return a message in bytes, preceded by its length (base-128 varint)."""
    body = message.SerializeToString()
    length, head = len(body), bytearray()
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return bytes(head) + body


def write_message(file: IO[bytes], message: Any) -> None:
    """Append one message."""
    file.write(framed(message))


def read_messages(name: str, file: IO[bytes]) -> Iterator[Any]:
    """Yield the metadata, then the nodes, one at a time.

    Raises:
        FormatError: the file is truncated, or not a Chakra trace.
    """
    kind = GlobalMetadata
    while (length := _read_length(name, file)) is not None:
        if length > LARGEST_MESSAGE:
            raise FormatError(f"{name}: a message of {length:,} bytes; not a Chakra trace")
        body = file.read(length)
        if len(body) < length:
            raise FormatError(f"{name}: truncated within a message")
        try:
            yield kind.FromString(body)
        except DecodeError as error:
            raise FormatError(f"{name}: not a Chakra trace ({error})") from error
        kind = Node
    if kind is GlobalMetadata:
        raise FormatError(f"{name}: empty; a Chakra trace begins with its metadata")


def _read_length(name: str, file: IO[bytes]) -> int | None:
    length = 0
    for shift in range(0, 64, 7):
        byte = file.read(1)
        if not byte:
            if shift == 0:
                return None
            raise FormatError(f"{name}: truncated within a length")
        length |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return length
    raise FormatError(f"{name}: not a Chakra trace (a length of more than 9 bytes)")

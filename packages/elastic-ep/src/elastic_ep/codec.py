"""Messages as bytes: a version byte, a checksum of the rest, then zlib over compact JSON lists.

The layout of a record is its fields in order, so it follows the declared types; nothing else can come out
of `decode`.
"""

import base64
import binascii
import enum
import functools
import json
import zlib
from collections.abc import Sequence
from types import NoneType
from typing import Any, get_args, get_type_hints

import attrs

from elastic_ep.errors import PlanError, WireError
from elastic_ep.wire import MESSAGES, Message

VERSION = 1
LARGEST = 1 << 26
"""Bytes a message may have when unpacked."""


def encode(record: Any, kinds: Sequence[type[Any]] = MESSAGES) -> bytes:
    """One record of one of these kinds as bytes."""
    body = [kinds.index(type(record)), _pack(record)]
    packed = zlib.compress(json.dumps(body, separators=(",", ":")).encode(), level=1)
    return bytes([VERSION]) + zlib.crc32(packed).to_bytes(4) + packed


def decode(data: bytes) -> Message:
    """The message that was encoded; WireError for anything else."""
    message = decode_any(data, MESSAGES)
    assert isinstance(message, Message)
    return message


def decode_any(data: bytes, kinds: Sequence[type[Any]]) -> Any:
    """The record of one of these kinds that was encoded; WireError for anything else."""
    if data[:1] != bytes([VERSION]):
        raise WireError(
            f"the first byte is {data[:1]!r}; this version reads messages that start with {VERSION}"
        )
    if int.from_bytes(data[1:5]) != zlib.crc32(data[5:]):
        raise WireError(f"{len(data)} bytes do not match their checksum: damaged or cut short")
    try:
        kind, fields = json.loads(_inflate(data[5:]))
        return _unpack(fields, kinds[_unpack(kind, int)])
    except (ValueError, TypeError, IndexError, PlanError, zlib.error) as error:
        raise WireError(f"{len(data)} bytes are no message: {error}") from error


def _inflate(data: bytes) -> bytes:
    inflater = zlib.decompressobj()
    body = inflater.decompress(data, LARGEST)
    if not inflater.eof or inflater.unused_data:
        raise ValueError("cut short, too large, or followed by more")
    return body


def _pack(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return [_pack(item) for item in value]
    if attrs.has(type(value)):
        return [_pack(getattr(value, field.name)) for field in attrs.fields(type(value))]
    return value


def _unpack(value: Any, kind: Any) -> Any:
    """``value`` as JSON gave it, checked against and turned into the declared type."""
    options = get_args(kind)
    if NoneType in options:
        return None if value is None else _unpack(value, options[0])
    if options:
        kinds = [options[0]] * len(value) if options[-1] is Ellipsis else options
        return tuple(_unpack(item, kind) for item, kind in zip(_list(value), kinds, strict=True))
    if attrs.has(kind):
        fields = zip(_list(value), _field_types(kind), strict=True)
        return kind(*(_unpack(item, field) for item, field in fields))
    if kind is bytes:
        return _bytes(value)
    if issubclass(kind, enum.Enum):
        return kind(value)
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {value!r}")
    return value


@functools.cache
def _field_types(kind: type[Any]) -> tuple[Any, ...]:
    """The declared types of a record's fields, in order: slow to find out, and asked for every message."""
    hints = get_type_hints(kind)
    return tuple(hints[field.name] for field in attrs.fields(kind))


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, got {value!r}")
    return value


def _bytes(value: Any) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error

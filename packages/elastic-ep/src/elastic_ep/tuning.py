"""What a rank has found out about how its programs run best, where joiners can read it.

As long as it may be, in a region of fixed size: the length, then the bytes.
"""

import ctypes

import torch

from elastic_ep.errors import ServeError
from elastic_ep.transport import Span, Transport

CAPACITY = 1 << 20
"""Bytes at most."""

REGION = "tuning"
LENGTH = Span(REGION, 0, REGION, 0, 8)


class Tuning:
    """One rank's, or what it has read of another's. Registers, so the transport's card comes after this."""

    def __init__(self, transport: Transport) -> None:
        self._bytes = torch.zeros(LENGTH.size + CAPACITY, dtype=torch.uint8)
        transport.register(REGION, self._bytes)

    @property
    def found(self) -> bytes:
        return ctypes.string_at(self._bytes.data_ptr() + LENGTH.size, self._length)

    def contents(self) -> list[Span]:
        """What is left to be read once the length has been."""
        if not self._length:
            return []
        return [Span(REGION, LENGTH.size, REGION, LENGTH.size, self._length)]

    def keep(self, found: bytes) -> None:
        """Raises ServeError if it is too long."""
        if len(found) > CAPACITY:
            raise ServeError(f"{len(found)} bytes of tuning results: more than {CAPACITY}")
        if found:
            self._bytes[LENGTH.size : LENGTH.size + len(found)] = torch.frombuffer(
                bytearray(found), dtype=torch.uint8
            )
        self._bytes[: LENGTH.size].view(torch.int64)[0] = len(found)

    @property
    def _length(self) -> int:
        return int(self._bytes[: LENGTH.size].view(torch.int64)[0])

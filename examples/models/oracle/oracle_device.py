"""The oracle's device: a queue with a timeline, and what it keeps from one decode to the next."""

import time
from collections.abc import Callable

import attrs
import numpy as np
from oracle_memory import OracleError, require
from oracle_text import Ints
from torch import Tensor
from tt_sampling import TTSamplingParams

DEPTH = 2
"""Decodes that may be unread: one that is computed, and one that waits behind it."""


@attrs.define(eq=False)
class Handle:
    """An output on its way to the host. It cannot be read before it was waited for."""

    value: Tensor
    ready_at: float
    wait_until: Callable[[float], None]
    arrived: bool = False
    read: bool = False

    def synchronize(self) -> None:
        self.wait_until(self.ready_at)
        self.arrived = True


@attrs.define
class Timeline:
    """Calls return at once; the device works them off one after the other."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    _free_at: float = attrs.field(default=0.0, init=False)
    _unread: list[Handle] = attrs.field(factory=list, init=False)

    @property
    def unread(self) -> int:
        return len(self._unread)

    def prefill(self) -> None:
        """Run a prefill, and wait for it."""
        self._free_at = max(self._free_at, self.clock()) + self.prefill_s
        self._wait_until(self._free_at)

    def decode(self, value: Tensor) -> Handle:
        """Queue a decode that gives `value`."""
        self._free_at = max(self._free_at, self.clock()) + self.decode_s
        handle = Handle(value, self._free_at, self._wait_until)
        self._unread.append(handle)
        require(self.unread <= DEPTH, f"{self.unread} decodes are under way, and nobody reads them")
        return handle

    def finish(self, handle: Handle) -> Tensor:
        """What the host reads: once, in order, and not before its time."""
        if not handle.arrived:
            raise OracleError("a decode is read before its event was waited for")
        require(not handle.read, "a decode is read twice")
        require(self._unread and self._unread[0] is handle, "a decode is read before the one ahead of it")
        handle.read = True
        self._unread.pop(0)
        return handle.value

    def _wait_until(self, moment: float) -> None:
        while (left := moment - self.clock()) > 0:
            self.sleep(left)


@attrs.define
class Resident:
    """Inputs and sampling state of all rows. Only a reload command or a sampled token may change them."""

    tokens: Ints
    positions: Ints
    page_table: Ints
    params: TTSamplingParams | None = None
    prompts: list[list[int]] | None = None
    """By row, where a row has penalties; None where no row has."""
    outputs: list[list[int]] | None = None

    @classmethod
    def empty(cls, rows: int) -> "Resident":
        return cls(np.zeros(rows, np.int64), np.full(rows, -1, np.int64), np.zeros((rows, 0), np.int64))

    @property
    def live(self) -> list[int]:
        """Rows that somebody is in."""
        rows: list[int] = (self.positions >= 0).nonzero()[0].tolist()
        return rows

    def advance(self, ids: Ints) -> None:
        """Go on from the ids that were sampled."""
        self.tokens = ids.copy()
        for row in self.live:
            if self.outputs is not None:
                self.outputs[row].append(int(ids[row]))
        self.positions = self.positions + (self.positions >= 0)


def histories(tokens: Tensor | None) -> list[list[int]] | None:
    """Rows without their padding of -1."""
    if tokens is None:
        return None
    return [[token for token in row if token != -1] for row in tokens.tolist()]

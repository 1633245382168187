"""Which row of the persistent batch a request holds.

A request takes the lowest free row when it is admitted and keeps it until it finishes or is preempted.
Nothing is condensed, so whatever a device keeps per row stays where it is.
"""

import heapq
from collections.abc import Mapping
from types import MappingProxyType

import attrs

from tt_scheduler.errors import RowError


@attrs.define
class RowAccount:
    """The rows ``0 .. capacity - 1`` and their owners."""

    capacity: int = attrs.field(validator=attrs.validators.ge(1))
    _owned: dict[str, int] = attrs.field(factory=dict, init=False)
    _free: list[int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._free = list(range(self.capacity))

    @property
    def owned(self) -> Mapping[str, int]:
        """Request id to row, read only."""
        return MappingProxyType(self._owned)

    def take(self, request_id: str) -> int:
        """Give ``request_id`` the lowest free row.

        Raises ``RowError`` if it holds one already or none is free.
        """
        if request_id in self._owned:
            raise RowError(f"{request_id!r} holds row {self._owned[request_id]} already; release it first")
        if not self._free:
            raise RowError(f"no row is free for {request_id!r}: all {self.capacity} are held")
        row = heapq.heappop(self._free)
        self._owned[request_id] = row
        return row

    def claim(self, request_id: str, row: int) -> None:
        """Note that ``request_id`` was given ``row`` elsewhere; a copy of the account follows it this way.

        Raises ``RowError`` if the row is not free or the request holds one already.
        """
        if request_id in self._owned:
            raise RowError(f"{request_id!r} holds row {self._owned[request_id]} already, yet was given {row}")
        if row not in self._free:
            raise RowError(
                f"row {row} was given to {request_id!r} but is not free (capacity {self.capacity})"
            )
        self._free.remove(row)
        heapq.heapify(self._free)
        self._owned[request_id] = row

    def release(self, request_id: str) -> int | None:
        """Free the row of ``request_id`` and return it; None if it held none, which is no fault."""
        row = self._owned.pop(request_id, None)
        if row is not None:
            heapq.heappush(self._free, row)
        return row

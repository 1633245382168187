"""What one rank writes into the slots of the others.

A slot is written as so many sixteenths as hold what is used of it. So there are few kinds of writes, and all
of them can be made ready before the first.
"""

import functools
from collections.abc import Iterator

from elastic_ep.lane_shape import LaneShape
from elastic_ep.transport import Flag, Span

PARTS = 16
KEPT = 4096
"""Writes that are not put together anew each time, the latest ones."""

Write = tuple[tuple[Span, ...], Flag]


class Writes:
    """Of ``rank``; ``head`` and ``slot`` are the sizes in bytes of a slot's head and of its rows."""

    def __init__(self, rank: int, shape: LaneShape, head: int, slot: int) -> None:
        self._rank = rank
        self._rows = shape.rows
        self._part = -(-shape.rows // PARTS)
        self._head = head
        self._slot = slot
        self._of = functools.lru_cache(KEPT)(self._first_rows)

    def dispatch(self, rank: int, used: int, flag: int) -> Write:
        """Head and rows for another rank's experts."""
        spans = self._of("lane.out", "lane.in", rank, self._parts(used), "lane.out_head", "lane.in_head")
        return spans, Flag("lane.arrived", self._rank, flag)

    def give_back(self, rank: int, used: int, flag: int) -> Write:
        """What this rank's experts made of another's rows."""
        spans = self._of("lane.results", "lane.back", rank, self._parts(used))
        return spans, Flag("lane.returned", self._rank, flag)

    def every(self, rank: int) -> Iterator[Write]:
        """All that there can be to a rank, with flags of any value."""
        for used in sorted({min(parts * self._part, self._rows) for parts in range(PARTS + 1)}):
            yield self.dispatch(rank, used, 0)
            yield self.give_back(rank, used, 0)

    def _parts(self, used: int) -> int:
        return -(-used // self._part)

    def _first_rows(
        self, here: str, there: str, rank: int, parts: int, head: str = "", head_there: str = ""
    ) -> tuple[Span, ...]:
        """The head, if one goes with them, and the rows, if there are any."""
        spans = []
        if head:
            spans.append(Span(head, rank * self._head, head_there, self._rank * self._head, self._head))
        if parts:
            size = min(parts * self._part, self._rows) * (self._slot // self._rows)
            spans.append(Span(here, rank * self._slot, there, self._rank * self._slot, size))
        return tuple(spans)

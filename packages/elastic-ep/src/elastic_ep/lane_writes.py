"""What one rank writes into the slots of the others.

A slot is written in one of a few lengths, the shortest that holds what is used of it: 1, 2, 3, 4, 6, 8, 12
rows and so on, at most half more than is used. So all kinds of writes can be made ready before the first.
"""

import bisect
import functools
import itertools
from collections.abc import Iterator

from elastic_ep.lane_shape import LaneShape
from elastic_ep.transport import Flag, Span

KEPT = 4096
"""Writes that are not put together anew each time, the latest ones."""

Write = tuple[tuple[Span, ...], Flag]


class Writes:
    """Of ``rank``; ``head`` and ``slot`` are the sizes in bytes of a slot's head and of its rows."""

    def __init__(self, rank: int, shape: LaneShape, head: int, slot: int) -> None:
        self._rank = rank
        self._lengths = lengths(shape.rows)
        self._head = head
        self._slot = slot
        self._row = slot // shape.rows
        self._dispatched = functools.lru_cache(KEPT)(self._head_and_rows)
        self._given_back = functools.lru_cache(KEPT)(self._results)

    def dispatch(self, rank: int, used: int, flag: int) -> Write:
        """Head and rows for another rank's experts."""
        return self._dispatched(rank, self._whole(used)), Flag("lane.arrived", self._rank, flag)

    def give_back(self, rank: int, used: int, flag: int) -> Write:
        """What this rank's experts made of another's rows."""
        return self._given_back(rank, self._whole(used)), Flag("lane.returned", self._rank, flag)

    def every(self, rank: int) -> Iterator[Write]:
        """All that there can be to a rank, with flags of any value."""
        for used in self._lengths:
            yield self.dispatch(rank, used, 0)
            yield self.give_back(rank, used, 0)

    def _whole(self, used: int) -> int:
        return self._lengths[bisect.bisect_left(self._lengths, used)]

    def _head_and_rows(self, rank: int, rows: int) -> tuple[Span, ...]:
        head = Span("lane.out_head", rank * self._head, "lane.in_head", self._rank * self._head, self._head)
        return head, *self._rows("lane.out", "lane.in", rank, rows)

    def _results(self, rank: int, rows: int) -> tuple[Span, ...]:
        return self._rows("lane.results", "lane.back", rank, rows)

    def _rows(self, here: str, there: str, rank: int, rows: int) -> tuple[Span, ...]:
        """The first ones of a slot: nothing, or one span."""
        span = Span(here, rank * self._slot, there, self._rank * self._slot, rows * self._row)
        return (span,) if rows else ()


def lengths(rows: int) -> list[int]:
    """In how many rows a slot of so many is written."""
    steps = (length for power in itertools.count() for length in (1 << power, 3 << power >> 1))
    return sorted({0, rows, *itertools.takewhile(lambda length: length < rows, steps)})

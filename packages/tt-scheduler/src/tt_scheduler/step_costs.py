"""What a step of one kind takes by its size, learned from measured steps."""

import statistics
from collections import deque
from collections.abc import Iterable
from itertools import combinations

import attrs

WINDOW = 32
"""Newest steps that count. After a lasting change of the device, half as many teach the new times."""
REFIT = 4
"""New steps that make it worth the time to move the line."""
ACCIDENT = 2.0
"""A step that took more than this many times what a middling one of its size did counts as an accident."""


@attrs.frozen
class Line:
    """Seconds of a step: ``fixed_s`` and ``unit_s`` for each of its tokens or rows.

    Raises ``ValueError`` if either is negative or both are 0.
    """

    fixed_s: float = attrs.field(validator=attrs.validators.ge(0))
    unit_s: float = attrs.field(validator=attrs.validators.ge(0))

    def __attrs_post_init__(self) -> None:
        if self.fixed_s == self.unit_s == 0:
            raise ValueError(f"{self} says that steps take no time; give one of the two a positive value")

    def seconds(self, size: int) -> float:
        return self.fixed_s + self.unit_s * size

    def times(self, factor: float) -> "Line":
        return Line(self.fixed_s * factor, self.unit_s * factor)


@attrs.define
class LearnedCost:
    """A prior line that moves to what is measured.

    While sizes differ too little to tell a slope, the line keeps its shape and is scaled to the median
    measured step. Otherwise it is Theil and Sen's: the median slope over all pairs of steps. Neither follows
    a few wild steps, such as a program compiled on first use.
    """

    _line: Line
    _steps: deque[tuple[int, float]] = attrs.field(factory=lambda: deque(maxlen=WINDOW), init=False)
    _new: int = attrs.field(default=0, init=False)
    _uppers: dict[int, float] = attrs.field(factory=dict, init=False)

    def __bool__(self) -> bool:
        """Whether anything has been learned."""
        return bool(self._steps)

    def knows(self, size: int) -> bool:
        """Whether a step of about this size was measured; the line is stretched to all others."""
        return bool(self._near(size))

    def learn(self, size: int, seconds: float) -> None:
        """Take in one measured step. One of size 0 or without duration teaches nothing."""
        if size > 0 and seconds > 0:
            self._steps.append((size, seconds))
            self._new += 1
            self._uppers.clear()

    def expected_s(self, size: int) -> float:
        """Seconds of a middling step."""
        self._refit()
        return self._line.seconds(size)

    def upper_s(self, size: int) -> float:
        """Seconds that steps stay within, by how far those of about this size strayed above the line."""
        if size not in self._uppers:
            self._uppers[size] = self.expected_s(size) * self._stray(size)
        return self._uppers[size]

    def _stray(self, size: int) -> float:
        near = self._near(size)
        ratios = self._ratios(near if len(near) >= 4 else self._steps) or [1.0]
        limit = ACCIDENT * statistics.median_low(ratios)
        return max(1.0, *(ratio for ratio in ratios if ratio <= limit))

    def _near(self, size: int) -> list[tuple[int, float]]:
        return [step for step in self._steps if step[0] <= 2 * size and size <= 2 * step[0]]

    def _refit(self) -> None:
        """Move the line, at once while little is known, then at every few steps: it takes a while."""
        if self._new >= REFIT or (self._new and len(self._steps) < 2 * REFIT):
            scaled = self._line.times(statistics.median_low(self._ratios(self._steps)))
            self._line = _theil_sen(list(self._steps)) or scaled
            self._new = 0

    def _ratios(self, steps: Iterable[tuple[int, float]]) -> list[float]:
        return [seconds / self._line.seconds(size) for size, seconds in steps]


def _theil_sen(steps: list[tuple[int, float]]) -> Line | None:
    """The median line through steps; None if they are few or much alike in size."""
    sizes = [size for size, _ in steps]
    if len(steps) < 2 * REFIT or max(sizes) < 2 * min(sizes):
        return None
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(steps, 2) if a[0] != b[0]]
    slope = max(0.0, statistics.median(slopes))
    fixed = statistics.median(seconds - slope * size for size, seconds in steps)
    if fixed < 0:
        return Line(0.0, statistics.median(seconds / size for size, seconds in steps))
    return Line(fixed, slope)

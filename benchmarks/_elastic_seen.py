"""What the records of ranks say: gaps at commits, steps in between, steps lost."""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable

import attrs
from elastic_ep.testing.toy_group import Record

Records = dict[tuple[int, int], list[Record]]


@attrs.frozen
class Window:
    """From when to when, on the clock that all processes of a host share."""

    start: float
    end: float

    def holds(self, at: float) -> bool:
        return self.start <= at <= self.end


def gaps(records: Records) -> dict[int, float]:
    """For each epoch the longest time, over the ranks, from the last step before it to its first."""
    found: dict[int, float] = defaultdict(float)
    for before, after in _pairs(records):
        if before["epoch"] != after["epoch"]:
            found[after["epoch"]] = max(found[after["epoch"]], after["at"] - before["at"])
    return found


def intervals(records: Records, windows: Iterable[Window]) -> list[float]:
    """Times from step to step inside the windows, of all ranks."""
    windows = list(windows)
    return [
        after["at"] - before["at"]
        for before, after in _pairs(records)
        if any(window.holds(before["at"]) and window.holds(after["at"]) for window in windows)
    ]


def longest(records: Records, windows: Iterable[Window]) -> list[float]:
    """For each step inside the windows that changes nothing, the longest time from the one before it, over
    the ranks."""
    found: dict[int, float] = defaultdict(float)
    windows = list(windows)
    for before, after in _pairs(records):
        if before["epoch"] == after["epoch"] and any(
            window.holds(before["at"]) and window.holds(after["at"]) for window in windows
        ):
            found[after["step"]] = max(found[after["step"]], after["at"] - before["at"])
    return list(found.values())


def rate(records: Records, windows: Iterable[Window]) -> float:
    """Steps a second of a rank inside the windows, all of them together."""
    windows = list(windows)
    rates = []
    for seen in records.values():
        steps = [record["at"] for record in seen if record["kind"] == "Stepped"]
        covered = [
            window for window in windows if steps and steps[0] < window.start and steps[-1] > window.end
        ]
        if covered:
            count = sum(window.holds(at) for window in covered for at in steps)
            rates.append(count / sum(window.end - window.start for window in covered))
    return statistics.median(rates)


def flips(records: Records) -> list[Record]:
    return [record for seen in records.values() for record in seen if record["kind"] == "Flipped"]


def _pairs(records: Records) -> list[tuple[Record, Record]]:
    """Steps that follow each other in one process."""
    found = []
    for seen in records.values():
        steps = [record for record in seen if record["kind"] == "Stepped"]
        found += list(itertools.pairwise(steps))
    return found

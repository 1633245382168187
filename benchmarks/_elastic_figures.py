"""The figures that `benchmarks/elastic.py` makes of what its groups did."""

import statistics
from collections.abc import Callable

import attrs
from _elastic_modes import Course
from _elastic_seen import Records, Window, flips, gaps, intervals, longest
from _form import Figure
from elastic_ep.testing.toy_group import lost

Operations = list[tuple[Window, range]]


@attrs.define
class Seen:
    """What one group did: when it was left alone with how many ranks, when it grew and shrank, into which
    epochs, and what the memory of ranks was."""

    records: Records
    quiet: dict[int, list[Window]]
    growing: Operations
    shrinking: Operations
    mib: dict[int, float]
    peak_mib: list[float]

    def step(self, ranks: int) -> float:
        return statistics.median(intervals(self.records, self.quiet[ranks]))

    def worst(self, operations: Operations) -> float:
        """Median over operations of the longest gap of each."""
        seen = gaps(self.records)
        return statistics.median(max(seen[epoch] for epoch in epochs) for _, epochs in operations)


def compare(course: Course, a: Seen, b: Seen, c: Seen) -> list[Figure]:
    name = course.name
    found: list[Figure] = []
    ways: tuple[tuple[str, float, int, Callable[[Seen], Operations]], ...] = (
        ("growing", 121.0, course.many, lambda seen: seen.growing),
        ("shrinking", 29.0, course.few, lambda seen: seen.shrinking),
    )
    for word, aim, ranks, pick in ways:
        step = c.step(ranks)
        least = step / 4
        added = {key: seen.worst(pick(seen)) - step for key, seen in (("a", a), ("b", b), ("c", c))}
        ratios = {key: added[key] / max(added["c"], least) for key in ("a", "b")}
        told = ", ".join(f"{key.upper()} {1e3 * (value + step):.1f}" for key, value in added.items())
        note = f"gaps in ms: {told}; step {1e3 * step:.1f}; at best {added['a'] / least:.0f}"
        found.append(Figure(f"{name}_{word}_a_over_c_ratio", ratios["a"], at_least=aim, note=note))
        found.append(Figure(f"{name}_{word}_b_over_c_ratio", ratios["b"]))
    return found


def in_place(course: Course, c: Seen) -> list[Figure]:
    """What mode C must hold at every commit."""
    name, seen = course.name, gaps(c.records)
    commits = [epoch for _, epochs in (*c.growing, *c.shrinking) for epoch in epochs]
    times = [seen[epoch] for epoch in commits]
    quiet = intervals(c.records, (*c.quiet[course.few], *c.quiet[course.many]))
    switched = [flip for flip in flips(c.records) if flip["epoch"] in commits]
    work = [1e3 * flip["work"] for flip in switched]
    wall = statistics.median(1e3 * flip["seconds"] for flip in switched)
    p99 = statistics.quantiles(quiet, n=100)[98]
    usual = statistics.median(longest(c.records, (*c.quiet[course.few], *c.quiet[course.many])))
    return [
        Figure(
            f"{name}_gap_over_step_ratio",
            statistics.median(times) / statistics.median(quiet),
            at_most=2,
            note=f"{len(times)} commits, median {1e3 * statistics.median(times):.1f} ms",
        ),
        Figure(
            f"{name}_usual_gap_over_step_ratio",
            usual / statistics.median(quiet),
            note="the same of steps at which nothing happens: the longest of all ranks",
        ),
        Figure(
            f"{name}_worst_gap_over_p99_ratio", max(times) / p99, at_most=1.5, note=f"p99 {1e3 * p99:.1f} ms"
        ),
        Figure(
            f"{name}_commit_work_ms", max(work), at_most=1, note=f"core time; median on the wall {wall:.2f}"
        ),
        Figure(f"{name}_steps_lost", lost(c.records), at_most=0),
        Figure(f"{name}_captures_after_start", max(flip["captures"] for flip in switched) - 1, at_most=0),
    ]


def footprint(course: Course, a: Seen, c: Seen) -> list[Figure]:
    name = course.name
    return [
        Figure(f"{name}_rank_pss_few_mib", c.mib[course.few]),
        Figure(f"{name}_rank_pss_many_mib", c.mib[course.many]),
        Figure(
            f"{name}_commit_peak_c_mib", max(c.peak_mib), note="above the memory before, of a rank that stays"
        ),
        Figure(f"{name}_commit_peak_a_mib", max(a.peak_mib)),
    ]

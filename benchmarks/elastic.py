"""What it costs an expert-parallel group to grow and shrink while it serves, with real processes over NIXL.

Mode C switches tables between two steps; B is C with programs that must be captured again at each commit; A
prepares nothing and does all of it while nobody serves; a restart starts the service anew. A gap is the time
from a rank's last step under the old placement to its first under the new one, where it is longest; of an
operation that takes several commits, the longest one. Ratios are of what gaps add to the median step of as
many ranks. Every result of every step is checked against the dense computation, inside the step.
"""

import contextlib
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
from _elastic_figures import Seen, compare, footprint, in_place
from _elastic_modes import Course, run_blocking
from _elastic_seen import Window, flips, rate
from _form import Figure, main, table
from elastic_ep import Launcher, Patience, Phase, Runner, resize, run_rank
from elastic_ep.testing.toy_group import ENVIRONMENT, ToyGroup

SECONDS = 400.0
PATIENCE = Patience(lease=10.0, suspect=5.0, prepare=400.0, give_up=200.0)
WARM = ("elastic_ep.testing.toy_group", "nixl._api", "_elastic_modes")
COMPILER = "elastic_ep.runner_compiled:warm"


def launcher(course: Course) -> Launcher:
    modules = (*WARM, COMPILER) if course.compiles else WARM
    return Launcher(modules, {**ENVIRONMENT, "PYTHONPATH": str(Path(__file__).resolve().parent)})


@contextlib.contextmanager
def serving(
    course: Course,
    nursery: Launcher,
    runner: Callable[[], Runner],
    run: Callable[..., None],
    niceness: int = 0,
) -> Iterator[ToyGroup]:
    with tempfile.TemporaryDirectory() as folder:
        toy = ToyGroup.start(
            nursery, course.config, Path(folder), PATIENCE, runner, niceness=niceness, run=run
        )
        try:
            toy.group.scale(range(course.few), SECONDS)
            toy.await_steps(5, SECONDS)
            yield toy
        finally:
            toy.group.close()


def live(course: Course, toy: ToyGroup, cycles: int) -> Seen:
    """Grow and shrink again and again, with quiet in between."""
    seen = Seen({}, {course.few: [], course.many: []}, [], [], {}, [])
    for _ in range(cycles):
        for ranks, operations in ((course.many, seen.growing), (course.few, seen.shrinking)):
            seen.quiet[course.few + course.many - ranks].append(be_quiet(course, toy))
            staying = [toy.group.pids[rank] for rank in range(course.few)]
            before = [memory(pid)["VmRSS"] for pid in staying]
            forget_peaks(staying)
            operations.append(operate(toy, ranks))
            peaks = [memory(pid)["VmHWM"] for pid in staying]
            seen.peak_mib.append(max(peak - rss for peak, rss in zip(peaks, before, strict=True)))
            seen.mib[ranks] = statistics.mean(pss(pid) for pid in toy.group.pids.values())
    seen.quiet[course.few].append(be_quiet(course, toy))
    seen.records = toy.records()
    return seen


def operate(toy: ToyGroup, ranks: int) -> tuple[Window, range]:
    """Scale; from the order to the end, and the epochs that it took."""
    start, epoch = time.monotonic(), toy.group.state().epoch
    toy.group.scale(range(ranks), SECONDS)
    window = Window(start, time.monotonic())
    toy.await_steps(2, SECONDS)
    return window, range(epoch + 1, toy.group.state().epoch + 1)


def be_quiet(course: Course, toy: ToyGroup) -> Window:
    toy.await_steps(3, SECONDS)
    start = time.monotonic()
    time.sleep(course.quiet)
    return Window(start, time.monotonic())


def modes(course: Course, nursery: Launcher) -> tuple[Seen, Seen, Seen]:
    """A, B and C, one after the other."""
    found = []
    for runner, run, cycles in (
        (course.runner(), run_blocking, course.baseline_cycles),
        (course.runner(anew=True), run_rank, course.baseline_cycles),
        (course.runner(), run_rank, course.cycles),
    ):
        with serving(course, nursery, runner, run) as toy:
            found.append(live(course, toy, cycles))
    return found[0], found[1], found[2]


def throughput(course: Course, nursery: Launcher, c: Seen) -> list[Figure]:
    """Steps a second while a joiner starts and prepares, against those when it is quiet."""

    def ratio(seen: Seen) -> float:
        switches = {flip["epoch"]: flip["at"] for flip in flips(seen.records)}
        preparing = [Window(window.start, switches[epochs[0]]) for window, epochs in seen.growing]
        return rate(seen.records, preparing) / rate(seen.records, seen.quiet[course.few])

    with serving(course, nursery, course.runner(), run_rank, niceness=19) as toy:
        lowest = live(course, toy, max(2, course.cycles // 3))
    return [
        Figure(f"{course.name}_preparing_normal_ratio", ratio(c)),
        Figure(f"{course.name}_preparing_lowest_ratio", ratio(lowest), at_least=0.9),
    ]


def recovery(course: Course, nursery: Launcher, kills: int) -> list[Figure]:
    """From the death of a rank to the first step that the last of the others completes without it."""
    times = []
    with serving(course, nursery, course.runner(), run_rank) as toy:
        for nth in range(kills):
            plan = resize(toy.group.state().placement, range(course.few), min_replicas=2)
            toy.group.finish(toy.group.begin(plan), SECONDS)
            toy.await_steps(5, SECONDS)
            epoch, victim = toy.group.state().epoch, (0, course.few - 1)[nth % 2]
            killed = time.monotonic()
            os.kill(toy.group.pids[victim], signal.SIGKILL)
            while (state := toy.group.state()).epoch == epoch or state.phase != Phase.STABLE:
                time.sleep(0.01)
            toy.await_steps(2, SECONDS)
            firsts = (
                next((r["at"] for r in seen if r["kind"] == "Stepped" and r["epoch"] == state.epoch), None)
                for seen in toy.records().values()
            )
            times.append(1e3 * (max(at for at in firsts if at is not None) - killed))
    note = f"{kills} ranks killed"
    return [
        Figure(f"{course.name}_recovery_median_ms", statistics.median(times), at_most=50, note=note),
        Figure(f"{course.name}_recovery_worst_ms", max(times), at_most=1000),
    ]


def restart(course: Course, c: Seen) -> Figure:
    """Everything ends and starts again with more ranks, imports included."""
    start = time.monotonic()
    nursery = launcher(course)
    more = attrs.evolve(course, few=course.many)
    with serving(more, nursery, course.runner(), run_rank) as toy:
        firsts = [next(r["at"] for r in seen if r["kind"] == "Stepped") for seen in toy.records().values()]
    nursery.close()
    added = c.worst(c.growing) - c.step(course.many)
    ratio = (max(firsts) - start) / max(added, c.step(course.many) / 4)
    return Figure(f"{course.name}_restart_over_c_ratio", ratio, note=f"{max(firsts) - start:.1f} s")


def run(course: Course, kills: int = 0) -> list[Figure]:
    nursery = launcher(course)
    try:
        a, b, c = modes(course, nursery)
        found = compare(course, a, b, c) + in_place(course, c) + footprint(course, a, c)
        if kills:
            found += throughput(course, nursery, c) + recovery(course, nursery, kills)
    finally:
        nursery.close()
    found.append(restart(course, c))
    print(table(course.name, found), file=sys.stderr, flush=True)
    return found


def measure(quick: bool) -> list[Figure]:
    if quick:
        return run(Course(4, 5, cycles=3, baseline_cycles=1), kills=3)
    return [
        *run(Course(4, 5, cycles=5, baseline_cycles=3, quiet=2.0), kills=9),
        *run(Course(4, 5, cycles=4, baseline_cycles=2, compiles=True, quiet=2.0)),
        *run(Course(16, 20, cycles=4, baseline_cycles=2, quiet=4.0)),
    ]


def memory(pid: int) -> dict[str, float]:
    """Fields of a process's status that are in kB, in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines if line.endswith(" kB")}


def pss(pid: int) -> float:
    """Its share of the memory that it uses, in MiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:"))


def forget_peaks(pids: list[int]) -> None:
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")


if __name__ == "__main__":
    main(__file__, __doc__, measure)

"""The form that every benchmark has, so that people and scripts read all of them alike.

    python benchmarks/NAME.py            a table
    python benchmarks/NAME.py --json     the table, and as the last line one JSON object
    python benchmarks/NAME.py --quick    fewer repeats: ends within a minute, good for a look
    python benchmarks/NAME.py --save     keeps the JSON object in benchmarks/results/NAME.json

A benchmark file holds `measure(quick) -> list[Figure]` and ends with `main(__file__, __doc__, measure)`.
Its exit status says that it ran; whether its aims hold is in the output: another machine may miss them.
"""

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import attrs

RESULTS = Path(__file__).resolve().parent / "results"
MEMBERS = ("tt-vllm-plugin", "tt-registry", "tt-scheduler", "tt-sampling", "elastic-ep")
UPSTREAMS = ("vllm", "torch", "ttnn", "nixl")

type Json = dict[str, object]


@attrs.frozen
class Figure:
    """One measured number. The name ends in its unit (`step_ms`, `peak_mib`, `overhead_ratio`)."""

    name: str
    value: float
    at_most: float | None = None
    at_least: float | None = None
    note: str = ""

    @property
    def aim(self) -> dict[str, float]:
        """The limits set for this figure; empty where it only informs."""
        limits = {"at_most": self.at_most, "at_least": self.at_least}
        return {word: limit for word, limit in limits.items() if limit is not None}

    @property
    def holds(self) -> bool:
        return (self.at_most is None or self.value <= self.at_most) and (
            self.at_least is None or self.value >= self.at_least
        )


@attrs.frozen
class Comparison:
    """What `interleave` saw: the measurements of both sides, round by round."""

    a: tuple[float, ...]
    b: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median of a over median of b."""
        return statistics.median(self.a) / statistics.median(self.b)

    @property
    def spread(self) -> tuple[float, float]:
        """Lowest and highest ratio of a round's a to its b."""
        rounds = [a / b for a, b in zip(self.a, self.b, strict=True)]
        return min(rounds), max(rounds)

    def figure(self, name: str, at_most: float | None = None, at_least: float | None = None) -> Figure:
        """The ratio as a figure, its spread and number of rounds in the note."""
        low, high = self.spread
        note = f"{low:.3g} to {high:.3g} in {len(self.a)} rounds"
        return Figure(name, self.ratio, at_most, at_least, note)


def interleave(a: Callable[[], float], b: Callable[[], float], rounds: int) -> Comparison:
    """Measure A B A B ..., so that what drifts on the machine meets both sides alike.

    Each callable does its work once and returns its own measurement, in any unit that both share.
    """
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}, expected 1 or more")
    pairs = [(a(), b()) for _ in range(rounds)]
    return Comparison(tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))


def machine() -> Json:
    """What the numbers depend on; nothing that names the host."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def versions() -> Json:
    """Versions of Python and of what is installed among the things that matter here."""
    found: Json = {"python": platform.python_version()}
    for name in MEMBERS + UPSTREAMS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def report(name: str, figures: Sequence[Figure], quick: bool) -> Json:
    """The object that `--json` prints and `--save` keeps."""
    return {
        "name": name,
        "quick": quick,
        "figures": {figure.name: figure.value for figure in figures},
        "aims": {figure.name: {**figure.aim, "holds": figure.holds} for figure in figures if figure.aim},
        "holds": all(figure.holds for figure in figures),
        "machine": machine(),
        "versions": versions(),
    }


def table(name: str, figures: Sequence[Figure]) -> str:
    """Figures in columns: value, aim and whether it holds, note."""
    words = {"at_most": "at most", "at_least": "at least"}
    rows = [(name, "", "", "")]
    for figure in figures:
        aim = ", ".join(f"{words[word]} {limit:g}" for word, limit in figure.aim.items())
        verdict = aim and f"{aim}: {'holds' if figure.holds else 'MISSED'}"
        rows.append((f"  {figure.name}", f"{figure.value:.4g}", verdict, figure.note))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:<{widths[2]}}  {row[3]}".rstrip()
        for row in rows
    )


def main(
    file: str,
    description: str | None,
    measure: Callable[[bool], Sequence[Figure]],
    arguments: Sequence[str] | None = None,
    results: Path = RESULTS,
) -> None:
    """Run one benchmark file as a command; `measure` is called once, with whether to be quick."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="fewer repeats: end within a minute")
    parser.add_argument("--save", action="store_true", help=f"keep the object in {results.name}/")
    chosen = parser.parse_args(arguments)
    if chosen.save and chosen.quick:
        parser.error("--save keeps full results: leave out --quick")
    name = Path(file).stem
    figures = measure(chosen.quick)
    print(table(name, figures))
    outcome = report(name, figures, chosen.quick)
    if chosen.save:
        results.mkdir(exist_ok=True)
        (results / f"{name}.json").write_text(json.dumps(outcome, indent=2) + "\n")
    if chosen.json:
        print(json.dumps(outcome))

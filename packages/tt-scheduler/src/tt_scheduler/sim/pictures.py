"""Pictures of runs. They need matplotlib: install ``tt-scheduler[plot]``."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from tt_scheduler.sim.engine import Run
from tt_scheduler.sim.metrics import summarize

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PREFILL_COLOUR, DECODE_COLOUR = "tab:orange", "tab:blue"


def draw(runs: Mapping[str, Run], folder: Path) -> list[Path]:
    """Draw runs of the same arrivals, by name of policy, into ``times.png`` and ``phases.png``.

    Raises ``ImportError`` without matplotlib.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return [_times(runs, folder / "times.png"), _phases(runs, folder / "phases.png")]


def _times(runs: Mapping[str, Run], path: Path) -> Path:
    """Who waited how long for a first token and between two, and tokens per second."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    first, between, speed = figure.subplots(1, 3)
    for name, run in runs.items():
        served = run.requests
        _shares_above(first, name, [r.token_times[0] - r.arrival.at_s for r in served])
        gaps = [after - before for r in served for before, after in pairwise(r.token_times)]
        _shares_above(between, name, gaps)
        if gaps:  # without any, matplotlib refuses a log scale
            between.set(xscale="log", yscale="log")
    first.set(title="time to first token", xlabel="seconds", ylabel="share of requests that wait longer")
    between.set(title="gap between tokens", xlabel="seconds", ylabel="share of gaps that are longer")
    for axes in (first, between):
        axes.grid(alpha=0.3)
    first.legend(fontsize="small")
    names = list(runs)
    bars = speed.barh(names, [summarize(run).tokens_per_s for run in runs.values()], color="tab:grey")
    speed.bar_label(bars, fmt="%.0f", label_type="center", color="white")
    speed.invert_yaxis()
    speed.set(title="throughput", xlabel="generated tokens per second")
    figure.savefig(path, dpi=120)
    return path


def _shares_above(axes: "Axes", name: str, seconds: list[float]) -> None:
    ordered = sorted(seconds)
    shares = [(len(ordered) - rank) / len(ordered) for rank in range(len(ordered))]
    axes.step(ordered, shares, where="post", label=name)


def _phases(runs: Mapping[str, Run], path: Path) -> Path:
    """What each lane computed when: one panel for each policy, one bar for each lane."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = max((len(step.lane_prefills) for run in runs.values() for step in run.steps), default=1)
    figure = Figure(figsize=(13, 0.8 + len(runs) * (0.7 + 0.3 * lanes)), layout="constrained")
    panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, run) in zip(panels, runs.items(), strict=True):
        for lane in range(lanes):
            for phase, colour, low in (("prefill", PREFILL_COLOUR, -0.4), ("decode", DECODE_COLOUR, 0.0)):
                bars = _bars(run, lane, phase)
                axes.broken_barh(bars, (lane + low, 0.4), facecolors=colour, linewidth=0)
        axes.set(title=name, yticks=range(lanes), yticklabels=[f"lane {lane}" for lane in range(lanes)])
        axes.invert_yaxis()
    panels[-1].set_xlabel("seconds")
    legend = [Patch(color=PREFILL_COLOUR, label="prefill"), Patch(color=DECODE_COLOUR, label="decode")]
    figure.legend(handles=legend, loc="outside upper right", ncols=2)
    figure.savefig(path, dpi=120)
    return path


def _bars(run: Run, lane: int, phase: str) -> list[tuple[float, float]]:
    """Start and length of each stretch in which the lane computed something of the phase."""
    bars: list[tuple[float, float]] = []
    for step in run.steps:
        if (step.lane_prefills if phase == "prefill" else step.lane_decodes)[lane]:
            if bars and step.start_s - sum(bars[-1]) < 1e-9:
                bars[-1] = (bars[-1][0], bars[-1][1] + step.seconds)
            else:
                bars.append((step.start_s, step.seconds))
    return bars

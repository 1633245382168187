"""``python -m tt_scheduler simulate``."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import attrs

from tt_scheduler.sim.arrivals import TRACES, Arrival, read_arrivals
from tt_scheduler.sim.device import read_measured
from tt_scheduler.sim.engine import Run, Setup, simulate
from tt_scheduler.sim.metrics import summarize, table
from tt_scheduler.sim.modes import MODES, mode_named
from tt_scheduler.sim.pictures import draw
from tt_scheduler.sim.presets import PRESETS

DEFAULT_MODES = ["prefill-first", "interleave:2:1", "bounded-gap:1.0", "mixed"]


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(prog="tt_scheduler", description=__doc__)
    commands = command.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("simulate", help="serve a trace under several policies and compare them")
    run.add_argument("--preset", choices=PRESETS, default="t3k-70b", help="the device (default: %(default)s)")
    run.add_argument(
        "--policy",
        action="append",
        metavar="NAME",
        help=f"{', '.join(MODES)}; give it once for each column (default: {' '.join(DEFAULT_MODES)})",
    )
    run.add_argument(
        "--trace",
        default="chat",
        help=f"{', '.join(TRACES)}, or a file of JSON lines with at_s, prompt_tokens and output_tokens",
    )
    run.add_argument("--lanes", type=int, help="lanes in place of the preset's")
    run.add_argument("--jitter", type=float, default=0.0, help="steps stray by this share of their cost")
    run.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help="fit the costs to steps: JSON lines with prefills, decode_rows, changes_phase and seconds",
    )
    run.add_argument("--plot", type=Path, metavar="DIR", help="draw pictures (needs tt-scheduler[plot])")
    run.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    return command


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; what cannot be understood ends with exit status 2."""
    command = parser()
    chosen = command.parse_args(arguments)
    try:
        setup, runs = _runs(chosen)
        pictures = draw(runs, chosen.plot) if chosen.plot else []
    except ImportError as error:
        command.error(f"{error}; --plot needs matplotlib: install tt-scheduler[plot]")
    except (ValueError, OSError) as error:
        command.error(str(error))
    summaries = {name: summarize(run) for name, run in runs.items()}
    if chosen.json:
        figures = {name: attrs.asdict(summary) for name, summary in summaries.items()}
        print(json.dumps({"device": attrs.asdict(setup.device), "policies": figures}))
    else:
        print(f"{chosen.preset}, trace {chosen.trace}, times in seconds")
        print(table(summaries))
    for picture in pictures:
        print(f"drew {picture}", file=sys.stderr)


def _runs(chosen: argparse.Namespace) -> tuple[Setup, dict[str, Run]]:
    setup = attrs.evolve(PRESETS[chosen.preset], jitter=chosen.jitter)
    if chosen.lanes is not None:
        setup = attrs.evolve(setup, lanes=chosen.lanes)
    if chosen.measured:
        setup = attrs.evolve(setup, device=setup.device.fitted(read_measured(chosen.measured)))
    arrivals = _arrivals(chosen.trace)
    names = chosen.policy or DEFAULT_MODES
    return setup, {name: simulate(arrivals, setup, mode_named(name, setup)) for name in names}


def _arrivals(trace: str) -> list[Arrival]:
    return TRACES[trace]() if trace in TRACES else read_arrivals(Path(trace))

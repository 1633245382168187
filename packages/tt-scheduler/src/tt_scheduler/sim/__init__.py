"""A discrete-event simulator: the policies and lanes under arrivals, on a device that is a cost model."""

from tt_scheduler.sim.arrivals import (
    TRACES,
    Arrival,
    bursts,
    chat_mix,
    long_prompts,
    read_arrivals,
    saturating,
    write_arrivals,
)
from tt_scheduler.sim.device import Device, SimStep, read_measured
from tt_scheduler.sim.engine import MixedBudget, Mode, PhasePure, RanStep, Run, Setup, simulate
from tt_scheduler.sim.lane import LaneShape, SimRequest
from tt_scheduler.sim.metrics import Summary, percentile, summarize, table
from tt_scheduler.sim.modes import MODES, mode_named
from tt_scheduler.sim.pictures import draw
from tt_scheduler.sim.presets import PRESETS

__all__ = [
    "MODES",
    "PRESETS",
    "TRACES",
    "Arrival",
    "Device",
    "LaneShape",
    "MixedBudget",
    "Mode",
    "PhasePure",
    "RanStep",
    "Run",
    "Setup",
    "SimRequest",
    "SimStep",
    "Summary",
    "bursts",
    "chat_mix",
    "draw",
    "long_prompts",
    "mode_named",
    "percentile",
    "read_arrivals",
    "read_measured",
    "saturating",
    "simulate",
    "summarize",
    "table",
    "write_arrivals",
]

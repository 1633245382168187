"""Phase-pure scheduling: which phase runs next, where a request stands, which lane and row it holds.

The simulator is ``tt_scheduler.sim``.
"""

from tt_scheduler.bounded_gap import BoundedGap
from tt_scheduler.chunks import cut, padded
from tt_scheduler.cursor import Admission, Standing
from tt_scheduler.errors import CursorError, RowError, SimulationError, TTSchedulerError
from tt_scheduler.lanes import LaneLoad, choose_lane
from tt_scheduler.phases import Choice, Interleave, Phase, PhasePolicy, PrefillFirst, StepRecord, Work
from tt_scheduler.rows import RowAccount
from tt_scheduler.step_costs import Line

__all__ = [
    "Admission",
    "BoundedGap",
    "Choice",
    "CursorError",
    "Interleave",
    "LaneLoad",
    "Line",
    "Phase",
    "PhasePolicy",
    "PrefillFirst",
    "RowAccount",
    "RowError",
    "SimulationError",
    "Standing",
    "StepRecord",
    "TTSchedulerError",
    "Work",
    "choose_lane",
    "cut",
    "padded",
]

"""Phase-pure scheduling: which phase runs next, where a request stands, and which row it holds."""

from tt_scheduler.cursor import Admission, Standing
from tt_scheduler.errors import CursorError, RowError, TTSchedulerError
from tt_scheduler.phases import Choice, Interleave, Phase, PhasePolicy, PrefillFirst, StepRecord, Work
from tt_scheduler.rows import RowAccount

__all__ = [
    "Admission",
    "Choice",
    "CursorError",
    "Interleave",
    "Phase",
    "PhasePolicy",
    "PrefillFirst",
    "RowAccount",
    "RowError",
    "Standing",
    "StepRecord",
    "TTSchedulerError",
    "Work",
]

"""What this package raises.

TTSchedulerError
├── RowError          a row was taken twice, or none is free
├── CursorError       the counts of one request contradict one another
└── SimulationError   a simulated policy serves nobody although requests wait
"""


class TTSchedulerError(Exception):
    """Base of every error of this package."""


class RowError(TTSchedulerError):
    """The account of rows would become wrong; nothing was changed."""


class CursorError(TTSchedulerError):
    """A request's computed, scheduled and known tokens cannot all be true."""


class SimulationError(TTSchedulerError):
    """A simulation cannot go on: the policy chose nothing, and nothing more will arrive."""

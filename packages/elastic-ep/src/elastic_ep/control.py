"""What the coordinator's machine is made of: its state, the events that it takes, the actions that it asks
for."""

import enum

import attrs

from elastic_ep.placement import Placement
from elastic_ep.plan import Plan
from elastic_ep.staging import Stage
from elastic_ep.wire import Ballot, Message, Stopped

FIRST = Ballot(0, 0)


class Phase(enum.Enum):
    STABLE = "stable"
    LAUNCHING = "launching"
    PREPARING = "preparing"
    PREPARED = "prepared"
    COMMITTING = "committing"
    RETIRING = "retiring"
    ABORTING = "aborting"
    FENCING = "fencing"
    RESUMING = "resuming"


class OnLoss(enum.Enum):
    """What a group does whose dead held the only replica of an expert."""

    RELOAD = "reload"
    """Bring it in from outside before the next step; if the slots do not suffice, wait."""

    WAIT = "wait"
    """Run no step until an operation has brought it back."""

    DEGRADE = "degrade"
    """Serve on without it; the weights of a token's other experts make up for it."""


@attrs.frozen
class Scale:
    """Carry out a plan that starts from the serving placement.

    Whoever asks gives a ``ticket`` that is used once, and is told under it what came of it; the same again
    asks for nothing new. ``since`` is when it was asked for, in seconds since 1970. One that ``yields`` is
    ended early for one that does not: so balancing makes way.
    """

    plan: Plan
    ticket: str = ""
    since: float = 0.0
    yields: bool = False


@attrs.frozen
class Operation:
    """What is known of the running `Scale` besides its stages."""

    ticket: str
    since: float
    yields: bool


@attrs.frozen
class Finished:
    """An operation ended. If not ``ok``, the group serves on in the last epoch that was committed."""

    ok: bool
    why: str
    ticket: str = ""


@attrs.frozen
class Coordinator:
    """All that the coordinator knows.

    ``placement`` is served under ``epoch``. ``stages`` are what is left of the running ``operation``, the
    current one first, and ``why`` says what ends it early; ``next`` is what it makes way for, ``last`` how
    the latest one ended that did not yield. ``waiting`` are the ranks whose answer is
    outstanding. ``gone`` are ranks that were fenced off, dismissed or retired and not seen dead yet: their
    ids stay reserved. ``dead`` are ranks lost since the group was last stable. During a fence, ``stops``
    are the answers, and ``committing`` is the epoch whose commit it interrupted. ``step`` is where a group
    that runs no steps goes on.
    """

    placement: Placement
    fingerprint: str
    on_loss: OnLoss = OnLoss.RELOAD
    epoch: int = 0
    ballot: Ballot = FIRST
    phase: Phase = Phase.STABLE
    cards: tuple[tuple[int, bytes], ...] = ()
    stages: tuple[Stage, ...] = ()
    waiting: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    dead: tuple[int, ...] = ()
    stops: tuple[Stopped, ...] = ()
    committing: int | None = None
    step: int = 0
    why: str = ""
    operation: Operation | None = None
    next: Scale | None = None
    last: Finished | None = None

    @property
    def runs(self) -> bool:
        """Whether steps are run: there are ranks, and every expert is held or may be missing."""
        complete = self.on_loss == OnLoss.DEGRADE or not self.placement.missing()
        return complete and bool(self.placement.ranks)

    @property
    def involved(self) -> tuple[int, ...]:
        """Ranks that serve, or will after the current stage."""
        coming = self.stages[0].placement.ranks if self.stages else ()
        return tuple(sorted({*self.placement.ranks, *coming}))

    @property
    def doing(self) -> str:
        """What the group does besides serving, in words; empty if nothing."""
        if self.phase == Phase.STABLE:
            return ""
        if not self.stages:
            return "goes on without a rank that was lost"
        ranks, goal = list(self.placement.ranks), list(self.stages[-1].placement.ranks)
        return f"evens out the load of {ranks}" if ranks == goal else f"goes from ranks {ranks} to {goal}"


@attrs.frozen
class CommitNow:
    """Commit the prepared stage."""


@attrs.frozen
class Cancel:
    """Give up the operation, if it is not committing yet."""


@attrs.frozen
class Received:
    message: Message


@attrs.frozen
class Died:
    """A rank's process has ended; it will neither speak nor write any more."""

    rank: int


@attrs.frozen
class Unresponsive:
    """A rank's lease ran out: it may be frozen, and may come back to life."""

    rank: int


@attrs.frozen
class Expired:
    """The deadline for preparing under this ballot has passed."""

    ballot: Ballot


@attrs.frozen
class Tick:
    """Time to say again what has not been answered."""


Event = Scale | CommitNow | Cancel | Received | Died | Unresponsive | Expired | Tick


@attrs.frozen
class Send:
    to: int
    message: Message


@attrs.frozen
class Launch:
    """Start a joiner; its Hello must carry this ballot."""

    rank: int
    ballot: Ballot


@attrs.frozen
class Kill:
    """End a rank's process; Died follows when it has."""

    rank: int


@attrs.frozen
class Check:
    """A rank is suspected by another: see whether it lives."""

    rank: int
    why: str


@attrs.frozen
class Begun:
    """The operation that was asked for under this ticket runs."""

    ticket: str


class Reason(enum.Enum):
    """Why something is refused, for those who act on it."""

    BUSY = "busy"
    """Something else is running: ask again when it has ended, or cancel it."""

    OUTDATED = "outdated"
    """The plan starts from a placement that does not serve any more: plan again."""

    IMPOSSIBLE = "impossible"
    """It cannot be done as things are."""


@attrs.frozen
class Refused:
    """The event asked for something that cannot be done now; nothing changed. ``since`` says when what runs
    was asked for."""

    why: str
    reason: Reason = Reason.IMPOSSIBLE
    ticket: str = ""
    since: float | None = None


Action = Send | Launch | Kill | Check | Begun | Finished | Refused

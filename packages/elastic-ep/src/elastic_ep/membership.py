"""What a member's machine is made of: its state, the events that it takes, the actions that it asks for."""

import enum

import attrs

from elastic_ep.placement import Placement
from elastic_ep.staging import Stage
from elastic_ep.wire import Ballot, CommitAt, Message


class MemberPhase(enum.Enum):
    JOINING = "joining"
    ACTIVE = "active"
    PREPARING = "preparing"
    PREPARED = "prepared"
    ARMED = "armed"
    COMMITTED = "committed"
    STOPPED = "stopped"
    GONE = "gone"


@attrs.frozen
class Member:
    """All that a member's machine knows.

    It serves ``placement`` under epoch ``serving``; ``step`` is the one that it runs or runs next,
    ``applied`` the last whose results were given out. ``stage`` is being prepared; the leader is ``told``
    when to commit it, all know ``at`` which step. ``answer`` was the last to the coordinator, said again
    when its command comes again.
    """

    rank: int
    answer: Message
    ballot: Ballot
    phase: MemberPhase = MemberPhase.JOINING
    placement: Placement | None = None
    serving: int | None = None
    step: int | None = None
    applied: int | None = None
    stage: Stage | None = None
    told: bool = False
    at: int | None = None
    halted: bool = False

    @property
    def serves(self) -> bool:
        quiet = (MemberPhase.JOINING, MemberPhase.STOPPED, MemberPhase.GONE)
        return self.placement is not None and self.rank in self.placement.ranks and self.phase not in quiet

    @property
    def runs(self) -> bool:
        """Whether it runs steps: it serves, and no expert is missing that must not be."""
        return self.serves and not self.halted

    @property
    def leaves(self) -> bool | None:
        """Whether it serves no more once the stage under way is committed, or has left; None while a fence
        leaves it open."""
        if self.phase == MemberPhase.STOPPED:
            return None
        if self.stage is not None:
            return self.rank not in self.stage.placement.ranks
        return self.placement is not None and self.rank not in self.placement.ranks

    @property
    def others(self) -> tuple[int, ...]:
        """The ranks that it serves with."""
        ranks = () if self.placement is None else self.placement.ranks
        return tuple(rank for rank in ranks if rank != self.rank)

    @property
    def leads(self) -> bool:
        """The lowest serving rank announces the commit."""
        return self.serves and self.placement is not None and self.rank == min(self.placement.ranks)


@attrs.frozen
class Heard:
    """A message came, from the coordinator or in-band from the leader."""

    message: Message


@attrs.frozen
class PrepareEnded:
    """The preparation begun under this ballot is done, or failed if it says why."""

    ballot: Ballot
    why: str = ""


@attrs.frozen
class Boundary:
    """No step is running: the tables may be switched and the next step may begin."""


@attrs.frozen
class Completed:
    """The step that was run under this epoch is complete."""

    epoch: int
    step: int


@attrs.frozen
class Overdue:
    """A wait for a rank takes too long."""

    rank: int
    why: str


@attrs.frozen
class LeaseDue:
    """Time to say that this rank lives."""


MemberEvent = Heard | PrepareEnded | Boundary | Completed | Overdue | LeaseDue


@attrs.frozen
class Tell:
    """Send to the coordinator."""

    message: Message


@attrs.frozen
class StartPrepare:
    """Begin to prepare in the background; a preparation that was cancelled has to end first."""

    ballot: Ballot
    stage: Stage
    cards: tuple[tuple[int, bytes], ...]


@attrs.frozen
class CancelPrepare:
    ballot: Ballot


@attrs.frozen
class Flip:
    """Switch the tables to this placement, here and now, between two steps."""

    epoch: int
    placement: Placement


@attrs.frozen
class Run:
    """Run one step. The leader sends ``announce`` in-band, to ``also`` besides the ranks that take part."""

    epoch: int
    step: int
    announce: CommitAt | None = None
    also: tuple[int, ...] = ()


@attrs.frozen
class Apply:
    """Give out the results of the step that was completed."""

    step: int


@attrs.frozen
class Interrupt:
    """End the waits of the running step; it is not complete and will be run again."""


@attrs.frozen
class Keep:
    """Disconnect all peers but these ranks."""

    ranks: tuple[int, ...]


@attrs.frozen
class Exit:
    """Nothing is left to do."""


MemberAction = Tell | StartPrepare | CancelPrepare | Flip | Run | Apply | Interrupt | Keep | Exit

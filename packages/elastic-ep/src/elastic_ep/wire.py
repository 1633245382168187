"""What coordinator and members say to each other.

Every message carries the ballot it belongs to, ``(epoch, attempt)``, and its sender. Ballots only rise: a
new operation tries for the next epoch, a repeated try for the same epoch raises the attempt, a fence takes
an epoch nobody has tried for. So `stale` is the one place where late, repeated and overtaken messages are
dropped.
"""

import attrs

from elastic_ep.placement import Placement
from elastic_ep.staging import Stage

COORDINATOR = -1
"""The sender of commands; members are named by their rank."""


@attrs.frozen(order=True)
class Ballot:
    """Which try for which epoch. Later ballots compare higher."""

    epoch: int
    attempt: int


@attrs.frozen
class Message:
    epoch: int
    attempt: int
    sender: int

    @property
    def ballot(self) -> Ballot:
        return Ballot(self.epoch, self.attempt)


@attrs.frozen
class Report(Message):
    """What a member says unasked, while it serves epoch ``serving`` with ``step`` as the next one to
    complete.

    Both are None before it serves at all.
    """

    serving: int | None
    step: int | None


def stale(message: Message, ballot: Ballot, serving: int | None) -> bool:
    """Whether a message is of an earlier try than the one its receiver knows of; a report, of another
    epoch."""
    if isinstance(message, Report):
        return message.serving != serving
    return message.ballot < ballot


@attrs.frozen
class Prepare(Message):
    """Bring a stage in place while serving on. ``cards`` are those of ranks that the receiver is to connect
    to.

    A rank that is not in the stage's placement prepares to leave: it drains its own requests.
    """

    stage: Stage
    cards: tuple[tuple[int, bytes], ...]


@attrs.frozen
class Commit(Message):
    """All are prepared: the leader, the lowest serving rank, shall pick the step and announce it in-band."""


@attrs.frozen
class Retire(Message):
    """All serve the new epoch: let go of what only the old one needed; a rank that left exits."""


@attrs.frozen
class Abort(Message):
    """Forget the stage that is being prepared."""

    why: str


@attrs.frozen
class Fence(Message):
    """Stop between or inside steps, without the dead."""

    dead: tuple[int, ...]


@attrs.frozen
class Resume(Message):
    """Serve this placement from this step on; the step may be one that the receiver has applied already.

    If not ``runs``, run no step yet: experts are missing.
    """

    placement: Placement
    step: int
    runs: bool


@attrs.frozen
class Hello(Message):
    """A joiner is there. Its card is what others need to connect; all fingerprints of a group must agree."""

    fingerprint: str
    card: bytes


@attrs.frozen
class Prepared(Message):
    """Connected and warm, copies done, own captures made."""


@attrs.frozen
class PrepareFailed(Message):
    why: str


@attrs.frozen
class Committed(Message):
    """The tables are switched; ``step`` is the first under the new epoch."""

    step: int


@attrs.frozen
class Retired(Message):
    """Nothing of the old epoch is held any more."""


@attrs.frozen
class Aborted(Message):
    """The stage is forgotten."""


@attrs.frozen
class Stopped(Message):
    """Stopped, serving epoch ``serving`` with ``step`` as the next one to complete; None: never served
    yet."""

    serving: int | None
    step: int | None


@attrs.frozen
class Resumed(Message):
    """Serving again."""


@attrs.frozen
class Lease(Report):
    """Alive and at this step; sent every 100 ms or so."""


@attrs.frozen
class Suspect(Report):
    """A wait for ``rank`` took too long. A suspicion is no proof: the late rank may be waiting for a dead
    one."""

    rank: int
    why: str


@attrs.frozen
class Counted(Report):
    """How often this rank has routed tokens to each expert: int64 ``[layers, experts]``, in the host's byte
    order. Counts rise until they start anew with the rank or its programs."""

    counts: bytes


@attrs.frozen
class CommitAt(Message):
    """In-band, from the leader: from step ``at`` on the prepared placement serves."""

    at: int


MESSAGES: tuple[type[Message], ...] = (
    Prepare,
    Commit,
    Retire,
    Abort,
    Fence,
    Resume,
    Hello,
    Prepared,
    PrepareFailed,
    Committed,
    Retired,
    Aborted,
    Stopped,
    Resumed,
    Lease,
    Suspect,
    CommitAt,
    Counted,
)
"""All messages; a message's place in this list is its code on the wire."""

"""A rank: the serving loop, and what its machine asks for.

Three threads. The main one serves, switches the tables and polls the transport when it does not serve; all
transitions of the machine happen in it. One prepares in the background. One keeps the link to the
coordinator and says that this rank lives.
"""

import functools
import queue
import time
import uuid
from collections.abc import Callable, Iterable

import attrs

from elastic_ep.codec import decode, encode
from elastic_ep.errors import FencedError, ServeError, TransportError
from elastic_ep.lane import NO_NOTE, Note, flag_of
from elastic_ep.links import Link
from elastic_ep.member import act, join
from elastic_ep.membership import (
    Apply,
    Boundary,
    CancelPrepare,
    Completed,
    Exit,
    Flip,
    Heard,
    Interrupt,
    Keep,
    MemberAction,
    MemberEvent,
    MemberPhase,
    Overdue,
    PrepareEnded,
    Run,
    StartPrepare,
    Tell,
)
from elastic_ep.placement import Placement
from elastic_ep.plane import Plane
from elastic_ep.prepare import Preparation
from elastic_ep.pulse import Voice
from elastic_ep.rendezvous import Rendezvous
from elastic_ep.routing import RoutingTables
from elastic_ep.runner import Runner
from elastic_ep.seat import Seat, find_director
from elastic_ep.service import Flipped, Readied, Service, Stepped
from elastic_ep.staging import Stage
from elastic_ep.transport import Transport
from elastic_ep.watch import Watch
from elastic_ep.wire import Ballot, CommitAt, Fence, Hello, Message

Cards = tuple[tuple[int, bytes], ...]

IDLE, ALERT = 0.002, 0.0005
"""Seconds between polls of a rank that does not serve, and of one that is called for any step now."""


class Rank:
    """One rank's machine and everything it moves."""

    def __init__(
        self,
        seat: Seat,
        service: Service,
        make_transport: Callable[[str], Transport],
        make_runner: Callable[[], Runner],
    ) -> None:
        self.seat = seat
        self.service = service
        self.tables = RoutingTables(service.shape)
        self.inbox: queue.SimpleQueue[Message | Preparation] = queue.SimpleQueue()
        self._make_transport = make_transport
        self._make_runner = make_runner
        self.plane = self.make_plane()
        ballot = seat.ballot
        hello = Hello(ballot.epoch, ballot.attempt, seat.rank, service.fingerprint, self.plane.card)
        self.member = join(hello)
        self.rendezvous = Rendezvous.join(seat.meeting)
        find = functools.partial(find_director, self.rendezvous)
        self._link = Link(find, tuple, self._beat, self._deliver, seat.patience.beat)
        self._fence = attrs.astuple(ballot)
        self._stuck: tuple[Ballot, float] | None = None
        self._prepared: Preparation | None = None
        self._flipped: Flipped | None = None
        self._over = self._told_to_leave = False
        self._voice = Voice(seat)
        self._pulse = self._voice.pulse

    def make_plane(self) -> Plane:
        """Under a name that no other plane ever has."""
        transport = self._make_transport(f"{self.seat.rank}.{uuid.uuid4().hex}")
        return Plane(self.seat, self.service, self.tables, transport, self._make_runner, self.inbox.put)

    def serve(self) -> None:
        """Until it has left. Raises ServeError if it cannot go on, and whatever the model raises."""
        self._link.start()
        while not self._over:
            self._pulse.beat()
            self._listen()
            if self._waits_for_a_fence():
                self._idle()
                continue
            self._event(Boundary())
            if not self.member.runs:
                self._idle()
        self.close()

    def close(self) -> None:
        """It is heard no more, and its device can be closed."""
        self._link.close()
        self.plane.preparer.cancel()
        self.plane.preparer.settle()
        self.plane.transport.close()

    # What happens

    def _listen(self) -> None:
        if self._flipped is not None:
            # Only now: the others waited for the step after the flip.
            self.service.seen(self._flipped)
            self._flipped = None
        while not self.inbox.empty():
            came = self.inbox.get()
            if isinstance(came, Preparation):
                self._preparation_ended(came)
            else:
                self._event(Heard(came))
        if not self.member.runs:
            for announced in self.overheard():
                self._event(Heard(announced))

    def _preparation_ended(self, came: Preparation) -> None:
        if self.member.serving is None and came.tables is not None:
            came = self._rehearsed(came)
        self.service.seen(Readied(came.ballot.epoch, time.monotonic(), came.seconds, came.why))
        self._event(PrepareEnded(came.ballot, came.why))
        if self.member.phase == MemberPhase.PREPARED and self.member.ballot == came.ballot:
            self._prepared = came
            self.plane.peers |= came.peers
        else:
            for peer in came.peers.values():
                self.plane.transport.disconnect(peer)

    def _rehearsed(self, came: Preparation) -> Preparation:
        self._pulse.beat(self.seat.patience.give_up)
        try:
            self.plane.step.rehearse()
        except Exception as error:  # noqa: BLE001 - as what fails in the background, it fails the stage
            return attrs.evolve(came, tables=None, why=f"{type(error).__name__}: {error}")
        finally:
            self._pulse.beat()
        return came

    def _waits_for_a_fence(self) -> bool:
        """A step that failed cannot be completed: a fence will say with whom it is run again."""
        if self._stuck is None or self._stuck[0] != self.member.ballot:
            return False
        patience = self.seat.patience.give_up
        if time.monotonic() - self._stuck[1] > patience:
            raise ServeError(f"rank {self.seat.rank} heard nothing for {patience} s after its step failed")
        return True

    def _idle(self) -> None:
        self.plane.transport.poll()
        alert = self.member.phase in (MemberPhase.PREPARED, MemberPhase.STOPPED)
        time.sleep(ALERT if alert else IDLE)

    def _event(self, event: MemberEvent) -> None:
        self.member, actions = act(self.member, event)
        leaves = self.member.leaves
        if leaves is not None and leaves != self._told_to_leave:
            self._told_to_leave = leaves
            self.service.leaving(leaves)
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: MemberAction) -> None:
        match action:
            case Tell(message):
                self._link.send(encode(message))
            case StartPrepare(ballot, stage, cards):
                self.start_prepare(ballot, stage, cards)
            case CancelPrepare():
                self.plane.preparer.cancel()
            case Flip(epoch, placement):
                self._flip(epoch, placement)
            case Run():
                self._run(action)
            case Apply(step):
                self.service.apply(step)
            case Keep(ranks):
                self.plane.keep(ranks)
            case Exit():
                self._over = True
            case Interrupt():
                """The step has ended already: its waits ask whether a fence was heard."""

    # What it asks for

    def start_prepare(self, ballot: Ballot, stage: Stage, cards: Cards) -> None:
        """In the background; `Preparation` comes to the inbox."""
        member, self._prepared = self.member, None
        joins, drains = member.serving is None, member.leaves is True and member.runs
        self.plane.preparer.start(ballot, stage, cards, self.plane.peers, joins, drains)

    def _flip(self, epoch: int, placement: Placement) -> None:
        began, work = time.monotonic(), time.thread_time()
        self._pulse.beat(self.seat.patience.give_up)
        self.switch(epoch, placement)
        self.plane.step.check()
        self._pulse.beat()
        now, work = time.monotonic(), time.thread_time() - work
        self._flipped = Flipped(epoch, placement, now, now - began, work, self.plane.step.captures)

    def switch(self, epoch: int, placement: Placement) -> None:
        """Put a placement to use, between two steps."""
        self.plane.switch(placement, self._prepared)

    def _run(self, run: Run) -> None:
        peers = {rank: self.plane.peers[rank] for rank in self.member.others}
        note = NO_NOTE if run.announce is None else _note(run.announce)
        self.announce(run, note)
        ballot, patience = attrs.astuple(self.member.ballot), self.seat.patience
        watch = Watch(
            self.plane.lane, peers, patience.suspect, lambda: self._fence > ballot, self._suspect, self._pulse
        )
        try:
            notes = self.plane.step.run(
                run.epoch, run.step, peers, patience.give_up, watch, note, self.plane.degraded
            )
        except FencedError:
            return
        except TransportError as error:
            self._stuck = self.member.ballot, time.monotonic()
            lost = self.plane.lane.lost()
            self._suspect([rank for rank, peer in peers.items() if peer in lost], str(error))
            return
        for heard in notes.values():
            self._event(Heard(CommitAt(*heard)))
        self.service.seen(Stepped(run.epoch, run.step, time.monotonic()))
        self._event(Completed(run.epoch, run.step))

    def announce(self, run: Run, note: Note) -> None:
        """To those who take no part yet; the others get it with the step."""
        for rank in run.also:
            self.plane.lane.announce(rank, self.plane.peers[rank], flag_of(run.epoch, run.step), note)

    def overheard(self) -> list[CommitAt]:
        """Announcements that came outside of steps."""
        return [CommitAt(*note) for note in self.plane.lane.overheard().values()]

    def _suspect(self, ranks: Iterable[int], why: str) -> None:
        for rank in ranks:
            self._event(Overdue(rank, why))

    # In the link's thread

    def _beat(self) -> list[bytes]:
        """The machine is only read here: to say that it lives changes nothing in it."""
        if self.plane.preparer.hangs:
            return []
        return self._voice.beat(self.member, self.plane.step.load)

    def _deliver(self, data: bytes) -> None:
        message = decode(data)
        if isinstance(message, Fence):
            self._fence = max(self._fence, attrs.astuple(message.ballot))
        self.inbox.put(message)


def _note(announced: CommitAt) -> Note:
    return announced.epoch, announced.attempt, announced.sender, announced.at

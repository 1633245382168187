"""The coordinator's process: sockets, leases and deadlines around the pure machine of
`elastic_ep.coordinator`.

Its state is in the rendezvous store before anything is said that follows from it, so one that is killed is
started again and goes on. Members serve meanwhile.
"""

import selectors
import socket
import time

import attrs

from elastic_ep.balancer import Balancer
from elastic_ep.codec import decode, decode_any, encode
from elastic_ep.control import (
    Action,
    Begun,
    Cancel,
    Check,
    CommitNow,
    Coordinator,
    Died,
    Event,
    Expired,
    Finished,
    Kill,
    Launch,
    Phase,
    Received,
    Refused,
    Scale,
    Send,
    Tick,
    Unresponsive,
)
from elastic_ep.coordinator import coordinate
from elastic_ep.errors import WireError
from elastic_ep.links import Frames
from elastic_ep.rendezvous import Meeting, Rendezvous
from elastic_ep.seat import Patience, publish_director
from elastic_ep.tally import Tally
from elastic_ep.wire import Ballot, Counted, Hello

STATE = "coordinator state"


@attrs.frozen
class Alive:
    """The host's processes, said when it connects: whoever else is thought to live is dead."""

    ranks: tuple[int, ...]


@attrs.frozen
class Beat:
    """The director lives; its phase."""

    phase: Phase


ORDERS: tuple[type, ...] = (Scale, CommitNow, Cancel, Died, Alive)
"""What the host sends."""

NOTICES: tuple[type, ...] = (Launch, Kill, Check, Begun, Finished, Refused, Beat)
"""What the host is sent."""

Notice = Launch | Kill | Check | Begun | Finished | Refused | Beat

HOST_GREETING = b"host"


def run_director(
    meeting: Meeting,
    first: Coordinator,
    patience: Patience,
    auto_commit: bool,
    balancer: Balancer | None,
) -> None:
    """Until killed. ``first`` is the state to start from if the store holds none."""
    rendezvous = Rendezvous.join(meeting)
    saved = rendezvous.look(STATE)
    state = first if saved is None else decode_any(saved, (Coordinator,))
    Director(rendezvous, state, patience, auto_commit, balancer).run()


class Director:
    """Drives one coordinator. With ``auto_commit`` each prepared stage is committed at once; those of a
    ``balancer`` always are."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        state: Coordinator,
        patience: Patience,
        auto_commit: bool,
        balancer: Balancer | None,
    ) -> None:
        self.state = state
        self._rendezvous = rendezvous
        self._patience = patience
        self._auto_commit = auto_commit
        self._tally = None if balancer is None else Tally(balancer, state, time.monotonic())
        self._ranks: dict[int, Frames] = {}
        self._host: Frames | None = None
        self._heard = dict.fromkeys((*state.involved, *state.waiting), time.monotonic())
        self._leaving: dict[int, float] = {}
        self._deadline: tuple[Ballot, float] | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def run(self) -> None:
        rendezvous, name = self._rendezvous, self._listener.getsockname()
        rendezvous.publish(STATE, encode(self.state, (Coordinator,)))
        publish_director(rendezvous, (name[0], name[1]))
        due = time.monotonic()
        while True:
            for key, _ in self._selector.select(max(0.0, due - time.monotonic())):
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    self._selector.register(Frames(connection), selectors.EVENT_READ)
                else:
                    assert isinstance(key.fileobj, Frames)
                    self._read(key.fileobj)
            if time.monotonic() >= due:
                self._keep_time()
                due = time.monotonic() + self._patience.beat

    def _read(self, frames: Frames) -> None:
        received = frames.receive()
        if received is None:
            self._forget(frames)
            return
        for data in received:
            if data == HOST_GREETING:
                self._host = frames
            elif frames is self._host:
                self._obey(decode_any(data, ORDERS))
            else:
                self._hear(frames, data)

    def _hear(self, frames: Frames, data: bytes) -> None:
        try:
            message = decode(data)
        except WireError:
            self._forget(frames)
            return
        if isinstance(message, Hello) or message.sender in self._heard:
            self._heard[message.sender] = time.monotonic()
        self._ranks[message.sender] = frames
        if not isinstance(message, Counted):
            self._event(Received(message))
        elif self._tally is not None:
            self._tally.hear(message)

    def _obey(self, order: Event | Alive) -> None:
        if not isinstance(order, Alive):
            self._event(order)
            return
        state = self.state
        for rank in sorted({*state.involved, *state.waiting, *state.gone} - set(order.ranks)):
            self._event(Died(rank))

    def _keep_time(self) -> None:
        now = time.monotonic()
        known = {*self.state.involved, *self.state.waiting}
        self._heard = {rank: at for rank, at in self._heard.items() if rank in known}
        for rank, at in list(self._heard.items()):
            if now - at > self._patience.lease:
                del self._heard[rank]
                self._event(Unresponsive(rank))
        self._leaving = {rank: self._leaving.get(rank, now) for rank in self.state.gone}
        for rank, since in self._leaving.items():
            if now - since > self._patience.leave:
                self._event(Unresponsive(rank))
        if self._deadline is not None and now > self._deadline[1]:
            self._event(Expired(self._deadline[0]))
        if self.state.phase != Phase.STABLE:
            self._event(Tick())
        plan = None if self._tally is None else self._tally.plan(self.state, now)
        if plan is not None:
            self._event(Scale(plan, since=time.time(), yields=True))
        self._notify(Beat(self.state.phase))

    def _event(self, event: Event) -> None:
        before = self.state
        self.state, actions = coordinate(before, event)
        if _decided(self.state) != _decided(before):
            self._rendezvous.publish(STATE, encode(self.state, (Coordinator,)))
            self._set_deadline(before)
        for action in actions:
            self._carry_out(action)
        yields = self.state.operation is not None and self.state.operation.yields
        prepared = self.state.phase == Phase.PREPARED and before.phase != Phase.PREPARED
        if prepared and (self._auto_commit or yields):
            self._event(CommitNow())

    def _set_deadline(self, before: Coordinator) -> None:
        now = self.state
        if (now.phase, now.ballot) == (before.phase, before.ballot):
            return
        preparing = now.phase in (Phase.LAUNCHING, Phase.PREPARING)
        self._deadline = (now.ballot, time.monotonic() + self._patience.prepare) if preparing else None

    def _carry_out(self, action: Action) -> None:
        match action:
            case Send(to, message) if to in self._ranks:
                self._send(self._ranks[to], encode(message))
            case Launch() | Kill() | Check() | Begun() | Finished() | Refused():
                self._notify(action)

    def _notify(self, notice: Notice) -> None:
        if self._host is not None:
            self._send(self._host, encode(notice, NOTICES))

    def _send(self, frames: Frames, data: bytes) -> None:
        try:
            frames.send(data)
        except OSError:
            self._forget(frames)

    def _forget(self, frames: Frames) -> None:
        """A connection has ended. That says nothing of the process behind it."""
        if frames.fileno() >= 0:
            self._selector.unregister(frames)
        frames.close()
        self._ranks = {rank: other for rank, other in self._ranks.items() if other is not frames}
        if self._host is frames:
            self._host = None


def _decided(state: Coordinator) -> Coordinator:
    """Without the answers that are in so far: nothing is said that follows from some of them, and each is
    given again to a coordinator that asks again."""
    return attrs.evolve(state, waiting=(), cards=(), stops=())

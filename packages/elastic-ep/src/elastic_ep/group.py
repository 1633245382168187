"""A group of ranks on this host: starts it, changes its size, says how it is, ends it."""

import functools
import queue
import threading
import time
from collections.abc import Callable, Iterable

from elastic_ep.asking import Asking
from elastic_ep.balancer import Balancer
from elastic_ep.codec import decode_any, encode
from elastic_ep.control import (
    Begun,
    Cancel,
    Check,
    CommitNow,
    Coordinator,
    Died,
    Event,
    Finished,
    Kill,
    Launch,
    OnLoss,
    Phase,
    Refused,
    Scale,
)
from elastic_ep.director import HOST_GREETING, NOTICES, ORDERS, STATE, Alive, Beat, Notice, run_director
from elastic_ep.errors import GroupError, LaunchError, OutdatedError, UnfinishedError
from elastic_ep.launcher import Launcher, is_dying
from elastic_ep.links import Address, Link
from elastic_ep.placement import Shape, nobody
from elastic_ep.plan import Load, Plan, resize
from elastic_ep.rendezvous import Rendezvous
from elastic_ep.seat import Patience, Seat, find_director


class Group:
    """The processes of one group, and the thread that looks after them.

    ``main`` is what a rank's process runs: a picklable callable, such as a partial of
    `elastic_ep.run_rank`. A coordinator's process that dies or hangs is replaced. With ``auto_commit``
    each stage is committed when it is prepared; else `commit` says when. ``niceness`` is that of joiners
    while they prepare: at 19 they get only time that nobody else wants. ``on_loss`` says what happens when
    the last replica of an expert dies. With a ``balancer`` ranks count how often each expert is routed to,
    and the group evens out their load by itself.
    """

    def __init__(
        self,
        launcher: Launcher,
        shape: Shape,
        fingerprint: str,
        main: Callable[[Seat], None],
        patience: Patience = Patience(),  # noqa: B008 - frozen
        auto_commit: bool = True,
        niceness: int = 0,
        on_loss: OnLoss = OnLoss.RELOAD,
        balancer: Balancer | None = None,
    ) -> None:
        self._launcher = launcher
        self._main = main
        self._patience = patience
        self._niceness = niceness
        self._rendezvous = Rendezvous.host()
        self._first = Coordinator(nobody(shape), fingerprint, on_loss)
        self._auto_commit = auto_commit
        self._balancer = balancer
        self._happened: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._asking = Asking(self._order, self.state, patience)
        self._pids: dict[int, int] = {}
        self._exits: list[tuple[int, int]] = []
        self._broken = ""
        self._director = 0
        self._beaten = time.monotonic()
        self._link = Link(self._find, self._greet, tuple, self._deliver, patience.beat)
        self._start_director()
        self._thread = threading.Thread(target=self._look_after, name="group", daemon=True)
        self._thread.start()
        self._link.start()

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return dict(self._pids)

    @property
    def director(self) -> int:
        """Process id of the coordinator."""
        return self._director

    @property
    def exits(self) -> tuple[tuple[int, int], ...]:
        """``(rank, exit code)`` of every rank's process that has ended; negative: the signal."""
        return tuple(self._exits)

    def state(self) -> Coordinator:
        """The coordinator's state as it was saved last: the serving placement, epoch and phase."""
        saved = self._rendezvous.look(STATE)
        return self._first if saved is None else decode_any(saved, (Coordinator,))

    def scale(
        self, ranks: Iterable[int], seconds: float, load: Load | None = None, min_replicas: int = 1
    ) -> Plan:
        """Let the group consist of these ranks, and return when it does. Raises what `start` and `finish`
        do."""
        deadline = time.monotonic() + seconds
        asked = self.start(ranks, seconds, load, min_replicas)
        self.finish(asked, deadline - time.monotonic())
        return asked.plan

    def start(
        self, ranks: Iterable[int], seconds: float, load: Load | None = None, min_replicas: int = 1
    ) -> Scale:
        """Begin to let the group consist of these ranks. Raises PlanError and what `begin` does, but for so
        many seconds plans again where the placement changes meanwhile."""
        target, deadline = tuple(ranks), time.monotonic() + seconds
        while True:
            plan = resize(self.state().placement, target, load, min_replicas)
            try:
                return self.begin(plan)
            except OutdatedError:
                if time.monotonic() > deadline:
                    raise

    def begin(self, plan: Plan) -> Scale:
        """Start to carry out a plan, and return when it runs: a balancing pass makes way for it first.

        BusyError if another operation runs, OutdatedError if the plan does not start from the serving
        placement; GroupError if it cannot be done, or no coordinator can be told. Then nothing has changed.
        """
        return self._asking.ask(plan)

    def finish(self, asked: Scale, seconds: float) -> None:
        """Wait for the end of what was begun, and of the processes that left.

        GroupError if it failed: the message says why, and `state` how the group is now. UnfinishedError if it
        does not end in time.
        """
        deadline = time.monotonic() + seconds
        outcome = self._asking.outcome(asked, deadline)
        if outcome is not None and not outcome.ok:
            raise GroupError(outcome.why)
        while time.monotonic() < deadline:
            if not set(asked.plan.leavers) & {*self._pids, *self.state().gone}:
                return
            time.sleep(self._patience.beat / 10)
        state = self.state()
        raise UnfinishedError(
            f"after {seconds:.1f} s the phase is {state.phase.value}, waiting for ranks {state.waiting}, "
            f"with ranks {state.gone} still to end"
        )

    def commit(self) -> None:
        """Commit the stage if it is prepared; `finish` says what became of it."""
        self._order(CommitNow())

    def cancel(self) -> None:
        """Give up what is not committed yet; `finish` raises that it was cancelled."""
        self._order(Cancel())

    def wait_for(self, phase: Phase, seconds: float) -> Coordinator:
        """The state, once it is in this phase. GroupError if it never is."""
        deadline = time.monotonic() + seconds
        while (state := self.state()).phase != phase:
            if time.monotonic() > deadline:
                raise GroupError(f"after {seconds} s the phase is {state.phase.value}, not {phase.value}")
            time.sleep(0.002)
        return state

    def close(self) -> None:
        """End all processes of the group; those that serve close their devices, within `Patience.leave`."""
        self._happened.put(None)
        self._thread.join()
        self._link.close()
        self._launcher.kill(self._director)
        self._launcher.end(self._pids.values(), self._patience.leave)

    def _order(self, event: Event) -> None:
        deadline = time.monotonic() + self._patience.give_up
        while not self._link.send(encode(event, ORDERS)):
            if self._broken:
                raise GroupError(f"the group has ended: {self._broken}")
            if time.monotonic() > deadline:
                raise GroupError(f"no coordinator could be told within {self._patience.give_up} s")
            time.sleep(self._patience.beat)

    # In the group's own thread

    def _look_after(self) -> None:
        while True:
            try:
                happened = self._happened.get(timeout=self._patience.beat)
            except queue.Empty:
                happened = self._check_director
            if happened is None:
                return
            try:
                happened()
            except LaunchError as error:
                self._broken = str(error)
                return

    def _check_director(self) -> None:
        if time.monotonic() - self._beaten > self._patience.lease:
            self._beaten = time.monotonic()
            self._launcher.kill(self._director)

    def _start_director(self) -> None:
        work = functools.partial(
            run_director,
            self._rendezvous.meeting,
            self._first,
            self._patience,
            self._auto_commit,
            self._balancer,
        )
        self._director = self._launcher.start(work, lambda *_: self._happened.put(self._start_director))
        self._beaten = time.monotonic()

    def _rank_ended(self, rank: int, pid: int, code: int) -> None:
        self._exits.append((rank, code))
        if self._pids.get(rank) == pid:
            self._rank_died(rank)

    def _rank_died(self, rank: int) -> None:
        del self._pids[rank]
        self._link.send(encode(Died(rank), ORDERS))

    def _follow(self, notice: Notice) -> None:
        match notice:
            case Launch(rank, ballot):
                counting = 0.0 if self._balancer is None else self._balancer.every / 2
                seat = Seat(rank, ballot, self._rendezvous.meeting, self._patience, self._niceness, counting)
                self._pids[rank] = self._launcher.start(
                    functools.partial(self._main, seat),
                    lambda pid, code: self._happened.put(
                        functools.partial(self._rank_ended, rank, pid, code)
                    ),
                )
            case Kill(rank) if rank in self._pids:
                self._launcher.kill(self._pids[rank])
            case Check(rank) if rank in self._pids and is_dying(self._pids[rank]):
                self._rank_died(rank)
            case Begun() | Finished() | Refused():
                self._asking.hear(notice)
            case Beat():
                self._beaten = time.monotonic()

    # In the link's thread

    def _deliver(self, data: bytes) -> None:
        self._happened.put(functools.partial(self._follow, decode_any(data, NOTICES)))

    def _find(self) -> Address | None:
        return find_director(self._rendezvous)

    def _greet(self) -> tuple[bytes, ...]:
        return HOST_GREETING, encode(Alive(tuple(sorted(self.pids))), ORDERS)

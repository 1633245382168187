"""A group of ranks on this host: starts it, changes its size, says how it is, ends it."""

import functools
import queue
import threading
import time
from collections.abc import Callable, Iterable

from elastic_ep.codec import decode_any, encode
from elastic_ep.control import (
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
from elastic_ep.director import HOST_GREETING, NOTICES, ORDERS, STATE, Alive, Beat, run_director
from elastic_ep.errors import GroupError, LaunchError
from elastic_ep.launcher import Launcher, is_dying
from elastic_ep.links import Address, Link
from elastic_ep.placement import Shape, nobody
from elastic_ep.plan import Load, Plan, resize
from elastic_ep.rendezvous import Rendezvous
from elastic_ep.seat import Patience, Seat, find_director


class Group:
    """The processes of one group, and the thread that looks after them.

    ``main`` is what a rank's process runs: a picklable callable, such as a partial of
    `elastic_ep.rank.run_rank`. A coordinator's process that dies or hangs is replaced. With ``auto_commit``
    each stage is committed when it is prepared; else `commit` says when. ``niceness`` is that of joiners
    while they prepare; ``on_loss`` says what happens when the last replica of an expert dies.
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
    ) -> None:
        self._launcher = launcher
        self._main = main
        self._patience = patience
        self._niceness = niceness
        self._rendezvous = Rendezvous.host()
        self._first = Coordinator(nobody(shape), fingerprint, on_loss)
        self._auto_commit = auto_commit
        self._happened: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Finished | Refused] = queue.SimpleQueue()
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
        """Let the group consist of these ranks, and return when it does. Raises what `begin` and `finish`
        do."""
        plan = resize(self.state().placement, ranks, load, min_replicas)
        self.begin(plan)
        self.finish(plan, seconds)
        return plan

    def begin(self, plan: Plan) -> None:
        """Start to carry out a plan. GroupError if no coordinator can be told."""
        while not self._outcomes.empty():
            self._outcomes.get()
        self._order(Scale(plan))

    def finish(self, plan: Plan, seconds: float) -> None:
        """Wait for the end of the plan that was begun, and of the processes that left.

        GroupError if it failed or was refused (the message says why; the group serves on), or does not end
        in time.
        """
        deadline, quiet = time.monotonic() + seconds, 0
        while time.monotonic() < deadline:
            try:
                outcome = self._outcomes.get(timeout=self._patience.beat)
            except queue.Empty:
                state = self.state()
                quiet = quiet + 1 if state.phase == Phase.STABLE else 0
                if quiet * self._patience.beat < self._patience.lease:
                    continue
                # Whoever would have told the outcome is gone.
                if state.placement == plan.after:
                    break
                raise GroupError("the coordinator was replaced before it began; try again") from None
            if isinstance(outcome, Refused) or not outcome.ok:
                raise GroupError(outcome.why)
            break
        while time.monotonic() < deadline:
            if not set(plan.leavers) & {*self._pids, *self.state().gone}:
                return
            time.sleep(self._patience.beat / 10)
        state = self.state()
        raise GroupError(
            f"after {seconds} s the phase is {state.phase.value}, waiting for ranks {state.waiting}, "
            f"with ranks {state.gone} still to end"
        )

    def commit(self) -> None:
        """Commit the prepared stage; `finish` says what became of it."""
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
        """End all processes of the group."""
        self._happened.put(None)
        self._thread.join()
        self._link.close()
        for pid in (self._director, *self._pids.values()):
            self._launcher.kill(pid)

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
            run_director, self._rendezvous.meeting, self._first, self._patience, self._auto_commit
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

    def _follow(self, notice: Launch | Kill | Check | Finished | Refused | Beat) -> None:
        match notice:
            case Launch(rank, ballot):
                seat = Seat(rank, ballot, self._rendezvous.meeting, self._patience, self._niceness)
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
            case Finished() | Refused():
                self._outcomes.put(notice)
            case Beat():
                self._beaten = time.monotonic()

    # In the link's thread

    def _deliver(self, data: bytes) -> None:
        self._happened.put(functools.partial(self._follow, decode_any(data, NOTICES)))

    def _find(self) -> Address | None:
        return find_director(self._rendezvous)

    def _greet(self) -> tuple[bytes, ...]:
        return HOST_GREETING, encode(Alive(tuple(sorted(self.pids))), ORDERS)

"""A group of ranks on this host: starts it, changes its size, says how it is, ends it."""

import functools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from elastic_ep.codec import decode_any, encode
from elastic_ep.control import (
    Cancel,
    CommitNow,
    Coordinator,
    Died,
    Event,
    Finished,
    Kill,
    Launch,
    Phase,
    Refused,
    Scale,
)
from elastic_ep.director import (
    HOST_GREETING,
    NOTICES,
    ORDERS,
    STATE,
    Alive,
    Beat,
    run_director,
)
from elastic_ep.errors import GroupError
from elastic_ep.launcher import Launcher
from elastic_ep.links import Address, Link
from elastic_ep.placement import Shape, nobody
from elastic_ep.plan import Load, Plan, resize
from elastic_ep.rendezvous import Rendezvous
from elastic_ep.seat import Patience, Seat, find_director

WARM = ("elastic_ep.rank", "elastic_ep.director")
"""Imported once, before any process of the group is forked."""


class Group:
    """Processes of one group, and the thread that looks after them.

    ``main`` is what a rank's process runs: a picklable callable, such as a partial of
    `elastic_ep.rank.run_rank`. ``modules`` are imported before the first fork. Coordinator processes that
    die or hang are replaced.
    """

    def __init__(
        self,
        shape: Shape,
        fingerprint: str,
        main: Callable[[Seat], None],
        modules: Iterable[str] = (),
        environment: Mapping[str, str] | None = None,
        patience: Patience = Patience(),  # noqa: B008 - frozen
        auto_commit: bool = True,
        niceness: int = 0,
    ) -> None:
        self._main = main
        self._patience = patience
        self._rendezvous = Rendezvous.host()
        self._first = Coordinator(nobody(shape), fingerprint)
        self._auto_commit = auto_commit
        self._niceness = niceness
        self._happened: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Finished | Refused] = queue.SimpleQueue()
        self._pids: dict[int, int] = {}
        self._director = 0
        self._beaten = time.monotonic()
        self._launcher = Launcher((*WARM, *modules), environment or {}, self._ended)
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

    def state(self) -> Coordinator:
        """The coordinator's state as it was saved last."""
        saved = self._rendezvous.look(STATE)
        return self._first if saved is None else decode_any(saved, (Coordinator,))

    def scale(
        self, ranks: Iterable[int], seconds: float, load: Load | None = None, min_replicas: int = 1
    ) -> Plan:
        """Plan and carry out; returns when it is done. GroupError if it was refused, failed, or is not done
        in time."""
        plan = resize(self.state().placement, ranks, load, min_replicas)
        self.order(Scale(plan))
        self.outcome(seconds)
        return plan

    def order(self, event: Event) -> None:
        """Tell the coordinator; `outcome` says what became of it."""
        while not self._outcomes.empty():
            self._outcomes.get()
        deadline = time.monotonic() + self._patience.give_up
        while not self._link.send(encode(event, ORDERS)):
            if time.monotonic() > deadline:
                raise GroupError(f"no coordinator could be told within {self._patience.give_up} s")
            time.sleep(self._patience.beat)

    def commit(self) -> None:
        self.order(CommitNow())

    def cancel(self) -> None:
        self.order(Cancel())

    def outcome(self, seconds: float) -> None:
        """Wait for the end of the operation. GroupError if it failed, was refused, or is not done in time."""
        try:
            outcome = self._outcomes.get(timeout=seconds)
        except queue.Empty:
            state = self.state()
            raise GroupError(
                f"after {seconds} s the phase is {state.phase.value}, waiting for ranks {state.waiting}"
            ) from None
        if isinstance(outcome, Refused) or not outcome.ok:
            raise GroupError(outcome.why)

    def wait_for(self, phase: Phase, seconds: float) -> Coordinator:
        """The state, once it is in this phase. GroupError if it never is."""
        deadline = time.monotonic() + seconds
        while (state := self.state()).phase != phase:
            if time.monotonic() > deadline:
                raise GroupError(f"after {seconds} s the phase is {state.phase.value}, not {phase.value}")
            time.sleep(0.002)
        return state

    def close(self) -> None:
        """End all processes."""
        self._happened.put(None)
        self._thread.join()
        self._link.close()
        self._launcher.close()

    # In the group's own thread

    def _look_after(self) -> None:
        while True:
            try:
                happened = self._happened.get(timeout=self._patience.beat)
            except queue.Empty:
                happened = self._check_director
            if happened is None:
                return
            happened()

    def _check_director(self) -> None:
        if time.monotonic() - self._beaten > self._patience.lease:
            self._beaten = time.monotonic()
            self._launcher.kill(self._director)

    def _start_director(self) -> None:
        work = functools.partial(
            run_director, self._rendezvous.meeting, self._first, self._patience, self._auto_commit
        )
        self._director = self._launcher.start(work)
        self._beaten = time.monotonic()

    def _end(self, pid: int) -> None:
        if pid == self._director:
            self._start_director()
            return
        for rank in [rank for rank, at in self._pids.items() if at == pid]:
            del self._pids[rank]
            self._link.send(encode(Died(rank), ORDERS))

    def _follow(self, notice: Launch | Kill | Finished | Refused | Beat) -> None:
        match notice:
            case Launch(rank, ballot):
                seat = Seat(rank, ballot, self._rendezvous.meeting, self._patience, self._niceness)
                self._pids[rank] = self._launcher.start(functools.partial(self._main, seat))
            case Kill(rank) if rank in self._pids:
                self._launcher.kill(self._pids[rank])
            case Finished() | Refused():
                self._outcomes.put(notice)
            case Beat():
                self._beaten = time.monotonic()

    # In the threads of launcher and link

    def _ended(self, pid: int, code: int) -> None:
        self._happened.put(functools.partial(self._end, pid))

    def _deliver(self, data: bytes) -> None:
        self._happened.put(functools.partial(self._follow, decode_any(data, NOTICES)))

    def _find(self) -> Address | None:
        return find_director(self._rendezvous)

    def _greet(self) -> tuple[bytes, ...]:
        return HOST_GREETING, encode(Alive(tuple(sorted(self._pids))), ORDERS)

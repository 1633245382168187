"""Preparing a stage in the background, while the rank serves or waits to join: connect and warm up, pull
weights, make the new tables, capture."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable

import attrs

from elastic_ep.errors import DeadlineError, FencedError
from elastic_ep.niceness import be_nice
from elastic_ep.placement import Placement
from elastic_ep.routing import RoutingTables, tables
from elastic_ep.service import Service
from elastic_ep.staging import Copy, Stage
from elastic_ep.transport import Op, Span, Transport, size_of
from elastic_ep.tuning import LENGTH, Tuning
from elastic_ep.wire import Ballot

NAP = 0.0005
"""Seconds between looks at a transfer; the rank's main thread polls the transport."""

DRAIN_NAP = 0.01
"""Seconds between looks at a service that is to become idle."""


@attrs.frozen
class Preparation:
    """What came of preparing: peers that were connected to, the tables of the stage's placement, and whether
    experts are missing from it."""

    ballot: Ballot
    placement: Placement
    peers: dict[int, str]
    tables: RoutingTables | None
    seconds: float
    why: str = ""
    degraded: bool = False


class Preparer:
    """One rank's background work, one stage at a time, in a thread.

    A joiner's has the priority ``niceness``, see `at_niceness`; one of a rank that serves has that of the
    rank, since a thread that holds the interpreter and is not let run would hold up the serving one.
    ``contents[layer, slot]`` is the expert whose weights lie there. Called in the thread: ``meet`` with rank
    and name of each new peer, once it is connected; ``capture`` for a joiner, when its weights are there;
    ``done`` at the end.
    """

    def __init__(
        self,
        rank: int,
        service: Service,
        transport: Transport,
        tuning: Tuning,
        meet: Callable[[int, str], None],
        capture: Callable[[], None],
        done: Callable[[Preparation], None],
        seconds: float,
        niceness: int,
    ) -> None:
        self.contents: dict[tuple[int, int], int] = {}
        self._rank = rank
        self._service = service
        self._transport = transport
        self._tuning = tuning
        self._meet = meet
        self._capture = capture
        self._done = done
        self._seconds = seconds
        self._niceness = niceness
        self._cancelled = threading.Event()
        self._given_up: tuple[threading.Thread, float] | None = None
        self._thread: threading.Thread | None = None
        self._reads: list[Op] = []

    def start(
        self,
        ballot: Ballot,
        stage: Stage,
        cards: Iterable[tuple[int, bytes]],
        known: dict[int, str],
        joins: bool,
        drains: bool = False,
    ) -> None:
        """Begin, once an earlier preparation has ended. ``known`` are the peers that are connected. One that
        ``drains`` is done when its service is idle."""
        earlier, self._cancelled = self._thread, threading.Event()
        work = _Work(stage, tuple(cards), dict(known), joins, drains, self._cancelled)

        def run() -> None:
            if earlier is not None:
                earlier.join()
            began, why, made = time.monotonic(), "", None
            try:
                if joins:
                    be_nice(self._niceness)
                made = self._prepare(work)
            except Exception as error:  # noqa: BLE001 - whatever a model or a compiler raises fails the stage
                why = f"{type(error).__name__}: {error}"
            degraded, seconds = bool(stage.placement.missing()), time.monotonic() - began
            self._done(Preparation(ballot, stage.placement, work.new, made, seconds, why, degraded))

        self._thread = threading.Thread(target=run, name="prepare", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        self._cancelled.set()
        going_on = self._given_up is not None and self._given_up[0].is_alive()
        if self._thread is not None and not going_on:
            self._given_up = self._thread, time.monotonic()

    @property
    def hangs(self) -> bool:
        """Whether one goes on, and has for too long, though it was cancelled: nothing can be prepared here
        any more."""
        if self._given_up is None:
            return False
        thread, since = self._given_up
        return thread.is_alive() and time.monotonic() - since > self._seconds

    def settle(self) -> None:
        """Wait until nothing is under way, so that others may write the slots. Polls, for the main thread."""
        while (self._thread is not None and self._thread.is_alive()) or self._reading():
            self._transport.poll()
            time.sleep(NAP)

    def load(self, layer: int, expert: int, slot: int) -> None:
        """Bring an expert into a slot from outside the group."""
        self.contents.pop((layer, slot), None)
        self._service.load_expert(layer, expert, slot)
        self._filled(layer, slot, expert)

    def _filled(self, layer: int, slot: int, expert: int) -> None:
        """The weights are on the host; the device follows before anybody is told."""
        if self._service.device is not None:
            self._service.device.fill(layer, slot)
        self.contents[layer, slot] = expert

    def _prepare(self, work: "_Work") -> RoutingTables:
        self._settle_reads(work)
        ops = []
        for rank, card in work.cards:
            if rank != self._rank and rank not in work.known:
                ops.append(self._transport.connect(card))
                work.new[rank] = ops[-1].peer
        self._wait(ops, work)
        for rank, peer in work.new.items():
            self._meet(rank, peer)
        self._pull_dense(work)
        self._pull_experts(work)
        for load in work.stage.loads:
            rank, slot = divmod(load.target, self._service.shape.slots)
            if rank == self._rank:
                self._check(work)
                self.load(load.layer, load.expert, slot)
        made = tables(work.stage.placement)
        if work.joins:
            self._tuning.keep(self._service.tune(self._pull_tuning(work)))
            self._capture()
        while work.drains and not self._service.idle:
            self._check(work)
            time.sleep(DRAIN_NAP)
        return made

    def _settle_reads(self, work: "_Work") -> None:
        """Reads that were given up may land still: not into slots that are filled anew."""
        while self._reading():
            self._check(work)
            time.sleep(NAP)
        self._reads = []

    def _reading(self) -> bool:
        return any(op.error is None and not op.done for op in self._reads)

    def _pull_dense(self, work: "_Work") -> None:
        if not work.joins:
            return
        source = self._source(work)
        if source is None:
            self._service.load_dense()
            return
        names = {f"dense.{name}": size_of(tensor) for name, tensor in self._service.dense.items()}
        self._read(source, [Span(name, 0, name, 0, size) for name, size in names.items()], work)

    def _pull_tuning(self, work: "_Work") -> bytes | None:
        source = self._source(work)
        if source is None:
            return None
        self._read(source, [LENGTH], work)
        self._read(source, self._tuning.contents(), work)
        return self._tuning.found

    def _source(self, work: "_Work") -> int | None:
        """The rank that a joiner reads what all have from, if any serves."""
        sources = (pull.source for pull in work.stage.dense if pull.joiner == self._rank)
        return next(sources, None)

    def _pull_experts(self, work: "_Work") -> None:
        by_source = defaultdict[int, list[Copy]](list)
        for copy in work.stage.incoming(self._rank):
            by_source[self._service.shape.rank_of(copy.source)].append(copy)
        for source, copies in sorted(by_source.items()):
            slots = {(copy.layer, copy.target % self._service.shape.slots): copy.expert for copy in copies}
            for place in slots:
                self.contents.pop(place, None)
            self._read(source, [span for copy in copies for span in self._spans(copy)], work)
            for (layer, slot), expert in slots.items():
                self._check(work)
                self._filled(layer, slot, expert)

    def _spans(self, copy: Copy) -> Iterable[Span]:
        shape = self._service.shape
        for name, tensor in self._service.experts.items():
            size = size_of(tensor[0, 0])
            here, there = (
                (copy.layer * shape.slots + physical % shape.slots) * size
                for physical in (copy.target, copy.source)
            )
            yield Span(f"experts.{name}", here, f"experts.{name}", there, size)

    def _read(self, source: int, spans: list[Span], work: "_Work") -> None:
        if not spans:
            return
        peers = work.known | work.new
        op = self._transport.read(peers[source], spans)
        self._reads.append(op)
        self._wait([op], work)

    def _wait(self, ops: list[Op], work: "_Work") -> None:
        deadline = time.monotonic() + self._seconds
        while not all(op.done for op in ops):
            for op in ops:
                if op.error is not None:
                    raise op.error
            self._check(work)
            if time.monotonic() > deadline:
                late = sorted(op.peer for op in ops if not op.done)
                raise DeadlineError(f"after {self._seconds} s still waiting for {late}")
            time.sleep(NAP)

    def _check(self, work: "_Work") -> None:
        if work.cancelled.is_set():
            raise FencedError("the preparation was cancelled")


@attrs.define
class _Work:
    """One stage under preparation; ``new`` are the peers connected to so far."""

    stage: Stage
    cards: tuple[tuple[int, bytes], ...]
    known: dict[int, str]
    joins: bool
    drains: bool
    cancelled: threading.Event
    new: dict[int, str] = attrs.Factory(dict)

"""What the processes of `benchmarks/elastic.py` run in its modes.

C is the library as it is. B captures again at each commit. A prepares nothing: at the commit nobody serves,
while each rank tears its data plane down, makes a new one, meets the others, pulls weights and captures
again. In all of them the joiner's process is there before the commit, which flatters A.
"""

import time
from collections.abc import Callable

import attrs
from elastic_ep import (
    Ballot,
    CommitAt,
    EagerRunner,
    Note,
    Placement,
    Run,
    Runner,
    Seat,
    Service,
    Shape,
    Stage,
    Transport,
)
from elastic_ep.codec import decode, encode
from elastic_ep.prepare import Preparation
from elastic_ep.rank import Cards, Rank
from elastic_ep.testing.toy import ToyConfig


def compiled() -> Runner:
    """For modes A and C. Imported late: the compiler is wanted only in some groups."""
    from elastic_ep.runner_compiled import CompiledRunner

    return CompiledRunner()


def compiled_anew() -> Runner:
    """For mode B."""
    from elastic_ep.runner_compiled import CompiledRunner

    return CompiledRunner(in_place=False)


def eager_anew() -> Runner:
    """For mode B: there is nothing to capture, so little to do again."""
    runner = EagerRunner()
    runner.in_place = False
    return runner


@attrs.frozen
class Course:
    """One size of group and kind of program. ``cycles`` of growing and shrinking in mode C; fewer in A and
    B."""

    few: int
    many: int
    cycles: int
    baseline_cycles: int
    compiles: bool = False
    quiet: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.few}_to_{self.many}{'_compiled' if self.compiles else ''}"

    @property
    def config(self) -> ToyConfig:
        return ToyConfig(Shape(layers=1, experts=2 * self.few, slots=5, max_ranks=self.many), hidden=32)

    def runner(self, anew: bool = False) -> Callable[[], Runner]:
        if self.compiles:
            return compiled_anew if anew else compiled
        return eager_anew if anew else EagerRunner


def run_blocking(
    seat: Seat,
    build: Callable[[int], Service],
    make_transport: Callable[[str], Transport],
    make_runner: Callable[[], Runner],
) -> None:
    """A rank's process in mode A; see `elastic_ep.run_rank`."""
    BlockingRank(seat, build(seat.rank), make_transport, make_runner).serve()


class BlockingRank(Rank):
    """Answers that it is prepared, and does all of the work when it switches."""

    stage: Stage
    meets: tuple[int, ...]

    def start_prepare(self, ballot: Ballot, stage: Stage, cards: Cards) -> None:
        self.stage = stage
        now = self.member.placement
        old = tuple(rank for rank, _ in cards) if now is None else now.ranks
        self.meets = tuple(sorted({*old, *stage.placement.ranks}))
        self.inbox.put(Preparation(ballot, stage.placement, {}, None, 0.0))

    def announce(self, run: Run, note: Note) -> None:
        if run.announce is not None and run.also:
            self.rendezvous.publish(f"at {run.announce.epoch}", encode(run.announce))

    def overheard(self) -> list[CommitAt]:
        found = self.rendezvous.look(f"at {self.member.ballot.epoch}")
        message = None if found is None else decode(found)
        return [message] if isinstance(message, CommitAt) else []

    def switch(self, epoch: int, placement: Placement) -> None:
        contents, first = self.plane.preparer.contents, self.plane.step.captures == 0
        self._gather(f"halt {epoch}", b"halted")
        self.plane.transport.close()
        self.plane = self.make_plane()
        self.plane.preparer.contents = contents
        cards = self._gather(f"card {epoch}", self.plane.card)
        self.plane.preparer.start(self.member.ballot, self.stage, cards, {}, joins=first)
        prepared = self._await_preparation()
        if prepared.tables is None:
            raise RuntimeError(prepared.why)
        self.plane.peers = prepared.peers
        self.tables.write(prepared.tables)
        if not first:
            self.plane.step.capture()
        self._gather(f"done {epoch}", b"done")

    def _await_preparation(self) -> Preparation:
        others = []
        while True:
            self.plane.transport.poll()
            if self.inbox.empty():
                time.sleep(0.0005)
            elif isinstance(came := self.inbox.get(), Preparation):
                break
            else:
                others.append(came)
        for other in others:
            self.inbox.put(other)
        return came

    def _gather(self, what: str, own: bytes) -> tuple[tuple[int, bytes], ...]:
        """What each rank that takes part says; polls meanwhile, so that others can read from this one."""
        self.rendezvous.publish(f"{what} {self.seat.rank}", own)
        found: dict[int, bytes] = {}
        while len(found) < len(self.meets):
            for rank in set(self.meets) - set(found):
                said = self.rendezvous.look(f"{what} {rank}")
                if said is not None:
                    found[rank] = said
            self.plane.transport.poll()
            time.sleep(0.0005)
        return tuple(sorted(found.items()))

"""A world for the two machines: processes, a control bus and a data plane that may do anything, and what
must hold in it.

Every order of delivery is the caller's choice, so a run is a list of choices and can be repeated. Control
messages travel as bytes.
"""

from collections.abc import Iterable

import attrs

from elastic_ep import (
    COORDINATOR,
    EMPTY,
    Apply,
    Ballot,
    Boundary,
    CancelPrepare,
    CommitAt,
    CommitNow,
    Completed,
    Coordinator,
    Died,
    Event,
    Exit,
    Fence,
    Finished,
    Flip,
    Heard,
    Hello,
    Interrupt,
    Kill,
    Launch,
    LeaseDue,
    Member,
    MemberEvent,
    MemberPhase,
    OnLoss,
    Phase,
    Placement,
    PrepareEnded,
    Received,
    Refused,
    Run,
    Scale,
    Send,
    Shape,
    Stage,
    StartPrepare,
    Tell,
    Tick,
    Unresponsive,
    act,
    coordinate,
    decode,
    encode,
    join,
    nobody,
    place,
    resize,
)

SHAPE = Shape(layers=2, experts=4, slots=3, max_ranks=5)


@attrs.define(eq=False)
class Process:
    """One life of a rank: its machine, what runs in it, and what lies in its expert slots."""

    member: Member
    frozen: bool = False
    running: tuple[int, int] | None = None
    preparing: tuple[Ballot, Stage] | None = None
    arrived: set[tuple[int, int, int]] = attrs.Factory(set)
    applied: list[int] = attrs.Factory(list)
    contents: dict[tuple[int, int], int] = attrs.Factory(dict)


@attrs.frozen
class Part:
    """One rank's part of one step, on its way to another rank."""

    epoch: int
    step: int
    sender: int
    announce: CommitAt | None


class World:
    def __init__(self, on_loss: OnLoss = OnLoss.RELOAD) -> None:
        self.coordinator = Coordinator(nobody(SHAPE), "model", on_loss)
        self.processes: dict[int, Process] = {}
        self.control: list[tuple[int, bytes]] = []
        self.data: list[tuple[Process, Part]] = []
        self.to_kill: list[Process] = []
        self.unnoticed: list[Process] = []
        self.outcomes: list[Finished] = []
        self.refusals: list[Refused] = []
        self.fences: set[Ballot] = set()
        self.served: dict[tuple[int, frozenset[int]], int] = {}
        self.placements: dict[int, Placement] = {}

    # What happens to the coordinator

    def event(self, event: Event) -> None:
        self.coordinator, actions = coordinate(self.coordinator, event)
        if not self.coordinator.placement.ranks:
            # Nobody is left who has applied a step, so a new group may start where the coordinator knows of.
            self.served.clear()
        for action in actions:
            match action:
                case Send(to, message):
                    if isinstance(message, Fence):
                        self.fences.add(message.ballot)
                    self.control.append((to, encode(message)))
                case Launch(rank, ballot):
                    assert rank not in self.processes, "a rank id is used again while its process lives"
                    hello = Hello(ballot.epoch, ballot.attempt, rank, "model", b"card")
                    self.processes[rank] = Process(join(hello))
                    self.control.append((COORDINATOR, encode(hello)))
                case Kill(rank) if rank in self.processes:
                    self.to_kill.append(self.processes[rank])
                case Finished():
                    self.outcomes.append(action)
                case Refused():
                    self.refusals.append(action)

    def restart_coordinator(self) -> None:
        """It comes back with its last state; nothing that it sent or would have heard arrives."""
        self.control.clear()

    # What happens to members

    def member_event(self, process: Process, event: MemberEvent) -> None:
        process.member, actions = act(process.member, event)
        for action in actions:
            match action:
                case Tell(message):
                    self.control.append((COORDINATOR, encode(message)))
                case StartPrepare(ballot, stage):
                    assert process.preparing is None
                    self._check_targets_unrouted(stage)
                    process.preparing = ballot, stage
                case CancelPrepare():
                    self._cancel(process)
                case Flip(epoch, placement):
                    self._check_flip(process, epoch, placement)
                case Run():
                    self._run(process, action)
                case Apply(step):
                    expected = process.applied[-1] + 1 if process.applied else step
                    assert step == expected, "a step is applied twice or left out"
                    process.applied.append(step)
                case Interrupt():
                    process.running = None
                case Exit():
                    self.crash(process)

    def crash(self, process: Process) -> None:
        if self.processes.get(process.member.rank) is process:
            del self.processes[process.member.rank]
            self.unnoticed.append(process)
        self.data = [(to, part) for to, part in self.data if to is not process]

    def notice(self, process: Process) -> None:
        """The launcher sees that the process has ended."""
        self.unnoticed.remove(process)
        self.event(Died(process.member.rank))

    def deliver(self, index: int, keep: bool = False) -> None:
        """Deliver a control message, and maybe leave a duplicate on the way."""
        to, data = self.control[index]
        if not keep:
            del self.control[index]
        if to == COORDINATOR:
            self.event(Received(decode(data)))
        elif to in self.processes and not self.processes[to].frozen:
            self.member_event(self.processes[to], Heard(decode(data)))

    def deliver_part(self, index: int, keep: bool = False) -> None:
        process, part = self.data[index]
        if process.frozen:
            return
        if not keep:
            del self.data[index]
        process.arrived.add((part.epoch, part.step, part.sender))
        if part.announce is not None:
            self.member_event(process, Heard(part.announce))

    def spin(self, process: Process) -> None:
        """One turn of the serving loop."""
        if process.frozen:
            return
        if process.running is None:
            self.member_event(process, Boundary())
            return
        placement = process.member.placement
        assert placement is not None
        if {(*process.running, rank) for rank in placement.ranks} <= process.arrived:
            (epoch, step), process.running = process.running, None
            self._check_served(process.member.rank, epoch, step, placement)
            self.member_event(process, Completed(epoch, step))

    def end_prepare(self, process: Process, why: str = "") -> None:
        """The background work ends; it fails by itself if a rank it reads from is gone."""
        if process.preparing is None or process.frozen:
            return
        (ballot, stage), process.preparing = process.preparing, None
        why = why or self._copy(process, stage, len(stage.copies))
        self.member_event(process, PrepareEnded(ballot, why))

    def _cancel(self, process: Process) -> None:
        """A preparation that is cancelled may have done half of its work."""
        if process.preparing is not None:
            _, stage = process.preparing
            process.preparing = None
            self._copy(process, stage, len(stage.copies) // 2)

    def _copy(self, process: Process, stage: Stage, count: int) -> str:
        for load in stage.loads:
            if SHAPE.rank_of(load.target) == process.member.rank:
                process.contents[load.layer, load.target] = load.expert
        for copy in stage.incoming(process.member.rank)[:count]:
            source = self.processes.get(SHAPE.rank_of(copy.source))
            if source is None:
                return "a source is gone"
            process.contents[copy.layer, copy.target] = source.contents[copy.layer, copy.source]
        return ""

    def _run(self, process: Process, run: Run) -> None:
        assert process.running is None
        assert process.member.placement is not None
        process.running = run.epoch, run.step
        part = Part(run.epoch, run.step, process.member.rank, run.announce)
        for rank in (*process.member.placement.ranks, *run.also):
            if rank in self.processes:
                self.data.append((self.processes[rank], part))

    # What must hold

    def _check_targets_unrouted(self, stage: Stage) -> None:
        for process in self.processes.values():
            if process.member.serves and process.member.placement is not None:
                table = process.member.placement.table
                assert all(table[copy.layer][copy.target] == EMPTY for copy in stage.copies)

    def _check_flip(self, process: Process, epoch: int, placement: Placement) -> None:
        assert process.running is None, "the tables change inside a step"
        assert self.placements.setdefault(epoch, placement) == placement, "an epoch has two placements"
        rank = process.member.rank
        resumes = any(fence.epoch == epoch for fence in self.fences)
        for layer in range(SHAPE.layers):
            for slot, expert in enumerate(placement.row(layer, rank) if rank in placement.ranks else ()):
                if resumes:
                    process.contents[layer, rank * SHAPE.slots + slot] = expert
                held = process.contents.get((layer, rank * SHAPE.slots + slot))
                assert expert in (EMPTY, held), "a slot is routed to that holds other weights"

    def _check_served(self, rank: int, epoch: int, step: int, placement: Placement) -> None:
        """One epoch serves a step of a rank set; only after a fence may a later one serve it again."""
        key = step, frozenset(placement.ranks)
        latest = self.served.get(key, epoch)
        fenced = any(latest < fence.epoch <= epoch for fence in self.fences)
        assert epoch <= latest or fenced, "two epochs serve one step"
        assert epoch >= latest or rank in self.coordinator.gone, "a fenced epoch serves on"
        self.served[key] = max(epoch, latest)

    # Without faults

    def turn(self) -> None:
        """Everything that is due happens once; no message is lost."""
        for process in list(self.unnoticed):
            self.notice(process)
        for process in self.to_kill:
            self.crash(process)
        self.to_kill.clear()
        for due in range(len(self.control), 0, -1):
            if len(self.control) >= due:
                self.deliver(0)
        for process, part in list(self.data):
            if (process, part) in self.data:
                self.deliver_part(self.data.index((process, part)))
        for process in list(self.processes.values()):
            self.end_prepare(process)
            self.spin(process)

    def settle(self) -> None:
        """Once faults stop, the group comes to rest and serves, or is empty."""
        self.go_on()
        self.check_rest()
        self.check_serves()

    def go_on(self) -> None:
        """Everything goes its way, and ranks that are frozen lose their lease, until all is at rest."""
        for _ in range(60):
            for rank, process in list(self.processes.items()):
                if process.frozen:
                    self.event(Unresponsive(rank))
            if self.coordinator.phase == Phase.PREPARED:
                self.event(CommitNow())
            self.event(Tick())
            for process in list(self.processes.values()):
                self.member_event(process, LeaseDue())
            self.turn()
            if self.rests():
                return

    def rests(self) -> bool:
        quiet = self.coordinator.phase == Phase.STABLE and not self.coordinator.gone
        return quiet and not self.to_kill and not self.unnoticed

    def check_rest(self) -> None:
        assert self.rests(), f"no rest: {self.coordinator.phase}, waiting for {self.coordinator.waiting}"
        assert set(self.processes) == set(self.coordinator.placement.ranks)
        for process in self.processes.values():
            assert process.member.phase == MemberPhase.ACTIVE
            assert process.member.placement == self.coordinator.placement
            assert process.member.serving == self.coordinator.epoch

    def check_serves(self) -> None:
        """Every rank applies three more steps; none if experts are missing."""
        before = {rank: len(process.applied) for rank, process in self.processes.items()}
        for _ in range(20):
            self.turn()
        more = {rank: len(process.applied) - before[rank] for rank, process in self.processes.items()}
        if self.coordinator.placement.missing() and self.coordinator.on_loss != OnLoss.DEGRADE:
            assert not any(more.values()), "a step is run with experts missing"
        else:
            assert all(count >= 3 for count in more.values())

    def grow_from_nothing(self, ranks: Iterable[int]) -> None:
        """Bring a first group up."""
        target = tuple(ranks)
        plan = resize(nobody(SHAPE), target)
        assert plan.after == place(SHAPE, target)
        self.event(Scale(plan))
        self.settle()
        assert self.outcomes.pop() == Finished(True, "")

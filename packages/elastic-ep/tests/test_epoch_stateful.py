"""Any order of any faults: operations, cancels, crashes, freezes, false alarms, losses, repeats, restarts.
Balancing passes run among them, and make way."""

from elastic_ep import (
    Cancel,
    CommitNow,
    Finished,
    OnLoss,
    Phase,
    Plan,
    PlanError,
    Refused,
    Scale,
    Tick,
    Unresponsive,
    rebalance,
    resize,
)
from elastic_ep.testing.world import SHAPE, Process, World
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

ranks = st.sets(st.integers(0, SHAPE.max_ranks - 1), min_size=2)
which = st.integers(0, 99)


class AnyFaults(RuleBasedStateMachine):
    """The world checks itself at every flip and step; at the end it must come to rest and serve."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.late: list[tuple[int, bytes]] = []
        self.asked = 0

    def process(self, index: int) -> Process:
        processes = list(self.world.processes.values())
        return processes[index % len(processes)]

    @initialize(first=ranks, on_loss=st.sampled_from(OnLoss))
    def start(self, first: set[int], on_loss: OnLoss) -> None:
        self.world = World(on_loss)
        self.world.grow_from_nothing(sorted(first))

    def plan(self, new: set[int], even_out: bool) -> Plan | None:
        placement = self.world.coordinator.placement
        load = [[float(1 + (7 * e + len(new)) % 5) for e in range(SHAPE.experts)]] * SHAPE.layers
        try:
            return rebalance(placement, load) if even_out else resize(placement, new)
        except PlanError:
            return None

    @precondition(lambda self: self.world.coordinator.phase == Phase.STABLE or self.yields())
    @rule(new=ranks, even_out=st.booleans(), again=st.booleans())
    def scale(self, new: set[int], even_out: bool, again: bool) -> None:
        plan = self.plan(new, even_out)
        if plan is not None:
            asked = Scale(plan, str(self.asked))
            self.asked += 1
            for _ in range(1 + again):
                self.world.event(asked)

    @precondition(lambda self: self.world.coordinator.phase == Phase.STABLE)
    @rule(new=ranks)
    def balance(self, new: set[int]) -> None:
        plan = self.plan(new, True)
        if plan is not None:
            self.world.event(Scale(plan, yields=True))

    def yields(self) -> bool:
        operation = self.world.coordinator.operation
        return operation is not None and operation.yields

    @rule()
    def commit(self) -> None:
        self.world.event(CommitNow())

    @rule()
    def cancel(self) -> None:
        self.world.event(Cancel())

    @rule()
    def tick(self) -> None:
        self.world.event(Tick())

    @rule(turns=st.integers(1, 4))
    def go_on(self, turns: int) -> None:
        for _ in range(turns):
            self.world.turn()

    @precondition(lambda self: self.world.control)
    @rule(index=which, keep=st.booleans())
    def deliver(self, index: int, keep: bool) -> None:
        self.world.deliver(index % len(self.world.control), keep)

    @precondition(lambda self: self.world.control)
    @rule(index=which)
    def lose(self, index: int) -> None:
        del self.world.control[index % len(self.world.control)]

    @precondition(lambda self: self.world.control)
    @rule(index=which)
    def repeat_later(self, index: int) -> None:
        self.late.append(self.world.control[index % len(self.world.control)])

    @precondition(lambda self: self.late)
    @rule(index=which)
    def late_arrival(self, index: int) -> None:
        self.world.control.append(self.late.pop(index % len(self.late)))

    @precondition(lambda self: self.world.data)
    @rule(index=which, keep=st.booleans())
    def deliver_part(self, index: int, keep: bool) -> None:
        self.world.deliver_part(index % len(self.world.data), keep)

    @precondition(lambda self: self.world.processes)
    @rule(index=which)
    def spin(self, index: int) -> None:
        self.world.spin(self.process(index))

    @precondition(lambda self: self.world.processes)
    @rule(index=which, why=st.sampled_from(["", "", "no memory"]))
    def end_prepare(self, index: int, why: str) -> None:
        self.world.end_prepare(self.process(index), why)

    @precondition(lambda self: self.world.processes)
    @rule(index=which)
    def crash(self, index: int) -> None:
        self.world.crash(self.process(index))

    @precondition(lambda self: self.world.unnoticed)
    @rule(index=which)
    def notice(self, index: int) -> None:
        self.world.notice(self.world.unnoticed[index % len(self.world.unnoticed)])

    @precondition(lambda self: self.world.processes)
    @rule(index=which)
    def freeze_or_thaw(self, index: int) -> None:
        process = self.process(index)
        process.frozen = not process.frozen

    @precondition(lambda self: self.world.processes)
    @rule(index=which)
    def lease_runs_out(self, index: int) -> None:
        self.world.event(Unresponsive(self.process(index).member.rank))

    @rule()
    def restart_coordinator(self) -> None:
        self.world.restart_coordinator()

    def teardown(self) -> None:
        """At rest, everybody who asked was told what came of it: one thing, however often."""
        self.world.settle()
        ends: set[Finished | Refused] = {*self.world.outcomes, *self.world.refusals}
        told = [end.ticket for end in ends if end.ticket]
        assert self.world.coordinator.next is None
        assert sorted(told) == sorted(map(str, range(self.asked)))


AnyFaults.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
test_any_faults = AnyFaults.TestCase

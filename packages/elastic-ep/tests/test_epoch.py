"""The two machines against crashes, freezes, losses, delays and duplicates at every message."""

import itertools

import attrs
import pytest
from elastic_ep import (
    COORDINATOR,
    Aborted,
    Ballot,
    Cancel,
    Check,
    CommitNow,
    Committed,
    Completed,
    Coordinator,
    Died,
    Expired,
    Finished,
    Hello,
    Kill,
    Member,
    OnLoss,
    Overdue,
    Phase,
    PrepareFailed,
    Reason,
    Received,
    Refused,
    Resume,
    Scale,
    Send,
    Shape,
    Stopped,
    Suspect,
    Tell,
    Tick,
    Unresponsive,
    act,
    coordinate,
    decode,
    nobody,
    place,
    rebalance,
    resize,
)
from elastic_ep.testing.world import SHAPE, World
from hypothesis import given, settings
from hypothesis import strategies as st

SCENARIOS = {
    "start": ((), (0, 2, 3)),
    "grow": ((1, 2), (1, 2, 4)),
    "shrink": ((0, 1, 2), (1, 2)),
    "replace": ((0, 2), (2, 3)),
}
FAULTS = (
    "lose",
    "repeat",
    "repeat later",
    "delay",
    "crash sender",
    "crash receiver",
    "freeze receiver",
    "restart coordinator",
)


class FaultyWorld(World):
    """A world in which one fault strikes at the n-th message of an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.fault = ""
        self.countdown = -1
        self.moments = 0
        self.late: list[tuple[int, bytes]] = []

    def deliver(self, index: int, keep: bool = False) -> None:
        to, data = self.control[index]
        message = decode(data)
        if self._strikes():
            self._strike(to, message.sender, index)
        elif index < len(self.control):
            super().deliver(index, keep)

    def deliver_part(self, index: int, keep: bool = False) -> None:
        process, part = self.data[index]
        if self._strikes() and self.fault.startswith(("crash", "freeze", "repeat")):
            keep = self.fault == "repeat"
            self._hit(process.member.rank, part.sender)
        elif index < len(self.data):
            super().deliver_part(index, keep)

    def _strikes(self) -> bool:
        self.countdown -= 1
        self.moments += 1
        return self.countdown == -1

    def _strike(self, to: int, sender: int, index: int) -> None:
        match self.fault:
            case "lose":
                del self.control[index]
            case "repeat":
                super().deliver(index, keep=True)
            case "repeat later":
                self.late.append(self.control[index])
                super().deliver(index)
            case "delay":
                self.control.append(self.control.pop(index))
            case "restart coordinator":
                self.restart_coordinator()
            case _:
                self._hit(to, sender)

    def _hit(self, to: int, sender: int) -> None:
        process = self.processes.get(sender if self.fault == "crash sender" else to)
        if process is None:
            return
        if self.fault == "freeze receiver":
            process.frozen = True
        elif self.fault.startswith("crash"):
            self.crash(process)


def started(ranks: tuple[int, ...]) -> FaultyWorld:
    world = FaultyWorld()
    if ranks:
        world.grow_from_nothing(ranks)
    return world


def run_with_fault(scenario: str, fault: str, moment: int) -> FaultyWorld:
    old, new = SCENARIOS[scenario]
    world = started(old)
    plan = resize(world.coordinator.placement, new)
    world.fault, world.countdown, world.moments = fault, moment, 0
    world.event(Scale(plan))
    world.go_on()
    world.countdown = -1
    moments = world.moments
    world.settle()
    world.control += world.late
    world.settle()
    world.moments = moments
    return world


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(sorted(SCENARIOS)), st.sampled_from(FAULTS), st.integers(0, 140))
def test_one_fault_at_any_message(scenario: str, fault: str, moment: int) -> None:
    world = run_with_fault(scenario, fault, moment)
    if not fault.startswith(("crash", "freeze")):
        assert world.outcomes == [Finished(True, "")], (
            "a fault of the bus alone may cost time and nothing else"
        )
        assert world.coordinator.placement.ranks == SCENARIOS[scenario][1]


@pytest.mark.parametrize("scenario", sorted(SCENARIOS))
def test_without_faults_no_step_is_lost(scenario: str) -> None:
    world = run_with_fault(scenario, "", -1)
    assert world.outcomes == [Finished(True, "")]
    assert world.coordinator.placement.ranks == SCENARIOS[scenario][1]
    assert not world.fences


def masked(coordinator: Coordinator) -> Coordinator:
    """What it serves and does, without how the last operation ended and how often it was tried."""
    return attrs.evolve(coordinator, ballot=Ballot(0, 0), last=None)


def masked_members(world: World) -> dict[int, Member]:
    """What members serve and prepare, without how far they are and which try they heard of last."""
    return {
        rank: attrs.evolve(p.member, ballot=Ballot(0, 0), answer=Aborted(0, 0, 0), step=0, applied=0)
        for rank, p in world.processes.items()
    }


ENDINGS = ("cancel", "deadline", "joiner dies", "joiner hangs", "prepare fails")


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(ENDINGS), st.integers(0, 30))
def test_an_abort_leads_back_to_the_state_before(ending: str, moment: int) -> None:
    """Case 36: the coordinator, where the size is decided, and every member, where it follows."""
    world = started((1, 2))
    before, members = masked(world.coordinator), masked_members(world)
    world.event(Scale(resize(world.coordinator.placement, (1, 2, 4))))
    for _ in range(moment):
        if world.control:
            world.deliver(0)
        elif world.coordinator.phase == Phase.PREPARING:
            world.end_prepare(world.processes[4], "no room" if ending == "prepare fails" else "")
    if world.coordinator.phase not in (Phase.LAUNCHING, Phase.PREPARING):
        return
    match ending:
        case "cancel":
            world.event(Cancel())
        case "deadline":
            world.event(Expired(world.coordinator.ballot))
        case "joiner dies":
            world.crash(world.processes[4])
        case "joiner hangs":
            world.event(Unresponsive(4))
        case "prepare fails":
            ballot = world.coordinator.ballot
            world.event(Received(PrepareFailed(ballot.epoch, ballot.attempt, 4, "no room")))
    world.settle()
    assert [outcome.ok for outcome in world.outcomes] == [False]
    assert masked(world.coordinator) == before
    assert masked_members(world) == members
    world.event(Scale(resize(world.coordinator.placement, (1, 2, 4))))
    world.settle()
    assert world.outcomes[-1] == Finished(True, "")


def test_a_joiner_that_was_dismissed_and_seen_dead_is_not_dismissed_again_by_a_fence() -> None:
    world = started((1, 2))
    world.event(Scale(resize(world.coordinator.placement, (1, 2, 4))))
    while world.coordinator.phase != Phase.PREPARED:
        world.turn()
    world.event(Cancel())
    world.crash(world.processes[4])
    world.notice(world.unnoticed[0])
    assert world.coordinator.phase.name == "ABORTING"
    world.crash(world.processes[2])
    world.settle()
    assert world.coordinator.gone == ()


def test_a_rank_says_that_it_has_switched_when_none_runs_its_first_step_any_more() -> None:
    """Each step needs all, so one that completes the second knows that all have completed the first."""
    world = started((1, 2))
    commit_until(world, 2)
    member = world.processes[1].member
    assert member.serving == 2
    assert member.step is not None
    told = []
    for step in (member.step, member.step + 1, member.step + 2):
        member, actions = act(member, Completed(2, step))
        told.append([type(action.message) for action in actions if isinstance(action, Tell)])
    assert told == [[], [Committed], []]


def commit_until(world: World, switched: int) -> None:
    """Grow to a prepared stage, announce its commit, and stop the world when so many have switched."""
    world.event(Scale(resize(world.coordinator.placement, (1, 2, 4))))
    while world.coordinator.phase != Phase.PREPARED:
        world.turn()
    world.event(CommitNow())
    for rank in itertools.islice(itertools.cycle((1, 2)), 60):
        serving = [process.member.serving for process in world.processes.values()]
        announced = world.processes[2].member.at is not None or switched
        if announced and serving.count(2) == switched:
            return
        for _ in range(len(world.control)):
            world.deliver(0)
        for process, part in list(world.data):
            world.deliver_part(world.data.index((process, part)))
        world.spin(world.processes[rank])
    raise AssertionError("the commit never got so far")


@pytest.mark.parametrize(("switched", "ranks"), [(0, (1,)), (1, (1, 4))])
def test_a_death_inside_a_commit_goes_forward_only_if_a_survivor_has_switched(
    switched: int, ranks: tuple[int, ...]
) -> None:
    world = started((1, 2))
    commit_until(world, switched)
    world.crash(world.processes[2])
    world.settle()
    assert world.coordinator.placement.ranks == ranks
    assert world.outcomes == [Finished(False, "rank 2 died")]


def test_survivors_of_a_dead_leader_retry_its_step_once() -> None:
    """Case 37."""
    world = started((0, 1, 3))
    epoch = world.coordinator.epoch
    for rank in itertools.islice(itertools.cycle((0, 1, 3)), 60):
        world.spin(world.processes[rank])
        for process, part in list(world.data):
            world.deliver_part(world.data.index((process, part)))
        if world.processes[1].member.step != world.processes[3].member.step:
            break
    assert world.processes[1].member.step != world.processes[3].member.step
    world.crash(world.processes[0])
    world.settle()
    assert world.coordinator.placement == place(SHAPE, (0, 1, 3)).without({0})
    assert world.coordinator.epoch == epoch + 1
    assert len(world.fences) == 1


def test_a_frozen_rank_that_wakes_up_finds_nobody_to_serve_with() -> None:
    """Case 38: what it says and writes late does no harm."""
    world = started((0, 1, 3))
    zombie = world.processes[3]
    zombie.frozen = True
    world.event(Unresponsive(3))
    world.to_kill.clear()
    for _ in range(10):
        world.event(Tick())
        world.turn()
    assert world.coordinator.phase == Phase.STABLE
    assert world.coordinator.gone == (3,)
    zombie.frozen = False
    applied = len(zombie.applied)
    for _ in range(10):
        world.turn()
    assert len(zombie.applied) <= applied + 1
    world.event(Scale(resize(world.coordinator.placement, (0, 1, 3))))
    assert world.refusals == [
        Refused("ranks [3] of an earlier life have not ended yet; ask again, or take other ids", Reason.BUSY)
    ]
    world.event(Unresponsive(3))
    world.settle()
    world.event(Scale(resize(world.coordinator.placement, (0, 1, 3))))
    world.settle()
    assert world.outcomes == [Finished(True, "")]


@pytest.mark.parametrize("on_loss", list(OnLoss))
def test_the_last_replica_of_an_expert_dies(on_loss: OnLoss) -> None:
    world = World(on_loss)
    world.grow_from_nothing((0, 1, 3))
    for rank in (0, 1):
        world.crash(world.processes[rank])
    world.settle()
    missing = world.coordinator.placement.missing()
    assert missing, "three slots for four experts: one rank cannot hold them all"
    assert world.coordinator.runs is (on_loss == OnLoss.DEGRADE)
    world.event(Scale(resize(world.coordinator.placement, (2, 3))))
    world.settle()
    assert world.outcomes == [Finished(True, "")]
    assert not world.coordinator.placement.missing()


@pytest.mark.parametrize("on_loss", list(OnLoss))
def test_survivors_with_room_bring_lost_experts_in_before_the_next_step(on_loss: OnLoss) -> None:
    serving = place(Shape(layers=1, experts=7, slots=4, max_ranks=3), (0, 1, 2))
    lost = serving.without({1})
    assert lost.missing()
    state = Coordinator(serving, "model", on_loss, epoch=1, ballot=Ballot(1, 0))
    state, _ = coordinate(state, Died(1))
    for rank in (0, 2):
        state, actions = coordinate(state, Received(Stopped(2, 0, rank, 1, 5)))
    after = resize(lost, (0, 2)).after if on_loss == OnLoss.RELOAD else lost
    assert [action.message for action in actions if isinstance(action, Send)] == [
        Resume(2, 0, COORDINATOR, after, 5, on_loss != OnLoss.WAIT)
    ] * 2


def test_a_group_that_waits_leaves_a_rank_behind_when_it_shrinks() -> None:
    world = World(OnLoss.WAIT)
    world.grow_from_nothing((0, 1, 3))
    for rank in (1, 3):
        world.crash(world.processes[rank])
        world.settle()
    assert not world.coordinator.runs
    world.event(Scale(resize(world.coordinator.placement, (1, 3))))
    world.settle()
    assert world.outcomes[-1] == Finished(True, "")
    assert world.coordinator.placement.ranks == (1, 3)


def test_a_group_that_died_out_starts_again() -> None:
    world = started((0, 1))
    for rank in (0, 1):
        world.crash(world.processes[rank])
    world.settle()
    assert world.coordinator.placement == nobody(SHAPE)
    world.event(Scale(resize(nobody(SHAPE), (0, 2))))
    world.settle()
    assert world.outcomes == [Finished(True, "")]


def test_a_whole_life_of_messages_heard_again_changes_nothing() -> None:
    world = started((1, 2))
    heard: list[tuple[int, bytes]] = []
    deliver = world.deliver

    def record(index: int, keep: bool = False) -> None:
        heard.append(world.control[index])
        deliver(index, keep)

    world.deliver = record  # type: ignore[method-assign]
    for cancelled, target in [(True, (1, 2, 4)), (False, (1, 2, 4)), (False, (2, 4))]:
        world.event(Scale(resize(world.coordinator.placement, target)))
        for _ in range(3):
            world.turn()
        if cancelled:
            world.event(Cancel())
        world.settle()
    world.crash(world.processes[4])
    world.settle()
    before, members = world.coordinator, masked_members(world)
    for message in heard:
        world.control.append(message)
        deliver(len(world.control) - 1)
        assert world.coordinator == before
        assert masked_members(world) == members


def test_a_second_operation_is_refused_and_changes_nothing() -> None:
    world = started((1, 2))
    plan = resize(world.coordinator.placement, (1, 2, 4))
    world.event(Scale(plan))
    before = world.coordinator
    world.event(Scale(plan))
    world.event(CommitNow())
    assert world.coordinator == before
    assert ["another operation" in world.refusals[0].why, "nothing prepared" in world.refusals[1].why] == [
        True,
        True,
    ]
    world.settle()
    world.event(Cancel())
    world.event(Scale(plan))
    assert ["nothing to cancel" in world.refusals[2].why, "plan again" in world.refusals[3].why] == [
        True,
        True,
    ]


def test_a_joiner_with_another_fingerprint_is_turned_away() -> None:
    state, _ = coordinate(Coordinator(nobody(SHAPE), "model"), Scale(resize(nobody(SHAPE), (0, 1))))
    state, actions = coordinate(state, Received(Hello(1, 0, 1, "other model", b"")))
    assert state.phase == Phase.STABLE
    assert actions == (Kill(0), Kill(1), Finished(False, "rank 1 has fingerprint other model, not model"))


def test_a_rebalance_keeps_the_ranks_and_takes_as_many_epochs_as_stages() -> None:
    world = started((0, 1, 2))
    plan = rebalance(world.coordinator.placement, [[90.0, 1, 1, 1], [1, 1, 1, 90.0]])
    world.event(Scale(plan))
    world.settle()
    assert world.coordinator.placement == plan.after
    assert world.coordinator.epoch == 1 + len(plan.stages)
    assert not world.fences


def test_a_suspicion_is_checked_and_evicts_nobody() -> None:
    world = started((0, 1))
    member = world.processes[0].member
    _, actions = act(member, Overdue(1, "no part of step 7"))
    assert isinstance(actions[0], Tell)
    suspicion = actions[0].message
    assert isinstance(suspicion, Suspect)
    before = world.coordinator
    after, checks = coordinate(before, Received(suspicion))
    assert (after, checks) == (before, (Check(1, "rank 0: no part of step 7"),))
    assert coordinate(before, Received(attrs.evolve(suspicion, serving=0))) == (before, ())

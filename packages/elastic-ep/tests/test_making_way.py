"""A scale that is asked for while a balancing pass runs: the pass is rolled back or ends with its commit,
whichever is sooner, then the scale runs, and balancing goes on afterwards: case 42."""

import attrs
import pytest
from elastic_ep import (
    Begun,
    Cancel,
    CommitNow,
    Coordinator,
    Finished,
    Phase,
    Reason,
    Refused,
    Scale,
    coordinate,
    rebalance,
    resize,
)
from elastic_ep.testing.world import World
from hypothesis import given, settings
from hypothesis import strategies as st

from .test_epoch import masked, masked_members

RANKS = (0, 1, 3)
LOAD = [[90.0, 1, 1, 1], [1, 1, 1, 90.0]]
COMMITTING = (Phase.COMMITTING, Phase.RETIRING)


def balancing() -> World:
    world = World()
    world.grow_from_nothing(RANKS)
    begin_pass(world)
    return world


def creep(world: World) -> None:
    """The least that can happen next."""
    if world.coordinator.phase == Phase.PREPARED:
        world.event(CommitNow())
    if world.control:
        world.deliver(0)
    else:
        world.turn()


def begin_pass(world: World) -> None:
    plan = rebalance(world.coordinator.placement, LOAD)
    assert len(plan.stages) > 1
    world.event(Scale(plan, yields=True))


def idle(state: Coordinator) -> Coordinator:
    """The state if the operation that has begun had not."""
    return attrs.evolve(masked(state), phase=Phase.STABLE, stages=(), waiting=(), operation=None, next=None)


def growth(world: World, ticket: str) -> Scale:
    return Scale(resize(world.coordinator.placement, (0, 1, 3, 4)), ticket)


def has_ended(world: World) -> bool:
    return world.coordinator.operation is None or not world.coordinator.operation.yields


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 60))
def test_a_pass_is_rolled_back_or_ends_with_its_commit(moment: int) -> None:
    world = balancing()
    for _ in range(moment):
        creep(world)
    if has_ended(world):
        return
    before, members = idle(world.coordinator), masked_members(world)
    commits = world.coordinator.phase in COMMITTING
    retires = world.coordinator.phase == Phase.RETIRING
    world.event(growth(world, "growth"))
    while not has_ended(world):
        creep(world)
    if commits:
        assert world.coordinator.epoch == before.epoch + (not retires), "it went on to another stage"
    else:
        assert idle(world.coordinator) == before
        assert world.coordinator.operation is not None
        assert world.coordinator.operation.ticket == "growth"
        world.event(Cancel())
        world.settle()
        assert masked(world.coordinator) == before
        assert {rank: m.placement for rank, m in masked_members(world).items()} == {
            rank: m.placement for rank, m in members.items()
        }
    world.settle()
    world.event(growth(world, "again"))
    world.settle()
    assert world.coordinator.placement.ranks == (0, 1, 3, 4)
    begin_pass(world)
    world.settle()
    assert world.outcomes[-1] == Finished(True, "")
    assert not world.fences, "a step was lost"


def stopped_at(phase: Phase) -> World:
    world = balancing()
    while world.coordinator.phase != phase:
        creep(world)
    return world


@pytest.mark.parametrize("phase", [Phase.PREPARING, Phase.COMMITTING])
def test_what_waits_for_a_pass_can_be_cancelled_and_lets_nothing_else_in(phase: Phase) -> None:
    world = stopped_at(phase)
    first, second = growth(world, "first"), growth(world, "second")
    world.event(first)
    world.event(first)
    waiting = world.coordinator
    assert waiting.next == first
    world.event(second)
    assert world.coordinator == waiting
    assert [(refused.ticket, refused.reason) for refused in world.refusals] == [("second", Reason.BUSY)]
    world.event(Cancel())
    assert world.outcomes[-1] == Finished(False, "cancelled", "first")
    world.settle()
    assert world.coordinator.placement.ranks == RANKS
    assert len([end for end in world.outcomes if end.ticket == "first"]) == 1


def test_a_plan_that_a_finished_commit_has_overtaken_is_to_be_made_again() -> None:
    world = stopped_at(Phase.COMMITTING)
    world.event(growth(world, "growth"))
    world.settle()
    (refused,) = world.refusals
    assert (refused.ticket, refused.reason) == ("growth", Reason.OUTDATED)


def test_a_pass_makes_no_way_for_a_pass() -> None:
    world = stopped_at(Phase.PREPARING)
    before = world.coordinator
    begin_pass(world)
    assert world.coordinator == before
    assert [refused.reason for refused in world.refusals] == [Reason.BUSY]


def test_who_asks_again_is_told_again() -> None:
    world = World()
    world.grow_from_nothing(RANKS)
    asked = growth(world, "growth")
    state, actions = coordinate(world.coordinator, asked)
    assert actions[0] == Begun("growth")
    assert coordinate(state, asked) == (state, (Begun("growth"),))
    world.event(asked)
    world.settle()
    ended = world.coordinator
    assert coordinate(ended, asked) == (ended, (Begun("growth"), Finished(True, "", "growth")))
    _, (refused,) = coordinate(ended, attrs.evolve(asked, ticket="other"))
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.ticket) == (Reason.OUTDATED, "other")


def test_a_refusal_says_what_runs_since_when_and_what_to_do() -> None:
    """Case 44: and changes nothing."""
    world = World()
    world.grow_from_nothing(RANKS)
    state, _ = coordinate(world.coordinator, attrs.evolve(growth(world, "one"), since=3600.0))
    after, (refused,) = coordinate(state, growth(world, "two"))
    assert after == state
    assert refused == Refused(
        "another operation is running: the group goes from ranks [0, 1, 3] to [0, 1, 3, 4], as was asked at "
        "01:00:00 UTC; its phase is launching. Ask again when it has ended, or cancel it",
        Reason.BUSY,
        "two",
        3600.0,
    )

"""Real processes that are killed or stopped in any phase: no hang, no wrong result, service goes on.

Each rank checks every result against the dense computation and ends if one is off, so an exit that a test
did not cause is a wrong result or a crash.
"""

import os
import signal
import time
from collections.abc import Iterator

import pytest
from elastic_ep import (
    BusyError,
    GroupError,
    Launcher,
    OutdatedError,
    Patience,
    Phase,
    Plan,
    Scale,
    Shape,
    nobody,
    resize,
)
from elastic_ep.testing.toy import ToyConfig
from elastic_ep.testing.toy_group import SlowCapture, ToyGroup

SHAPE = Shape(layers=1, experts=6, slots=5, max_ranks=5)
CONFIG = ToyConfig(SHAPE, tokens=4, hidden=8, pace=0.02)
SECONDS = 30.0
SIGNALS = pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])


@pytest.fixture(scope="module")
def running(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyGroup]:
    """The lease is longer than a busy machine may keep a process from running."""
    folder = tmp_path_factory.mktemp("ranks")
    patience = Patience(lease=3.0, beat=0.05)
    toy = ToyGroup.start(launcher, CONFIG, folder, patience, SlowCapture, auto_commit=False)
    yield toy
    toy.group.close()


@pytest.fixture
def toy(running: ToyGroup) -> ToyGroup:
    """The group, serving with ranks 0, 1 and 2; each expert is on two of them, so any one may go."""
    carry_out(running, resize(running.group.state().placement, (0, 1, 2), min_replicas=2))
    running.await_steps(2, SECONDS)
    return running


def carry_out(toy: ToyGroup, plan: Plan) -> None:
    """Each stage is committed as soon as it is prepared."""
    if not plan.stages:
        return
    asked = toy.group.begin(plan)
    committed, deadline = None, time.monotonic() + SECONDS
    while (state := toy.group.state()).placement != plan.after and time.monotonic() < deadline:
        if state.phase == Phase.PREPARED and state.ballot != committed:
            committed = state.ballot
            toy.group.commit()
        time.sleep(0.005)
    toy.group.finish(asked, SECONDS)


def growing(toy: ToyGroup, phase: Phase) -> Scale:
    """Rank 3 joins, and has got as far as this phase."""
    plan = resize(toy.group.state().placement, (0, 1, 2, 3), min_replicas=2)
    asked = toy.group.begin(plan)
    if phase == Phase.COMMITTING:
        toy.group.wait_for(Phase.PREPARED, SECONDS)
        toy.group.commit()
    toy.group.wait_for(phase, SECONDS)
    return asked


def strike(toy: ToyGroup, rank: int, how: signal.Signals) -> None:
    while rank not in toy.group.pids:
        time.sleep(0.001)
    os.kill(toy.group.pids[rank], how)


def rests_without(toy: ToyGroup, rank: int) -> None:
    toy.await_rest(SECONDS, lambda state: rank not in state.placement.ranks)


def serves_without(toy: ToyGroup, rank: int, exits: int) -> None:
    """The group comes to rest without the rank, whose process alone has ended, and serves on."""
    rests_without(toy, rank)
    toy.await_steps(3, SECONDS)
    assert toy.await_exits(exits + 1, SECONDS)[exits:] == ((rank, -signal.SIGKILL),)


@SIGNALS
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_serves(toy: ToyGroup, rank: int, how: signal.Signals) -> None:
    """Case 37 where it dies: survivors retry its step; case 38 where it is stopped: its lease runs out."""
    exits = len(toy.group.exits)
    strike(toy, rank, how)
    serves_without(toy, rank, exits)
    assert set(toy.group.state().placement.ranks) == {0, 1, 2} - {rank}


@pytest.mark.parametrize(
    ("phase", "how"),
    [
        (Phase.LAUNCHING, signal.SIGKILL),
        (Phase.PREPARING, signal.SIGKILL),
        (Phase.PREPARING, signal.SIGSTOP),
        (Phase.PREPARED, signal.SIGKILL),
        (Phase.PREPARED, signal.SIGSTOP),
    ],
)
def test_a_joiner_before_the_commit_costs_no_step(toy: ToyGroup, phase: Phase, how: signal.Signals) -> None:
    """Case 35: the reason is reported, the group serves on, and the next scale works at once."""
    exits, epoch = len(toy.group.exits), toy.group.state().epoch
    asked = growing(toy, phase)
    strike(toy, 3, how)
    with pytest.raises(
        GroupError, match=r"rank 3 (died|does not respond|could not)|rank . could not prepare"
    ):
        toy.group.finish(asked, SECONDS)
    serves_without(toy, 3, exits)
    assert toy.group.state().epoch == epoch, "it was fenced: a step was interrupted"
    carry_out(toy, resize(toy.group.state().placement, (0, 1, 2, 3), min_replicas=2))
    assert toy.group.state().placement.ranks == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("phase", "rank", "how"),
    [
        (Phase.PREPARING, 0, signal.SIGKILL),
        (Phase.PREPARED, 1, signal.SIGSTOP),
        (Phase.COMMITTING, 0, signal.SIGKILL),
        (Phase.COMMITTING, 2, signal.SIGSTOP),
    ],
)
def test_a_rank_that_serves_while_the_group_grows(
    toy: ToyGroup, phase: Phase, rank: int, how: signal.Signals
) -> None:
    exits = len(toy.group.exits)
    asked = growing(toy, phase)
    strike(toy, rank, how)
    with pytest.raises(GroupError, match=f"rank {rank}|could not prepare"):
        toy.group.finish(asked, SECONDS)
    rests_without(toy, rank)
    toy.await_steps(3, SECONDS)
    assert (rank, -signal.SIGKILL) in toy.await_exits(exits + 1, SECONDS)[exits:]


@pytest.mark.parametrize(
    ("phase", "how"),
    [
        (Phase.PREPARING, signal.SIGKILL),
        (Phase.PREPARED, signal.SIGSTOP),
        (Phase.COMMITTING, signal.SIGKILL),
    ],
)
def test_the_coordinator_is_replaced_and_the_operation_goes_on(
    toy: ToyGroup, phase: Phase, how: signal.Signals
) -> None:
    exits, director = len(toy.group.exits), toy.group.director
    asked = growing(toy, phase)
    os.kill(director, how)
    toy.await_steps(2, SECONDS)
    while toy.group.director == director:
        time.sleep(0.01)
    if phase != Phase.COMMITTING:
        toy.group.wait_for(Phase.PREPARED, SECONDS)
        toy.group.commit()
    toy.group.finish(asked, SECONDS)
    assert toy.group.state().placement == asked.plan.after
    toy.await_steps(3, SECONDS)
    assert toy.group.exits[exits:] == ()


def test_a_cancelled_growth_leaves_everything_as_it_was(toy: ToyGroup) -> None:
    """Case 36."""
    before = toy.group.state()
    asked = growing(toy, Phase.PREPARED)
    toy.group.cancel()
    with pytest.raises(GroupError, match="cancelled"):
        toy.group.finish(asked, SECONDS)
    assert (toy.group.state().placement, toy.group.state().epoch) == (before.placement, before.epoch)
    toy.await_steps(3, SECONDS)


def test_a_second_operation_is_refused_and_the_state_can_be_read(toy: ToyGroup) -> None:
    """Case 44, even while the coordinator is stopped: the state is where everybody can read it."""
    asked = growing(toy, Phase.PREPARED)
    before = toy.group.state()
    with pytest.raises(BusyError, match=r"from ranks .* asked at .* phase is prepared") as refused:
        toy.group.begin(asked.plan)
    assert refused.value.since == asked.since
    with pytest.raises(BusyError):
        toy.group.scale((0, 1), SECONDS)
    director = toy.group.director
    os.kill(director, signal.SIGSTOP)
    assert toy.group.state() == before
    os.kill(director, signal.SIGCONT)
    toy.group.cancel()
    with pytest.raises(GroupError, match="cancelled"):
        toy.group.finish(asked, SECONDS)
    with pytest.raises(OutdatedError, match="plan again"):
        toy.group.begin(resize(nobody(SHAPE), (0, 1)))

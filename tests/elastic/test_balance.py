"""A group that looks after itself: it evens out its load while it serves, and notices a rank that hangs."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import attrs
from elastic_ep import Balancer, Coordinator, Launcher, Patience, Phase, Placement, Shape
from elastic_ep.testing.toy import ToyConfig
from elastic_ep.testing.toy_group import ToyGroup

SHAPE = Shape(layers=2, experts=8, slots=4, max_ranks=4)
CONFIG = ToyConfig(SHAPE, tokens=8, hidden=8, pace=0.005)
SECONDS = 30.0


def rests(toy: ToyGroup, wanted: Callable[[Coordinator], bool]) -> Coordinator:
    """The state, once it is wanted and nothing runs."""
    deadline = time.monotonic() + SECONDS
    while (state := toy.group.state()).phase != Phase.STABLE or state.gone or not wanted(state):
        assert time.monotonic() < deadline, f"the group {state.doing or 'rests'}: {state.placement}"
        time.sleep(0.01)
    return state


def replicas_of_the_favourite(placement: Placement) -> int:
    return sum(len(placement.holders(layer)[-1]) for layer in range(SHAPE.layers))


def favours_more_than(placement: Placement) -> Callable[[Coordinator], bool]:
    few = replicas_of_the_favourite(placement)
    return lambda state: replicas_of_the_favourite(state.placement) > few


def check_that_no_step_was_lost(toy: ToyGroup) -> None:
    for (rank, _), records in toy.records().items():
        steps = [record["step"] for record in records if record["kind"] == "Stepped"]
        assert steps == list(range(steps[0], steps[0] + len(steps))), f"rank {rank}"


def test_a_favourite_gets_replicas_before_and_after_a_scale(launcher: Launcher, tmp_path: Path) -> None:
    """Load balancing that runs while a scale starts makes way for it and goes on afterwards: case 42."""
    config, balancer = attrs.evolve(CONFIG, favour=10.0), Balancer(every=0.2, hot=1.15)
    toy = ToyGroup.start(launcher, config, tmp_path, Patience(lease=10.0), balancer=balancer)
    try:
        for ranks in ((0, 1, 2), (1, 2, 3)):
            placed = toy.group.scale(ranks, SECONDS).after
            rests(toy, favours_more_than(placed))
            toy.await_steps(3, SECONDS)
        assert toy.group.exits == ((0, 0),)
        check_that_no_step_was_lost(toy)
        flips = [r for seen in toy.records().values() for r in seen if r["kind"] == "Flipped"]
        assert {flip["captures"] for flip in flips} == {1}
    finally:
        toy.group.close()


def test_a_rank_whose_step_hangs_is_evicted_though_it_could_speak(launcher: Launcher, tmp_path: Path) -> None:
    """Its other threads live; those that wait for it are not taken to hang: case 38."""
    patience = Patience(lease=3.0, beat=0.05, stall=3.0)
    toy = ToyGroup.start(launcher, attrs.evolve(CONFIG, hangs=(2, 30)), tmp_path, patience)
    try:
        toy.group.scale((0, 1, 2), SECONDS)
        rests(toy, lambda state: state.placement.ranks == (0, 1))
        toy.await_steps(3, SECONDS)
        assert toy.await_exits(1, SECONDS) == ((2, -signal.SIGKILL),)
        check_that_no_step_was_lost(toy)
    finally:
        toy.group.close()

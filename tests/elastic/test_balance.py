"""A group that looks after itself: it evens out its load while it serves, and notices a rank that hangs."""

import contextlib
import functools
import itertools
import signal
import threading
from pathlib import Path

import attrs
import pytest
import torch
from elastic_ep import (
    Balancer,
    EagerRunner,
    GroupError,
    Launcher,
    Patience,
    Phase,
    Shape,
    place,
)
from elastic_ep.balancer import stretch
from elastic_ep.runner import Program
from elastic_ep.testing.toy import ToyConfig, ToyService
from elastic_ep.testing.toy_group import SlowReads, ToyGroup

SHAPE = Shape(layers=2, experts=8, slots=4, max_ranks=4)
CONFIG = ToyConfig(SHAPE, tokens=8, hidden=8, pace=0.005)
SECONDS = 30.0
QUICK = Patience(lease=3.0, beat=0.05, stall=3.0)


def routed(config: ToyConfig) -> list[list[int]]:
    """How often tokens of some steps go to each expert."""
    service = ToyService(config, 0)
    service.load_dense()
    counts = torch.zeros((SHAPE.layers, SHAPE.experts), dtype=torch.int64)
    for step, layer in itertools.product(range(200), range(SHAPE.layers)):
        service.begin(step)
        chosen = torch.topk(service.state["inputs"] @ service.dense["gate"][layer], config.top, dim=1).indices
        counts[layer] += chosen.flatten().bincount(minlength=SHAPE.experts)
    return counts.tolist()


def test_a_scale_ends_a_pass_and_balancing_goes_on_after_it(launcher: Launcher, tmp_path: Path) -> None:
    """Load balancing that runs while a scale starts makes way for it: case 42."""
    config, balancer = attrs.evolve(CONFIG, favour=10.0), Balancer(every=0.2, hot=1.15)
    load = routed(config)
    for ranks in ((0, 1, 2), (1, 2, 3)):
        assert (stretch(place(SHAPE, ranks), load) or 0) > 1.3
    toy = ToyGroup.start(
        launcher, config, tmp_path, Patience(lease=10.0), balancer=balancer, make_transport=SlowReads
    )
    try:
        toy.group.scale((0, 1, 2), SECONDS)
        first = toy.group.wait_for(Phase.PREPARING, SECONDS)
        assert first.operation is not None
        assert first.operation.yields
        toy.group.scale((1, 2, 3), SECONDS)
        toy.await_rest(SECONDS, lambda state: (stretch(state.placement, load) or 9) < 1.2)
        toy.await_steps(3, SECONDS)
        assert toy.group.exits == ((0, 0),)
        assert toy.steps_lost() == 0
        flips = [r for seen in toy.records().values() for r in seen if r["kind"] == "Flipped"]
        assert {flip["captures"] for flip in flips} == {1}
    finally:
        toy.group.close()


@pytest.mark.parametrize("method", ["begin", "apply"])
def test_a_rank_that_hangs_is_evicted_though_it_could_speak(
    launcher: Launcher, tmp_path: Path, method: str
) -> None:
    """Inside a step and between two. Its other threads live; those that wait for it are not taken to hang:
    case 38."""
    config = attrs.evolve(CONFIG, hangs=(method, 2, 30))
    toy = ToyGroup.start(launcher, config, tmp_path, QUICK)
    try:
        toy.group.scale((0, 1, 2), SECONDS)
        loses_one(toy, {2})
    finally:
        toy.group.close()


class HangsAtCommit(EagerRunner):
    """One process does not come back from its second commit, whichever makes the file ``mark`` first."""

    in_place = False

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self._mark = mark

    def _record(self, program: Program) -> Program:
        if self._captures > 2:
            with contextlib.suppress(FileExistsError):
                self._mark.touch(exist_ok=False)
                threading.Event().wait()
        return program


def test_a_rank_that_hangs_while_it_commits_is_evicted(launcher: Launcher, tmp_path: Path) -> None:
    """A commit that captures has as long as others wait for a step, and is given up before they give up."""
    runner = functools.partial(HangsAtCommit, tmp_path / "hung")
    folder = tmp_path / "ranks"
    folder.mkdir()
    toy = ToyGroup.start(launcher, CONFIG, folder, attrs.evolve(QUICK, give_up=5.0), runner)
    try:
        toy.group.scale((0, 1, 2), SECONDS)
        with contextlib.suppress(GroupError):
            toy.group.scale((0, 1, 2, 3), SECONDS)
        loses_one(toy, {0, 1, 2})
    finally:
        toy.group.close()


def loses_one(toy: ToyGroup, ranks: set[int]) -> None:
    """One of these ranks, which is killed; the others serve on."""
    [(rank, code)] = toy.await_exits(1, SECONDS)
    assert rank in ranks
    assert code == -signal.SIGKILL
    toy.await_rest(SECONDS, lambda state: rank not in state.placement.ranks)
    toy.await_steps(3, SECONDS)
    assert len(toy.group.exits) == 1
    assert toy.steps_lost() == 0

"""A rank dies that held the only replica of experts."""

import os
import signal
import time
from pathlib import Path

from elastic_ep import Launcher, OnLoss, Patience, Shape
from elastic_ep.testing.toy import ToyConfig
from elastic_ep.testing.toy_group import ToyGroup

SHAPE = Shape(layers=1, experts=6, slots=3, max_ranks=3)
CONFIG = ToyConfig(SHAPE, tokens=4, hidden=8, pace=0.005)
PATIENCE = Patience(lease=10.0)
SECONDS = 30.0


def test_a_group_without_room_waits_for_a_rank_that_brings_lost_experts(
    launcher: Launcher, tmp_path: Path
) -> None:
    """Two ranks of three slots hold six experts once each; the one that is left cannot hold them all."""
    toy = ToyGroup.start(launcher, CONFIG, tmp_path, PATIENCE, on_loss=OnLoss.RELOAD)
    try:
        toy.group.scale((0, 1), SECONDS)
        toy.await_steps(3, SECONDS)
        os.kill(toy.group.pids[0], signal.SIGKILL)
        state = toy.await_rest(SECONDS, lambda state: state.placement.ranks == (1,))
        assert not state.runs
        steps = toy.steps()
        time.sleep(0.2)
        assert toy.steps() == steps, "a step was run with experts missing"
        toy.group.scale((1, 2), SECONDS)
        toy.await_steps(5, SECONDS)
        assert toy.await_exits(1, SECONDS) == ((0, -signal.SIGKILL),)
    finally:
        toy.group.close()


def test_lost_experts_are_brought_in_where_there_is_room(launcher: Launcher, tmp_path: Path) -> None:
    """Three ranks of three slots hold six experts; each loss leaves six slots for them."""
    toy = ToyGroup.start(launcher, CONFIG, tmp_path, PATIENCE)
    try:
        toy.group.scale((0, 1, 2), SECONDS)
        toy.await_steps(3, SECONDS)
        placement = toy.group.state().placement
        victim = next(rank for rank in placement.ranks if placement.without({rank}).missing())
        os.kill(toy.group.pids[victim], signal.SIGKILL)
        state = toy.await_rest(SECONDS, lambda state: victim not in state.placement.ranks)
        assert not state.placement.missing()
        toy.await_steps(5, SECONDS)
        assert toy.await_exits(1, SECONDS) == ((victim, -signal.SIGKILL),)
    finally:
        toy.group.close()

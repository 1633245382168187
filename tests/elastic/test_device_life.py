"""The device of a rank is closed when it leaves or the group ends; one that hangs is left behind."""

import functools
import signal
import threading
import time
from pathlib import Path

import attrs
import pytest
from elastic_ep import EagerRunner, Group, GroupError, Launcher, Patience, RunnerError, Shape, run_rank
from elastic_ep.testing.toy import ToyConfig, ToyService
from elastic_ep.testing.toy_group import ToyGroup
from elastic_ep.transport_nixl import NixlTransport

CONFIG = ToyConfig(Shape(layers=1, experts=6, slots=6, max_ranks=4), tokens=4, hidden=8, pace=0.01)
NARROW = attrs.evolve(CONFIG, shape=attrs.evolve(CONFIG.shape, slots=3))
"""So that who stays must take over what those who leave hold."""

PATIENCE = Patience(lease=3.0)
SECONDS = 30.0
CLOSING = 4.0
"""Seconds that a device takes to close: longer than a lease."""


@attrs.define
class Plain:
    """A device without programs. ``marks``: where it says that it was closed, and is told to hang, to fail or
    to close slowly."""

    rank: int
    marks: Path
    in_place: bool = True

    def capture(self) -> None:
        pass

    def check(self) -> None:
        if Path(self.marks, f"move {self.rank}").exists():
            raise RunnerError("a tensor has moved")

    def fill(self, layer: int, slot: int) -> None:
        if Path(self.marks, f"hang {self.rank}").exists():
            threading.Event().wait()

    def close(self) -> None:
        if Path(self.marks, "slow").exists():
            time.sleep(CLOSING)
        Path(self.marks, f"closed {self.rank}").touch()


class Bearer(ToyService):
    """Rank 3 raises at its tenth step."""

    def __init__(self, config: ToyConfig, marks: Path, rank: int) -> None:
        super().__init__(config, rank)
        self.device: Plain = Plain(rank, marks)
        self._applied = 0

    def apply(self, step: int) -> None:
        super().apply(step)
        self._applied += 1
        if self.rank == 3 and self._applied == 10:
            raise RuntimeError("rank 3 is broken")


def start(
    launcher: Launcher, folder: Path, patience: Patience = PATIENCE, config: ToyConfig = CONFIG
) -> tuple[ToyGroup, Path]:
    """A group whose ranks have devices, and where these leave their marks."""
    logs, marks = folder / "logs", folder / "marks"
    logs.mkdir()
    marks.mkdir()
    main = functools.partial(
        run_rank,
        build=functools.partial(Bearer, attrs.evolve(config, log=str(logs)), marks),
        make_transport=NixlTransport,
        make_runner=EagerRunner,
    )
    return ToyGroup(Group(launcher, config.shape, config.fingerprint, main, patience), logs), marks


def closed(marks: Path) -> set[str]:
    return {mark.name for mark in marks.glob("closed *")}


def test_it_is_closed_by_a_rank_that_leaves_and_at_the_end(launcher: Launcher, tmp_path: Path) -> None:
    toy, marks = start(launcher, tmp_path)
    Path(marks, "slow").touch()
    try:
        toy.group.scale((0, 1, 2), SECONDS)
        toy.group.scale((0, 2), SECONDS)
        assert toy.group.exits == ((1, 0),)
        assert closed(marks) == {"closed 1"}
        toy.await_steps(3, SECONDS)
    finally:
        toy.group.close()
    assert closed(marks) == {"closed 0", "closed 1", "closed 2"}


def test_a_rank_that_raises_ends_at_once(launcher: Launcher, tmp_path: Path) -> None:
    """Others wait for the end of its process, not for its device."""
    toy, marks = start(launcher, tmp_path)
    try:
        toy.group.scale((0, 1, 3), SECONDS, min_replicas=2)
        assert toy.await_exits(1, SECONDS) == ((3, 1),)
        assert closed(marks) == set()
        toy.await_rest(SECONDS, lambda state: state.placement.ranks == (0, 1))
        toy.await_steps(3, SECONDS)
    finally:
        toy.group.close()


def test_why_a_joiner_s_device_is_not_fit_is_told(launcher: Launcher, tmp_path: Path) -> None:
    toy, marks = start(launcher, tmp_path)
    try:
        toy.group.scale((0, 1), SECONDS)
        Path(marks, "move 2").touch()
        with pytest.raises(GroupError, match="rank 2 could not prepare: RunnerError: a tensor has moved"):
            toy.group.scale((0, 1, 2), SECONDS)
        toy.await_rest(SECONDS, lambda state: state.placement.ranks == (0, 1))
        toy.await_steps(3, SECONDS)
    finally:
        toy.group.close()


def test_a_rank_that_can_prepare_nothing_any_more_is_left_behind(launcher: Launcher, tmp_path: Path) -> None:
    """It serves, but nobody could join or leave."""
    patience = Patience(lease=2.0, prepare=2.0, stall=2.0, give_up=3.0, leave=6.0)
    toy, marks = start(launcher, tmp_path, patience, NARROW)
    try:
        toy.group.scale((0, 1, 2), SECONDS)
        Path(marks, "hang 1").touch()
        with pytest.raises(GroupError, match=r"ranks \[1\] were not ready in time"):
            toy.group.scale((1, 2), SECONDS)
        assert toy.await_exits(1, SECONDS) == ((1, -signal.SIGKILL),)
        toy.await_rest(SECONDS)
        toy.group.scale((0, 2, 3), SECONDS)
    finally:
        toy.group.close()

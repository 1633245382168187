"""A rank that is to leave ends its requests first, while all serve; or it stays."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from elastic_ep import GroupError, Launcher, Patience, Phase, Shape, resize
from elastic_ep.testing.toy import ToyConfig
from elastic_ep.testing.toy_group import ToyGroup

SHAPE = Shape(layers=1, experts=6, slots=6, max_ranks=4)
LONG, FOREVER = 25, 1_000_000
"""Steps."""

CONFIG = ToyConfig(SHAPE, tokens=4, hidden=8, pace=0.01, drains=LONG)
PATIENCE = Patience(lease=10.0, prepare=60.0)
SECONDS = 30.0


def told(toy: ToyGroup, rank: int) -> list[bool]:
    """What a rank's latest process was told of leaving."""
    *_, records = [seen for (one, _), seen in sorted(toy.records().items()) if one == rank]
    return [record["leaves"] for record in records if record["kind"] == "Leaving"]


@pytest.fixture
def toy(launcher: Launcher, tmp_path: Path) -> Iterator[ToyGroup]:
    """Three ranks; each expert is on two of them."""
    toy = ToyGroup.start(launcher, CONFIG, tmp_path, PATIENCE)
    toy.group.scale((0, 1, 2), SECONDS, min_replicas=2)
    yield toy
    toy.group.close()


def test_it_serves_until_its_requests_are_done(toy: ToyGroup) -> None:
    toy.group.scale((1, 2), SECONDS)
    toy.await_steps(3, SECONDS)
    assert toy.group.exits == ((0, 0),)
    assert told(toy, 0) == [True]
    assert told(toy, 1) == []
    (records,) = [seen for (rank, _), seen in toy.records().items() if rank == 0]
    asked = next(nth for nth, record in enumerate(records) if record["kind"] == "Leaving")
    assert sum(record["kind"] == "Stepped" for record in records[asked:]) >= LONG
    assert toy.steps_lost() == 0


def test_it_stays_if_that_is_given_up_and_leaves_when_asked_again(toy: ToyGroup) -> None:
    asked = toy.group.begin(resize(toy.group.state().placement, (0, 1)))
    toy.group.wait_for(Phase.PREPARING, SECONDS)
    toy.group.cancel()
    with pytest.raises(GroupError, match="cancelled"):
        toy.group.finish(asked, SECONDS)
    toy.await_steps(3, SECONDS)
    assert told(toy, 2) == [True, False]
    toy.group.scale((0, 1), SECONDS)
    assert told(toy, 2) == [True, False, True]
    assert toy.steps_lost() == 0


def test_it_stays_if_another_dies_meanwhile(toy: ToyGroup) -> None:
    asked = toy.group.begin(resize(toy.group.state().placement, (0, 1)))
    toy.group.wait_for(Phase.PREPARING, SECONDS)
    os.kill(toy.group.pids[1], signal.SIGKILL)
    with pytest.raises(GroupError, match="rank 1"):
        toy.group.finish(asked, SECONDS)
    toy.await_rest(SECONDS, lambda state: state.placement.ranks == (0, 2))
    toy.await_steps(3, SECONDS)
    assert told(toy, 2) == [True, False]


def test_one_whose_requests_do_not_end_stays(launcher: Launcher, tmp_path: Path) -> None:
    config, patience = attrs.evolve(CONFIG, drains=FOREVER), attrs.evolve(PATIENCE, prepare=3.0)
    toy = ToyGroup.start(launcher, config, tmp_path, patience)
    try:
        toy.group.scale((0, 1, 2), SECONDS)
        with pytest.raises(GroupError, match=r"ranks \[2\] were not ready in time"):
            toy.group.scale((0, 1), SECONDS)
        assert toy.group.state().placement.ranks == (0, 1, 2)
        toy.await_steps(3, SECONDS)
        assert told(toy, 2) == [True, False]
        assert toy.steps_lost() == 0
    finally:
        toy.group.close()

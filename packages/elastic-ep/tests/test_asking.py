"""Asking for an operation where orders and notices may be lost: it begins once, and its end is learned."""

import time

import attrs
import pytest
from elastic_ep import (
    BusyError,
    Cancel,
    Coordinator,
    Event,
    Finished,
    GroupError,
    OutdatedError,
    Patience,
    Phase,
    Refused,
    Shape,
    coordinate,
    nobody,
    resize,
)
from elastic_ep.asking import KEPT, Asking
from elastic_ep.control import Begun

SHAPE = Shape(layers=1, experts=2, slots=2, max_ranks=3)
PLAN = resize(nobody(SHAPE), (0, 1))


class Host:
    """A coordinator's machine that hears an order unless it is lost, and whose notices may be, too."""

    def __init__(self, give_up: float = 60) -> None:
        self.state = Coordinator(nobody(SHAPE), "model")
        patience = Patience(lease=0.01, beat=0.005, stall=0.01, give_up=give_up)
        self.asking = Asking(self.order, lambda: self.state, patience)
        self.lost_orders = 0
        self.lost_notices = 0
        self.launches = 0

    def order(self, event: Event) -> None:
        if self.lost_orders:
            self.lost_orders -= 1
            return
        self.state, actions = coordinate(self.state, event)
        for action in actions:
            match action:
                case Begun() | Finished() | Refused() if not self.lost_notices:
                    self.asking.hear(action)
                case Begun() | Finished() | Refused():
                    self.lost_notices -= 1
                case _:
                    self.launches += 1


def soon() -> float:
    return time.monotonic() + 60


@pytest.mark.parametrize(("orders", "notices"), [(0, 0), (2, 0), (0, 2), (1, 1)])
def test_what_is_lost_is_said_again_and_begins_once(orders: int, notices: int) -> None:
    host = Host()
    host.lost_orders, host.lost_notices = orders, notices
    asked = host.asking.ask(PLAN)
    assert host.state.operation is not None
    assert host.state.operation.ticket == asked.ticket
    assert host.launches == len(PLAN.joiners)


@pytest.mark.parametrize("told", [True, False])
def test_the_end_is_learned_though_nobody_tells_it(told: bool) -> None:
    host = Host()
    asked = host.asking.ask(PLAN)
    assert host.asking.outcome(asked, time.monotonic()) is None
    host.lost_notices = 0 if told else 1
    host.order(Cancel())
    assert host.state.phase == Phase.STABLE
    for _ in range(2):
        assert host.asking.outcome(asked, soon()) == Finished(False, "cancelled", asked.ticket)


def test_refusals_are_told_apart_and_forgotten() -> None:
    host = Host()
    asked = host.asking.ask(PLAN)
    before = host.state
    with pytest.raises(BusyError, match="another operation is running") as busy:
        host.asking.ask(PLAN)
    assert busy.value.since == asked.since
    assert host.state == before
    host.order(Cancel())
    other = resize(PLAN.after, (1, 2))
    with pytest.raises(OutdatedError, match="plan again"):
        host.asking.ask(other)
    host.state = attrs.evolve(host.state, gone=(1,))
    with pytest.raises(BusyError, match=r"ranks \[1\] of an earlier life have not ended yet"):
        host.asking.ask(PLAN)


def test_the_end_of_long_ago_is_forgotten() -> None:
    """Else one that nobody asks about would be kept for ever."""
    host = Host()
    asked = []
    for _ in range(KEPT + 1):
        asked.append(host.asking.ask(PLAN))
        host.order(Cancel())
        host.state = attrs.evolve(host.state, phase=Phase.STABLE, stages=(), operation=None, gone=())
    first, second, *_ = asked
    kept = host.asking.outcome(second, soon())
    assert kept is not None
    assert kept.ticket == second.ticket
    assert host.asking.outcome(first, time.monotonic() + 0.05) is None


def test_nobody_answers() -> None:
    host = Host(give_up=0.2)
    host.lost_orders = 1_000_000
    with pytest.raises(GroupError, match=r"no coordinator answered within 0.2 s"):
        host.asking.ask(PLAN)

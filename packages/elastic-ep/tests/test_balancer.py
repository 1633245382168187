"""When evening out the load pays: a relief that is worth its copies, nothing for a peak that passes."""

from array import array

import attrs
import pytest
import torch
from elastic_ep import Balancer, Coordinator, Counted, Placement, Plan, PlanError, Shape, nobody, place
from elastic_ep.balancer import Look, look, stretch
from elastic_ep.packing import count
from elastic_ep.tally import Tally
from hypothesis import given
from hypothesis import strategies as st

SHAPE = Shape(layers=2, experts=6, slots=3, max_ranks=4)
SERVING = place(SHAPE, (0, 1, 3))
EAGER = Balancer(hot=1, cool=1, looks=1, worth=1e-9)
EVEN = [[1.0, 1, 1, 2, 2, 2]] * 2
PEAK = [[1.0, 1, 1, 1, 1, 20]] * 2
MILD = [[1.0, 1, 1, 2, 2, 2.9]] * 2

loads = st.lists(st.lists(st.floats(0, 100), min_size=6, max_size=6), min_size=2, max_size=2)
placements = st.sets(st.integers(0, 3), min_size=2).map(lambda ranks: place(SHAPE, ranks))


@given(placements, loads, st.floats(0.001, 0.5))
def test_a_pass_relieves_by_what_its_copies_are_worth_and_is_not_wanted_again(
    placement: Placement, load: list[list[float]], worth: float
) -> None:
    balancer = attrs.evolve(EAGER, worth=worth)
    seen, plan = look(balancer, Look(placement), placement, load)
    before = stretch(placement, load)
    if plan is None:
        return
    after = stretch(plan.after, load)
    assert before is not None
    assert after is not None
    assert 1 <= after < before
    assert plan.after.ranks == placement.ranks
    assert not plan.after.missing()
    copies = sum(len(stage.copies) for stage in plan.stages)
    assert (before - after) * SHAPE.layers >= copies * worth
    assert look(balancer, seen, plan.after, load)[1] is None


def hot(load: list[list[float]]) -> float:
    found = stretch(SERVING, load)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("series", "passes"),
    [
        ([PEAK], 0),
        ([PEAK, PEAK], 1),
        ([PEAK, MILD, PEAK], 1),
        ([PEAK, EVEN, PEAK], 0),
        ([PEAK, EVEN, PEAK, PEAK], 1),
        ([MILD] * 9, 0),
        ([PEAK, PEAK, PEAK], 1),
        ([PEAK, PEAK, PEAK, PEAK], 2),
    ],
)
def test_only_what_lasts_begins_a_pass(series: list[list[list[float]]], passes: int) -> None:
    """Between the two thresholds a look neither counts nor calms. The placement stays as if no pass came
    through."""
    balancer = Balancer(hot=1.5, cool=1.1)
    assert hot(EVEN) < balancer.cool <= hot(MILD) < balancer.hot <= hot(PEAK)
    seen, begun = Look(SERVING), 0
    for load in series:
        seen, plan = look(balancer, seen, SERVING, load)
        begun += plan is not None
    assert begun == passes


def test_looks_at_another_placement_do_not_count() -> None:
    seen, _ = look(Balancer(), Look(SERVING), SERVING, PEAK)
    assert seen.hot == 1
    seen, plan = look(Balancer(), seen, place(SHAPE, (0, 1)), PEAK)
    assert (seen.hot, plan) == (1, None)


@pytest.mark.parametrize(
    ("balancer", "placement", "load"),
    [
        (EAGER, SERVING, [[0.0] * 6] * 2),
        (EAGER, nobody(SHAPE), PEAK),
        (EAGER, SERVING.without({3}), [[9.0, 1, 1, 1, 1, 1]] * 2),
        (attrs.evolve(EAGER, worth=9), SERVING, PEAK),
        (attrs.evolve(EAGER, min_replicas=2), place(SHAPE, (0, 1)), PEAK),
    ],
    ids=["nothing was counted", "nobody serves", "experts are missing", "not worth it", "too few slots"],
)
def test_no_pass(balancer: Balancer, placement: Placement, load: list[list[float]]) -> None:
    assert look(balancer, Look(placement), placement, load)[1] is None


@pytest.mark.parametrize(("cool", "hot", "worth"), [(1.1, 1.0, 1.0), (0.9, 2.0, 1.0), (1.0, 1.0, 0.0)])
def test_what_is_no_balancer(cool: float, hot: float, worth: float) -> None:
    with pytest.raises(PlanError, match="give 1 <= cool <= hot"):
        Balancer(cool=cool, hot=hot, worth=worth)


def test_tokens_are_counted_by_expert_and_padding_is_not() -> None:
    experts = torch.tensor([[0, 5], [5, 1], [5, 5]])
    static = {"experts": experts, "count": torch.tensor([2]), "ordinal": torch.arange(6).view(3, 2)}
    load = torch.zeros(6, dtype=torch.int64)
    for _ in range(2):
        count(static, load)
    assert load.tolist() == [2, 2, 0, 0, 0, 4]


def told(rank: int, load: list[list[float]], times: int) -> Counted:
    counts = array("q", [int(each) * times for row in load for each in row])
    return Counted(1, 0, rank, 1, 0, counts.tobytes())


def planned(tally: Tally, state: Coordinator, now: float) -> Plan | None:
    """Of one look: the first call starts it, a later one has what came of it."""
    tally.plan(state, now)
    while tally.looking:
        plan = tally.plan(state, now)
        if plan is not None:
            return plan
    return None


def test_the_tally_takes_differences_of_what_lives_of_ranks_have_counted() -> None:
    state = Coordinator(SERVING, "model")
    tally = Tally(attrs.evolve(EAGER, every=10), state, 0.0)
    tally.hear(told(0, PEAK, 1000))
    assert not tally.looking
    assert tally.plan(state, 9.9) is None
    assert not tally.looking, "it looks when it is time to"
    assert planned(tally, state, 10.0) is not None
    tally.hear(told(0, PEAK, 1000))
    assert planned(tally, state, 20.0) is None, "nothing was counted since"
    tally.hear(told(0, PEAK, 10))
    assert planned(tally, state, 30.0) is not None, "a next life has counted this"

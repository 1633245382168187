"""Plans over random placements, loads, deaths and sizes."""

from collections import Counter

import pytest
from elastic_ep import (
    EMPTY,
    Placement,
    Plan,
    PlanError,
    Shape,
    SizeError,
    Stage,
    nobody,
    place,
    rebalance,
    resize,
    stages,
)
from hypothesis import given, settings
from hypothesis import strategies as st


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    return Shape(
        layers=draw(st.integers(1, 3)),
        experts=draw(st.integers(1, 10)),
        slots=draw(st.integers(1, 6)),
        max_ranks=draw(st.integers(1, 7)),
    )


def loads(shape: Shape) -> st.SearchStrategy[list[list[float]]]:
    value = st.one_of(st.just(0.0), st.integers(1, 5).map(float), st.floats(0, 1e6, allow_subnormal=False))
    row = st.lists(value, min_size=shape.experts, max_size=shape.experts)
    return st.lists(row, min_size=shape.layers, max_size=shape.layers)


def rank_sets(shape: Shape) -> st.SearchStrategy[list[int]]:
    return st.sets(st.integers(0, shape.max_ranks - 1)).map(sorted)


@st.composite
def placements(draw: st.DrawFn, shape: Shape) -> Placement:
    """Any legal placement, experts missing or not, as deaths and earlier plans may leave it."""
    ranks = draw(rank_sets(shape))
    table = []
    for _ in range(shape.layers):
        row = [EMPTY] * shape.physical
        for rank in ranks:
            held = draw(st.permutations([*range(shape.experts), *[EMPTY] * shape.slots]))[: shape.slots]
            row[rank * shape.slots : (rank + 1) * shape.slots] = held
        table.append(tuple(row))
    return Placement(shape, tuple(ranks), tuple(table))


def replicas(placement: Placement, layer: int) -> Counter[int]:
    return Counter(expert for expert in placement.table[layer] if expert != EMPTY)


def check_stages(before: Placement, after: Placement, steps: tuple[Stage, ...]) -> None:
    """Execute the stages on real contents, in the worst order, and look at every one of them."""
    shape = before.shape
    contents = [list(row) for row in before.table]
    now = before
    held = {(layer, e) for layer in range(shape.layers) for e in replicas(before, layer)}
    for stage in steps:
        read = {(copy.layer, copy.source) for copy in stage.copies}
        written = {(copy.layer, copy.target) for copy in stage.copies}
        written |= {(load.layer, load.target) for load in stage.loads}
        assert len(written) == len(stage.copies) + len(stage.loads)
        assert not read & written
        assert all(now.table[layer][slot] == EMPTY for layer, slot in written), (
            "a slot still routed to is overwritten"
        )
        assert all(now.table[copy.layer][copy.source] == copy.expert for copy in stage.copies)
        assert all((load.layer, load.expert) not in held for load in stage.loads)
        for copy in reversed(stage.copies):
            contents[copy.layer][copy.target] = contents[copy.layer][copy.source]
        for load in stage.loads:
            contents[load.layer][load.target] = load.expert
            held.add((load.layer, load.expert))
        now = stage.placement
        for layer in range(shape.layers):
            routed = [(slot, expert) for slot, expert in enumerate(now.table[layer]) if expert != EMPTY]
            assert all(contents[layer][slot] == expert for slot, expert in routed), (
                "routed to a slot of other contents"
            )
        assert held <= {(layer, e) for layer in range(shape.layers) for e in replicas(now, layer)}, (
            "an expert was lost"
        )
        assert stage != Stage(before), "a stage that does nothing"
    assert now == after


def check_plan(plan: Plan, min_replicas: int, reload: bool) -> None:
    before, after = plan.before, plan.after
    check_stages(before, after, plan.stages)
    held = {(layer, e) for layer in range(before.shape.layers) for e in replicas(before, layer)}
    every = {(layer, e) for layer in range(before.shape.layers) for e in range(before.shape.experts)}
    assert set(plan.lost) == every - held
    for layer, expert in every:
        least = min_replicas if reload or (layer, expert) in held else 0
        assert least <= replicas(after, layer)[expert] <= (len(after.ranks) if least else 0)
    for layer in range(before.shape.layers):
        for rank in after.ranks:
            row = after.row(layer, rank)
            able = before.shape.experts if reload else len(replicas(before, layer))
            assert EMPTY not in row or len(set(row) - {EMPTY}) == able, "a slot is left empty that could help"


def capacity_allows(shape: Shape, ranks: int, min_replicas: int, experts: int) -> bool:
    return ranks >= max(1, min_replicas) and experts * min_replicas <= ranks * shape.slots


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_resize_from_anything_to_anything(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    before = data.draw(placements(shape))
    target = data.draw(rank_sets(shape))
    load = data.draw(st.none() | loads(shape))
    least, reload = data.draw(st.integers(1, 3)), data.draw(st.booleans())
    placeable = max(
        shape.experts if reload else len(replicas(before, layer)) for layer in range(shape.layers)
    )
    if not capacity_allows(shape, len(target), least, placeable):
        with pytest.raises(SizeError):
            resize(before, target, load, least, reload)
        return
    plan = resize(before, target, load, least, reload)
    assert plan == resize(before, reversed(target), load, least, reload)
    assert plan.after.ranks == tuple(target)
    check_plan(plan, least, reload)
    assert resize(plan.after, target, load, least, reload).stages == (), (
        "planning again finds something to do"
    )
    pulls = [pull for stage in plan.stages for pull in stage.dense]
    assert [pull.joiner for pull in pulls] == (list(plan.joiners) if before.ranks else [])
    uses = Counter(pull.source for pull in pulls)
    stayers = [rank for rank in before.ranks if rank in target] or before.ranks
    assert set(uses) <= set(stayers)
    assert max(uses.values(), default=0) <= -(-len(pulls) // max(1, len(stayers)))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_growth_changes_no_slot_that_serves(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    least = data.draw(st.integers(1, 2))
    target = data.draw(rank_sets(shape))
    old = [rank for rank in target if data.draw(st.booleans())]
    if not capacity_allows(shape, len(old), least, shape.experts):
        return
    before = place(shape, old, data.draw(loads(shape)), least)
    plan = resize(before, target, data.draw(loads(shape)), least)
    assert len(plan.stages) == (1 if plan.joiners else 0)
    for layer in range(shape.layers):
        pairs = zip(before.table[layer], plan.after.table[layer], strict=True)
        assert all(was in (EMPTY, now) for was, now in pairs)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_shrinking_copies_no_more_than_it_must(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    before = data.draw(placements(shape))
    target = [rank for rank in before.ranks if data.draw(st.booleans())]
    if not capacity_allows(shape, len(target), 1, shape.experts):
        return
    plan = resize(before, target, data.draw(loads(shape)))
    for layer in range(shape.layers):
        kept = before.without(set(before.ranks) - set(target))
        orphans = shape.experts - len(replicas(kept, layer))
        free = sum(kept.row(layer, rank).count(EMPTY) for rank in target)
        copies = [copy for stage in plan.stages for copy in stage.copies if copy.layer == layer]
        loads_ = [load for stage in plan.stages for load in stage.loads if load.layer == layer]
        assert len(copies) + len(loads_) <= max(orphans, free)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_rebalance(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    before = data.draw(placements(shape))
    load, least = data.draw(loads(shape)), data.draw(st.integers(1, 2))
    if not capacity_allows(shape, len(before.ranks), least, shape.experts):
        with pytest.raises(SizeError):
            rebalance(before, load, least)
        return
    plan = rebalance(before, load, least)
    assert plan == rebalance(before, load, least)
    check_plan(plan, least, True)
    assert rebalance(plan.after, load, least).stages == ()


def hottest_share(placement: Placement, load: list[list[float]], layer: int) -> float:
    return max(load[layer][e] / n for e, n in replicas(placement, layer).items())


def best_share(load: list[float], slots: int, ranks: int) -> float:
    """The lowest highest load per replica, by trying every value it could have."""
    candidates = sorted({value / n for value in load for n in range(1, ranks + 1)})
    for share in candidates:
        counts = [next((n for n in range(1, ranks + 1) if value / n <= share), None) for value in load]
        if None not in counts and sum(n for n in counts if n) <= slots:
            return share
    raise AssertionError("no share fits")


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_first_placement_replicates_as_well_as_can_be(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    ranks = data.draw(rank_sets(shape))
    if not capacity_allows(shape, len(ranks), 1, shape.experts):
        return
    load = data.draw(loads(shape))
    placement = place(shape, ranks, load)
    for layer in range(shape.layers):
        best = best_share(load[layer], len(ranks) * shape.slots, len(ranks))
        assert hottest_share(placement, load, layer) <= best * (1 + 1e-9)


def weights(placement: Placement, load: list[float], layer: int = 0) -> list[float]:
    counts = replicas(placement, layer)
    return [sum(load[e] / counts[e] for e in placement.row(layer, r) if e != EMPTY) for r in placement.ranks]


def test_skewed_load_is_packed_evenly() -> None:
    shape = Shape(layers=1, experts=64, slots=10, max_ranks=8)
    load = [1000 / (1 + expert) for expert in range(64)]
    even = weights(place(shape, range(8), [load]), load)
    assert max(even) <= 1.06 * sum(even) / 8


def test_rebalance_follows_the_load_and_then_rests() -> None:
    shape = Shape(layers=1, experts=32, slots=6, max_ranks=8)
    before = place(shape, range(8), [[1000 / (1 + expert) for expert in range(32)]])
    load = [1000 / (32 - expert) for expert in range(32)]
    uneven = weights(before, load)
    plan = rebalance(before, [load])
    even = weights(plan.after, load)
    assert max(uneven) > 1.5 * sum(uneven) / 8
    assert max(even) <= 1.06 * sum(even) / 8
    assert rebalance(plan.after, [load]).stages == ()


def test_a_death_loses_exactly_what_had_no_other_replica() -> None:
    shape = Shape(layers=1, experts=3, slots=2, max_ranks=9)
    before = nobody(shape).evolve((2, 8), {(0, 4): 0, (0, 5): 1, (0, 16): 1, (0, 17): 2})
    survivors = before.without({8})
    assert survivors.missing() == ((0, 2),)
    assert survivors.ranks == (2,)
    degraded = resize(survivors, [2, 5], reload=False)
    assert degraded.lost == ((0, 2),)
    assert degraded.after.missing() == ((0, 2),)
    healed = resize(survivors, [2, 5])
    assert [(load.expert, load.target) for load in healed.stages[0].loads] == [
        (2, healed.after.holders(0)[2][0])
    ]


def test_the_first_rank_may_be_replaced() -> None:
    shape = Shape(layers=2, experts=6, slots=3, max_ranks=4)
    before = place(shape, [0, 1])
    plan = resize(before, [1, 3])
    assert (plan.joiners, plan.leavers) == ((3,), (0,))
    assert [stage.placement.ranks for stage in plan.stages] == [(0, 1, 3), (1, 3)]
    assert [len(stage.copies) for stage in plan.stages] == [6, 0]
    assert [len(plan.stages[0].incoming(rank)) for rank in (0, 1, 3)] == [0, 0, 6]


def test_sole_replicas_swap_through_a_redundant_slot_or_not_at_all() -> None:
    shape = Shape(layers=1, experts=5, slots=2, max_ranks=3)

    def table(*experts: int) -> Placement:
        return Placement(shape, (0, 1, 2), (experts,))

    before, after = table(0, 4, 1, 2, 3, 4), table(1, 4, 0, 2, 3, 4)
    steps = stages(before, after)
    check_stages(before, after, steps)
    shape = Shape(layers=1, experts=6, slots=2, max_ranks=3)
    with pytest.raises(PlanError, match="no slot is free or redundant"):
        stages(table(0, 1, 2, 3, 4, 5), table(2, 1, 0, 3, 4, 5))


def test_impossible_sizes_are_refused_with_numbers() -> None:
    shape = Shape(layers=1, experts=24, slots=4, max_ranks=20)
    before = place(shape, range(8))
    with pytest.raises(SizeError, match=r"5 ranks of 4 slots cannot hold 24 experts .* at least 6 ranks"):
        resize(before, range(5))
    with pytest.raises(SizeError, match="32 slots for 48 replicas; at least 12 ranks"):
        resize(before, range(8), min_replicas=2)
    with pytest.raises(PlanError, match=r"between 0 and 19"):
        resize(before, [0, 20])
    with pytest.raises(PlanError, match="expected 1 layers of 24"):
        rebalance(before, [[1.0] * 23])
    with pytest.raises(PlanError, match="finite and not negative"):
        rebalance(before, [[-1.0] * 24])
    with pytest.raises(PlanError, match="experts is 0"):
        Shape(layers=1, experts=0, slots=1, max_ranks=1)


def test_a_placement_checks_itself() -> None:
    shape = Shape(layers=1, experts=3, slots=2, max_ranks=2)
    for ranks, row, why in [
        ((0,), (0, 1, 2, EMPTY), "is not one of"),
        ((0, 1), (0, 0, 1, 2), "twice"),
        ((0, 1), (0, 3, 1, 2), "experts are 0 to 2"),
        ((1, 0), (0, 1, 2, 0), "ascending"),
        ((0, 1), (0, 1, 2), "expected 1 layers of 4"),
    ]:
        with pytest.raises(PlanError, match=why):
            Placement(shape, ranks, (row,))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_two_placements_are_joined_by_valid_stages(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    before, after = data.draw(placements(shape)), data.draw(placements(shape))
    gone = set(after.missing()) - set(before.missing())
    try:
        steps = stages(before, after)
    except PlanError as error:
        assert gone or "swaps experts" in str(error)  # noqa: PT017
    else:
        assert not gone
        check_stages(before, after, steps)

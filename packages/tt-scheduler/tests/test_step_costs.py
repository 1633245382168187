import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tt_scheduler import Line
from tt_scheduler.step_costs import WINDOW, LearnedCost

fixed = st.floats(0.001, 1.0)
unit = st.floats(1e-6, 1e-2)
lines = st.builds(Line, fixed, unit)


@settings(deadline=None)
@given(lines, lines, st.lists(st.integers(1, 4096), min_size=8, max_size=60))
def test_exact_steps_give_the_line_back(prior: Line, true: Line, sizes: list[int]) -> None:
    cost = LearnedCost(prior)
    for size in sizes:
        cost.learn(size, true.seconds(size))
    spread = sizes[-WINDOW:]
    if max(spread) >= 2 * min(spread):
        for size in (1, 300, 10000):
            assert cost.expected_s(size) == pytest.approx(true.seconds(size), rel=1e-6)


@settings(deadline=None)
@given(lines, lines, st.integers(1, 4096), st.integers(1, 7))
def test_steps_of_one_size_scale_the_prior(prior: Line, true: Line, size: int, count: int) -> None:
    cost = LearnedCost(prior)
    for _ in range(count):
        cost.learn(size, true.seconds(size))
    assert cost.expected_s(size) == pytest.approx(true.seconds(size))
    shape = prior.seconds(2 * size) / prior.seconds(size)
    assert cost.expected_s(2 * size) == pytest.approx(true.seconds(size) * shape)


@settings(deadline=None)
@given(lines, st.integers(0, 99))
def test_wild_steps_move_neither_the_line_nor_the_upper_estimate(true: Line, seed: int) -> None:
    dice = random.Random(seed)
    cost = LearnedCost(true)
    for number in range(WINDOW):
        size = dice.choice((128, 256, 512, 1024))
        cost.learn(size, true.seconds(size) * (50 if number % 8 == 0 else dice.uniform(0.95, 1.05)))
    for size in (128, 1024):
        assert cost.expected_s(size) == pytest.approx(true.seconds(size), rel=0.15)
        assert cost.upper_s(size) == pytest.approx(true.seconds(size), rel=0.25)


@settings(deadline=None)
@given(lines, st.integers(0, 99))
def test_the_upper_estimate_holds_for_ordinary_steps(true: Line, seed: int) -> None:
    dice = random.Random(seed)
    cost = LearnedCost(true)
    steps = [(size, true.seconds(size) * dice.uniform(0.8, 1.2)) for size in (128, 256, 512, 1024) * 8]
    for step in steps:
        cost.learn(*step)
    assert all(seconds <= cost.upper_s(size) * (1 + 1e-9) for size, seconds in steps)


def test_the_upper_estimate_of_large_steps_does_not_suffer_from_small_ones() -> None:
    cost = LearnedCost(Line(0.0, 0.001))
    for extra in (0.0, 0.0, 0.0, 0.06):
        cost.learn(100, 0.1 + extra)
        cost.learn(1000, 1.0)
    assert cost.upper_s(1000) == pytest.approx(1.0)
    assert cost.upper_s(100) == pytest.approx(0.16)


def test_nothing_is_learned_from_nothing() -> None:
    cost = LearnedCost(Line(0.1, 0.001))
    cost.learn(0, 5.0)
    cost.learn(100, 0.0)
    assert not cost
    assert not cost.knows(100)
    assert cost.upper_s(100) == pytest.approx(0.2)


@pytest.mark.parametrize("costs", [(0.0, 0.0), (-1.0, 1.0), (1.0, -1.0)])
def test_a_line_takes_time(costs: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"must be >= 0|take no time"):
        Line(*costs)

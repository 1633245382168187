import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tt_scheduler import LaneLoad, choose_lane

loads = st.builds(
    LaneLoad,
    queued_prompt_tokens=st.integers(0, 5000),
    running=st.integers(0, 32),
    free_blocks=st.integers(0, 100),
    total_blocks=st.integers(100, 200),
    free_rows=st.integers(0, 8),
    block_size=st.just(32),
)
EMPTY = LaneLoad(0, 0, 100, 100, 8, 32)


def given_to(load: LaneLoad, tokens: int) -> LaneLoad:
    """The lane with one more request in its queue."""
    return attrs.evolve(load, queued_prompt_tokens=load.queued_prompt_tokens + tokens)


@given(st.lists(loads, min_size=1, max_size=8), st.integers(1, 8000))
def test_the_choice_is_the_same_each_time_and_ties_go_low(lanes: list[LaneLoad], tokens: int) -> None:
    lane = choose_lane(lanes, tokens)
    assert choose_lane(list(lanes), tokens) == lane
    assert choose_lane([*lanes, *lanes], tokens) == lane
    assert choose_lane([lanes[lane], *lanes], tokens) == 0


@given(st.lists(loads, min_size=1, max_size=8), st.integers(1, 8000))
def test_no_lane_that_can_never_hold_the_prompt_if_another_can(lanes: list[LaneLoad], tokens: int) -> None:
    chosen = lanes[choose_lane(lanes, tokens)]
    able = [load for load in lanes if load.total_blocks * 32 > tokens]
    assert chosen in able or not able


@given(st.lists(loads, min_size=2, max_size=8), st.integers(1, 3000), st.data())
def test_more_work_never_attracts(lanes: list[LaneLoad], tokens: int, data: st.DataObject) -> None:
    lane = choose_lane(lanes, tokens)
    other = data.draw(st.integers(0, len(lanes) - 1).filter(lambda index: index != lane))
    lanes[other] = given_to(lanes[other], data.draw(st.integers(0, 1000)))
    assert choose_lane(lanes, tokens) == lane


@given(st.integers(1, 8), st.lists(st.integers(1, 400), max_size=60))
def test_queues_grow_alike(count: int, prompts: list[int]) -> None:
    lanes = [attrs.evolve(EMPTY, total_blocks=1000, free_blocks=1000) for _ in range(count)]
    for tokens in prompts:
        lane = choose_lane(lanes, tokens)
        lanes[lane] = given_to(lanes[lane], tokens)
    queued = [load.queued_prompt_tokens for load in lanes]
    assert max(queued) - min(queued) <= max(prompts, default=0)


@given(st.integers(1, 8), st.integers(0, 64))
def test_equal_requests_are_dealt_in_turn(count: int, requests: int) -> None:
    lanes, dealt = [EMPTY] * count, []
    for _ in range(requests):
        dealt.append(choose_lane(lanes, 10))
        lanes[dealt[-1]] = given_to(lanes[dealt[-1]], 10)
    assert dealt == [number % count for number in range(requests)]


@pytest.mark.parametrize(
    ("other", "tokens"),
    [
        (LaneLoad(0, 1, 100, 100, 0, 32), 10),  # no row is free
        (LaneLoad(0, 0, 1, 2, 8, 32), 40),  # two blocks are needed
        (LaneLoad(0, 0, 100, 100, 8, 32), 3200),  # the first generated token would not fit
        (LaneLoad(0, 3, 100, 100, 5, 32), 10),
        (LaneLoad(0, 0, 79, 100, 8, 32), 10),
        (LaneLoad(641, 0, 100, 100, 8, 32), 10),
    ],
)
def test_what_speaks_against_a_lane(other: LaneLoad, tokens: int) -> None:
    calm = LaneLoad(640, 0, 200, 200, 8, 32)
    assert choose_lane([other, calm], tokens) == 1


def test_no_lane() -> None:
    with pytest.raises(ValueError, match="no lane"):
        choose_lane([], 10)

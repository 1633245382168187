"""What tokens come back to, where nothing or something is lost; padding."""

import pytest
import torch
from elastic_ep import Lane, LaneError, LaneShape, MemoryNetwork, Programs, Shape, place, tables, unpack
from elastic_ep.lane_shape import NOTE
from elastic_ep.packing import count, pack, static_tensors
from elastic_ep.runner import Static

SHAPE = Shape(layers=1, experts=3, slots=3, max_ranks=2)
LANE = LaneShape(max_ranks=2, slots=3, tokens=2, top=2, hidden=4)
FACTORS = torch.tensor([1.0, 2.0, 3.0])
"""What the experts of this file multiply by."""


def fill(static: Static, experts: list[list[int]], weights: list[list[float]]) -> None:
    static["tokens"].copy_(torch.arange(8.0).view(2, 4) + 1)
    static["experts"].copy_(torch.tensor(experts))
    static["weights"].copy_(torch.tensor(weights))
    static["count"].fill_(2)


def go(static: Static, lost: tuple[int, ...] = ()) -> torch.Tensor:
    """The output, with rank 0 alone and some experts lost."""
    made = tables(place(SHAPE, (0,)))
    for expert in lost:
        made.slots[:, expert], made.replicas[:, expert] = -1, 0
    placement = place(SHAPE, (0,)).row(0, 0)
    pack(static, LANE, 0, made.slots[0], made.replicas[0])
    slots = static["in_head"][0, NOTE:]
    factors = FACTORS[list(placement)][slots.clamp(min=0)].to(static["in"].dtype)
    static["back"][0].copy_(static["in"][0] * factors[:, None])
    unpack(static, LANE)
    return static["output"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_that_cancel_out_are_taken_as_they_are(dtype: torch.dtype) -> None:
    static = static_tensors(LANE, dtype)
    fill(static, [[2, 0], [1, 2]], [[1.0, -1.0], [0.0, 0.0]])
    assert torch.equal(go(static)[0], 2 * static["tokens"][0])
    assert torch.equal(go(static)[1], torch.zeros(4, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_expert_of_hardly_any_weight_makes_up_for_a_lost_one(dtype: torch.dtype) -> None:
    """In half precision its share of the rest is more than the largest number."""
    static = static_tensors(LANE, dtype)
    fill(static, [[0, 1], [0, 0]], [[1.0, 6e-6], [0.5, 0.5]])
    output = go(static, lost=(0,))
    torch.testing.assert_close(output[0], 2 * static["tokens"][0], rtol=1e-2, atol=0)
    assert torch.equal(output[1], torch.zeros(4, dtype=dtype))


def test_padding_is_counted_nowhere_and_may_ask_for_no_expert() -> None:
    static = static_tensors(LANE, torch.float32)
    fill(static, [[2, 1], [-1, -1]], [[0.5, 0.5], [1.0, 1.0]])
    static["count"].fill_(1)
    load = torch.zeros(3, dtype=torch.int64)
    assert torch.equal(go(static)[0], 2.5 * static["tokens"][0])
    count(static, load)
    assert load.tolist() == [0, 1, 1]


def test_more_tokens_than_there_is_room_for_are_refused() -> None:
    lane, made = Lane(MemoryNetwork().end("0"), 0, LANE), tables(place(SHAPE, (0,)))
    lane.static["count"].fill_(3)
    programs = Programs(
        lambda: pack(lane.static, LANE, 0, made.slots[0], made.replicas[0]),
        lambda: None,
        lambda: unpack(lane.static, LANE),
    )
    with pytest.raises(LaneError, match="3 tokens for a lane that was made for 2"):
        lane.exchange(1, 0, {}, programs, 1.0)

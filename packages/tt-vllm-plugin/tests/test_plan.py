"""Plans of lanes, joined into one."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tt_scheduler import Phase
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm_tt_plugin.plan import LanePlan, moves_requests

JOINED = ("num_scheduled_tokens", "scheduled_encoder_inputs")
LISTED = ("scheduled_new_reqs", "free_encoder_mm_hashes")
NAMED = ("finished_req_ids", "preempted_req_ids")
FLAGS = ("has_structured_output_requests", "pending_structured_output_tokens")


@st.composite
def lane_output(draw: st.DrawFn, lane: int, moves: bool) -> SchedulerOutput:
    """What a lane scheduled, with anything in it that a lane of ours can have."""
    names = [f"{lane}-{index}" for index in range(draw(st.integers(0, 3)))]
    some = st.lists(st.sampled_from(names), unique=True) if names else st.just([])
    others = st.lists(st.sampled_from([f"{lane}-left", f"{lane}-lost"]), unique=True, max_size=2 * moves)
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = {name: draw(st.integers(1, 9)) for name in names}
    output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
    output.scheduled_encoder_inputs = {name: [lane] for name in draw(some)}
    output.free_encoder_mm_hashes = draw(others)
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=names,
        resumed_req_ids=set(draw(some)) if moves else set(),
        new_token_ids=[],
        all_token_ids={name: [lane] for name in draw(some)},
        new_block_ids=[draw(st.sampled_from([None, ([lane],)])) for _ in names],
        num_computed_tokens=[draw(st.integers(0, 99)) for _ in names],
        num_output_tokens=[draw(st.integers(0, 99)) for _ in names],
    )
    new: Any = draw(others)
    output.scheduled_new_reqs = new  # only gathered, never looked into
    output.finished_req_ids = set(draw(others))
    output.preempted_req_ids = set(draw(others)) if draw(st.booleans()) else None
    for flag in FLAGS:
        setattr(output, flag, draw(st.booleans()))
    return output


@given(st.data(), st.booleans())
def test_a_plan_of_lanes_tells_what_all_of_them_tell(data: st.DataObject, moves: bool) -> None:
    outputs = tuple(data.draw(lane_output(lane, moves)) for lane in range(data.draw(st.integers(1, 4))))
    before = [_told(output) for output in outputs]
    plan = LanePlan.merged(outputs, Phase.DECODE, {}, any(map(moves_requests, outputs)))
    assert [_told(output) for output in outputs] == before, "a lane's own output changed"
    assert plan.total_num_scheduled_tokens == sum(plan.num_scheduled_tokens.values())
    for name in JOINED:
        assert getattr(plan, name) == {k: v for output in outputs for k, v in getattr(output, name).items()}
    for name in LISTED:
        assert getattr(plan, name) == [value for output in outputs for value in getattr(output, name)]
    for name in NAMED:
        assert set(getattr(plan, name) or ()) == {
            v for output in outputs for v in getattr(output, name) or ()
        }
    for name in FLAGS:
        assert getattr(plan, name) is any(getattr(output, name) for output in outputs)
    whole = vars(plan.scheduled_cached_reqs)
    for output in outputs:
        for name, part in vars(output.scheduled_cached_reqs).items():
            assert _holds(part, whole[name]), (name, part, whole[name])
    assert sum(map(len, whole.values())) == sum(
        len(part) for output in outputs for part in vars(output.scheduled_cached_reqs).values()
    )


def _told(output: SchedulerOutput) -> str:
    return repr(dict(sorted(vars(output).items())))


def _holds(part: Any, whole: Any) -> bool:
    """Whether ``whole`` has all that ``part`` has, in its order."""
    if isinstance(part, dict):
        return all(whole[key] == value for key, value in part.items())
    if isinstance(part, set):
        return part.issubset(whole)
    return any(whole[at : at + len(part)] == part for at in range(len(whole) + 1))

"""What the scheduler and the runner lean on in vLLM's scheduler. Each test says what breaks with it."""

from dataclasses import fields

import pytest
from tt_scheduler import Phase
from vllm.outputs import RequestError
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.request import RequestStatus
from vllm_tt_plugin.plan import StepPlan

from .conftest import MakeScheduler
from .vllm_parts import make_request, step


def test_a_running_request_is_passed_over_once_by_its_eligible_step(make_scheduler: MakeScheduler) -> None:
    """If not: decodes stand in prefill steps, or requests are passed over for ever."""
    scheduler = make_scheduler()
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, 5))
    step(scheduler)
    scheduler.requests["a"].next_decode_eligible_step = scheduler.current_step + 2
    assert list(step(scheduler)[0].num_scheduled_tokens) == ["b"]
    assert list(step(scheduler)[0].num_scheduled_tokens) == ["a", "b"]


def test_a_limit_of_zero_active_requests_admits_nobody_and_leaves_the_queue(
    make_scheduler: MakeScheduler,
) -> None:
    """If not: decode steps admit prompts, or lose waiting requests."""
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 5))
    step(scheduler)
    scheduler.add_request(make_request("b", 5))
    limit, scheduler.max_num_active_reqs = scheduler.max_num_active_reqs, 0
    assert list(step(scheduler)[0].num_scheduled_tokens) == ["a"]
    assert [request.request_id for request in scheduler.waiting] == ["b"]
    scheduler.max_num_active_reqs = limit
    assert list(step(scheduler)[0].num_scheduled_tokens) == ["a", "b"]


def test_is_prefill_chunk_holds_until_all_known_tokens_are_scheduled(make_scheduler: MakeScheduler) -> None:
    """If not: the scheduler takes chunks for decodes, or decodes for chunks."""
    scheduler = make_scheduler(max_num_batched_tokens=8)
    request = make_request("a", 20)
    scheduler.add_request(request)
    seen = []
    for _ in range(4):
        step(scheduler)
        seen.append((request.num_computed_tokens, request.is_prefill_chunk))
    assert seen == [(8, True), (16, True), (20, False), (21, False)]


def test_a_request_named_among_grammar_errors_ends_with_that_error(make_scheduler: MakeScheduler) -> None:
    """If not: a prompt that no cache can hold blocks the queue for ever."""
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 5))
    scheduler.grammar_compile_error_reqs["a"] = RequestError(code="validation_error", message="too long")
    scheduler.max_num_active_reqs = 0
    _, outputs = step(scheduler)
    (output,) = outputs[0].outputs
    assert (output.request_id, output.finish_reason) == ("a", FinishReason.ERROR)
    assert output.error is not None
    assert output.error.message == "too long"
    assert not scheduler.has_unfinished_requests()


def test_tokens_are_not_copied_for_requests_of_the_step_before(make_scheduler: MakeScheduler) -> None:
    """If not: each change from prefill to decode copies and pickles every history."""
    scheduler = make_scheduler()
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, 5))
    step(scheduler)
    scheduler.prev_step_scheduled_req_ids = {"a"}
    cached = step(scheduler)[0].scheduled_cached_reqs
    assert cached.req_ids == ["a", "b"]
    assert set(cached.all_token_ids) == {"b"}


def test_a_finished_request_is_told_once_also_by_a_step_that_schedules_nothing(
    make_scheduler: MakeScheduler,
) -> None:
    """If it were told again, `_carry_on` would be needless; if never, rows would leak."""
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 5))
    step(scheduler)
    scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    assert [step(scheduler)[0].finished_req_ids for _ in range(2)] == [{"a"}, set()]


def preempted_and_resumed(make_scheduler: MakeScheduler) -> tuple[SchedulerOutput, SchedulerOutput]:
    """The step that preempts request b, and the one that resumes it with two generated tokens."""
    scheduler = make_scheduler(blocks=7)
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, 10, max_tokens=6))
    preempting = None
    for _ in range(12):
        output, _ = step(scheduler)
        if output.preempted_req_ids:
            preempting = output
        elif preempting is not None and "b" in output.num_scheduled_tokens:
            return preempting, output
    raise AssertionError("nothing was preempted and resumed")


def test_the_first_wire_form_resumes_as_cached_data(make_scheduler: MakeScheduler) -> None:
    """If not: `RequestTable.apply` finds no row for whoever is resumed."""
    preempting, resuming = preempted_and_resumed(make_scheduler)
    assert preempting.preempted_req_ids == {"b"}
    cached = resuming.scheduled_cached_reqs
    assert cached.resumed_req_ids == {"b"}
    index = cached.req_ids.index("b")
    assert cached.num_computed_tokens[index] == 0
    assert resuming.num_scheduled_tokens["b"] == 10 + cached.num_output_tokens[index]
    assert cached.new_block_ids[index] is not None
    assert not resuming.scheduled_new_reqs


def test_the_second_wire_form_resumes_as_new_data_with_all_tokens(
    make_scheduler: MakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If not: with VLLM_USE_V2_MODEL_RUNNER=1 resumed requests forget what they generated."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    preempting, resuming = preempted_and_resumed(make_scheduler)
    assert preempting.preempted_req_ids == {"b"}
    (data,) = resuming.scheduled_new_reqs
    assert data.req_id == "b"
    assert data.prompt_token_ids == list(range(1, 11))
    assert data.prefill_token_ids is not None
    assert data.prefill_token_ids[:10] == data.prompt_token_ids
    assert set(data.prefill_token_ids[10:]) == {7}
    assert not resuming.scheduled_cached_reqs.resumed_req_ids
    assert not resuming.scheduled_cached_reqs.all_token_ids


def test_every_field_of_a_scheduler_output_reaches_the_plan() -> None:
    """If not: a field that vLLM adds, or takes away, is lost on its way to the worker."""
    output = SchedulerOutput.make_empty()
    for index, item in enumerate(fields(SchedulerOutput)):
        setattr(output, item.name, index)
    plan = StepPlan.of(output, Phase.DECODE, {"a": 3})
    assert [getattr(plan, item.name) for item in fields(SchedulerOutput)] == list(range(len(fields(output))))
    assert (plan.phase, plan.rows) == (Phase.DECODE, {"a": 3})


def test_a_cache_below_one_request_of_full_length_does_not_start(make_scheduler: MakeScheduler) -> None:
    """vLLM reserves its null block before it checks; if not, prompts may be admitted that never fit."""
    from vllm.v1.core.kv_cache_planning import get_kv_cache_configs
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    scheduler = make_scheduler()
    config, spec = scheduler.vllm_config, scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec
    config.cache_config.kv_cache_layout = "LBHNC"
    assert isinstance(spec, FullAttentionSpec)
    blocks = config.model_config.max_model_len // spec.block_size
    groups = scheduler.kv_cache_config.kv_cache_groups
    specs: list[dict[str, KVCacheSpec]] = [{"model.layers.0.self_attn.attn": spec}]
    (planned,) = get_kv_cache_configs(config, specs, [(blocks + 1) * spec.page_size_bytes], groups)
    assert planned.num_blocks == blocks + 1
    with pytest.raises(ValueError, match="max seq len"):
        get_kv_cache_configs(config, specs, [blocks * spec.page_size_bytes], groups)

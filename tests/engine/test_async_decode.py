"""Async scheduling: the next decode is submitted before the last one was read, and no text tells of it."""

from typing import Any

import pytest
from oracle_text import continuation
from vllm import LLM, SamplingParams
from vllm_tt_plugin.pending import PendingDecodes

from .conftest import ORACLE_VOCAB, Engines, core_of, lanes_of
from .drive import Driver

ON_DEVICE: dict[str, Any] = {"additional_config": {"tt": {"sample_on_device_mode": "all"}}}
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6], [5], [3, 5, 8, 9]]


def pending_of(engine: LLM) -> PendingDecodes:
    """What an engine's device was given and nobody has read yet."""
    pending: PendingDecodes = core_of(engine).model_executor.driver_worker.worker._runner._pending
    return pending


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **more)


def started(engine: LLM, count: int, **more: Any) -> Driver:
    driver = Driver(engine)
    for index, prompt in enumerate(PROMPTS[:count]):
        driver.add(str(index), prompt, greedy(20, **more))
    return driver


def assert_right(driver: Driver) -> None:
    for index, prompt in enumerate(PROMPTS[: len(driver.tokens)]):
        assert driver.tokens[str(index)] == continuation(prompt, 20, ORACLE_VOCAB)


@pytest.mark.parametrize("lanes", [1, 2])
def test_two_decodes_are_under_way_while_nothing_changes(oracle_engine: Engines, lanes: int) -> None:
    engine = oracle_engine(data_parallel_size=lanes, max_num_seqs=4 // lanes, **ON_DEVICE)
    driver = started(engine, 4)
    depths = []
    while engine.llm_engine.has_unfinished_requests():
        driver.step()
        depths.append(len(pending_of(engine)))
    assert_right(driver)
    # After each step of the engine, the one that it submitted ahead is left.
    assert depths.count(1) >= 17, depths
    assert max(depths) == 1


def test_with_no_async_scheduling_each_step_is_read_before_the_next(oracle_engine: Engines) -> None:
    engine = oracle_engine(async_scheduling=False, **ON_DEVICE)
    driver = started(engine, 4)
    while engine.llm_engine.has_unfinished_requests():
        driver.step()
        assert len(pending_of(engine)) == 0
    assert_right(driver)


def test_a_token_that_a_stopped_request_did_not_want_is_dropped(oracle_engine: Engines) -> None:
    """When it stops, the device has the next decode already: its row and blocks serve others only after."""
    engine = oracle_engine(**ON_DEVICE)
    stop_at = continuation(PROMPTS[0], 7, ORACLE_VOCAB)
    driver = Driver(engine)
    driver.add("stops", PROMPTS[0], greedy(20, stop_token_ids=[stop_at[-1]]))
    for index in (1, 2, 3):
        driver.add(str(index), PROMPTS[index], greedy(20))
    while "stops" not in driver.finished:
        driver.step()
    driver.add("after", PROMPTS[1][::-1], greedy(20))
    driver.drain()
    first = stop_at.index(stop_at[-1]) + 1
    assert driver.tokens["stops"] == stop_at[:first]
    assert driver.tokens["after"] == continuation(PROMPTS[1][::-1], 20, ORACLE_VOCAB)
    for index in (1, 2, 3):
        assert driver.tokens[str(index)] == continuation(PROMPTS[index], 20, ORACLE_VOCAB)


def test_an_output_in_flight_is_delivered_to_a_request_that_is_preempted(oracle_engine: Engines) -> None:
    engine = oracle_engine(num_gpu_blocks_override=19, max_model_len=72, **ON_DEVICE)
    driver = Driver(engine)
    for index, prompt in enumerate(PROMPTS):
        driver.add(str(index), prompt, greedy(30))
    seen: dict[str, int] = {}
    lane = lanes_of(engine)[0]
    preempted = 0
    while engine.llm_engine.has_unfinished_requests():
        driver.step()
        for name, tokens in driver.tokens.items():
            assert len(tokens) >= seen.get(name, 0), "a delivered token was taken back"
            seen[name] = len(tokens)
        for request in lane.requests.values():
            assert request.num_output_placeholders >= 0
            assert request.num_stale_output_tokens >= 0
        preempted = max(preempted, sum(r.num_preemptions for r in lane.requests.values()))
    assert preempted, "the pool was large enough"
    for index, prompt in enumerate(PROMPTS):
        assert driver.tokens[str(index)] == continuation(prompt, 30, ORACLE_VOCAB)


def test_a_row_for_the_host_ends_the_overlap_and_its_leaving_brings_it_back(oracle_engine: Engines) -> None:
    engine = oracle_engine(**ON_DEVICE)
    driver = started(engine, 3)
    driver.step(4)
    assert len(pending_of(engine)) == 1
    driver.add("host", PROMPTS[3], greedy(5, logit_bias={0: -100.0}))
    while not driver.tokens["host"]:
        driver.step()
    while "host" not in driver.finished:
        assert len(pending_of(engine)) == 0, "its steps are sampled one by one"
        driver.step()
    driver.step(3)
    assert len(pending_of(engine)) == 1
    driver.drain()
    assert_right(Driver(engine, {str(i): driver.tokens[str(i)] for i in range(3)}))

"""Whatever arrives, leaves or is preempted when: each request gets the tokens that it gets alone.

Hypothesis writes the scenarios; engines of several configurations run them with an oracle that raises where a
block, a row, a position or a reload is wrong, and books kept beside the scheduler check each plan.
"""

import gc
import os
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from oracle_text import continuation
from vllm import LLM, SamplingParams
from vllm_tt_plugin.requests import RequestState

from .conftest import ORACLE_VOCAB, Engines, lanes_of
from .drive import Driver
from .watch import PlanWatch

ROWS = 4
BLOCK = 4
EXAMPLES = int(os.environ.get("SOAK_EXAMPLES", "40"))
"""Of each configuration; `make soak` plays many more."""
SHARED = [[(13 * i + 5 * stream) % ORACLE_VOCAB for i in range(40)] for stream in range(4)]

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "two lanes": {
        "data_parallel_size": 2,
        "max_num_seqs": 2,
        "num_gpu_blocks_override": 19,
        "max_num_batched_tokens": 7,
    },
    "four lanes on the device": {
        "data_parallel_size": 4,
        "max_num_seqs": 1,
        "num_gpu_blocks_override": 19,
        "max_num_batched_tokens": 9,
        "additional_config": {"tt": {"sample_on_device_mode": "all"}},
    },
    "two lanes, V2": {
        "v2_wire_form": True,
        "data_parallel_size": 2,
        "max_num_seqs": 2,
        "num_gpu_blocks_override": 19,
    },
    "two lanes, priorities": {
        "data_parallel_size": 2,
        "max_num_seqs": 3,
        "num_gpu_blocks_override": 24,
        "scheduling_policy": "priority",
        "max_num_batched_tokens": 6,
    },
    "small pool": {"num_gpu_blocks_override": 24},
    "small pool, small chunks": {"num_gpu_blocks_override": 19, "max_num_batched_tokens": 7},
    "priorities": {
        "num_gpu_blocks_override": 19,
        "max_num_batched_tokens": 9,
        "scheduling_policy": "priority",
    },
    "one to one": {
        "num_gpu_blocks_override": 19,
        "max_num_batched_tokens": 5,
        "additional_config": {"tt": {"decode_interleave_prefill_steps": 1}},
    },
    "prefill first": {
        "num_gpu_blocks_override": 19,
        "max_num_batched_tokens": 6,
        "additional_config": {"tt": {"decode_interleave_enabled": False}},
    },
    "bounded gap": {
        "num_gpu_blocks_override": 19,
        "max_num_batched_tokens": 8,
        "additional_config": {"tt": {"phase_policy": "bounded_gap"}},
    },
    "decodes scheduled by vLLM": {
        "num_gpu_blocks_override": 19,
        "max_num_batched_tokens": 8,
        "additional_config": {"tt": {"direct_decode": False}},
    },
    "long prompts throttled": {
        "num_gpu_blocks_override": 24,
        "max_num_batched_tokens": 12,
        "long_prefill_token_threshold": 5,
    },
    "nothing declared": {"oracle": "UndeclaredOracle", "num_gpu_blocks_override": 19},
    "V2 wire form": {"v2_wire_form": True, "num_gpu_blocks_override": 19, "max_num_batched_tokens": 7},
    "V2, nothing declared": {
        "v2_wire_form": True,
        "oracle": "UndeclaredOracle",
        "num_gpu_blocks_override": 19,
    },
    "on the device": {
        "num_gpu_blocks_override": 19,
        "max_num_batched_tokens": 9,
        "additional_config": {"tt": {"sample_on_device_mode": "all"}},
    },
    "on the device, one step after the other": {
        "num_gpu_blocks_override": 19,
        "max_num_batched_tokens": 9,
        "async_scheduling": False,
        "additional_config": {"tt": {"sample_on_device_mode": "all"}},
    },
    "on the device, V2, priorities": {
        "v2_wire_form": True,
        "num_gpu_blocks_override": 19,
        "scheduling_policy": "priority",
        "max_num_batched_tokens": 9,
        "additional_config": {"tt": {"sample_on_device_mode": "all"}},
    },
    "decodes on the device": {
        "num_gpu_blocks_override": 19,
        "max_num_batched_tokens": 9,
        "additional_config": {"tt": {"sample_on_device_mode": "decode_only"}},
    },
    "on the device, version 0": {
        "oracle": "OracleVersion0",
        "num_gpu_blocks_override": 19,
        "additional_config": {"tt": {"sample_on_device_mode": "all"}},
    },
}


@attrs.frozen
class Arrival:
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None
    priority: int

    @property
    def params(self) -> SamplingParams:
        temperature = 0.0 if self.seed is None else 1.0
        return SamplingParams(
            temperature=temperature,
            seed=self.seed,
            max_tokens=self.max_tokens,
            ignore_eos=True,
            detokenize=False,
        )


@attrs.frozen
class Event:
    """Happens after ``steps`` more steps."""

    steps: int
    what: Arrival | int | None
    """An arrival, the index of a request to abort, or None: all that run are preempted."""


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, ...]:
    shared = draw(st.sampled_from(SHARED))[: draw(st.integers(0, 40))]
    own = draw(st.lists(st.integers(0, ORACLE_VOCAB - 1), min_size=1, max_size=12))
    return (*shared, *own)


arrivals = st.builds(
    Arrival, prompts(), st.integers(1, 18), st.none() | st.sampled_from([1, 2**63 - 1, -5]), st.integers(0, 2)
)
events = st.builds(Event, st.integers(0, 6), arrivals | arrivals | arrivals | st.integers(0, 9) | st.none())


def alone(engine: LLM, arrival: Arrival) -> list[int]:
    """The tokens of a request that has the engine to itself and finds no prefix."""
    if arrival.seed is None:
        return continuation(arrival.prompt, arrival.max_tokens, ORACLE_VOCAB)
    engine.reset_prefix_cache()
    driver = Driver(engine)
    driver.add("alone", arrival.prompt, arrival.params)
    driver.drain()
    return driver.tokens["alone"]


@pytest.mark.parametrize("configuration", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_each_request_gets_the_tokens_that_it_gets_alone(
    configuration: dict[str, Any], oracle_engine: Engines, watch: Callable[[LLM], PlanWatch]
) -> None:
    watches: dict[LLM, PlanWatch] = {}

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        phases=(Phase.explicit, Phase.generate, Phase.target),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(events, min_size=2, max_size=12))
    def scenario(timeline: list[Event]) -> None:
        # The same one each time, until a failure leaves requests behind.
        plain = {"max_num_seqs": ROWS, "block_size": BLOCK, "max_model_len": 72}
        engine = oracle_engine(**plain | configuration)
        if engine not in watches:
            watches[engine] = watch(engine)
        play(engine, timeline)
        assert not watches[engine].owners, "rows are still held"

    scenario()


def play(engine: LLM, timeline: list[Event]) -> None:
    requests = [event.what for event in timeline if isinstance(event.what, Arrival)]
    expected = {str(index): alone(engine, arrival) for index, arrival in enumerate(requests)}
    driver = Driver(engine)
    for event in timeline:
        driver.step(event.steps)
        match event.what:
            case Arrival() as arrival:
                driver.add(str(len(driver.tokens)), arrival.prompt, arrival.params, arrival.priority)
            case int(index) if str(index) in driver.tokens and str(index) not in driver.finished:
                driver.abort(str(index))
            case None:
                driver.reset_running()
    # Were each token computed alone, and each twice more after preemptions, this would do.
    driver.drain(limit=sum(len(r.prompt) + r.max_tokens for r in requests) * 3 + 20)
    for name, tokens in expected.items():
        if driver.finished[name] == "abort":
            assert driver.tokens[name] == tokens[: len(driver.tokens[name])]
        else:
            assert (name, driver.tokens[name]) == (name, tokens)
    for lane in lanes_of(engine):
        pool = lane.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks are still held"


def test_finished_requests_are_forgotten(oracle_engine: Engines) -> None:
    engine = oracle_engine(max_num_seqs=ROWS)
    params = SamplingParams(temperature=0, max_tokens=2, detokenize=False)
    prompts_of_many: list[Any] = [{"prompt_token_ids": [index % 7 + 1]} for index in range(100)]
    before = live_states()
    engine.generate(prompts_of_many, params, use_tqdm=False)
    # Those that ran last may still be in what is kept from step to step.
    assert live_states() - before <= 3 * ROWS


def live_states() -> int:
    gc.collect()
    return sum(type(item) is RequestState for item in gc.get_objects())

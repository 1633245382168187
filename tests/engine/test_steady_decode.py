"""Scheduling steady decodes directly changes nothing but time.

Two engines of one configuration live through the same scenario, one with the short way and one without. They
must plan the same steps with the same blocks, and end with the same content of the prefix cache.
"""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from vllm import LLM

from .configurations import PLAIN
from .conftest import Engines, lanes_of
from .drive import Driver
from .scenarios import Event, live, timelines
from .watch import PlanWatch

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "small pool, small chunks": {"num_gpu_blocks_override": 19, "max_num_batched_tokens": 7},
    "no prefix cache": {"num_gpu_blocks_override": 19, "enable_prefix_caching": False},
    "two lanes": {"data_parallel_size": 2, "max_num_seqs": 2, "num_gpu_blocks_override": 19},
    "planned ahead": {"num_gpu_blocks_override": 19, "sample_on_device_mode": "all"},
    "two lanes, planned ahead": {
        "data_parallel_size": 2,
        "max_num_seqs": 2,
        "num_gpu_blocks_override": 19,
        "sample_on_device_mode": "all",
    },
}


@pytest.mark.parametrize("configuration", CONFIGURATIONS.values(), ids=CONFIGURATIONS.keys())
def test_both_ways_plan_the_same(
    configuration: dict[str, Any], oracle_engine: Engines, watch: Callable[[LLM], PlanWatch]
) -> None:
    rest = dict(configuration)
    mode = rest.pop("sample_on_device_mode", None)
    engines = [
        oracle_engine(
            **PLAIN | rest,
            additional_config={"tt": {"direct_decode": direct, "sample_on_device_mode": mode}},
        )
        for direct in (True, False)
    ]
    watches = [watch(engine) for engine in engines]

    @settings(
        max_examples=40,
        deadline=None,
        phases=(Phase.explicit, Phase.generate, Phase.target),
        suppress_health_check=list(HealthCheck),
    )
    @given(timelines)
    def scenario(timeline: list[Event]) -> None:
        drivers = [Driver(engine) for engine in engines]
        for engine, watching, driver in zip(engines, watches, drivers, strict=True):
            engine.reset_prefix_cache()
            watching.plans.clear()
            live(driver, timeline)
        direct, through_vllm = ([told(plan) for plan in watching.plans] for watching in watches)
        assert direct == through_vllm
        assert drivers[0].tokens == drivers[1].tokens
        assert cached(engines[0]) == cached(engines[1])

    scenario()
    assert sum(lane.direct_steps for lane in lanes_of(engines[0])) > 100, (
        "the short way was hardly ever taken"
    )
    assert sum(lane.direct_steps for lane in lanes_of(engines[1])) == 0


def told(plan: Any) -> tuple[Any, ...]:
    """All of a plan that a runner reads. Engine cores add a random end to request ids, which is cut off."""
    cached_data = plan.scheduled_cached_reqs
    return (
        plan.phase,
        [(name_of(name), count) for name, count in plan.num_scheduled_tokens.items()],
        {name_of(name): row for name, row in plan.rows.items()},
        [
            (name_of(data.req_id), data.block_ids, data.num_computed_tokens)
            for data in plan.scheduled_new_reqs
        ],
        [name_of(name) for name in cached_data.req_ids],
        {name_of(name) for name in cached_data.resumed_req_ids},
        cached_data.new_block_ids,
        cached_data.num_computed_tokens,
        cached_data.num_output_tokens,
        {name_of(name) for name in plan.finished_req_ids},
        {name_of(name) for name in plan.preempted_req_ids or ()},
    )


def name_of(core_id: str) -> str:
    return core_id.split("-", 1)[0]


def cached(engine: LLM) -> list[set[bytes]]:
    """The block hashes that each lane's prefix cache holds."""
    return [
        set(lane.kv_cache_manager.block_pool.cached_block_hash_to_block._cache) for lane in lanes_of(engine)
    ]

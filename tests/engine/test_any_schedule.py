"""Whatever arrives, leaves or is preempted when: each request gets the tokens that it gets alone.

Hypothesis writes the scenarios; engines of several configurations run them with an oracle that raises where a
block, a row, a position or a reload is wrong, and books kept beside the scheduler check each plan.
"""

import gc
import os
from collections.abc import Callable
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from vllm import LLM, SamplingParams
from vllm_tt_plugin.requests import RequestState

from .configurations import LEVELS, PAIRS, PLAIN, POLICIES, PRODUCT, ROWS, engine_of
from .conftest import Engines
from .scenarios import Event, play, timelines
from .watch import PlanWatch

SOAK = int(os.environ.get("SOAK_EXAMPLES", "0"))
"""How many examples `make soak` plays of each configuration, and then of the whole product."""
CONFIGURATIONS = (PRODUCT if SOAK else PAIRS) | POLICIES


def examples_of(name: str) -> int:
    return SOAK or (240 if name in PAIRS else 15)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_each_request_gets_the_tokens_that_it_gets_alone(
    name: str, oracle_engine: Engines, watch: Callable[[LLM], PlanWatch]
) -> None:
    watches: dict[LLM, PlanWatch] = {}
    steps = tokens = 0

    @settings(
        max_examples=examples_of(name),
        deadline=None,
        phases=(Phase.explicit, Phase.generate, Phase.target),
        suppress_health_check=list(HealthCheck),
    )
    @given(timelines)
    def scenario(timeline: list[Event]) -> None:
        nonlocal steps, tokens
        # The same one each time, until a failure leaves requests behind.
        engine = oracle_engine(**PLAIN | CONFIGURATIONS[name])
        if engine not in watches:
            watches[engine] = watch(engine)
        watches[engine].plans.clear()
        tokens += play(engine, timeline)
        steps += len(watches[engine].plans)
        assert not watches[engine].owners, "rows are still held"

    scenario()
    print(f"{steps} steps, {tokens} tokens")
    if name in PAIRS:
        assert steps >= 3_500, steps
        assert tokens >= 5_000, tokens


def test_six_engines_meet_every_pair_of_levels() -> None:
    met = list(PAIRS.values())
    for (first, ones), (second, others) in combinations(LEVELS.items(), 2):
        for one, other in product(ones, others):
            rest = {factor: levels[0] for factor, levels in LEVELS.items()}
            wanted = engine_of(rest | {first: one, second: other}, 0)
            keys = _keys_of(first), _keys_of(second)
            assert any(all(e.get(k) == wanted.get(k) for k in keys) for e in met), (first, one, second, other)


def _keys_of(factor: str) -> str:
    return {
        "mode": "additional_config",
        "lanes": "data_parallel_size",
        "ahead": "async_scheduling",
        "v2": "v2_wire_form",
        "version": "oracle",
    }[factor]


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

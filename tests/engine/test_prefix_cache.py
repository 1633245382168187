"""A prefix that is found in the cache gives the tokens of one that was computed, wherever it ends."""

from collections.abc import Callable
from typing import Any

import pytest
from oracle_text import continuation
from vllm import LLM, SamplingParams

from .configurations import BLOCK, PLAIN
from .conftest import ORACLE_VOCAB, Engines
from .drive import Driver
from .watch import PlanWatch

SHARED = [(7 * i + 3) % ORACLE_VOCAB for i in range(4 * BLOCK)]
PLACES = range(len(SHARED) + 1)
COUNT = 6
ON_DEVICE: dict[str, Any] = {"additional_config": {"tt": {"sample_on_device_mode": "all"}}}
WAYS: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "chunks of 5": {"max_num_batched_tokens": 5},
    "on the device": ON_DEVICE,
    "on the device, V2": {"v2_wire_form": True} | ON_DEVICE,
}
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, detokenize=False)


def prompt_of(place: int) -> list[int]:
    """As much of the shared tokens, and one that nobody else has there."""
    return [*SHARED[:place], (SHARED[place % len(SHARED)] + 1) % ORACLE_VOCAB, 11]


def hits(watching: PlanWatch) -> list[int]:
    """Tokens that each request found when it started."""
    return [data.num_computed_tokens for plan in watching.plans for data in plan.scheduled_new_reqs]


def whole_blocks(tokens: int) -> int:
    return tokens // BLOCK * BLOCK


@pytest.mark.parametrize("way", WAYS)
def test_hits_equal_misses_at_every_place(
    way: str, oracle_engine: Engines, watch: Callable[[LLM], PlanWatch]
) -> None:
    engine = oracle_engine(**PLAIN | WAYS[way])
    driver, watching = Driver(engine), watch(engine)
    driver.add("first", [*SHARED, 1, 2], GREEDY)
    driver.drain()
    for place in PLACES:
        driver.add(str(place), prompt_of(place), GREEDY)
        driver.drain()
        assert driver.tokens[str(place)] == continuation(prompt_of(place), COUNT, ORACLE_VOCAB)
    assert hits(watching) == [0, *(whole_blocks(place) for place in PLACES)]


@pytest.mark.parametrize("way", WAYS)
def test_a_prefix_is_found_while_its_first_request_still_runs(
    way: str, oracle_engine: Engines, watch: Callable[[LLM], PlanWatch]
) -> None:
    engine = oracle_engine(**PLAIN | WAYS[way])
    watching = watch(engine)
    for place in (BLOCK - 1, BLOCK, 2 * BLOCK, 2 * BLOCK + 1):
        engine.reset_prefix_cache()
        driver = Driver(engine)
        watching.plans.clear()
        driver.add("first", [*SHARED[: 3 * BLOCK], 1, 2], GREEDY)
        while not driver.tokens["first"]:
            driver.step()
        driver.add("second", prompt_of(place), GREEDY)
        driver.drain()
        assert hits(watching) == [0, whole_blocks(place)]
        assert driver.tokens == {
            "first": continuation([*SHARED[: 3 * BLOCK], 1, 2], COUNT, ORACLE_VOCAB),
            "second": continuation(prompt_of(place), COUNT, ORACLE_VOCAB),
        }


def test_generated_tokens_are_found_too(oracle_engine: Engines, watch: Callable[[LLM], PlanWatch]) -> None:
    """The next turn of a conversation begins with the last answer, which decodes wrote ahead of the host."""
    engine = oracle_engine(**PLAIN | ON_DEVICE)
    driver, watching = Driver(engine), watch(engine)
    long = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    driver.add("turn 1", SHARED[:5], long)
    driver.drain()
    turn = [*SHARED[:5], *driver.tokens["turn 1"], 8, 9]
    driver.add("turn 2", turn, long)
    driver.drain()
    assert driver.tokens["turn 2"] == continuation(turn, 20, ORACLE_VOCAB)
    # Position 24 was the last token's, which no decode wrote.
    assert hits(watching) == [0, 24]


def test_each_lane_has_a_cache_of_its_own(oracle_engine: Engines, watch: Callable[[LLM], PlanWatch]) -> None:
    engine = oracle_engine(**PLAIN | {"data_parallel_size": 2, "max_num_seqs": 2} | ON_DEVICE)
    driver, watching = Driver(engine), watch(engine)
    for name in ("left", "right"):
        driver.add(name, [*SHARED, 1], GREEDY)
    driver.drain()
    for name in ("left again", "right again"):
        driver.add(name, [*SHARED, 2], GREEDY)
    driver.drain()
    assert hits(watching) == [0, 0, len(SHARED), len(SHARED)], "no lane sees what another computed"
    for name, tokens in driver.tokens.items():
        assert tokens == continuation([*SHARED, 2 if "again" in name else 1], COUNT, ORACLE_VOCAB)


def test_a_preempted_request_finds_what_it_computed(
    oracle_engine: Engines, watch: Callable[[LLM], PlanWatch]
) -> None:
    engine = oracle_engine(**PLAIN | ON_DEVICE | {"num_gpu_blocks_override": 19})
    driver, watching = Driver(engine), watch(engine)
    long = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, detokenize=False)
    prompts = {str(i): [*SHARED[: 2 * BLOCK], i, i + 1] for i in range(3)}
    for name, prompt in prompts.items():
        driver.add(name, prompt, long)
    driver.drain()
    assert watching.preemptions
    for name, prompt in prompts.items():
        assert driver.tokens[name] == continuation(prompt, 30, ORACLE_VOCAB)

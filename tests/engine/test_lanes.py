"""Lanes split the work and change no token."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from .conftest import EngineShelf, core_of, lanes_of
from .drive import Driver
from .watch import PlanWatch

REQUESTS = 64
ROWS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
PROMPTS = [[(i * 7 + j * j) % 49_000 + 1 for j in range(5 + 3 * i)] for i in range(REQUESTS)]
PLAIN: dict[str, Any] = {"max_model_len": 256, "max_num_batched_tokens": 64, "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def in_one_lane(shelf: EngineShelf, tiny: Path) -> dict[str, list[int]]:
    driver = Driver(shelf(tiny, max_num_seqs=ROWS, **PLAIN))
    return run(driver)


def run(driver: Driver) -> dict[str, list[int]]:
    for index, prompt in enumerate(PROMPTS):
        driver.add(str(index), prompt, GREEDY)
    driver.drain()
    return driver.tokens


@pytest.mark.parametrize("settings", [{}, {"num_gpu_blocks_override": 20}], ids=["roomy", "small pool"])
@pytest.mark.parametrize("lanes", [2, 4])
def test_tokens_do_not_depend_on_lanes(
    lanes: int,
    settings: dict[str, Any],
    shelf: EngineShelf,
    tiny: Path,
    in_one_lane: dict[str, list[int]],
    watch: Callable[[LLM], PlanWatch],
) -> None:
    engine = shelf(tiny, max_num_seqs=ROWS // lanes, data_parallel_size=lanes, **PLAIN, **settings)
    watching = watch(engine)
    assert run(Driver(engine)) == in_one_lane
    assert {row * lanes // ROWS for plan in watching.plans for row in plan.rows.values()} == set(range(lanes))
    assert bool(watching.preemptions) == bool(settings)


def test_a_request_stays_in_its_lane(shelf: EngineShelf, tiny: Path) -> None:
    engine = shelf(tiny, max_num_seqs=4, data_parallel_size=2, **PLAIN)
    driver = Driver(engine)
    names = [driver.add(str(index), PROMPTS[index], GREEDY) for index in range(8)]
    homes = {name: lane for name in names for lane in lanes_of(engine) if lane.has_request(name)}
    assert {id(lane) for lane in homes.values()} == {id(lane) for lane in lanes_of(engine)}
    driver.step(3)
    driver.reset_running()
    driver.step(3)
    for name, lane in homes.items():
        assert [other is lane for other in lanes_of(engine)] == [
            other.has_request(name) for other in lanes_of(engine)
        ]
    driver.drain()
    assert core_of(engine).scheduler.get_request_counts() == (0, 0)

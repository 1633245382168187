"""A seeded request draws the same tokens alone, in any batch and row, after preemption and on any route."""

from collections.abc import Callable
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from .conftest import Engines
from .drive import Driver
from .watch import PlanWatch

PROMPT = [451, 7, 9_000, 13, 7]
COUNT = 10
SEEDS = (0, 1, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1, -2, -(2**62) - 3)  # vLLM reads -1 as none
ROUTES: dict[str, dict[str, Any]] = {
    "host": {},
    "decodes on the device": {"sample_on_device_mode": "decode_only"},
    "all on the device": {"sample_on_device_mode": "all"},
    "always host": {"sample_on_device_mode": "all", "always_compat_sampling": True},
}


def params(seed: int | None = None, **options: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 1.0, "seed": seed, "max_tokens": COUNT, "ignore_eos": True} | options
    )


def alone(engine: LLM, subject: SamplingParams, prompt: list[int] = PROMPT) -> list[int]:
    return list(
        engine.generate({"prompt_token_ids": prompt}, subject, use_tqdm=False)[0].outputs[0].token_ids
    )


@pytest.fixture(scope="module")
def drawn_alone(tiny_engine: Engines) -> dict[int, list[int]]:
    engine = tiny_engine()
    return {seed: alone(engine, params(seed)) for seed in SEEDS}


def test_all_bits_of_a_seed_count(drawn_alone: dict[int, list[int]]) -> None:
    assert len({tuple(tokens) for tokens in drawn_alone.values()}) == len(SEEDS)


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES.keys())
def test_in_a_batch_and_after_preemption(
    route: dict[str, Any],
    drawn_alone: dict[int, list[int]],
    tiny_engine: Engines,
    watch: Callable[[LLM], PlanWatch],
) -> None:
    engine = tiny_engine(additional_config={"tt": route}) if route else tiny_engine()
    watching, driver = watch(engine), Driver(engine)
    for index, seed in enumerate(SEEDS[::-1]):
        driver.add(str(seed), PROMPT, params(seed))
        driver.step(index % 3)
    driver.step(2)
    driver.reset_running()
    driver.drain()
    assert {int(name): tokens for name, tokens in driver.tokens.items()} == drawn_alone
    assert watching.preemptions


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES.keys())
def test_beside_requests_that_only_the_host_can_sample(
    route: dict[str, Any], drawn_alone: dict[int, list[int]], tiny_engine: Engines
) -> None:
    engine = tiny_engine(additional_config={"tt": route}) if route else tiny_engine()
    greedy = alone(tiny_engine(), params(temperature=0), [5, 6])
    biased = alone(tiny_engine(), params(temperature=0, logit_bias={9: 5.0}), [7, 8])
    driver = Driver(engine)
    driver.add("seeded", PROMPT, params(1))
    driver.add("greedy", [5, 6], params(temperature=0))
    driver.step(3)
    driver.add("biased", [7, 8], params(temperature=0, logit_bias={9: 5.0}, max_tokens=3))
    driver.add("logprobs", [7, 8], params(temperature=0, logprobs=2, max_tokens=2))
    driver.drain()
    assert driver.tokens["seeded"] == drawn_alone[1]
    assert driver.tokens["greedy"] == greedy
    assert driver.tokens["biased"] == biased[:3]


@pytest.mark.parametrize("route", ["host", "all on the device"])
def test_unseeded_requests_differ(route: str, tiny_engine: Engines) -> None:
    engine = tiny_engine(additional_config={"tt": ROUTES[route]}) if ROUTES[route] else tiny_engine()
    prompt: Any = [{"prompt_token_ids": PROMPT}] * 8
    outputs = engine.generate(prompt, params(), use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) > 1


PENALISED: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.5},
    "repetition": {"repetition_penalty": 1.7},
    "truncated": {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "seed": 9},
}


@pytest.mark.parametrize("options", PENALISED.values(), ids=PENALISED.keys())
def test_the_device_gives_the_tokens_of_the_host(options: dict[str, Any], tiny_engine: Engines) -> None:
    subject = params(**{"temperature": 0} | options)
    expected = alone(tiny_engine(), subject)
    for route in ("decodes on the device", "all on the device"):
        engine = tiny_engine(additional_config={"tt": ROUTES[route]})
        plain = alone(engine, params(temperature=0), [5, 6])
        driver = Driver(engine)
        driver.add("plain", [5, 6], params(temperature=0))
        driver.step(2)
        driver.add("subject", PROMPT, subject)
        driver.step(4)
        driver.reset_running()
        driver.drain()
        assert driver.tokens == {"plain": plain, "subject": expected}

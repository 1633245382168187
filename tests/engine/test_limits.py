"""What a configuration or a request may ask for, and what becomes of it when it may not."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from oracle_text import continuation
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from .conftest import ORACLE_VOCAB, REFUSALS, Engines, core_of
from .drive import Driver
from .watch import PlanWatch

LONG = [(5 * i + 2) % ORACLE_VOCAB for i in range(100)]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What the plugin logs; vLLM's loggers do not propagate."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, keep = logging.getLogger("vllm.tt_plugin"), Keep()
    logger.addHandler(keep)
    yield lines
    logger.removeHandler(keep)


@pytest.mark.parametrize("settings", [{}, {"data_parallel_size": 2}], ids=["one lane", "two lanes"])
def test_a_pool_below_max_model_len_is_refused_with_the_numbers(
    settings: dict[str, Any], oracle_engine: Engines
) -> None:
    """So every prompt that is let in fits its lane, when it is empty."""
    with pytest.raises(ValueError, match=r"max seq len \(72\).*maximum model length is 68"):
        oracle_engine(max_model_len=72, num_gpu_blocks_override=18, **settings)


def test_the_longest_prompt_fits_the_smallest_pool_and_holds_up_nobody(oracle_engine: Engines) -> None:
    engine = oracle_engine(max_model_len=72, num_gpu_blocks_override=19)
    driver = Driver(engine)
    driver.add("short", LONG[:9], greedy(30))
    driver.step(3)
    driver.add("longest", LONG[:71], greedy(50))
    driver.add("behind", LONG[5:9], greedy(5))
    driver.drain(limit=200)
    assert driver.finished == {"short": "length", "longest": "length", "behind": "length"}
    assert driver.tokens["longest"] == continuation(LONG[:71], 1, ORACLE_VOCAB)
    assert driver.tokens["short"] == continuation(LONG[:9], 30, ORACLE_VOCAB)


def test_a_prompt_over_max_model_len_is_refused_and_others_go_on(oracle_engine: Engines) -> None:
    engine = oracle_engine(max_model_len=72, num_gpu_blocks_override=19)
    driver = Driver(engine)
    driver.add("running", LONG[:9], greedy(12))
    driver.step(3)
    with pytest.raises(REFUSALS, match=r"\b100\b.*\b7[12]\b|\b7[12]\b.*\b100\b"):
        driver.add("long", LONG, greedy(5))
    driver.tokens.pop("long")
    driver.drain(limit=50)
    assert driver.tokens == {"running": continuation(LONG[:9], 12, ORACLE_VOCAB)}


def test_without_chunks_the_budget_of_a_step_is_raised_to_a_whole_prompt(
    oracle_engine: Engines, said: list[str], watch: Callable[[LLM], PlanWatch]
) -> None:
    engine = oracle_engine("UndeclaredOracle", max_num_batched_tokens=32)
    config = engine.llm_engine.vllm_config
    assert not config.scheduler_config.enable_chunked_prefill
    assert config.scheduler_config.max_num_batched_tokens == config.model_config.max_model_len == 128
    assert any("raised from 32 to 128" in line for line in said)
    watching, driver = watch(engine), Driver(engine)
    driver.add("long", LONG, greedy(3))
    driver.drain(limit=10)
    assert watching.plans[0].total_num_scheduled_tokens == 100
    assert driver.tokens["long"] == continuation(LONG, 3, ORACLE_VOCAB)


def test_with_chunks_an_explicit_budget_stays(oracle_engine: Engines) -> None:
    engine = oracle_engine(max_num_batched_tokens=32)
    assert engine.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens == 32


@pytest.mark.parametrize("oracle", ["Oracle", "UndeclaredOracle"])
def test_an_explicit_max_model_len_stays(oracle: str, oracle_engine: Engines) -> None:
    engine = oracle_engine(oracle, max_model_len=72, num_gpu_blocks_override=19)
    assert engine.llm_engine.model_config.max_model_len == 72
    assert core_of(engine).scheduler.max_model_len == 72
    driver = Driver(engine)
    driver.add("to the end", LONG[:60], greedy(500))
    driver.drain(limit=100)
    assert len(driver.tokens["to the end"]) == 12


def test_prefix_caching_is_off_where_it_is_not_declared(oracle_engine: Engines, said: list[str]) -> None:
    engine = oracle_engine("UndeclaredOracle", enable_prefix_caching=True, max_num_seqs=3)
    core = core_of(engine)
    assert not core.vllm_config.cache_config.enable_prefix_caching
    assert core.request_block_hasher is None, "vLLM must not have branched on it before"
    assert not core.scheduler.kv_cache_manager.enable_caching
    assert any("supports_prefix_caching" in line for line in said)
    driver = Driver(engine)
    for name in ("first", "second"):
        driver.add(name, LONG[:40], greedy(4))
        driver.drain()
    assert driver.tokens["first"] == driver.tokens["second"] == continuation(LONG[:40], 4, ORACLE_VOCAB)


ODD_REQUESTS: dict[str, dict[str, Any]] = {
    "prompt logprobs": {"prompt_logprobs": 1},
    "more logprobs than allowed": {"logprobs": 10_000},
    "top_k over the vocabulary": {"top_k": 10**6, "temperature": 1.0},
    "top_p of zero": {"top_p": 0.0, "temperature": 1.0},
    "top_p over one": {"top_p": 1.5},
    "bias of an unknown token": {"logit_bias": {10**6: 1.0}},
    "allowed token unknown": {"allowed_token_ids": [10**6]},
    "no allowed token": {"allowed_token_ids": []},
    "stop token unknown": {"stop_token_ids": [10**6], "min_tokens": 2},
    "more min than max tokens": {"min_tokens": 9},
    "seed of 65 bits": {"seed": 2**64, "temperature": 1.0},
    "negative temperature": {"temperature": -1.0},
    "temperature close to zero": {"temperature": 1e-9, "seed": 1},
    "temperature without end": {"temperature": float("inf")},
    "penalty out of range": {"presence_penalty": 9.0},
    "repetition penalty of zero": {"repetition_penalty": 0.0},
    "bad words of nothing": {"bad_words": [""]},
    "grammar that is none": {"structured_outputs": {"grammar": "root ::= ("}},
    "schema that is none": {"structured_outputs": {"json": "{not json"}},
    "unsatisfiable schema": {"structured_outputs": {"json": {"type": "integer", "minimum": 5, "maximum": 1}}},
    "thinking budget": {"thinking_token_budget": 3},
    "negative min_p": {"min_p": -0.5},
}


@pytest.mark.parametrize("options", ODD_REQUESTS.values(), ids=ODD_REQUESTS.keys())
def test_an_odd_request_is_served_or_refused_and_the_engine_lives(
    options: dict[str, Any], tiny_engine: Engines
) -> None:
    engine = tiny_engine()
    plain = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompt: Any = {"prompt_token_ids": [9, 8, 7]}
    before = engine.generate(prompt, plain, use_tqdm=False)[0].outputs[0].token_ids
    driver = Driver(engine)
    driver.add("beside", [9, 8, 7], plain)
    driver.step(2)
    constraint = options.get("structured_outputs")
    structured: Any = {"structured_outputs": StructuredOutputsParams(**constraint)} if constraint else {}
    try:
        driver.add(
            "odd", [5, 6], SamplingParams(**{"temperature": 0, "max_tokens": 4} | options | structured)
        )
    except REFUSALS:
        driver.tokens.pop("odd", None)
    driver.drain(limit=500)
    assert driver.tokens["beside"] == list(before)
    if "odd" in driver.tokens:
        assert driver.finished["odd"] in ("length", "stop", "error")
    assert engine.generate(prompt, plain, use_tqdm=False)[0].outputs[0].token_ids == before

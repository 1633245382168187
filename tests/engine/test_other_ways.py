"""Pauses, cache resets, and processes of its own for the worker."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from oracle_text import continuation
from vllm import LLM, SamplingParams

from .conftest import ORACLE_VOCAB, Engines, core_of
from .drive import Driver
from .processors import CountUp

PROMPTS = {"first": list(range(1, 30)), "second": [4, 4, 4], "third": list(range(50, 10, -1))}
COUNT = 20
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, detokenize=False)


def expected(*names: str) -> dict[str, list[int]]:
    return {name: continuation(PROMPTS[name], COUNT, ORACLE_VOCAB) for name in names}


@pytest.mark.parametrize("clear_cache", [False, True], ids=["cache kept", "cache cleared"])
def test_a_pause_that_keeps_requests(clear_cache: bool, oracle_engine: Engines) -> None:
    engine = oracle_engine(max_num_batched_tokens=16)
    driver, core = Driver(engine), core_of(engine)
    driver.add("first", PROMPTS["first"], GREEDY)
    driver.add("second", PROMPTS["second"], GREEDY)
    driver.step(5)
    core.pause_scheduler(mode="keep", clear_cache=clear_cache)
    before = {name: list(tokens) for name, tokens in driver.tokens.items()}
    driver.add("third", PROMPTS["third"], GREEDY)
    driver.step(5)
    assert driver.tokens == before | {"third": []}
    core.resume_scheduler()
    driver.drain()
    assert driver.tokens == expected("first", "second", "third")


def test_a_pause_that_aborts_requests(oracle_engine: Engines) -> None:
    engine = oracle_engine(max_num_batched_tokens=16)
    driver, core = Driver(engine), core_of(engine)
    driver.add("first", PROMPTS["first"], GREEDY)
    driver.step(6)
    core.pause_scheduler(mode="abort", clear_cache=True)
    engine.llm_engine.abort_request(["first"])
    driver.add("second", PROMPTS["second"], GREEDY)
    driver.step(3)
    assert driver.tokens["second"] == []
    core.resume_scheduler()
    driver.drain()
    assert driver.tokens["second"] == expected("second")["second"]
    assert driver.tokens["first"] == expected("first")["first"][: len(driver.tokens["first"])]


def test_a_cleared_prefix_cache_is_not_read_again(oracle_engine: Engines) -> None:
    engine = oracle_engine()
    driver = Driver(engine)
    for name in ("cold", "warm", "cleared"):
        if name == "cleared":
            assert engine.reset_prefix_cache()
        driver.add(name, PROMPTS["third"], GREEDY)
        driver.drain()
    assert set(map(tuple, driver.tokens.values())) == {tuple(expected("third")["third"])}


def test_the_v2_wire_form_serves(tiny_engine: Engines) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=COUNT, presence_penalty=0.5, logprobs=1)
    outputs = []
    for engine in (tiny_engine(), tiny_engine(v2_wire_form=True)):
        driver = Driver(engine)
        driver.add("first", PROMPTS["first"], params)
        driver.step(3)
        driver.reset_running()
        driver.drain()
        outputs.append(driver.tokens["first"])
    assert outputs[0] == outputs[1]


def test_the_v2_wire_form_refuses_custom_logits_processors(tiny_engine: Engines) -> None:
    with pytest.raises(ValueError, match="Unset VLLM_USE_V2_MODEL_RUNNER"):
        tiny_engine(v2_wire_form=True, logits_processors=[CountUp])


SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model, prompts, count = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    engine = LLM(model, max_model_len=256, max_num_seqs=8, distributed_executor_backend="mp")
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""


def test_the_worker_may_have_a_process_of_its_own(
    tiny: Path, tiny_engine: Engines, bundles: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    prompts = list(PROMPTS.values())
    here = run_here(tiny_engine(), prompts)
    result = subprocess.run(
        [sys.executable, str(script), str(tiny), json.dumps(prompts), str(COUNT)],
        env=os.environ | {"MESH_DEVICE": "host", "EXTRA_MODELS_DIR": str(bundles)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert result.returncode == 0, result.stdout
    there = next(line for line in result.stdout.splitlines() if line.startswith("[["))
    assert json.loads(there) == here


def run_here(engine: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = engine.generate(asked, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]

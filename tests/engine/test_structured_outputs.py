"""Grammars, alone and beside requests that have none and must not notice."""

import json
import re
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from .conftest import Engines
from .drive import Driver

PROMPT = [451, 7, 9_000, 13, 7]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
# A random model would fill its answer with blanks, if it may.
STRUCTURED = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "choice": {"choice": ["lantern", "boat", "gull"]},
    "regex": {"regex": r"[A-C]{3}-\d{4}"},
    "json": {"json": SCHEMA},
    "grammar": {"grammar": 'root ::= ("up" | "down") " " [0-9]'},
}


def holds(kind: str, text: str) -> bool:
    match kind:
        case "choice":
            return text in CONSTRAINTS["choice"]["choice"]
        case "regex":
            return re.fullmatch(CONSTRAINTS["regex"]["regex"], text) is not None
        case "grammar":
            return re.fullmatch(r"(up|down) \d", text) is not None
    value = json.loads(text)
    return value.keys() == {"name", "age"} and value["name"] in ("ada", "bob") and 0 <= value["age"] <= 99


def constrained(kind: str, **options: Any) -> SamplingParams:
    constraint: Any = StructuredOutputsParams(**CONSTRAINTS[kind])
    return SamplingParams(**{"temperature": 0, "max_tokens": 60} | options, structured_outputs=constraint)


@pytest.mark.parametrize("kind", CONSTRAINTS)
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 4}], ids=["greedy", "random"])
def test_alone(kind: str, options: dict[str, Any], tiny_engine: Engines) -> None:
    engine = tiny_engine(**STRUCTURED)
    output = engine.generate({"prompt_token_ids": PROMPT}, constrained(kind, **options), use_tqdm=False)[0]
    assert output.outputs[0].finish_reason == "stop"
    assert holds(kind, output.outputs[0].text)


@pytest.mark.parametrize("mode", [None, "all"], ids=["host", "device where it can"])
def test_beside_free_requests(mode: str | None, tiny_engine: Engines) -> None:
    tt = {"tt": {"sample_on_device_mode": mode}}
    engine = tiny_engine(additional_config=tt, max_num_batched_tokens=16, **STRUCTURED)
    free = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    seeded = SamplingParams(temperature=1.0, seed=8, max_tokens=30, ignore_eos=True)
    prompts = {"free": (list(range(40)), free), "seeded": ([3, 4], seeded)}
    alone = {name: Driver(engine) for name in prompts}
    for name, (prompt, params) in prompts.items():
        alone[name].add(name, prompt, params)
        alone[name].drain()
    driver = Driver(engine)
    driver.add("regex", PROMPT, constrained("regex"))
    driver.add("free", *prompts["free"])
    driver.step(3)
    driver.add("choice", PROMPT, constrained("choice", temperature=1.0, seed=2))
    driver.add("seeded", *prompts["seeded"])
    driver.add("json", list(range(50, 90)), constrained("json"))
    driver.step(6)
    driver.reset_running()
    driver.drain(limit=50_000)
    for name in prompts:
        assert driver.tokens[name] == alone[name].tokens[name]
    decode = engine.get_tokenizer().decode
    for kind in ("regex", "choice", "json"):
        assert holds(kind, decode(driver.tokens[kind], skip_special_tokens=True))

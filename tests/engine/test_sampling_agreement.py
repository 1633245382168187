"""A request's tokens and logprobs are its own: alone or among 31 others, on whatever route, in whatever lane,
before and after a preemption."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from vllm import LLM, SamplingParams

from .conftest import Engines, EngineShelf
from .drive import Driver
from .watch import PlanWatch

ROWS = 32
COUNT = 8
VOCAB = 49_152
MODES: dict[str, dict[str, Any]] = {
    "unset": {},
    "decode_only": {"sample_on_device_mode": "decode_only"},
    "all": {"sample_on_device_mode": "all"},
    "always_compat": {"sample_on_device_mode": "all", "always_compat_sampling": True},
}
PLACES = {
    "unset": {"prefill host", "decode host"},
    "decode_only": {"prefill host", "decode device"},
    "all": {"prefill device", "decode device"},
    "always_compat": {"prefill host", "decode host"},
}
LANES: dict[str, dict[str, Any]] = {
    "1 lane": {"max_num_seqs": ROWS},
    "4 lanes": {"max_num_seqs": ROWS // 4, "data_parallel_size": 4},
}


@attrs.frozen
class Asked:
    prompt: list[int]
    options: dict[str, Any]

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(ignore_eos=True, **{"max_tokens": COUNT} | self.options)


def drawn(choose: random.Random, edits: bool) -> Asked:
    """A request that is greedy or seeded, so that its tokens are settled. Without ``edits`` the reference
    bundle can sample it on the device, in a prefill too."""
    options: dict[str, Any] = {"temperature": choose.choice([0.0, 0.0, 0.6, 1.0, 1.7])}
    if options["temperature"]:
        options["seed"] = choose.choice([0, 7, 2**40 + 1, -(2**62)])
        options["top_k"] = choose.choice([0, 1, 4, 32, 500])
        options["top_p"] = choose.choice([1.0, 0.9, 0.3])
    if edits and choose.random() < 0.3:
        options |= {"presence_penalty": 0.8, "frequency_penalty": -0.4, "repetition_penalty": 1.3}
    if choose.random() < 0.25 and (edits or not options["temperature"] or 1 <= options["top_k"] <= 32):
        options["logprobs"] = choose.choice([0, 3, 20])
    if edits and choose.random() < 0.5:
        options |= choose.choice(
            [
                {"min_p": 0.1},
                {"logit_bias": {9: 4.0, 300: -5.0}},
                {"allowed_token_ids": list(range(100, 900))},
                {"min_tokens": 3, "stop_token_ids": [5, 6]},
                {"max_tokens": 2, "bad_words": ["ing"]},
            ]
        )
    return Asked([choose.randrange(3, VOCAB) for _ in range(choose.randrange(1, 9))], options)


def crowd(seed: int, edits: bool) -> dict[str, Asked]:
    choose = random.Random(seed)
    return {f"r{index}": drawn(choose, edits) for index in range(ROWS)}


CROWDS = {"plain": crowd(1, edits=False), "edited": crowd(2, edits=True)}


@attrs.frozen
class Answer:
    """Tokens, and for each of them the ids with their ranks that were asked for, and the logprobs."""

    tokens: list[int]
    ranked: list[list[tuple[int, int | None]]]
    values: list[float]

    @classmethod
    def of(cls, output: Any) -> "Answer":
        entries = [sorted(entry.items()) for entry in output.logprobs or []]
        return cls(
            list(output.token_ids),
            [[(token, found.rank) for token, found in entry] for entry in entries],
            [found.logprob for entry in entries for _, found in entry],
        )


def check(got: Answer, alone: Answer, asked: Asked) -> None:
    assert got.tokens == alone.tokens, asked
    assert got.ranked == alone.ranked, asked
    assert got.values == pytest.approx(alone.values, abs=2e-4), asked


def generated(engine: LLM, asked: Asked) -> Answer:
    prompt: Any = {"prompt_token_ids": asked.prompt}
    return Answer.of(engine.generate(prompt, asked.params, use_tqdm=False)[0].outputs[0])


@pytest.fixture(scope="module")
def alone(tiny_engine: Engines) -> dict[str, dict[str, Answer]]:
    """Each by itself, sampled on the host."""
    engine = tiny_engine(**LANES["1 lane"])
    return {
        name: {request: generated(engine, asked) for request, asked in requests.items()}
        for name, requests in CROWDS.items()
    }


@attrs.define
class Together(Driver):
    """Keeps the last output of each request, with its logprobs."""

    answers: dict[str, Answer] = attrs.field(factory=dict)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            outputs: Any = self.engine.llm_engine.step()
            for output in outputs:
                completion = output.outputs[0]
                self.answers[output.request_id] = Answer.of(completion)
                if output.finished:
                    self.finished[output.request_id] = completion.finish_reason


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[LLM], list[str]]:
    """Notes each call on the model until the test ends: its phase, and where it is sampled."""

    def start(engine: LLM) -> list[str]:
        noted: list[str] = []
        (model,) = engine.collective_rpc("get_model")
        for phase in ("prefill", "decode"):
            method = getattr(model, f"{phase}_forward")

            def call(*, _phase: str = phase, _method: Any = method, **arguments: Any) -> Any:
                noted.append(f"{_phase} {'device' if 'sampling_params' in arguments else 'host'}")
                return _method(**arguments)

            monkeypatch.setattr(model, f"{phase}_forward", call)
        return noted

    return start


def build(tiny_engine: Engines, lanes: str, mode: str) -> LLM:
    return tiny_engine(**LANES[lanes], additional_config={"tt": MODES[mode]})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lanes", LANES)
def test_among_31_others(
    lanes: str,
    mode: str,
    alone: dict[str, dict[str, Answer]],
    tiny_engine: Engines,
    watch: Callable[[LLM], PlanWatch],
    steps: Callable[[LLM], list[str]],
) -> None:
    engine = build(tiny_engine, lanes, mode)
    noted = steps(engine)
    for name, preempt in (("plain", False), ("plain", True), ("edited", True)):
        requests, watching, together = CROWDS[name], watch(engine), Together(engine)
        for index, (request, asked) in enumerate(requests.items()):
            together.add(request, asked.prompt, asked.params)
            if index % 8 == 7:
                together.step()  # arrivals while others decode
        together.step(3)
        if preempt:
            together.reset_running()
        together.drain()
        assert bool(watching.preemptions) == preempt
        for request, asked in requests.items():
            check(together.answers[request], alone[name][request], asked)
        if name == "plain":
            assert set(noted) == PLACES[mode]


def test_one_step_for_the_host_leaves_later_ones_right(
    alone: dict[str, dict[str, Answer]], tiny_engine: Engines, steps: Callable[[LLM], list[str]]
) -> None:
    engine = build(tiny_engine, "1 lane", "all")
    plain, wide = CROWDS["plain"], Asked([8, 9], {"logprobs": 4, "seed": 3, "max_tokens": 3})
    expected = generated(build(tiny_engine, "1 lane", "unset"), wide)
    noted, together = steps(engine), Together(engine)
    for request in list(plain)[:6]:
        together.add(request, plain[request].prompt, plain[request].params)
    together.step(3)
    together.add("wide", wide.prompt, wide.params)
    together.drain()
    places = [place for place, _ in itertools.groupby(noted)]
    assert places == ["prefill device", "decode device", "prefill host", "decode host", "decode device"]
    check(together.answers["wide"], expected, wide)
    for request in list(plain)[:6]:
        check(together.answers[request], alone["plain"][request], plain[request])


def test_a_row_returns_to_the_device_once_it_may_end(
    tiny_engine: Engines, steps: Callable[[LLM], list[str]]
) -> None:
    asked = Asked([451, 7], {"temperature": 0, "min_tokens": 4, "logprobs": 2})
    expected = generated(build(tiny_engine, "1 lane", "unset"), asked)
    engine = build(tiny_engine, "1 lane", "all")
    noted = steps(engine)
    check(generated(engine, asked), expected, asked)
    assert noted[:8] == ["prefill host", *["decode host"] * 3, *["decode device"] * 4]


def test_unseeded_requests_differ_between_runs(shelf: EngineShelf, tiny: Path) -> None:
    """Two engines built alike, from whatever state the process is in: neither draws what the other drew."""
    prompt: Any = [{"prompt_token_ids": [451, 7, 9_000]}] * 4
    draws = []
    for rows in (4, 5):  # what differs makes the shelf build another engine
        engine = shelf(tiny, max_model_len=64, max_num_seqs=rows)
        outputs = engine.generate(prompt, SamplingParams(max_tokens=6, ignore_eos=True), use_tqdm=False)
        draws += [tuple(output.outputs[0].token_ids) for output in outputs]
    assert len(set(draws)) == len(draws)

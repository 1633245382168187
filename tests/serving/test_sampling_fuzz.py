"""Two thousand requests with random and hostile sampling parameters: each is answered rightly, or refused
with the name of what was wrong."""

import json
import random
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import httpx

from .serving import MODEL, Server, tail
from .test_hostile_requests import EOS, HOSTILE, VOCABULARY, Neighbour

REQUESTS = 2_000
AGAIN = 60
WORKERS = 24
PROMPTS = ["The sea", "1, 2, 3,", [504, 3414], "Q:"]
FIELDS = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "n", "max_tokens", "min_tokens", "logprobs"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "stop"),
    *("stop_token_ids", "allowed_token_ids", "structured_outputs", "ignore_eos"),
)
SENSIBLE: dict[str, list[Any]] = {
    "temperature": [0, 0, 0.3, 1, 1.9],
    "top_k": [-1, 0, 1, 5, 40, VOCABULARY, 10**6],
    "top_p": [1, 0.9, 0.01],
    "min_p": [0, 0.1, 1],
    "seed": [0, 7, 2**63 - 1, -(2**63)],
    "n": [1, 1, 2],
    "max_tokens": [1, 2],
    "min_tokens": [0, 1],
    "logprobs": [0, 1, 5],
    "presence_penalty": [0, 1.5, -2],
    "frequency_penalty": [0, 1.5, -2],
    "repetition_penalty": [1, 1.3, 0.5],
    "logit_bias": [{}, {"260": 5}, {"28": -100, "260": 100}],
    "bad_words": [["the"], [" of course"]],
    "stop": ["e", ["\n", "zz"]],
    "stop_token_ids": [[], [28], [EOS, 30]],
    "allowed_token_ids": [[260], [28, 260, 282], list(range(500))],
    "structured_outputs": [{"choice": ["yes", "no"]}, {"regex": "[a-z]+"}],
    "ignore_eos": [True, False],
}
INVERSE_OVERFLOWS = 1e-320
"""A repetition penalty whose inverse is infinite, so that nothing is left of the logits."""
ANSWERED_500_BY_VLLM = 26
"""How many of the requests drawn here leave nothing of what their grammar allows. vLLM ends such a request
with an error, which its front end answers with 500."""


def drawn(count: int) -> list[dict[str, Any]]:
    """Requests of one to six parameters: sensible ones, and among them up to two hostile ones."""
    choose = random.Random(19)
    requests = []
    for _ in range(count):
        names = choose.sample(FIELDS, choose.randint(1, 6))
        hostile = set(choose.sample(names, min(len(names), choose.choice((0, 1, 1, 2)))))
        values = {name: choose.choice((HOSTILE if name in hostile else SENSIBLE)[name]) for name in names}
        if values.get("max_tokens", 0) is None:
            values["max_tokens"] = 1  # None is as long as the model can
        requests.append({"prompt": choose.choice(PROMPTS), **values})
    return requests


@attrs.frozen
class Outcome:
    parameters: dict[str, Any]
    status: int
    body: Any

    def __str__(self) -> str:
        return f"{self.status} {json.dumps(self.parameters)[:400]}: {json.dumps(self.body)[:400]}"

    @property
    def settled(self) -> bool:
        """Whether the same request must give the same tokens again."""
        greedy = self.parameters.get("temperature") == 0 or self.parameters.get("top_k") == 1
        return greedy or self.parameters.get("seed") in SENSIBLE["seed"]

    @property
    def tokens(self) -> list[list[int]]:
        return [choice["token_ids"] for choice in self.body["choices"]]


def send(client: httpx.Client, parameters: dict[str, Any]) -> Outcome:
    body = {"model": MODEL, "max_tokens": 2, "return_token_ids": True, **parameters}
    headers = {"content-type": "application/json"}  # written by json itself, which knows NaN
    answer = client.post("/v1/completions", content=json.dumps(body), headers=headers)
    try:
        told = answer.json()
    except ValueError:
        told = answer.text
    return Outcome(parameters, answer.status_code, told)


def faults(outcome: Outcome) -> list[str]:
    """What is wrong with an answer, as far as it can be told from the answer alone."""
    choices = outcome.body["choices"]
    found = [fault for choice in choices for fault in faults_of_choice(outcome.parameters, choice)]
    if len(choices) != int(outcome.parameters.get("n") or 1):
        found.append(f"{len(choices)} choices")
    return found


def faults_of_choice(asked: dict[str, Any], choice: dict[str, Any]) -> Iterator[str]:
    tokens = choice["token_ids"]
    if len(tokens) > int(asked.get("max_tokens", 2)):
        yield f"{len(tokens)} tokens"
    if not all(0 <= token < VOCABULARY for token in tokens):
        yield "tokens outside the vocabulary"
    nothing_left = "bad_words" in asked or asked.get("repetition_penalty") == INVERSE_OVERFLOWS
    if (
        asked.get("allowed_token_ids")
        and not nothing_left
        and not set(tokens) <= {*asked["allowed_token_ids"]}
    ):
        yield "tokens that were not allowed"
    if choice["finish_reason"] not in ("length", "stop"):
        yield f"ended by {choice['finish_reason']}"
    if len(tokens) < int(asked.get("min_tokens") or 0) and not asked.get("stop"):
        yield "fewer tokens than min_tokens"
    if type(asked.get("logprobs")) is int:
        values = choice["logprobs"]["token_logprobs"]
        if len(values) != len(tokens) or any(value is None or value > 0 for value in values):
            yield f"logprobs {values}"


def names_a_field(outcome: Outcome) -> bool:
    """Whether a refusal names one of the request's parameters; vLLM calls grammars by their kind."""
    told = outcome.body["error"]["message"]
    words = list(outcome.parameters)
    if "structured_outputs" in outcome.parameters:
        words += ["grammar", "choice", "structured outputs"]
    return any(re.search(rf"\b{word}\b", told, re.IGNORECASE) for word in words)


def contradicts_its_grammar(parameters: dict[str, Any]) -> bool:
    nothing_left = parameters.get("repetition_penalty") == INVERSE_OVERFLOWS
    return "structured_outputs" in parameters and ("allowed_token_ids" in parameters or nothing_left)


def test_each_is_answered_rightly_or_refused_by_name_and_a_neighbour_keeps_its_tokens(
    tiny_server: Server,
) -> None:
    neighbour = Neighbour(tiny_server)
    beside = threading.Thread(target=neighbour.run)
    beside.start()
    limits = httpx.Limits(max_connections=WORKERS)
    with httpx.Client(base_url=tiny_server.url, timeout=300, limits=limits) as client:
        try:
            with ThreadPoolExecutor(WORKERS) as pool:
                outcomes = list(pool.map(lambda one: send(client, one), drawn(REQUESTS)))
        finally:
            neighbour.over.set()
            beside.join()
        served = [outcome for outcome in outcomes if outcome.status == 200]
        again = [send(client, one.parameters) for one in [o for o in served if o.settled][:AGAIN]]
    refused = [outcome for outcome in outcomes if 400 <= outcome.status < 500]
    failed = [outcome for outcome in outcomes if outcome.status >= 500]
    report = "\n".join(str(one) for one in failed if not contradicts_its_grammar(one.parameters))
    assert not report, report
    assert len(failed) == ANSWERED_500_BY_VLLM
    assert len(served) + len(refused) + len(failed) == REQUESTS
    assert min(len(served), len(refused)) > REQUESTS // 4, "the draw is one-sided: it shows little"
    report = "\n".join(f"{faults(one)} {one}" for one in served if faults(one))
    assert not report, report
    report = "\n".join(str(one) for one in refused if not names_a_field(one))
    assert not report, report
    first = {json.dumps(one.parameters): one.tokens for one in served}
    assert [one.tokens for one in again] == [first[json.dumps(one.parameters)] for one in again]
    assert tiny_server.healthy(), tail(tiny_server.log)
    assert tiny_server.metric("tt:sampled_steps_total") > 0
    assert tiny_server.metric("tt:host_sampling_reasons_total") == tiny_server.metric(
        "tt:sampled_steps_total"
    )
    assert neighbour.beside
    assert all(ids == neighbour.alone for ids in neighbour.beside)

"""Requests side by side, requests cut short, requests that cannot be served, and what the metrics say."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from .conftest import MAX_MODEL_LEN
from .serving import MODEL, Server

SEA = "The best thing about the sea is"
PROMPTS = [
    "The capital of France is",
    "1, 2, 3, 4,",
    "Once upon a time, in a village by the sea, there lived",
    "def add(a, b):",
    "Q: What do bees make?\nA:",
    "The three primary colours are",
    "To make bread you need flour, water,",
    "In the year 1969,",
]


def generate(client: OpenAI, prompt: str, **arguments: Any) -> list[int]:
    answer: Any = client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=arguments.pop("max_tokens", 12),
        temperature=arguments.pop("temperature", 0),
        extra_body={"return_token_ids": True},
        **arguments,
    )
    ids: list[int] = answer.choices[0].token_ids
    return ids


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 11}], ids=["greedy", "seeded"])
def test_eight_at_once_give_what_each_gives_alone(client: OpenAI, sampling: dict[str, Any]) -> None:
    alone = [generate(client, prompt, **sampling) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(lambda prompt: generate(client, prompt, **sampling), PROMPTS))
    assert together == alone


def test_a_client_that_leaves_frees_its_place(client: OpenAI, server: Server) -> None:
    expected = generate(client, PROMPTS[0])
    # Eight of these fill every row, and each would need most of the cache if it were to run to its end.
    for _ in range(8):
        stream = client.completions.create(
            model=MODEL, prompt=PROMPTS[2], max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
    assert generate(client, PROMPTS[0]) == expected
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0


def test_more_requests_than_the_cache_holds_are_all_served(client: OpenAI, server: Server) -> None:
    """Eight of some 40 prompt tokens and 40 more want 640 tokens of a cache of 512: some are preempted."""
    prompts = [f"{number} is my number. " + PROMPTS[2] * 2 for number in range(8)]
    before = server.metric("vllm:num_preemptions_total")
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: generate(client, prompt, max_tokens=40), prompts))
    assert server.metric("vllm:num_preemptions_total") > before
    assert answers[5] == generate(client, prompts[5], max_tokens=40)


def test_metrics_count_what_was_done(client: OpenAI, server: Server) -> None:
    names = ["vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total"]
    before = [server.metric(name) for name in names]
    answer = client.completions.create(model=MODEL, prompt=SEA, max_tokens=7, temperature=0)
    assert answer.usage is not None
    after = [server.metric(name) for name in names]
    counted = [later - earlier for later, earlier in zip(after, before, strict=True)]
    assert counted == [answer.usage.prompt_tokens, 7, 1]


def refusal(client: OpenAI, **arguments: Any) -> str:
    request: dict[str, Any] = {"model": MODEL, "prompt": SEA, "max_tokens": 2} | arguments
    with pytest.raises(BadRequestError) as caught:
        client.completions.create(**request)
    assert caught.value.status_code == 400
    return str(caught.value)


def test_prompt_logprobs_are_refused_by_name(client: OpenAI) -> None:
    assert "prompt_logprobs" in refusal(client, extra_body={"prompt_logprobs": 1})
    assert "prompt_logprobs" in refusal(client, extra_body={"prompt_logprobs": 0})
    assert "echo" in refusal(client, echo=True, logprobs=1)


def test_a_prompt_longer_than_the_model_takes_is_refused_with_the_numbers(client: OpenAI) -> None:
    message = refusal(client, prompt=[5] * (MAX_MODEL_LEN + 8))
    assert str(MAX_MODEL_LEN) in message
    assert str(MAX_MODEL_LEN + 8) in message

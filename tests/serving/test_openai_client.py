"""What users of the official `openai` client do, against a real server with a real model."""

import json
import math
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from openai import BadRequestError, OpenAI

from .serving import MODEL, Server

CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = "The best thing about the sea is"

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "London"]}, "unit": {"enum": ["celsius"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


def complete(client: OpenAI, **arguments: Any) -> Any:
    request: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8} | arguments
    return client.completions.create(**request)


def check(text: str | None, schema: Any) -> None:
    jsonschema.validate(json.loads(text or ""), schema)


def test_chat_names_paris(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=0, max_tokens=32)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_completion_goes_on_from_its_prompt(client: OpenAI) -> None:
    answer = complete(client, temperature=0, max_tokens=5)
    assert answer.usage.completion_tokens == 5
    assert answer.choices[0].finish_reason == "length"
    whole = complete(client, temperature=0, max_tokens=9)
    assert whole.choices[0].text.startswith(answer.choices[0].text)


def test_prompts_may_be_token_ids_and_several(client: OpenAI) -> None:
    ids = complete(client, extra_body={"return_token_ids": True}).choices[0].prompt_token_ids
    answer = complete(client, prompt=[ids, ids], temperature=0)
    texts = [choice.text for choice in answer.choices]
    assert texts == [complete(client, temperature=0).choices[0].text] * 2


def test_streamed_chunks_join_to_the_whole_text(client: OpenAI) -> None:
    whole = complete(client, temperature=0, max_tokens=16).choices[0].text
    chunks = [chunk.choices[0].text for chunk in complete(client, temperature=0, max_tokens=16, stream=True)]
    assert "".join(chunks) == whole
    assert len(chunks) > 1

    said = client.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=0, max_tokens=16)
    parts = client.chat.completions.create(
        model=MODEL, messages=CAPITAL, temperature=0, max_tokens=16, stream=True
    )
    assert "".join(p.choices[0].delta.content or "" for p in parts) == said.choices[0].message.content


def test_two_choices_are_drawn_independently(client: OpenAI) -> None:
    answer = complete(client, n=2, temperature=1.0, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text != answer.choices[1].text


def test_logprobs_of_a_completion_are_of_the_tokens_that_it_chose(client: OpenAI) -> None:
    logprobs = complete(client, temperature=0, max_tokens=6, logprobs=3).choices[0].logprobs
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert logprob == max(top.values())
        assert top[token] == logprob
        assert sum(map(math.exp, top.values())) <= 1.0


def test_logprobs_of_a_chat_are_sorted_and_hold_the_choice(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=CAPITAL, temperature=0, max_tokens=6, logprobs=True, top_logprobs=4
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content
    for entry in logprobs.content:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 4
        assert values == sorted(values, reverse=True)
        assert entry.top_logprobs[0].token == entry.token


@pytest.mark.parametrize(
    "seed", [1, -3, 2**63 - 1, -(2**63)], ids=["small", "negative", "largest", "smallest"]
)
def test_a_seed_gives_the_same_text_again(client: OpenAI, seed: int) -> None:
    first, second, other = (
        complete(client, temperature=1.0, seed=given).choices[0].text for given in (seed, seed, seed ^ 4)
    )
    assert first == second
    assert first != other


def test_seeds_that_differ_only_in_their_high_half_differ(client: OpenAI) -> None:
    texts = {complete(client, temperature=1.0, seed=9 + (high << 32)).choices[0].text for high in (0, 1, 2)}
    assert len(texts) == 3


def test_without_a_seed_texts_differ(client: OpenAI) -> None:
    texts = {complete(client, temperature=1.5).choices[0].text for _ in range(3)}
    assert len(texts) == 3


def test_a_stop_string_ends_the_text_before_it(client: OpenAI) -> None:
    whole = complete(client, temperature=0, max_tokens=16).choices[0].text
    stop = whole[12:18]
    answer = complete(client, temperature=0, max_tokens=16, stop=[stop]).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.text == whole[: whole.index(stop)]


def test_a_stop_token_ends_the_text_only_after_min_tokens(client: OpenAI) -> None:
    ids = complete(client, temperature=0, extra_body={"return_token_ids": True}).choices[0].token_ids
    stop = {"stop_token_ids": [ids[3]], "return_token_ids": True}
    assert complete(client, temperature=0, extra_body=stop).choices[0].token_ids == ids[:4]
    later = complete(client, temperature=0, extra_body={**stop, "min_tokens": 8}).choices[0].token_ids
    assert len(later) >= 8
    assert ids[3] not in later[:7]


def test_logit_bias_holds_for_every_token(client: OpenAI) -> None:
    """Also right after another request left the same row, in the same step as this one came."""
    for token in (260, 328):
        answer = complete(client, logit_bias={str(token): 100}, extra_body={"return_token_ids": True})
        assert answer.choices[0].token_ids == [token] * 8


def test_a_json_schema_is_kept_to(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Describe a person as JSON."}],
        temperature=0,
        max_tokens=120,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
    )
    check(answer.choices[0].message.content, PERSON)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str
)
def test_a_tool_call_can_be_parsed(client: OpenAI, choice: Any) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[WEATHER],
        tool_choice=choice,
        temperature=0,
        max_tokens=120,
    )
    calls = answer.choices[0].message.tool_calls
    assert calls
    function = calls[0].function  # type: ignore[union-attr]
    assert function.name == "get_weather"
    check(function.arguments, WEATHER["function"]["parameters"])


def test_a_grammar_that_does_not_compile_is_the_users_fault_alone(client: OpenAI, server: Server) -> None:
    with pytest.raises(BadRequestError):
        complete(client, extra_body={"structured_outputs": {"regex": "(unclosed"}})
    assert server.healthy()

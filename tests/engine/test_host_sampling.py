"""Options of sampling against what transformers' logits say must come out."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM
from vllm import LLM, SamplingParams

from .conftest import REFUSALS, Engines
from .drive import Driver
from .processors import CountUp

PROMPT = [451, 7, 9_000, 13, 7]
OTHERS = [[3, 4, 5], [40_000, 12], [600, 601, 602, 603]]
COUNT = 12

Logits = Callable[[list[int]], torch.Tensor]


@pytest.fixture(scope="module")
def engine(tiny_engine: Engines) -> LLM:
    return tiny_engine(logits_processors=[CountUp])


@pytest.fixture(scope="module")
def logits(tiny: Path) -> Logits:
    """float32 ``[V]`` of transformers for what follows some tokens."""
    model: Any = LlamaForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    model.eval()

    def compute(tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            last: torch.Tensor = model(torch.tensor([tokens])).logits[0, -1]
        return last.clone()

    return compute


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": COUNT, "ignore_eos": True} | options)


def run(engine: LLM, prompt: list[int], **options: Any) -> list[int]:
    output = engine.generate({"prompt_token_ids": prompt}, params(**options), use_tqdm=False)[0]
    return list(output.outputs[0].token_ids)


def beside(engine: LLM, options: dict[str, Any]) -> list[int]:
    """The tokens of ``PROMPT`` in a batch of plain requests that come and go, which it must leave alone."""
    plain = {f"plain {i}": prompt for i, prompt in enumerate(OTHERS)}
    alone = {name: run(engine, prompt) for name, prompt in plain.items()}
    driver = Driver(engine)
    driver.add("plain 0", OTHERS[0], params())
    driver.step(3)
    driver.add("subject", PROMPT, params(**options))
    driver.add("plain 1", OTHERS[1], params())
    driver.step(4)
    driver.reset_running()
    driver.step(2)
    driver.add("plain 2", OTHERS[2], params())
    driver.drain()
    assert {name: driver.tokens[name] for name in plain} == alone
    return driver.tokens["subject"]


def greedy_by(choose: Callable[[torch.Tensor, list[int]], torch.Tensor], logits: Logits) -> list[int]:
    """What follows ``PROMPT`` if each token is the argmax of ``choose(logits, generated tokens)``."""
    generated: list[int] = []
    for _ in range(COUNT):
        generated.append(int(choose(logits(PROMPT + generated), generated).argmax()))
    return generated


def penalised(
    row: torch.Tensor, generated: list[int], presence: float, frequency: float, repetition: float
) -> torch.Tensor:
    for token in set(PROMPT) | set(generated):
        value = row[token]
        row[token] = value / repetition if value > 0 else value * repetition
    for token, times in Counter(generated).items():
        row[token] -= frequency * times + presence
    return row


def only(allowed: list[int], row: torch.Tensor) -> torch.Tensor:
    masked = torch.full_like(row, float("-inf"))
    masked[allowed] = row[allowed]
    return masked


PENALTIES = {
    "presence": (1.7, 0.0, 1.0),
    "frequency": (0.0, 1.3, 1.0),
    "repetition": (0.0, 0.0, 1.9),
    "reward of repetition": (-1.0, -0.8, 0.6),
    "all": (0.9, 0.7, 1.4),
}


@pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES.keys())
def test_penalties(penalty: tuple[float, float, float], engine: LLM, logits: Logits) -> None:
    presence, frequency, repetition = penalty
    few = [7, 451, *range(1_000, 1_040)]  # a random model repeats itself only where it has no choice
    expected = greedy_by(lambda row, generated: only(few, penalised(row, generated, *penalty)), logits)
    options = {
        "presence_penalty": presence,
        "frequency_penalty": frequency,
        "repetition_penalty": repetition,
        "allowed_token_ids": few,
    }
    assert run(engine, PROMPT, **options) == expected
    assert beside(engine, options) == expected
    assert expected != greedy_by(lambda row, _: only(few, row), logits), "these penalties change nothing"


def test_presence_and_frequency_count_no_prompt(engine: LLM, logits: Logits) -> None:
    best = int(logits(PROMPT).argmax())
    prompt = [best, *PROMPT]
    first = int(logits(prompt).argmax())
    assert run(engine, [first, *prompt], max_tokens=1, presence_penalty=2.0, frequency_penalty=2.0) == run(
        engine, [first, *prompt], max_tokens=1
    )


def test_logit_bias(engine: LLM, logits: Logits) -> None:
    bias = {77: 3.0, int(logits(PROMPT).argmax()): -100.0, 40_001: 2.5}

    def biased(row: torch.Tensor, _: list[int]) -> torch.Tensor:
        for token, value in bias.items():
            row[token] += value
        return row

    expected = greedy_by(biased, logits)
    assert run(engine, PROMPT, logit_bias=bias) == expected
    assert beside(engine, {"logit_bias": bias}) == expected


def test_allowed_tokens(engine: LLM, logits: Logits) -> None:
    allowed = [5, 700, 31_000, 49_151]
    expected = greedy_by(lambda row, _: only(allowed, row), logits)
    assert run(engine, PROMPT, allowed_token_ids=allowed) == expected
    assert beside(engine, {"allowed_token_ids": allowed}) == expected


def test_bad_words_of_several_tokens_hold_without_any_penalty(engine: LLM, logits: Logits) -> None:
    plain = greedy_by(lambda row, _: row, logits)
    bad = plain[3:5]  # the first of the two stays free, the second is forbidden after it

    def without(row: torch.Tensor, generated: list[int]) -> torch.Tensor:
        if generated[-1:] == bad[:1]:
            row[bad[1]] = float("-inf")
        return row

    expected = greedy_by(without, logits)
    assert expected[:4] == plain[:4]
    assert expected[4] != plain[4]
    subject = params()
    # Bad words are text, and the text of random tokens need not give the same tokens back.
    subject._bad_words_token_ids = [bad]
    output = engine.generate({"prompt_token_ids": PROMPT}, subject, use_tqdm=False)[0]
    assert list(output.outputs[0].token_ids) == expected


def test_bad_words_as_text(engine: LLM) -> None:
    (ship,) = engine.get_tokenizer().encode(" ship")
    assert ship in run(engine, PROMPT, logit_bias={ship: 100.0})
    assert ship not in run(engine, PROMPT, logit_bias={ship: 100.0}, bad_words=["ship"])


@pytest.mark.parametrize("count", [0, 1, 5, 11])
def test_min_tokens_hold_back_the_stop_ids_exactly_so_long(count: int, engine: LLM, logits: Logits) -> None:
    stops = sorted({int(logits(PROMPT).argmax()), *greedy_by(lambda row, _: row, logits)})

    def held_back(row: torch.Tensor, generated: list[int]) -> torch.Tensor:
        if len(generated) < count:
            row[stops] = float("-inf")
        else:
            row[stops] += 1e4
        return row

    expected = greedy_by(held_back, logits)[: count + 1]
    bias = dict.fromkeys(stops, 1e4)
    assert (
        run(engine, PROMPT, min_tokens=count, stop_token_ids=stops, logit_bias={})[:count] == expected[:count]
    )
    output = run(engine, PROMPT, min_tokens=count, stop_token_ids=stops, logit_bias=bias)
    assert len(output) == count + 1
    assert output[-1] in stops
    assert not set(output[:-1]) & set(stops)


def test_min_tokens_hold_back_the_end_of_the_text(engine: LLM) -> None:
    eos = engine.get_tokenizer().eos_token_id
    tokens = run(engine, PROMPT, min_tokens=4, ignore_eos=False, logit_bias={eos: 100.0})
    assert tokens[4:] == [eos]
    assert eos not in tokens[:4]


def test_top_k_of_one_is_the_argmax_whatever_else_is_asked(engine: LLM, logits: Logits) -> None:
    expected = greedy_by(lambda row, _: row, logits)
    options = {"top_k": 1, "temperature": 1.9, "top_p": 0.3, "min_p": 0.1, "seed": 17}
    assert run(engine, PROMPT, **options) == expected
    assert beside(engine, options) == expected
    # So large a bias leaves nothing of the logits themselves: of two equally good tokens, the first.
    assert (
        run(engine, PROMPT, logit_bias={9: 1e9, 40_000: 1e9}, top_k=1, temperature=1.0, seed=3) == [9] * COUNT
    )


def test_min_p_and_top_p_keep_only_probable_tokens(engine: LLM, logits: Logits) -> None:
    probabilities = logits(PROMPT).softmax(-1)
    probable = (probabilities >= 0.3 * probabilities.max()).nonzero()[:, 0].tolist()
    nucleus = probabilities.sort(descending=True)
    kept = nucleus.indices[: int((nucleus.values.cumsum(0) < 0.2).sum()) + 1].tolist()
    assert len(probable) > 1
    assert len(kept) > 1
    draw = {"temperature": 1.0, "max_tokens": 1, "n": 60, "seed": 5}
    assert drawn(engine, min_p=0.3, **draw) <= set(probable)
    assert len(drawn(engine, top_p=0.2, **draw)) > 1
    assert drawn(engine, top_p=0.2, **draw) <= set(kept)


def drawn(engine: LLM, **options: Any) -> set[int]:
    output = engine.generate({"prompt_token_ids": PROMPT}, params(**options), use_tqdm=False)[0]
    return {completion.token_ids[0] for completion in output.outputs}


@pytest.mark.parametrize("options", [{}, {"temperature": 1.3, "seed": 3}], ids=["greedy", "random"])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_are_those_of_transformers(
    count: int, options: dict[str, Any], engine: LLM, logits: Logits
) -> None:
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in (OTHERS[0], PROMPT, OTHERS[1])]
    asked = [params(), params(logprobs=count, **options), params(logprobs=3)]
    outputs = engine.generate(prompts, asked, use_tqdm=False)
    assert not outputs[0].outputs[0].logprobs
    output = outputs[1].outputs[0]
    entries: Any = output.logprobs
    assert len(entries) == COUNT
    for index, entry in enumerate(entries):
        expected = logits(PROMPT + list(output.token_ids[:index])).log_softmax(-1)
        best = expected.topk(count).indices.tolist() if count else []
        assert entry.keys() == {output.token_ids[index], *best}
        for token, logprob in entry.items():
            assert logprob.logprob == pytest.approx(float(expected[token]), abs=1e-4)
            assert logprob.rank == int((expected > expected[token]).sum()) + 1


def test_n_gives_what_separate_seeds_give(engine: LLM) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 40}
    output = engine.generate({"prompt_token_ids": PROMPT}, params(n=3, **options), use_tqdm=False)[0]
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    for index, completion in enumerate(output.outputs):
        assert list(completion.token_ids) == run(engine, PROMPT, temperature=1.0, seed=40 + index)


def test_a_stop_string_ends_a_request_and_nobody_else(engine: LLM) -> None:
    text = engine.generate({"prompt_token_ids": PROMPT}, params(), use_tqdm=False)[0].outputs[0].text
    stop = text[len(text) // 2 :][:4]
    driver = Driver(engine)
    driver.add("stops", PROMPT, params(stop=[stop]))
    driver.add("goes on", PROMPT, params())
    driver.drain()
    assert driver.finished == {"stops": "stop", "goes on": "length"}
    assert len(driver.tokens["stops"]) < COUNT


def test_a_stateful_processor_sees_its_requests_in_prefill_and_decode_rows(engine: LLM) -> None:
    counting: dict[str, Any] = {"extra_args": {"count_from": 100}}
    assert run(engine, PROMPT, **counting) == list(range(100, 100 + COUNT))
    assert beside(engine, counting) == list(range(100, 100 + COUNT))
    plain = run(engine, OTHERS[0], temperature=0.8, seed=1)
    driver = Driver(engine)
    driver.add("first", PROMPT, params(extra_args={"count_from": 500}, max_tokens=5))
    driver.step(2)
    driver.add("random", OTHERS[0], params(temperature=0.8, seed=1))
    driver.step(5)
    driver.add("reuses the row", PROMPT, params(extra_args={"count_from": 900}, temperature=1.0))
    driver.drain()
    assert driver.tokens["first"] == list(range(500, 505))
    assert driver.tokens["reuses the row"] == list(range(900, 900 + COUNT))
    assert driver.tokens["random"] == plain


def test_a_processor_refuses_a_request_that_it_cannot_serve(engine: LLM) -> None:
    with pytest.raises(REFUSALS, match="count_from is 'x'"):
        run(engine, PROMPT, extra_args={"count_from": "x"})
    assert len(run(engine, PROMPT)) == COUNT

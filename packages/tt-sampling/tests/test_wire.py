import dataclasses

import pytest
from tt_sampling import ParamsError, RowParams, TTSamplingParams, is_greedy, pack

FIELDS = [
    "temperature",
    "top_k",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "num_logprobs",
    "enable_log_probs",
]


def test_adapters_may_use_fields_and_replace() -> None:
    params = TTSamplingParams.neutral(2)
    assert [field.name for field in dataclasses.fields(params)] == FIELDS
    assert dataclasses.replace(params, seed=[1, 2]).seed == [1, 2]


def test_neutral_rows_are_plain_greedy() -> None:
    params = TTSamplingParams.neutral(3)
    assert all(is_greedy(t, k) for t, k in zip(params.temperature, params.top_k, strict=True))
    assert params.top_p == [1.0] * 3
    assert params.presence_penalty == params.frequency_penalty == [0.0] * 3
    assert params.repetition_penalty == [1.0] * 3
    assert params.seed == [None] * 3
    assert params.num_logprobs == [-2] * 3
    assert params.enable_log_probs == [False] * 3


def test_pack_puts_each_row_in_its_place() -> None:
    row = RowParams(
        temperature=0.7,
        top_k=8,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.3,
        seed=-5,
        num_logprobs=0,
    )
    packed = pack([None, row], 4)
    values = (0.7, 8, 0.9, 0.1, 0.2, 1.3, -5, 0, True)
    for field, value in zip(FIELDS, values, strict=True):
        column = getattr(packed, field)
        neutral = getattr(TTSamplingParams.neutral(4), field)
        assert column == [neutral[0], value, *neutral[2:]]


def test_neutral_lists_are_not_shared_between_records() -> None:
    first = pack([], 1)
    first.seed[0] = 3
    assert pack([], 1).seed == [None]


def test_logprob_switch_follows_the_count() -> None:
    packed = pack([RowParams(num_logprobs=n) for n in (-2, 0, 32)], 3)
    assert packed.enable_log_probs == [False, True, True]


@pytest.mark.parametrize("count", [-1, 33])
def test_logprobs_no_device_returns_are_refused_with_the_row(count: int) -> None:
    with pytest.raises(ParamsError, match=f"row 1 asks for num_logprobs={count}"):
        pack([None, RowParams(num_logprobs=count)], 2)


def test_more_rows_than_the_batch_are_refused() -> None:
    with pytest.raises(ParamsError, match="2 rows given for a batch of 1"):
        pack([None, None], 1)


def test_top_k_one_is_greedy_whatever_else_is_asked() -> None:
    assert RowParams(temperature=2.0, top_k=1, top_p=0.1, seed=7).greedy
    assert RowParams(temperature=0.0).greedy
    assert not RowParams(temperature=0.01).greedy

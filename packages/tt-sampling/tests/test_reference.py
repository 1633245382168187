import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tt_sampling import (
    ParamsError,
    RowParams,
    Sampled,
    ShapeError,
    TTSamplingParams,
    pack,
    penalise,
    probabilities,
    sample,
)

VOCAB = 50
NAN = float("nan")


class Row:
    """A request at one step: its logits, parameters, position and history."""

    def __init__(self, params: RowParams, number: int, prompt: list[int], output: list[int]) -> None:
        self.params = params
        self.logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(number)) * 3
        self.prompt, self.output = prompt, output

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)


def padded(lists: list[list[int]]) -> torch.Tensor:
    width = max(map(len, lists), default=0)
    return torch.tensor([x + [-1] * (width - len(x)) for x in lists], dtype=torch.int32).view(
        len(lists), width
    )


def sample_rows(rows: list[Row | None]) -> Sampled:
    """Absent rows are padding: neutral parameters, NaN logits, position -1."""
    return sample(
        torch.stack([row.logits if row else torch.full((VOCAB,), NAN) for row in rows]),
        pack([row.params if row else None for row in rows], len(rows)),
        [row.position if row else -1 for row in rows],
        padded([row.prompt if row else [] for row in rows]),
        padded([row.output if row else [] for row in rows]),
        min_p=[row.params.min_p if row else 0.0 for row in rows],
    )


def given_[T](value: T | None) -> T:
    assert value is not None
    return value


def operations_of(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, list[str]]:
    with torch.autograd.profiler.profile() as profile:
        result = call()
    return result, [event.name for event in profile.function_events]


def draw(params: RowParams, logits: list[float], times: int) -> torch.Tensor:
    """Counts of each id over `times` positions (one row each)."""
    many = torch.tensor(logits).expand(times, -1).contiguous()
    ids = sample(many, pack([params] * times, times), range(times), min_p=[params.min_p] * times).ids
    return torch.bincount(ids, minlength=len(logits))


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=6)
row_params = st.builds(
    RowParams,
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 7, VOCAB, 1000]),
    top_p=st.sampled_from([1e-6, 0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    presence_penalty=st.sampled_from([0.0, -1.0, 2.0]),
    frequency_penalty=st.sampled_from([0.0, -1.0, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.8]),
    seed=st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
    num_logprobs=st.sampled_from([-2, 0, 1, 20]),
)
rows = st.builds(Row, row_params, st.integers(0, 10_000), tokens.map(lambda t: [3, *t]), tokens)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.none(), rows), min_size=1, max_size=6), st.randoms())
def test_a_row_is_the_same_alone_and_among_any_others(batch: list[Row | None], random) -> None:
    random.shuffle(batch)
    together = sample_rows(batch)
    for index, row in enumerate(batch):
        if row is None or (row.params.seed is None and not row.params.greedy):
            continue
        alone = sample_rows([row])
        assert together.ids[index] == alone.ids[0]
        if row.params.num_logprobs >= 0:
            assert given_(together.logprobs)[index] == given_(alone.logprobs)[0]
            for there, here in zip(given_(together.top), given_(alone.top), strict=True):
                assert torch.equal(there[index], here[0])


@settings(deadline=None)
@given(rows, st.integers(0, 99))
def test_top_k_one_is_argmax_whatever_else_is_asked(row: Row, seed: int) -> None:
    row.params = RowParams(temperature=2.0, top_k=1, top_p=0.2, min_p=0.1, seed=seed)
    assert sample_rows([row]).ids[0] == row.logits.argmax()


def test_a_plain_greedy_batch_is_one_argmax() -> None:
    logits, params = torch.randn(4, VOCAB), pack([RowParams(temperature=0.0)] * 3, 4)
    bare, operations = operations_of(lambda: logits.argmax(-1))
    ids, ran = operations_of(lambda: sample(logits, params, [5, 6, 7, -1]).ids)
    assert torch.equal(ids, bare)
    assert ran == operations


def test_the_arguments_are_left_as_they_were() -> None:
    row = RowParams(top_k=3, top_p=0.9, min_p=0.1, frequency_penalty=1.0, num_logprobs=4, seed=1)
    logits = torch.randn(2, VOCAB)
    before, params = logits.clone(), pack([row], 2)
    history = torch.tensor([[1, 2, -1], [-1, -1, -1]])
    sample(logits, params, [3, -1], history, history, min_p=[0.1, 0.0])
    assert torch.equal(logits, before)
    assert params == pack([row], 2)
    assert history.tolist() == [[1, 2, -1], [-1, -1, -1]]


def test_penalties_count_what_they_should() -> None:
    """Id 0 is in the prompt, 1 twice in the output, 2 in both, 3 in neither."""
    logits = torch.tensor([[2.0, 2.0, -2.0, 1.0]])
    prompt, output = torch.tensor([[0, 2, -1]]), torch.tensor([[1, 1, 2, -1, 99]])

    def with_(**penalties: float) -> list[float]:
        return penalise(logits, pack([RowParams(**penalties)], 1), prompt, output)[0].tolist()  # type: ignore[arg-type]

    assert with_(repetition_penalty=2.0) == [1.0, 1.0, -4.0, 1.0]
    assert with_(frequency_penalty=0.5) == [2.0, 1.0, -2.5, 1.0]
    assert with_(presence_penalty=0.5) == [2.0, 1.5, -2.5, 1.0]
    assert with_(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25) == [
        1.0,
        -0.25,
        -4.75,
        1.0,
    ]


def test_masks_in_order() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()

    def kept(top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
        return probabilities(logits, [1.0], [top_k], [top_p], [min_p])[0].nonzero().flatten().tolist()

    assert kept() == kept(top_k=-1) == kept(top_k=4) == kept(top_k=100) == [0, 1, 2, 3]
    assert kept(top_k=2) == [0, 1]
    assert kept(top_p=0.65) == [0, 1]
    assert kept(top_p=0.71) == [0, 1, 2]
    assert kept(top_p=1e-9) == [0]
    assert kept(min_p=0.4) == [0, 1, 2]
    assert kept(min_p=1.0) == [0]
    assert kept(top_k=3, top_p=0.7) == [0, 1]  # 0.7 of what top-k left, which is 0.9
    tied = torch.zeros(1, 4)
    assert probabilities(tied, [1.0], [2], [1.0])[0].tolist() == [0.25] * 4


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (RowParams(seed=11), [0.4, 0.3, 0.2, 0.1]),
        (RowParams(), [0.4, 0.3, 0.2, 0.1]),
        (RowParams(seed=11, temperature=0.5), [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        (RowParams(seed=11, top_k=2), [4 / 7, 3 / 7, 0, 0]),
        (RowParams(seed=11, top_p=0.85), [4 / 9, 3 / 9, 2 / 9, 0]),
        (RowParams(seed=11, min_p=0.6), [4 / 7, 3 / 7, 0, 0]),
    ],
)
def test_draws_follow_the_probabilities(params: RowParams, expected: list[float]) -> None:
    times = 20_000
    seen = draw(params, [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)], times)
    ideal = torch.tensor(expected) * times
    assert seen[ideal == 0].sum() == 0
    error = ((seen - ideal) ** 2 / ideal)[ideal > 0].sum()
    assert error < 21.1  # chi-square, 3 degrees of freedom, p = 1e-4


def test_rows_without_a_seed_differ_from_one_another_and_from_the_last_run() -> None:
    def run() -> list[int]:
        torch.manual_seed(0)
        return sample(torch.zeros(12, 1000), pack([RowParams()] * 12, 12), range(12)).ids.tolist()

    first = run()
    assert len(set(first)) > 6
    assert run() != first


def test_logprobs_are_raw_and_shaped_as_asked() -> None:
    logits = torch.randn(4, VOCAB)
    row = RowParams(temperature=0.0, repetition_penalty=1.5)
    asked = [RowParams(temperature=0.0), *(RowParams(temperature=0.0, num_logprobs=n) for n in (0, 32))]
    asked.append(RowParams(temperature=0.0, repetition_penalty=5.0, num_logprobs=1))
    got = sample(logits, pack(asked, 4), [1] * 4, logits.argmax(-1, keepdim=True))
    raw = logits.log_softmax(-1)
    logprobs, (values, ids) = given_(got.logprobs), given_(got.top)
    assert logprobs[0].isnan()
    assert torch.equal(logprobs[1:], raw[range(1, 4), got.ids[1:]])
    assert values.shape == ids.shape == (4, 32)
    assert values[0].isnan().all()
    assert (ids[0] == -1).all()
    assert torch.equal(values[1:], raw[1:].sort(descending=True).values[:, :32])
    assert torch.equal(raw[1:].gather(1, ids[1:]), values[1:])
    assert sample(logits, pack([row], 4), [1] * 4, torch.zeros(4, 1).int()).logprobs is None


def test_a_vocabulary_smaller_than_32_gives_all_of_it() -> None:
    got = sample(torch.randn(1, 5), pack([RowParams(num_logprobs=20)], 1), [1])
    assert [part.shape for part in given_(got.top)] == [(1, 5), (1, 5)]


def test_a_row_without_a_single_token_left_still_yields_an_id() -> None:
    logits = torch.full((2, 5), float("-inf"))
    ids = sample(logits, pack([RowParams(seed=1, top_k=2, top_p=0.5), None], 2), [1, -1]).ids
    assert ((ids >= 0) & (ids < 5)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": [1]}, "positions has 1 rows and the logits 2"),
        ({"params": TTSamplingParams.neutral(3)}, "temperature has 3 rows"),
        ({"logits": torch.zeros(2, 5, dtype=torch.bfloat16)}, "torch.bfloat16"),
        ({"logits": torch.zeros(5)}, r"float32 \[5\]"),
        ({"output_tokens": torch.zeros(1, 4).int()}, "output_tokens has 1 rows"),
        ({"min_p": [0.0]}, "min_p has 1 rows"),
    ],
)
def test_rows_that_disagree_are_named(change: dict[str, object], message: str) -> None:
    arguments = {"logits": torch.zeros(2, 5), "params": TTSamplingParams.neutral(2), "positions": [1, 1]}
    with pytest.raises(ShapeError, match=message):
        sample(**(arguments | change))  # type: ignore[arg-type]


def test_what_cannot_be_answered_is_refused() -> None:
    with pytest.raises(ParamsError, match="have penalties but prompt_tokens is None"):
        sample(torch.zeros(1, 5), pack([RowParams(presence_penalty=1.0)], 1), [1])
    params = TTSamplingParams.neutral(1)
    params.num_logprobs = [33]
    with pytest.raises(ParamsError, match="num_logprobs=33"):
        sample(torch.zeros(1, 5), params, [1])

"""Logprobs from what a device returns, against vLLM's own on the same logits."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tt_sampling import RowParams, pack, sample
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler
from vllm_tt_plugin.device_logprobs import device_logprobs
from vllm_tt_plugin.errors import StepError
from vllm_tt_plugin.step_data import DeviceSampling, StepResult

VOCAB = 90
Counts = list[int | None]


def asked(counts: Counts, **params: Any) -> DeviceSampling:
    """One row for each count of logprobs; None does not ask."""
    rows = [RowParams(**params, num_logprobs=-2 if count is None else count) for count in counts]
    return DeviceSampling(pack(rows, len(rows)))


def given_[T](value: T | None) -> T:
    assert value is not None
    return value


def vllms(logits: torch.Tensor, ids: torch.Tensor, count: int) -> LogprobsTensors:
    with torch.compiler.set_stance("force_eager"):
        return Sampler.gather_logprobs(logits.log_softmax(-1), count, ids.long())


counts = st.lists(st.sampled_from([None, 0, 1, 5, 20]), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(counts, st.integers(0, 1000), st.randoms(use_true_random=False))
def test_candidates_give_what_vllm_gives(counts: Counts, seed: int, random: Any) -> None:
    logits = torch.randn(len(counts), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    sampling = asked(counts, top_k=32, temperature=2.0)
    drawn = sample(logits, sampling.params, [4] * len(counts))
    rows = random.sample(range(len(counts)), random.randint(1, len(counts)))
    got = device_logprobs(sampling, StepResult(tokens=drawn.ids, logprobs=drawn.top), rows)
    wanted = max(-1 if count is None else count for count in counts)
    if wanted < 0:
        assert got is None
        return
    expected = vllms(logits[rows], drawn.ids[rows], wanted)
    for index, row in enumerate(rows):
        if counts[row] is not None:
            for ours, theirs in zip(given_(got)[:3], expected[:3], strict=True):
                torch.testing.assert_close(ours[index], theirs[index])


def test_single_values_give_what_vllm_gives_for_argmax_rows() -> None:
    logits = torch.randn(3, VOCAB)
    sampling = asked([0, None, 0], temperature=0.0)
    drawn = sample(logits, sampling.params, [1] * 3)
    for shape in ((3,), (3, 1), (1, 1, 1, 3)):
        returned = given_(drawn.logprobs).reshape(shape)
        got = given_(device_logprobs(sampling, StepResult(tokens=drawn.ids, logprobs=returned), [2, 0]))
        for ours, theirs in zip(got[:3], vllms(logits[[2, 0]], drawn.ids[[2, 0]], 0)[:3], strict=True):
            torch.testing.assert_close(ours, theirs)


def test_a_token_that_ties_with_the_last_candidate_has_its_value() -> None:
    values, ids = torch.tensor([[-1.0, -2.0, -2.0]]), torch.tensor([[8, 3, 4]])
    got = device_logprobs(
        asked([2], top_k=3), StepResult(tokens=torch.tensor([50]), logprobs=(values, ids)), [0]
    )
    assert given_(got).logprob_token_ids.tolist() == [[50, 8, 3]]
    assert given_(got).logprobs.tolist() == [[-2.0, -1.0, -2.0]]
    assert given_(got).selected_token_ranks.tolist() == [4]


def test_what_nobody_asked_for_is_left_where_it_is() -> None:
    result = StepResult(tokens=torch.tensor([3]), logprobs=torch.zeros(1))
    assert device_logprobs(asked([None], temperature=0.0), result, [0]) is None
    assert device_logprobs(asked([4], temperature=0.0), result, []) is None


@pytest.mark.parametrize(
    ("returned", "given"), [(None, "returned none"), (torch.zeros(1), "one for each row")]
)
def test_a_model_that_returns_less_than_it_declares_is_named(returned: Any, given: str) -> None:
    with pytest.raises(StepError, match=given):
        device_logprobs(
            asked([2], temperature=0.0), StepResult(tokens=torch.tensor([3]), logprobs=returned), [0]
        )

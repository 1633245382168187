"""The sampler for CPUs against vLLM's own, on the same logits and generators: equal to the bit."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tt_sampling import step_generator
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops import penalties
from vllm.v1.sample.sampler import Sampler
from vllm_tt_plugin.cpu_sampler import CpuSampler, RowMetadata
from vllm_tt_plugin.host_sampling import sampling_metadata
from vllm_tt_plugin.requests import RequestState, needs_of

VOCAB = 300
SETTLED = {"raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"}


@pytest.fixture(scope="module", autouse=True)
def plain_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, torch.compiler.set_stance("force_eager"):
        patch.setattr(penalties, "PIN_MEMORY", False)
        yield


def state(row: int, sampling: SamplingParams) -> RequestState:
    output = [9, 3, 9, row, -1][: 3 + row % 3]  # a placeholder is no token
    return RequestState(f"r{row}", [5, 3, 3, row], sampling, needs_of(sampling), output=output)


def vllms(ours: RowMetadata, states: list[RequestState | None], vocab: int) -> SamplingMetadata:
    """The same batch as vLLM's own runner would describe it: padded prompts, and a mask of whole rows."""
    prompts = torch.full((len(states), 4), vocab)
    forbidden = torch.zeros(len(states), vocab, dtype=torch.bool)
    for row, one in enumerate(states):
        if one is not None:
            prompts[row] = torch.tensor(one.prompt)
            if one.sampling.allowed_token_ids:
                forbidden[row] = True
                forbidden[row, one.sampling.allowed_token_ids] = False
    shared = {name: getattr(ours, name) for name in SamplingMetadata.__dataclass_fields__}
    dense = {"prompt_token_ids": prompts, "allowed_token_ids_mask": forbidden if forbidden.any() else None}
    return SamplingMetadata(**shared | dense)


def generators(states: list[RequestState | None]) -> dict[int, torch.Generator]:
    return {
        row: step_generator(one.sampling.seed, one.known)
        for row, one in enumerate(states)
        if one is not None and one.sampling.seed is not None and not one.needs.params.greedy
    }


def both(
    logits: torch.Tensor, states: list[RequestState | None], mode: Any = "raw_logprobs"
) -> tuple[SamplerOutput, SamplerOutput]:
    metadata = sampling_metadata(states, logits.shape[1], LogitsProcessors())
    metadata.generators = generators(states)
    got = CpuSampler(mode)(logits.clone(), metadata)
    metadata.generators = generators(states)
    sampler = Sampler(mode)
    sampler.topk_topp_sampler.forward = sampler.topk_topp_sampler.forward_native
    return got, sampler(logits.clone(), vllms(metadata, states, logits.shape[1]))


def agree(logits: torch.Tensor, states: list[RequestState | None], mode: Any = "raw_logprobs") -> None:
    ours, theirs = both(logits, states, mode)
    live = [row for row, one in enumerate(states) if one is not None]
    assert ours.sampled_token_ids[live].tolist() == theirs.sampled_token_ids[live].tolist()
    assert (ours.logprobs_tensors is None) == (theirs.logprobs_tensors is None)
    if ours.logprobs_tensors is not None and theirs.logprobs_tensors is not None:
        for mine, other in zip(ours.logprobs_tensors[:3], theirs.logprobs_tensors[:3], strict=True):
            assert torch.equal(mine[live], other[live])


samplings = st.builds(
    lambda options, seed: SamplingParams(seed=seed, **options),
    st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.01, 0.7, 1.0, 2.0]),
            "top_k": st.sampled_from([0, 1, 2, 20, 299, VOCAB, 1000]),
            "top_p": st.sampled_from([1e-6, 0.2, 0.9, 0.999, 1.0]),
            "presence_penalty": st.sampled_from([0.0, 0.0, -2.0, 0.7]),
            "frequency_penalty": st.sampled_from([0.0, 0.0, -0.3, 2.0]),
            "repetition_penalty": st.sampled_from([1.0, 1.0, 0.6, 1.7]),
            "allowed_token_ids": st.sampled_from([None, None, [3], [9, 4, 299, 100]]),
            "logprobs": st.sampled_from([None, 0, 1, 20]),
        }
    ),
    st.integers(-(2**63), 2**63 - 1).filter(lambda seed: seed != -1),  # vLLM reads -1 as none
)
batches = st.lists(st.one_of(st.none(), samplings), min_size=1, max_size=6).filter(any)
spreads = st.sampled_from([0.1, 3.0, 30.0])


def given_logits(rows: int, vocab: int, seed: int, spread: float, coarse: bool) -> torch.Tensor:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread
    return logits.bfloat16().float() if coarse else logits


@settings(max_examples=300, deadline=None)
@given(batches, st.integers(0, 10_000), spreads, st.booleans(), st.sampled_from(sorted(SETTLED)))
def test_any_batch_gives_what_vllm_gives(
    batch: list[SamplingParams | None], seed: int, spread: float, coarse: bool, mode: str
) -> None:
    """Coarse logits, as a device computes them, have many ties."""
    states = [None if sampling is None else state(row, sampling) for row, sampling in enumerate(batch)]
    agree(given_logits(len(batch), VOCAB, seed, spread, coarse), states, mode)


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("vocab", [32_000, 128_256])
def test_a_real_vocabulary(vocab: int, coarse: bool) -> None:
    kinds: list[dict[str, Any]] = [
        {"top_p": 0.95},
        {"top_k": 50, "top_p": 0.9, "repetition_penalty": 1.2},
        {"top_k": 64},
        {"temperature": 0, "presence_penalty": 0.5, "logprobs": 20},
        {"temperature": 0.6},
        {"top_p": 0.5, "temperature": 0.4, "allowed_token_ids": list(range(0, vocab, 7))},
    ]
    asked = [SamplingParams(seed=row, **kind) for row, kind in enumerate(kinds)]
    states: list[RequestState | None] = [state(row, one) for row, one in enumerate(asked)]
    for seed in range(2):
        agree(given_logits(len(kinds), vocab, seed, 3.0, coarse), states)


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), float("inf")])
def test_a_row_without_a_choice_gives_what_vllm_gives(value: float) -> None:
    logits = torch.zeros(4, VOCAB)
    logits[:, 2:] = value
    logits[1:, :2] = value
    kinds: list[dict[str, Any]] = [{"top_p": 0.3}, {"top_k": 4}, {"top_k": 4, "top_p": 0.5}, {}]
    agree(logits, [state(row, SamplingParams(seed=1, **kind)) for row, kind in enumerate(kinds)])


@pytest.mark.parametrize(
    "kind", [{}, {"top_k": 4, "temperature": 0.8}, {"top_p": 0.8}, {"top_k": 6, "top_p": 0.9}]
)
def test_draws_without_a_seed_follow_vllms_probabilities(kind: dict[str, Any]) -> None:
    """Chi-square at p = 1e-4 with at most 7 degrees of freedom."""
    torch.manual_seed(3)
    times, row = 4_000, given_logits(1, 8, 5, 1.0, coarse=True)
    row[0, 6] = row[0, 1]
    asked = state(0, SamplingParams(logprobs=0, **kind))
    metadata = sampling_metadata([asked] * times, 8, LogitsProcessors())
    ids = CpuSampler()(row.repeat(times, 1), metadata).sampled_token_ids[:, 0]
    one = sampling_metadata([asked], 8, LogitsProcessors())
    one.max_num_logprobs = -1
    sampler = Sampler("processed_logprobs")
    sampler.topk_topp_sampler.forward = sampler.topk_topp_sampler.forward_native
    processed = sampler(row.clone(), vllms(one, [asked], 8)).logprobs_tensors
    assert processed is not None
    expected, seen = processed.logprobs[0].exp() * times, torch.bincount(ids, minlength=8)
    assert seen[expected == 0].sum() == 0
    assert float(((seen - expected) ** 2 / expected)[expected > 0].sum()) < 29.9

"""The reference sampler against vLLM's own `Sampler`, on the same logits."""

from collections.abc import Iterator

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tt_sampling import RowParams, pack, penalise, probabilities, sample, step_generator
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops import penalties
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

VOCAB = 300


@pytest.fixture(scope="module", autouse=True)
def plain_cpu() -> Iterator[None]:
    """What an out-of-tree platform on the CPU sets, whether or not one is active here."""
    with pytest.MonkeyPatch.context() as patch, torch.compiler.set_stance("force_eager"):
        patch.setattr(penalties, "PIN_MEMORY", False)
        yield


class FixedMinP(MinPLogitsProcessor):
    """vLLM's processor with its state given instead of gathered from batch updates."""

    def __init__(self, min_p: list[float]) -> None:
        self.min_p = torch.tensor(min_p, dtype=torch.float32).unsqueeze(1)
        self.min_p_count = sum(p > 0 for p in min_p)


@attrs.frozen
class Row:
    params: RowParams
    logits: torch.Tensor = attrs.field(eq=False, repr=False)
    prompt: list[int]
    output: list[int]

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)


def padded(lists: list[list[int]], pad: int) -> torch.Tensor:
    width = max(map(len, lists))
    return torch.tensor([x + [pad] * (width - len(x)) for x in lists]).long().view(len(lists), width)


def column(rows: list[Row], name: str) -> torch.Tensor:
    return torch.tensor([getattr(row.params, name) for row in rows], dtype=torch.float32)


def metadata(rows: list[Row]) -> SamplingMetadata:
    """As vLLM's input batch makes it: tensors that no row needs are None, and greedy rows carry no k."""
    params = [row.params for row in rows]
    greedy = [p.greedy for p in params]
    temperature = torch.tensor([0.0 if g else p.temperature for g, p in zip(greedy, params, strict=True)])
    top_k = [p.top_k if 1 < p.top_k < VOCAB else VOCAB for p in params]
    processors = LogitsProcessors([FixedMinP([0.0 if p.greedy else p.min_p for p in params])])
    asked = [p.num_logprobs for p in params if p.num_logprobs >= 0]
    return SamplingMetadata(
        temperature=None if all(greedy) else temperature,
        all_greedy=all(greedy),
        all_random=not any(greedy),
        top_p=None if all(p.top_p == 1 for p in params) else column(rows, "top_p"),
        top_k=None if all(k == VOCAB for k in top_k) else torch.tensor(top_k, dtype=torch.int32),
        generators={
            index: step_generator(row.params.seed, row.position)
            for index, row in enumerate(rows)
            if row.params.seed is not None
        },
        max_num_logprobs=max(asked, default=None),
        no_penalties=not any(p.penalised for p in params),
        prompt_token_ids=padded([row.prompt for row in rows], VOCAB),
        frequency_penalties=column(rows, "frequency_penalty"),
        presence_penalties=column(rows, "presence_penalty"),
        repetition_penalties=column(rows, "repetition_penalty"),
        output_token_ids=[row.output for row in rows],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=processors,
    )


def logits_of(rows: list[Row]) -> torch.Tensor:
    return torch.stack([row.logits for row in rows])


def histories(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    return padded([row.prompt for row in rows], -1), padded([row.output for row in rows], -1)


def native_sampler(mode: str = "raw_logprobs") -> Sampler:
    """vLLM's PyTorch path, which it takes on every out-of-tree platform, whatever platform runs the tests."""
    sampler = Sampler(mode)  # type: ignore[arg-type]
    inner: TopKTopPSampler = sampler.topk_topp_sampler
    inner.forward = inner.forward_native
    return sampler


def given_[T](value: T | None) -> T:
    assert value is not None
    return value


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=8)
params = st.builds(
    RowParams,
    temperature=st.sampled_from([0.0, 0.01, 0.6, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 20, VOCAB, 1000]),
    top_p=st.sampled_from([1e-6, 0.2, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    presence_penalty=st.sampled_from([0.0, -2.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.3, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 0.6, 1.7]),
    seed=st.integers(-(2**63), 2**63 - 1),
    num_logprobs=st.sampled_from([-2, 0, 1, 5, 32]),
)
logits = st.tuples(st.integers(0, 10_000), st.sampled_from([0.1, 2.0, 8.0])).map(
    lambda drawn: torch.randn(VOCAB, generator=torch.Generator().manual_seed(drawn[0])) * drawn[1]
)
coarse = logits.map(lambda values: (values * 2).round() / 2)  # with many ties
rows = st.builds(Row, params, logits, tokens.map(lambda ids: [1, *ids]), tokens)
tied = st.builds(Row, params, coarse, tokens.map(lambda ids: [1, *ids]), tokens)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.one_of(rows, tied), min_size=1, max_size=5))
def test_seeded_and_greedy_rows_draw_the_same_token(batch: list[Row]) -> None:
    packed = pack([row.params for row in batch], len(batch))
    positions = [row.position for row in batch]
    ours = sample(
        logits_of(batch), packed, positions, *histories(batch), min_p=[row.params.min_p for row in batch]
    )
    theirs: SamplerOutput = native_sampler()(logits_of(batch), metadata(batch))
    assert ours.ids.tolist() == theirs.sampled_token_ids.flatten().tolist()
    if theirs.logprobs_tensors is not None:
        compare_logprobs(batch, ours.logprobs, ours.top, theirs.logprobs_tensors)


def compare_logprobs(
    batch: list[Row],
    sampled: torch.Tensor | None,
    top: tuple[torch.Tensor, torch.Tensor] | None,
    theirs: LogprobsTensors,
) -> None:
    """vLLM's column 0 is the sampled token, the others the top n. Where ids tie, their order is open."""
    for index, row in enumerate(batch):
        count = row.params.num_logprobs
        if count >= 0:
            torch.testing.assert_close(given_(sampled)[index], theirs.logprobs[index, 0])
        if count > 0:
            values, ids = (part[index, :count] for part in given_(top))
            torch.testing.assert_close(values, theirs.logprobs[index, 1 : count + 1])
            raw = row.logits.log_softmax(-1)
            torch.testing.assert_close(raw[ids], values)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(rows, tied), min_size=1, max_size=5))
def test_masks_and_probabilities_agree(batch: list[Row]) -> None:
    batch = [row for row in batch if not row.params.greedy]
    if not batch:
        return
    asked = [attrs.evolve(row, params=attrs.evolve(row.params, num_logprobs=0)) for row in batch]
    processed = metadata(asked)
    processed.max_num_logprobs = -1  # all of the vocabulary, unsorted
    output = native_sampler("processed_logprobs")(logits_of(batch), processed)
    theirs = given_(output.logprobs_tensors).logprobs.exp()
    packed = pack([row.params for row in batch], len(batch))
    ours = probabilities(
        penalise(logits_of(batch), packed, *histories(batch)),
        packed.temperature,
        packed.top_k,
        packed.top_p,
        [row.params.min_p for row in batch],
    )
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def chi_square(seen: torch.Tensor, ideal: torch.Tensor) -> float:
    assert seen[ideal == 0].sum() == 0
    return float(((seen - ideal) ** 2 / ideal)[ideal > 0].sum())


@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize(
    "asked", [RowParams(), RowParams(top_k=4, temperature=0.8), RowParams(top_p=0.8), RowParams(min_p=0.3)]
)
def test_draws_follow_vllms_probabilities(asked: RowParams, seeded: bool) -> None:
    """Chi-square at p = 1e-4 with at most 7 degrees of freedom."""
    times, vocab = 40_000, 8
    scores = torch.randn(vocab, generator=torch.Generator().manual_seed(5)).expand(times, -1).contiguous()
    asked = attrs.evolve(asked, seed=77 if seeded else None)
    ids = sample(scores, pack([asked] * times, times), range(times), min_p=[asked.min_p] * times).ids
    one = metadata([Row(asked, scores[0], [1], [])])
    one.max_num_logprobs = -1
    if one.top_k is not None:
        one.top_k.clamp_(max=vocab)
    processed = native_sampler("processed_logprobs")(scores[:1].clone(), one)
    expected = given_(processed.logprobs_tensors).logprobs[0].exp()
    assert chi_square(torch.bincount(ids, minlength=vocab), expected * times) < 29.9


def test_full_width_draws_agree_at_a_real_vocabulary() -> None:
    """One row of each kind over 128k ids, in one batch: what a serving step looks like."""
    wide = 128_256
    kinds = [
        RowParams(seed=1),
        RowParams(seed=2, top_k=40, temperature=0.6),
        RowParams(seed=3, top_p=0.95),
        RowParams(temperature=0.0, repetition_penalty=1.2),
    ]
    scores = torch.randn(len(kinds), wide, generator=torch.Generator().manual_seed(3)) * 4
    batch = [Row(kind, row, [1, 2], [3]) for kind, row in zip(kinds, scores, strict=True)]
    asked = metadata(batch)
    asked.top_k = torch.tensor([wide, 40, wide, wide], dtype=torch.int32)
    asked.prompt_token_ids = padded([row.prompt for row in batch], wide)
    theirs = native_sampler()(scores.clone(), asked).sampled_token_ids.flatten()
    ours = sample(scores, pack(kinds, len(kinds)), [3] * len(kinds), *histories(batch)).ids
    assert ours.tolist() == theirs.tolist()

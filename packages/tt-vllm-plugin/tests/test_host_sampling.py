"""Host sampling of sparse rows: a request's token depends on nothing but the request."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st
from tt_scheduler import Phase
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.sample.logits_processor import (
    BUILTIN_LOGITS_PROCESSORS,
    BatchUpdate,
    LogitsProcessor,
    LogitsProcessors,
)
from vllm_tt_plugin.host_sampling import HostSampler, mask_by_grammar, sampling_metadata
from vllm_tt_plugin.logits_processors import RowProcessors, difference
from vllm_tt_plugin.requests import RequestState, RequestTable

from .conftest import MakeConfig
from .plans import Planner, Told, greedy
from .strict_adapters import VOCAB

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ROWS = 6
HostSamplers = Callable[[], HostSampler]


def request(
    name: str, sampling: SamplingParams, prompt: Sequence[int] = (1, 2), output: Sequence[int] = ()
) -> Told:
    return Told(name, list(prompt), sampling, output=list(output))


class Table:
    """A real request table, and a planner that puts requests on the rows a test wants."""

    def __init__(self, *by_row: Told | None) -> None:
        self.requests = RequestTable(ROWS)
        self.planner = Planner(ROWS, 200, v2=True)
        fillers = [Told(f"filler{row}", [1], greedy()) for row, told in enumerate(by_row) if told is None]
        rest = iter(fillers)
        self.place(*(told or next(rest) for told in by_row))
        self.leave(*fillers)

    def place(self, *told: Told) -> None:
        self.requests.apply(self.planner.step(Phase.PREFILL, [(one, one.missing) for one in told]))

    def leave(self, *told: Told) -> None:
        for one in told:
            self.planner.finish(one)
        self.requests.apply(self.planner.step(Phase.EMPTY, []))

    def states(self, *told: Told) -> list[RequestState]:
        return [self.requests[one.name] for one in told]


def decode_tokens(
    sampler: HostSampler, table: Table, logits: torch.Tensor, grammar: GrammarOutput | None = None
) -> dict[str, int]:
    """Tokens by request; rows of nobody are NaN."""
    requests = table.requests
    full = torch.full((len(requests.by_row), VOCAB), float("nan"))
    for row, state in enumerate(requests.by_row):
        if state is not None:
            full[row] = logits[row]
    sampled = sampler.sample_decode(full, requests, grammar).sampled_token_ids[:, 0].tolist()
    return {state.request_id: sampled[row] for row, state in enumerate(requests.by_row) if state}


@pytest.fixture(scope="module")
def host_samplers(vllm_config: "VllmConfig") -> HostSamplers:
    return lambda: HostSampler(vllm_config)


samplings = st.builds(
    lambda options, seed: SamplingParams(seed=seed, max_tokens=1000, **options),
    st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.7, 1.5]),
            "top_k": st.sampled_from([0, 1, 5]),
            "top_p": st.sampled_from([1.0, 0.6]),
            "min_p": st.sampled_from([0.0, 0.2]),
            "presence_penalty": st.sampled_from([0.0, 1.0]),
            "frequency_penalty": st.sampled_from([0.0, -0.5]),
            "repetition_penalty": st.sampled_from([1.0, 1.8]),
            "logit_bias": st.sampled_from([None, {3: 8.0, 9: -3.0}]),
            "allowed_token_ids": st.sampled_from([None, [3, 4, 5, 40]]),
            "min_tokens": st.sampled_from([0, 2]),
            "stop_token_ids": st.just([7, 8]),
            "logprobs": st.sampled_from([None, 0, 3]),
        }
    ),
    st.integers(-(2**63), 2**63 - 1),
)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_tokens_beside_others_and_free_rows_are_those_alone(
    host_samplers: HostSamplers, data: st.DataObject
) -> None:
    by_row = data.draw(st.lists(st.one_of(st.none(), samplings), min_size=1, max_size=ROWS), label="rows")
    if all(sampling is None for sampling in by_row):
        by_row[0] = greedy()
    logits = torch.randn(len(by_row), VOCAB, generator=torch.Generator().manual_seed(len(by_row))) * 3
    told = [
        None if sampling is None else request(f"r{row}", sampling, [row, 5], [3, 9, row])
        for row, sampling in enumerate(by_row)
    ]
    together, table = host_samplers(), Table(*told)
    alone, lonely_table = host_samplers(), Table()
    for turn in range(2):
        got = decode_tokens(together, table, logits)
        for row, one in enumerate(told):
            if one is not None:
                lonely = request(f"{turn}-{row}", one.sampling, one.prompt, one.output)
                lonely_table.place(lonely)
                assert decode_tokens(alone, lonely_table, logits[row : row + 1]) == {
                    lonely.name: got[one.name]
                }
                lonely_table.leave(lonely)
                one.output.append(got[one.name])
                table.requests[one.name].output.append(got[one.name])


def test_prefill_and_decode_draw_alike(host_samplers: HostSamplers) -> None:
    """The first token after a prompt is the one that a decode at that position would draw."""
    sampling = SamplingParams(
        temperature=1.3, seed=5, min_p=0.05, logit_bias={4: 3.0}, repetition_penalty=1.2, min_tokens=9
    )
    one, other = request("a", sampling, [4, 9]), request("b", greedy(), [3])
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    table, sampler = Table(other, one), host_samplers()
    decoded = decode_tokens(sampler, table, logits)
    prefilled = sampler.sample_prefill(logits[1:].clone(), table.states(one), table.requests, None)
    assert prefilled.sampled_token_ids.tolist() == [[decoded["a"]]]


def apply_all(processors: LogitsProcessors, logits: torch.Tensor) -> torch.Tensor:
    for processor in [*processors.non_argmax_invariant, *processors.argmax_invariant]:
        logits = processor.apply(logits)
    return logits


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_processors_that_follow_equal_fresh_ones(vllm_config: "VllmConfig", data: st.DataObject) -> None:
    """Random changes of hands, also within one step, against processors told everything at once."""
    table, following = Table(), RowProcessors(vllm_config)
    held: list[Told] = []
    for step in range(data.draw(st.integers(1, 8), label="steps")):
        for one in data.draw(st.lists(st.sampled_from(held), unique=True) if held else st.just([])):
            held.remove(one)
            table.planner.finish(one)
        arriving = data.draw(st.lists(samplings, max_size=ROWS - len(held)), label="arriving")
        told = [request(f"{step}-{i}", sampling) for i, sampling in enumerate(arriving)]
        table.place(*told)
        held += told
        following.follow(table.requests)
        by_row = table.requests.by_row
        if not by_row:
            continue
        live = [row for row, state in enumerate(by_row) if state is not None]
        fresh = LogitsProcessors(
            processor(vllm_config, torch.device("cpu"), False) for processor in BUILTIN_LOGITS_PROCESSORS
        )
        for processor in fresh.all:
            processor.update_state(difference([], by_row))
        logits = torch.randn(len(by_row), VOCAB, generator=torch.Generator().manual_seed(step))
        assert torch.equal(
            apply_all(following.by_row, logits.clone())[live], apply_all(fresh, logits.clone())[live]
        )
        for one in held:
            one.output.append(11)
            table.requests[one.name].output.append(11)


def test_a_row_that_changed_hands_is_only_added() -> None:
    table = Table(request("a", greedy()), request("b", greedy()), request("c", greedy()))
    before = table.requests.by_row
    for row in (0, 1, 2):
        state = before[row]
        assert state is not None
        table.planner.finished.add(state.request_id)
        table.planner.rows.release(state.request_id)
    table.place(request("d", greedy()))
    update = difference(before, table.requests.by_row)
    assert (update.batch_size, update.removed, [row for row, *_ in update.added]) == (1, [2, 1], [0])


def test_metadata_row_by_row() -> None:
    free = SamplingParams(temperature=0.5, top_k=5, top_p=0.9, frequency_penalty=0.3, logprobs=2)
    a, b = request("a", greedy(presence_penalty=0.2), [1, 2, 3]), request("b", free, [4], [6])
    table = Table(a, None, b)
    metadata = sampling_metadata(table.requests.by_row, VOCAB, LogitsProcessors())
    assert metadata.temperature is not None
    assert metadata.top_k is not None
    assert metadata.top_p is not None
    assert (metadata.all_greedy, metadata.all_random, metadata.no_penalties) == (False, False, False)
    assert metadata.temperature.tolist() == [0.0, 0.0, 0.5]
    assert metadata.top_k.tolist() == [VOCAB, VOCAB, 5]
    assert metadata.top_p.tolist() == pytest.approx([1.0, 1.0, 0.9])
    assert metadata.presence_penalties.tolist() == pytest.approx([0.2, 0.0, 0.0])
    assert metadata.frequency_penalties.tolist() == pytest.approx([0.0, 0.0, 0.3])
    assert metadata.repetition_penalties.tolist() == [1.0, 1.0, 1.0]
    assert {row: ids.tolist() for row, ids in metadata.prompts.items()} == {0: [1, 2, 3], 2: [4]}
    assert metadata.limits == {2: (5, 0.9)}
    assert metadata.output_token_ids == [[], [], [6]]
    assert metadata.output_token_ids[2] is table.requests["b"].output, "it must grow with the request"
    assert metadata.max_num_logprobs == 2
    assert metadata.allowed_token_ids_mask is None


@pytest.mark.parametrize(
    ("sampling", "greedy_only", "random_only"),
    [
        (greedy(), True, False),
        (SamplingParams(temperature=2.0, top_k=1), True, False),  # an argmax, whatever the temperature
        (SamplingParams(temperature=1.0, seed=1), False, True),
    ],
)
def test_free_rows_do_not_make_a_batch_mixed(
    sampling: SamplingParams, greedy_only: bool, random_only: bool
) -> None:
    metadata = sampling_metadata(
        Table(None, request("a", sampling)).requests.by_row, VOCAB, LogitsProcessors()
    )
    assert (metadata.all_greedy, metadata.all_random) == (greedy_only, random_only)
    assert (metadata.temperature is None) == greedy_only
    assert (metadata.top_k, metadata.top_p, metadata.prompts) == (None, None, {})


def test_whole_vocabulary_logprobs() -> None:
    table = Table(request("a", greedy(logprobs=-1)))
    assert sampling_metadata(table.requests.by_row, VOCAB, LogitsProcessors()).max_num_logprobs == VOCAB


def grammar(allowed: dict[str, list[int]]) -> GrammarOutput:
    """Masks in the order given, 32 tokens to an int32, as vLLM packs them."""
    bits = np.zeros((len(allowed), 64), np.uint8)
    for index, tokens in enumerate(allowed.values()):
        bits[index, tokens] = 1
    packed = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return GrammarOutput(list(allowed), packed)


def test_grammar_masks_follow_requests_not_rows(host_samplers: HostSamplers) -> None:
    a, b, c = (request(name, greedy()) for name in "abc")
    table = Table(a, None, b, c)
    logits = torch.zeros(4, VOCAB)
    logits[:, 50] = 9.0
    masks = {"c": [3], "gone": [4], "a": [33]}
    assert decode_tokens(host_samplers(), table, logits.clone(), grammar(masks)) == {"a": 33, "b": 50, "c": 3}
    sampled = host_samplers().sample_prefill(
        logits[:2].clone(), table.states(c, b), table.requests, grammar(masks)
    )
    assert sampled.sampled_token_ids.tolist() == [[3], [50]]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([VOCAB, 64, 65]))
def test_grammar_masks_are_those_of_xgrammars_kernel(seed: int, vocab: int) -> None:
    words = np.random.default_rng(seed).integers(-(2**31), 2**31, (3, (vocab + 31) // 32), np.int32)
    logits = torch.randn(3, vocab)
    expected = logits.clone()
    xgrammar.apply_token_bitmask_inplace(expected, torch.from_numpy(words))
    states = Table(*(request(name, greedy()) for name in "abc")).requests.by_row
    mask_by_grammar(logits, states, GrammarOutput(["c", "a", "b"], words[[2, 0, 1]]))
    assert torch.equal(logits, expected)


def test_a_grammar_of_others_changes_nothing(host_samplers: HostSamplers) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[:, 50] = 9.0
    table = Table(request("a", greedy()))
    assert decode_tokens(host_samplers(), table, logits, grammar({"b": [1]})) == {"a": 50}


class OnlyItsRow(LogitsProcessor):
    """A user's processor: forces token 20 + row on whoever has `extra_args={"force": True}`."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: set[int] = set()

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        self.rows -= set(batch_update.removed)
        for row, sampling, _, _ in batch_update.added:
            (self.rows.add if (sampling.extra_args or {}).get("force") else self.rows.discard)(row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row in self.rows:
            logits[row, 20 + row] = 99.0
        return logits


def test_a_users_processor_sees_rows_in_prefill_too(make_config: MakeConfig) -> None:
    sampler = HostSampler(make_config(logits_processors=[OnlyItsRow]))
    forced = SamplingParams(temperature=0.0, extra_args={"force": True})
    a, b, c = request("a", greedy()), request("b", forced), request("c", forced)
    table = Table(a, None, b, c)
    logits = torch.zeros(4, VOCAB)
    logits[:, 50] = 9.0
    sampled = sampler.sample_prefill(logits[:2].clone(), table.states(c, a), table.requests, None)
    assert sampled.sampled_token_ids.tolist() == [[23], [50]]
    assert decode_tokens(sampler, table, logits.clone()) == {"a": 50, "b": 22, "c": 23}
    table.leave(c)
    table.place(request("d", greedy()))
    assert decode_tokens(sampler, table, logits.clone()) == {"a": 50, "b": 22, "d": 50}


@pytest.mark.parametrize("ended", [False, True])
def test_min_tokens_is_released_exactly_then(host_samplers: HostSamplers, ended: bool) -> None:
    sampling = greedy(min_tokens=3, stop_token_ids=[7])
    one = request("a", sampling, output=[1, 1, 1] if ended else [1, 1])
    logits = torch.zeros(1, VOCAB)
    logits[:, 7], logits[:, 30] = 9.0, 5.0
    assert decode_tokens(host_samplers(), Table(one), logits) == {"a": 7 if ended else 30}


def test_bad_words_hold_without_penalties(host_samplers: HostSamplers) -> None:
    sampling = greedy()
    sampling._bad_words_token_ids = [[5, 6], [30]]
    logits = torch.zeros(2, VOCAB)
    logits[:, 6], logits[:, 30], logits[:, 2] = 8.0, 9.0, 5.0
    after_5, after_4 = request("a", sampling, output=[5]), request("b", sampling, output=[4])
    assert decode_tokens(host_samplers(), Table(after_5, after_4), logits) == {"a": 2, "b": 6}

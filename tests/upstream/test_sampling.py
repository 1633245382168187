"""What sampling on the host leans on in vLLM's sampler and processors. Each test says what breaks with it."""

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import (
    BUILTIN_LOGITS_PROCESSORS,
    BatchUpdate,
    LogitBiasLogitsProcessor,
    LogitsProcessors,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
    build_logitsprocs,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from .conftest import MakeConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CPU = torch.device("cpu")
VOCABULARY = 64
BIASED = SamplingParams(logit_bias={5: 50.0})


@pytest.fixture
def config(make_config: MakeConfig) -> "VllmConfig":
    return make_config()


def update(size: int, removed: tuple[int, ...] = (), added: tuple[Any, ...] = ()) -> BatchUpdate:
    return BatchUpdate(batch_size=size, removed=removed, added=added, moved=())


def test_vllm_ships_three_processors(config: "VllmConfig") -> None:
    """If it ships another: `needs_of` must know which parameter it reads, and prefill must use it."""
    assert set(BUILTIN_LOGITS_PROCESSORS) == {
        LogitBiasLogitsProcessor,
        MinPLogitsProcessor,
        MinTokensLogitsProcessor,
    }
    built = build_logitsprocs(config, CPU, False, False, ())
    assert {type(processor) for processor in built.all} == set(BUILTIN_LOGITS_PROCESSORS)


def test_a_processor_follows_rows_that_are_added_removed_and_left_out(config: "VllmConfig") -> None:
    """If not: biases stay on a row after its request left, or rows must be packed."""
    processor = LogitBiasLogitsProcessor(config, CPU, False)
    processor.update_state(update(3, added=((2, BIASED, [1], []),)))
    assert processor.apply(torch.zeros(3, VOCABULARY))[:, 5].tolist() == [0, 0, 50]
    processor.update_state(None)
    assert processor.apply(torch.zeros(3, VOCABULARY))[:, 5].tolist() == [0, 0, 50]
    processor.update_state(update(3, removed=(2,)))
    assert processor.apply(torch.zeros(3, VOCABULARY))[:, 5].tolist() == [0, 0, 0]


def test_a_row_that_changes_hands_is_only_added(config: "VllmConfig") -> None:
    """vLLM adds before it removes: a row in both lists would forget its new request. If this changes, the row
    may be named in both, as vLLM's own note on the order says."""
    replaced, both = (LogitBiasLogitsProcessor(config, CPU, False) for _ in range(2))
    for processor, removed in ((replaced, ()), (both, (0,))):
        processor.update_state(update(1, added=((0, SamplingParams(logit_bias={9: 1.0}), [1], []),)))
        processor.update_state(update(1, removed=removed, added=((0, BIASED, [1], []),)))
    assert replaced.apply(torch.zeros(1, VOCABULARY))[0, 5] == 50
    assert replaced.apply(torch.zeros(1, VOCABULARY))[0, 9] == 0
    assert both.apply(torch.zeros(1, VOCABULARY))[0, 5] == 0


def test_a_processor_reads_the_list_of_outputs_that_it_was_given(config: "VllmConfig") -> None:
    """If not: min_tokens never ends, since the runner appends to one list and says nothing."""
    processor = MinTokensLogitsProcessor(config, CPU, False)
    output: list[int] = []
    params = SamplingParams(min_tokens=2, stop_token_ids=[3])
    processor.update_state(update(1, added=((0, params, [1], output),)))
    for length, masked in ((0, True), (1, True), (2, False)):
        output[:] = [7] * length
        processor.update_state(None)
        assert bool(torch.isinf(processor.apply(torch.zeros(1, VOCABULARY))[0, 3])) is masked


def metadata(**changes: Any) -> SamplingMetadata:
    rows = 3
    values: dict[str, Any] = {
        "temperature": torch.tensor([0.0, 1.0, 1.0]),
        "all_greedy": False,
        "all_random": False,
        "top_p": None,
        "top_k": torch.tensor([VOCABULARY, 1, VOCABULARY], dtype=torch.int32),
        "generators": {2: torch.Generator().manual_seed(3)},
        "max_num_logprobs": 2,
        "no_penalties": True,
        "prompt_token_ids": None,
        "frequency_penalties": torch.zeros(rows),
        "presence_penalties": torch.zeros(rows),
        "repetition_penalties": torch.ones(rows),
        "output_token_ids": [[], [], []],
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors([]),
        **changes,
    }
    return SamplingMetadata(**values)


def test_the_sampler_runs_on_cpu_tensors_and_draws_each_row_on_its_own() -> None:
    """If not: no request can be sampled on the host, or a seed depends on its neighbours."""
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1))
    together = Sampler()(logits.clone(), metadata())
    assert together.sampled_token_ids.shape == (3, 1)
    assert together.sampled_token_ids[:2, 0].tolist() == logits[:2].argmax(-1).tolist()
    others = torch.cat([torch.randn(2, VOCABULARY), logits[2:]])
    again = Sampler()(others, metadata(generators={2: torch.Generator().manual_seed(3)}))
    assert again.sampled_token_ids[2] == together.sampled_token_ids[2]
    assert together.logprobs_tensors is not None
    assert together.logprobs_tensors.logprobs.shape == (3, 1 + 2)


def test_forbidden_tokens_and_bad_words_bind_their_own_rows() -> None:
    """If not: `sampling_metadata` builds its mask and its lists for the wrong rows."""
    forbidden = torch.zeros(3, VOCABULARY, dtype=torch.bool)
    forbidden[0, 8] = True
    logits = torch.zeros(3, VOCABULARY)
    logits[:, 8] = 9.0
    logits[:, 4] = 5.0
    sampled = Sampler()(
        logits,
        metadata(
            temperature=None,
            all_greedy=True,
            allowed_token_ids_mask=forbidden,
            bad_words_token_ids={1: [[6, 8]]},
            output_token_ids=[[], [6], [6]],
        ),
    )
    assert sampled.sampled_token_ids[:, 0].tolist() == [4, 4, 8]


def test_grammar_masks_hold_32_tokens_in_an_int32_lowest_bit_first() -> None:
    """If not: `_mask_by_grammar` forbids other tokens than the grammar does."""
    import xgrammar

    mask = np.zeros((1, -(-VOCABULARY // 32)), np.int32)
    mask[0, 0], mask[0, 1] = 1 << 3, np.array(1 << 31).astype(np.uint32).view(np.int32)
    assert xgrammar.allocate_token_bitmask(1, VOCABULARY).shape == mask.shape
    logits = torch.zeros(2, VOCABULARY)
    xgrammar.apply_token_bitmask_inplace(
        logits, torch.from_numpy(np.concatenate([np.full_like(mask, -1), mask])), indices=[1]
    )
    assert logits[0].isfinite().all()
    assert logits[1].isfinite().nonzero().flatten().tolist() == [3, 63]

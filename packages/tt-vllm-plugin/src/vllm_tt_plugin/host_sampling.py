"""Sampling on the host, with the answers of vLLM's own ``Sampler`` (``cpu_sampler.py``).

A decode hands over logits of all rows, a prefill only those of its requests. The sampling parameters of the
decode rows are kept as tensors from step to step and rebuilt only when rows change.

Shapes: R rows up to the highest one held, N prefilled requests, V vocabulary.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch
from tt_sampling import is_greedy, step_generator
from vllm.v1.sample.logits_processor import LogitsProcessors

from vllm_tt_plugin.cpu_sampler import CpuSampler, RowMetadata
from vllm_tt_plugin.logits_processors import RowProcessors
from vllm_tt_plugin.requests import RequestState, RequestTable

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.outputs import SamplerOutput


@attrs.frozen
class _Prepared:
    """Sampling parameters of some rows, good as long as the same requests hold them."""

    states: Sequence[RequestState | None]
    metadata: RowMetadata
    seeded: list[tuple[int, RequestState, int]]
    """Entry, request and seed of those that draw at random from a seed of their own."""

    @classmethod
    def of(
        cls, states: Sequence[RequestState | None], vocab: int, processors: LogitsProcessors
    ) -> "_Prepared":
        seeded = [
            (index, state, state.sampling.seed)
            for index, state in enumerate(states)
            if state is not None and state.sampling.seed is not None and not state.needs.params.greedy
        ]
        return cls(states, sampling_metadata(states, vocab, processors), seeded)


class HostSampler:
    """Samples logits of live requests. Owns what vLLM's sampler needs from step to step."""

    def __init__(self, vllm_config: "VllmConfig") -> None:
        model = vllm_config.model_config
        self._vocab = model.get_vocab_size()
        self._sampler = CpuSampler(logprobs_mode=model.logprobs_mode)
        self._processors = RowProcessors(vllm_config)
        self._decode: _Prepared | None = None
        self._decode_changes = -1

    @property
    def has_custom_processors(self) -> bool:
        """Whether every request runs through logits processors of the user's."""
        return self._processors.any_custom

    def sample_decode(
        self, logits: torch.Tensor, requests: RequestTable, grammar: "GrammarOutput | None"
    ) -> "SamplerOutput":
        """Sample logits ``[R, V]``, row by row as ``requests`` hold them; free rows are garbage in and out.

        ``logits`` may be changed in place.
        """
        self._processors.follow(requests)
        if self._decode is None or self._decode_changes != requests.changes:
            self._decode = _Prepared.of(requests.by_row, self._vocab, self._processors.by_row)
            self._decode_changes = requests.changes
        return self._sample(logits, self._decode, grammar)

    def sample_prefill(
        self,
        logits: torch.Tensor,
        states: Sequence[RequestState],
        requests: RequestTable,
        grammar: "GrammarOutput | None",
    ) -> "SamplerOutput":
        """Sample logits ``[N, V]`` of ``states``, which are some of ``requests``."""
        self._processors.follow(requests)
        processors = self._processors.for_some(states, requests)
        return self._sample(logits, _Prepared.of(states, self._vocab, processors), grammar)

    def _sample(
        self, logits: torch.Tensor, prepared: _Prepared, grammar: "GrammarOutput | None"
    ) -> "SamplerOutput":
        # A generator made for the position that is drawn now: the same whatever else is in the batch.
        prepared.metadata.generators = {
            index: step_generator(seed, state.known) for index, state, seed in prepared.seeded
        }
        logits = logits.to(torch.float32)
        if grammar is not None:
            mask_by_grammar(logits, prepared.states, grammar)
        sampled: SamplerOutput = self._sampler(logits, prepared.metadata)
        return sampled


def sampling_metadata(
    states: Sequence[RequestState | None], vocab: int, processors: LogitsProcessors
) -> RowMetadata:
    """vLLM's metadata with entry i for ``states[i]``. An entry of None is greedy if any other is, else
    random, so that a free row never makes the sampler do both."""
    live = {row: state for row, state in enumerate(states) if state is not None}
    limits = {row: _limits(state, vocab) for row, state in live.items() if not state.needs.params.greedy}
    all_greedy, all_random = not limits, len(limits) == len(live)
    penalised = {row: state for row, state in live.items() if state.needs.params.penalised}
    counts = [_logprob_count(state, vocab) for state in live.values()]

    def per_row(value: Any, free: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([free if s is None else value(s.sampling) for s in states], dtype=dtype)

    def temperature(sampling: Any) -> float:
        return 0.0 if is_greedy(sampling.temperature, sampling.top_k) else float(sampling.temperature)

    return RowMetadata(
        temperature=None if all_greedy else per_row(temperature, 1.0 if all_random else 0.0),
        all_greedy=all_greedy,
        all_random=all_random,
        top_p=per_row(lambda s: s.top_p, 1.0) if any(p < 1.0 for _, p in limits.values()) else None,
        top_k=per_row(lambda s: s.top_k if 0 < s.top_k < vocab else vocab, vocab, torch.int32)
        if any(k < vocab for k, _ in limits.values())
        else None,
        generators={},
        max_num_logprobs=max((count for count in counts if count is not None), default=None),
        no_penalties=not penalised,
        prompt_token_ids=None,
        frequency_penalties=per_row(lambda s: s.frequency_penalty, 0.0),
        presence_penalties=per_row(lambda s: s.presence_penalty, 0.0),
        repetition_penalties=per_row(lambda s: s.repetition_penalty, 1.0),
        output_token_ids=[[] if s is None else s.output for s in states],
        allowed_token_ids_mask=None,
        bad_words_token_ids={
            row: state.sampling.bad_words_token_ids
            for row, state in live.items()
            if state.sampling.bad_words_token_ids
        },
        logitsprocs=processors,
        logprob_token_ids={
            row: state.sampling.logprob_token_ids
            for row, state in live.items()
            if state.sampling.logprob_token_ids
        }
        or None,
        limits=limits,
        prompts={row: np.unique(np.array(state.prompt, np.int64)) for row, state in penalised.items()},
        allowed={
            row: state.sampling.allowed_token_ids
            for row, state in live.items()
            if state.sampling.allowed_token_ids
        },
    )


def _limits(state: RequestState, vocab: int) -> tuple[int, float]:
    """Top-k, V where unlimited, and top-p."""
    top_k = state.sampling.top_k
    return (top_k if 0 < top_k < vocab else vocab), state.sampling.top_p


def _logprob_count(state: RequestState, vocab: int) -> int | None:
    wanted = state.sampling.logprobs
    return vocab if wanted == -1 else wanted


def mask_by_grammar(
    logits: torch.Tensor, states: Sequence[RequestState | None], grammar: "GrammarOutput"
) -> None:
    """Forbid what each request's grammar forbids. Masks follow requests, so others stay as they are.

    vLLM packs a mask 32 tokens to an int32, lowest bit first, and orders them by request. This does what
    xgrammar's kernel for CPUs does, without its writing one logit at a time.
    """
    row_of = {state.request_id: row for row, state in enumerate(states) if state is not None}
    values = logits.numpy()
    for request_id, words in zip(grammar.structured_output_request_ids, grammar.grammar_bitmask, strict=True):
        row = row_of.get(request_id)
        if row is not None:
            allowed = np.unpackbits(words.view(np.uint8), bitorder="little", count=values.shape[1])
            np.putmask(values[row], allowed == 0, -np.inf)

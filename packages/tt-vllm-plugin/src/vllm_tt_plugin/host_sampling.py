"""Sampling on the host, with vLLM's own ``Sampler``.

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
from vllm.utils.torch_utils import make_tensor_with_pad
from vllm.v1.sample.logits_processor import (
    BUILTIN_LOGITS_PROCESSORS,
    BatchUpdate,
    LogitsProcessor,
    LogitsProcessors,
    build_logitsprocs,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from vllm_tt_plugin.requests import RequestState

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.outputs import SamplerOutput

_CPU = torch.device("cpu")


class HostSampler:
    """Samples logits of live requests. Owns what vLLM's sampler needs from step to step."""

    def __init__(self, vllm_config: "VllmConfig") -> None:
        model = vllm_config.model_config
        self._config = vllm_config
        self._vocab = model.get_vocab_size()
        self._sampler = Sampler(logprobs_mode=model.logprobs_mode)
        self._row_processors = RowProcessors(
            build_logitsprocs(vllm_config, _CPU, False, False, model.logits_processors or ())
        )
        self._decode_rows: list[RequestState | None] = []
        self._decode_metadata: SamplingMetadata | None = None

    def sample_decode(
        self, logits: torch.Tensor, by_row: list[RequestState | None], grammar: "GrammarOutput | None"
    ) -> "SamplerOutput":
        """Sample logits ``[R, V]`` whose row i belongs to ``by_row[i]``; rows of None are garbage in and out.

        ``logits`` may be changed in place.
        """
        self._row_processors.follow(by_row)
        metadata = self._decode_metadata
        if metadata is None or by_row != self._decode_rows:
            metadata = sampling_metadata(by_row, self._vocab, self._row_processors.processors)
            self._decode_metadata, self._decode_rows = metadata, by_row
        return self._sample(logits, by_row, metadata, grammar)

    def sample_prefill(
        self,
        logits: torch.Tensor,
        states: Sequence[RequestState],
        by_row: list[RequestState | None],
        grammar: "GrammarOutput | None",
    ) -> "SamplerOutput":
        """Sample logits ``[N, V]`` of ``states``, some of the requests in ``by_row`` (all rows, R long)."""
        self._row_processors.follow(by_row)
        processors = self._prefill_processors(states, len(by_row))
        metadata = sampling_metadata(states, self._vocab, processors)
        return self._sample(logits, states, metadata, grammar)

    def _sample(
        self,
        logits: torch.Tensor,
        states: Sequence[RequestState | None],
        metadata: SamplingMetadata,
        grammar: "GrammarOutput | None",
    ) -> "SamplerOutput":
        metadata.generators = _generators(states)
        logits = logits.to(torch.float32)
        if grammar is not None:
            _mask_by_grammar(logits, states, grammar)
        sampled: SamplerOutput = self._sampler(logits, metadata)
        return sampled

    def _prefill_processors(self, states: Sequence[RequestState], rows: int) -> LogitsProcessors:
        """vLLM's own processors afresh for these requests, the user's behind a window on their rows."""
        processors: list[LogitsProcessor] = []
        if any(_uses_builtin(state) for state in states):
            added = [(i, s.sampling, s.prompt, s.output) for i, s in enumerate(states)]
            update = BatchUpdate(batch_size=len(states), removed=(), added=added, moved=())
            for builtin in BUILTIN_LOGITS_PROCESSORS:
                processor = builtin(self._config, _CPU, False)
                processor.update_state(update)
                processors.append(processor)
        held = torch.tensor([state.row for state in states])
        processors += [_RowWindow(custom, held, rows) for custom in self._row_processors.custom()]
        return LogitsProcessors(processors)


class RowProcessors:
    """vLLM's logits processors, which keep state by row, kept in step with who holds which row."""

    def __init__(self, processors: LogitsProcessors) -> None:
        self.processors = processors
        self._followed: list[RequestState | None] = []
        self._admissions: list[object] = []

    def custom(self) -> list[LogitsProcessor]:
        """Those that vLLM does not ship."""
        return [p for p in self.processors.all if type(p) not in BUILTIN_LOGITS_PROCESSORS]

    def follow(self, by_row: list[RequestState | None]) -> None:
        """Tell every processor who left and who came since the last call."""
        admissions: list[object] = [state and state.admission for state in by_row]
        update = None
        if admissions != self._admissions or by_row != self._followed:
            update = self._difference(by_row, admissions)
            self._followed, self._admissions = list(by_row), admissions
        for processor in self.processors.all:
            processor.update_state(update)

    def _difference(self, by_row: list[RequestState | None], admissions: list[object]) -> BatchUpdate:
        removed, added = [], []
        for row in range(max(len(by_row), len(self._followed))):
            before = self._followed[row] if row < len(self._followed) else None
            now = by_row[row] if row < len(by_row) else None
            if before is now and (now is None or self._admissions[row] is admissions[row]):
                continue
            if before is not None:
                removed.append(row)
            if now is not None:
                added.append((row, now.sampling, now.prompt, now.output))
        # vLLM hands removed rows over highest first.
        return BatchUpdate(batch_size=len(by_row), removed=removed[::-1], added=added, moved=())


@attrs.define(slots=False)
class _RowWindow(LogitsProcessor):
    """A processor that speaks of rows, applied to logits ``[N, V]`` of some of them."""

    _inner: LogitsProcessor
    _held: torch.Tensor
    _rows: int

    def is_argmax_invariant(self) -> bool:
        return self._inner.is_argmax_invariant()

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """The inner processor is kept up to date by ``RowProcessors``."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        everyone = logits.new_zeros((self._rows, logits.shape[1]))
        everyone[self._held] = logits
        return self._inner.apply(everyone)[self._held]


def sampling_metadata(
    states: Sequence[RequestState | None], vocab: int, processors: LogitsProcessors
) -> SamplingMetadata:
    """vLLM's metadata with entry i for ``states[i]``. An entry of None is greedy if any other is, else
    random, so that a free row never makes the sampler do both."""
    live = [state for state in states if state is not None]
    greedy = [is_greedy(state.sampling.temperature, state.sampling.top_k) for state in live]
    all_greedy, all_random = all(greedy), not any(greedy)

    def per_row(value: Any, free: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([free if s is None else value(s.sampling) for s in states], dtype=dtype)

    def temperature(sampling: Any) -> float:
        return 0.0 if is_greedy(sampling.temperature, sampling.top_k) else float(sampling.temperature)

    limited_k = any(0 < s.sampling.top_k < vocab for s in live)
    limited_p = any(s.sampling.top_p < 1.0 for s in live)
    penalised = any(s.needs.params.penalised for s in live)
    counts = [_logprob_count(s, vocab) for s in live]
    wanted = [count for count in counts if count is not None]
    return SamplingMetadata(
        temperature=None if all_greedy else per_row(temperature, 1.0 if all_random else 0.0),
        all_greedy=all_greedy,
        all_random=all_random,
        top_p=None if all_greedy or not limited_p else per_row(lambda s: s.top_p, 1.0),
        top_k=None
        if all_greedy or not limited_k
        else per_row(lambda s: s.top_k if 0 < s.top_k < vocab else vocab, vocab, torch.int32),
        generators={},
        max_num_logprobs=max(wanted, default=None),
        no_penalties=not penalised,
        prompt_token_ids=_prompts(states, vocab) if penalised else None,
        frequency_penalties=per_row(lambda s: s.frequency_penalty, 0.0),
        presence_penalties=per_row(lambda s: s.presence_penalty, 0.0),
        repetition_penalties=per_row(lambda s: s.repetition_penalty, 1.0),
        output_token_ids=[[] if s is None else s.output for s in states],
        allowed_token_ids_mask=_forbidden(states, vocab),
        bad_words_token_ids={
            i: s.sampling.bad_words_token_ids
            for i, s in enumerate(states)
            if s is not None and s.sampling.bad_words_token_ids
        },
        logitsprocs=processors,
        logprob_token_ids={
            i: s.sampling.logprob_token_ids
            for i, s in enumerate(states)
            if s is not None and s.sampling.logprob_token_ids
        }
        or None,
    )


def _logprob_count(state: RequestState, vocab: int) -> int | None:
    wanted = state.sampling.logprobs
    return vocab if wanted == -1 else wanted


def _prompts(states: Sequence[RequestState | None], vocab: int) -> torch.Tensor:
    """``[R, longest prompt]`` int64, padded with V, which vLLM's penalties pass over."""
    return make_tensor_with_pad(
        [[] if s is None else s.prompt for s in states], pad=vocab, dtype=torch.int64, device="cpu"
    )


def _forbidden(states: Sequence[RequestState | None], vocab: int) -> torch.Tensor | None:
    """``[R, V]`` bool, true where a request's allowed tokens leave one out; None if nobody limits them."""
    if not any(s is not None and s.sampling.allowed_token_ids for s in states):
        return None
    mask = torch.zeros((len(states), vocab), dtype=torch.bool)
    for index, state in enumerate(states):
        if state is not None and state.sampling.allowed_token_ids:
            mask[index] = True
            mask[index, state.sampling.allowed_token_ids] = False
    return mask


def _generators(states: Sequence[RequestState | None]) -> dict[int, torch.Generator]:
    """A generator for each seeded random request, made for the position it draws now."""
    return {
        index: step_generator(state.sampling.seed, state.known)
        for index, state in enumerate(states)
        if state is not None and state.sampling.seed is not None and not state.needs.params.greedy
    }


def _mask_by_grammar(
    logits: torch.Tensor, states: Sequence[RequestState | None], grammar: "GrammarOutput"
) -> None:
    """Forbid what each request's grammar forbids. Masks follow requests, so others stay as they are.

    vLLM packs a mask 32 tokens to an int32 and orders them by request; the buffer is shared and only good
    until the next step.
    """
    import xgrammar

    order = {request_id: index for index, request_id in enumerate(grammar.structured_output_request_ids)}
    pairs = [
        (row, order[state.request_id])
        for row, state in enumerate(states)
        if state is not None and state.request_id in order
    ]
    if not pairs:
        return
    masks = np.full((len(states), grammar.grammar_bitmask.shape[1]), -1, dtype=np.int32)
    rows, indices = zip(*pairs, strict=True)
    masks[list(rows)] = grammar.grammar_bitmask[list(indices)]
    xgrammar.apply_token_bitmask_inplace(logits, torch.from_numpy(masks), indices=list(rows))


def _uses_builtin(state: RequestState) -> bool:
    sampling = state.sampling
    return bool(sampling.min_p or sampling.logit_bias or sampling.min_tokens)

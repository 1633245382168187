"""Runs step plans: the main path, from a plan to tokens. Read ``TTRunner.execute`` first."""

from typing import TYPE_CHECKING

import attrs
import numpy as np
import torch
from tt_sampling import Phase as SamplingPhase
from tt_sampling import ReloadState, StepFacts, advance
from tt_scheduler import Phase, Standing
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsTensors, ModelRunnerOutput

from vllm_tt_plugin.adapter import Adapter
from vllm_tt_plugin.batch import DecodeBatch, Tokens, prefill_inputs
from vllm_tt_plugin.device_sampling import DeviceSampler
from vllm_tt_plugin.errors import StepError
from vllm_tt_plugin.host_sampling import HostSampler
from vllm_tt_plugin.plan import StepPlan
from vllm_tt_plugin.requests import RequestState, RequestTable

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput


@attrs.frozen
class _Prefill:
    """Requests of a prefill step: those whose prompt it completes get a token, the rest have more chunks."""

    completed: list[RequestState]
    unfinished: list[RequestState]


@attrs.frozen
class _Unsampled:
    """Logits that wait for their grammar masks. ``prefill`` is None for a decode.

    ``logits`` is ``[completed requests, V]`` in a prefill, ``[rows, V]`` in a decode.
    """

    logits: torch.Tensor
    prefill: _Prefill | None


class TTRunner:
    """Holds the rows of one persistent batch and drives one adapter."""

    def __init__(
        self, adapter: Adapter, requests: RequestTable, host: HostSampler, device: DeviceSampler
    ) -> None:
        self._adapter = adapter
        self._requests = requests
        self._host = host
        self._device = device
        self._decodes = DecodeBatch(requests.capacity, adapter.page_table_width)
        self._decodes_on_device = False
        self._reload = ReloadState()
        self._seen_changes = 0
        self._unsampled: _Unsampled | None = None

    def execute(self, plan: StepPlan) -> ModelRunnerOutput | None:
        """Run one step. Returns its output, or None if logits wait for ``sample``."""
        self._requests.apply(plan)
        self._decodes.write_blocks(self._requests.blocks_changed)
        if plan.phase is Phase.PREFILL:
            output = self._prefill(plan)
        elif plan.phase is Phase.DECODE:
            output = self._decode(plan)
        else:
            output = self._idle()
        self._seen_changes = self._requests.changes
        return output

    def sample(self, grammar: "GrammarOutput | None") -> ModelRunnerOutput:
        """Sample the logits of the last step on the host."""
        step, self._unsampled = self._unsampled, None
        if step is None:
            raise StepError("a step is to be sampled, but none waits for it")
        if step.prefill is not None:
            completed = step.prefill.completed
            sampled = self._host.sample_prefill(step.logits, completed, self._requests, grammar)
            tokens = sampled.sampled_token_ids[:, 0].numpy()
            return self._finish_prefill(step.prefill, tokens, sampled.logprobs_tensors)
        sampled = self._host.sample_decode(step.logits, self._requests, grammar)
        tokens = sampled.sampled_token_ids[:, 0].numpy()[self._decodes.rows]
        return self._finish_decode(tokens, _rows_of(sampled.logprobs_tensors, self._decodes.rows))

    def _prefill(self, plan: StepPlan) -> ModelRunnerOutput | None:
        chunks = [(self._requests[name], count) for name, count in plan.num_scheduled_tokens.items()]
        last = [_completes(state, count) for state, count in chunks]
        rows = [index for index, is_last in enumerate(last) if is_last]
        step = _Prefill(
            completed=[chunks[row][0] for row in rows],
            unfinished=[state for (state, _), is_last in zip(chunks, last, strict=True) if not is_last],
        )
        sampling = None
        if self._device.route(step.completed, SamplingPhase.PREFILL).on_device:
            sampling = self._device.for_prefill(
                [state if is_last else None for (state, _), is_last in zip(chunks, last, strict=True)]
            )
        result = self._adapter.prefill(prefill_inputs(chunks, self._adapter.page_table_width), sampling)
        self._reload, _ = advance(self._reload, StepFacts(SamplingPhase.PREFILL))
        for state, count in chunks:
            state.computed += count
        if result.tokens is not None:
            return self._finish_prefill(step, result.tokens.numpy()[rows], None)
        if not rows:
            return self._finish_prefill(step, np.zeros(0, np.int64), None)
        assert result.logits is not None, "a step gives tokens or logits"
        self._unsampled = _Unsampled(result.logits[rows], step)
        return None

    def _decode(self, plan: StepPlan) -> ModelRunnerOutput | None:
        requests, decodes = self._requests, self._decodes
        changed = decodes.follow(plan.num_scheduled_tokens, requests)
        if changed:
            self._decodes_on_device = self._device.route(decodes.states, SamplingPhase.DECODE).on_device
        facts = StepFacts(
            SamplingPhase.DECODE,
            on_device=self._decodes_on_device,
            rows_changed=changed,
            blocks_changed=bool(requests.blocks_changed),
            traced=self._adapter.config.traces_decode,
            async_supported=self._adapter.capabilities.supports_async_decode,
        )
        after, commands = advance(self._reload, facts)
        assert commands is not None, "a decode always has commands"
        rows = self._adapter.decode_rows(len(requests.by_row))
        sampling = self._device.for_decode(requests, rows) if self._decodes_on_device else None
        result = self._adapter.decode(decodes.inputs(rows), sampling, commands)
        self._reload = after
        if result.tokens is not None:
            return self._finish_decode(result.tokens.numpy()[decodes.rows], None)
        assert result.logits is not None, "a step gives tokens or logits"
        self._unsampled = _Unsampled(result.logits[: len(requests.by_row)], None)
        return None

    def _idle(self) -> ModelRunnerOutput:
        changed = self._requests.changes != self._seen_changes
        self._reload, _ = advance(self._reload, StepFacts(None, rows_changed=changed))
        return EMPTY_MODEL_RUNNER_OUTPUT

    def _finish_prefill(
        self, step: _Prefill, tokens: Tokens, logprobs: LogprobsTensors | None
    ) -> ModelRunnerOutput:
        sampled = tokens.tolist()
        for state, token in zip(step.completed, sampled, strict=True):
            state.output.append(token)
        # vLLM finds logprobs by a request's index, so those without a token stand last.
        names = [state.request_id for state in step.completed + step.unfinished]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[token] for token in sampled] + [[] for _ in step.unfinished],
            logprobs=None if logprobs is None else logprobs.tolists(),
        )

    def _finish_decode(self, tokens: Tokens, logprobs: LogprobsTensors | None) -> ModelRunnerOutput:
        decodes = self._decodes
        decodes.advance(tokens)
        sampled = tokens.tolist()
        for state, token in zip(decodes.states, sampled, strict=True):
            state.output.append(token)
            state.computed += 1
        return ModelRunnerOutput(
            req_ids=decodes.names,
            req_id_to_index=decodes.index,
            sampled_token_ids=[[token] for token in sampled],
            logprobs=None if logprobs is None else logprobs.tolists(),
        )


def _rows_of(logprobs: LogprobsTensors | None, rows: list[int]) -> LogprobsTensors | None:
    if logprobs is None:
        return None
    return LogprobsTensors(
        logprobs.logprob_token_ids[rows], logprobs.logprobs[rows], logprobs.selected_token_ranks[rows]
    )


def _completes(state: RequestState, count: int) -> bool:
    """Whether a chunk is its prompt's last. Raises ``StepError`` for a decode in a prefill step."""
    assert state.admission is not None, f"{state.request_id} was never admitted"
    if state.admission.standing(state.computed, count, state.known) is Standing.DECODE:
        raise StepError(f"request {state.request_id!r} decodes, yet stands in a prefill step")
    return state.admission.completes(state.computed, count)

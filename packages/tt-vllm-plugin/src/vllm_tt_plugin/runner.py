"""Runs step plans: the main path, from a plan to tokens. Read ``TTRunner.execute`` first."""

from typing import TYPE_CHECKING

import attrs
import numpy as np
import torch
from tt_sampling import Phase as SamplingPhase
from tt_sampling import ReloadState, StepFacts, advance
from tt_scheduler import Phase, Standing
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsTensors, ModelRunnerOutput

from vllm_tt_plugin.adapter import Adapter, StepResult
from vllm_tt_plugin.batch import DecodeBatch, prefill_inputs
from vllm_tt_plugin.device_sampling import DeviceSampler
from vllm_tt_plugin.errors import StepError
from vllm_tt_plugin.host_sampling import HostSampler
from vllm_tt_plugin.plan import StepPlan
from vllm_tt_plugin.requests import RequestState, RequestTable

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput


@attrs.frozen
class _Unsampled:
    """A step whose logits wait for their grammar masks. Entry i of ``states`` owns ``logits[rows[i]]``."""

    phase: Phase
    states: list[RequestState]
    rows: list[int]
    logits: torch.Tensor
    unfinished: list[RequestState]
    """Requests whose chunk was not their last: they computed, and get no token."""


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
        self._reload = ReloadState()
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
        self._requests.rows_changed = False
        self._requests.blocks_changed.clear()
        return output

    def sample(self, grammar: "GrammarOutput | None") -> ModelRunnerOutput:
        """Sample the logits of the last step on the host."""
        step, self._unsampled = self._unsampled, None
        if step is None:
            raise StepError("a step is to be sampled, but none waits for it")
        by_row = self._requests.by_row[: self._requests.height]
        if step.phase is Phase.PREFILL:
            sampled = self._host.sample_prefill(step.logits, step.states, by_row, grammar)
        else:
            sampled = self._host.sample_decode(step.logits, by_row, grammar)
        tokens = sampled.sampled_token_ids[:, 0].numpy()[step.rows]
        logprobs = sampled.logprobs_tensors
        if logprobs is not None:
            logprobs = LogprobsTensors(
                logprobs.logprob_token_ids[step.rows],
                logprobs.logprobs[step.rows],
                logprobs.selected_token_ranks[step.rows],
            )
        return self._finish(step.phase, step.states, step.unfinished, tokens, logprobs)

    def _prefill(self, plan: StepPlan) -> ModelRunnerOutput | None:
        chunks = [(self._requests[name], count) for name, count in plan.num_scheduled_tokens.items()]
        completing = [_completes(state, count) for state, count in chunks]
        states = [state for (state, _), last in zip(chunks, completing, strict=True) if last]
        unfinished = [state for (state, _), last in zip(chunks, completing, strict=True) if not last]
        rows = [index for index, last in enumerate(completing) if last]
        sampling = None
        if self._device.route(states, SamplingPhase.PREFILL).on_device:
            sampled = (state if last else None for (state, _), last in zip(chunks, completing, strict=True))
            sampling = self._device.for_prefill(list(sampled))
        result = self._adapter.prefill(prefill_inputs(chunks, self._adapter.page_table_width), sampling)
        self._reload, _ = advance(self._reload, StepFacts(SamplingPhase.PREFILL))
        for state, count in chunks:
            state.computed += count
        return self._sampled_or_waiting(Phase.PREFILL, result, states, rows, unfinished)

    def _decode(self, plan: StepPlan) -> ModelRunnerOutput | None:
        states = [self._requests[name] for name in plan.num_scheduled_tokens]
        rows_changed = self._decodes.decode(states, self._requests.rows_changed)
        by_row = self._requests.by_row[: self._requests.height]
        rows = self._adapter.decode_rows(len(by_row))
        on_device = self._device.route(states, SamplingPhase.DECODE).on_device
        facts = StepFacts(
            SamplingPhase.DECODE,
            on_device=on_device,
            rows_changed=rows_changed,
            blocks_changed=bool(self._requests.blocks_changed),
            traced=self._adapter.config.traces_decode,
            async_supported=self._adapter.capabilities.supports_async_decode,
        )
        after, commands = advance(self._reload, facts)
        assert commands is not None, "a decode always has commands"
        sampling = self._device.for_decode(by_row, rows) if on_device else None
        result = self._adapter.decode(self._decodes.inputs(rows), sampling, commands)
        self._reload = after
        for state in states:
            state.computed += 1
        if result.logits is not None:
            result = attrs.evolve(result, logits=result.logits[: len(by_row)])
        return self._sampled_or_waiting(Phase.DECODE, result, states, self._decodes.rows.tolist(), [])

    def _idle(self) -> ModelRunnerOutput:
        facts = StepFacts(None, rows_changed=self._requests.rows_changed)
        self._reload, _ = advance(self._reload, facts)
        return EMPTY_MODEL_RUNNER_OUTPUT

    def _sampled_or_waiting(
        self,
        phase: Phase,
        result: StepResult,
        states: list[RequestState],
        rows: list[int],
        unfinished: list[RequestState],
    ) -> ModelRunnerOutput | None:
        if result.tokens is not None:
            return self._finish(phase, states, unfinished, result.tokens.numpy()[rows], None)
        if not states:
            return self._finish(phase, [], unfinished, np.zeros(0, np.int64), None)
        logits = result.logits
        assert logits is not None, "a step gives tokens or logits"
        if phase is Phase.PREFILL:
            logits, rows = logits[rows], list(range(len(rows)))
        self._unsampled = _Unsampled(phase, states, rows, logits, unfinished)
        return None

    def _finish(
        self,
        phase: Phase,
        states: list[RequestState],
        unfinished: list[RequestState],
        tokens: "np.ndarray[tuple[int], np.dtype[np.int64]]",
        logprobs: LogprobsTensors | None,
    ) -> ModelRunnerOutput:
        if phase is Phase.DECODE:
            self._decodes.advance(tokens)
        sampled = tokens.tolist()
        for state, token in zip(states, sampled, strict=True):
            state.output.append(token)
        # vLLM finds logprobs by a request's index, so those without a token stand last.
        names = [state.request_id for state in states] + [state.request_id for state in unfinished]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[token] for token in sampled] + [[] for _ in unfinished],
            logprobs=logprobs.tolists() if logprobs is not None else None,
        )


def _completes(state: RequestState, count: int) -> bool:
    """Whether a chunk is its prompt's last. Raises ``StepError`` for a decode in a prefill step."""
    assert state.admission is not None, f"{state.request_id} was never admitted"
    if state.admission.standing(state.computed, count, state.known) is Standing.DECODE:
        raise StepError(f"request {state.request_id!r} decodes, yet stands in a prefill step")
    return state.admission.completes(state.computed, count)

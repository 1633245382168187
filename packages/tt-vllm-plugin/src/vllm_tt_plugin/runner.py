"""Runs step plans: the main path, from a plan to tokens. Read ``TTRunner.execute`` first."""

from typing import TYPE_CHECKING

import attrs
import torch
from tt_scheduler import Phase, Standing
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    LogprobsTensors,
    ModelRunnerOutput,
)

from vllm_tt_plugin.adapter import Adapter
from vllm_tt_plugin.batch import DecodeBatch, Decoding, prefill_inputs
from vllm_tt_plugin.device_logprobs import device_logprobs
from vllm_tt_plugin.device_sampling import DeviceSampler
from vllm_tt_plugin.errors import StepError
from vllm_tt_plugin.host_sampling import HostSampler
from vllm_tt_plugin.pending import PendingDecodes
from vllm_tt_plugin.plan import StepPlan
from vllm_tt_plugin.reloads import Reloads
from vllm_tt_plugin.requests import RequestState, RequestTable
from vllm_tt_plugin.step_data import DecodeHandle

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
    """Holds the rows of one persistent batch and drives one adapter.

    With ``overlap``, a decode that the device samples is left under way, and its output is a handle.
    """

    def __init__(
        self,
        adapter: Adapter,
        requests: RequestTable,
        host: HostSampler,
        device: DeviceSampler,
        overlap: bool = False,
    ) -> None:
        self._adapter = adapter
        self._requests = requests
        self._host = host
        self._device = device
        self._overlap = overlap
        self._decodes = DecodeBatch(requests.capacity, adapter.page_tables)
        self._pending = PendingDecodes(self._read_decode)
        self._reloads = Reloads(adapter.config.traces_decode, adapter.capabilities.supports_async_decode)
        self._seen_changes = 0
        self._ran: _Unsampled | ModelRunnerOutput | AsyncModelRunnerOutput | None = None

    def execute(self, plan: StepPlan) -> ModelRunnerOutput | None:
        """Run one step. Returns its output if that is there at once, and else None: ask ``sample`` for it.

        With ``overlap`` vLLM always asks, but for that of an empty step.
        """
        if not self._continues(plan):
            self._pending.drain()
        self._requests.apply(plan)
        self._decodes.write_blocks(self._requests.blocks_changed, self._requests.rows_freed)
        if plan.phase is Phase.EMPTY:
            return self._idle()
        ran = self._prefill(plan) if plan.phase is Phase.PREFILL else self._decode(plan)
        self._seen_changes = self._requests.changes
        if isinstance(ran, ModelRunnerOutput) and not self._overlap:
            return ran
        self._ran = ran
        return None

    def sample(self, grammar: "GrammarOutput | None") -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """The output of the last step; logits that it left are sampled on the host now."""
        step, self._ran = self._ran, None
        if step is None:
            raise StepError("a step is to be sampled, but none waits for it")
        if not isinstance(step, _Unsampled):
            return step
        if step.prefill is not None:
            completed = step.prefill.completed
            sampled = self._host.sample_prefill(step.logits, completed, self._requests, grammar)
            tokens = sampled.sampled_token_ids[:, 0].tolist()
            return self._finish_prefill(step.prefill, tokens, sampled.logprobs_tensors)
        sampled = self._host.sample_decode(step.logits, self._requests, grammar)
        decoding = self._decodes.decoding
        tokens = sampled.sampled_token_ids[:, 0].tolist()
        return _finish_decode(decoding, tokens, _rows_of(sampled.logprobs_tensors, decoding.rows))

    def drain(self) -> None:
        """Wait for all that the device was given."""
        self._pending.drain()

    def _continues(self, plan: StepPlan) -> bool:
        """Whether the requests stay as they are, so that what is under way need not be read first."""
        if plan.moves_requests or plan.phase is Phase.PREFILL:
            return False
        return plan.phase is Phase.EMPTY or list(plan.num_scheduled_tokens) == self._decodes.decoding.names

    def _prefill(self, plan: StepPlan) -> _Unsampled | ModelRunnerOutput:
        chunks = [(self._requests[name], count) for name, count in plan.num_scheduled_tokens.items()]
        last = [_completes(state, count) for state, count in chunks]
        rows = [index for index, is_last in enumerate(last) if is_last]
        step = _Prefill(
            completed=[chunks[row][0] for row in rows],
            unfinished=[state for (state, _), is_last in zip(chunks, last, strict=True) if not is_last],
        )
        sampling = None
        if self._device.samples_prefill(step.completed):
            sampling = self._device.for_prefill(
                [state if is_last else None for (state, _), is_last in zip(chunks, last, strict=True)]
            )
        inputs = prefill_inputs(chunks, self._adapter.page_tables, self._requests.capacity)
        result = self._adapter.prefill(inputs, sampling)
        self._reloads.prefill()
        for state, count in chunks:
            state.computed += count
        if result.rope_deltas is not None:
            for (state, _), delta in zip(chunks, result.rope_deltas, strict=True):
                state.rope_delta = delta
        if result.tokens is not None:
            assert sampling is not None, "the device samples only what it was told to"
            logprobs = device_logprobs(sampling, result, rows)
            tokens = result.tokens.tolist()
            return self._finish_prefill(step, [tokens[row] for row in rows], logprobs)
        if not rows:
            return self._finish_prefill(step, [], None)
        assert result.logits is not None, "a step gives tokens or logits"
        return _Unsampled(result.logits[rows], step)

    def _decode(self, plan: StepPlan) -> _Unsampled | ModelRunnerOutput | AsyncModelRunnerOutput:
        requests, decodes = self._requests, self._decodes
        changed = decodes.follow(plan.num_scheduled_tokens, requests)
        on_device = self._device.samples_decode(decodes.decoding.states, changed)
        commands = self._reloads.decode(on_device, changed, bool(requests.blocks_changed))
        if not commands.steady:
            self._pending.drain()
        rows = self._adapter.decode_rows(len(requests.by_row))
        sampling = self._device.for_decode(requests, rows) if on_device else None
        inputs = decodes.inputs(rows, changed, read=self._adapter.reads_inputs(commands))
        handle = self._adapter.submit_decode(inputs, sampling, commands)
        self._reloads.submitted()
        if sampling is None:
            logits = self._adapter.read_decode(handle).logits
            assert logits is not None, "a decode that the host samples gives logits"
            return _Unsampled(logits[: len(requests.by_row)], None)
        if not self._overlap:
            return self._read_decode(handle, decodes.decoding)
        return self._pending.add(handle, decodes.decoding)

    def _read_decode(self, handle: DecodeHandle, decoding: Decoding) -> ModelRunnerOutput:
        result = self._adapter.read_decode(handle)
        assert result.tokens is not None, "a decode that the device samples gives tokens"
        assert handle.sampling is not None, "only decodes that the device samples are left under way"
        logprobs = device_logprobs(handle.sampling, result, decoding.rows)
        return _finish_decode(decoding, result.tokens.tolist(), logprobs)

    def _idle(self) -> ModelRunnerOutput:
        self._device.metrics.write()
        self._reloads.idle(rows_changed=self._requests.changes != self._seen_changes)
        self._seen_changes = self._requests.changes
        return EMPTY_MODEL_RUNNER_OUTPUT

    def _finish_prefill(
        self, step: _Prefill, tokens: list[int], logprobs: LogprobsTensors | None
    ) -> ModelRunnerOutput:
        for state, token in zip(step.completed, tokens, strict=True):
            state.output.append(token)
        # vLLM finds logprobs by a request's index, so those without a token stand last.
        names = [state.request_id for state in step.completed + step.unfinished]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[token] for token in tokens] + [[] for _ in step.unfinished],
            logprobs=None if logprobs is None else logprobs.tolists(),
        )


def _finish_decode(
    decoding: Decoding, by_row: list[int], logprobs: LogprobsTensors | None
) -> ModelRunnerOutput:
    return ModelRunnerOutput(
        req_ids=decoding.names,
        req_id_to_index=decoding.index,
        sampled_token_ids=[[token] for token in decoding.sampled(by_row)],
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

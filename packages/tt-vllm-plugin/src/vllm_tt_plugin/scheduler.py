"""vLLM's scheduler, made phase-pure: every step is prefill-only, decode-only or empty.

The queues stay whole. Two gates that vLLM has already decide what a call of its ``schedule`` may touch: a
running request is passed over once by ``next_decode_eligible_step``, and ``max_num_active_reqs`` of zero
admits nobody. Hiding queues instead would mislead the watermark, the chunk threshold and the choice of
preemption victims.
"""

import logging
from typing import Any

from tt_scheduler import Interleave, Phase, PhasePolicy, PrefillFirst, RowAccount, Work
from vllm.outputs import RequestError
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_tt_plugin.config import TTConfig
from vllm_tt_plugin.plan import StepPlan

logger = logging.getLogger("vllm.tt_plugin")


class TTScheduler(Scheduler):
    """The scheduler of one lane."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = TTConfig.from_additional_config(self.vllm_config.additional_config)
        can_resume = bool(self.scheduler_config.enable_chunked_prefill)
        self._policy = phase_policy(config, can_resume_prefill=can_resume)
        self._rows = RowAccount(self.max_num_running_reqs)
        self._stalled: tuple[str, int] | None = None
        usable = (self.kv_cache_config.num_blocks - 1) * self.block_size
        if usable < self.max_model_len:
            logger.warning(
                "The KV cache holds %d tokens ((%d blocks - 1) x %d), fewer than max_model_len %d: longer"
                " prompts are refused, and a generation that fills the cache ends with reason 'length'.",
                usable,
                self.kv_cache_config.num_blocks,
                self.block_size,
                self.max_model_len,
            )
            self.max_model_len = usable

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if request.num_prompt_tokens >= self.max_model_len:
            # vLLM ends requests named here with an error in the next step. Left alone, this one would be
            # tried for ever and hold up all behind it.
            self.grammar_compile_error_reqs[request.request_id] = RequestError(
                code="validation_error",
                message=(
                    f"The prompt has {request.num_prompt_tokens} tokens. The KV cache holds"
                    f" {self.max_model_len} ({self.kv_cache_config.num_blocks} blocks of {self.block_size}"
                    " tokens, one block being reserved), and the first generated token needs a place too."
                    " Shorten the prompt, or start the server with a larger cache."
                ),
            )

    def schedule(self, throttle_prefills: bool = False) -> StepPlan:
        """One step. A prefill that can place nothing becomes a decode within the same step."""
        chunks = [request for request in self.running if request.is_prefill_chunk]
        work = self._work(len(chunks))
        phase = self._policy.choose(work)
        if phase is Phase.PREFILL:
            decodes = [request for request in self.running if not request.is_prefill_chunk]
            output = self._schedule_phase(decodes, self.max_num_active_reqs, throttle_prefills)
            if not output.total_num_scheduled_tokens:
                self._stalled = self._stall_key()
                if decodes:
                    phase = Phase.DECODE
                    output = _carry_on(output, self._schedule_phase(chunks, 0, throttle_prefills))
        else:
            output = self._schedule_phase(chunks, 0, throttle_prefills)
        if output.total_num_scheduled_tokens:
            self._policy.ran(phase, work)
        else:
            phase = Phase.EMPTY
        return StepPlan.of(output, phase, self._account_rows(output))

    def _schedule_phase(
        self, passed_over: list[Request], admit_up_to: int, throttle_prefills: bool
    ) -> SchedulerOutput:
        for request in passed_over:
            # schedule() adds one to current_step before it compares, so this holds for exactly one call.
            request.next_decode_eligible_step = self.current_step + 2
        if passed_over or len(self.prev_step_scheduled_req_ids) != len(self.running):
            # The runner knows the tokens of all that run; vLLM need not copy them after each change of phase.
            self.prev_step_scheduled_req_ids = {request.request_id for request in self.running}
        limit, self.max_num_active_reqs = self.max_num_active_reqs, admit_up_to
        try:
            return super().schedule(throttle_prefills)
        finally:
            self.max_num_active_reqs = limit

    def _work(self, chunks: int) -> Work:
        if self.pause_state == PauseState.PAUSED_ALL:
            return Work(decodes=0, chunks=0, admissible=0)
        return Work(decodes=len(self.running) - chunks, chunks=chunks, admissible=self._admissible(chunks))

    def _admissible(self, chunks: int) -> int:
        """1 if a waiting request may start now, else 0; 0 too while the head is known not to fit.

        What is known is that a head did not fit at a number of free blocks: without that, every step would
        try it again.
        """
        if not self.waiting and not self.kv_holding_waiting:
            return 0
        if len(self.running) + self.num_waiting_for_streaming_input >= self.max_num_active_reqs:
            return 0
        stalled = self._stalled is not None and self._stalled == self._stall_key()
        if stalled and self.running and not chunks:
            return 0
        self._stalled = None
        queues = [self.kv_holding_waiting]
        if self.pause_state == PauseState.UNPAUSED:
            queues.append(self.waiting)
        return int(any(_may_start(request) for queue in queues for request in queue))

    def _stall_key(self) -> tuple[str, int] | None:
        queue = self.kv_holding_waiting or self.waiting
        head = next((request for request in queue if _may_start(request)), None)
        if head is None:
            return None
        return head.request_id, self.kv_cache_manager.block_pool.get_num_free_blocks()

    def _account_rows(self, output: SchedulerOutput) -> dict[str, int]:
        """Give back the rows of the finished and the preempted, then give rows to those who start."""
        for request_id in output.finished_req_ids:
            self._rows.release(request_id)
        for request_id in output.preempted_req_ids or ():
            self._rows.release(request_id)
        starting = [data.req_id for data in output.scheduled_new_reqs]
        cached = output.scheduled_cached_reqs
        if cached.resumed_req_ids:
            starting += [name for name in cached.req_ids if name in cached.resumed_req_ids]
        return {request_id: self._rows.take(request_id) for request_id in starting}


def phase_policy(config: TTConfig, can_resume_prefill: bool) -> PhasePolicy:
    """Interleave where a prefill can be cut into chunks and resumed, else prefill first."""
    if can_resume_prefill and config.decode_interleave_enabled:
        return Interleave(config.decode_interleave_prefill_steps, config.decode_interleave_decode_steps)
    return PrefillFirst()


def _may_start(request: Request) -> bool:
    """Whether nothing but memory and rows keeps a waiting request from starting.

    One whose grammar failed to compile counts: vLLM notices the failure only when it comes to admit it.
    """
    if request.num_stale_output_tokens and not request.drop_stale_output:
        return False
    if request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        waiting_for = request.structured_output_request
        return waiting_for is not None and waiting_for.grammar is not None
    return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def _carry_on(tried: SchedulerOutput, output: SchedulerOutput) -> SchedulerOutput:
    """Keep what a call that scheduled nothing had told: vLLM tells it only once."""
    output.finished_req_ids = tried.finished_req_ids | output.finished_req_ids
    output.preempted_req_ids = (tried.preempted_req_ids or set()) | (output.preempted_req_ids or set())
    output.free_encoder_mm_hashes = [*tried.free_encoder_mm_hashes, *output.free_encoder_mm_hashes]
    return output

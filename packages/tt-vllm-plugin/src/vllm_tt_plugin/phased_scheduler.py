"""vLLM's scheduler, made to schedule one phase at a time: prefill-only or decode-only.

The queues stay whole. Two gates that vLLM has already decide what a call of its ``schedule`` may touch: a
running request is passed over once by ``next_decode_eligible_step``, and ``max_num_active_reqs`` of zero
admits nobody. Hiding queues instead would mislead the watermark, the chunk threshold and the choice of
preemption victims.
"""

import math
import time
from typing import Any

from tt_scheduler import Phase, Work, cut, padded
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_tt_plugin.config import TTConfig
from vllm_tt_plugin.images import whole_items
from vllm_tt_plugin.steady_decode import SteadyDecode

SMALLEST_CHUNK = 128
"""TT-Metal's models pad prompts to powers of two from here on."""


class PhasedScheduler(AsyncScheduler):
    """One lane: vLLM's queues and its KV cache manager, scheduled phase by phase by a ``StepDirector``.

    With async scheduling the next step is planned while the last one runs. A block that is given up then may
    go to another at once, although the step under way still uses it: the runner reads what is under way
    before it builds any step that moves a request, and the device runs steps in order.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stalled: tuple[str, int] | None = None
        self._plans_ahead = bool(self.scheduler_config.async_scheduling)
        config = TTConfig.from_additional_config(self.vllm_config.additional_config)
        self._steady = SteadyDecode(self) if config.direct_decode else None
        self.chunk_sizes = chunk_sizes(self.max_num_scheduled_tokens)
        self._watermark = self.kv_cache_manager.watermark_blocks
        self._room: float | None = None
        """Padded tokens that a prefill may still take while it is being scheduled."""

    def work(self) -> Work:
        """What this lane could run now."""
        if self.pause_state == PauseState.PAUSED_ALL:
            return Work(decodes=0, chunks=0, admissible=0)
        chunks = sum([request.is_prefill_chunk for request in self.running])
        complete = sum(map(self.awaits_its_last_token, self.running)) if self._plans_ahead else 0
        decodes = len(self.running) - chunks - complete
        if len(self.requests) == len(self.running):
            return Work(decodes, chunks, admissible=0)  # nobody waits
        # Arrival is told in wall-clock time, by the front end.
        waited_s = time.time() - self.waiting.peek_request().arrival_time if self.waiting else 0.0
        return Work(decodes, chunks, self._admissible(chunks), waited_s=max(0.0, waited_s))

    def schedule_phase(
        self, phase: Phase, most_tokens: int | None = None, throttle_prefills: bool = False
    ) -> SchedulerOutput:
        """vLLM's own scheduling, restricted to ``phase``; EMPTY only hands on what ended since.

        ``most_tokens`` caps the tokens of a prefill, counted as padded, where prompts may be cut into chunks.
        """
        if phase is Phase.DECODE and self._steady is not None:
            steady = self._steady.schedule()
            if steady is not None:
                return steady
        prefill = phase is Phase.PREFILL
        passed_over = [request for request in self.running if request.is_prefill_chunk is not prefill]
        for request in passed_over:
            # schedule() adds one to current_step before it compares, so this holds for exactly one call.
            request.next_decode_eligible_step = self.current_step + 2
        if passed_over or len(self.prev_step_scheduled_req_ids) != len(self.running):
            # The runner knows the tokens of all that run; vLLM need not copy them after each change of phase.
            self.prev_step_scheduled_req_ids = {request.request_id for request in self.running}
        limits = self.max_num_active_reqs, self.max_num_scheduled_tokens
        if prefill:
            self._limit_prefill(most_tokens)
        else:
            self.max_num_active_reqs = 0
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self.max_num_active_reqs, self.max_num_scheduled_tokens = limits
            self.kv_cache_manager.watermark_blocks = self._watermark
            self._room = None
        for data in output.scheduled_new_reqs:
            # vLLM leaves out the pixels of images that it finds in the prefix cache. Adapters are given all
            # images, and the cache may be gone when the request is resumed.
            data.mm_features = self.requests[data.req_id].mm_features
        has_room = most_tokens is None or most_tokens >= self.chunk_sizes[0]
        if prefill and has_room and not output.total_num_scheduled_tokens:
            self._stalled = self._stall_key()
        return output

    def _limit_prefill(self, most_tokens: int | None) -> None:
        """For one call of vLLM's scheduling."""
        if self.scheduler_config.enable_chunked_prefill:
            self._keep_blocks_free()
            self._make_room(most_tokens)

    def _keep_blocks_free(self) -> None:
        """Whoever starts now must leave free what prompts that are partly computed come to need."""
        reserved = self._inflight_prefill_reserved_blocks()
        self.kv_cache_manager.watermark_blocks = self._watermark + reserved

    def _make_room(self, most_tokens: int | None) -> None:
        self._room = math.inf
        if most_tokens is not None:
            if most_tokens >= self.chunk_sizes[0]:
                most_tokens = max(most_tokens, self._longest_image())
            self._room = most_tokens
            self.max_num_scheduled_tokens = max(0, min(most_tokens, self.max_num_scheduled_tokens))
            self._admit_nobody_without_room()

    def _longest_image(self) -> int:
        """Tokens of the longest image of those that prefill next: no chunk cuts it, however small a policy
        wants chunks to be."""
        nexts = [request for request in self.running if request.is_prefill_chunk]
        if self.waiting:
            nexts.append(self.waiting.peek_request())
        lengths = (item.mm_position.length for request in nexts for item in request.mm_features)
        return max(lengths, default=0)

    def _admit_nobody_without_room(self) -> None:
        if self._room is not None and self._room < self.chunk_sizes[0]:
            self.max_num_active_reqs = 0

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """vLLM asks this last how much of a request to schedule: a chunk gets a warmed-up size here."""
        if self._room is None or num_new_tokens < 1:
            return num_new_tokens
        left = request.num_tokens - num_computed_tokens
        chunk = cut(left, num_new_tokens, self._room, self.chunk_sizes)
        if request.has_encoder_inputs:
            chunk = whole_items(request.mm_features, num_computed_tokens, chunk, num_new_tokens)
        self._room -= padded(chunk, self.chunk_sizes)
        if self.scheduler_config.long_prefill_token_threshold:
            self._keep_blocks_free()  # others may have begun in this call
        elif chunk < num_new_tokens:
            self._room = 0  # a prompt is better finished before another is begun
        self._admit_nobody_without_room()
        return chunk

    @property
    def direct_steps(self) -> int:
        """How many decode steps were scheduled without vLLM's full scheduling."""
        return self._steady.steps if self._steady is not None else 0

    def finish_schedule(self, output: SchedulerOutput) -> None:
        """vLLM's own bookkeeping after a step was scheduled."""
        self._update_after_schedule(output)

    def awaits_its_last_token(self, request: Request) -> bool:
        """Whether the step under way gives a request all that it may have: vLLM schedules it no further."""
        placeholders = request.num_output_placeholders
        limit = request.num_prompt_tokens + request.max_tokens
        return placeholders > 0 and request.num_computed_tokens + 2 - placeholders >= limit

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        bookkeeper = AsyncScheduler if self._plans_ahead else Scheduler
        bookkeeper._update_after_schedule(self, scheduler_output)

    def _admissible(self, chunks: int) -> int:
        """1 if a waiting request may start now, else 0; 0 too while the head is known not to fit.

        What is known is that a head did not fit at a number of free blocks: without that, every step would
        try it again.
        """
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


def chunk_sizes(most_tokens: int) -> tuple[int, ...]:
    """Powers of two from ``SMALLEST_CHUNK`` up to ``most_tokens``, or that alone if it is smaller."""
    sizes = []
    size = SMALLEST_CHUNK
    while size <= most_tokens:
        sizes.append(size)
        size *= 2
    return tuple(sizes) or (most_tokens,)

"""The short way through a steady decode.

While nothing changes, each step gives every running request one token, and over half of what vLLM's
scheduler then spends goes into finding out that a token fits into a block that is there already.
``SteadyDecode`` builds the same output directly, and steps aside for anything unusual. It repeats what vLLM
does inside, so a test drives it against vLLM's own scheduling and compares outputs, blocks and the content of
the prefix cache.
"""

from typing import TYPE_CHECKING

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_tt_plugin.phased_scheduler import PhasedScheduler


class SteadyDecode:
    """Schedules decode steps of one lane in which nothing but the last tokens changed."""

    def __init__(self, scheduler: "PhasedScheduler") -> None:
        self._scheduler = scheduler
        self._possible = _is_plain(scheduler)
        self._running: list[Request] = []
        self._names: list[str] = []
        self._counts: dict[str, int] = {}
        self.steps = 0
        """How many steps went the short way."""

    def schedule(self) -> SchedulerOutput | None:
        """One decode step of all that run, or None where vLLM's own scheduling is needed. Nothing has
        changed then."""
        lane = self._scheduler
        running = lane.running
        if (
            not self._possible
            or lane.finished_req_ids
            or lane.reset_preempted_req_ids
            or lane.pause_state == PauseState.PAUSED_ALL
            or not 0 < len(running) <= lane.max_num_scheduled_tokens
        ):
            return None
        found = self._look_at(running)
        if found is None:
            return None
        computed, generated, at_boundary = found
        if running != self._running:
            self._running = list(running)
            self._names = [request.request_id for request in running]
            self._counts = dict.fromkeys(self._names, 1)
        lane.current_step += 1
        lane.num_executed_steps += 1
        lane.kv_cache_manager.new_step_starts()
        new_blocks: list[tuple[list[int], ...] | None] = [None] * len(running)
        for index in at_boundary:
            blocks = lane.kv_cache_manager.allocate_slots(running[index], 1)
            assert blocks is not None, "free blocks were counted before"
            new_blocks[index] = blocks.get_block_ids(allow_none=True)
        if at_boundary:
            lane.kv_cache_manager.take_new_block_ids()
        if not lane.use_v2_model_runner:
            lane.prev_step_scheduled_req_ids = set(self._names)
        output = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=self._names,
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=new_blocks,
                num_computed_tokens=computed,
                num_output_tokens=generated,
            ),
            num_scheduled_tokens=self._counts.copy(),
            total_num_scheduled_tokens=len(running),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            preempted_req_ids=lane.reset_preempted_req_ids,
            finished_req_ids=lane.finished_req_ids,
            free_encoder_mm_hashes=lane.encoder_cache_manager.get_freed_mm_hashes(),
        )
        lane.finish_schedule(output)
        self.steps += 1
        return output

    def _look_at(self, running: "list[Request]") -> tuple[list[int], list[int], list[int]] | None:
        """Of each request the tokens computed and those generated, and the indices of requests that need a
        block, or whose block this token completes: vLLM sees to those.

        None if any request is not steady, or if blocks would run out.
        """
        lane = self._scheduler
        size, longest = lane.block_size, lane.max_model_len - 2
        caching = lane.kv_cache_manager.enable_caching
        positions, generated, at_boundary = [], [], []
        needed = 0
        for index, request in enumerate(running):
            computed = request.num_computed_tokens
            expected = computed + 1
            if (
                computed > longest
                or request.is_prefill_chunk
                or request.num_tokens + request.num_output_placeholders != expected
                or request.mm_features
                or (request.num_output_placeholders and lane.awaits_its_last_token(request))
            ):
                return None
            positions.append(computed)
            generated.append(expected - request.num_prompt_tokens)
            if computed % size == 0:
                at_boundary.append(index)
                needed += 1
            elif caching and expected % size == 0:
                at_boundary.append(index)
        if needed and needed > lane.kv_cache_manager.block_pool.get_num_free_blocks():
            return None
        return positions, generated, at_boundary


def _is_plain(lane: "PhasedScheduler") -> bool:
    """Whether the lane has one full-attention cache and nothing attached that looks into each step."""
    groups = lane.kv_cache_config.kv_cache_groups
    return (
        len(groups) == 1
        and type(groups[0].kv_cache_spec) is FullAttentionSpec
        and lane.connector is None
        and lane.ec_connector is None
        and lane.lora_config is None
        and lane.num_spec_tokens == 0
    )

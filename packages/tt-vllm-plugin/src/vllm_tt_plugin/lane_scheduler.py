"""The scheduler of a server with several lanes: each lane is a whole scheduler, and they share every step."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tt_scheduler import LaneLoad, choose_lane
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.request import Request, RequestStatus

from vllm_tt_plugin.config import TTConfig
from vllm_tt_plugin.lanes import config_of_one_lane, lanes_of
from vllm_tt_plugin.phased_scheduler import PhasedScheduler
from vllm_tt_plugin.plan import LanePlan
from vllm_tt_plugin.shutdown import let_the_engine_end_at_once
from vllm_tt_plugin.step_director import StepDirector, phase_policy

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput


class Lane(PhasedScheduler):
    """One of several. Statistics are made for all lanes together."""

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        return None

    def lane_stats(self) -> SchedulerStats | None:
        return Scheduler.make_stats(self)

    def load(self) -> LaneLoad:
        """What this lane holds and owes; counted when a request arrives, not in every step."""
        pool = self.kv_cache_manager.block_pool
        unfinished = [
            *self.waiting,
            *self.kv_holding_waiting,
            *(r for r in self.running if r.is_prefill_chunk),
        ]
        return LaneLoad(
            queued_prompt_tokens=sum(r.num_tokens - r.num_computed_tokens for r in unfinished),
            running=len(self.running),
            free_blocks=pool.get_num_free_blocks(),
            total_blocks=pool.num_gpu_blocks - 1,
            free_rows=self.max_num_running_reqs - len(self.running),
            block_size=self.block_size,
        )


class TTLaneCoordinator(SchedulerInterface):
    """Routes each request to a lane, where it stays, and runs all lanes under one phase a step."""

    connector = None
    ec_connector = None

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, structured_output_manager: Any, **kwargs: Any
    ) -> None:
        let_the_engine_end_at_once(vllm_config)
        lane_config = config_of_one_lane(vllm_config)
        self.kv_cache_config = kv_cache_config
        self._structured_outputs = structured_output_manager
        self.lanes = [
            Lane(lane_config, kv_cache_config, structured_output_manager, **kwargs)
            for _ in range(lanes_of(vllm_config))
        ]
        self._lane_of: dict[str, Lane] = {}
        config = TTConfig.from_additional_config(vllm_config.additional_config)
        can_resume = bool(vllm_config.scheduler_config.enable_chunked_prefill)
        most_tokens = self.lanes[0].max_num_scheduled_tokens
        policy = phase_policy(config, can_resume, most_tokens, len(self.lanes))
        self._director = StepDirector(policy, lane_config.scheduler_config.max_num_seqs)

    def schedule(self, throttle_prefills: bool = False) -> LanePlan:
        """One step of all lanes, merged."""
        step = self._director.step(self.lanes, throttle_prefills)
        plan = LanePlan.merged(step.outputs, step.phase, step.rows, step.moves_requests)
        for request_id in plan.finished_req_ids:
            self._lane_of.pop(request_id, None)
        return plan

    def add_request(self, request: Request) -> None:
        lane = self._lane_of.get(request.request_id)
        if lane is None or not lane.has_request(request.request_id):
            loads = [lane.load() for lane in self.lanes]
            lane = self.lanes[choose_lane(loads, request.num_prompt_tokens)]
            self._lane_of[request.request_id] = lane
        lane.add_request(request)

    def update_from_output(
        self, scheduler_output: "SchedulerOutput", model_runner_output: "ModelRunnerOutput"
    ) -> dict[int, EngineCoreOutputs]:
        """Every lane finds its requests in the one output by their ids."""
        assert isinstance(scheduler_output, LanePlan), "this coordinator plans its own steps"
        self._director.finished(scheduler_output.phase)
        merged: dict[int, EngineCoreOutputs] = {}
        for lane, lane_output in zip(self.lanes, scheduler_output.lane_outputs, strict=True):
            for client, outputs in lane.update_from_output(lane_output, model_runner_output).items():
                if client in merged:
                    _add_outputs(merged[client], outputs)
                else:
                    merged[client] = outputs
        stats = self.make_stats()
        if stats is not None:
            first = next(iter(merged.values()), None)
            if first is None:
                merged[0] = first = EngineCoreOutputs()
            first.scheduler_stats = stats
        return merged

    def get_grammar_bitmask(self, scheduler_output: "SchedulerOutput") -> GrammarOutput | None:
        """One bitmask over the requests of all lanes: vLLM makes it in one shared buffer."""
        if not scheduler_output.has_structured_output_requests:
            return None
        requests = {name: request for lane in self.lanes for name, request in lane.requests.items()}
        names = [
            name
            for name in scheduler_output.num_scheduled_tokens
            if (request := requests.get(name)) is not None
            and request.use_structured_output
            and not request.is_prefill_chunk
        ]
        if not names:
            return None
        return GrammarOutput(names, self._structured_outputs.grammar_bitmask(requests, names, {}))

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        ids = (request_ids,) if isinstance(request_ids, str) else request_ids
        names = None if ids is None else list(ids)
        return [request for lane in self.lanes for request in lane.finish_requests(names, finished_status)]

    def make_stats(self) -> SchedulerStats | None:
        """Counts summed over lanes, the cache's fill averaged."""
        if not self.lanes[0].log_stats:
            return None
        stats = [lane_stats for lane in self.lanes if (lane_stats := lane.lane_stats()) is not None]
        prefix = PrefixCacheStats()
        for lane_stats in stats:
            _add_prefix_stats(prefix, lane_stats.prefix_cache_stats)
        return SchedulerStats(
            num_running_reqs=sum(s.num_running_reqs for s in stats),
            num_waiting_reqs=sum(s.num_waiting_reqs for s in stats),
            num_skipped_waiting_reqs=sum(s.num_skipped_waiting_reqs for s in stats),
            kv_cache_usage=sum(s.kv_cache_usage for s in stats) / len(stats),
            prefix_cache_stats=prefix,
            kv_cache_eviction_events=[event for s in stats for event in s.kv_cache_eviction_events],
        )

    def has_request(self, request_id: str) -> bool:
        return any(lane.has_request(request_id) for lane in self.lanes)

    def get_request_counts(self) -> tuple[int, int]:
        counts = [lane.get_request_counts() for lane in self.lanes]
        return sum(running for running, _ in counts), sum(waiting for _, waiting in counts)

    def has_requests(self) -> bool:
        return any(lane.has_requests() for lane in self.lanes)

    def get_num_unfinished_requests(self) -> int:
        return sum(lane.get_num_unfinished_requests() for lane in self.lanes)

    def has_finished_requests(self) -> bool:
        return any(lane.has_finished_requests() for lane in self.lanes)

    def get_kv_cache_usage(self) -> float:
        return sum(lane.get_kv_cache_usage() for lane in self.lanes) / len(self.lanes)

    @property
    def pause_state(self) -> PauseState:
        return self.lanes[0].pause_state

    def set_pause_state(self, pause_state: PauseState) -> None:
        for lane in self.lanes:
            lane.set_pause_state(pause_state)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        done = [lane.reset_prefix_cache(reset_running_requests, reset_connector) for lane in self.lanes]
        return all(done)

    def reset_encoder_cache(self) -> None:
        for lane in self.lanes:
            lane.reset_encoder_cache()

    def update_draft_token_ids(self, draft_token_ids: "DraftTokenIds") -> None:
        raise NotImplementedError("speculative decoding is refused at start-up")

    def update_draft_token_ids_in_output(
        self, draft_token_ids: "DraftTokenIds", scheduler_output: "SchedulerOutput"
    ) -> None:
        raise NotImplementedError("speculative decoding is refused at start-up")

    def shutdown(self) -> None:
        for lane in self.lanes:
            lane.shutdown()


def _add_outputs(into: EngineCoreOutputs, more: EngineCoreOutputs) -> None:
    into.outputs.extend(more.outputs)
    if more.finished_requests:
        into.finished_requests = (into.finished_requests or set()) | more.finished_requests


def _add_prefix_stats(into: PrefixCacheStats, more: PrefixCacheStats) -> None:
    into.reset = into.reset or more.reset
    for name in ("requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits"):
        setattr(into, name, getattr(into, name) + getattr(more, name))

"""The scheduler of a server with one lane. Read ``step_director.py`` for how a step is made."""

from typing import TYPE_CHECKING, Any

from vllm.v1.engine import EngineCoreOutputs

from vllm_tt_plugin.config import TTConfig
from vllm_tt_plugin.phased_scheduler import PhasedScheduler
from vllm_tt_plugin.plan import StepPlan
from vllm_tt_plugin.shutdown import let_the_engine_end_at_once
from vllm_tt_plugin.step_director import StepDirector, phase_policy

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput


class TTScheduler(PhasedScheduler):
    """vLLM's scheduler under one phase a step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        let_the_engine_end_at_once(self.vllm_config)
        config = TTConfig.from_additional_config(self.vllm_config.additional_config)
        can_resume = bool(self.scheduler_config.enable_chunked_prefill)
        policy = phase_policy(config, can_resume, most_tokens=self.max_num_scheduled_tokens)
        self._director = StepDirector(policy, rows_per_lane=self.max_num_running_reqs)

    def schedule(self, throttle_prefills: bool = False) -> StepPlan:
        """One step: prefill-only, decode-only or empty."""
        step = self._director.step([self], throttle_prefills)
        return StepPlan.of(step.outputs[0], step.phase, step.rows)

    def update_from_output(
        self, scheduler_output: "SchedulerOutput", model_runner_output: "ModelRunnerOutput"
    ) -> dict[int, EngineCoreOutputs]:
        assert isinstance(scheduler_output, StepPlan), "this scheduler plans its own steps"
        self._director.finished(scheduler_output.phase)
        return super().update_from_output(scheduler_output, model_runner_output)

"""What crosses from the scheduler to the runner in each step."""

from dataclasses import dataclass, field
from typing import Any, Self

from tt_scheduler import Phase
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput


@dataclass
class StepPlan(SchedulerOutput):
    """vLLM's scheduler output, with the phase said out loud and the rows that requests were given.

    The phase cannot be told from the counts: a last chunk can be a single token. ``rows`` names only requests
    that got their row in this step; finished and preempted requests give theirs back before. It is a stdlib
    dataclass because vLLM's is, and vLLM reads fields of it.
    """

    phase: Phase = Phase.EMPTY
    rows: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, output: SchedulerOutput, phase: Phase, rows: dict[str, int]) -> Self:
        """``output`` with a phase and rows. Takes over its fields as they are: this runs in every step."""
        plan = cls.__new__(cls)
        vars(plan).update(vars(output), phase=phase, rows=rows)
        return plan

    @property
    def moves_requests(self) -> bool:
        """Whether a request starts, ends, is preempted or resumed in this step."""
        return moves_requests(self)

    def anon_repr(self) -> str:
        """What vLLM writes into a crash report: no tokens."""
        return (
            f"{type(self).__name__}(phase={self.phase.value}, rows={self.rows},"
            f" num_scheduled_tokens={self.num_scheduled_tokens},"
            f" new={[data.anon_repr() for data in self.scheduled_new_reqs]},"
            f" cached={self.scheduled_cached_reqs.anon_repr()}, finished={self.finished_req_ids},"
            f" preempted={self.preempted_req_ids})"
        )


def moves_requests(output: SchedulerOutput) -> bool:
    """Whether a request starts, ends, is preempted or resumed in a step."""
    return bool(
        output.scheduled_new_reqs
        or output.finished_req_ids
        or output.preempted_req_ids
        or output.scheduled_cached_reqs.resumed_req_ids
    )


@dataclass
class LanePlan(StepPlan):
    """The step of all lanes: merged for the runner, and lane by lane for those who planned it."""

    lane_outputs: tuple[SchedulerOutput, ...] = ()

    @classmethod
    def merged(
        cls, outputs: tuple[SchedulerOutput, ...], phase: Phase, rows: dict[str, int], moves_requests: bool
    ) -> "LanePlan":
        """Join what the lanes scheduled. Request ids are unique over lanes; block ids are not.

        While no request moves, what tells of moves is as empty in one lane's output as in all.
        """
        plan = cls.__new__(cls)
        cached = CachedRequestData.make_empty()
        counts: dict[str, int] = {}
        for output in outputs:
            _add_requests(cached, output.scheduled_cached_reqs)
            counts |= output.num_scheduled_tokens
        vars(plan).update(
            vars(outputs[0]),
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum([output.total_num_scheduled_tokens for output in outputs]),
            phase=phase,
            rows=rows,
            lane_outputs=outputs,
        )
        for output in outputs[1:]:
            plan.has_structured_output_requests |= output.has_structured_output_requests
            plan.pending_structured_output_tokens |= output.pending_structured_output_tokens
            if inputs := output.scheduled_encoder_inputs:
                plan.scheduled_encoder_inputs = plan.scheduled_encoder_inputs | inputs
            if hashes := output.free_encoder_mm_hashes:
                plan.free_encoder_mm_hashes = plan.free_encoder_mm_hashes + hashes
        if moves_requests:
            plan.scheduled_new_reqs = [new for output in outputs for new in output.scheduled_new_reqs]
            plan.finished_req_ids = set().union(*[output.finished_req_ids for output in outputs])
            plan.preempted_req_ids = set().union(*[output.preempted_req_ids or () for output in outputs])
        return plan

    def __getstate__(self) -> dict[str, Any]:
        """The runner of another process needs the merged plan alone."""
        return {**vars(self), "lane_outputs": ()}


def _add_requests(whole: CachedRequestData, part: CachedRequestData) -> None:
    whole.req_ids += part.req_ids
    whole.new_block_ids += part.new_block_ids
    whole.num_computed_tokens += part.num_computed_tokens
    whole.num_output_tokens += part.num_output_tokens
    if part.resumed_req_ids:
        whole.resumed_req_ids |= part.resumed_req_ids
    if part.new_token_ids:
        whole.new_token_ids += part.new_token_ids
    if part.all_token_ids:
        whole.all_token_ids |= part.all_token_ids

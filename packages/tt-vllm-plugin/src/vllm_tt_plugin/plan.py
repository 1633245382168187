"""What crosses from the scheduler to the runner in each step."""

from dataclasses import dataclass, field

from tt_scheduler import Phase
from vllm.v1.core.sched.output import SchedulerOutput


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
    def of(cls, output: SchedulerOutput, phase: Phase, rows: dict[str, int]) -> "StepPlan":
        """``output`` with a phase and rows. Takes over its fields as they are: this runs in every step."""
        plan = cls.__new__(cls)
        vars(plan).update(vars(output), phase=phase, rows=rows)
        return plan

    def anon_repr(self) -> str:
        """What vLLM writes into a crash report: no tokens."""
        return (
            f"StepPlan(phase={self.phase.value}, rows={self.rows},"
            f" num_scheduled_tokens={self.num_scheduled_tokens},"
            f" new={[data.anon_repr() for data in self.scheduled_new_reqs]},"
            f" cached={self.scheduled_cached_reqs.anon_repr()}, finished={self.finished_req_ids},"
            f" preempted={self.preempted_req_ids})"
        )

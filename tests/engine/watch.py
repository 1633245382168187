"""Keeps books of its own on the steps that a scheduler plans, and fails where they contradict a plan."""

import attrs
from tt_scheduler import Phase
from vllm_tt_plugin.plan import StepPlan


@attrs.define
class _Standing:
    to_prefill: int
    computed: int


@attrs.define
class PlanWatch:
    """What was planned so far. Request ids are those of the engine core."""

    plans: list[StepPlan] = attrs.field(factory=list)
    preemptions: int = 0
    owners: dict[int, str] = attrs.field(factory=dict)
    """Row to request."""
    _lengths: dict[str, int] = attrs.field(factory=dict)
    _standing: dict[str, _Standing] = attrs.field(factory=dict)

    @property
    def phases(self) -> list[Phase]:
        return [plan.phase for plan in self.plans]

    def see(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        for request_id in plan.finished_req_ids | (plan.preempted_req_ids or set()):
            self.owners = {row: owner for row, owner in self.owners.items() if owner != request_id}
            self._standing.pop(request_id, None)
        self.preemptions += len(plan.preempted_req_ids or ())
        admitted = self._admitted(plan)
        assert plan.rows.keys() == admitted.keys(), "rows go to those who start, and to nobody else"
        for request_id, row in plan.rows.items():
            assert row not in self.owners, f"row {row} belongs to {self.owners[row]}"
            self.owners[row] = request_id
        self._standing |= admitted
        kinds = {self._advance(name, count) for name, count in plan.num_scheduled_tokens.items()}
        assert kinds == ({plan.phase} - {Phase.EMPTY}), f"a step of {plan.phase} holds {kinds}"

    def _admitted(self, plan: StepPlan) -> dict[str, _Standing]:
        """Who starts or comes back, and how many tokens it must compute before it decodes."""
        admitted = {}
        for data in plan.scheduled_new_reqs:
            tokens = data.prefill_token_ids or data.prompt_token_ids or []
            self._lengths[data.req_id] = len(data.prompt_token_ids or [])
            admitted[data.req_id] = _Standing(len(tokens), data.num_computed_tokens)
        cached = plan.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            if request_id in cached.resumed_req_ids:
                tokens_known = self._lengths[request_id] + cached.num_output_tokens[index]
                admitted[request_id] = _Standing(tokens_known, cached.num_computed_tokens[index])
        return admitted

    def _advance(self, request_id: str, count: int) -> Phase:
        assert request_id in self.owners.values(), f"{request_id} runs without a row"
        standing = self._standing[request_id]
        phase = Phase.PREFILL if standing.computed < standing.to_prefill else Phase.DECODE
        assert count == 1 or phase is Phase.PREFILL, f"{request_id} decodes {count} tokens in a step"
        standing.computed += count
        return phase

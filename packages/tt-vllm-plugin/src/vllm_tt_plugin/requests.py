"""What the runner knows of each request, and how a step plan changes it.

Both of vLLM's wire forms are read. In the V1 form a resumed request comes as cached data, in the V2 form as
new data with ``prefill_token_ids``; either way a request that is known already is being resumed.
"""

from typing import TYPE_CHECKING

import attrs
from tt_sampling import Reason, RowNeeds, RowParams
from tt_sampling.wire import NO_LOGPROBS
from tt_scheduler import Admission, RowAccount

from vllm_tt_plugin.errors import StepError
from vllm_tt_plugin.images import Image
from vllm_tt_plugin.plan import StepPlan

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData


@attrs.define(eq=False)
class RequestState:
    """One request, from its first step to its end; a preempted one keeps all but its row and blocks."""

    request_id: str
    prompt: list[int]
    sampling: "SamplingParams"
    needs: RowNeeds
    output: list[int] = attrs.field(factory=list)
    """Generated tokens. The list object stays the same: logits processors hold on to it."""
    blocks: tuple[list[int], ...] = ()
    """Its blocks in each KV cache group, by position; none while it holds no row."""
    computed: int = 0
    """Tokens of its prompt, or of its replay, that are in the cache once the prefills so far have run."""
    images: tuple[Image, ...] = ()
    """In the order of the prompt. They are kept: a request that is resumed computes them again."""
    rope_delta: int = 0
    """How far its RoPE positions are off the places of its tokens, behind its images."""
    admission: Admission | None = None
    row: int | None = None
    blockers: dict[str, tuple[Reason, ...]] = attrs.field(factory=dict)
    """What keeps it off the device, by phase; filled in by the sampling route."""

    @property
    def known(self) -> int:
        return len(self.prompt) + len(self.output)

    def tokens(self, end: int) -> list[int]:
        """The first ``end`` tokens, prompt and generated."""
        if end <= len(self.prompt):
            return self.prompt[:end]
        return self.prompt + self.output[: end - len(self.prompt)]


@attrs.define
class RequestTable:
    """All unfinished requests that ever had a row, and the rows they hold now."""

    capacity: int
    groups: int = 1
    """KV cache groups, each with block lists of its own."""
    changes: int = attrs.field(default=0, init=False)
    """Counts rows taken and released: two equal counts mean that the same requests hold the same rows."""
    by_row: list[RequestState | None] = attrs.field(factory=list, init=False)
    """The request on each row up to the highest one held, None where a row is free. A new list after each
    change, so that whoever kept the old one still sees what was."""
    blocks_changed: list[RequestState] = attrs.field(factory=list, init=False)
    """Requests whose block list the last plan changed."""
    rows_freed: list[int] = attrs.field(factory=list, init=False)
    """Rows that the last plan took from a request; another may have got them at once."""
    _states: dict[str, RequestState] = attrs.field(factory=dict, init=False)
    _rows: RowAccount = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._rows = RowAccount(self.capacity)

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, request_id: str) -> RequestState:
        try:
            return self._states[request_id]
        except KeyError:
            raise StepError(f"the step names request {request_id!r}, which the runner never saw") from None

    def apply(self, plan: StepPlan) -> None:
        """Follow a plan: give rows back, then take new ones, then note blocks.

        Raises ``StepError`` or ``tt_scheduler.RowError`` if plan and table disagree.
        """
        before = self.changes
        self.blocks_changed = []
        self.rows_freed = []
        for request_id in plan.finished_req_ids:
            self._release(request_id)
            self._states.pop(request_id, None)
        for request_id in plan.preempted_req_ids or ():
            self._release(request_id)
        for data in plan.scheduled_new_reqs:
            self._admit_new(data, plan.rows)
        self._follow_cached(plan)
        if self.changes != before:
            self._arrange_rows()

    def _follow_cached(self, plan: StepPlan) -> None:
        cached = plan.scheduled_cached_reqs
        for index, new_blocks in enumerate(cached.new_block_ids):
            if new_blocks is None:
                continue
            state = self[cached.req_ids[index]]
            if state.request_id in cached.resumed_req_ids:
                # Tokens that were in flight at the preemption may have been dropped since.
                del state.output[cached.num_output_tokens[index] :]
                self._admit(state, new_blocks, cached.num_computed_tokens[index], plan.rows)
            else:
                for blocks, new in zip(state.blocks, self._by_group(new_blocks), strict=True):
                    blocks.extend(new)
                self.blocks_changed.append(state)

    def _admit_new(self, data: "NewRequestData", rows: dict[str, int]) -> None:
        prompt = data.prompt_token_ids
        if prompt is None or data.sampling_params is None:
            raise StepError(f"request {data.req_id!r} has no prompt tokens or no sampling parameters")
        state = self._states.get(data.req_id)
        if state is None:
            needs = needs_of(data.sampling_params)
            images = tuple(Image.of(feature) for feature in data.mm_features)
            state = RequestState(data.req_id, prompt, data.sampling_params, needs, images=images)
            self._states[data.req_id] = state
        if data.prefill_token_ids is not None:
            state.output[:] = data.prefill_token_ids[len(prompt) :]
        self._admit(state, data.block_ids, data.num_computed_tokens, rows)

    def _admit(
        self, state: RequestState, blocks: tuple[list[int], ...], computed: int, rows: dict[str, int]
    ) -> None:
        if state.request_id not in rows:
            raise StepError(f"request {state.request_id!r} is admitted without a row")
        row = rows[state.request_id]
        self._rows.claim(state.request_id, row)
        state.row = row
        state.blocks = tuple(list(group) for group in self._by_group(blocks))
        state.computed = computed
        state.admission = Admission(known=state.known, generated=len(state.output), cached=computed)
        self.changes += 1
        self.blocks_changed.append(state)

    def _by_group(self, blocks: tuple[list[int], ...]) -> tuple[list[int], ...]:
        if len(blocks) != self.groups:
            raise StepError(f"blocks of {len(blocks)} KV cache groups came; {self.groups} were allocated")
        return blocks

    def _release(self, request_id: str) -> None:
        row = self._rows.release(request_id)
        if row is None:
            return
        self.rows_freed.append(row)
        state = self._states[request_id]
        state.row = None
        state.blocks = ()
        self.changes += 1

    def _arrange_rows(self) -> None:
        owned = self._rows.owned
        self.by_row = [None] * (max(owned.values(), default=-1) + 1)
        for request_id, row in owned.items():
            self.by_row[row] = self._states[request_id]


def needs_of(sampling: "SamplingParams") -> RowNeeds:
    """What a request needs of its sampler, in the terms of ``tt_sampling``."""
    return RowNeeds(
        params=RowParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            seed=sampling.seed,
            num_logprobs=NO_LOGPROBS if sampling.logprobs is None else sampling.logprobs,
        ),
        grammar=sampling.structured_outputs is not None,
        logit_bias=bool(sampling.logit_bias),
        allowed_tokens=bool(sampling.allowed_token_ids),
        bad_words=bool(sampling.bad_words_token_ids),
        min_tokens=sampling.min_tokens > 0,
        stateful_processors=bool(sampling.extra_args) or bool(sampling.logprob_token_ids),
    )

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tt_sampling.wire import NO_LOGPROBS
from tt_scheduler import Phase, RowError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm_tt_plugin.errors import StepError
from vllm_tt_plugin.requests import RequestTable, needs_of

from .plans import Planner, Told, greedy

WIRE_FORMS = pytest.mark.parametrize("v2", [False, True], ids=["V1", "V2"])


def told(name: str, length: int = 6) -> Told:
    return Told(name, [100 + number for number in range(length)], greedy())


def agree(table: RequestTable, requests: list[Told]) -> None:
    """All that the table says, against what the planner knows."""
    held = {request.row: request for request in requests if request.row is not None}
    assert len(table.by_row) == max(held, default=-1) + 1
    for row, state in enumerate(table.by_row):
        assert (state and state.request_id) == (held[row].name if row in held else None)
    for request in requests:
        if request.seen:
            state = table[request.name]
            assert (state.row, state.blocks) == (request.row, request.blocks)
            assert state.tokens(len(request.tokens)) == request.tokens
            assert state.known == len(request.tokens)


def sampled(table: RequestTable, request: Told, count: int) -> None:
    """What a runner does after a step: move the cursor on, note the token."""
    state = table[request.name]
    state.computed += count
    assert state.computed == request.computed
    if not request.missing:
        state.output.append(7)
        request.output.append(7)


@WIRE_FORMS
def test_new_chunk_decode_and_finish(v2: bool) -> None:
    table, planner, request = RequestTable(4), Planner(4, 20, v2), told("a", 10)
    table.apply(planner.step(Phase.PREFILL, [(request, 4)]))
    agree(table, [request])
    assert table.blocks_changed == [table["a"]]
    sampled(table, request, 4)
    table.apply(planner.step(Phase.PREFILL, [(request, 6)]))
    assert [len(blocks) for blocks in table["a"].blocks] == [3]
    agree(table, [request])
    sampled(table, request, 6)
    table.apply(planner.step(Phase.DECODE, [(request, 1)]))
    agree(table, [request])
    assert table["a"].admission is not None
    assert (table["a"].admission.known, table["a"].admission.generated) == (10, 0)
    planner.finish(request)
    table.apply(planner.step(Phase.EMPTY, []))
    assert (len(table), table.by_row) == (0, [])
    with pytest.raises(StepError, match="'a', which the runner never saw"):
        table["a"]


@WIRE_FORMS
def test_a_resumed_request_replays_what_it_generated(v2: bool) -> None:
    table, planner, request = RequestTable(2), Planner(2, 20, v2), told("a", 5)
    table.apply(planner.step(Phase.PREFILL, [(request, 5)]))
    sampled(table, request, 5)
    output = table["a"].output
    planner.preempt(request)
    table.apply(planner.step(Phase.EMPTY, []))
    agree(table, [request])
    table.apply(planner.step(Phase.PREFILL, [(request, 3)], hit=2))
    agree(table, [request])
    state = table["a"]
    assert state.output is output, "logits processors hold on to the list"
    assert state.admission is not None
    assert (state.admission.known, state.admission.generated, state.admission.cached) == (6, 1, 2)


@WIRE_FORMS
def test_tokens_dropped_since_the_preemption_are_forgotten(v2: bool) -> None:
    table, planner, request = RequestTable(2), Planner(2, 20, v2), told("a", 5)
    table.apply(planner.step(Phase.PREFILL, [(request, 5)]))
    sampled(table, request, 5)
    table["a"].output.append(99)
    planner.preempt(request)
    table.apply(planner.step(Phase.PREFILL, [(request, 6)]))
    agree(table, [request])


@WIRE_FORMS
def test_preempted_and_resumed_in_one_step(v2: bool) -> None:
    table, planner = RequestTable(2), Planner(2, 20, v2)
    a, b = told("a", 5), told("b", 5)
    table.apply(planner.step(Phase.PREFILL, [(a, 5), (b, 5)]))
    sampled(table, a, 5)
    sampled(table, b, 5)
    changes, rows = table.changes, table.by_row
    planner.preempt(a)
    planner.preempt(b)
    table.apply(planner.step(Phase.PREFILL, [(b, 6), (a, 6)]))
    assert (table["b"].row, table["a"].row) == (0, 1)
    assert table.changes > changes
    assert [state and state.request_id for state in rows] == ["a", "b"], "the old list still says what was"
    agree(table, [a, b])


def test_steps_that_move_nobody_change_nothing() -> None:
    table, planner, request = RequestTable(2), Planner(2, 20), told("a", 4)
    table.apply(planner.step(Phase.PREFILL, [(request, 4)]))
    sampled(table, request, 4)
    changes, rows = table.changes, table.by_row
    for expected in ([table["a"]], [], [], [], [table["a"]]):
        table.apply(planner.step(Phase.DECODE, [(request, 1)]))
        assert table.blocks_changed == expected
        sampled(table, request, 1)
    planner.finished.add("stranger")
    table.apply(planner.step(Phase.EMPTY, []))
    assert table.changes == changes
    assert table.by_row is rows


@WIRE_FORMS
def test_finished_and_preempted_without_ever_a_row(v2: bool) -> None:
    table, planner, request = RequestTable(1), Planner(1, 20, v2), told("a")
    planner.finished.add("gone")
    planner.preempted.add("waiting")
    table.apply(planner.step(Phase.PREFILL, [(request, 6)]))
    agree(table, [request])


def test_a_name_used_again_starts_afresh() -> None:
    table, planner, old = RequestTable(1), Planner(1, 20), told("a", 3)
    table.apply(planner.step(Phase.PREFILL, [(old, 3)]))
    sampled(table, old, 3)
    planner.finish(old)
    new = told("a", 8)
    table.apply(planner.step(Phase.PREFILL, [(new, 8)]))
    agree(table, [new])


def test_a_plan_that_contradicts_the_table_is_refused() -> None:
    planner, request = Planner(2, 20), told("a")
    plan = planner.step(Phase.PREFILL, [(request, 6)])
    plan.rows.clear()
    with pytest.raises(StepError, match="without a row"):
        RequestTable(2).apply(plan)
    plan.rows["a"] = 2
    with pytest.raises(RowError, match="row 2"):
        RequestTable(2).apply(plan)
    plan.scheduled_new_reqs[0].block_ids = ([1], [2])
    plan.rows["a"] = 0
    with pytest.raises(StepError, match="2 KV cache groups came; 1 were allocated"):
        RequestTable(2).apply(plan)
    plan.scheduled_new_reqs[0].prompt_token_ids = None
    with pytest.raises(StepError, match="no prompt tokens"):
        RequestTable(2).apply(plan)
    decode = planner.step(Phase.DECODE, [(request, 3)])
    with pytest.raises(StepError, match="never saw"):
        RequestTable(2).apply(decode)


class TableAgainstThePlanner(RuleBasedStateMachine):
    """Random steps of several requests, with any of them preempted or finished at any time."""

    @initialize(v2=st.booleans(), groups=st.integers(1, 3))
    def start(self, v2: bool, groups: int) -> None:
        self.table, self.planner = RequestTable(3, groups), Planner(3, 60 * groups, v2, groups)
        self.requests: list[Told] = []
        self.arrived = 0

    @rule(length=st.integers(1, 9))
    def arrive(self, length: int) -> None:
        if len(self.requests) < 6:
            self.arrived += 1
            self.requests.append(told(f"r{self.arrived}", length))

    def _apply(self, phase: Phase, work: list[tuple[Told, int]], hit: int = 0) -> None:
        self.table.apply(self.planner.step(phase, work, hit))
        for request, count in work:
            sampled(self.table, request, count)

    @rule(data=st.data())
    def prefill(self, data: st.DataObject) -> None:
        waiting = [r for r in self.requests if r.row is None][: 3 - len(self.planner.rows.owned)]
        chunked = [r for r in self.requests if r.row is not None and r.missing > 1]
        chosen = (
            data.draw(st.lists(st.sampled_from(waiting + chunked), unique=True)) if waiting + chunked else []
        )
        hit = min((len(r.tokens) - 1 for r in chosen), default=0)
        work = [
            (r, data.draw(st.integers(1, r.missing if r.row is not None else len(r.tokens) - hit)))
            for r in chosen
        ]
        self._apply(Phase.PREFILL, work, hit)

    @rule()
    def decode(self) -> None:
        self._apply(Phase.DECODE, [(r, 1) for r in self.requests if r.row is not None and r.missing == 1])

    @precondition(lambda self: self.planner.rows.owned)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.planner.preempt(data.draw(st.sampled_from([r for r in self.requests if r.row is not None])))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        self.planner.finish(request)

    @invariant()
    def all_agree(self) -> None:
        if not (self.planner.finished or self.planner.preempted):  # told with the next plan
            agree(self.table, self.requests)
            assert len(self.table) == sum(request.seen for request in self.requests)


TestTableAgainstThePlanner = TableAgainstThePlanner.TestCase
TestTableAgainstThePlanner.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_what_a_request_needs_of_its_sampler() -> None:
    sampling = SamplingParams(
        temperature=0.5, top_k=9, top_p=0.8, min_p=0.1, presence_penalty=0.2, frequency_penalty=0.3,
        repetition_penalty=1.4, seed=-(2**63), logprobs=3,
    )  # fmt: skip
    params = needs_of(sampling).params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 9, 0.8, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.2, 0.3, 1.4)
    assert (params.seed, params.num_logprobs) == (-(2**63), 3)
    assert needs_of(greedy()).params.num_logprobs == NO_LOGPROBS


@pytest.mark.parametrize(
    ("need", "options"),
    [
        ("grammar", {"structured_outputs": StructuredOutputsParams(regex="a+")}),
        ("logit_bias", {"logit_bias": {3: 1.0}}),
        ("allowed_tokens", {"allowed_token_ids": [3]}),
        ("min_tokens", {"min_tokens": 2}),
        ("stateful_processors", {"extra_args": {"anything": 1}}),
        ("stateful_processors", {"logprob_token_ids": [3]}),
    ],
)
def test_needs_that_edit_logits(need: str, options: dict[str, object]) -> None:
    assert getattr(needs_of(greedy(**options)), need) is True
    assert getattr(needs_of(greedy()), need) is False

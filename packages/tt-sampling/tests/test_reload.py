"""Two small devices that obey commands to the letter, under any sequence of steps."""

import attrs
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tt_sampling import Phase, ReloadCommands, ReloadState, StepFacts, advance

ROWS = 3
STEADY = StepFacts(phase=Phase.DECODE, on_device=True)


@attrs.define
class Request:
    tokens: list[int]
    blocks: list[int]
    params: int


@attrs.define
class Device:
    """What a model may keep between decode calls. An empty dictionary holds nothing: reading it fails."""

    inputs: dict[int, tuple[int, int]] = attrs.Factory(dict)  # row: token, position
    tables: dict[int, list[int]] = attrs.Factory(dict)
    params: dict[int, int] = attrs.Factory(dict)
    history: dict[int, list[int]] = attrs.Factory(dict)

    def forget(self) -> None:
        self.inputs, self.tables, self.params, self.history = {}, {}, {}, {}

    def load_inputs(self, host: dict[int, Request]) -> None:
        self.inputs = {row: (r.tokens[-1], len(r.tokens) - 1) for row, r in host.items()}

    def load_tables(self, host: dict[int, Request]) -> None:
        self.tables = {row: list(r.blocks) for row, r in host.items()}

    def load_params(self, host: dict[int, Request]) -> None:
        self.params = {row: r.params for row, r in host.items()}

    def load_history(self, host: dict[int, Request]) -> None:
        self.history = {row: list(r.tokens) for row, r in host.items()}

    def check_forward(self, host: dict[int, Request]) -> None:
        assert self.inputs == {row: (r.tokens[-1], len(r.tokens) - 1) for row, r in host.items()}
        assert self.tables == {row: r.blocks for row, r in host.items()}

    def check_sampling(self, host: dict[int, Request]) -> None:
        assert self.params == {row: r.params for row, r in host.items()}
        assert self.history == {row: r.tokens for row, r in host.items()}

    def go_on(self, drawn: dict[int, int]) -> None:
        self.inputs = {row: (drawn[row], position + 1) for row, (_, position) in self.inputs.items()}
        for row, token in drawn.items():
            self.history[row].append(token)


class Serving(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.state = ReloadState()
        self.host: dict[int, Request] = {}
        self.preempted: list[Request] = []
        self.serial = 0
        self.rows_changed = self.blocks_changed = self.params_changed = False
        self.new, self.old = Device(), Device()  # of version 1 and version 0

    @initialize(async_supported=st.sampled_from([True, True, False]))
    def load_model(self, async_supported: bool) -> None:
        self.async_supported = async_supported

    def number(self) -> int:
        self.serial += 1
        return self.serial

    def advance(self, facts: StepFacts) -> ReloadCommands | None:
        facts = attrs.evolve(
            facts,
            rows_changed=self.rows_changed,
            blocks_changed=self.blocks_changed,
            params_changed=self.params_changed,
        )
        self.rows_changed = self.blocks_changed = self.params_changed = False
        self.state, commands = advance(self.state, facts)
        return commands

    def prefill(self, on_device: bool) -> None:
        """A prefill may overwrite whatever the device kept for decodes."""
        assert self.advance(StepFacts(phase=Phase.PREFILL, on_device=on_device)) is None
        self.new.forget()
        self.old.forget()

    @precondition(lambda self: len(self.host) < ROWS)
    @rule(on_device=st.booleans())
    def admit(self, on_device: bool) -> None:
        row = min(set(range(ROWS)) - set(self.host))
        resumed = bool(self.preempted)
        request = (
            self.preempted.pop() if resumed else Request([self.number()], [self.number()], self.number())
        )
        self.host[row] = request
        self.rows_changed = True
        self.prefill(on_device)
        request.tokens.append(self.number())

    @rule(on_device=st.booleans())
    def chunk_of_a_waiting_prompt(self, on_device: bool) -> None:
        self.prefill(on_device)

    @precondition(lambda self: self.host)
    @rule(preempt=st.booleans(), at=st.integers(0, ROWS))
    def leave(self, preempt: bool, at: int) -> None:
        request = self.host.pop(sorted(self.host)[at % len(self.host)])
        self.rows_changed = True
        if preempt:
            self.preempted.append(request)

    @precondition(lambda self: self.host)
    @rule(grow=st.booleans(), edit=st.booleans(), at=st.integers(0, ROWS))
    def change_a_row(self, grow: bool, edit: bool, at: int) -> None:
        request = self.host[sorted(self.host)[at % len(self.host)]]
        if grow:
            request.blocks.append(self.number())
            self.blocks_changed = True
        if edit:
            request.params = self.number()
            self.params_changed = True

    @rule()
    def run_nothing(self) -> None:
        assert self.advance(StepFacts(phase=None)) is None

    @precondition(lambda self: self.host)
    @rule()
    def decode_on_the_host(self) -> None:
        commands = self.advance(StepFacts(phase=Phase.DECODE, on_device=False))
        assert commands == ReloadCommands(reload_inputs=True)
        for device in (self.new, self.old):
            device.load_inputs(self.host)
            device.load_tables(self.host)
            device.check_forward(self.host)
            device.forget()
        for request in self.host.values():
            request.tokens.append(self.number())

    @precondition(lambda self: self.host)
    @rule(traced=st.sampled_from([True, True, True, False]), grow=st.booleans())
    def decode_on_the_device(self, traced: bool, grow: bool) -> None:
        if grow:
            self.change_a_row(grow=True, edit=False, at=0)
        quiet = not (self.rows_changed or self.blocks_changed or self.params_changed)
        nothing_new = quiet and self.state == ReloadState(inputs_kept=True, sampling_kept=True)
        facts = StepFacts(Phase.DECODE, on_device=True, traced=traced, async_supported=self.async_supported)
        commands = self.advance(facts)
        assert commands is not None
        keeps = traced and self.async_supported
        assert not (nothing_new and keeps and commands != ReloadCommands())
        self.obey_version_1(commands)
        self.obey_version_0(commands.reset_batch)
        drawn = {row: self.number() for row in self.host}
        for row, request in self.host.items():
            request.tokens.append(drawn[row])
        self.new.go_on(drawn)
        self.old.go_on(drawn)
        if not keeps:
            self.new.inputs, self.new.tables = {}, {}

    def obey_version_1(self, commands: ReloadCommands) -> None:
        assert not (commands.reload_page_table and commands.reload_inputs)
        assert commands.reload_inputs or not commands.reset_sampling_state
        if commands.reload_inputs:
            self.new.load_inputs(self.host)
        if commands.reload_inputs or commands.reload_page_table:
            self.new.load_tables(self.host)
        if commands.reload_sampling_params:
            self.new.load_params(self.host)
        if commands.reset_sampling_state:
            self.new.load_history(self.host)
        self.new.check_forward(self.host)
        self.new.check_sampling(self.host)

    def obey_version_0(self, reset_batch: bool) -> None:
        self.old.load_tables(self.host)
        if reset_batch:
            self.old.load_inputs(self.host)
            self.old.load_params(self.host)
            self.old.load_history(self.host)
        self.old.check_forward(self.host)
        self.old.check_sampling(self.host)


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def after(*facts: StepFacts) -> ReloadCommands | None:
    state, commands = ReloadState(), None
    for step in facts:
        state, commands = advance(state, step)
    return commands


def test_each_line_of_the_table() -> None:
    everything = ReloadCommands(True, False, True, True)
    host = StepFacts(phase=Phase.DECODE, on_device=False)
    assert after(STEADY) == everything
    assert after(STEADY, StepFacts(phase=Phase.PREFILL), STEADY) == everything
    assert after(STEADY, attrs.evolve(STEADY, rows_changed=True)) == everything
    assert after(STEADY, host, STEADY) == everything
    assert after(STEADY, host) == ReloadCommands(reload_inputs=True)
    assert after(STEADY, STEADY) == ReloadCommands()
    assert after(STEADY, attrs.evolve(STEADY, blocks_changed=True)) == ReloadCommands(reload_page_table=True)
    for slow in (attrs.evolve(STEADY, traced=False), attrs.evolve(STEADY, async_supported=False)):
        assert after(slow) == everything
        assert after(slow, slow) == ReloadCommands(reload_inputs=True)
        assert after(slow, STEADY) == ReloadCommands(reload_inputs=True)


def test_rows_that_left_in_a_step_without_a_model_are_remembered() -> None:
    gone = StepFacts(phase=None, rows_changed=True)
    assert after(STEADY, gone, STEADY) == ReloadCommands(True, False, True, True)
    assert after(STEADY, StepFacts(phase=None), STEADY) == ReloadCommands()


def test_only_steady_steps_may_be_queued() -> None:
    assert ReloadCommands().steady
    assert ReloadCommands(reload_page_table=True).steady
    assert not ReloadCommands(reload_inputs=True).steady
    assert not ReloadCommands(reload_sampling_params=True).steady


def test_commands_are_the_keyword_arguments_of_version_1() -> None:
    assert list(attrs.asdict(ReloadCommands())) == [
        "reload_inputs",
        "reload_page_table",
        "reload_sampling_params",
        "reset_sampling_state",
    ]

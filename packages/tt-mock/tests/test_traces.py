"""Traced against a simple model: cells of numbers, which operations add to, and traces of such operations."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule
from tt_mock import Traced, TraceError

CELLS = 3


class Mesh:
    """As a mesh device, as far as Traced asks it."""

    allowed = True

    def set_program_cache_misses_allowed(self, allowed: bool) -> None:
        self.allowed = allowed

    def num_program_cache_entries(self) -> int:
        return 7


class Cells:
    """Values whose only operation adds one cell to another."""

    def __init__(self) -> None:
        self.cells = list(range(CELLS))
        self.real = 0
        self.released: list[int] = []

    def look_up(self, name: str) -> Any:
        return getattr(self, name)

    def add(self, source: int, target: int) -> None:
        self.cells[target] = (self.cells[target] + self.cells[source] + 1) % 1000

    def to_torch(self) -> list[int]:
        return list(self.cells)

    def begin_trace_capture(self, mesh: Mesh, *, cq_id: int) -> int:
        self.real += 1
        return self.real * 10

    def end_trace_capture(self, mesh: Mesh, trace: int, *, cq_id: int) -> None:
        assert trace == self.real * 10

    def release_trace(self, mesh: Mesh, trace: int) -> None:
        self.released.append(trace)

    def held(self) -> list[int]:
        return list(self.cells)

    def restore(self, held: list[int]) -> None:
        self.cells = held

    def repeat(self, old: Any, new: Any) -> None:
        assert old is new is None


cells = st.integers(0, CELLS - 1)


class Machine(RuleBasedStateMachine):
    traces = Bundle("traces")

    def __init__(self) -> None:
        super().__init__()
        self.values, self.mesh = Cells(), Mesh()
        self.traced = Traced(self.values)
        self.expected = Cells()
        self.calls: dict[int, list[tuple[int, int]]] = {}
        self.open: int | None = None
        self.executed = 0

    @rule(source=cells, into=cells)
    def add(self, source: int, into: int) -> None:
        self.traced.add(source, into)
        if self.open is None:
            self.expected.add(source, into)
        else:
            self.calls[self.open].append((source, into))

    @precondition(lambda self: self.open is None)
    @rule()
    def begin(self) -> None:
        self.open = self.traced.begin_trace_capture(self.mesh, cq_id=0)
        self.calls[self.open] = []
        assert not self.mesh.allowed

    @precondition(lambda self: self.open is not None)
    @rule(target=traces)
    def end(self) -> int:
        trace, self.open = self.open, None
        assert trace is not None
        self.traced.end_trace_capture(self.mesh, trace, cq_id=0)
        return trace

    @precondition(lambda self: self.open is None)
    @rule(trace=traces)
    def execute(self, trace: int) -> None:
        self.traced.execute_trace(self.mesh, trace, cq_id=0, blocking=False)
        for source, target in self.calls[trace]:
            self.expected.add(source, target)
        self.executed += 1

    @precondition(lambda self: self.open is None)
    @rule(trace=consumes(traces))
    def release(self, trace: int) -> None:
        self.traced.release_trace(self.mesh, trace)
        for gone in (self.traced.execute_trace, self.traced.release_trace):
            with pytest.raises(TraceError, match=f"{trace} was not captured, or was released"):
                gone(self.mesh, trace)
        assert self.values.released[-1] == trace

    @precondition(lambda self: self.open is not None)
    @rule(trace=traces)
    def break_rules_within(self, trace: int) -> None:
        with pytest.raises(TraceError, match=r"ttnn\.to_torch within a capture"):
            self.traced.to_torch()
        with pytest.raises(TraceError, match="end that one first"):
            self.traced.begin_trace_capture(self.mesh)
        with pytest.raises(TraceError, match="which is not being captured"):
            self.traced.end_trace_capture(self.mesh, trace)
        for call in (self.traced.execute_trace, self.traced.release_trace):
            with pytest.raises(TraceError, match="while another is captured"):
                call(self.mesh, trace)

    @precondition(lambda self: self.open is None)
    @rule()
    def break_rules_outside(self) -> None:
        with pytest.raises(TraceError, match="which is not being captured"):
            self.traced.end_trace_capture(self.mesh, 10)

    @invariant()
    def values_are_as_expected(self) -> None:
        if self.open is None:
            assert self.traced.to_torch() == self.expected.cells
            assert self.mesh.allowed
        assert len(self.traced.executed) == self.executed


TestTraced = Machine.TestCase
TestTraced.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_what_may_harm_a_trace_can_be_counted() -> None:
    traced, mesh = Traced(Cells()), Mesh()
    assert (traced.mesh, traced.programs, traced.traces) == (None, 0, [])
    traced.end_trace_capture(mesh, traced.begin_trace_capture(mesh, cq_id=0), cq_id=0)
    assert (traced.mesh, traced.programs, traced.traces) == (mesh, 7, [10])

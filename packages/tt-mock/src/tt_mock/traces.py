"""Traces on mock devices, where an operation within a capture ends the process, and so does a replay."""

from typing import Any, Protocol

from tt_mock.errors import TraceError

NOT_IN_A_TRACE = (
    "copy_device_to_host_tensor",
    "copy_host_to_device_tensor",
    "event_synchronize",
    "from_device",
    "from_torch",
    "record_event",
    "synchronize_device",
    "to_device",
    "to_torch",
    "wait_for_event",
)
"""ttnn 0.81 supports no reads, writes or waits within a capture; its libraries hold these words:
"Writes are not supported during trace capture." and the like for reads, blocking and events."""


class Values(Protocol):
    """Stands where the module ttnn stands, and holds the values of tensors: `ttnn_shadows.Shadows` does."""

    def look_up(self, name: str) -> Any:
        """What ttnn has under `name`, dots included, with values beside it; a Part for a module."""

    def held(self) -> Any:
        """A copy of all values."""

    def restore(self, held: Any) -> None: ...

    def repeat(self, old: Any, new: Any) -> None:
        """Give what a call returned, `old`, the values of what it returned this time."""


class Part:
    """A module within a stand-in: its names are looked up in the whole, with their dots."""

    def __init__(self, whole: Any, name: str) -> None:
        self._whole, self._name = whole, name

    def __getattr__(self, name: str) -> Any:
        return self._whole.look_up(f"{self._name}.{name}")


class Traced:
    """Stands where the module stands, and holds the rules of traces.

    Between begin and end no program may be compiled, nothing may be read, written or made on the host, and
    nothing is computed: calls are recorded. Executing a trace makes them again, on the same tensors. ttnn
    itself captures an empty trace each time, so its own checks of traces run; and it raises for a program
    that a capture or replay would have to compile. Raises TraceError for what breaks another rule.
    """

    def __init__(self, values: Values) -> None:
        self.values = values
        self.traces: list[Any] = []
        """What ttnn named each capture, in their order."""
        self.executed: list[int] = []
        """The replays so far, each by its place in `traces`."""
        self.mesh: Any = None
        """Where a trace was last captured."""
        self.programs = 0
        """How many it had then; those compiled since may harm the trace."""
        self._calls: dict[int, list[Any]] = {}
        self._recording: list[Any] | None = None
        self._before: Any = None

    def __getattr__(self, name: str) -> Any:
        return self.look_up(name)

    def look_up(self, name: str) -> Any:
        found = self.values.look_up(name)
        if isinstance(found, Part):
            return Part(self, name)
        if isinstance(found, type) or not callable(found):
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            if self._recording is not None and name in NOT_IN_A_TRACE:
                raise TraceError(f"ttnn.{name} within a capture: capture only what runs on the devices alone")
            out = found(*arguments, **options)
            if self._recording is not None:
                self._recording.append((found, arguments, options, out))
            return out

        return call

    def begin_trace_capture(self, mesh: Any, *, cq_id: Any = None) -> Any:
        if self._recording is not None:
            raise TraceError("begin_trace_capture within a capture: end that one first")
        trace = self.values.look_up("begin_trace_capture")(mesh, cq_id=cq_id)
        self.values.look_up("end_trace_capture")(mesh, trace, cq_id=cq_id)
        mesh.set_program_cache_misses_allowed(False)
        self.traces.append(trace)
        self._recording, self._before = [], self.values.held()
        return trace

    def end_trace_capture(self, mesh: Any, trace: Any, *, cq_id: Any = None) -> None:
        if self._recording is None or trace != self.traces[-1]:
            raise TraceError(f"end_trace_capture of {trace}, which is not being captured")
        mesh.set_program_cache_misses_allowed(True)
        self._calls[len(self.traces) - 1], self._recording = self._recording, None
        self.mesh, self.programs = mesh, mesh.num_program_cache_entries()
        self.values.restore(self._before)

    def execute_trace(self, mesh: Any, trace: Any, *, cq_id: Any = None, blocking: bool = True) -> None:
        place = self._captured(trace)
        mesh.set_program_cache_misses_allowed(False)
        try:
            for call, arguments, options, out in self._calls[place]:
                self.values.repeat(out, call(*arguments, **options))
        finally:
            mesh.set_program_cache_misses_allowed(True)
        self.executed.append(place)

    def release_trace(self, mesh: Any, trace: Any) -> None:
        del self._calls[self._captured(trace)]
        self.values.look_up("release_trace")(mesh, trace)

    def _captured(self, trace: Any) -> int:
        if self._recording is not None:
            raise TraceError("a trace cannot be executed or released while another is captured")
        place = self.traces.index(trace) if trace in self.traces else -1
        if place not in self._calls:
            raise TraceError(f"{trace} was not captured, or was released")
        return place

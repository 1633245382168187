"""Decodes that the device was given and the host has not read yet: read in order, each exactly once.

vLLM's async scheduling plans step N + 1 before it asks for the tokens of step N. In a steady decode the
device goes on from tokens that it keeps itself, so the host may submit N + 1 without having read N. Then two
steps are under way: one that the device computes, and one that waits in its queue.

All of it happens on the one thread that runs the steps. vLLM's executor in this process asks for outputs
there; with an executor that would ask on a thread of its own, the platform switches async scheduling off.
"""

from collections import deque
from collections.abc import Callable

import attrs
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_tt_plugin.batch import Decoding
from vllm_tt_plugin.step_data import DecodeHandle


@attrs.define(eq=False)
class PendingDecode(AsyncModelRunnerOutput):
    """One decode under way; vLLM asks for its output when it comes to need it."""

    handle: DecodeHandle
    decoding: Decoding
    _finish: Callable[["PendingDecode"], None]
    output: ModelRunnerOutput | None = None

    def get_kv_connector_output(self) -> None:
        """Connectors are refused at start-up."""

    def get_output(self) -> ModelRunnerOutput:
        if self.output is None:
            self._finish(self)
        assert self.output is not None, "a finished step has an output"
        return self.output


@attrs.define
class PendingDecodes:
    """The only owner of what is under way. ``read`` waits for a step and applies its tokens."""

    read: Callable[[DecodeHandle, Decoding], ModelRunnerOutput]
    _queue: deque[PendingDecode] = attrs.field(factory=deque, init=False)

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, handle: DecodeHandle, decoding: Decoding) -> PendingDecode:
        step = PendingDecode(handle, decoding, self._finish_through)
        self._queue.append(step)
        return step

    def drain(self) -> None:
        """Finish all that is under way: afterwards every request knows all its tokens."""
        while self._queue:
            self._finish_oldest()

    def _finish_through(self, step: PendingDecode) -> None:
        while step.output is None:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        step = self._queue[0]
        step.output = self.read(step.handle, step.decoding)
        # Only now: whoever finds the queue empty must find the tokens applied.
        self._queue.popleft()

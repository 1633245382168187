"""Steps under way are read in order, once each, and leave the queue only when their tokens are applied."""

from typing import Any

import attrs
import pytest
from vllm.v1.outputs import ModelRunnerOutput
from vllm_tt_plugin.batch import Decoding
from vllm_tt_plugin.pending import PendingDecodes
from vllm_tt_plugin.step_data import DecodeHandle


@attrs.define
class Reader:
    """Reads handles by name. Looks at the queue meanwhile, and may fail."""

    pending: Any = None
    read: list[str] = attrs.field(factory=list)
    left: list[int] = attrs.field(factory=list)
    fails: bool = False

    def __call__(self, handle: DecodeHandle, decoding: Decoding) -> ModelRunnerOutput:
        if self.fails:
            raise RuntimeError("the device is gone")
        self.left.append(len(self.pending))
        self.read.append(handle.out)
        return ModelRunnerOutput(req_ids=[handle.out], req_id_to_index={handle.out: 0})


def rig() -> tuple[PendingDecodes, Reader]:
    reader = Reader()
    reader.pending = PendingDecodes(reader)
    return reader.pending, reader


def added(pending: PendingDecodes, *names: str) -> list[Any]:
    return [pending.add(DecodeHandle(name, (), None), Decoding.of([])) for name in names]


def test_whoever_asks_for_a_later_step_reads_the_earlier_ones_first() -> None:
    pending, reader = rig()
    first, second, third = added(pending, "a", "b", "c")
    assert second.get_output().req_ids == ["b"]
    assert (reader.read, len(pending)) == (["a", "b"], 1)
    assert first.get_output().req_ids == ["a"]
    pending.drain()
    assert third.get_output().req_ids == ["c"]
    assert reader.read == ["a", "b", "c"], "each once"


def test_a_step_stands_in_the_queue_until_its_tokens_are_applied() -> None:
    pending, reader = rig()
    added(pending, "a", "b")
    pending.drain()
    assert (reader.left, len(pending)) == ([2, 1], 0)


def test_a_step_that_could_not_be_read_is_not_taken_for_read() -> None:
    pending, reader = rig()
    (step,) = added(pending, "a")
    reader.fails = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="device is gone"):
            step.get_output()
    assert len(pending) == 1

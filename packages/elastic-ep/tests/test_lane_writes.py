"""Writes cover what is used, stay in their slot, and were all made ready."""

from elastic_ep import Flag, LaneShape
from elastic_ep.lane_writes import Writes, lengths
from hypothesis import given
from hypothesis import strategies as st

ROW, HEAD = 24, 72
"""Bytes."""


@given(tokens=st.integers(1, 100), top=st.integers(1, 8), ranks=st.integers(1, 6), data=st.data())
def test_any_number_of_rows(tokens: int, top: int, ranks: int, data: st.DataObject) -> None:
    shape = LaneShape(max_ranks=ranks, slots=3, tokens=tokens, top=top, hidden=6)
    here, there = (data.draw(st.integers(0, ranks - 1), label=name) for name in ("here", "there"))
    used = data.draw(st.integers(0, shape.rows), label="used")
    slot = ROW * shape.rows
    writes = Writes(here, shape, HEAD, slot)
    (head, *rows), arrived = writes.dispatch(there, used, 7)
    back, returned = writes.give_back(there, used, 8)
    assert (arrived, returned) == (Flag("lane.arrived", here, 7), Flag("lane.returned", here, 8))
    assert (head.local_offset, head.remote_offset, head.size) == (there * HEAD, here * HEAD, HEAD)
    for spans in (rows, back):
        assert len(spans) == (used > 0)
        for span in spans:
            assert (span.local_offset, span.remote_offset) == (there * slot, here * slot)
            assert used <= span.size / ROW <= min(shape.rows, 1.5 * used)
    ready = list(writes.every(there))
    assert len(ready) == 2 * len(lengths(shape.rows))
    for write in (writes.dispatch(there, used, 0), writes.give_back(there, used, 0)):
        assert write in ready


def test_lengths_are_few() -> None:
    assert lengths(1) == [0, 1]
    assert lengths(20) == [0, 1, 2, 3, 4, 6, 8, 12, 16, 20]
    assert len(lengths(1 << 20)) == 41

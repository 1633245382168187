"""Checks of traces through the real ttnn on a mock N150, in a process of their own.

Not executed here: commands of a trace. A mock device has no memory for them, so a stand-in holds the rules of
captures, runs the captured calls again at each replay, and torch computes what they give.
"""

import sys
import traceback
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import ttnn
from elastic_ep import RunnerError, Shape, place, resize, tables
from elastic_ep.runner_ttnn import TraceRunner, write
from elastic_ep.testing.toy import ToyConfig
from elastic_ep.testing.toy_ttnn import TtnnExperts
from tt_mock import Traced, TraceError
from tt_mock.ttnn_shadows import Shadows

SHAPE = Shape(layers=1, experts=32, slots=32, max_ranks=4)


def double(static: Mapping[str, Any]) -> None:
    stand_in = sys.modules["ttnn"]
    stand_in.copy(stand_in.add(static["x"], static["x"]), static["twice"])


class Checks:
    """Methods are checks; each gets stand-ins of its own, and a captured program over two tensors."""

    def __init__(self, mesh: Any) -> None:
        self.mesh, self.shadows = mesh, Shadows(mesh)
        self.traced = sys.modules["ttnn"] = Traced(self.shadows)  # type: ignore[assignment]
        self.static = {name: self.zeros() for name in ("x", "twice")}
        self.runner = TraceRunner()
        self.runner.capture(double, self.static)

    def zeros(self, device: bool = True) -> Any:
        place = {"device": self.mesh} if device else {}
        return self.traced.from_torch(
            torch.zeros(1, 1, 32, 32), dtype=ttnn.float32, layout=ttnn.TILE_LAYOUT, **place
        )

    def value(self, name: str) -> torch.Tensor:
        return self.shadows.of(self.static[name])[0]

    def check_one_capture_outlives_changes_of_contents(self) -> None:
        before, placement = self.runner.fingerprint(), place(SHAPE, (0, 1))
        for turn in range(10):
            placement = resize(placement, (0, 1, 3) if turn % 2 == 0 else (1, 2)).after
            slots = torch.nn.functional.pad(tables(placement).slots.float(), (0, 28))[None]
            write(self.static["x"], slots)
            self.runner.check()
            self.runner.replay()
            assert torch.equal(self.value("twice"), 2 * slots)
        assert self.runner.fingerprint() == before
        assert before.captures == 1
        assert self.traced.executed == [0] * 10
        addresses = {name: address.pointer for name, address in before.addresses}
        assert addresses == {name: tensor.buffer_address() for name, tensor in self.static.items()}
        assert len(set(addresses.values())) == 2

    def check_tensors_that_moved_or_were_freed_are_named(self) -> None:
        kept = self.static["x"]
        self.static["x"] = self.zeros()
        with pytest.raises(RunnerError, match="moved since capture: x from"):
            self.runner.check()
        self.static["x"] = kept
        self.runner.check()
        ttnn.deallocate(kept)
        with pytest.raises(RunnerError, match=r"x from .*nowhere"):
            self.runner.check()

    def check_a_new_capture_takes_the_place_of_the_old(self) -> None:
        self.runner.capture(double, self.static)
        first, second = self.traced.traces
        self.runner.replay()
        assert self.traced.executed == [1]
        with pytest.raises(TraceError, match="was released"):
            self.traced.execute_trace(self.mesh, first, cq_id=0)
        self.runner.release()
        with pytest.raises(TraceError, match="was released"):
            self.traced.execute_trace(self.mesh, second, cq_id=0)
        for call in (self.runner.replay, self.runner.check):
            with pytest.raises(RunnerError, match="call capture first"):
                call()

    def check_the_host_may_not_write_within_a_capture_which_is_ended(self) -> None:
        def writes(static: Mapping[str, Any]) -> None:
            write(static["x"], torch.ones(1, 1, 32, 32))

        with pytest.raises(TraceError, match="within a capture"):
            self.runner.capture(writes, self.static)
        self.runner.capture(double, self.static)
        self.runner.replay()

    def check_traces_serve_what_slots_are_filled_with(self) -> None:
        config = ToyConfig(Shape(layers=2, experts=3, slots=3, max_ranks=2), tokens=2, hidden=8)
        host = torch.full((2, 3, 8, 8), torch.nan)  # what is in other slots does not matter
        experts = TtnnExperts(config, host, self.mesh)
        experts.capture()
        for turn in range(6):
            layer, slot = turn % 2, turn % 3
            host[layer, slot] = torch.randn(8, 8)
            experts.fill(layer, slot)
            experts.check()
            rows, slots = torch.randn(12, 8), torch.tensor([-1, slot, -1, *[slot] * 9])
            results = experts.run(layer, rows, slots)[slots == slot]
            expected = (rows @ host[layer, slot]).tanh()[slots == slot]
            torch.testing.assert_close(results, expected)

    def check_tensors_elsewhere_and_other_shapes_are_refused(self) -> None:
        for stranger in (torch.zeros(1), self.zeros(device=False)):
            with pytest.raises(RunnerError, match="'x': 'the host'"):
                TraceRunner().capture(double, self.static | {"x": stranger})
        with pytest.raises(RunnerError, match="shapes are fixed"):
            write(self.static["x"], torch.zeros(32, 32))


NAMES = [name for name in dir(Checks) if name.startswith("check_")]


def outcomes() -> dict[str, str]:
    """Of each check how it failed, or nothing."""
    found = {}
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, 1), trace_region_size=1 << 20)
    for name in NAMES:
        try:
            getattr(Checks(mesh), name)()
            found[name] = ""
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 (told to the test, which fails)
            found[name] = traceback.format_exc()
    return found

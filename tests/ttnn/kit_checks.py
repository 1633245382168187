"""Checks of tt_mock's stand-ins on a mock cluster: values, and the rules of traces that ttnn itself holds."""

from typing import Any

import pytest
import torch
import ttnn
from tt_mock import Traced, TraceError, ValuesError
from tt_mock.ttnn_shadows import Shadows


class Checks:
    """Methods are checks; each gets stand-ins of its own."""

    def __init__(self, mesh: Any) -> None:
        self.mesh, self.shadows = mesh, Shadows(mesh)
        self.traced = Traced(self.shadows)
        self.devices = mesh.get_num_devices()

    def put(self, value: torch.Tensor, mapper: Any = None) -> Any:
        return self.traced.from_torch(
            value, dtype=ttnn.float32, layout=ttnn.TILE_LAYOUT, device=self.mesh, mesh_mapper=mapper
        )

    def check_mappers_and_composers_are_known(self) -> None:
        whole = torch.arange(32 * 32 * self.devices).reshape(1, 1, 32, -1).float()
        split = self.put(whole, self.traced.ShardTensorToMesh(self.mesh, dim=3))
        join = self.traced.ConcatMeshToTensor(self.mesh, dim=3)
        assert torch.equal(self.traced.to_torch(self.traced.exp(split), mesh_composer=join), whole.exp())
        copies = self.put(whole, self.traced.ReplicateTensorToMesh(self.mesh))
        assert all(torch.equal(part, whole) for part in self.shadows.of(copies))
        assert [
            torch.equal(self.traced.to_torch(part), whole) for part in self.traced.get_device_tensors(copies)
        ]
        with pytest.raises(ValuesError, match="mesh_mapper"):
            self.put(whole, ttnn.ShardTensorToMesh(self.mesh, dim=3))

    def check_a_value_that_nobody_computed_is_named(self) -> None:
        tensor = self.put(torch.ones(1, 1, 32, 32))
        with pytest.raises(ValuesError, match="its maker is not known"):
            self.shadows.of(ttnn.exp(tensor))
        known = Shadows(self.mesh, {"exp": lambda tensor, **_: tensor * 7})
        known.store(tensor, [torch.ones(32, 32)] * self.devices)
        assert bool((known.of(known.exp(tensor))[-1] == 7).all())

    def check_a_trace_repeats_its_calls_on_the_same_tensors(self) -> None:
        source, ones = self.put(torch.ones(1, 1, 32, 32)), self.put(torch.ones(1, 1, 32, 32))
        self.traced.add(source, ones)
        trace = self.traced.begin_trace_capture(self.mesh, cq_id=0)
        out = self.traced.add(source, ones)
        with pytest.raises(TraceError, match=r"ttnn.to_torch within a capture"):
            self.traced.to_torch(out)
        with pytest.raises(RuntimeError, match="program cache"):
            self.traced.tanh(source)
        self.traced.end_trace_capture(self.mesh, trace, cq_id=0)
        with pytest.raises(ValuesError):
            self.shadows.of(out)
        self.traced.copy(self.put(torch.full((1, 1, 32, 32), 4.0)), source)
        self.traced.execute_trace(self.mesh, trace, cq_id=0, blocking=False)
        assert bool((self.shadows.of(out)[-1] == 5).all())
        self.traced.release_trace(self.mesh, trace)
        with pytest.raises(TraceError, match="was released"):
            self.traced.execute_trace(self.mesh, trace, cq_id=0, blocking=False)

    def check_a_device_waits_for_a_real_event_alone(self) -> None:
        self.traced.wait_for_event(0, self.traced.record_event(self.mesh, 0))
        with pytest.raises(TypeError):
            self.traced.wait_for_event(0, 3)
